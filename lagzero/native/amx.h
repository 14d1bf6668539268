/* Products of bfloat16 by the matrix unit of a processor that has one (AMX): 16 x 16 sums at once,
 * over 32 inputs. A sum comes of its own row's and column's numbers alone, 32 at a time in their
 * order, so it has the same bits wherever it stands, and whichever of its factors is the left one.
 *
 * A left factor's tile is 16 rows of 32 numbers. A right one's is 16 pairs of inputs, each of 16
 * columns: [16][16][2]; "paired" numbers lie so, tile after tile.
 */
#pragma once
#include <omp.h>
#include "linear.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)                      \
    && defined(__AVX512BW__) && defined(__linux__)
#define AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#define TILE 16      /* rows, columns, and pairs of inputs of a tile */
#define TWO (2 * TILE) /* also inputs of a tile */
#define TILE_BYTES 1024
#define TILE_PANEL (256 << 10) /* numbers of the tokens that a weight's rows meet in turn */

static int has_tiles; /* Linux lends the unit's registers to a process that asks */

__attribute__((constructor)) static void ask_for_tiles(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    has_tiles = syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Sums in tiles 0 to 3, left factors in 4 and 5 of these numbers of rows, right ones in 6 and 7. */
static void shape_tiles(long upper, long lower) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {
        .palette = 1};
    const long rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = (uint8_t)rows[i];
    _tile_loadconfig(&shape);
}

/* Two tiles of rows: where they begin, bytes from row to row and from tile to tile; the memory
 * from ``next`` on, laid out alike, of which ``ahead`` rows are asked for meanwhile. */
typedef struct { const char *upper, *lower; long stride, step; const char *next; long ahead; } Left;
typedef struct { const char *left, *right; } Right; /* two tiles of columns, paired */

static Left left_of(const uint16_t *first, long rows, long size) {
    const char *upper = (const char *)first;
    return (Left){upper, rows > TILE ? upper + TILE * size * 2 : upper, size * 2, 64, 0, 0};
}

/* sum += left right, over so many tiles, for the four sums that are in tiles 0 to 3. */
INLINE void add_products(Left a, Right b, long tiles) {
    for (long i = 0; i < tiles; i++) {
        _tile_loadd(4, a.upper + i * a.step, a.stride);
        _tile_loadd(6, b.left + i * TILE_BYTES, 64);
        _tile_loadd(7, b.right + i * TILE_BYTES, 64);
        _tile_loadd(5, a.lower + i * a.step, a.stride);
        for (long row = 0; row < a.ahead; row++)
            __builtin_prefetch(a.next + row * a.stride + i * a.step, 0, 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

INLINE void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* To or from [TWO][TWO] numbers; ``lower`` is 0 if there are no more than TILE rows. */
#define EACH_SUM(MOVE, at, size, lower)                                                            \
    {                                                                                              \
        MOVE(0, at, (size) * 4);                                                                   \
        MOVE(1, (at) + TILE, (size) * 4);                                                          \
        if (lower) {                                                                               \
            MOVE(2, (at) + TILE * (size), (size) * 4);                                             \
            MOVE(3, (at) + TILE * (size) + TILE, (size) * 4);                                      \
        }                                                                                          \
    }

/* y of rows first on times tokens t to last - 1, from sums [rows][tokens]. */
INLINE void write_turned(const Linear *of, const float *sums, long first, long rows, long t,
                         long last, float *y, int round_to) {
    vf each[TILE], bias = {};
    for (int i = 0; i < TILE; i++) each[i] = *(const vf *)(sums + i * TWO);
    transpose(each);
    for (int i = 0; i < rows && of->bias; i++) bias[i] = load_one(of->bias, first + i, round_to);
    const __mmask16 some = (__mmask16)((1u << rows) - 1);
    for (int i = 0; i < TILE && t + i < last; i++)
        _mm512_mask_storeu_ps(y + (t + i) * of->rows + first, some,
                              (__m512)round_all(each[i] + bias, round_to));
}

/* Rows first to end - 1 of a weight, the left factor, times tokens begin to last - 1, paired. */
ONCE static void block_amx(const Linear *of, long first, long end, long begin, long last,
                           const uint16_t *x, float *y, int round_to) {
    const long inputs = of->inputs, passes = (last - begin + TWO - 1) / TWO;
    _Alignas(64) float sums[TWO * TWO];
    for (; first < end; first += TWO) {
        /* What is missing is computed twice rather than read from beyond the end. */
        const long rows = end - first < TWO ? end - first : TWO;
        const long upper = rows < TILE ? rows : TILE, lower = rows > TILE ? rows - TILE : 0;
        Left weight = left_of((const uint16_t *)of->weight + first * inputs, rows, inputs);
        weight.next = weight.upper + TWO * weight.stride;
        weight.ahead = first + 2 * TWO <= end ? (TWO + passes - 1) / passes : 0;
        shape_tiles(upper, lower ? lower : upper);
        for (long t = begin; t < last; t += TWO) {
            const long right = t + TILE < last ? TILE : 0; /* tokens further on */
            clear_sums();
            add_products(weight, (Right){(const char *)(x + t * inputs),
                                         (const char *)(x + (t + right) * inputs)}, inputs / TWO);
            EACH_SUM(_tile_stored, sums, TWO, 1)
            for (long more = 0; more <= right; more += TILE) {
                write_turned(of, sums + more, first, upper, t + more, last, y, round_to);
                if (lower)
                    write_turned(of, sums + TILE * TWO + more, first + TILE, lower, t + more, last,
                                 y, round_to);
            }
            weight.next += weight.ahead * weight.stride;
        }
    }
    _tile_release();
}

/* Row t of x [size], rounded, to its place among paired tokens. */
static void pair_up(const float *x, long size, uint16_t *pairs, long t) {
    uint32_t *to = (uint32_t *)(pairs + t / TILE * TILE * size) + t % TILE;
    for (long i = 0; i < size; i += TILE, to += TILE * TILE / 2) {
        const __m512 each = (__m512)*(const vf_any *)(x + i);
        union { __m256bh vector; uint32_t words[TILE / 2]; } both = {_mm512_cvtneps_pbh(each)};
        for (int j = 0; j < TILE / 2; j++) to[j * TILE] = both.words[j];
    }
}

/* ``multiply`` by a bfloat16 weight, of tokens that have been paired up. Each thread has rows that
 * follow one another, so that it knows what to ask memory for next. */
static void multiply_amx(const Linear *of, long num, const uint16_t *x, float *y, int round_to) {
    const long blocks = (of->rows + TWO - 1) / TWO, threads = omp_get_num_threads();
    const long first = blocks * omp_get_thread_num() / threads * TWO;
    const long last = blocks * (omp_get_thread_num() + 1) / threads * TWO;
    const long end = last < of->rows ? last : of->rows;
    long panel = TILE_PANEL / of->inputs / TWO * TWO;
    if (panel < TWO) panel = TWO;
    for (long t = 0; t < num; t += panel)
        block_amx(of, first, end, t, t + panel < num ? t + panel : num, x, y, round_to);
}
#else
#define AMX 0
#define TILE 1
static const int has_tiles = 0;
#define pair_up(x, size, pairs, t)
#define multiply_amx(of, num, x, y, round_to)
#endif

/* Tokens in whole tiles. */
INLINE long filled_tiles(long tokens) { return (tokens + TILE - 1) / TILE * TILE; }
