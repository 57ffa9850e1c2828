// Attention of one token over a range of keys (attention_keys.h).
#pragma once
#include "attention_keys.h"

namespace ISA {

constexpr int64_t MOST_HEADS = 4;  // query heads that share one reading of the keys

template <int CACHE>
static inline F load_kv(const uint8_t* p, int64_t i) {
    return CACHE == CACHE_F32 ? load((const float*)p + i) : CACHE == CACHE_BF16 ? load_bf16((const uint16_t*)p + i) : load_i8((const int8_t*)p + i);
}

// Prefetch of the next tile's keys and values. A head's keys lie together in a block, but blocks lie anywhere, so the hardware
// can't foresee them. `each` rows are asked for with each key of the current tile: a burst would fill the queue of cache misses.
struct Ahead {
    const uint8_t* rows;
    const int64_t* at;
    int64_t n, each, bytes;

    // Always inlined: the compiler removes a call to a function without effects.
    __attribute__((always_inline)) inline void fetch(int64_t key) const {
        const int64_t end = (key + 1) * each < n ? (key + 1) * each : n;
        for (int64_t j = key * each; j < end; j++)
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows + at[j] + i);
    }
};

// A tile of keys, for one token.
struct KeyTile {
    int64_t key, n, position;
    const int64_t* at;
    Ahead keys, values;
};

// How a query and a key are multiplied: in float32, or as pairs of bfloat16, for which the query is rounded.
template <int CACHE>
struct InFloats {
    using Query = float;
    using Lanes = F;
    static constexpr int64_t WIDTH = 16;
    static inline F query(const float* q) { return load(q); }
    static inline F key(const uint8_t* row, int64_t d) { return load_kv<CACHE>(row, WIDTH * d); }
    static inline F begin(F q, F k) { return q * k; }
    static inline F add(F s, F q, F k) { return fma(q, k, s); }
};
struct InPairs {
    using Query = uint16_t;
    using Lanes = B;
    static constexpr int64_t WIDTH = 32;
    static inline B query(const uint16_t* q) { return load_b((const uint8_t*)q); }
    static inline B key(const uint8_t* row, int64_t d) { return load_b(row + 2 * WIDTH * d); }
    static inline F begin(B q, B k) { return dot_pairs(zero(), k, q); }
    static inline F add(F s, B q, B k) { return dot_pairs(s, k, q); }
};

// Scores [NH][64] of NH heads whose queries lie side by side. A head has ND vectors; 0: any number.
template <class How, int NH, int ND>
static inline void decode_scores(const AttentionArgs& a, const typename How::Query* q, const int64_t* at, int64_t n,
                                 const Ahead& ahead, float* scores) {
    const int64_t nd = ND ? ND : a.head_dim / How::WIDTH;
    typename How::Lanes own[NH][ND ? ND : 1];
    for (int h = 0; h < NH; h++)
        for (int64_t d = 0; d < ND; d++) own[h][d] = How::query(q + (h * nd + d) * How::WIDTH);
    F part[NH][16];
    for (int64_t j0 = 0; j0 < n; j0 += 16) {
        const int64_t m = n - j0 < 16 ? n - j0 : 16;
        for (int64_t j = 0; j < m; j++) {
            const uint8_t* key = a.k + at[j0 + j];
            ahead.fetch(j0 + j);
            F s[NH];
            const auto first = How::key(key, 0);
            for (int h = 0; h < NH; h++) s[h] = How::begin(ND ? own[h][0] : How::query(q + h * nd * How::WIDTH), first);
            for (int64_t d = 1; d < nd; d++) {
                const auto x = How::key(key, d);
                for (int h = 0; h < NH; h++)
                    s[h] = How::add(s[h], ND ? own[h][d] : How::query(q + (h * nd + d) * How::WIDTH), x);
            }
            for (int h = 0; h < NH; h++) part[h][j] = s[h];
        }
        for (int h = 0; h < NH; h++) {
            for (int64_t j = m; j < 16; j++) part[h][j] = zero();
            store(scores + h * KT + j0, sums16(part[h]));
        }
    }
}

template <class How, int NH>
__attribute__((always_inline)) static inline void decode_scores_of(const AttentionArgs& a, const KeyTile& t, const typename How::Query* q, float* scores) {
    if (a.head_dim == 64) decode_scores<How, NH, 64 / How::WIDTH>(a, q, t.at, t.n, t.keys, scores);
    else if (a.head_dim == 128) decode_scores<How, NH, 128 / How::WIDTH>(a, q, t.at, t.n, t.keys, scores);
    else decode_scores<How, NH, 0>(a, q, t.at, t.n, t.keys, scores);
}

