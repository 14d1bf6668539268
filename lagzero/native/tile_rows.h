/* Products by tiles of rows as they lie, the left factor, and paired columns. A trainer's, y = x W^T
 * with a decoder's bits, and its gradients; each thread pairs the right factor, some columns at a
 * time. And a decoder's without a matrix unit, by weights that lie in tiles already.
 *
 * Letters: T rows, K inputs of a layer, M its outputs.
 */
#pragma once
#include "amx.h"

#define MANY 256 /* rows that a weight is paired for */
#define DEEPEST (1 << 15) /* inputs of which TILE columns, paired, fill a thread's space */
#define DEEP 2048 /* numbers of a sum whose right factor lies in a thread's stack */
#if TILES
#define SPACE (1 << 20) /* bytes of a thread's stack for weights, paired */
#define FILLED (AMX ? SPACE : SPACE / 2) /* of it, if columns are not too deep for that */
#define KEPT (640 << 10) /* numbers that stay in the second cache */
#define BLOCK_ROWS (2 * HALF)
#define PANEL_ROWS 512 /* whose sums lie there too */

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

/* Rows [num, size] of a weight as columns, paired: of each TILE of them ``size`` inputs. Filled up by
 * zeros. The next rows are asked of memory meanwhile, as many lines as a tile has. */
INLINE void turn_rows(const uint16_t *weight, long num, long size, char *to) {
    for (long row = 0; row < num; row += TILE)
        for (long i = 0; i < size; i += TWO) {
            const char *next = (const char *)(weight + (row + TILE) * size + i * TILE);
            for (long line = 0; line < TILE && row + TILE < num; line++)
                __builtin_prefetch(next + line * LINE);
            turn_tile(weight + row * size + i, size * 2, num - row, to + row * size * 2 + i * TWO);
        }
}

/* A product of rows [num, size] that lie as they are, and paired columns of that depth. */
typedef struct {
    const uint16_t *rows;
    long num, size;
    const char *paired; /* of each TILE columns in turn, ``size`` inputs */
    long columns;
    void *to; /* [num, stride] of a type, the column that is the first here */
    long stride, type, round_to;
    const void *bias; /* of the columns, of the type that sums are rounded to, or null */
    const char *next; /* asked of memory meanwhile: as many bytes as are paired, or null */
} Rows;

/* Sums [BLOCK_ROWS][BLOCK_COLUMNS] of rows from t on and columns from to end - 1, which wait to be
 * written. */
typedef struct { const float *sums; long t, from, end; } WaitingRows;

#define ROWS_AT_ONCE 2
#define ROW_PARTS (BLOCK_ROWS / ROWS_AT_ONCE)

INLINE void write_rows(const Rows *of, WaitingRows waiting, long part) {
    const int type = (int)of->type, round_to = (int)of->round_to;
    long row = part * ROWS_AT_ONCE, end = at_most(row + ROWS_AT_ONCE, of->num - waiting.t);
    for (; row < end; row++)
        for (long from = waiting.from; from < waiting.end; from += TWO) {
            const long left = waiting.end - from, more = left - TILE;
            const long at = (waiting.t + row) * of->stride + from;
            const float *sums = waiting.sums + row * BLOCK_COLUMNS + from - waiting.from;
            vf a = *(const vf *)sums, b = *(const vf *)(sums + TILE);
            if (of->bias) a += load_some(of->bias, from, left, round_to);
            if (of->bias && more > 0) b += load_some(of->bias, from + TILE, more, round_to);
            if (left >= TWO && type == BF16) {
                const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
                _mm512_storeu_si512((uint16_t *)of->to + at, (__m512i)both);
                continue;
            }
            a = round_all(a, round_to), b = round_all(b, round_to);
            store_some(of->to, at, left, a, type);
            if (more > 0) store_some(of->to, at + TILE, more, b, type);
        }
}

