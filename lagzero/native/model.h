/* What the caller hands over: a model, and one row of tokens. */
#pragma once
#include "product.h"

typedef struct {
    const void *norm_in, *norm_mlp, *norm_query, *norm_key; /* the last two may be null */
    Linear query, key, value, out, gate, up, down;
    void *keys, *values; /* [pages, K, P, E]; of INT16 each [P, E] is followed by its steps [P] */
    long window;         /* tokens that a token sees, itself included; 0: all */
} Layer;

typedef struct {
    const Layer *layers;
    const void *embedding, *norm_final;
    Linear head;
    long num_layers, hidden, inner, heads, kv_heads, head_size, page_size;
    long type;      /* of norms and embedding: F32 or BF16 */
    long cache;     /* of keys and values: the same, or INT16 */
    long wide_head; /* the head's result is not rounded */
    float eps, scale;
} Model;

/* Numbers of a page of one head, and where in it the step of a token is, for a cache of INT16. */
INLINE long page_numbers(const Model *of) {
    return of->page_size * (of->head_size + (of->cache == INT16 ? 2 : 0));
}
INLINE long step_place(const Model *of, long token) {
    return of->page_size * of->head_size + token * 2;
}

typedef struct {
    long num_tokens, num_sampled, table_width, num_threads, longest;
    const int64_t *ids, *positions, *sequences; /* [T] */
    const int64_t *tables;                      /* [sequences, table_width] pages */
    const int64_t *sampled;                     /* [N] places in the row */
    const void *cosine, *sine;                  /* [T, E] of held_type() */
    float *scratch;                             /* scratch_floats() */
    void *logits;                               /* [N, V] of logits_type() */
} Step;

/* How many tokens of a row from t on, before ``end``, follow one another in one sequence. */
INLINE long neighbours(const int64_t *sequences, const int64_t *positions, long t, long end) {
    long num = 1;
    while (t + num < end && sequences[t + num] == sequences[t]
           && positions[t + num] == positions[t] + num)
        num++;
    return num;
}
