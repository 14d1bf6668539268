/* Attention of each token to the pages of its sequence.
 *
 * A query's scores are dot products, each a sum in one order, and its result one sum over its keys
 * in their order: which queries meet a block of keys together, and where it ends, changes no bit.
 */
#pragma once
#include "scores.h"

#define KEYS 32 /* of a block, which stays in the first cache while some queries meet it */
#define FEW 8   /* of a block that one token meets: it waits for memory, and asks more evenly */
#define RUN 4   /* tokens of a sequence that meet a block together, each with several heads */

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

/* The part of a block of keys that a token sees. */
typedef struct { long from, num; } Part;

static Part part_of(long block, long size, long first, long last) {
    long from = block > first ? block : first, end = block + size <= last ? block + size : last + 1;
    return (Part){from, end - from};
}

static long first_seen(const Layer *layer, long position) {
    return layer->window && position >= layer->window ? position - layer->window + 1 : 0;
}

/* Tokens at to at + run - 1 of a sequence, all query heads of a key head, and what they see. */
typedef struct {
    const Layer *layer;
    long run, at, start, end, block; /* keys start to end, and how many of them in a block */
    long shared, size;               /* query heads of the key head, E */
    const int64_t *places;           /* of each of them and its value */
    const char *next;                /* keys that are met after these, or null */
    const float *key_steps, *value_steps;
    float *shares; /* [run * shared, width] */
    long width;
} Meeting;

/* Ask for the lines of the block from ``first`` on: of these keys, then of their values, then of
 * the keys that come next. They are on their way while KEYS others are computed with. */
INLINE void ask(const Meeting *m, int type, long first) {
    const long num = m->end - m->start + 1, bytes = m->size * (type == F32 ? 4 : 2);
    for (long n = first; n < first + m->block; n++) {
        const char *from = n < num ? m->layer->keys : m->layer->values;
        if (n < 2 * num)
            from += m->places[n < num ? n : n - num] * (bytes / m->size);
        else if (m->next)
            from = m->next + (n - 2 * num) * bytes;
        else
            return;
        for (long i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i, 0, 2);
    }
}

/* Of n queries that are left, how many meet keys next: about as many each time. */
static int together(long n) { return (int)(n / ((n + HEADS - 1) / HEADS)); }

/* Scores of queries [run, shared, E]. Of integers, ``scales`` are the scale times their steps. */
INLINE void score_all(const Meeting *m, int type, const char *query, const float *scales) {
    const long bytes = m->size * (IN_PAIRS(type) || type == INT16 ? 2 : 4);
    for (long block = m->start; block <= m->end; block += m->block) {
        ask(m, type, block - m->start + KEYS);
        for (long r = 0; r < m->run; r++) {
            const long first = first_seen(m->layer, m->at + r);
            const Part part = part_of(block, m->block, first, m->at + r);
            const long from = part.from - m->start;
            int some;
            for (long n = r * m->shared; n < (r + 1) * m->shared && part.num > 0; n += some) {
                float *to = m->shares + n * m->width + part.from - first;
                some = type == INT16 ? 1 : together((r + 1) * m->shared - n);
                if (type == INT16)
                    score_int16(m->layer->keys, m->places + from, m->key_steps + from, part.num,
                                m->size, scales[n], (const int16_t *)(query + n * bytes), to);
                else
                    score_some(m->layer->keys, type, m->places + from, part.num, m->size,
                               scales[0], query + n * bytes, some, to, m->width);
            }
        }
    }
}

/* Results [run, shared, E] of shares that ``soften`` made, to which ``sums`` are set. */
INLINE void weigh_block(const Meeting *m, int type, float *sums) {
    const long num = m->end - m->start + 1;
    for (long i = 0; i < m->run * m->shared * m->size; i += LANES) store(sums, i, (vf){}, F32);
    for (long block = m->start; block <= m->end; block += m->block) {
        ask(m, type, num + block - m->start + KEYS);
        for (long r = 0; r < m->run; r++) {
            const long first = first_seen(m->layer, m->at + r);
            const Part part = part_of(block, m->block, first, m->at + r);
            int some;
            for (long n = r * m->shared; n < (r + 1) * m->shared && part.num > 0; n += some) {
                some = together((r + 1) * m->shared - n);
                weigh_some(m->layer->values, type, m->places + part.from - m->start, part.num,
                           m->shares + n * m->width + part.from - first, m->width, some, m->size,
                           sums + n * m->size);
            }
        }
    }
}

