/* Products of tiles of bfloat16: many sums at once, over 32 inputs a tile. By the matrix unit of a
 * processor that has one (AMX), else by the instruction that adds two products to each of 16 sums
 * (``vdpbf16ps``). A sum comes of its own row's and column's numbers alone, two at a time in their
 * order, so it has the same bits wherever it stands, and whichever of its factors is the left one.
 *
 * A left factor's tile is rows of 32 numbers. A right one's is 16 pairs of inputs, each of 16
 * columns: [16][16][2]; "paired" numbers lie so, tile after tile. A block of sums is two halves of
 * HALF rows, times BLOCK_COLUMNS columns.
 */
#pragma once
#include <omp.h>
#include "linear.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define TILES 1
#define TILE 16        /* columns, and pairs of inputs of a tile */
#define TWO (2 * TILE) /* inputs of a tile */
#define TILE_BYTES 1024

/* Rows of the left factor in two halves: where they begin, how many they are, and bytes from row to
 * row and from tile to tile. */
typedef struct { const char *upper, *lower; long num_upper, num_lower, stride, step; } Left;

/* Tiles of columns, paired, ``apart`` bytes from one to the next; and so many lines of memory, from
 * ``next`` on, that are asked for with each tile of inputs. */
typedef struct { const char *first; long apart, num; const char *next; long lines; } Right;

/* Where sums [2 HALF][apart] are, and whether they begin at 0 or at what is there. Without a matrix
 * unit those that begin at 0 go, if ``rounded`` is not null, there instead: as rows of bfloat16, so
 * many numbers from row to row. */
typedef struct { float *at; long apart, fresh; uint16_t *rounded; long line; } Sums;

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX 1
#define HALF TILE
#define AT_ONCE TWO /* rows */
#define BLOCK_COLUMNS TWO

static int has_tiles; /* Linux lends the unit's registers to a process that asks */

__attribute__((constructor)) static void ask_for_tiles(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    has_tiles = syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Sums in tiles 0 to 3, left factors in 4 and 5 of these numbers of rows, right ones in 6 and 7.
 * Without a lower half the upper one is computed twice. */
static void begin_rows(Left a) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {
        .palette = 1};
    const long upper = a.num_upper, lower = a.num_lower ? a.num_lower : upper;
    const long rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = (uint8_t)rows[i];
    /* Not by _tile_loadconfig, of which gcc believes that it reads 8 bytes. */
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
}

#define end_rows _tile_release

#define EACH_SUM(MOVE, a, to)                                                                      \
    {                                                                                              \
        MOVE(0, (to).at, (to).apart * 4);                                                          \
        MOVE(1, (to).at + TILE, (to).apart * 4);                                                   \
        if ((a).num_lower) {                                                                       \
            MOVE(2, (to).at + TILE * (to).apart, (to).apart * 4);                                  \
            MOVE(3, (to).at + TILE * (to).apart + TILE, (to).apart * 4);                           \
        }                                                                                          \
    }

INLINE void begin_sums(Left a, Sums to) {
    if (!to.fresh) {
        EACH_SUM(_tile_loadd, a, to)
        return;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Products are added up in steps: here, of a tile of inputs for all sums. */
INLINE long num_steps(long tiles) { return tiles; }

INLINE void add_step(const Left *a, const Right *b, long tiles, long step, const Sums *to) {
    const char *left = b->first + step * TILE_BYTES, *lower = a->num_lower ? a->lower : a->upper;
    (void)tiles, (void)to;
    _tile_loadd(4, a->upper + step * a->step, a->stride);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, b->num > 1 ? left + b->apart : left, 64);
    _tile_loadd(5, lower + step * a->step, a->stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void end_sums(Left a, Sums to) EACH_SUM(_tile_stored, a, to)

#else
#define AMX 0
#define HALF 24
#define BLOCK_COLUMNS (4 * TILE)
#define AT_ONCE 6 /* rows: 6 x 4 sums and 4 + 1 operands fit 32 registers */
static const int has_tiles = 1;
INLINE void begin_rows(Left a) { (void)a; }
INLINE void end_rows(void) {}
INLINE void begin_sums(Left a, Sums to) { (void)a, (void)to; }
INLINE void end_sums(Left a, Sums to) { (void)a, (void)to; }

/* Sums of some rows and ``columns`` tiles, rounded. */
INLINE void round_sums(vf total[AT_ONCE][BLOCK_COLUMNS / TILE], int rows, int columns, uint16_t *to,
                       long line) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c += 2) {
            uint16_t *at = to + r * line + c * TILE;
            const __m512 first = (__m512)total[r][c];
            if (c + 1 < columns)
                _mm512_storeu_si512(
                    at, (__m512i)_mm512_cvtne2ps_pbh((__m512)total[r][c + 1], first));
            else
                _mm256_storeu_si256((__m256i *)at, (__m256i)_mm512_cvtneps_pbh(first));
        }
}

/* sums += left right of ``rows`` rows and ``columns`` tiles of columns, over all inputs. What it is
 * told comes by address: to copy a structure waits for whatever was written before. */
INLINE void sum_up(const Left *of, const Right *b, long tiles, long step, const Sums *to, int rows,
                   int columns) {
    const long row = step * AT_ONCE % HALF, below = step * AT_ONCE / HALF;
    const long at = below * HALF + row, stride = of->stride, apart = b->apart, lines = b->lines;
    const long left_step = of->step, sums_apart = to->apart;
    const char *left = (below ? of->lower : of->upper) + row * stride, *first = b->first;
    const char *next = b->next + step * tiles * lines * LINE;
    float *sums = to->at + at * sums_apart;
    vf total[AT_ONCE][BLOCK_COLUMNS / TILE] = {};
    __m512bh each[BLOCK_COLUMNS / TILE];
    if (!to->fresh)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                total[r][c] = *(const vf_any *)(sums + r * sums_apart + c * TILE);
    for (long tile = 0; tile < tiles; tile++) {
        const char *a = left + tile * left_step, *of_tile = first + tile * TILE_BYTES;
        for (long i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 16
        for (long pair = 0; pair < TILE; pair++) {
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                each[c] = (__m512bh)_mm512_load_si512(of_tile + c * apart + pair * 64);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int both = *(const int_any *)(a + r * stride + pair * 4);
                const __m512bh w = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++)
                    total[r][c] = (vf)_mm512_dpbf16_ps((__m512)total[r][c], w, each[c]);
            }
        }
    }
    if (to->rounded) {
        round_sums(total, rows, columns, to->rounded + at * to->line, to->line);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            *(vf_any *)(sums + r * sums_apart + c * TILE) = total[r][c];
}

/* Compiled once for each number of rows and columns, so that all sums get registers. */
typedef void SumUp(const Left *a, const Right *b, long tiles, long step, const Sums *to);
#define SUM_UP(ROWS_, COLUMNS_)                                                                    \
    ONCE static void sum_up_##ROWS_##x##COLUMNS_(const Left *a, const Right *b, long tiles,        \
                                                 long step, const Sums *to) {                      \
        sum_up(a, b, tiles, step, to, ROWS_, COLUMNS_);                                            \
    }
