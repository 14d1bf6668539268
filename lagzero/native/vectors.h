/* Vectors of float32 lanes, the types that weights and caches are held in, and rounding. */
#pragma once
#include <math.h>
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))
/* Compiled once, so that all who call it run the same instructions. */
#define ONCE __attribute__((noinline, noclone))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t vh_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int32_t int_any __attribute__((aligned(2), may_alias));
typedef int16_t vs __attribute__((vector_size(2 * LANES)));
typedef int16_t vs_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vc_any __attribute__((vector_size(LANES), aligned(1), may_alias));

enum { F32 = 0, BF16 = 1, INT8 = 2, INT16 = 3, TILED = 4 };

/* In a register: else gcc reads an operand from memory again for each use, twice as many loads. */
INLINE vf held(vf v) {
#ifdef __AVX2__
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* gcc makes several instructions of what the machine has one for; hence the intrinsics. */
INLINE vf widen(const uint16_t *from) {
#if LANES == 16
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
#elif defined(__AVX2__)
    return (vf)((vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)) << 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_any *)from, vu) << 16);
#endif
}

INLINE vf widen_bytes(const int8_t *from) {
#if LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(*(const vc_any *)from, vf);
#endif
}

INLINE vf widen_integers(const int16_t *from) {
#if LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    return __builtin_convertvector(*(const vs_any *)from, vf);
#endif
}

INLINE vf load(const void *from, long at, int type) {
    if (type == F32) return *(const vf_any *)((const float *)from + at);
    if (type == BF16) return widen((const uint16_t *)from + at);
    if (type == INT16) return widen_integers((const int16_t *)from + at);
    return widen_bytes((const int8_t *)from + at);
}

INLINE float load_one(const void *from, long at, int type) {
    if (type == F32) return ((const float *)from)[at];
    if (type == INT8) return ((const int8_t *)from)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)from)[at] << 16};
    return wide.value;
}

INLINE vf pick(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }

/* To the nearest bfloat16, ties to even; infinities stay, NaN stays NaN. */
INLINE float round_one(float value, int type) {
    if (type == F32 || value != value) return value;
    union { float value; uint32_t bits; } wide = {value};
    wide.bits += 0x7fff + ((wide.bits >> 16) & 1);
    wide.bits &= 0xffff0000u;
    return wide.value;
}

#if LANES == 16 && defined(__AVX512BF16__)
#define ROUNDS 1 /* the machine does, and takes a denormal number for 0 */
INLINE __m256i to_bf16(vf values) { return (__m256i)_mm512_cvtneps_pbh((__m512)values); }
#else
#define ROUNDS 0
#endif

/* ``round_one`` of all. */
INLINE vf round_bits(vf values) {
    vu bits = (vu)values;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return pick(values == values, (vf)bits, values);
}

INLINE vf round_all(vf values, int type) {
    if (type == F32) return values;
#if ROUNDS
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(values)), 16);
#else
    return round_bits(values);
#endif
}

INLINE void store_one(void *to, long at, float value, int type) {
    if (type == F32) { ((float *)to)[at] = value; return; }
    union { float value; uint32_t bits; } wide = {round_one(value, BF16)};
    ((uint16_t *)to)[at] = (uint16_t)(wide.bits >> 16);
}

INLINE void store(void *to, long at, vf values, int type) {
    if (type == F32) {
        *(vf_any *)((float *)to + at) = values;
        return;
    }
#if ROUNDS
    _mm256_storeu_si256((__m256i *)((uint16_t *)to + at), to_bf16(values));
#else
    const vu bits = (vu)round_all(values, BF16) >> 16;
#if LANES == 16
    _mm256_storeu_si256((__m256i *)((uint16_t *)to + at), _mm512_cvtepi32_epi16((__m512i)bits));
#else
    *(vh_any *)((uint16_t *)to + at) = __builtin_convertvector(bits, vh);
#endif
#endif
}

/* LANES numbers, or the few that are left, and zeros. */
INLINE vf load_some(const void *from, long at, long left, int type) {
    if (left >= LANES) return load(from, at, type);
    vf some = {};
    for (int i = 0; i < left; i++) some[i] = load_one(from, at + i, type);
    return some;
}

INLINE void store_some(void *to, long at, long left, vf values, int type) {
    if (left >= LANES)
        store(to, at, values, type);
    else
        for (int i = 0; i < left; i++) store_one(to, at + i, values[i], type);
}

/* Numbers from ``at`` on, of one type, to ``place`` on as another. */
INLINE void copy(const void *from, int type, long at, long num, void *to, long place, int to_type) {
    long i = 0;
    for (; i + LANES <= num; i += LANES)
        store(to, place + i, load(from, at + i, type), to_type);
    for (; i < num; i++) store_one(to, place + i, load_one(from, at + i, type), to_type);
}

