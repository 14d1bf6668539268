/* Draw a token a row from logits, one uniform number each, in two passes over a row in cache. */
#pragma once
#include "vectors.h"

#define PART 256 /* tokens of the vocabulary that are summed before the search */

/* exp((logits - top) / temperature) of up to PART tokens; returns their sum. */
static double weigh_part(const float *logits, long num, float top, float temperature, float *out) {
    vf total = {};
    double rest = 0;
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        vf each = exp_of((*(const vf_any *)(logits + i) - top) / temperature);
        *(vf_any *)(out + i) = each;
        total += each;
    }
    for (; i < num; i++) rest += out[i] = exp_of((vf){} + (logits[i] - top) / temperature)[0];
    return rest + sum_of(total);
}

static long place_of_top(const float *logits, long size) {
    vf most = (vf){} - INFINITY;
    long whole = size / LANES * LANES, at = 0;
    for (long i = 0; i < whole; i += LANES) {
        vf each = *(const vf_any *)(logits + i);
        most = pick(each > most, each, most);
    }
    float top = -INFINITY;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (long i = whole; i < size; i++) top = logits[i] > top ? logits[i] : top;
    while (at < size && logits[at] != top) at++;
    return at;
}

/* The first token whose cumulative weight exceeds ``uniform`` of all; none of weight 0. */
static long search(const float *logits, long size, float top, float temperature, double uniform,
                   const double *parts, double total) {
    long num = (size + PART - 1) / PART, part = 0;
    double point = uniform * total, before = 0;
    while (part < num - 1 && before + parts[part] <= point) before += parts[part++];
    while (part > 0 && parts[part] == 0) before -= parts[--part]; /* rounding went past the end */
    float weights[PART];
    long first = part * PART, width = size - first < PART ? size - first : PART, last = 0;
    weigh_part(logits + first, width, top, temperature, weights);
    for (long i = 0; i < width; i++) {
        if (weights[i] > 0) last = i;
        before += weights[i];
        if (before > point && weights[i] > 0) break;
    }
    return first + last;
}

/* ids [num] and log-probs [num] of logits [num, size]; the likeliest token where temperature is 0.
 * An id of -1 says that a row holds NaN, +inf or nothing but -inf. */
void draw(const float *logits, long num, long size, const float *temperatures,
          const double *uniforms, long num_threads, int64_t *ids, float *logprobs) {
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic, 1)
    for (long row = 0; row < num; row++) {
        const float *of = logits + row * size;
        float temperature = temperatures[row] > 0 ? temperatures[row] : 1, spare[PART];
        double parts[(size + PART - 1) / PART], total = 0;
        long id = place_of_top(of, size);
        ids[row] = -1;
        if (id == size || isinf(of[id])) continue;
        float top = of[id];
        for (long first = 0; first < size; first += PART) {
            long width = size - first < PART ? size - first : PART;
            total += parts[first / PART] = weigh_part(of + first, width, top, temperature, spare);
        }
        if (!(total > 0)) continue;
        if (temperatures[row] > 0)
            id = search(of, size, top, temperature, uniforms[row], parts, total);
        float logprob = (float)((double)(of[id] - top) / temperature - log(total));
        logprobs[row] = logprob < 0 ? logprob : 0;
        ids[row] = id;
    }
}
