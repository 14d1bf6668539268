/* Parts of the forward pass on rows that the caller holds: a trainer's modules compute with them.
 *
 * Decoding goes through the very same functions, which are compiled once and never inlined: so
 * both get the same bits.
 */
#pragma once
#include <omp.h>
#include "attention.h"
#include "sampling.h"

/* A function ``as`` compiled for each way that numbers lie in memory and are rounded. */
#define BY_TYPES(AS, ...)                                                                          \
    {                                                                                              \
        if (held == F32 && type == F32)                                                            \
            AS(__VA_ARGS__, F32, F32, to);                                                         \
        else if (held == F32)                                                                      \
            AS(__VA_ARGS__, F32, BF16, to);                                                        \
        else if (type == F32)                                                                      \
            AS(__VA_ARGS__, BF16, F32, to);                                                        \
        else                                                                                       \
            AS(__VA_ARGS__, BF16, BF16, to);                                                       \
    }

/* to = x / rms(x), rounded, times weight, rounded; both lie in memory as ``held``. In place if
 * to == x. */
INLINE void normalise_as(const void *x, const void *weight, long size, float eps, int held,
                         int type, void *to) {
    vf squares = {};
    float sum = 0;
    long whole = size / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        vf each = load(x, i, held);
        squares = fused(each, each, squares);
    }
    for (long i = whole; i < size; i++) sum += load_one(x, i, held) * load_one(x, i, held);
    float factor = 1.0f / sqrtf((sum + sum_of(squares)) / size + eps);
    for (long i = 0; i < whole; i += LANES) {
        vf each = round_all(load(x, i, held) * factor, type);
        store(to, i, round_all(load(weight, i, type) * each, type), held);
    }
    for (long i = whole; i < size; i++) {
        float each = round_one(load_one(x, i, held) * factor, type);
        store_one(to, i, round_one(load_one(weight, i, type) * each, type), held);
    }
}

ONCE static void normalise(const void *x, const void *weight, long size, float eps, int held,
                           int type, void *to) BY_TYPES(normalise_as, x, weight, size, eps)

/* A head turned by angles [size]: numbers i and i + size / 2 are a plane. Products and their sum
 * are rounded. All lie in memory as ``held``; in place if to == head. */
INLINE void rotate_as(const void *head, const void *cosine, const void *sine, long size, int held,
                      int type, void *to) {
    const long half = size / 2, whole = half / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        const vf a = load(head, i, held), b = load(head, i + half, held);
        const vf c = load(cosine, i, held), d = load(cosine, i + half, held);
        const vf e = load(sine, i, held), f = load(sine, i + half, held);
        store(to, i, round_all(round_all(a * c, type) + round_all(-b * e, type), type), held);
        store(to, i + half, round_all(round_all(b * d, type) + round_all(a * f, type), type),
              held);
    }
    for (long i = whole; i < half; i++) {
        const float a = load_one(head, i, held), b = load_one(head, i + half, held);
        const float c = load_one(cosine, i, held), d = load_one(cosine, i + half, held);
        const float e = load_one(sine, i, held), f = load_one(sine, i + half, held);
        store_one(to, i, round_one(round_one(a * c, type) + round_one(-b * e, type), type), held);
        store_one(to, i + half,
                  round_one(round_one(b * d, type) + round_one(a * f, type), type), held);
    }
}

ONCE static void rotate(const void *head, const void *cosine, const void *sine, long size,
                        int held, int type, void *to) BY_TYPES(rotate_as, head, cosine, sine, size)

/* to = gate / (1 + exp(-gate)), rounded, times up, rounded; all lie in memory as ``held``. In place
 * if to == gate. */
INLINE void gated_as(const void *gate, const void *up, long size, int held, int type, void *to) {
    for (long i = 0; i + LANES <= size; i += LANES)
        store(to, i, round_all(gated_some(load(gate, i, held), load(up, i, held), type), type),
              held);
    for (long i = size / LANES * LANES; i < size; i++) {
        float g = load_one(gate, i, held), silu = round_one(g / (1.0f + expf(-g)), type);
        store_one(to, i, round_one(silu * load_one(up, i, held), type), held);
    }
}

ONCE static void gated(const void *gate, const void *up, long size, int held, int type, void *to)
    BY_TYPES(gated_as, gate, up, size)