/* a b + c in one rounding, where the machine has it. Written out, and the compiler forbidden to do
 * so by itself (-ffp-contract=off): what it chose for one loop it did not for another. */
INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE vf all(float value) { return (vf){} + value; }

INLINE float sum_of(vf v) {
    for (int width = LANES / 2; width; width /= 2) {
        vi other;
        for (int i = 0; i < LANES; i++) other[i] = i ^ width;
        v += __builtin_shuffle(v, other);
    }
    return v[0];
}

/* In each stretch of 2 width lanes: sums of the halves of a's, and beside them those of b's. */
#define FOLD(a, b, width)                                                                          \
    (__builtin_shuffle(a, b, LOW_##width) + __builtin_shuffle(a, b, LOW_##width + width))
#if LANES == 16
#define LOW_8 ((vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23})
#define LOW_4 ((vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27})
#define LOW_2 ((vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29})
#define LOW_1 ((vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30})
#else
#define LOW_4 ((vi){0, 1, 2, 3, 8, 9, 10, 11})
#define LOW_2 ((vi){0, 1, 8, 9, 4, 5, 12, 13})
#define LOW_1 ((vi){0, 8, 2, 10, 4, 12, 6, 14})
#endif

/* ``sum_of`` a to d, in the order of its sums, in lanes 0 to 3. */
INLINE vf sums_of_4(vf a, vf b, vf c, vf d) {
#if LANES == 16
    vf e = FOLD(a, c, 8), f = FOLD(b, d, 8), g = FOLD(e, f, 4), h = FOLD(g, g, 2);
    return __builtin_shuffle(FOLD(h, h, 1), (vi){0, 4, 8, 12});
#else
    vf e = FOLD(a, c, 4), f = FOLD(b, d, 4), g = FOLD(e, f, 2);
    return __builtin_shuffle(FOLD(g, g, 1), (vi){0, 2, 4, 6});
#endif
}

/* The same of a to h, in lanes 0 to 7. */
INLINE vf sums_of_8(vf a, vf b, vf c, vf d, vf e, vf f, vf g, vf h) {
#if LANES == 16
    a = FOLD(a, e, 8), b = FOLD(b, f, 8), c = FOLD(c, g, 8), d = FOLD(d, h, 8);
    a = FOLD(a, c, 4), b = FOLD(b, d, 4), a = FOLD(a, b, 2);
    return __builtin_shuffle(FOLD(a, a, 1), (vi){0, 2, 4, 6, 8, 10, 12, 14});
#else
    a = FOLD(a, e, 4), b = FOLD(b, f, 4), c = FOLD(c, g, 4), d = FOLD(d, h, 4);
    a = FOLD(a, c, 2), b = FOLD(b, d, 2);
    return FOLD(a, b, 1);
#endif
}

/* LANES rows as columns. */
INLINE void transpose(vf rows[LANES]) {
#define EXCHANGE(WIDTH_, LOW)                                                                      \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & WIDTH_)) {                  \
        vf a = rows[i], b = rows[i + WIDTH_];                                                      \
        rows[i] = __builtin_shuffle(a, b, LOW);                                                    \
        rows[i + WIDTH_] = __builtin_shuffle(a, b, LOW + WIDTH_);                                  \
    }
#if LANES == 16
    EXCHANGE(8, LOW_8)
#endif
    EXCHANGE(4, LOW_4) EXCHANGE(2, LOW_2) EXCHANGE(1, LOW_1)
#undef EXCHANGE
}

/* Of two numbers; the second one if either is NaN. */
#if LANES == 16
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return pick(a < b, a, b); }
#endif

/* exp, 0 below e^-87: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
 * Its coefficients are those of expf in Cephes (Moshier). */
INLINE vf exp_of(vf x) {
    vf low = (vf){} - 87.0f, high = (vf){} + 88.0f;
    vi none = x < low;
    x = smaller(high, larger(low, x));
    vf steps = fused(x, all(1.44269504f), all(12582912.0f)); /* rounds to an integer in low bits */
    vi whole = (vi)steps - 0x4b400000;
    steps -= 12582912.0f;
    vf r = fused(steps, all(-0.693359375f), x);
    r = fused(steps, all(2.12194440e-4f), r);
    vf p = fused(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    return pick(none, (vf){}, p * (vf)((whole + 127) << 23));
}

/* 1 / x for x >= 1, to a part in 2^22. */
INLINE vf reciprocal(vf x) {
#if LANES == 16
    const vf near = (vf)_mm512_rcp14_ps((__m512)x);
    return near * fused(-x, near, all(2.0f));
#else
    return 1.0f / x;
#endif
}

/* gate / (1 + exp(-gate)), rounded, times up; this is to be rounded too. */
INLINE vf gated_some(vf gate, vf up, int type) {
    const vf below = 1.0f + exp_of(-gate);
    return round_all(type == F32 ? gate / below : gate * reciprocal(below), type) * up;
}
