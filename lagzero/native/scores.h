/* What some queries make of a few keys, and of the values that go with them.
 *
 * A score is a dot product, a sum in one order, and a result one sum over keys in their order:
 * which queries meet keys together, and how many keys at once, changes no bit. */
#pragma once
#include "model.h"

#define SLICE 64 /* of a head's size that is summed at once */
#if LANES == 16
#define HEADS 3 /* queries that share a key in a register: 3 x 8 sums and 3 + 1 operands fit 32 */
#else
#define HEADS 1 /* 8 sums and 2 operands fit 16 */
#endif
#if defined(__AVX512BF16__)
#define PAIRED 1 /* scores of a bfloat16 cache take bfloat16 queries, two numbers at once */
#else
#define PAIRED 0
#endif
#define IN_PAIRS(type) (PAIRED && (type) == BF16)

/* 2 LANES numbers of 16 bits, or the 16 that are left, and zeros. */
INLINE vi pairs_at(const void *from, long at, long left) {
    const int16_t *numbers = (const int16_t *)from + at;
#if LANES == 16
    if (left < 2 * LANES)
        return (vi)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)numbers));
#endif
    (void)left;
    return *(const vi_any *)numbers;
}

/* total + the products of as many numbers as ``operand`` reads. */
INLINE vf add_numbers(vf total, vf a, vf b, int type) {
#if PAIRED
    if (type == BF16) return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#endif
    (void)type;
    return fused(a, b, total);
}

INLINE vf operand(const void *from, long at, long left, int type) {
    return held(IN_PAIRS(type) ? (vf)pairs_at(from, at, left) : load(from, at, type));
}

INLINE void store_8(float *to, vf values) {
#if LANES == 16
    _mm256_storeu_ps(to, _mm512_castps512_ps256((__m512)values));
#else
    *(vf_any *)to = values;
#endif
}

/* scale times query . key of ``num`` keys for each of some queries, whose scores are ``apart``;
 * there is space for 8 at a time. */
INLINE void score(const void *keys, int type, const int64_t *places, long num, long size,
                  float scale, const void *query, int heads, float *shares, long apart) {
    const int of_query = IN_PAIRS(type) ? BF16 : F32;
    for (long at = 0; at < num; at += 8) {
        const int some = num - at < 8 ? (int)(num - at) : 8;
        vf sums[HEADS][8] = {}, each[HEADS];
        for (long i = 0; i < size; i += IN_PAIRS(type) ? 2 * LANES : LANES) {
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                each[h] = operand(query, h * size + i, size - i, of_query);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                vf key = operand(keys, places[at + (k < some ? k : 0)] + i, size - i, type);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sums[h][k] = add_numbers(sums[h][k], each[h], key, type);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const vf *of = sums[h];
            vf found = sums_of_8(of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7]);
            store_8(shares + h * apart + at, found * scale);
        }
    }
}

/* ``score`` compiled for each number of queries up to HEADS. */
INLINE void score_some(const void *keys, int type, const int64_t *places, long num, long size,
                       float scale, const void *query, int heads, float *shares, long apart) {
    if (heads == 1)
        score(keys, type, places, num, size, scale, query, 1, shares, apart);
    else if (HEADS > 2 && heads == 2)
        score(keys, type, places, num, size, scale, query, 2, shares, apart);
    else
        score(keys, type, places, num, size, scale, query, HEADS, shares, apart);
}

/* The same by integers: query is q, scale its step times scale, and each key has a step. */
INLINE void score_int16(const int16_t *keys, const int64_t *places, const float *steps, long num,
                        long size, float scale, const int16_t *query, float *shares) {
    for (long at = 0; at < num; at += 8) {
        const int some = num - at < 8 ? (int)(num - at) : 8;
        vi sums[8] = {};
        for (long i = 0; i < size; i += 2 * LANES) {
            vi q = pairs_at(query, i, size - i);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                const int64_t place = places[at + (k < some ? k : 0)];
                sums[k] = add_pairs(sums[k], q, pairs_at(keys, place + i, size - i));
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

/* 2 LANES numbers that are two vectors, as those at even places and those at odd ones, and back. */
#if PAIRED
INLINE void part_places(vf *low, vf *high) {
    const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const vf first = __builtin_shuffle(*low, *high, even);
    *high = __builtin_shuffle(*low, *high, even + 1);
    *low = first;
}

INLINE void join_places(vf *even, vf *odd) {
    const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const vf first = __builtin_shuffle(*even, *odd, low);
    *odd = __builtin_shuffle(*even, *odd, low + 8);
    *even = first;
}
#endif

/* out += values weighted by shares, in ``width`` lanes from ``from`` on, for each of some queries,
 * whose shares are ``apart``. Numbers of bfloat16 widen faster if those at even places are parted
 * from the others meanwhile. */
INLINE void weigh(const void *values, int type, const int64_t *places, long num,
                  const float *shares, long apart, int heads, long size, long from, int width,
                  float *out) {
    const int parted = IN_PAIRS(type) && width == SLICE;
    vf sums[HEADS][SLICE / LANES], each[SLICE / LANES];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < width / LANES; i++)
            sums[h][i] = load(out, h * size + from + i * LANES, F32);
#if PAIRED
    for (int h = 0; h < heads * parted; h++)
        for (int i = 0; i < SLICE / LANES; i += 2) part_places(sums[h] + i, sums[h] + i + 1);
#endif
    for (long at = 0; at < num; at++) {
#pragma GCC unroll 8
        for (int i = 0; i < width / LANES; i += 1 + parted)
            if (parted) {
                const vf both = held(*(const vf_any *)((const uint16_t *)values + places[at] + from
                                                       + i * LANES));
                each[i] = (vf)((vu)both << 16);
                each[i + 1] = (vf)((vu)both & 0xffff0000u);
            } else
                each[i] = held(load(values, places[at] + from + i * LANES, type));
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
            for (int i = 0; i < width / LANES; i++)
                sums[h][i] = fused(all(shares[h * apart + at]), each[i], sums[h][i]);
    }
#if PAIRED
    for (int h = 0; h < heads * parted; h++)
        for (int i = 0; i < SLICE / LANES; i += 2) join_places(sums[h] + i, sums[h] + i + 1);
#endif
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < width / LANES; i++)
            store(out, h * size + from + i * LANES, sums[h][i], F32);
}

INLINE void weigh_all(const void *values, int type, const int64_t *places, long num,
                      const float *shares, long apart, int heads, long size, float *out) {
    long from = 0;
    for (; from + SLICE <= size; from += SLICE)
        weigh(values, type, places, num, shares, apart, heads, size, from, SLICE, out);
    for (; from < size; from += LANES)
        weigh(values, type, places, num, shares, apart, heads, size, from, LANES, out);
}

INLINE void weigh_some(const void *values, int type, const int64_t *places, long num,
                       const float *shares, long apart, int heads, long size, float *out) {
    if (heads == 1)
        weigh_all(values, type, places, num, shares, apart, 1, size, out);
    else if (HEADS > 2 && heads == 2)
        weigh_all(values, type, places, num, shares, apart, 2, size, out);
    else
        weigh_all(values, type, places, num, shares, apart, HEADS, size, out);
}
