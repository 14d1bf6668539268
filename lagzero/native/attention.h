/* Attention of each token to the pages of its sequence.
 *
 * A query's scores are dot products, each a sum in one order, and its result one sum over its keys
 * in their order: which queries meet a block of keys together, and where it ends, changes no bit. */
#pragma once
#include "model.h"

#define SLICE 64 /* of a head's size that is summed at once */
#define KEYS 32  /* of a block, which stays in the first cache while some queries meet it */
#define RUN 4    /* tokens of a sequence that meet a block together, each with several heads */

/* Write a key or value [E] as integers to the page that begins at ``start`` of an INT16 cache. */
static void keep(const Model *of, const float *x, void *cache, long start, long token) {
    int16_t *page = (int16_t *)cache + start;
    float step;
    quantise(x, of->head_size, F32, page + token * of->head_size, &step);
    memcpy(page + step_place(of, token), &step, sizeof step);
}

/* Where keys, and values, of tokens first to last begin, which lie in the pages of ``table``; and
 * the steps of an INT16 cache. */
INLINE void find(const Model *of, const Layer *layer, int type, const int64_t *table, long head,
                 long first, long last, int64_t *places, float *key_steps, float *value_steps) {
    const long E = of->head_size, P = of->page_size;
    for (long at = first; at <= last;) {
        long end = (at / P + 1) * P <= last ? (at / P + 1) * P : last + 1;
        long start = (table[at / P] * of->kv_heads + head) * page_numbers(of);
        if (type == INT16) {
            const long from = start + step_place(of, at % P), size = (end - at) * sizeof(float);
            memcpy(key_steps + at - first, (const int16_t *)layer->keys + from, size);
            memcpy(value_steps + at - first, (const int16_t *)layer->values + from, size);
        }
        for (long place = start + at % P * E; at < end; at++, place += E) *places++ = place;
    }
}

/* scale times query . key for each of num keys. */
INLINE void score(const void *keys, int type, const int64_t *places, long num, long size,
                  float scale, const float *query, float *shares) {
    long at = 0;
    for (; at + 8 <= num; at += 8, places += 8) {
        vf a = {}, b = {}, c = {}, d = {}, e = {}, f = {}, g = {}, h = {};
        for (long i = 0; i < size; i += LANES) {
            vf q = *(const vf_any *)(query + i);
            a = fused(q, load(keys, places[0] + i, type), a);
            b = fused(q, load(keys, places[1] + i, type), b);
            c = fused(q, load(keys, places[2] + i, type), c);
            d = fused(q, load(keys, places[3] + i, type), d);
            e = fused(q, load(keys, places[4] + i, type), e);
            f = fused(q, load(keys, places[5] + i, type), f);
            g = fused(q, load(keys, places[6] + i, type), g);
            h = fused(q, load(keys, places[7] + i, type), h);
        }
        vf sums = sums_of_8(a, b, c, d, e, f, g, h) * scale;
        for (int i = 0; i < 8; i++) shares[at + i] = sums[i];
    }
    for (; at < num; at++, places++) {
        vf sum = {};
        for (long i = 0; i < size; i += LANES)
            sum = fused(*(const vf_any *)(query + i), load(keys, *places + i, type), sum);
        shares[at] = sum_of(sum) * scale;
    }
}

/* 2 LANES integers, or the 16 that are left, and zeros. */
INLINE vi integers_at(const int16_t *from, long left) {
#if LANES == 16
    if (left < 2 * LANES)
        return (vi)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)from));
#endif
    (void)left;
    return *(const vi_any *)from;
}

/* The same by integers: query is q, scale its step times scale, and each key has a step. */
INLINE void score_int16(const int16_t *keys, const int64_t *places, const float *steps, long num,
                        long size, float scale, const int16_t *query, float *shares) {
    for (long at = 0; at < num; at += 8) {
        const int some = num - at < 8 ? (int)(num - at) : 8;
        vi sums[8] = {};
        for (long i = 0; i < size; i += 2 * LANES) {
            vi q = integers_at(query + i, size - i);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                const int16_t *key = keys + places[at + (k < some ? k : 0)] + i;
                sums[k] = add_pairs(sums[k], q, integers_at(key, size - i));
            }
        }
        vf each[8];
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) each[k] = __builtin_convertvector(sums[k], vf);
        vf found =
            sums_of_8(each[0], each[1], each[2], each[3], each[4], each[5], each[6], each[7]);
        for (int k = 0; k < some; k++) shares[at + k] = found[k] * scale * steps[at + k];
    }
}

/* In place: exp(score - the largest), 0 beyond num; returns 1 / their sum. */
static float soften(float *shares, long num) {
    vf most = (vf){} - INFINITY, total = {};
    long padded = (num + LANES - 1) / LANES * LANES;
    for (long i = num; i < padded; i++) shares[i] = -INFINITY;
    for (long i = 0; i < padded; i += LANES) {
        vf each = *(vf_any *)(shares + i);
        most = pick(each > most, each, most);
    }
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (long i = 0; i < padded; i += LANES)
        *(vf_any *)(shares + i) = exp_of(*(vf_any *)(shares + i) - top);
    for (long i = 0; i < padded; i += LANES) total += *(vf_any *)(shares + i);
    return 1.0f / sum_of(total);
}