#define SUM_UP_ROWS(N) SUM_UP(N, 1) SUM_UP(N, 2) SUM_UP(N, 3) SUM_UP(N, 4)
#define SUMS_OF_ROWS(N) {sum_up_##N##x1, sum_up_##N##x2, sum_up_##N##x3, sum_up_##N##x4}
SUM_UP_ROWS(1) SUM_UP_ROWS(2) SUM_UP_ROWS(3) SUM_UP_ROWS(4) SUM_UP_ROWS(5) SUM_UP_ROWS(6)
static SumUp *const sums_up[AT_ONCE][BLOCK_COLUMNS / TILE] = {
    SUMS_OF_ROWS(1), SUMS_OF_ROWS(2), SUMS_OF_ROWS(3),
    SUMS_OF_ROWS(4), SUMS_OF_ROWS(5), SUMS_OF_ROWS(6)};

/* Products are added up in steps: here, of all inputs for some rows. */
INLINE long num_steps(long tiles) { return (void)tiles, 2 * HALF / AT_ONCE; }

INLINE void add_step(const Left *a, const Right *b, long tiles, long step, const Sums *to) {
    const long row = step * AT_ONCE % HALF, below = step * AT_ONCE / HALF;
    const long rows = at_most((below ? a->num_lower : a->num_upper) - row, AT_ONCE);
    if (rows <= 0) return;
    sums_up[rows - 1][at_most(b->num, BLOCK_COLUMNS / TILE) - 1](a, b, tiles, step, to);
}
#endif

/* sums += left right over all inputs, or = if they are fresh. */
INLINE void add_products(Left a, Right b, long tiles, Sums to) {
    begin_sums(a, to);
    for (long step = 0; step < num_steps(tiles); step++) add_step(&a, &b, tiles, step, &to);
    end_sums(a, to);
}

/* ``num`` rows of numbers that lie one after the other, up to 2 HALF. */
INLINE Left left_of(const uint16_t *first, long num, long size) {
    const char *upper = (const char *)first;
    const long more = num > HALF ? num - HALF : 0;
    return (Left){upper, upper + HALF * size * 2, num - more, more, size * 2, 64};
}
#else
#define TILES 0
#define AMX 0
#define TILE 1
static const int has_tiles = 0;
#endif

/* Whether a decoder's products are made of tiles. The matrix unit takes weights as they lie and
 * tokens paired; else tokens are taken as they lie, and weights are TILED before. */
INLINE int in_tiles(const Linear *of) {
    return has_tiles && of->type == (AMX ? BF16 : TILED);
}

/* Tokens in whole tiles. */
INLINE long filled_tiles(long tokens) { return (tokens + TILE - 1) / TILE * TILE; }

/* The first of a thread's own outputs of a TILED weight, which begin where those of the thread
 * before end. */
INLINE long first_of(const Linear *of, long thread) {
    return at_most(filled_tiles(of->rows) / TILE * thread / omp_get_num_threads() * TILE, of->rows);
}
