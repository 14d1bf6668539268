/* Draw a token a row from logits, one uniform number each, in two passes over a row in cache; and
 * score tokens that were drawn, whose log-probs are the same bits. */
#pragma once
#include "vectors.h"

#define PART 256 /* tokens of the vocabulary that are summed before the search */

/* exp((logits - top) / temperature) of up to PART tokens; returns their sum. */
ONCE static double weigh_part(const float *logits, long num, float top, float temperature,
                              float *out) {
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

/* Sum of weights times (logits - top), where a weight of 0 counts nothing: -inf times 0 is NaN. */
static double moment_of_part(const float *logits, const float *weights, long num, float top) {
    vf total = {};
    double rest = 0;
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        vf weight = *(const vf_any *)(weights + i);
        vf each = weight * (*(const vf_any *)(logits + i) - top);
        total += pick(weight == 0, (vf){}, each);
    }
    for (; i < num; i++) rest += weights[i] == 0 ? 0 : weights[i] * (logits[i] - top);
    return rest + sum_of(total);
}

ONCE static float logprob_of(float logit, float top, float temperature, double total) {
    float logprob = (float)((double)(logit - top) / temperature - log(total));
    return logprob > 0 ? 0 : logprob;
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
        logprobs[row] = logprob_of(of[id], top, temperature, total);
        ids[row] = id;
    }
}

/* For logits [num, size] / temperature: log-probs [num] of targets [num], entropies [num] in nats
 * and log sums of exp [num]. NaN where a row holds NaN, +inf or nothing but -inf. */
void score_tokens(const float *logits, long num, long size, float temperature,
                  const int64_t *targets, long num_threads, float *logprobs, float *entropies,
                  float *normalisers) {
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic, 1)
    for (long row = 0; row < num; row++) {
        const float *of = logits + row * size;
        float weights[PART];
        long id = place_of_top(of, size);
        float top = id < size ? of[id] : NAN;
        double total = 0, moment = 0; /* of weight times scaled logit, below the top */
        for (long first = 0; first < size; first += PART) {
            long width = size - first < PART ? size - first : PART;
            total += weigh_part(of + first, width, top, temperature, weights);
            moment += moment_of_part(of + first, weights, width, top);
        }
        logprobs[row] = logprob_of(of[targets[row]], top, temperature, total);
        entropies[row] = (float)(log(total) - moment / (total * temperature));
        normalisers[row] = (float)((double)top / temperature + log(total));
    }
}