template <int CACHE, int NH, int NV>
static inline void decode_mix(const AttentionArgs& a, const float* weights, const float* scales, const int64_t* at, int64_t n,
                              const Ahead& ahead, int64_t d0, float* mixed) {
    F acc[NH][NV];
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < NV; v++) acc[h][v] = load(mixed + h * a.value_dim + d0 + 16 * v) * set1(scales[h]);
    for (int64_t j = 0; j < n; j++) {
        const uint8_t* value = a.v + at[j];
        if (d0 == 0) ahead.fetch(j);
        F x[NV];
        for (int v = 0; v < NV; v++) x[v] = load_kv<CACHE>(value, d0 + 16 * v);
        for (int h = 0; h < NH; h++) {
            const F w = set1(weights[h * KT + j]);
            for (int v = 0; v < NV; v++) acc[h][v] = fma(w, x[v], acc[h][v]);
        }
    }
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < NV; v++) store(mixed + h * a.value_dim + d0 + 16 * v, acc[h][v]);
}

// The same with pairs of bfloat16, of two keys each, for latents: their many heads are bound by arithmetic, not by memory. The
// weights are rounded too. NB: vectors of 32 values.
template <int NH, int NB>
static inline void decode_mix_pairs(const AttentionArgs& a, const uint16_t* weights, const float* scales, const int64_t* at,
                                    int64_t n, int64_t d0, float* mixed) {
    F acc[NH][2 * NB];
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < 2 * NB; v++) acc[h][v] = load(mixed + h * a.value_dim + d0 + 16 * v) * set1(scales[h]);
    for (int64_t j = 0; j < n; j += 2) {
        const uint8_t *even = a.v + at[j] + 2 * d0, *odd = a.v + at[j + 1 < n ? j + 1 : j] + 2 * d0;  // weights beyond n are 0
        B x[2 * NB];
        for (int b = 0; b < NB; b++) zip16(load_b(even + 64 * b), load_b(odd + 64 * b), x + 2 * b);
        for (int h = 0; h < NH; h++) {
            uint32_t pair;
            memcpy(&pair, weights + h * KT + j, 4);
            for (int v = 0; v < 2 * NB; v++) acc[h][v] = dot_bf16(acc[h][v], x[v], pair);
        }
    }
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < 2 * NB; v++) store(mixed + h * a.value_dim + d0 + 16 * v, acc[h][v]);
}

// Not inlined, so that `decode_tile` stays short enough to be inlined.
template <int NH>
__attribute__((noinline)) static void decode_mix_latents(const AttentionArgs& a, const KeyTile& t, const float* scores,
                                                         const float* scales, float* mixed) {
    alignas(64) uint16_t weights[NH * KT];
    for (int64_t i = 0; i < NH * KT; i += 16) store_bf16(weights + i, load(scores + i));
    int64_t d = 0;
    for (; d + 64 <= a.value_dim; d += 64) decode_mix_pairs<NH, 2>(a, weights, scales, t.at, t.n, d, mixed);
    for (; d < a.value_dim; d += 32) decode_mix_pairs<NH, 1>(a, weights, scales, t.at, t.n, d, mixed);
}

template <int CACHE, int NH>
static inline void decode_tile(const AttentionArgs& a, const KeyTile& t, int64_t head, const float* q, const uint16_t* pairs,
                               float* scores, Running* running, float* mixed) {
    const int64_t dim = a.value_dim;
    if (CACHE == CACHE_BF16 && kHasBf16 && pairs) decode_scores_of<InPairs, NH>(a, t, pairs, scores);
    else decode_scores_of<InFloats<CACHE>, NH>(a, t, q, scores);
    float scales[NH];
    for (int h = 0; h < NH; h++) scales[h] = soften(a, scores + h * KT, t.key, t.n, t.position, head + h, running + h);
    int64_t d = 0;
    if (CACHE == CACHE_BF16 && kHasBf16 && latent(a) && dim % 32 == 0) return decode_mix_latents<NH>(a, t, scores, scales, mixed);
    for (; d + 64 <= dim; d += 64) decode_mix<CACHE, NH, 4>(a, scores, scales, t.at, t.n, t.values, d, mixed);
    for (; d < dim; d += 16) decode_mix<CACHE, NH, 1>(a, scores, scales, t.at, t.n, t.values, d, mixed);
}

