/* Parts of the forward pass on rows that the caller holds: a trainer's modules compute with them.
 *
 * Decoding goes through the very same functions, which are compiled once and never inlined: so
 * both get the same bits.
 */
#pragma once
#include <omp.h>
#include "attention.h"
#include "sampling.h"

/* to = x / rms(x), rounded, times weight, rounded. In place if to == x. */
ONCE static void normalise(const float *x, const void *weight, long size, float eps, int type,
                           float *to) {
    vf squares = {};
    float sum = 0;
    long whole = size / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        vf each = *(const vf_any *)(x + i);
        squares = fused(each, each, squares);
    }
    for (long i = whole; i < size; i++) sum += x[i] * x[i];
    float factor = 1.0f / sqrtf((sum + sum_of(squares)) / size + eps);
    for (long i = 0; i < size; i++)
        to[i] = round_one(load_one(weight, i, type) * round_one(x[i] * factor, type), type);
}

/* to = gate / (1 + exp(-gate)), rounded, times up, rounded. In place if to == gate. */
ONCE static void gated(const float *gate, const float *up, long size, int type, float *to) {
    for (long i = 0; i + LANES <= size; i += LANES) {
        vf g = *(const vf_any *)(gate + i);
        vf silu = g / (1.0f + exp_of(-g));
        for (int j = 0; j < LANES; j++)
            to[i + j] = round_one(round_one(silu[j], type) * up[i + j], type);
    }
    for (long i = size / LANES * LANES; i < size; i++)
        to[i] = round_one(round_one(gate[i] / (1.0f + expf(-gate[i])), type) * up[i], type);
}

/* y [num, rows] = x [num, inputs] weight^T + bias; ``pairs`` and ``steps`` are space for what
 * ``narrow`` makes of x. */
void multiply_rows(const Linear *of, long num, const float *x, uint16_t *pairs, float *steps,
                   float *y, long round_to, long num_threads) {
    Inputs in = {x, pairs, steps};
#pragma omp parallel num_threads((int)num_threads)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < num; t++) narrow(of, in, t);
        multiply(of, num, in, y, (int)round_to);
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
void normalise_rows(const float *x, const void *weight, long num, long size, float eps, long type,
                    float *to, long num_threads) {
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long n = 0; n < num; n++)
        normalise(x + n * size, weight, size, eps, (int)type, to + n * size);
}

/* What comes before an MLP's last product, from gate and up [num, size]. */
void gate_rows(const float *gate, const float *up, long num, long size, long type, float *to,
               long num_threads) {
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long n = 0; n < num; n++)
        gated(gate + n * size, up + n * size, size, (int)type, to + n * size);
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
void attend_rows(const Model *of, const Layer *layer, const Step *step, const float *query,
                 float *out) {
#pragma omp parallel num_threads((int)step->num_threads)
    attend_all(of, layer, step, query,
               step->scratch + omp_get_thread_num() * attention_scratch(of, step), out);
}
