/* y = x W^T + b for few or many tokens: tiles of the weight's rows and the tokens. */
#pragma once
#include "tile_rows.h"
#include "int16.h"

#ifdef __AVX512F__
#define COLUMNS 6 /* of a tile: 4 x 6 sums and 4 + 1 operands fit 32 registers */
#else
#define COLUMNS 3 /* 4 x 3 sums and 3 + 1 operands fit 16 */
#endif
#define ROWS 4   /* rows of a weight in a tile */
#define BLOCK 32 /* rows of a weight in one piece of work */
#define STRIP 12 /* tokens that meet a block while both are in cache */
#define PANEL (48 << 10) /* numbers of the tokens that a block meets before the next block */
#define GROUP (512 << 10) /* numbers of a weight that all tokens meet before the next ones */

static const long sizes[] = {4, 2, 1}; /* bytes of a weight's number, by type */

/* sums[b][a] = the sum of total[a][b], for one row or ROWS. */
INLINE void add_up(vf total[ROWS][COLUMNS], int rows, int columns, float *sums) {
    if (rows == 1) {
        *sums = sum_of(total[0][0]);
        return;
    }
#pragma GCC unroll 8
    for (int b = 0; b + 1 < columns; b += 2)
        *(vf_any *)(sums + b * ROWS) =
            sums_of_8(total[0][b], total[1][b], total[2][b], total[3][b], total[0][b + 1],
                      total[1][b + 1], total[2][b + 1], total[3][b + 1]);
    int b = columns - 1;
    if (columns % 2)
        *(vf_any *)(sums + b * ROWS) =
            sums_of_4(total[0][b], total[1][b], total[2][b], total[3][b]);
}

/* Ask for the cache line of the same place in the next tile of rows, when i is at a line's start:
 * else a tile that few tokens meet waits for memory. Past the weight's end it does nothing. */
INLINE void fetch_next(const void *weight, long inputs, int row, long i, long size) {
    if (i * size % LINE == 0)
        __builtin_prefetch((const char *)weight + ((row + ROWS) * inputs + i) * size);
}

/* sums[b][a] = weight row a . x row b, for ``rows`` x ``columns`` of them; x is float32. */
INLINE void dot(const void *weight, const void *x, long inputs, int type, int rows, int columns,
                int first, float *sums) {
    vf each[COLUMNS], total[ROWS][COLUMNS] = {};
    const float *input = x;
    const long whole = inputs / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
#pragma GCC unroll 8
        for (int b = 0; b < columns; b++) each[b] = held(*(const vf_any *)(input + b * inputs + i));
#pragma GCC unroll 8
        for (int a = 0; a < rows; a++) {
            if (first) fetch_next(weight, inputs, a, i, sizes[type]);
            vf w = held(load(weight, a * inputs + i, type));
#pragma GCC unroll 8
            for (int b = 0; b < columns; b++) total[a][b] = fused(w, each[b], total[a][b]);
        }
    }
    add_up(total, rows, columns, sums);
    for (long i = whole; i < inputs; i++)
        for (int a = 0; a < rows; a++)
            for (int b = 0; b < columns; b++)
                sums[b * rows + a] +=
                    load_one(weight, a * inputs + i, type) * input[b * inputs + i];
}

/* Compiled once for each number of columns, apart from all else, so that its sums get registers;
 * and once more for the first tokens that meet a tile. */
typedef void Dot(const void *weight, const void *x, long inputs, float *sums);
#define DOTS(NAME, ROWS_, COLUMNS_, FIRST)                                                         \
    static __attribute__((noinline)) void NAME##_f32(const void *weight, const void *x,            \
                                                     long inputs, float *sums) {                   \
        dot(weight, x, inputs, F32, ROWS_, COLUMNS_, FIRST, sums);                                 \
    }                                                                                              \
    static __attribute__((noinline)) void NAME##_bf16(const void *weight, const void *x,           \
                                                      long inputs, float *sums) {                  \
        dot(weight, x, inputs, BF16, ROWS_, COLUMNS_, FIRST, sums);                                \
    }                                                                                              \
    static __attribute__((noinline)) void NAME##_int8(const void *weight, const void *x,           \
                                                      long inputs, float *sums) {                  \
        dot(weight, x, inputs, INT8, ROWS_, COLUMNS_, FIRST, sums);                                \
    }