/* Whether a weight is paired for the rows. The matrix unit takes few rows as a decoder does. */
static int goes_many(const Linear *of, long num, long x_type) {
    const int enough = AMX ? num >= MANY && of->inputs <= DEEP : of->inputs <= DEEPEST;
    return has_tiles && of->type == BF16 && x_type == BF16 && enough;
}

/* Floats of ``space`` for multiply_rows. */
long multiply_floats(const Linear *of, long num, long x_type, long y_type) {
    if (goes_many(of, num, x_type)) return 0;
    return filled_tiles(num) * ((of->inputs + 1) / 2) + num * chunks_of(of->inputs)
           + (x_type == F32 ? 0 : num * of->inputs) + (y_type == F32 ? 0 : num * of->rows);
}

/* y [num, rows] = x [num, inputs] weight^T + bias, each of its own type. */
void multiply_rows(const Linear *of, long num, const void *x, long x_type, float *space, void *y,
                   long y_type, long num_threads) {
    const long size = of->inputs, wide = x_type == F32, many = goes_many(of, num, x_type);
    uint16_t *pairs = (uint16_t *)space;
    float *steps = space + filled_tiles(num) * ((size + 1) / 2);
    float *widened = steps + num * chunks_of(size), *sums = widened + (wide ? 0 : num * size);
    const Inputs in = {wide ? x : widened, pairs, steps};
#pragma omp parallel num_threads((int)num_threads)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < num * !many; t++) {
            if (!wide) copy(x, BF16, t * size, size, widened, t * size, F32);
            narrow(of, in, t);
        }
        if (many) multiply_many(of, num, x, y, (int)y_type);
        else multiply(of, num, in, y_type == F32 ? y : sums, (int)y_type);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long t = 0; t < num * !(many || y_type == F32); t++)
            copy(sums, F32, t * of->rows, of->rows, y, t * of->rows, BF16);
    }
}

/* A weight [rows, inputs] for products of integers: q and steps, ``row`` is [num_threads, inputs].
 */
void pack_rows(const void *weight, long type, long rows, long inputs, int16_t *row, int16_t *q,
               float *steps, long num_threads) {
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long first = 0; first < rows; first += WIDTH)
        pack(weight, (int)type, rows, inputs, first, row + omp_get_thread_num() * inputs, q, steps);
}

/* Norms of x [num, size]. */
void normalise_rows(const char *x, const void *weight, long num, long size, float eps, long type,
                    char *to, long num_threads) {
    const long bytes = size * sizes[type];
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long n = 0; n < num; n++)
        normalise(x + n * bytes, weight, size, eps, (int)type, (int)type, to + n * bytes);
}

/* Heads [num, heads, size], each turned by its token's angles [num, size], rounded to ``type``. */
void rotate_rows(const char *x, const char *cosine, const char *sine, long num, long heads,
                 long size, long held, long type, char *to, long num_threads) {
    const long bytes = size * sizes[held];
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long n = 0; n < num * heads; n++)
        rotate(x + n * bytes, cosine + n / heads * bytes, sine + n / heads * bytes, size,
               (int)held, (int)type, to + n * bytes);
}

/* What comes before an MLP's last product, from gate and up [num, size]. */
void gate_rows(const char *gate, const char *up, long num, long size, long type, char *to,
               long num_threads) {
    const long bytes = size * sizes[type];
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long n = 0; n < num; n++)
        gated(gate + n * bytes, up + n * bytes, size, (int)type, (int)type, to + n * bytes);
}

/* Floats of ``Step.scratch`` for attend_rows. */
long attend_floats(const Model *of, const Step *step) {
    return attention_scratch(of, step) * step->num_threads;
}

/* Keys or values [pages, K, P, E] as an INT16 cache holds them. */
void keep_pages(const Model *of, long pages, const float *x, void *cache, long num_threads) {
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long part = 0; part < pages * of->kv_heads; part++)
        for (long token = 0; token < of->page_size; token++)
            keep(of, x + (part * of->page_size + token) * of->head_size, cache,
                 part * page_numbers(of), token);
}

/* Attention of queries [T, H, E] of a step whose keys and values are written already. */
void attend_rows(const Model *of, const Layer *layer, const Step *step, const void *query,
                 void *out) {
#pragma omp parallel num_threads((int)step->num_threads)
    attend_all(of, layer, step, (int)of->type, query,
               step->scratch + omp_get_thread_num() * attention_scratch(of, step), out);
}
