/* Gradients of what is done row by row: norms and the gate of an MLP.
 *
 * They are those of the float32 formula at the inputs as they are. A tensor is read and written in
 * its own type, once.
 */
#pragma once
#include <omp.h>
#include "attend_back.h"

#define NORM_ROWS 64 /* whose gradients of the weight are added up before those of the next */
#define PIECE 4096   /* numbers of a gate that a thread takes at once */

INLINE long padded(long size) { return (size + LANES - 1) / LANES * LANES; }

/* A row of a norm; ``weight`` is float32 and, as ``sums``, padded by zeros. */
typedef struct {
    const void *grad, *x;
    const float *weight;
    void *to;
    float *sums, factor, mean; /* ``sums`` may be null */
} NormBack;

/* Add x^2 and grad weight x of some numbers, whose place in the row is i, in memory at + i. */
INLINE void square_some(const NormBack *of, long at, long i, long left, int type, vf *squares,
                        vf *products) {
    vf x = load_some(of->x, at + i, left, type);
    vf slope = load_some(of->grad, at + i, left, type) * *(const vf_any *)(of->weight + i);
    *squares = fused(x, x, *squares);
    *products = fused(x, slope, *products);
}

INLINE void normalise_some_back(const NormBack *of, long at, long i, long left, int type) {
    vf unit = load_some(of->x, at + i, left, type) * of->factor;
    vf grad = load_some(of->grad, at + i, left, type);
    vf slope = grad * *(const vf_any *)(of->weight + i);
    if (of->sums) *(vf_any *)(of->sums + i) = fused(grad, unit, *(vf_any *)(of->sums + i));
    store_some(of->to, at + i, left, (slope - unit * of->mean) * of->factor, type);
}

/* With u = x / rms(x) and s = grad weight: to = (s - u mean(s u)) / rms(x), sums += grad u. */
INLINE void normalise_one_back(NormBack of, long at, long size, float eps, int type) {
    const long whole = size / LANES * LANES;
    vf squares = {}, products = {};
    for (long i = 0; i < whole; i += LANES)
        square_some(&of, at, i, LANES, type, &squares, &products);
    if (whole < size) square_some(&of, at, whole, size - whole, type, &squares, &products);
    of.factor = 1.0f / sqrtf(sum_of(squares) / size + eps);
    of.mean = sum_of(products) * of.factor / size;
    for (long i = 0; i < whole; i += LANES) normalise_some_back(&of, at, i, LANES, type);
    if (whole < size) normalise_some_back(&of, at, whole, size - whole, type);
}

/* Floats of the scratch of ``normalise_back``. */
long normalise_back_floats(long num, long size) {
    return padded(size) * (1 + (num + NORM_ROWS - 1) / NORM_ROWS);
}

/* Gradients of ``normalise_rows`` for x [num, size] and weight [size], or for x alone. */
void normalise_back(const void *grad, const void *x, const void *weight, long num, long size,
                    float eps, long type, long weight_type, void *to_x, void *to_weight,
                    float *scratch, long num_threads) {
    const long width = padded(size), parts = (num + NORM_ROWS - 1) / NORM_ROWS;
    float *wide = scratch, *sums = scratch + width;
    for (long i = 0; i < size; i += LANES)
        *(vf_any *)(wide + i) = load_some(weight, i, size - i, (int)weight_type);
#pragma omp parallel num_threads((int)num_threads)
    {
#pragma omp for schedule(static)
        for (long part = 0; part < parts; part++) {
            const long end = (part + 1) * NORM_ROWS < num ? (part + 1) * NORM_ROWS : num;
            NormBack row = {grad, x, wide, to_x, to_weight ? sums + part * width : 0, 0, 0};
            if (row.sums) memset(row.sums, 0, width * sizeof *sums);
            for (long n = part * NORM_ROWS; n < end; n++)
                if (type == F32)
                    normalise_one_back(row, n * size, size, eps, F32);
                else
                    normalise_one_back(row, n * size, size, eps, BF16);
        }
#pragma omp for schedule(static)
        for (long i = 0; i < width; i += LANES) {
            vf total = {};
            for (long part = 0; part < parts && to_weight; part++)
                total += *(vf_any *)(sums + part * width + i);
            if (to_weight) store_some(to_weight, i, size - i, total, (int)weight_type);
        }
    }
}

/* With s = 1 / (1 + exp(-gate)): to_up = grad gate s, to_gate = grad up s (1 + gate (1 - s)). */
INLINE void gate_some_back(const void *grad, const void *gate, const void *up, long at, long left,
                           int type, void *to_gate, void *to_up) {
    vf g = load_some(gate, at, left, type), given = load_some(grad, at, left, type);
    vf s = 1.0f / (1.0f + exp_of(-g)), more = fused(g, 1.0f - s, all(1));
    store_some(to_up, at, left, given * (g * s), type);
    store_some(to_gate, at, left, given * load_some(up, at, left, type) * (s * more), type);
}

INLINE void gate_piece_back(const void *grad, const void *gate, const void *up, long at, long end,
                            int type, void *to_gate, void *to_up) {
    for (; at + LANES <= end; at += LANES)
        gate_some_back(grad, gate, up, at, LANES, type, to_gate, to_up);
    if (at < end) gate_some_back(grad, gate, up, at, end - at, type, to_gate, to_up);
}

/* Gradients of ``gate_rows`` for num numbers of gate and up. */
void gate_back(const void *grad, const void *gate, const void *up, long num, long type,
               void *to_gate, void *to_up, long num_threads) {
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (long at = 0; at < num; at += PIECE) {
        const long end = at + PIECE < num ? at + PIECE : num;
        if (type == F32)
            gate_piece_back(grad, gate, up, at, end, F32, to_gate, to_up);
        else
            gate_piece_back(grad, gate, up, at, end, BF16, to_gate, to_up);
    }
}
