/* y = x W^T by products of 16-bit integers, twice as many to an instruction as of float32.
 *
 * Numbers x, CHUNK at a time, become integers q = round(x / step): step is as small as keeps |q|
 * within MOST and the Euclidean norm of q within NORM. So by Cauchy and Schwarz no sum over a part
 * of two chunks leaves 32 bits, whatever the numbers; and integers have one sum in any order. The
 * sums of chunks are added in float32, in their order. Relative to a chunk's norm its numbers are
 * off by some 2^-13, where they are of one size.
 *
 * Rows of a weight lie WIDTH by WIDTH, the last ones filled up with zeros, [inputs / 2][WIDTH][2];
 * their steps [chunks][rows, filled up].
 */
#pragma once
#include "linear.h"

#define CHUNK 256
#define MOST 32767.0f
#define NORM 46300.0f /* (NORM + sqrt(CHUNK) / 2)^2 < 2^31: so much may rounding add to a norm */
#define TINY 1e-30f /* of the largest number of a chunk: zeros have a step too */
#define WIDTH (2 * LANES)
#define WIDE_BLOCK (2 * WIDTH) /* rows of a weight in one piece of work */
#define SPAN 96 /* tokens in one piece of work */
#ifdef __AVX512F__
#define TOKENS 12 /* of a tile: 2 x 12 sums, 2 + 1 operands and a product fit 32 registers */
#else
#define TOKENS 6 /* 2 x 6 sums, 2 + 1 operands and a product fit 16 */
#endif

typedef int32_t vi_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t pair __attribute__((may_alias, aligned(2)));

INLINE long chunks_of(long size) { return (size + CHUNK - 1) / CHUNK; }
INLINE long filled_up(long rows) { return (rows + WIDTH - 1) / WIDTH * WIDTH; }

INLINE vf size_of(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* x steps as integers; ties to even. */
INLINE vi nearest(vf x, vf steps) {
    return (vi)fused(x, steps, all(12582912.0f)) - 0x4b400000;
}

INLINE float quantise_chunk(const void *x, long size, int type, int16_t *q) {
    vf most = all(TINY), sums = {};
    for (long i = 0; i < size; i += LANES) most = larger(size_of(load(x, i, type)), most);
    float largest = most[0];
    for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    const vf unit = all(1.0f / largest);
    for (long i = 0; i < size; i += LANES) {
        vf each = load(x, i, type) * unit;
        sums = fused(each, each, sums);
    }
    float steps = NORM / sqrtf(sum_of(sums)); /* of the largest */
    if (steps > MOST) steps = MOST;
    for (long i = 0; i < size; i += LANES)
        *(vs_any *)(q + i) =
            __builtin_convertvector(nearest(load(x, i, type) * unit, all(steps)), vs);
    return largest / steps;
}

/* q of x [size], a multiple of LANES, and the step of each of its chunks, which is NaN where a
 * number is none or infinite. */
ONCE static void quantise(const void *x, long size, int type, int16_t *q, float *steps) {
    for (long at = 0; at < size; at += CHUNK) {
        const long num = size - at < CHUNK ? size - at : CHUNK;
        *steps++ = type == F32 ? quantise_chunk((const float *)x + at, num, F32, q + at)
                               : quantise_chunk((const uint16_t *)x + at, num, BF16, q + at);
    }
}

/* Rows first to first + WIDTH - 1 of a weight [rows, inputs]; ``row`` has space for one. */
static void pack(const void *weight, int type, long rows, long inputs, long first, int16_t *row,
                 int16_t *to, float *steps) {
    const long chunks = chunks_of(inputs);
    pair *pairs = (pair *)(to + first * inputs);
    float own[chunks];
    for (long r = 0; r < WIDTH; r++) {
        const int some = first + r < rows;
        const long place = (first + r) * inputs * (type == F32 ? 4 : 2);
        if (some) quantise((const char *)weight + place, inputs, type, row, own);
        for (long c = 0; c < chunks; c++)
            steps[c * filled_up(rows) + first + r] = some ? own[c] : 0;
        for (long k = 0; k < inputs / 2; k++)
            pairs[k * WIDTH + r] = some ? ((const pair *)row)[k] : 0;
    }
}

/* total + the two products of each pair. */
INLINE vi add_pairs(vi total, vi a, vi b) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif LANES == 16
    return total + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
    return total + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return total + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* sums [tokens, WIDE_BLOCK] += WIDTH rows of a weight, whose steps are ``steps``, times some
 * tokens, ``stride`` apart: one chunk of both. A token's steps are ``chunks`` apart. */
INLINE void dot_int16(const int16_t *weight, const float *steps, const int16_t *x, long stride,
                      const float *x_steps, long chunks, long pairs, int tokens, float *sums) {
    vi total[TOKENS][2] = {};
    for (long k = 0; k < pairs; k++) {
        vi low = *(const vi_any *)(weight + k * 2 * WIDTH);
        vi high = *(const vi_any *)(weight + k * 2 * WIDTH + WIDTH);
#pragma GCC unroll 16
        for (int b = 0; b < tokens; b++) {
            vi each = (vi){} + *(const pair *)(x + b * stride + 2 * k);
            total[b][0] = add_pairs(total[b][0], low, each);
            total[b][1] = add_pairs(total[b][1], high, each);
        }
    }
    const vf low = *(const vf_any *)steps, high = *(const vf_any *)(steps + LANES);
#pragma GCC unroll 16
    for (int b = 0; b < tokens; b++) {
        vf_any *to = (vf_any *)(sums + b * WIDE_BLOCK);
        to[0] += __builtin_convertvector(total[b][0], vf) * low * x_steps[b * chunks];
        to[1] += __builtin_convertvector(total[b][1], vf) * high * x_steps[b * chunks];
    }
}

/* Compiled once for each number of tokens, so that sums get registers. */
typedef void DotInt16(const int16_t *weight, const float *steps, const int16_t *x, long stride,
                      const float *x_steps, long chunks, long pairs, float *sums);
#define DOT(TOKENS_)                                                                               \
    static __attribute__((noinline)) void dot_int16_##TOKENS_(                                     \
        const int16_t *weight, const float *steps, const int16_t *x, long stride,                  \
        const float *x_steps, long chunks, long pairs, float *sums) {                              \
        dot_int16(weight, steps, x, stride, x_steps, chunks, pairs, TOKENS_, sums);                \
    }
DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6)
#if TOKENS == 12
DOT(7) DOT(8) DOT(9) DOT(10) DOT(11) DOT(12)
#define MORE_DOTS                                                                                  \
    , dot_int16_7, dot_int16_8, dot_int16_9, dot_int16_10, dot_int16_11, dot_int16_12
#else
#define MORE_DOTS
#endif
static DotInt16 *const dots_int16[TOKENS + 1] = {
    0, dot_int16_1, dot_int16_2, dot_int16_3, dot_int16_4, dot_int16_5, dot_int16_6 MORE_DOTS};

/* y of one token and ``rows`` of WIDTH rows from ``row`` on, from their sums. */
INLINE void finish(const Linear *of, long row, long rows, const float *sums, float *y,
                   int round_to) {
    float part[WIDTH], *out = rows == WIDTH ? y : part;
    for (int i = 0; i < WIDTH; i += LANES) *(vf_any *)(out + i) = *(const vf_any *)(sums + i);
    if (of->bias)
        for (long a = 0; a < rows; a++) out[a] += load_one(of->bias, row + a, round_to);
    if (round_to != F32)
        for (long a = 0; a < rows; a++) out[a] = round_one(out[a], round_to);
    if (out == part)
        for (long a = 0; a < rows; a++) y[a] = part[a];
}

/* WIDE_BLOCK rows from ``row`` on times ``num`` tokens, whose q are x. */
static void block_int16(const Linear *of, long row, long num, const int16_t *x, const float *steps,
                        float *y, int round_to) {
    const long inputs = of->inputs, chunks = chunks_of(inputs);
    const long end = row + WIDE_BLOCK < of->rows ? row + WIDE_BLOCK : of->rows;
    float sums[SPAN * WIDE_BLOCK];
    for (long i = 0; i < num * WIDE_BLOCK; i++) sums[i] = 0;
    for (long chunk = 0; chunk < chunks; chunk++) {
        const long at = chunk * CHUNK, pairs = (inputs - at < CHUNK ? inputs - at : CHUNK) / 2;
        for (long t = 0; t < num; t += TOKENS)
            for (long first = row; first < end; first += WIDTH)
                dots_int16[num - t < TOKENS ? num - t : TOKENS](
                    (const int16_t *)of->weight + first * inputs + at * WIDTH,
                    of->scale + chunk * filled_up(of->rows) + first, x + t * inputs + at, inputs,
                    steps + t * chunks + chunk, chunks, pairs, sums + t * WIDE_BLOCK + first - row);
    }
    for (long t = 0; t < num; t++)
        for (long first = row; first < end; first += WIDTH)
            finish(of, first, end - first < WIDTH ? end - first : WIDTH,
                   sums + t * WIDE_BLOCK + first - row, y + t * of->rows + first, round_to);
}

/* ``multiply`` by a packed weight, of inputs that are quantised already. */
static void multiply_int16(const Linear *of, long num, const int16_t *x, const float *steps,
                           float *y, int round_to) {
    const long blocks = (of->rows + WIDE_BLOCK - 1) / WIDE_BLOCK;
    const long parts = (num + SPAN - 1) / SPAN;
#pragma omp for schedule(dynamic, 1) nowait
    for (long work = 0; work < blocks * parts; work++) {
        long row = work / parts * WIDE_BLOCK, t = work % parts * num / parts;
        long last = (work % parts + 1) * num / parts;
        block_int16(of, row, last - t, x + t * of->inputs, steps + t * chunks_of(of->inputs),
                    y + t * of->rows, round_to);
    }
}
