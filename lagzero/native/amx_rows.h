/* Products of a trainer's many rows by the matrix unit: y = x W^T with the bits of ``multiply``,
 * and its gradients. Rows are the left factor, as they lie; each thread pairs the right one, TWO
 * columns at a time.
 *
 * Letters: T rows, K inputs of a layer, M its outputs.
 */
#pragma once
#include "amx.h"

#define MANY 256 /* rows that a weight is paired for */
#define DEEP 2048 /* numbers of a sum whose right factor lies in a thread's stack */
#if AMX
#define MOST_OUTPUTS 128 /* outputs whose weights lie in a thread's stack */
#define PANEL_ROWS 512 /* whose sums lie there too */

static const uint16_t pair_order[2][TWO] = {
    {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
     24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};

INLINE long at_most(long number, long most) { return number < most ? number : most; }

/* TWO columns of up to TWO rows, ``apart`` numbers from row to row, paired: one tile of each TILE
 * columns. What is missing is zero. */
static void pair_rows(const uint16_t *from, long apart, long rows, long columns, char *left,
                      char *right) {
    const __mmask32 some = columns < TWO ? (1u << columns) - 1 : ~0u;
    const __m512i first = _mm512_loadu_si512(pair_order[0]);
    const __m512i second = _mm512_loadu_si512(pair_order[1]);
    for (long row = 0; row < TWO; row += 2, left += 64, right += 64) {
        __m512i even = {}, odd = {};
        if (row < rows) even = _mm512_maskz_loadu_epi16(some, from + row * apart);
        if (row + 1 < rows) odd = _mm512_maskz_loadu_epi16(some, from + (row + 1) * apart);
        _mm512_store_si512(left, _mm512_permutex2var_epi16(even, first, odd));
        _mm512_store_si512(right, _mm512_permutex2var_epi16(even, second, odd));
    }
}

/* A tile of words, of which ``rows`` are there: transposed. */
static void turn_tile(const void *from, long bytes, long rows, char *to) {
    vf each[TILE] = {};
    for (int i = 0; i < at_most(rows, TILE); i++)
        each[i] = *(const vf_any *)((const char *)from + i * bytes);
    transpose(each);
    for (int i = 0; i < TILE; i++) *(vf *)(to + i * 64) = each[i];
}

INLINE void write_16(void *to, long at, long columns, vf values, int type) {
    const __mmask16 some = columns < 16 ? (__mmask16)((1u << columns) - 1) : 0xffff;
    if (type == F32) {
        _mm512_mask_storeu_ps((float *)to + at, some, (__m512)values);
        return;
    }
    __m512i halves = (__m512i)((vu)round_all(values, BF16) >> 16);
    _mm512_mask_cvtepi32_storeu_epi16((uint16_t *)to + at, some, halves);
}

/* Sums [rows, TWO], and a bias, to columns of ``to`` that begin at ``at``. */
static void write_rows(const float *sums, long rows, long columns, const void *bias, void *to,
                       long at, long size, int type) {
    for (long from = 0; from < columns; from += TILE) {
        const long some = at_most(columns - from, TILE);
        vf more = {};
        for (long i = 0; i < some && bias; i++) more[i] = load_one(bias, from + i, type);
        for (long row = 0; row < rows; row++)
            write_16(to, at + row * size + from, some,
                     *(const vf *)(sums + row * TWO + from) + more, type);
    }
}

/* y of outputs first to first + columns - 1, at most MOST_OUTPUTS, of rows [num, K]. */
ONCE static void outputs_of_many(const Linear *of, long first, long columns, long num,
                                 const uint16_t *x, void *y, long at, int type) {
    const long size = of->inputs, tiles = size / TWO;
    const uint16_t *weight = (const uint16_t *)of->weight + first * size;
    const char *bias = of->bias ? (const char *)of->bias + first * (type == F32 ? 4 : 2) : 0;
    _Alignas(64) char paired[MOST_OUTPUTS / TILE][DEEP * TWO];
    _Alignas(64) float sums[TWO * TWO];
    for (long each = 0; each * TILE < columns; each++)
        for (long i = 0; i < tiles; i++)
            turn_tile(weight + each * TILE * size + i * TWO, size * 2, columns - each * TILE,
                      paired[each] + i * TILE_BYTES);
    for (long t = 0; t < num; t += TWO) {
        const long rows = at_most(num - t, TWO), upper = at_most(rows, TILE);
        shape_tiles(upper, rows > TILE ? rows - TILE : upper);
        for (long from = 0; from < columns; from += TWO) {
            const char *left = paired[from / TILE];
            const char *right = columns > from + TILE ? paired[from / TILE + 1] : left;
            clear_sums();
            add_products(left_of(x + t * size, rows, size), (Right){left, right}, tiles);
            EACH_SUM(_tile_stored, sums, TWO, 1)
            write_rows(sums, rows, at_most(columns - from, TWO),
                       bias ? bias + from * (type == F32 ? 4 : 2) : 0, y,
                       at + t * of->rows + first + from, of->rows, type);
        }
    }
    _tile_release();
}

/* y [num, M] of a type = x [num, K] weight^T + bias; K is at most DEEP. */
static void multiply_many(const Linear *of, long num, const uint16_t *x, void *y, int type) {
    const long share = of->rows / (3 * omp_get_num_threads()) / TWO * TWO;
    const long wide = share < TWO ? TWO : at_most(share, MOST_OUTPUTS);
    const long blocks = (of->rows + wide - 1) / wide;
    const long panel = at_most(PANEL_ROWS, TILE_PANEL / of->inputs / TWO * TWO);
    const long panels = (num + panel - 1) / panel;
#pragma omp for schedule(dynamic, 1) nowait
    for (long work = 0; work < blocks * panels; work++) {
        const long t = work / blocks * panel, first = work % blocks * wide;
        outputs_of_many(of, first, at_most(of->rows - first, wide), at_most(num - t, panel),
                        x + t * of->inputs, y, t * of->rows, type);
    }
}

/* Gradients of inputs first to first + TWO - 1, of at most PANEL_ROWS rows. */
ONCE static void inputs_back(const Linear *of, long first, long num, const uint16_t *grad,
                             uint16_t *to) {
    const long K = of->inputs, M = of->rows;
    const uint16_t *weight = (const uint16_t *)of->weight + first;
    _Alignas(64) char left[DEEP * TWO], right[DEEP * TWO];
    _Alignas(64) float sums[PANEL_ROWS * TWO];
    for (long from = 0; from < M; from += DEEP) {
        const long deep = at_most(M - from, DEEP);
        for (long m = 0; m < deep; m += TWO)
            pair_rows(weight + (from + m) * K, K, TWO, TWO, left + m * TWO, right + m * TWO);
        for (long t = 0; t < num; t += TWO) {
            const long rows = at_most(num - t, TWO), upper = at_most(rows, TILE);
            shape_tiles(upper, rows > TILE ? rows - TILE : upper);
            if (from) EACH_SUM(_tile_loadd, sums + t * TWO, TWO, 1) else clear_sums();
            add_products(left_of(grad + t * M + from, rows, M), (Right){left, right}, deep / TWO);
            EACH_SUM(_tile_stored, sums + t * TWO, TWO, 1)
        }
    }
    _tile_release();
    write_rows(sums, num, TWO, 0, to, first, K, BF16);
}

/* total [M, K] += grad^T x for outputs first to first + TWO - 1, from x that is paired. */
ONCE static void outputs_back(const Linear *of, long first, long num, const uint16_t *grad,
                              const char *paired, float *total) {
    const long K = of->inputs, M = of->rows, columns = at_most(M - first, TWO);
    const long steps = (num + TWO - 1) / TWO, upper = at_most(columns, TILE);
    const long lower = columns > TILE ? columns - TILE : 0;
    _Alignas(64) char above[DEEP * TWO], below[DEEP * TWO], left[TILE_BYTES], right[TILE_BYTES];
    shape_tiles(upper, lower ? lower : upper);
    for (long from = 0; from < num; from += DEEP) {
        const long deep = at_most(num - from, DEEP), tiles = (deep + TWO - 1) / TWO;
        for (long t = 0; t < deep; t += TWO) {
            pair_rows(grad + (from + t) * M + first, M, deep - t, columns, left, right);
            turn_tile(left, 64, TILE, above + t * TWO);
            turn_tile(right, 64, TILE, below + t * TWO);
        }
        for (long k = 0; k < K; k += TWO) {
            float *to = total + first * K + k;
            for (long row = 0; row < columns && k + TWO < K; row++) {
                __builtin_prefetch(to + row * K + TWO, 1, 2);
                __builtin_prefetch(to + row * K + TWO + 16, 1, 2);
            }
            const char *x = paired + (k / TILE * steps + from / TWO) * TILE_BYTES;
            EACH_SUM(_tile_loadd, to, K, lower)
            add_products((Left){above, lower ? below : above, 64, TILE_BYTES, 0, 0},
                         (Right){x, x + steps * TILE_BYTES}, tiles);
            EACH_SUM(_tile_stored, to, K, lower)
        }
    }
    _tile_release();
}
#else
#define multiply_many(of, num, x, y, type)
#endif

/* Whether there are gradients of a layer's products here. */
long has_products_back(const Linear *of) {
    return has_tiles && of->type == BF16 && of->inputs % 32 == 0 && of->rows % 32 == 0;
}

/* Numbers of ``paired``. */
long paired_size(const Linear *of, long num) { return (num + 31) / 32 * 32 * of->inputs; }

/* The gradients of y = x weight^T, of grad [num, M]: ``to`` [num, K]; and that of the
 * weight is added to ``total`` [M, K], or null. ``paired`` is space. */
void multiply_back(const Linear *of, long num, const uint16_t *grad, const uint16_t *x,
                   uint16_t *paired, uint16_t *to, float *total, long num_threads) {
#if AMX
    const long K = of->inputs, M = of->rows, steps = (num + TWO - 1) / TWO;
    const long panels = (num + PANEL_ROWS - 1) / PANEL_ROWS, columns = K / TWO;
    char *pairs = (char *)paired;
#pragma omp parallel num_threads((int)num_threads)
    {
#pragma omp for schedule(dynamic, 1) nowait
        for (long work = 0; work < columns * panels; work++) {
            const long t = work / columns * PANEL_ROWS;
            inputs_back(of, work % columns * TWO, at_most(num - t, PANEL_ROWS), grad + t * M,
                        to + t * K);
        }
#pragma omp for schedule(static)
        for (long work = 0; work < columns * steps * !!total; work++) {
            const long k = work / steps * TWO, t = work % steps * TWO;
            char *at = pairs + (k / TILE * steps + t / TWO) * TILE_BYTES;
            pair_rows(x + t * K + k, K, num - t, TWO, at, at + steps * TILE_BYTES);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (long m = 0; m < M * !!total; m += TWO) outputs_back(of, m, num, grad, pairs, total);
    }
#else
    (void)of, (void)num, (void)grad, (void)x, (void)paired, (void)to, (void)total;
    (void)num_threads;
#endif
}
