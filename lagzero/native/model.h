/* What the caller hands over: a model, and one row of tokens. */
#pragma once
#include "product.h"

typedef struct {
    const void *norm_in, *norm_mlp, *norm_query, *norm_key; /* the last two may be null */
    Linear query, key, value, out, gate, up, down;
    void *keys, *values; /* [pages, K, P, E] */
    long window;         /* tokens that a token sees, itself included; 0: all */
} Layer;

typedef struct {
    const Layer *layers;
    const void *embedding, *norm_final;
    Linear head;
    long num_layers, hidden, inner, heads, kv_heads, head_size, page_size;
    long type;      /* of norms, embedding, keys and values: F32 or BF16 */
    long wide_head; /* the head's result is not rounded */
    float eps, scale;
} Model;

typedef struct {
    long num_tokens, num_sampled, table_width, num_threads, longest;
    const int64_t *ids, *positions, *sequences; /* [T] */
    const int64_t *tables;                      /* [sequences, table_width] pages */
    const int64_t *sampled;                     /* [N] places in the row */
    const float *cosine, *sine;                 /* [T, E] */
    float *scratch, *logits;                    /* scratch_floats(), [N, V] */
} Step;
