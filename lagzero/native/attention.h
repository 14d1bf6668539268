/* Attention of each token to the pages of its sequence.
 *
 * A query's scores are dot products, each a sum in one order, and its result one sum over its keys
 * in their order: which queries meet a block of keys together, and where it ends, changes no bit.
 */
#pragma once
#include "scores.h"

#define KEYS 32 /* of a block, which stays in the first cache while some queries meet it */
#define RUN 4   /* tokens of a sequence that meet a block together, each with several heads */

/* Write a key or value [E] as integers to the page that begins at ``start`` of an INT16 cache. */
static void keep(const Model *of, const float *x, void *cache, long start, long token) {
    int16_t *page = (int16_t *)cache + start;
    float step;
    quantise(x, of->head_size, F32, page + token * of->head_size, &step);
    memcpy(page + step_place(of, token), &step, sizeof step);
}

/* Keys that tokens see, first to first + num - 1 of their sequence. */
typedef struct {
    long first, num;
    int64_t *places;                /* of each of them and its value */
    float *key_steps, *value_steps; /* of an INT16 cache */
} Seen;

static long first_seen(const Layer *layer, long position) {
    return layer->window && position >= layer->window ? position - layer->window + 1 : 0;
}

/* Find what tokens t to t + run - 1 see, which are neighbours in one sequence. */
INLINE void find(const Model *of, const Layer *layer, const Step *step, int type, long t, long run,
                 long head, Seen *to) {
    const long E = of->head_size, P = of->page_size, last = step->positions[t] + run - 1;
    const int64_t *table = step->tables + step->sequences[t] * step->table_width;
    to->first = first_seen(layer, step->positions[t]), to->num = last - to->first + 1;
    for (long at = to->first; at <= last;) {
        long end = (at / P + 1) * P <= last ? (at / P + 1) * P : last + 1, n = at - to->first;
        long start = (table[at / P] * of->kv_heads + head) * page_numbers(of);
        if (type == INT16) {
            const long from = start + step_place(of, at % P), size = (end - at) * sizeof(float);
            memcpy(to->key_steps + n, (const int16_t *)layer->keys + from, size);
            memcpy(to->value_steps + n, (const int16_t *)layer->values + from, size);
        }
        for (long place = start + at % P * E; at < end; at++, place += E) to->places[n++] = place;
    }
}

/* The part of a block of keys that a token sees. */
typedef struct { long from, num; } Part;

static Part part_of(long block, long size, long first, long last) {
    long from = block > first ? block : first, end = block + size <= last ? block + size : last + 1;
    return (Part){from, end - from};
}

/* Tokens at to at + run - 1 of a sequence, all query heads of a key head, and what they see. */
typedef struct {
    const Layer *layer;
    long run, at;
    long shared, size;        /* query heads of the key head, E */
    const Seen *seen, *after; /* and what the tokens after these see; num 0 if none is known */
    long asked;               /* of seen keys, their values, and the keys after these */
    float *shares;            /* [run * shared, width] */
    long width;
} Meeting;

/* Ask memory for the next keys or values, so that they are on their way while others are computed
 * with. */
INLINE void ask(Meeting *m, int type, long some) {
    const long num = m->seen->num, bytes = m->size * (type == F32 ? 4 : 2);
    for (const long end = m->asked + some; m->asked < end; m->asked++) {
        const long n = m->asked, later = n - 2 * num;
        if (later >= m->after->num) return;
        const char *from = n < num || later >= 0 ? m->layer->keys : m->layer->values;
        const int64_t *places = later < 0 ? m->seen->places : m->after->places;
        from += places[later >= 0 ? later : n < num ? n : n - num] * (bytes / m->size);
        for (long i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i, 0, 2);
    }
}

/* Of n queries that are left, how many meet keys next: about as many each time. */
static int together(long n) { return (int)(n / ((n + HEADS - 1) / HEADS)); }

/* Scores of queries [run, shared, E]. Of integers, ``scales`` are the scale times their steps. */
INLINE void score_all(Meeting *m, int type, const char *query, const float *scales) {
    const long bytes = m->size * (IN_PAIRS(type) || type == INT16 ? 2 : 4);
    const Seen *seen = m->seen;
    for (long block = seen->first; block < seen->first + seen->num; block += KEYS) {
        ask(m, type, KEYS);
        for (long r = 0; r < m->run; r++) {
            const long first = first_seen(m->layer, m->at + r);
            const Part part = part_of(block, KEYS, first, m->at + r);
            const long from = part.from - seen->first;
            int some;
            for (long n = r * m->shared; n < (r + 1) * m->shared && part.num > 0; n += some) {
                float *to = m->shares + n * m->width + part.from - first;
                some = type == INT16 ? 1 : together((r + 1) * m->shared - n);
                if (type == INT16)
                    score_int16(m->layer->keys, seen->places + from, seen->key_steps + from,
                                part.num, m->size, scales[n],
                                (const int16_t *)(query + n * bytes), to);
                else
                    score_some(m->layer->keys, type, seen->places + from, part.num, m->size,
                               scales[0], query + n * bytes, some, to, m->width);
            }
        }
    }
}