/* Sums are written while the next are being added up, if not at once. */
static void multiply_paired(const Rows *of) {
    if (!of->num) return;
    const int at_once = !AMX && of->type == BF16 && !of->bias && of->columns % TILE == 0;
    const long size = of->size, tiles = size / TWO, steps = num_steps(tiles);
    const long blocks = (of->columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    const long wide = (of->columns + blocks * TILE - 1) / (blocks * TILE) * TILE;
    const long groups = (of->num + AT_ONCE - 1) / AT_ONCE;
    const long lines = of->next ? (of->columns + groups - 1) / groups : 0; /* of each tile */
    _Alignas(64) float sums[2][BLOCK_ROWS * BLOCK_COLUMNS];
    WaitingRows waiting = {0, of->num, 0, 0};
    int at = 0;
    for (long t = 0; t < of->num; t += BLOCK_ROWS) {
        const Left left = left_of(of->rows + t * size, at_most(of->num - t, BLOCK_ROWS), size);
        begin_rows(left);
        for (long from = 0, end; from < of->columns; from = end, at ^= 1) {
            end = at_most(from + wide, of->columns);
            const Right right = {of->paired + from * size * 2, TILE * size * 2,
                                 (end - from + TILE - 1) / TILE,
                                 of->next + t / AT_ONCE * lines * tiles * LINE, lines};
            const Sums to = {sums[at], BLOCK_COLUMNS, 1,
                             at_once ? (uint16_t *)of->to + t * of->stride + from : 0, of->stride};
            long part = 0;
            begin_sums(left, to);
            for (long step = 0; step < steps; step++) {
                add_step(&left, &right, tiles, step, &to);
                for (; !at_once && part * steps < (step + 1) * ROW_PARTS; part++)
                    write_rows(of, waiting, part);
            }
            end_sums(left, to);
            if (!at_once) waiting = (WaitingRows){sums[at], t, from, end};
        }
    }
    end_rows();
    for (long part = 0; part < ROW_PARTS * !at_once; part++) write_rows(of, waiting, part);
}

/* How many columns a thread pairs at once, for num rows that each meet all of them, since to pair
 * takes as long as 60 rows: as many for each thread, and more if the rows leave the cache. */
static long columns_at_once(long columns, long num, long depth) {
    const long threads = omp_get_num_threads(), most = FILLED / 2 / depth / TWO * TWO;
    const long turns = at_most(columns / (threads * 3 * TWO), num * depth > KEPT ? 1 : 3);
    const long pieces = threads * (turns ? turns : 1);
    const long share = (columns + pieces * TWO - 1) / (pieces * TWO) * TWO;
    return at_most(share, most ? most : TILE);
}

/* y of outputs first to first + columns - 1. */
ONCE static void outputs_of_many(const Linear *of, long first, long columns, long num,
                                 const uint16_t *x, void *y, int type) {
    const long size = of->inputs, bytes = type == F32 ? 4 : 2;
    const uint16_t *weight = (const uint16_t *)of->weight + first * size;
    _Alignas(64) char paired[SPACE];
    turn_rows(weight, columns, size, paired);
    multiply_paired(&(Rows){x, num, size, paired, columns, (char *)y + first * bytes, of->rows,
                            type, type, of->bias ? (const char *)of->bias + first * bytes : 0, 0});
}

/* y [num, M] of a type = x [num, K] weight^T + bias; K is at most DEEPEST. */
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
    multiply_paired(&(Rows){grad, num, M, paired, columns, to + first, K, BF16, BF16, 0, 0});
}

/* Gradients of inputs first to first + TWO - 1, of at most PANEL_ROWS rows and any M. */
ONCE static void inputs_back_in_parts(const Linear *of, long first, long num, const uint16_t *grad,
                                      uint16_t *to) {
    const long K = of->inputs, M = of->rows;
    const uint16_t *weight = (const uint16_t *)of->weight + first;
    _Alignas(64) char left[2 * DEEP * TWO], *right = left + DEEP * TWO;
    _Alignas(64) float sums[(PANEL_ROWS + BLOCK_ROWS) * TWO];
    for (long from = 0; from < M; from += DEEP) {
        const long deep = at_most(M - from, DEEP);
        for (long m = 0; m < deep; m += TWO)
            pair_rows(weight + (from + m) * K, K, TWO, TWO, left + m * TWO, right + m * TWO);
        for (long t = 0; t < num; t += BLOCK_ROWS) {
            const Left rows = left_of(grad + t * M + from, at_most(num - t, BLOCK_ROWS), M);
            begin_rows(rows);
            add_products(rows, (Right){left, DEEP * TWO, 2, 0, 0}, deep / TWO,
                         (Sums){sums + t * TWO, TWO, !from});
        }
    }
    end_rows();
    for (long t = 0; t < num; t++)
        for (long i = 0; i < TWO; i += TILE)
            store(to, t * K + first + i, *(const vf *)(sums + t * TWO + i), BF16);
}

