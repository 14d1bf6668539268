/* Products of a decoder by the matrix unit: a weight's rows, as they lie, and paired tokens. */
#pragma once
#include "unit.h"

#if AMX
#define LARGE 8192 /* outputs of a layer that fill no cache */
#define TILE_PANEL (256 << 10) /* numbers of the tokens that a weight's rows meet in turn */

/* A product of a weight's rows, and which tokens, paired, they meet: begin to last - 1. */
typedef struct {
    const Linear *of, *up; /* ``of`` is the gate that goes with ``up``, if this is not null */
    const uint16_t *x;
    long begin, last;
    float *y;         /* [tokens, rows], rounded */
    uint16_t *narrow; /* or the same in bfloat16 */
    uint16_t *pairs;  /* or, of a gate, what the MLP's last product takes in */
    int round_to;
} Product;

enum { WIDE_RESULT, NARROW_RESULT, GATED_RESULT };

/* Sums [TWO][TWO] of rows from ``first`` on times tokens from ``t`` on, or of TILE rows of a gate
 * and of as many that go with it. They are written in parts while the next are added up. */
typedef struct { const float *sums; long first, rows, t; } Waiting;

/* Rows times TILE tokens, as y has them. What fills no cache goes past it. */
INLINE void write_turned(const Product *p, const float *sums, long first, long rows, long t) {
    const long size = p->of->rows;
    vf each[TILE], bias = {};
    for (int i = 0; i < TILE; i++) each[i] = *(const vf *)(sums + i * TWO);
    transpose(each);
    if (p->of->bias) bias = load_some(p->of->bias, first, rows, p->round_to);
    const __mmask16 some = (__mmask16)((1u << rows) - 1);
    float *to = p->y + t * size + first;
    const int past = size >= LARGE && rows == TILE && ((uintptr_t)to | size * 4) % LINE == 0;
    for (int i = 0; i < TILE && t + i < p->last; i++, to += size) {
        const __m512 result = (__m512)round_all(each[i] + bias, p->round_to);
        if (past)
            _mm512_stream_ps(to, result);
        else
            _mm512_mask_storeu_ps(to, some, result);
    }
}

/* Two rows, as one of a tile, rounded: numbers of the first at even places. */
INLINE __m512i interleaved(vf first, vf second) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10,
                                                     25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                                     3, 18, 2, 17, 1, 16, 0), both);
}

/* Rows, up to TWO, times TILE tokens in bfloat16. */
INLINE void write_narrow(const Product *p, const float *sums, long first, long rows, long t) {
    const long size = p->of->rows;
    vf each[TILE];
    for (int i = 0; i < TILE; i++) {
        vf a = *(const vf *)(sums + 2 * i * TWO), b = *(const vf *)(sums + (2 * i + 1) * TWO);
        if (p->of->bias && 2 * i < rows) a += load_one(p->of->bias, first + 2 * i, BF16);
        if (p->of->bias && 2 * i + 1 < rows) b += load_one(p->of->bias, first + 2 * i + 1, BF16);
        each[i] = (vf)interleaved(a, b);
    }
    transpose(each);
    const __mmask32 some = (__mmask32)((1ul << rows) - 1);
    uint16_t *to = p->narrow + t * size + first;
    const int past = size >= LARGE && rows == TWO && ((uintptr_t)to | size * 2) % LINE == 0;
    for (int i = 0; i < TILE && t + i < p->last; i++, to += size) {
        if (past)
            _mm512_stream_si512((void *)to, (__m512i)each[i]);
        else
            _mm512_mask_storeu_epi16(to, some, (__m512i)each[i]);
    }
}

/* Two rows of a gate, times TILE tokens, with those that go with them. */
INLINE void write_gated(const Product *p, const float *sums, long row, long t) {
    vf each[2];
    for (int i = 0; i < 2; i++) {
        vf gate = *(const vf *)(sums + i * TWO), up = *(const vf *)(sums + (TILE + i) * TWO);
        if (p->of->bias) gate += load_one(p->of->bias, row + i, BF16);
        if (p->up->bias) up += load_one(p->up->bias, row + i, BF16);
        each[i] = gated_some(round_all(gate, BF16), round_all(up, BF16), BF16);
    }
    _mm512_store_si512(p->pairs + t * p->of->rows + row * TILE, interleaved(each[0], each[1]));
}

static const long parts_of[] = {[WIDE_RESULT] = 4, [NARROW_RESULT] = 2, [GATED_RESULT] = TILE};

INLINE void write_part(const Product *p, Waiting of, long part, int kind) {
    const long right = part % 2 * TILE;
    const long below = part / 2 * (kind == GATED_RESULT ? 2 : TILE);
    if (of.t + right >= p->last || below >= of.rows) return;
    const float *sums = of.sums + below * TWO + right;
    if (kind == GATED_RESULT)
        write_gated(p, sums, of.first + below, of.t + right);
    else if (kind == NARROW_RESULT)
        write_narrow(p, sums, of.first, of.rows, of.t + right);
    else
        write_turned(p, sums, of.first + below, at_most(of.rows - below, TILE), of.t + right);
}