#define BOTH(NAME, COLUMNS_) DOTS(NAME, ROWS, COLUMNS_, 0) DOTS(first_##NAME, ROWS, COLUMNS_, 1)
DOTS(dot_1x1, 1, 1, 0)
BOTH(dot_4x1, 1)
BOTH(dot_4x2, 2)
BOTH(dot_4x3, 3)
#if COLUMNS == 6
BOTH(dot_4x4, 4)
BOTH(dot_4x5, 5)
BOTH(dot_4x6, 6)
#define REST(WHEN, TYPE) , WHEN##dot_4x4_##TYPE, WHEN##dot_4x5_##TYPE, WHEN##dot_4x6_##TYPE
#else
#define REST(WHEN, TYPE)
#endif
#define TABLE(WHEN, TYPE)                                                                          \
    {dot_1x1_##TYPE, WHEN##dot_4x1_##TYPE, WHEN##dot_4x2_##TYPE,                                   \
     WHEN##dot_4x3_##TYPE REST(WHEN, TYPE)}
#define TABLES(WHEN) {TABLE(WHEN, f32), TABLE(WHEN, bf16), TABLE(WHEN, int8)}
static Dot *const dots[2][3][COLUMNS + 1] = {TABLES(), TABLES(first_)};

/* Rows from ``row`` on times ``columns`` tokens from ``t`` on. */
static void tile(const Linear *of, int rows, int columns, long row, long t, int first,
                 const float *x, float *y, int round_to) {
    const long inputs = of->inputs;
    const int type = (int)of->type;
    float sums[ROWS * COLUMNS + LANES], scale[ROWS], bias[ROWS];
    const char *weight = (const char *)of->weight + row * inputs * sizes[type];
    dots[first][type][rows == 1 ? 0 : columns](weight, x + t * inputs, inputs, sums);
    for (int a = 0; a < rows; a++) {
        scale[a] = type == INT8 ? of->scale[row + a] : 1;
        bias[a] = of->bias ? load_one(of->bias, row + a, round_to) : 0;
    }
    for (int b = 0; b < columns; b++) {
        float *to = y + (t + b) * of->rows + row;
        for (int a = 0; a < rows; a++)
            to[a] = round_one(sums[b * rows + a] * scale[a] + bias[a], round_to);
    }
}

/* A block of rows times tokens first_token to last_token - 1. */
ONCE static void block(const Linear *of, long first, long first_token, long last_token,
                       const float *x, float *y, int round_to) {
    long end = first + BLOCK < of->rows ? first + BLOCK : of->rows;
    for (long strip = first_token; strip < last_token; strip += STRIP) {
        long last = strip + STRIP < last_token ? strip + STRIP : last_token;
        for (long row = first; row < end;) {
            int rows = row + ROWS <= end ? ROWS : 1;
            for (long t = strip; t < last;) {
                long tiles = (last - t + COLUMNS - 1) / COLUMNS; /* of similar width */
                int columns = rows == 1 ? 1 : (int)((last - t + tiles - 1) / tiles);
                tile(of, rows, columns, row, t, strip == first_token, x, y, round_to);
                t += columns;
            }
            row += rows;
        }
    }
}

/* Make of row t what a product takes in besides float32. */
static void narrow(const Linear *of, Inputs in, long t) {
    const long size = of->inputs;
    const float *x = in.wide + t * size;
    uint16_t *to = in.pairs + t * size;
    if (of->type == INT16)
        quantise(x, size, F32, (int16_t *)to, in.steps + t * chunks_of(size));
    if (in_tiles(of)) take_in(x, size, in.pairs, t);
}

/* y [num, rows] = x [num, inputs] weight^T + bias, shared out among the team; no barrier after it.
 *
 * Each row of ``in`` has gone through ``narrow``. Tokens come in panels and blocks in groups, so
 * that a panel stays in the second cache and a group in the third. */
static void multiply(const Linear *of, long num, Inputs in, float *y, int round_to) {
    if (of->type == INT16) {
        multiply_int16(of, num, (const int16_t *)in.pairs, in.steps, y, round_to);
        return;
    }
    if (in_tiles(of)) {
        multiply_tiles(of, num, in.pairs, y, round_to);
        return;
    }
    long blocks = (of->rows + BLOCK - 1) / BLOCK, panel = PANEL / of->inputs / STRIP * STRIP;
    if (panel < STRIP) panel = STRIP;
    long panels = (num + panel - 1) / panel, group = GROUP / (BLOCK * of->inputs) + 1;
#pragma omp for schedule(dynamic, 1) nowait
    for (long work = 0; work < blocks * panels; work++) {
        long start = work / (group * panels) * group; /* the first block of its group */
        long size = start + group < blocks ? group : blocks - start, at = work - start * panels;
        long token = at / size * panel, end = token + panel < num ? token + panel : num;
        block(of, (start + at % size) * BLOCK, token, end, in.wide, y, round_to);
    }
}
