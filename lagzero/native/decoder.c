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

INLINE char *place(const void *from, long at, int held) { return (char *)from + at * sizes[held]; }

/* x = x + more, rounded as torch does it in a trainer; then its norm. ``more`` lies in memory as
 * ``held``. */
static void add_normalise(float *x, const void *more, int held, const void *weight, long size,
                          float eps, int type, float *to) {
    const long whole = more ? size / LANES * LANES : size;
    for (long i = 0; more && i < whole; i += LANES) {
        const vf sum = load(x, i, F32) + load(more, i, held);
        store(x, i, type == F32 ? sum : round_bits(sum), F32);
    }
    for (long i = whole; i < size; i++) x[i] = round_one(x[i] + load_one(more, i, held), type);
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

/* Logits are float32, but of a bfloat16 head in tiles they are written as narrow as they are. */
long logits_type(const Model *of) {
    return in_tiles(&of->head) && of->type == BF16 && !of->wide_head ? BF16 : F32;
}

/* What products give, and attention takes and gives, lies in memory as float32, but of layers in
 * tiles as narrow as it is. */
long held_type(const Model *of) {
    for (const Layer *layer = of->layers; layer < of->layers + of->num_layers; layer++) {
        const Linear *all[] = {&layer->query, &layer->key, &layer->value, &layer->out,
                               &layer->gate, &layer->up, &layer->down};
        for (int i = 0; i < 7; i++)
            if (!in_tiles(all[i])) return F32;
    }
    return of->type;
}

/* ``multiply``, whose result lies in memory as ``held``. */
static void multiply_as(const Linear *of, long num, Inputs in, void *y, int type, int held) {
    if (held == BF16)
        multiply_narrow(of, num, in.pairs, y);
    else
        multiply(of, num, in, y, type);
}

/* What a token's query, key and value go through before attention. */
static void place_token(const Model *of, const Layer *layer, const Step *step, long t, char *query,
                        char *key, const char *value, int held) {
    const long E = of->head_size, P = of->page_size, at = step->positions[t];
    const long head = E * sizes[held];
    const int type = (int)of->type;
    const char *cosine = place(step->cosine, t * E, held), *sine = place(step->sine, t * E, held);
    long page = step->tables[step->sequences[t] * step->table_width + at / P];
    for (long h = 0; h < of->heads; h++, query += head) {
        if (layer->norm_query)
            normalise(query, layer->norm_query, E, of->eps, held, type, query);
        rotate(query, cosine, sine, E, held, type, query);
    }
    for (long h = 0; h < of->kv_heads; h++, key += head, value += head) {
        const long start = (page * of->kv_heads + h) * page_numbers(of), slot = start + at % P * E;
        if (layer->norm_key) normalise(key, layer->norm_key, E, of->eps, held, type, key);
        rotate(key, cosine, sine, E, held, type, key);
        if (of->cache == INT16) {
            keep(of, (const float *)key, layer->keys, start, at % P);
            keep(of, (const float *)value, layer->values, start, at % P);
            continue;
        }
        for (long i = 0; i < E; i += LANES) {
            store(layer->keys, slot + i, load(key, i, held), type);
            store(layer->values, slot + i, load(value, i, held), type);
        }
    }
}

/* Where a step's numbers are: rows of the row's tokens, as float32 or as ``held``. */
typedef struct {
    float *x, *normed, *picked; /* [T, D] twice, [N, D] */
    void *more;                 /* [T, D]: what is to be added to x next */
    void *query, *key, *value, *attended, *gate, *up;
    Inputs to_attention, to_out, to_mlp, to_down, to_head;
    float *attention; /* attention_scratch() of each thread */
    int held;
} Space;

static Space space_of(const Model *of, const Step *step) {
    const long T = step->num_tokens, N = step->num_sampled, D = of->hidden, F = of->inner;
    const long Q = of->heads * of->head_size, KV = of->kv_heads * of->head_size;
    const long R = filled_tiles(T); /* rows that there is space for */
    float *x = step->scratch, *normed = x + R * D, *more = normed + R * D, *query = more + R * D;
    float *key = query + R * Q, *value = key + R * KV, *attended = value + R * KV;
    float *gate = attended + R * Q, *up = gate + R * F, *spare = up + R * F;
    float *picked = step->scratch + R * scratch_row(of);
    const int held = (int)held_type(of);
    const Inputs gated_already = {0, (uint16_t *)gate, 0};
    const Inputs attended_already = {0, (uint16_t *)attended, 0};
    return (Space){
        .x = x, .normed = normed, .picked = picked, .more = more, .query = query, .key = key,
        .value = value, .attended = attended, .gate = gate, .up = up,
        .to_attention = narrowed(normed, spare, T * D),
        .to_out = held == BF16 && !AMX ? attended_already : narrowed(attended, spare, T * Q),
        .to_mlp = narrowed(normed, spare, T * D),
        .to_down = held == BF16 ? gated_already : narrowed(gate, spare, T * F),
        .to_head = narrowed(picked, picked + N * D, N * D),
        .attention = picked + filled_tiles(N) * D * 2,
        .held = held,
    };
}

/* A layer's attention, to ``more``. Each of the team calls it. */
static void layer_attention(const Model *of, const Layer *layer, const Step *step,
                            const Space *in) {
    const long T = step->num_tokens, D = of->hidden, E = of->head_size, Q = of->heads * E;
    const long KV = of->kv_heads * E, tiles = filled_tiles(T) / TILE * (Q / 32);
    const int type = (int)of->type, held = in->held;
    float *own = in->attention + omp_get_thread_num() * attention_scratch(of, step);
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++) {
        add_normalise(in->x + t * D, layer > of->layers ? place(in->more, t * D, held) : 0, held,
                      layer->norm_in, D, of->eps, type, in->normed + t * D);
        narrow(&layer->query, in->to_attention, t);
    }
    multiply_as(&layer->query, T, in->to_attention, in->query, type, held);
    multiply_as(&layer->key, T, in->to_attention, in->key, type, held);
    multiply_as(&layer->value, T, in->to_attention, in->value, type, held);
#pragma omp barrier
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++)
        place_token(of, layer, step, t, place(in->query, t * Q, held),
                    place(in->key, t * KV, held), place(in->value, t * KV, held), held);
    attend_all(of, layer, step, held, in->query, own, in->attended);
    if (held == F32) {
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++) narrow(&layer->out, in->to_out, t);
    } else if (AMX) {
#pragma omp for schedule(static)
        for (long work = 0; work < tiles; work++)
            pair_tile(in->attended, T, Q, work / (Q / 32) * TILE, work % (Q / 32) * 32,
                      in->to_out.pairs);
    }
    multiply_as(&layer->out, T, in->to_out, in->more, type, held);
