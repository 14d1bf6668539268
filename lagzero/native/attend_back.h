/* Gradients of attention over one packed row, whose scores are computed again.
 *
 * With shares p = softmax(scale q k^T) and g the gradient of their weighted values:
 *   dv = p^T g,  dp = g v^T,  ds = p (dp - sum(p dp)),  dq = scale ds k,  dk = scale ds^T q.
 * That is five products. A few tokens, with all the query heads of a key head, meet all keys that
 * they see, so that scores are computed once; keys and values are laid out once for each stretch.
 *
 * Sequences that share a prompt add to the same keys. So that sums have one order whatever the
 * threads, a head's tokens are cut into parts by what they cost. A part has its own sums; those of
 * a token are added up in the order of the parts.
 *
 * Letters: T tokens, H query heads, G key heads, E head size.
 */
#pragma once
#include <omp.h>
#include <string.h>
#include "model.h"

#define PARTS 8     /* of a head's tokens */
#define CUT 32      /* a part begins with a sequence or after so many of its tokens */
#define TOGETHER 24 /* queries, about, that meet keys together */
#define STRETCH 64  /* keys that queries meet at once, and of a transposed block */
#define HIGH 6      /* rows of sums that are held in registers */
#if LANES == 16
#define WIDE 4 /* vectors of each: 6 x 4 sums and 4 + 1 operands fit 32 registers */
#else
#define WIDE 2 /* 6 x 2 sums and 2 + 1 operands fit 16 */
#endif

/* The first token; the places that it adds to, from ``low`` on; and where its sums are. */
typedef struct { int64_t first, low, num, sums; } PartBack;

typedef struct {
    const void *query, *key, *value, *grad;      /* [T, H, E], [T, G, E] twice, [T, H, E] */
    void *to_query, *to_key, *to_value;          /* their gradients */
    const int64_t *positions, *sequences;        /* [T] */
    const int64_t *tables;                       /* [sequences, table_width] places in the row */
    float *scratch;                              /* attend_back_floats() */
    int64_t num_tokens, table_width, heads, kv_heads, head_size, window, type, num_threads;
    /* Filled in by attend_back_floats: the most positions of a sequence, and the parts, of which
     * the last only ends the one before. */
    int64_t longest;
    PartBack parts[PARTS + 1];
    float scale;
} AttendBack;

/* out[i] (+)= sum over k of a[i, k] times the vectors b[k]. a's rows are ``stride`` apart; or its
 * columns are, if it is ``flipped``. */
INLINE void outer(const float *a, long stride, const float *b, long b_stride, long depth, int rows,
                  int vectors, int flipped, int add, float *out, long out_stride) {
    vf sums[HIGH][WIDE] = {}, each[WIDE];
    const long row = flipped ? 1 : stride, step = flipped ? stride : 1;
    for (int i = 0; i < rows && add; i++)
        for (int j = 0; j < vectors; j++)
            sums[i][j] = *(const vf_any *)(out + i * out_stride + j * LANES);
    for (long k = 0; k < depth; k++, a += step, b += b_stride) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) each[j] = held(*(const vf_any *)(b + j * LANES));
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vf one = held(a[i * row] - (vf){});
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) sums[i][j] = fused(one, each[j], sums[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            *(vf_any *)(out + i * out_stride + j * LANES) = sums[i][j];
}

/* Compiled once for each shape, so that its sums get registers. */
typedef void Outer(const float *a, long stride, const float *b, long b_stride, long depth, int add,
                   float *out, long out_stride);
#define OUTER(ROWS_, VECTORS_, FLIPPED)                                                            \
    static __attribute__((noinline)) void outer_##ROWS_##x##VECTORS_##_##FLIPPED(                  \
        const float *a, long stride, const float *b, long b_stride, long depth, int add,           \
        float *out, long out_stride) {                                                             \
        outer(a, stride, b, b_stride, depth, ROWS_, VECTORS_, FLIPPED, add, out, out_stride);      \
    }
#define OUTERS(VECTORS_, FLIPPED)                                                                  \
    OUTER(1, VECTORS_, FLIPPED) OUTER(2, VECTORS_, FLIPPED) OUTER(3, VECTORS_, FLIPPED)            \
    OUTER(4, VECTORS_, FLIPPED) OUTER(5, VECTORS_, FLIPPED) OUTER(6, VECTORS_, FLIPPED)
