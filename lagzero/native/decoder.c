/* One forward pass of a Llama-like decoder over a flat row of tokens, with a paged KV cache.
 *
 * Letters: T tokens of the row, N of them whose logits are wanted, D hidden size, F inner size of
 * the MLP, V vocabulary, H query heads, K key/value heads, E head size, P tokens a page.
 *
 * Activations are held in float32 and, for a bfloat16 model, rounded where torch would round them.
 * Each output of a product is one sum over its inputs in one order, whatever the number of rows and
 * threads: a token's logits do not depend on its neighbours.
 */
#include "rows.h"
#include "backward.h"

/* x = x + more, rounded; then its norm. */
static void add_normalise(float *x, const float *more, const void *weight, long size, float eps,
                          int type, float *to) {
    const long whole = more ? size / LANES * LANES : size;
    for (long i = 0; more && i < whole; i += LANES)
        store(x, i, round_all(load(x, i, F32) + load(more, i, F32), type), F32);
    for (long i = whole; i < size; i++) x[i] = round_one(x[i] + more[i], type);
    normalise(x, weight, size, eps, F32, type, to);
}

static long scratch_row(const Model *of) {
    long widest = of->hidden > of->heads * of->head_size ? of->hidden : of->heads * of->head_size;
    return 3 * of->hidden + (2 * of->heads + 2 * of->kv_heads) * of->head_size + 2 * of->inner
           + (widest > of->inner ? widest : of->inner);
}

/* x [size] and, in as much space, what it becomes for a product: its numbers take half of that. */
static Inputs narrowed(const float *x, float *space, long size) {
    return (Inputs){x, (uint16_t *)space, space + (size + 1) / 2};
}

/* Floats of ``Step.scratch``. */
long scratch_floats(const Model *of, const Step *step) {
    long shared = scratch_row(of) * filled_tiles(step->num_tokens)
                  + of->hidden * filled_tiles(step->num_sampled) * 2;
    return shared + attention_scratch(of, step) * step->num_threads;
}

/* What a token's query, key and value go through before attention. */
static void place_token(const Model *of, const Layer *layer, const Step *step, long t, float *query,
                        float *key, const float *value) {
    const long E = of->head_size, P = of->page_size, at = step->positions[t];
    const int type = (int)of->type;
    const float *cosine = step->cosine + t * E, *sine = step->sine + t * E;
    long page = step->tables[step->sequences[t] * step->table_width + at / P];
    for (long h = 0; h < of->heads; h++) {
        float *head = query + h * E;
        if (layer->norm_query) normalise(head, layer->norm_query, E, of->eps, F32, type, head);
        rotate(head, cosine, sine, E, F32, type, head);
    }
    for (long h = 0; h < of->kv_heads; h++) {
        float *head = key + h * E;
        const long start = (page * of->kv_heads + h) * page_numbers(of), slot = start + at % P * E;
        if (layer->norm_key) normalise(head, layer->norm_key, E, of->eps, F32, type, head);
        rotate(head, cosine, sine, E, F32, type, head);
        if (of->cache == INT16) {
            keep(of, head, layer->keys, start, at % P);
            keep(of, value + h * E, layer->values, start, at % P);
            continue;
        }
        for (long i = 0; i < E; i += LANES) {
            store(layer->keys, slot + i, load(head, i, F32), type);
            store(layer->values, slot + i, load(value, h * E + i, F32), type);
        }
    }
}

/* Compute the row: writes its keys and values to the cache, and the logits that are wanted. */
void forward(const Model *of, const Step *step) {
    const long T = step->num_tokens, N = step->num_sampled, D = of->hidden, F = of->inner;
    const long E = of->head_size, Q = of->heads * E, KV = of->kv_heads * E;
    const int type = (int)of->type;
    const long R = filled_tiles(T); /* rows that there is space for */
    float *x = step->scratch, *normed = x + R * D, *more = normed + R * D, *query = more + R * D;
    float *key = query + R * Q, *value = key + R * KV, *attended = value + R * KV;
    float *gate = attended + R * Q, *up = gate + R * F, *spare = up + R * F;
    float *picked = step->scratch + R * scratch_row(of);
    float *attention = picked + filled_tiles(N) * D * 2;
    const Inputs to_attention = narrowed(normed, spare, T * D);
    const Inputs to_out = narrowed(attended, spare, T * Q);
    const Inputs to_mlp = to_attention, to_down = narrowed(gate, spare, T * F);
    const Inputs gated_already = {0, (uint16_t *)gate, 0};
    const Inputs to_head = narrowed(picked, picked + N * D, N * D);
#pragma omp parallel num_threads((int)step->num_threads)
    {
        float *own = attention + omp_get_thread_num() * attention_scratch(of, step);
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++)
            for (long i = 0; i < D; i += LANES)
                store(x, t * D + i, load(of->embedding, step->ids[t] * D + i, type), F32);
        for (long number = 0; number < of->num_layers; number++) {
            const Layer *layer = of->layers + number;
#pragma omp for schedule(static)
            for (long t = 0; t < T; t++) {
                add_normalise(x + t * D, number ? more + t * D : 0, layer->norm_in, D, of->eps,
                              type, normed + t * D);
                narrow(&layer->query, to_attention, t);
            }
            multiply(&layer->query, T, to_attention, query, type);
            multiply(&layer->key, T, to_attention, key, type);
            multiply(&layer->value, T, to_attention, value, type);
#pragma omp barrier
#pragma omp for schedule(static)
            for (long t = 0; t < T; t++)
                place_token(of, layer, step, t, query + t * Q, key + t * KV, value + t * KV);
            attend_all(of, layer, step, F32, query, own, attended);
#pragma omp for schedule(static)
            for (long t = 0; t < T; t++) narrow(&layer->out, to_out, t);
            multiply(&layer->out, T, to_out, more, type);
#pragma omp barrier
#pragma omp for schedule(static)
            for (long t = 0; t < T; t++) {
                add_normalise(x + t * D, more + t * D, layer->norm_mlp, D, of->eps, type,
                              normed + t * D);
                narrow(&layer->gate, to_mlp, t);
            }
            const int at_once =
                in_tiles(&layer->gate) && in_tiles(&layer->up) && in_tiles(&layer->down);
            if (at_once) {
                gate_amx(&layer->gate, &layer->up, T, to_mlp.pairs, gated_already.pairs);
#pragma omp barrier
            } else {
                multiply(&layer->gate, T, to_mlp, gate, type);
                multiply(&layer->up, T, to_mlp, up, type);
#pragma omp barrier
#pragma omp for schedule(static)
                for (long t = 0; t < T; t++) {
                    gated(gate + t * F, up + t * F, F, F32, type, gate + t * F);
                    narrow(&layer->down, to_down, t);
                }
            }
            multiply(&layer->down, T, at_once ? gated_already : to_down, more, type);
#pragma omp barrier
        }
#pragma omp for schedule(static)
        for (long n = 0; n < N; n++) {
            long t = step->sampled[n];
            add_normalise(x + t * D, more + t * D, of->norm_final, D, of->eps, type,
                          picked + n * D);
            narrow(&of->head, to_head, n);
        }
        multiply(&of->head, N, to_head, step->logits, of->wide_head ? F32 : type);
    }
}