/* In place: exp(score - the largest), 0 beyond num; returns 1 / their sum. Meanwhile keys or values
 * are asked for: nothing else uses memory then. */
INLINE float soften(Meeting *m, int type, float *shares, long num) {
    vf most = all(-INFINITY), total = {};
    long padded = (num + LANES - 1) / LANES * LANES;
    for (long i = num; i < padded; i++) shares[i] = -INFINITY;
    for (long i = 0; i < padded; i += LANES) most = larger(*(vf_any *)(shares + i), most);
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (long i = 0; i < padded; i += LANES) {
        ask(m, type, 1);
        *(vf_any *)(shares + i) = exp_of(*(vf_any *)(shares + i) - top);
    }
    for (long i = 0; i < padded; i += LANES) total += *(vf_any *)(shares + i);
    return 1.0f / sum_of(total);
}

/* Results [run, shared, E] of shares that ``soften`` made, to which ``sums`` are set. */
INLINE void weigh_block(Meeting *m, int type, float *sums) {
    const Seen *seen = m->seen;
    for (long i = 0; i < m->run * m->shared * m->size; i += LANES) store(sums, i, (vf){}, F32);
    for (long block = seen->first; block < seen->first + seen->num; block += KEYS) {
        ask(m, type, KEYS);
        for (long r = 0; r < m->run; r++) {
            const long first = first_seen(m->layer, m->at + r);
            const Part part = part_of(block, KEYS, first, m->at + r);
            int some;
            for (long n = r * m->shared; n < (r + 1) * m->shared && part.num > 0; n += some) {
                some = together((r + 1) * m->shared - n);
                weigh_some(m->layer->values, type, seen->places + part.from - seen->first, part.num,
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

/* Tokens t to t + run - 1: all query heads of a key head, which see what ``m`` says. */
INLINE void attend(const Model *of, Meeting *m, int type, long t, long head,
                   const void *query, int held, void *out) {
    const long E = m->size, num = m->run * m->shared, first_head = t * of->heads + head * m->shared;
    float scales[num], queries[num * E], sums[num * E];
    take_queries(m, type, of, query, held, first_head * E, (char *)queries, scales);
    score_all(m, type, (const char *)queries, scales);
    for (long n = 0; n < num; n++) {
        const long own = m->at + n / m->shared, first = first_seen(m->layer, own);
        float *shares = m->shares + n * m->width;
        scales[n] = soften(m, type, shares, own - first + 1);
        for (long i = 0; i <= own - first && type == INT16; i++)
            shares[i] *= m->seen->value_steps[first - m->seen->first + i];
    }
    weigh_block(m, type, sums);
    for (long n = 0; n < num; n++) {
        const long to = (first_head + n / m->shared * of->heads + n % m->shared) * E;
        for (long i = 0; i < E; i += LANES) {
            vf each = load(sums, n * E + i, F32) * scales[n];
            store(out, to + i, round_all(each, (int)of->type), held);
        }
    }
}

INLINE long shares_width(const Step *step) { return (step->longest + LANES) / 2 * 2; }

/* Floats that attend_all needs for each thread: twice places, as wide as two, and steps; shares. */
static long attention_scratch(const Model *of, const Step *step) {
    return (8 + RUN * of->heads / of->kv_heads) * shares_width(step) + 2;
}

/* Tokens t to last - 1 with a key head. */
INLINE void attend_some(const Model *of, const Layer *layer, const Step *step, int type, long t,
                        long last, long head, const void *query, int held, float *scratch,
                        void *out) {
    const long width = shares_width(step);
    Seen both[2], *seen = both, *after = both + 1;
    for (int i = 0; i < 2; i++, scratch += 4 * width)
        both[i] = (Seen){.places = (int64_t *)scratch, .key_steps = scratch + 2 * width,
                         .value_steps = scratch + 3 * width};
    long run = neighbours(step->sequences, step->positions, t, last), asked = 0;
    find(of, layer, step, type, t, run, head, seen);
    for (long next; t < last; t += run, run = next) {
        const long then = t + run;
        next = then < last ? neighbours(step->sequences, step->positions, then, last) : 0;
        after->num = 0;
        if (next) find(of, layer, step, type, then, next, head, after);
        Meeting m = {layer, run, step->positions[t],
                     of->heads / of->kv_heads, of->head_size, seen, after, asked, scratch, width};
        if (!asked) ask(&m, type, KEYS);
        attend(of, &m, type, t, head, query, held, out);
        asked = m.asked > 2 * seen->num ? m.asked - 2 * seen->num : 0;
        Seen *other = seen;
        seen = after, after = other;
    }
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
        const long t = work % runs * most, last = at_most(t + most, T), head = work / runs;
        if (of->cache == F32)
            attend_some(of, layer, step, F32, t, last, head, query, held, scratch, out);
        else if (of->cache == BF16)
            attend_some(of, layer, step, BF16, t, last, head, query, held, scratch, out);
        else
            attend_some(of, layer, step, INT16, t, last, head, query, held, scratch, out);
    }
}