#define HEIGHTS(VECTORS_, FLIPPED)                                                                 \
    {outer_1x##VECTORS_##_##FLIPPED, outer_2x##VECTORS_##_##FLIPPED,                               \
     outer_3x##VECTORS_##_##FLIPPED, outer_4x##VECTORS_##_##FLIPPED,                               \
     outer_5x##VECTORS_##_##FLIPPED, outer_6x##VECTORS_##_##FLIPPED}
OUTERS(1, 0) OUTERS(1, 1) OUTERS(2, 0) OUTERS(2, 1)
#if WIDE == 4
OUTERS(3, 0) OUTERS(3, 1) OUTERS(4, 0) OUTERS(4, 1)
#define WIDER(FLIPPED) , HEIGHTS(3, FLIPPED), HEIGHTS(4, FLIPPED)
#else
#define WIDER(FLIPPED)
#endif
static Outer *const outers[2][WIDE][HIGH] = {
    {HEIGHTS(1, 0), HEIGHTS(2, 0) WIDER(0)},
    {HEIGHTS(1, 1), HEIGHTS(2, 1) WIDER(1)},
};

/* out [rows, columns] (+)= a b, or a^T b; a has ``depth`` columns, or rows. */
static void product(const float *a, long stride, int flipped, const float *b, long b_stride,
                    long depth, long rows, long columns, int add, float *out, long out_stride) {
    const long tiles = (rows + HIGH - 1) / HIGH, height = (rows + tiles - 1) / tiles;
    for (long column = 0, vectors; column < columns; column += vectors * LANES) {
        vectors = (columns - column) / LANES;
        if (vectors > WIDE) vectors = WIDE;
        for (long row = 0; row < rows; row += height) {
            const long some = row + height < rows ? height : rows - row;
            outers[flipped][vectors - 1][some - 1](a + row * (flipped ? 1 : stride), stride,
                                                   b + column, b_stride, depth, add,
                                                   out + row * out_stride + column, out_stride);
        }
    }
}

/* to = from, widened, times factor; ``size`` is a multiple of LANES. */
INLINE void widen_all(const void *from, long at, long size, int type, float factor, float *to) {
    for (long i = 0; i < size; i += LANES)
        *(vf_any *)(to + i) = load(from, at + i, type == F32 ? F32 : BF16) * factor;
}

/* Numbers of a stretch of a sequence in a thread's scratch. */
typedef struct {
    float *keys, *values;               /* [keys, E] */
    float *keys_across, *values_across; /* [keys / STRETCH][E][STRETCH] */
    float *to_keys, *to_values;         /* [keys, E] sums */
    float *query, *grad, *to_query;     /* [queries, E] */
    float *shares, *slopes;             /* [queries, width] */
    long width;
} Stretch;

INLINE long tokens_together(const AttendBack *of) {
    const long shared = of->heads / of->kv_heads, tokens = (TOGETHER + shared - 1) / shared;
    return tokens < 4 ? 4 : tokens > 16 ? 16 : tokens;
}

/* Lay out a thread's scratch; returns how many floats it takes. */
static long lay_out(const AttendBack *of, float *at, Stretch *to) {
    const long whole = (of->longest + STRETCH - 1) / STRETCH * STRETCH, E = of->head_size;
    const long queries = tokens_together(of) * (of->heads / of->kv_heads);
    const float *start = at;
    to->width = whole + 16; /* not a power of 2: else a column's numbers evict each other */
    to->keys = at, at += whole * E;
    to->values = at, at += whole * E;
    to->keys_across = at, at += whole * E;
    to->values_across = at, at += whole * E;
    to->to_keys = at, at += whole * E;
    to->to_values = at, at += whole * E;
    to->query = at, at += queries * E;
    to->grad = at, at += queries * E;
    to->to_query = at, at += queries * E;
    to->shares = at, at += queries * to->width;
    to->slopes = at, at += queries * to->width;
    return at - start;
}

/* Keys or values of one head at ``num`` places: as they are and across, zeros beyond them. */
static void gather(const AttendBack *of, const void *from, long head, const int64_t *places,
                   long num, float *rows, float *across) {
    const long E = of->head_size, whole = (num + STRETCH - 1) / STRETCH * STRETCH;
    const int type = (int)of->type;
    for (long i = 0; i < num; i++)
        widen_all(from, (places[i] * of->kv_heads + head) * E, E, type, 1, rows + i * E);
    memset(rows + num * E, 0, (whole - num) * E * sizeof *rows);
    for (long i = 0; i < whole; i += LANES)
        for (long e = 0; e < E; e += LANES) {
            float *to = across + i / STRETCH * STRETCH * E + e * STRETCH + i % STRETCH;
            vf each[LANES];
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) each[k] = *(const vf_any *)(rows + (i + k) * E + e);
            transpose(each);
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) *(vf_any *)(to + k * STRETCH) = each[k];
        }
}