/* total [M, K] += grad^T x for outputs first to first + BLOCK_ROWS - 1, from x that is paired. */
ONCE static void outputs_back(const Linear *of, long first, long num, const uint16_t *grad,
                              const char *paired, float *total) {
    const long K = of->inputs, M = of->rows, columns = at_most(M - first, BLOCK_ROWS);
    const long steps = (num + TWO - 1) / TWO, row = BLOCK_ROWS * 64; /* bytes of a turned tile */
    const long more = columns > HALF ? columns - HALF : 0;
    _Alignas(64) char turned[DEEP / TWO * BLOCK_ROWS * 64], pairs[2 * TILE_BYTES];
    const Left left = {turned, turned + HALF * 64, columns - more, more, 64, row};
    begin_rows(left);
    for (long from = 0; from < num; from += DEEP) {
        const long deep = at_most(num - from, DEEP), tiles = (deep + TWO - 1) / TWO;
        for (long t = 0; t < deep; t += TWO)
            for (long m = 0; m < columns; m += TWO) {
                const uint16_t *some = grad + (from + t) * M + first + m;
                char *to = turned + t / TWO * row + m * 64;
                pair_rows(some, M, deep - t, columns - m, pairs, pairs + TILE_BYTES);
                turn_tile(pairs, 64, TILE, to);
                if (m + TILE < columns) turn_tile(pairs + TILE_BYTES, 64, TILE, to + TILE_BYTES);
            }
        for (long k = 0; k < K; k += BLOCK_COLUMNS) {
            float *to = total + first * K + k;
            for (long m = 0; m < columns && k + BLOCK_COLUMNS < K; m++)
                for (long i = BLOCK_COLUMNS; i < 2 * BLOCK_COLUMNS; i += TILE)
                    __builtin_prefetch(to + m * K + i, 1, 2);
            const char *x = paired + (k / TILE * steps + from / TWO) * TILE_BYTES;
            add_products(left, (Right){x, steps * TILE_BYTES, (K - k) / TILE, 0, 0}, tiles,
                         (Sums){to, K, 0});
        }
    }
    end_rows();
}

#if AMX
/* A tile of tokens [num, size] paired, from the inputs ``at`` on. */
static void pair_tile(const uint16_t *x, long num, long size, long t, long at, uint16_t *pairs) {
    turn_tile(x + t * size + at, size * 2, num - t, (char *)(pairs + t * size + at * TILE));
}
#else
/* Row t of x [size], rounded, to where a product takes it in. */
static void take_in(const float *x, long size, uint16_t *to, long t) {
    for (long i = 0; i < size; i += LANES) store(to, t * size + i, *(const vf_any *)(x + i), BF16);
}

/* y [num, M] of a type = x [num, K] weight^T + bias, of a TILED weight. A thread's own outputs come
 * in panels of up to BLOCK_COLUMNS: one stays in the second cache while all rows meet it, and the
 * next is asked of memory. */
static void multiply_tiled(const Linear *of, long num, const uint16_t *x, void *y, int type,
                           int round_to) {
    const long size = of->inputs, bytes = type == F32 ? 4 : 2, me = omp_get_thread_num();
    const char *bias = of->bias;
    const long last = first_of(of, me + 1);
    for (long first = first_of(of, me), next; first < last; first = next) {
        const long panels = (last - first + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        const long some = filled_tiles((last - first + panels - 1) / panels);
        const char *weight = (const char *)of->weight + first * size * 2;
        next = at_most(first + some, last);
        multiply_paired(&(Rows){
            .rows = x, .num = num, .size = size, .paired = weight, .columns = next - first,
            .to = (char *)y + first * bytes, .stride = of->rows, .type = type,
            .round_to = round_to, .bias = bias ? bias + first * (round_to == F32 ? 4 : 2) : 0,
            .next = panels > 1 ? weight + some * size * 2 : 0});
    }
}

/* ``multiply`` by a TILED weight, of rows in bfloat16. */
static void multiply_tiles(const Linear *of, long num, const uint16_t *x, float *y, int round_to) {
    multiply_tiled(of, num, x, y, F32, round_to);
}

/* The same in bfloat16. */
static void multiply_narrow(const Linear *of, long num, const uint16_t *x, uint16_t *y) {
    multiply_tiled(of, num, x, y, BF16, BF16);
}
#endif
#else
#define multiply_many(of, num, x, y, type)
#define multiply_tiles(of, num, x, y, round_to)
#define multiply_narrow(of, num, x, y)
#define take_in(x, size, to, t) (void)to
#endif

#if !AMX
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
#if TILES
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
        for (long m = 0; m < M * !!total; m += BLOCK_ROWS)
            outputs_back(of, m, num, grad, pairs, total);
    }
#else
    (void)of, (void)num, (void)grad, (void)x, (void)paired, (void)to, (void)total;
    (void)num_threads;
#endif
}

/* Whether a decoder takes bfloat16 weights TILED; and how many numbers such a one has. */
long takes_tiled(long inputs) { return has_tiles && !AMX && inputs <= DEEPEST; }
long tiled_size(long rows, long inputs) { return filled_tiles(rows) * inputs; }

/* A weight [M, K] as a decoder takes it: tiles of TILE outputs, paired, filled up by zeros. */
void lay_tiles(const uint16_t *weight, long rows, long inputs, char *to, long num_threads) {
#if TILES
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long row = 0; row < rows; row += TILE)
        turn_rows(weight + row * inputs, at_most(rows - row, TILE), inputs,
                  to + row * inputs * 2);
#else
    (void)weight, (void)rows, (void)inputs, (void)to, (void)num_threads;
#endif
}