/* Ask memory for some of the rows that follow each half. */
INLINE void ask_for(Left a, long next, long some, long tile) {
    for (long row = next; row < next + some; row++) {
        __builtin_prefetch(a.upper + row * a.stride + tile * a.step, 0, 2);
        __builtin_prefetch(a.lower + row * a.stride + tile * a.step, 0, 2);
    }
}

/* Rows first to end - 1 of a weight, or of gate and up, are the left factor. */
INLINE void add_block(const Product *p, long first, long end, int kind) {
    const long inputs = p->of->inputs, tiles = inputs / TWO, parts = parts_of[kind];
    const int gated = kind == GATED_RESULT;
    const long each = gated ? TILE : TWO, passes = (p->last - p->begin + TWO - 1) / TWO;
    _Alignas(64) float sums[2][TWO * TWO];
    Waiting waiting = {0, 0, 0, p->last};
    for (int at = 0; first < end; first += each) {
        const long rows = at_most(end - first, each);
        Left weight = left_of((const uint16_t *)p->of->weight + first * inputs, rows, inputs);
        if (gated) {
            weight.lower = (const char *)p->up->weight + first * weight.stride;
            weight.num_lower = rows;
        }
        begin_rows(weight);
        const long ahead = first + 2 * each <= end ? (TILE + passes - 1) / passes : 0;
        long next = each;
        for (long t = p->begin; t < p->last; t += TWO, at ^= 1) {
            const Right tokens = {(const char *)(p->x + t * inputs), TILE * inputs * 2,
                                  t + TILE < p->last ? 2 : 1, 0, 0};
            const Sums to = {sums[at], TWO, 1, 0, 0};
            long part = 0;
            begin_sums(weight, to);
            for (long tile = 0; tile < tiles; tile++) {
                add_step(&weight, &tokens, tiles, tile, &to);
                ask_for(weight, next, ahead, tile);
                for (; part * tiles < (tile + 1) * parts; part++)
                    write_part(p, waiting, part, kind);
            }
            end_sums(weight, to);
            waiting = (Waiting){sums[at], first, rows, t};
            next += ahead;
        }
    }
    end_rows();
    for (long part = 0; part < parts; part++) write_part(p, waiting, part, kind);
    _mm_sfence();
}

ONCE static void block_amx(const Product *of, long first, long end) {
    add_block(of, first, end, WIDE_RESULT);
}
ONCE static void block_narrow(const Product *of, long first, long end) {
    add_block(of, first, end, NARROW_RESULT);
}
ONCE static void block_gated(const Product *of, long first, long end) {
    add_block(of, first, end, GATED_RESULT);
}

/* Row t of x [size], rounded, to its place among paired tokens. */
static void take_in(const float *x, long size, uint16_t *pairs, long t) {
    uint32_t *to = (uint32_t *)(pairs + t / TILE * TILE * size) + t % TILE;
    for (long i = 0; i < size; i += TILE, to += TILE * TILE / 2) {
        const __m512 each = (__m512)*(const vf_any *)(x + i);
        union { __m256bh vector; uint32_t words[TILE / 2]; } both = {_mm512_cvtneps_pbh(each)};
        for (int j = 0; j < TILE / 2; j++) to[j * TILE] = both.words[j];
    }
}

/* Tokens in panels, times rows of each thread that follow one another, so that it knows what to ask
 * memory for next. */
static void product_amx(Product of, long num) {
    const long blocks = (of.of->rows + TWO - 1) / TWO, threads = omp_get_num_threads();
    const long first = blocks * omp_get_thread_num() / threads * TWO;
    const long last = blocks * (omp_get_thread_num() + 1) / threads * TWO;
    const long end = at_most(last, of.of->rows);
    const long most = TILE_PANEL / of.of->inputs / TWO * TWO, panel = most < TWO ? TWO : most;
    for (of.begin = 0; of.begin < num; of.begin += panel) {
        of.last = at_most(of.begin + panel, num);
        if (of.up)
            block_gated(&of, first, end);
        else if (of.narrow)
            block_narrow(&of, first, end);
        else
            block_amx(&of, first, end);
    }
}

/* ``multiply`` by a bfloat16 weight, of tokens that have been paired up. */
static void multiply_tiles(const Linear *of, long num, const uint16_t *x, float *y, int round_to) {
    product_amx((Product){.of = of, .x = x, .y = y, .round_to = round_to}, num);
}

/* The same in bfloat16. */
static void multiply_narrow(const Linear *of, long num, const uint16_t *x, uint16_t *y) {
    product_amx((Product){.of = of, .x = x, .narrow = y, .round_to = BF16}, num);
}

/* Products of gate and up, gated and paired. */
static void gate_amx(const Linear *gate, const Linear *up, long num, const uint16_t *x,
                     uint16_t *pairs) {
    product_amx((Product){.of = gate, .up = up, .x = x, .pairs = pairs, .round_to = BF16}, num);
}
#else
#define gate_amx(gate, up, num, x, pairs)
#endif
