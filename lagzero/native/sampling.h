/* Draw a token a row from logits, one uniform number each, in two passes over a row in cache; and
 * score tokens that were drawn, whose log-probs are the same bits. */
#pragma once
#include "vectors.h"

#define PART 256 /* tokens of the vocabulary that are summed before the search */

/* A function ``as`` compiled for each type that logits lie in memory as. */
#define BY_TYPE(AS, ...) return type == F32 ? AS(__VA_ARGS__, F32) : AS(__VA_ARGS__, BF16)

/* exp((logits - top) * factor) of up to PART tokens; returns their sum. */
INLINE double weigh_part_as(const void *logits, long at, long num, float top, float factor,
                            float *out, int type) {
    vf total = {};
    double rest = 0;
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        vf each = exp_of((load(logits, at + i, type) - top) * factor);
        *(vf_any *)(out + i) = each;
        total += each;
    }
    for (; i < num; i++)
        rest += out[i] = exp_of(all((load_one(logits, at + i, type) - top) * factor))[0];
    return rest + sum_of(total);
}

ONCE static double weigh_part(const void *logits, long at, long num, float top, float factor,
                              float *out, int type) {
    BY_TYPE(weigh_part_as, logits, at, num, top, factor, out);
}

/* Sum of weights times (logits - top), where a weight of 0 counts nothing: -inf times 0 is NaN. */
static double moment_of_part(const void *logits, long at, const float *weights, long num, float top,
                             int type) {
    vf total = {};
    double rest = 0;
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        vf weight = *(const vf_any *)(weights + i);
        vf each = weight * (load(logits, at + i, type) - top);
        total += pick(weight == 0, (vf){}, each);
    }
    for (; i < num; i++)
        rest += weights[i] == 0 ? 0 : weights[i] * (load_one(logits, at + i, type) - top);
    return rest + sum_of(total);
}

ONCE static float logprob_of(float logit, float top, float temperature, double total) {
    float logprob = (float)((double)(logit - top) / temperature - log(total));
    return logprob > 0 ? 0 : logprob;
}

INLINE float largest_as(const void *logits, long at, long size, int type) {
    vf most = all(-INFINITY), more = most;
    long i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) { /* two by turns, which need not wait */
        most = larger(load(logits, at + i, type), most);
        more = larger(load(logits, at + i + LANES, type), more);
    }
    most = larger(most, more);
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
    for (; i < size; i++) {
        const float each = load_one(logits, at + i, type);
        top = each > top ? each : top;
    }
    return top;
}

/* The largest of a row that is no NaN. */
static float largest_of(const void *logits, long at, long size, int type) {
    BY_TYPE(largest_as, logits, at, size);
}

/* The first token whose cumulative weight exceeds ``uniform`` of all; none of weight 0. */
static long search(const void *logits, long at, long size, int type, float top, float factor,
                   double uniform, const double *parts, double total) {
    long num = (size + PART - 1) / PART, part = 0;
    double point = uniform * total, before = 0;
    while (part < num - 1 && before + parts[part] <= point) before += parts[part++];
    while (part > 0 && parts[part] == 0) before -= parts[--part]; /* rounding went past the end */
    float weights[PART];
    long first = part * PART, width = size - first < PART ? size - first : PART, last = 0;
    weigh_part(logits, at + first, width, top, factor, weights, type);
    for (long i = 0; i < width; i++) {
        if (weights[i] > 0) last = i;
        before += weights[i];
        if (before > point && weights[i] > 0) break;
    }
    return first + last;
}

/* ids [num] and log-probs [num] of logits [num, size]; the likeliest token where temperature is 0.
 * An id of -1 says that a row holds NaN, +inf or nothing but -inf. */
void draw(const void *logits, long type, long num, long size, const float *temperatures,
          const double *uniforms, long num_threads, int64_t *ids, float *logprobs) {
    const int as = (int)type;
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic, 1)
    for (long row = 0; row < num; row++) {
        const long at = row * size;
        const float temperature = temperatures[row] > 0 ? temperatures[row] : 1;
        const float top = largest_of(logits, at, size, as), factor = 1 / temperature;
        float spare[PART];
        double parts[(size + PART - 1) / PART], total = 0;
        long id = 0;
        ids[row] = -1;
        if (isinf(top)) continue;
        for (long first = 0; first < size; first += PART) {
            long width = size - first < PART ? size - first : PART;
            total += parts[first / PART] =
                weigh_part(logits, at + first, width, top, factor, spare, as);
        }
        if (!(total > 0)) continue;
        if (temperatures[row] > 0)
            id = search(logits, at, size, as, top, factor, uniforms[row], parts, total);
        else
            while (load_one(logits, at + id, as) != top) id++;
        logprobs[row] = logprob_of(load_one(logits, at + id, as), top, temperature, total);
        ids[row] = id;
    }
}

/* For logits [num, size] / temperature: log-probs [num] of targets [num], entropies [num] in nats
 * and log sums of exp [num]. NaN where a row holds NaN, +inf or nothing but -inf. */
void score_tokens(const void *logits, long type, long num, long size, float temperature,
                  const int64_t *targets, long num_threads, float *logprobs, float *entropies,
                  float *normalisers) {
    const int as = (int)type;
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic, 1)
    for (long row = 0; row < num; row++) {
        const long at = row * size;
        const float top = largest_of(logits, at, size, as), factor = 1 / temperature;
        const float chosen = load_one(logits, at + targets[row], as);
        float weights[PART];
        double total = 0, moment = 0; /* of weight times scaled logit, below the top */
        for (long first = 0; first < size; first += PART) {
            long width = size - first < PART ? size - first : PART;
            total += weigh_part(logits, at + first, width, top, factor, weights, as);
            moment += moment_of_part(logits, at + first, weights, width, top, as);
        }
        logprobs[row] = logprob_of(chosen, top, temperature, total);
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