/* Queries from memory, where they lie as ``held``, as scores take them, [run, shared, E]; those of
 * integers with their steps, times the scale. */
INLINE void take_queries(const Meeting *m, int type, const Model *of, const void *query, int held,
                         long start, char *to, float *scales) {
    const long E = m->size;
    for (long n = 0; n < m->run * m->shared; n++) {
        const long from = start + (n / m->shared * of->heads + n % m->shared) * E;
        scales[n] = of->scale;
        if (type == INT16) {
            quantise((const char *)query + from * sizes[held], E, held, (int16_t *)to + n * E,
                     scales + n);
            scales[n] = of->scale * scales[n];
        } else
            for (long i = 0; i < E; i += LANES)
                store(to, n * E + i, load(query, from + i, held), IN_PAIRS(type) ? BF16 : F32);
    }
}

/* Tokens t to t + run - 1, of one sequence and neighbours in it: all query heads of a key head. */
INLINE void attend(const Model *of, const Layer *layer, const Step *step, int type, long t,
                   long run, long head, const char *next, const void *query, int held,
                   float *scratch, void *out) {
    const long E = of->head_size, shared = of->heads / of->kv_heads, num = run * shared;
    const long at = step->positions[t], start = first_seen(layer, at);
    const long width = step->longest + LANES, first_head = t * of->heads + head * shared;
    int64_t *places = (int64_t *)scratch;
    float *key_steps = scratch + 2 * width, *value_steps = key_steps + width;
    float *shares = value_steps + width, scales[num], queries[num * E], sums[num * E];
    const Meeting m = {layer, run, at, start, at + run - 1, run == 1 ? FEW : KEYS, shared, E,
                       places, next, key_steps, value_steps, shares, width};
    find(of, layer, type, step->tables + step->sequences[t] * step->table_width, head, start,
         m.end, places, key_steps, value_steps);
    take_queries(&m, type, of, query, held, first_head * E, (char *)queries, scales);
    score_all(&m, type, (const char *)queries, scales);
    for (long n = 0; n < num; n++) {
        const long first = first_seen(layer, at + n / shared), seen = at + n / shared - first + 1;
        scales[n] = soften(shares + n * width, seen);
        for (long i = 0; i < seen && type == INT16; i++)
            shares[n * width + i] *= value_steps[first - start + i];
    }
    weigh_block(&m, type, sums);
    for (long n = 0; n < num; n++) {
        const long to = (first_head + n / shared * of->heads + n % shared) * E;
        for (long i = 0; i < E; i += LANES) {
            vf each = load(sums, n * E + i, F32) * scales[n];
            store(out, to + i, round_all(each, (int)of->type), held);
        }
    }
}

/* Floats that attend_all needs for each thread: places, as wide as two, steps, and shares. */
static long attention_scratch(const Model *of, const Step *step) {
    return (4 + RUN * of->heads / of->kv_heads) * (step->longest + LANES) / 2 * 2 + 2;
}

/* Where the keys begin that a token sees. */
static const char *keys_of(const Model *of, const Layer *layer, const Step *step, long t,
                             long head) {
    const long at = first_seen(layer, step->positions[t]);
    const int64_t *table = step->tables + step->sequences[t] * step->table_width;
    const long start = (table[at / of->page_size] * of->kv_heads + head) * page_numbers(of);
    return (const char *)layer->keys
           + (start + at % of->page_size * of->head_size) * (of->cache == F32 ? 4 : 2);
}

/* Queries and results lie in memory as ``held``.
 *
 * Heads come one after the other, so that the keys of one stay in cache from token to token. */
ONCE static void attend_all(const Model *of, const Layer *layer, const Step *step,
                            int held, const void *query, float *scratch, void *out) {
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
            const char *next = t + run < last ? keys_of(of, layer, step, t + run, head) : 0;
            if (of->cache == F32)
                attend(of, layer, step, F32, t, run, head, next, query, held, scratch, out);
            else if (of->cache == BF16)
                attend(of, layer, step, BF16, t, run, head, next, query, held, scratch, out);
            else
                attend(of, layer, step, INT16, t, run, head, next, query, held, scratch, out);
        }
    }
}
