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

/* x = x + more, rounded; then its norm. */
static void add_normalise(float *x, const float *more, const void *weight, long size, float eps,
                          int type, float *to) {
    if (more)
        for (long i = 0; i < size; i++) x[i] = round_one(x[i] + more[i], type);
    normalise(x, weight, size, eps, type, to);
}

static void rotate(float *head, const float *cosine, const float *sine, long size, int type) {
    long half = size / 2;
    for (long i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = round_one(round_one(a * cosine[i], type) + round_one(-b * sine[i], type), type);
        head[i + half] = round_one(
            round_one(b * cosine[i + half], type) + round_one(a * sine[i + half], type), type);
    }
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
    long shared = scratch_row(of) * step->num_tokens + of->hidden * step->num_sampled * 2;
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
        if (layer->norm_query) normalise(head, layer->norm_query, E, of->eps, type, head);
        rotate(head, cosine, sine, E, type);
    }
    for (long h = 0; h < of->kv_heads; h++) {
        float *head = key + h * E;
        const long start = (page * of->kv_heads + h) * page_numbers(of), slot = start + at % P * E;
        if (layer->norm_key) normalise(head, layer->norm_key, E, of->eps, type, head);
        rotate(head, cosine, sine, E, type);
        if (of->cache == INT16) {
            keep(of, head, layer->keys, start, at % P);
            keep(of, value + h * E, layer->values, start, at % P);
            continue;
        }
        for (long i = 0; i < E; i++) {
            store_one(layer->keys, slot + i, head[i], type);
            store_one(layer->values, slot + i, value[h * E + i], type);
        }
    }
}

/* Compute the row: writes its keys and values to the cache, and the logits that are wanted. */
void forward(const Model *of, const Step *step) {
    const long T = step->num_tokens, N = step->num_sampled, D = of->hidden, F = of->inner;
    const long E = of->head_size, Q = of->heads * E, KV = of->kv_heads * E;
    const int type = (int)of->type;
    float *x = step->scratch, *normed = x + T * D, *more = normed + T * D, *query = more + T * D;
    float *key = query + T * Q, *value = key + T * KV, *attended = value + T * KV;
    float *gate = attended + T * Q, *up = gate + T * F, *spare = up + T * F;
    float *picked = step->scratch + T * scratch_row(of), *attention = picked + N * D * 2;
    const Inputs to_attention = narrowed(normed, spare, T * D);
    const Inputs to_out = narrowed(attended, spare, T * Q);
    const Inputs to_mlp = to_attention, to_down = narrowed(gate, spare, T * F);
    const Inputs to_head = narrowed(picked, picked + N * D, N * D);
#pragma omp parallel num_threads((int)step->num_threads)
    {
        float *own = attention + omp_get_thread_num() * attention_scratch(of, step);
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++)
            for (long i = 0; i < D; i++)
                x[t * D + i] = load_one(of->embedding, step->ids[t] * D + i, type);
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
            attend_all(of, layer, step, query, own, attended);
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
            multiply(&layer->gate, T, to_mlp, gate, type);
            multiply(&layer->up, T, to_mlp, up, type);
#pragma omp barrier
#pragma omp for schedule(static)
            for (long t = 0; t < T; t++) {
                gated(gate + t * F, up + t * F, F, type, gate + t * F);
                narrow(&layer->down, to_down, t);
            }
            multiply(&layer->down, T, to_down, more, type);
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