/* out += values weighted by shares, in ``width`` lanes. */
INLINE void weigh(const void *values, int type, const int64_t *places, long num,
                  const float *shares, long from, int width, float *out) {
    vf sums[SLICE / LANES];
    for (int i = 0; i < width / LANES; i++) sums[i] = *(vf_any *)(out + from + i * LANES);
    for (long at = 0; at < num; at++)
        for (int i = 0; i < width / LANES; i++)
            sums[i] = fused(all(shares[at]), load(values, places[at] + from + i * LANES, type),
                            sums[i]);
    for (int i = 0; i < width / LANES; i++) *(vf_any *)(out + from + i * LANES) = sums[i];
}

INLINE void weigh_all(const void *values, int type, const int64_t *places, long num,
                      const float *shares, long size, float *out) {
    long from = 0;
    for (; from + SLICE <= size; from += SLICE)
        weigh(values, type, places, num, shares, from, SLICE, out);
    for (; from < size; from += LANES) weigh(values, type, places, num, shares, from, LANES, out);
}

/* The part of a block of keys that a token sees. */
typedef struct { long from, num; } Part;

static Part part_of(long block, long first, long last) {
    long from = block > first ? block : first, end = block + KEYS <= last ? block + KEYS : last + 1;
    return (Part){from, end - from};
}

static long first_seen(const Layer *layer, long position) {
    return layer->window && position >= layer->window ? position - layer->window + 1 : 0;
}

/* Tokens t to t + run - 1, of one sequence and neighbours in it: all query heads of a key head. */
INLINE void attend(const Model *of, const Layer *layer, const Step *step, int type, long t,
                   long run, long head, const float *query, float *scratch, float *out) {
    const long E = of->head_size, H = of->heads, shared = H / of->kv_heads;
    const long at = step->positions[t], start = first_seen(layer, at), end = at + run - 1;
    const long width = step->longest + LANES;
    int64_t *places = (int64_t *)scratch;
    float *key_steps = scratch + 2 * width, *value_steps = key_steps + width;
    float *shares = value_steps + width, norms[RUN * shared], steps[RUN * shared];
    int16_t integers[type == INT16 ? RUN * shared * E : 1];
    query += (t * H + head * shared) * E, out += (t * H + head * shared) * E;
    find(of, layer, type, step->tables + step->sequences[t] * step->table_width, head, start, end,
         places, key_steps, value_steps);
    for (long n = 0; n < run * shared && type == INT16; n++)
        quantise(query + (n / shared * H + n % shared) * E, E, F32, integers + n * E, steps + n);
    for (long block = start; block <= end; block += KEYS)
        for (long r = 0; r < run; r++) {
            long first = first_seen(layer, at + r);
            Part part = part_of(block, first, at + r);
            for (long s = 0; s < shared && part.num > 0; s++) {
                const long n = r * shared + s, from = part.from - start;
                float *to = shares + n * width + part.from - first;
                if (type == INT16)
                    score_int16(layer->keys, places + from, key_steps + from, part.num, E,
                                of->scale * steps[n], integers + n * E, to);
                else
                    score(layer->keys, type, places + from, part.num, E, of->scale,
                          query + (r * H + s) * E, to);
            }
        }
    for (long r = 0; r < run; r++)
        for (long s = 0; s < shared; s++) {
            long first = first_seen(layer, at + r), n = r * shared + s;
            norms[n] = soften(shares + n * width, at + r - first + 1);
            for (long i = 0; i <= at + r - first && type == INT16; i++)
                shares[n * width + i] *= value_steps[first - start + i];
            for (long i = 0; i < E; i++) out[(r * H + s) * E + i] = 0;
        }
    for (long block = start; block <= end; block += KEYS)
        for (long r = 0; r < run; r++) {
            long first = first_seen(layer, at + r);
            Part part = part_of(block, first, at + r);
            for (long s = 0; s < shared && part.num > 0; s++)
                weigh_all(layer->values, type, places + part.from - start, part.num,
                          shares + (r * shared + s) * width + part.from - first, E,
                          out + (r * H + s) * E);
        }
    for (long r = 0; r < run; r++)
        for (long i = 0; i < shared * E; i++)
            out[r * H * E + i] = round_one(out[r * H * E + i] * norms[r * shared + i / E], (int)of->type);
}

/* Floats that attend_all needs for each thread: places, as wide as two, steps, and shares. */
static long attention_scratch(const Model *of, const Step *step) {
    return (4 + RUN * of->heads / of->kv_heads) * (step->longest + LANES) / 2 * 2 + 2;
}

/* Heads come one after the other, so that the keys of one stay in cache from token to token. */
ONCE static void attend_all(const Model *of, const Layer *layer, const Step *step,
                            const float *query, float *scratch, float *out) {
    const long T = step->num_tokens, K = of->kv_heads;
    const long most = T * K < 8 * RUN * step->num_threads ? 1 : RUN, runs = (T + most - 1) / most;
#pragma omp for schedule(dynamic, 1)
    for (long work = 0; work < runs * K; work++) {
        long t = work % runs * most, last = t + most < T ? t + most : T, head = work / runs;
        for (long run; t < last; t += run) {
            for (run = 1; t + run < last; run++)
                if (step->sequences[t + run] != step->sequences[t]
                    || step->positions[t + run] != step->positions[t] + run)
                    break;
            if (of->cache == F32)
                attend(of, layer, step, F32, t, run, head, query, scratch, out);
            else if (of->cache == BF16)
                attend(of, layer, step, BF16, t, run, head, query, scratch, out);
            else
                attend(of, layer, step, INT16, t, run, head, query, scratch, out);
        }
    }
}
