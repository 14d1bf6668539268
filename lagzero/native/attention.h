/* Attention of each token to the pages of its sequence.
 *
 * A query's scores are dot products, each a sum in one order, and its result one sum over its keys
 * in their order: which queries meet a block of keys together, and where it ends, changes no bit. */
#pragma once
#include "model.h"

#define SLICE 64 /* of a head's size that is summed at once */
#define KEYS 32  /* of a block, which stays in the first cache while some queries meet it */
#define RUN 4    /* tokens of a sequence that meet a block together, each with several heads */

/* Where keys, and values, of tokens first to last begin, which lie in the pages of ``table``. */
static void find(const Model *of, const int64_t *table, long head, long first, long last,
                 int64_t *places) {
    const long E = of->head_size, P = of->page_size;
    for (long at = first; at <= last;) {
        long end = (at / P + 1) * P <= last ? (at / P + 1) * P : last + 1;
        long place = ((table[at / P] * of->kv_heads + head) * P + at % P) * E;
        for (; at < end; at++, place += E) *places++ = place;
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
    float *shares = scratch + 2 * width, norms[RUN * shared];
    query += (t * H + head * shared) * E, out += (t * H + head * shared) * E;
    find(of, step->tables + step->sequences[t] * step->table_width, head, start, end, places);
    for (long block = start; block <= end; block += KEYS)
        for (long r = 0; r < run; r++) {
            long first = first_seen(layer, at + r);
            Part part = part_of(block, first, at + r);
            for (long s = 0; s < shared && part.num > 0; s++)
                score(layer->keys, type, places + part.from - start, part.num, E, of->scale,
                      query + (r * H + s) * E,
                      shares + (r * shared + s) * width + part.from - first);
        }
    for (long r = 0; r < run; r++)
        for (long s = 0; s < shared; s++) {
            long first = first_seen(layer, at + r), n = r * shared + s;
            norms[n] = soften(shares + n * width, at + r - first + 1);
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
            out[r * H * E + i] = round_one(out[r * H * E + i] * norms[r * shared + i / E], type);
}

/* Floats that attend_all needs for each thread: places, which are as wide as two, and shares. */
static long attention_scratch(const Model *of, const Step *step) {
    return (2 + RUN * of->heads / of->kv_heads) * (step->longest + LANES) / 2 * 2 + 2;
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
            if (of->type == F32)
                attend(of, layer, step, F32, t, run, head, query, scratch, out);
            else
                attend(of, layer, step, BF16, t, run, head, query, scratch, out);
        }
    }
}