/* The largest number in all lanes. */
INLINE vf largest(vf v) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) {
        vi other;
        for (int i = 0; i < LANES; i++) other[i] = i ^ width;
        vf turned = __builtin_shuffle(v, other);
        v = pick(v > turned, v, turned);
    }
    return v;
}

/* In place, for a query that sees keys first to last of begin to end - 1: its scores become shares,
 * the gradients of its shares become those of its scores. */
static void slope(float *shares, float *slopes, long begin, long end, long first, long last) {
    const vf none = (vf){} - INFINITY;
    vf most = none, total = {}, weighted = {};
    vi places;
    for (int i = 0; i < LANES; i++) places[i] = (int)begin + i;
    for (long i = begin; i < end; i += LANES, places += LANES) {
        vf each = *(vf_any *)(shares + i);
        each = pick((places >= (int)first) & (places <= (int)last), each, none);
        most = pick(each > most, each, most);
        *(vf_any *)(shares + i) = each;
    }
    most = largest(most);
    for (long i = begin; i < end; i += LANES) {
        vf each = exp_of(*(vf_any *)(shares + i) - most);
        total += each;
        weighted = fused(each, *(vf_any *)(slopes + i), weighted);
        *(vf_any *)(shares + i) = each;
    }
    const vf sums = sums_of_4(total, weighted, total, weighted);
    const float factor = 1.0f / sums[0], mean = sums[1] * factor;
    for (long i = begin; i < end; i += LANES) {
        vf each = *(vf_any *)(shares + i) * factor;
        *(vf_any *)(slopes + i) = each * (*(vf_any *)(slopes + i) - mean);
        *(vf_any *)(shares + i) = each;
    }
}

INLINE long first_key(const AttendBack *of, long position) {
    return of->window && position >= of->window ? position - of->window + 1 : 0;
}

/* Tokens t to t + num - 1 with a key head; the keys of ``in`` begin at position ``low``. */
static void meet(const AttendBack *of, const Stretch *in, long t, long num, long head, long low) {
    const long E = of->head_size, shared = of->heads / of->kv_heads, rows = num * shared;
    const long at = of->positions[t] - low, first = first_key(of, at + low) - low, end = at + num;
    const long begin = first / LANES * LANES, padded = (end + LANES - 1) / LANES * LANES;
    const int type = (int)of->type;
    for (long r = 0; r < num; r++) {
        const long from = ((t + r) * of->heads + head * shared) * E;
        widen_all(of->query, from, shared * E, type, of->scale, in->query + r * shared * E);
        widen_all(of->grad, from, shared * E, type, 1, in->grad + r * shared * E);
    }
    for (long from = begin, to; from < padded; from = to) {
        const long block = from / STRETCH * STRETCH, place = block * E + from - block;
        to = block + STRETCH < padded ? block + STRETCH : padded;
        product(in->query, E, 0, in->keys_across + place, STRETCH, E, rows, to - from, 0,
                in->shares + from, in->width);
        product(in->grad, E, 0, in->values_across + place, STRETCH, E, rows, to - from, 0,
                in->slopes + from, in->width);
    }
    for (long n = 0; n < rows; n++) {
        const long own = at + n / shared;
        slope(in->shares + n * in->width, in->slopes + n * in->width, begin, padded,
              first_key(of, own + low) - low, own);
    }
    for (long from = first; from < end; from += STRETCH) {
        const long some = from + STRETCH < end ? STRETCH : end - from;
        product(in->slopes + from, in->width, 0, in->keys + from * E, E, some, rows, E,
                from > first, in->to_query, E);
        product(in->slopes + from, in->width, 1, in->query, E, rows, some, E, 1,
                in->to_keys + from * E, E);
        product(in->shares + from, in->width, 1, in->grad, E, rows, some, E, 1,
                in->to_values + from * E, E);
    }
    for (long r = 0; r < num; r++)
        for (long i = 0; i < shared * E; i += LANES)
            store(of->to_query, ((t + r) * of->heads + head * shared) * E + i,
                      *(vf_any *)(in->to_query + r * shared * E + i) * of->scale, type);
}

