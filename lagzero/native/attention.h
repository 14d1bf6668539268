/* Attention of each token to the pages of its sequence. */
#pragma once
#include "model.h"

#define SLICE 64 /* of a head's size that is summed at once */

/* Scores of tokens first to last, which lie in the pages of ``table``, from shares on. */
INLINE void score(const Model *of, const void *keys, int type, const int64_t *table, long head,
                  long first, long last, const float *query, float *shares) {
    const long E = of->head_size, P = of->page_size;
    for (long at = first; at <= last;) {
        long end = (at / P + 1) * P <= last ? (at / P + 1) * P : last + 1;
        long key = ((table[at / P] * of->kv_heads + head) * P + at % P) * E;
        for (; at < end; at++, key += E) {
            vf sum = {};
            for (long i = 0; i < E; i += LANES)
                sum += *(const vf_any *)(query + i) * load(keys, key + i, type);
            *shares++ = sum_of(sum) * of->scale;
        }
    }
}

/* In place: exp(score - the largest), 0 beyond num; returns 1 / their sum. */
static float soften(float *shares, long num) {
    vf most = (vf){} - INFINITY, total = {};
    long padded = (num + LANES - 1) / LANES * LANES;
    for (long i = num; i < padded; i++) shares[i] = -INFINITY;
    for (long i = 0; i < padded; i += LANES) {
        vf each = *(vf_any *)(shares + i);
        most = pick(each > most, each, most);
    }
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (long i = 0; i < padded; i += LANES)
        *(vf_any *)(shares + i) = exp_of(*(vf_any *)(shares + i) - top);
    for (long i = 0; i < padded; i += LANES) total += *(vf_any *)(shares + i);
    return 1.0f / sum_of(total);
}

/* Sums of values, as many lanes as ``width``, weighted by shares. */
INLINE void weigh(const Model *of, const void *values, int type, const int64_t *table, long head,
                  long first, long last, const float *shares, float norm, long from, int width,
                  float *out) {
    const long E = of->head_size, P = of->page_size;
    vf sums[SLICE / LANES] = {};
    for (long at = first; at <= last;) {
        long end = (at / P + 1) * P <= last ? (at / P + 1) * P : last + 1;
        long value = ((table[at / P] * of->kv_heads + head) * P + at % P) * E + from;
        for (; at < end; at++, value += E, shares++)
            for (int i = 0; i < width / LANES; i++)
                sums[i] += *shares * load(values, value + i * LANES, type);
    }
    for (int i = 0; i < width; i++)
        out[i] = round_one(sums[i / LANES][i % LANES] * norm, type);
}

/* One query head over the pages of its sequence. */
INLINE void attend(const Model *of, const Layer *layer, int type, const int64_t *table, long head,
                   long first, long last, const float *query, float *shares, float *out) {
    const long E = of->head_size;
    score(of, layer->keys, type, table, head, first, last, query, shares);
    float norm = soften(shares, last - first + 1);
    long from = 0;
    for (; from + SLICE <= E; from += SLICE)
        weigh(of, layer->values, type, table, head, first, last, shares, norm, from, SLICE,
              out + from);
    for (; from < E; from += LANES)
        weigh(of, layer->values, type, table, head, first, last, shares, norm, from, LANES,
              out + from);
}

ONCE static void attend_all(const Model *of, const Layer *layer, const Step *step,
                            const float *query, float *shares, float *out) {
    const long E = of->head_size, H = of->heads;
#pragma omp for schedule(dynamic, 1)
    for (long work = 0; work < step->num_tokens * H; work++) {
        long t = work / H, h = work % H, last = step->positions[t];
        long first = layer->window && last >= layer->window ? last - layer->window + 1 : 0;
        const int64_t *table = step->tables + step->sequences[t] * step->table_width;
        long head = h / (H / of->kv_heads), at = (t * H + h) * E;
        if (of->type == F32)
            attend(of, layer, F32, table, head, first, last, query + at, shares, out + at);
        else
            attend(of, layer, BF16, table, head, first, last, query + at, shares, out + at);
    }
}