#pragma omp barrier
}

/* An MLP's gate, of those outputs that the thread has just made itself. */
static void gate_own(const Linear *of, long num, uint16_t *gate, const uint16_t *up) {
    const long first = first_of(of, omp_get_thread_num());
    const long last = first_of(of, omp_get_thread_num() + 1);
    for (long at = first; at < num * of->rows; at += of->rows)
        gated(gate + at, up + at, last - first, BF16, BF16, gate + at);
}

/* A layer's MLP, to ``more``. Each of the team calls it. */
static void layer_mlp(const Model *of, const Layer *layer, const Step *step, const Space *in) {
    const long T = step->num_tokens, D = of->hidden, F = of->inner;
    const int type = (int)of->type, held = in->held;
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++) {
        add_normalise(in->x + t * D, place(in->more, t * D, held), held, layer->norm_mlp, D,
                      of->eps, type, in->normed + t * D);
        narrow(&layer->gate, in->to_mlp, t);
    }
    if (held == BF16 && AMX) {
        gate_amx(&layer->gate, &layer->up, T, in->to_mlp.pairs, in->to_down.pairs);
    } else {
        multiply_as(&layer->gate, T, in->to_mlp, in->gate, type, held);
        multiply_as(&layer->up, T, in->to_mlp, in->up, type, held);
        if (held == BF16) gate_own(&layer->gate, T, in->gate, in->up);
    }
#pragma omp barrier
    if (held == F32) {
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++) {
            float *gate = (float *)in->gate + t * F;
            gated(gate, (float *)in->up + t * F, F, F32, type, gate);
            narrow(&layer->down, in->to_down, t);
        }
    }
    multiply_as(&layer->down, T, in->to_down, in->more, type, held);
#pragma omp barrier
}

/* Compute the row: writes its keys and values to the cache, and the logits that are wanted. */
void forward(const Model *of, const Step *step) {
    const long T = step->num_tokens, N = step->num_sampled, D = of->hidden;
    const int type = (int)of->type;
    const Space in = space_of(of, step);
#pragma omp parallel num_threads((int)step->num_threads)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++)
            for (long i = 0; i < D; i += LANES)
                store(in.x, t * D + i, load(of->embedding, step->ids[t] * D + i, type), F32);
        for (long number = 0; number < of->num_layers; number++) {
            layer_attention(of, of->layers + number, step, &in);
            layer_mlp(of, of->layers + number, step, &in);
        }
#pragma omp for schedule(static)
        for (long n = 0; n < N; n++) {
            long t = step->sampled[n];
            add_normalise(in.x + t * D, place(in.more, t * D, in.held), in.held, of->norm_final, D,
                          of->eps, type, in.picked + n * D);
            narrow(&of->head, in.to_head, n);
        }
        if (logits_type(of) == BF16)
            multiply_narrow(&of->head, N, in.to_head.pairs, step->logits);
        else
            multiply(&of->head, N, in.to_head, step->logits, of->wide_head ? F32 : type);
    }
}