/* Gradients of a part of a head's tokens; those of keys and values are added to the part's sums. */
static void attend_part_back(const AttendBack *of, const PartBack *part, long head, float *own) {
    const long E = of->head_size, few = tokens_together(of), size = part->num * E;
    float *sums = of->scratch + part->sums + head * 2 * size;
    Stretch in;
    lay_out(of, own, &in);
    memset(sums, 0, 2 * size * sizeof *sums);
    for (long t = part->first, num; t < part[1].first; t += num) {
        num = neighbours(of->sequences, of->positions, t, part[1].first);
        const long low = first_key(of, of->positions[t]), keys = of->positions[t] + num - low;
        const int64_t *places = of->tables + of->sequences[t] * of->table_width + low;
        gather(of, of->key, head, places, keys, in.keys, in.keys_across);
        gather(of, of->value, head, places, keys, in.values, in.values_across);
        memset(in.to_keys, 0, keys * E * sizeof *sums);
        memset(in.to_values, 0, keys * E * sizeof *sums);
        for (long at = 0; at < num; at += few)
            meet(of, &in, t + at, at + few < num ? few : num - at, head, low);
        for (long i = 0; i < keys; i++) {
            float *key = sums + (places[i] - part->low) * E, *value = key + size;
            for (long e = 0; e < E; e += LANES) {
                *(vf_any *)(key + e) += *(vf_any *)(in.to_keys + i * E + e);
                *(vf_any *)(value + e) += *(vf_any *)(in.to_values + i * E + e);
            }
        }
    }
}

/* Add up what the parts found for a token's key and value. */
static void join_parts(const AttendBack *of, long t, long head) {
    const long E = of->head_size;
    for (long e = 0; e < E; e += LANES) {
        vf key = {}, value = {};
        for (const PartBack *part = of->parts; part < of->parts + PARTS; part++) {
            if (t < part->low || t >= part->low + part->num) continue;
            const float *sums =
                of->scratch + part->sums + (head * 2 * part->num + t - part->low) * E + e;
            key += *(const vf_any *)sums;
            value += *(const vf_any *)(sums + part->num * E);
        }
        store(of->to_key, (t * of->kv_heads + head) * E + e, key, (int)of->type);
        store(of->to_value, (t * of->kv_heads + head) * E + e, value, (int)of->type);
    }
}

/* What a token costs, about: its keys, and what comes with every token. */
INLINE long cost(const AttendBack *of, long t) {
    return of->positions[t] - first_key(of, of->positions[t]) + 1 + 32;
}

/* Cut the tokens into parts that cost about as much, and find the places that each adds to. */
static void cut(AttendBack *of) {
    const long T = of->num_tokens;
    long whole = 0, spent = 0, next = 1, begin = 0;
    of->longest = 1;
    for (long t = 0; t < T; t++) {
        whole += cost(of, t);
        if (of->positions[t] >= of->longest) of->longest = of->positions[t] + 1;
    }
    of->parts[0].first = 0;
    for (long t = 0; t < T; t++) {
        if (t && neighbours(of->sequences, of->positions, t - 1, t + 1) == 1) begin = t;
        for (; (t - begin) % CUT == 0 && next < PARTS && spent * PARTS >= whole * next; next++)
            of->parts[next].first = t;
        spent += cost(of, t);
    }
    for (; next <= PARTS; next++) of->parts[next].first = T;
    for (PartBack *part = of->parts; part < of->parts + PARTS; part++) {
        long low = T, high = -1;
        for (long t = part->first, num; t < part[1].first; t += num) {
            num = neighbours(of->sequences, of->positions, t, part[1].first);
            const int64_t *places = of->tables + of->sequences[t] * of->table_width;
            for (long i = first_key(of, of->positions[t]); i < of->positions[t] + num; i++) {
                low = places[i] < low ? places[i] : low;
                high = places[i] > high ? places[i] : high;
            }
        }
        part->low = low, part->num = high < low ? 0 : high - low + 1;
    }
}

/* Cut the work into parts; returns the floats of ``scratch``. */
long attend_back_floats(AttendBack *of) {
    Stretch none;
    cut(of);
    long floats = lay_out(of, 0, &none) * of->num_threads;
    for (PartBack *part = of->parts; part < of->parts + PARTS; part++) {
        part->sums = floats;
        floats += 2 * part->num * of->head_size * of->kv_heads;
    }
    return floats;
}

void attend_back(const AttendBack *of) {
    Stretch none;
    const long own = lay_out(of, 0, &none), T = of->num_tokens, G = of->kv_heads;
#pragma omp parallel num_threads((int)of->num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (long work = 0; work < PARTS * G; work++)
            attend_part_back(of, of->parts + work % PARTS, work / PARTS,
                             of->scratch + omp_get_thread_num() * own);
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++)
            for (long head = 0; head < G; head++) join_parts(of, t, head);
    }
}
