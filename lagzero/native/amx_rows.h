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
#define SPACE (1 << 20) /* bytes of a thread's stack for weights, paired */
#define KEPT (640 << 10) /* numbers that stay in the second cache */
#define PANEL_ROWS 512 /* whose sums lie there too */

static const uint16_t upper_halves[TWO] = {
    1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
static const uint16_t pair_order[2][TWO] = {
    {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
     24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};

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

/* A product of rows [num, size] that lie as they are, and paired columns of that depth. */
typedef struct {
    const uint16_t *rows;
    long num, size;
    const char *paired; /* of each TILE columns in turn, ``size`` inputs */
    long columns;
    void *to; /* [num, stride] of a type, the column that is the first here */
    long stride, type;
    const void *bias; /* of the columns, or null */
} Rows;

/* Sums [TWO][TWO] of rows from t on and columns from ``from`` on, which wait to be written. */
typedef struct { const float *sums; long t, from; } WaitingRows;

#define ROWS_AT_ONCE 2
#define ROW_PARTS (TWO / ROWS_AT_ONCE)

INLINE void write_rows(const Rows *of, WaitingRows waiting, long part) {
    const long left = at_most(of->columns - waiting.from, TWO), more = left - TILE;
    const int type = (int)of->type;
    long row = part * ROWS_AT_ONCE, end = at_most(row + ROWS_AT_ONCE, of->num - waiting.t);
    if (row >= end) return;
    vf bias[2] = {};
    if (of->bias) bias[0] = load_some(of->bias, waiting.from, left, type);
    if (of->bias && more > 0) bias[1] = load_some(of->bias, waiting.from + TILE, more, type);
    for (; row < end; row++) {
        const float *sums = waiting.sums + row * TWO;
        const vf a = *(const vf *)sums + bias[0], b = *(const vf *)(sums + TILE) + bias[1];
        const long at = (waiting.t + row) * of->stride + waiting.from;
        if (left == TWO && type == BF16) {
            const __m512i upper = _mm512_loadu_si512(upper_halves);
            const __m512i both = _mm512_permutex2var_epi16((__m512i)round_all(a, BF16), upper,
                                                           (__m512i)round_all(b, BF16));
            _mm512_storeu_si512((uint16_t *)of->to + at, both);
            continue;
        }
        store_some(of->to, at, left, a, type);
        if (more > 0) store_some(of->to, at + TILE, more, b, type);
    }
}

/* Sums are written while the next are being added up. */
static void multiply_paired(const Rows *of) {
    const long size = of->size, tiles = size / TWO;
    _Alignas(64) float sums[2][TWO * TWO];
    WaitingRows waiting = {0, of->num, 0};
    int at = 0;
    for (long t = 0; t < of->num; t += TWO) {
        const long rows = at_most(of->num - t, TWO), upper = at_most(rows, TILE);
        const Left left = left_of(of->rows + t * size, rows, size);
        shape_tiles(upper, rows > TILE ? rows - TILE : upper);
        for (long from = 0; from < of->columns; from += TWO, at ^= 1) {
            const char *first = of->paired + from * size * 2;
            const Right right = {
                first, of->columns > from + TILE ? first + TILE * size * 2 : first};
            long part = 0;
            clear_sums();
            for (long tile = 0; tile < tiles; tile++) {
                add_products_of(left, right, tile);
                for (; part * tiles < (tile + 1) * ROW_PARTS; part++) write_rows(of, waiting, part);
            }
            EACH_SUM(_tile_stored, sums[at], TWO, 1)
            waiting = (WaitingRows){sums[at], t, from};
        }
    }
    _tile_release();
    for (long part = 0; part < ROW_PARTS; part++) write_rows(of, waiting, part);
}

/* How many columns a thread pairs at once, for num rows that each meet all of them. They meet them
 * all since to pair takes as long as 60 rows; many of them if the rows leave the cache. */
static long columns_at_once(long columns, long num, long depth) {
    const long pieces = omp_get_num_threads() * (num * depth > KEPT ? 1 : 3);
    const long share = (columns / pieces / TWO + 1) * TWO;
    return at_most(share, SPACE / 2 / depth / TWO * TWO);
}

/* y of outputs first to first + columns - 1. */
ONCE static void outputs_of_many(const Linear *of, long first, long columns, long num,
                                 const uint16_t *x, void *y, int type) {
    const long size = of->inputs, bytes = type == F32 ? 4 : 2;
    const uint16_t *weight = (const uint16_t *)of->weight + first * size;
    _Alignas(64) char paired[SPACE];
    for (long each = 0; each < columns; each += TILE)
        for (long i = 0; i < size; i += TWO)
            turn_tile(weight + each * size + i, size * 2, columns - each,
                      paired + each * size * 2 + i * TWO);
    multiply_paired(&(Rows){x, num, size, paired, columns, (char *)y + first * bytes, of->rows,
                            type, of->bias ? (const char *)of->bias + first * bytes : 0});
}

/* y [num, M] of a type = x [num, K] weight^T + bias; K is at most DEEP. */
static void multiply_many(const Linear *of, long num, const uint16_t *x, void *y, int type) {
    const long wide = columns_at_once(of->rows, num, of->inputs);
#pragma omp for schedule(dynamic, 1) nowait
    for (long first = 0; first < of->rows; first += wide)
        outputs_of_many(of, first, at_most(of->rows - first, wide), num, x, y, type);
}

/* Gradients of inputs first to first + columns - 1, of rows [num, M]; M is at most DEEP. */
ONCE static void inputs_back(const Linear *of, long first, long columns, long num,
                             const uint16_t *grad, uint16_t *to) {
    const long K = of->inputs, M = of->rows;
    const uint16_t *weight = (const uint16_t *)of->weight + first;
    _Alignas(64) char paired[SPACE];
    for (long each = 0; each < columns; each += TWO) {
        char *left = paired + each * M * 2, *right = left + TILE * M * 2;
        for (long m = 0; m < M; m += TWO)
            pair_rows(weight + m * K + each, K, TWO, TWO, left + m * TWO, right + m * TWO);
    }
    multiply_paired(&(Rows){grad, num, M, paired, columns, to + first, K, BF16, 0});
}

/* Gradients of inputs first to first + TWO - 1, of at most PANEL_ROWS rows and any M. */
ONCE static void inputs_back_in_parts(const Linear *of, long first, long num, const uint16_t *grad,
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
    for (long t = 0; t < num; t++)
        for (long i = 0; i < TWO; i += TILE)
            store(to, t * K + first + i, *(const vf *)(sums + t * TWO + i), BF16);
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

/* A tile of tokens [num, size] paired, from the inputs ``at`` on. */
static void pair_tile(const uint16_t *x, long num, long size, long t, long at, uint16_t *pairs) {
    turn_tile(x + t * size + at, size * 2, num - t, (char *)(pairs + t * size + at * TILE));
}
#else
#define multiply_many(of, num, x, y, type)
#define pair_tile(x, num, size, t, at, pairs)
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
        const long wide = columns_at_once(K, num, M);
#pragma omp for schedule(dynamic, 1) nowait
        for (long k = 0; k < K * (M <= DEEP); k += wide)
            inputs_back(of, k, at_most(K - k, wide), num, grad, to);
#pragma omp for schedule(dynamic, 1) nowait
        for (long work = 0; work < columns * panels * (M > DEEP); work++) {
            const long t = work / columns * PANEL_ROWS;
            inputs_back_in_parts(of, work % columns * TWO, at_most(num - t, PANEL_ROWS),
                                 grad + t * M, to + t * K);
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
