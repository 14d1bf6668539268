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
    vf most = (vf){} - INFINITY, more = most;
    long whole = size / LANES * LANES, i = 0, at = 0;
    for (; i + LANES < whole; i += 2 * LANES) { /* two by turns, which need not wait */
        vf each = load(logits, i, F32), next = load(logits, i + LANES, F32);
        most = pick(each > most, each, most);
        more = pick(next > more, next, more);
    }
    for (; i < whole; i += LANES) {
        vf each = load(logits, i, F32);
        most = pick(each > most, each, most);
    }
    most = pick(more > most, more, most);
    float top = -INFINITY;
    for (i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (i = whole; i < size; i++) top = logits[i] > top ? logits[i] : top;
    for (; at + PART <= size; at += PART) { /* past the parts without it */
        vi found = {};
        for (i = 0; i < PART; i += LANES) found |= load(logits, at + i, F32) == top;
        if (sum_of((vf)(found & (vi)all(1.0f))) > 0) break;
    }
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

/* A row of logits as float32: itself, or widened into ``space`` [size]. */
INLINE const float *widened(const void *logits, long row, long size, int type, float *space) {
    if (type == F32) return (const float *)logits + row * size;
    copy(logits, BF16, row * size, size, space, 0, F32);
    return space;
}

/* For logits [num, size] / temperature: log-probs [num] of targets [num], entropies [num] in nats
 * and log sums of exp [num]. NaN where a row holds NaN, +inf or nothing but -inf. ``space`` is
 * [num_threads, size]. */
void score_tokens(const void *logits, long type, long num, long size, float temperature,
                  const int64_t *targets, long num_threads, float *space, float *logprobs,
                  float *entropies, float *normalisers) {
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic, 1)
    for (long row = 0; row < num; row++) {
        const float *of =
            widened(logits, row, size, (int)type, space + omp_get_thread_num() * size);
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

/* d / dz of a log-prob times ``of_logprob`` and of the entropy times ``of_entropy``, z = logits /
 * temperature: (v = target) - p_v, and -p_v (log p_v + entropy). */
INLINE vf slope_of(vf logit, float temperature, float normaliser, float entropy, float of_logprob,
                   float of_entropy) {
    vf logprob = logit / temperature - normaliser, share = exp_of(logprob);
    if (of_entropy == 0) return share * -of_logprob / temperature;
    vf extra = pick(share == 0, (vf){}, (logprob + entropy) * of_entropy);
    return -share * (extra + of_logprob) / temperature;
}

/* ``out`` [num, size], of the logits' type: their gradient, from those [num] of what
 * ``score_tokens`` returned. */
void score_back(const void *logits, long type, long num, long size, float temperature,
                const int64_t *targets, const float *normalisers, const float *entropies,
                const float *of_logprobs, const float *of_entropies, long num_threads, void *out) {
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long row = 0; row < num; row++) {
        const float of_logprob = of_logprobs[row], of_entropy = of_entropies[row];
        long i = row * size;
        for (; i + LANES <= (row + 1) * size; i += LANES)
            store(out, i, slope_of(load(logits, i, (int)type), temperature, normalisers[row],
                                   entropies[row], of_logprob, of_entropy), (int)type);
        for (; i < (row + 1) * size; i++)
            store_one(out, i, slope_of(all(load_one(logits, i, (int)type)), temperature,
                                       normalisers[row], entropies[row], of_logprob,
                                       of_entropy)[0], (int)type);
        i = row * size + targets[row];
        vf chosen = all(load_one(logits, i, (int)type));
        float slope = slope_of(chosen, temperature, normalisers[row], entropies[row], of_logprob,
                               of_entropy)[0];
        store_one(out, i, slope + of_logprob / temperature, (int)type);
    }
}