template <int CACHE>
static void decode_cache(const AttentionArgs& a, const KeyRange& range, const KeyRange* then, Partial* part, float* mixed,
                         float* scratch) {
    const int64_t seq = range.seq, kv_head = range.kv_head, key0 = range.begin, key1 = range.end;
    const int64_t heads = a.num_heads / a.num_kv_heads, d = a.head_dim, vd = a.value_dim;
    const int64_t position = a.seq_lens[seq] - 1;
    const float* q0 = a.qkv + a.query_start_loc[seq] * a.qkv_stride + kv_head * heads * d;
    const float scale = a.scale * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
    float *q = scratch, *scores = q + heads * d;
    uint16_t* pairs = (uint16_t*)(scores + MOST_HEADS * KT);
    const bool use_pairs = CACHE == CACHE_BF16 && kHasBf16 && d % 32 == 0;
    Running* running = (Running*)((char*)scratch + round_up((char*)(pairs + heads * d) - (char*)scratch, 64));
    int64_t places[2][KT], *at = places[0], *next = places[1];
    for (int64_t i = 0; i < heads * d; i += 16) {
        store(q + i, load(q0 + i) * set1(scale));
        if (use_pairs) store_bf16(pairs + i, load(q + i));
    }
    for (int64_t i = 0; i < heads * vd; i += 16) store(mixed + i, zero());
    for (int64_t h = 0; h < heads; h++) running[h] = {-INFINITY, zero()};
    find_keys(a, seq, kv_head, key0, key1 - key0 < KT ? key1 - key0 : KT, next);
    for (int64_t key = key0; key < key1; key += KT) {
        const int64_t n = key1 - key < KT ? key1 - key : KT, after = key1 - key - n < KT ? key1 - key - n : KT;
        int64_t* known = next;
        next = at, at = known;
        int64_t coming = after;
        if (after > 0) {
            find_keys(a, seq, kv_head, key + n, after, next);
        } else if (then) {  // this thread's next task
            coming = then->end - then->begin < KT ? then->end - then->begin : KT;
            find_keys(a, then->seq, then->kv_head, then->begin, coming, next);
        }
        const int64_t each = (coming + n - 1) / n, bytes = d * element_bytes(CACHE);
        KeyTile t{key, n, position, at, {a.k, next, coming, each, bytes}, {a.v, next, latent(a) ? 0 : coming, each, bytes}};
        for (int64_t h = 0; h < heads;) {
            const uint16_t* rounded = use_pairs ? pairs + h * d : nullptr;
            const int64_t left = heads - h, head = kv_head * heads + h;
            if (left >= 4) decode_tile<CACHE, 4>(a, t, head, q + h * d, rounded, scores, running + h, mixed + h * vd);
            else if (left == 3) decode_tile<CACHE, 3>(a, t, head, q + h * d, rounded, scores, running + h, mixed + h * vd);
            else if (left == 2) decode_tile<CACHE, 2>(a, t, head, q + h * d, rounded, scores, running + h, mixed + h * vd);
            else decode_tile<CACHE, 1>(a, t, head, q + h * d, rounded, scores, running + h, mixed + h * vd);
            h += left < MOST_HEADS ? left : MOST_HEADS;
            t.keys.n = t.values.n = 0;  // the first heads have asked for them all
        }
    }
    for (int64_t h = 0; h < heads; h++) part[h] = {running[h].top, sum(running[h].sum)};
    if (a.v_scale)
        for (int64_t i = 0; i < heads * vd; i += 16) store(mixed + i, load(mixed + i) * set1(a.v_scale[kv_head]));
}

// Writes to mixed [heads of this kv head, V] the sum of weight · value, still to be divided by part[h].sum. head_dim and value_dim
// are multiples of 16.
static void decode(const AttentionArgs& a, const KeyRange& range, const KeyRange* then, Partial* part, float* mixed,
                   float* scratch) {
    if (a.cache == CACHE_F32) decode_cache<CACHE_F32>(a, range, then, part, mixed, scratch);
    else if (a.cache == CACHE_BF16) decode_cache<CACHE_BF16>(a, range, then, part, mixed, scratch);
    else decode_cache<CACHE_I8>(a, range, then, part, mixed, scratch);
}

static int64_t decode_scratch(const AttentionArgs& a) {
    const int64_t heads = a.num_heads / a.num_kv_heads;
    return heads * (2 * a.head_dim + (int64_t)sizeof(Running) / 4) + MOST_HEADS * KT + 64;
}

}  // namespace ISA
