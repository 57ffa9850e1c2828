// Attention over the KV cache, which is read in place. Keys are read in tiles of 64 with a running softmax (Milakov, Gimelshein:
// Online normalizer calculation for softmax, 2018).
//
// 1. `decode` computes one token of a sequence over a range of its keys, for the query heads of one kv head.
// 2. `prefill` computes a tile of tokens over all keys that they see.
//
// The scale of an 8-bit cache's keys multiplies the scores, and that of its values the result. In latent attention a value is a
// part of its key's row.
#pragma once
#include <string.h>

#include "emit.h"
#include "kernels.h"

namespace ISA {

constexpr int64_t KT = KEY_TILE;
constexpr int64_t MOST_HEADS = 4;  // query heads that share one reading of the keys

static inline int64_t element_bytes(int32_t cache) { return cache == CACHE_F32 ? 4 : cache == CACHE_BF16 ? 2 : 1; }

template <int CACHE>
static inline F load_kv(const uint8_t* p, int64_t i) {
    return CACHE == CACHE_F32 ? load((const float*)p + i) : CACHE == CACHE_BF16 ? load_bf16((const uint16_t*)p + i) : load_i8((const int8_t*)p + i);
}

static inline float scalar_kv(int32_t cache, const uint8_t* p, int64_t i) {
    if (cache == CACHE_F32) return ((const float*)p)[i];
    if (cache == CACHE_I8) return ((const int8_t*)p)[i];
    const uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// The byte offsets in the cache of a sequence's keys key0 … key0 + n − 1.
static inline void find_keys(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t key0, int64_t n, int64_t* at) {
    const int64_t bytes = a.head_dim * element_bytes(a.cache), size = a.block_size;
    int64_t block = key0 / size, offset = key0 - block * size;
    const int32_t* table = a.block_table + seq * a.table_stride;
    for (int64_t j = 0; j < n; block++, offset = 0) {
        const int64_t first = (table[block] * a.num_kv_heads + kv_head) * size;
        for (; offset < size && j < n; offset++, j++) at[j] = (first + offset) * bytes;
    }
}

struct Running {  // the softmax's running maximum and sum; the sum stays in lanes until the end
    float top;
    F sum;
};

// Applies cap, slope, bias and mask to the scores of keys key0 … key0 + 63 for a query at `position`, then the running softmax.
// Leaves in `scores` the weights relative to the new maximum. Returns the factor of the values that were added before.
static inline float soften(const AttentionArgs& a, float* scores, int64_t key0, int64_t n, int64_t position, int64_t head,
                           Running* p) {
    int64_t low = a.window ? position - a.window + 1 - key0 : 0, high = a.causal ? position + 1 - key0 : n;
    if (a.window && !a.causal) high = position + a.window - key0;
    low = low < 0 ? 0 : low;
    high = high > n ? n : high;
    if (low >= high) {
        memset(scores, 0, KT * 4);
        return 1.0f;
    }
    if (a.softcap > 0.0f)
        for (int64_t j = 0; j < KT; j += 16)
            store(scores + j, vtanh(load(scores + j) * set1(1.0f / a.softcap)) * set1(a.softcap));
    if (a.slopes)
        for (int64_t j = 0; j < KT; j++) scores[j] += a.slopes[head] * (float)(key0 + j - position);
    if (a.distance_bias) {
        const float* bias = a.distance_bias + head * (2 * a.bias_range + 1) + a.bias_range;
        for (int64_t j = 0; j < KT; j++) {
            const int64_t distance = key0 + j - position, least = distance < -a.bias_range ? -a.bias_range : distance;
            scores[j] += bias[least > a.bias_range ? a.bias_range : least];
        }
    }
    const bool masked = low > 0 || high < KT;
    if (masked) {
        for (int64_t j = 0; j < low; j++) scores[j] = -INFINITY;
        for (int64_t j = high; j < KT; j++) scores[j] = -INFINITY;
    }
    F x[KT / 16];
    for (int64_t j = 0; j < KT / 16; j++) x[j] = load(scores + 16 * j);
    const float most = top(vmax(vmax(x[0], x[1]), vmax(x[2], x[3]))), before = p->top;
    const float now = most > before ? most : before;
    float scale = 1.0f;
    if (now > before) {
        float t[16];
        store(t, vexp(set1(before - now)));
        scale = before == -INFINITY ? 0.0f : t[0];
        p->top = now;
        p->sum = p->sum * set1(scale);
    }
    for (int64_t j = 0; j < KT / 16; j++) x[j] = vexp(x[j] - set1(now));
    for (int64_t j = 0; j < KT / 16; j++) store(scores + 16 * j, x[j]);
    if (masked) {  // vexp of a masked score is e⁻⁸⁷, not 0
        for (int64_t j = 0; j < low; j++) scores[j] = 0.0f;
        for (int64_t j = high; j < KT; j++) scores[j] = 0.0f;
        for (int64_t j = 0; j < KT / 16; j++) x[j] = load(scores + 16 * j);
    }
    p->sum = p->sum + ((x[0] + x[1]) + (x[2] + x[3]));
    return scale;
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

// --- One token --------------------------------------------------------------------------------------------------------

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

// --- Many tokens ------------------------------------------------------------------------------------------------------

// Sixteen words of a key or value of d numbers, from word `word` on. A word is one float32, or with PAIRS two bfloat16. Words
// beyond d are 0.
template <bool PAIRS>
static inline void words_of(const AttentionArgs& a, int64_t d, const uint8_t* row, int64_t word, uint32_t* to) {
    constexpr int64_t count = PAIRS ? 32 : 16;
    const int64_t first = word * count / 16;
    if (first + count <= d && a.cache == (PAIRS ? CACHE_BF16 : CACHE_F32)) {
        memcpy(to, row + 4 * word, 64);
        return;
    }
    float x[count];
    if (first + count <= d && a.cache == CACHE_I8)
        for (int64_t i = 0; i < count; i += 16) store(x + i, load_i8((const int8_t*)row + first + i));
    else
        for (int64_t i = 0; i < count; i++) x[i] = first + i < d ? scalar_kv(a.cache, row, first + i) : 0.0f;
    if (PAIRS)
        for (int64_t i = 0; i < count; i += 16) store_bf16((uint16_t*)to + i, load(x + i));
    else
        memcpy(to, x, 64);
}

// A tile's keys transposed, [D][64], and its values, [64][V]. PAIRS: in bfloat16, with two dimensions of a key, or a dimension of
// two values, side by side in 32 bits.
template <bool PAIRS>
static inline void pack_keys(const AttentionArgs& a, const int64_t* at, int64_t n, float* keys) {
    uint32_t* k = (uint32_t*)keys;
    alignas(64) uint32_t block[16 * 16];
    const int64_t dp = round_up(a.head_dim, 16), words = PAIRS ? dp / 2 : dp;
    for (int64_t word = 0; word < words; word += 16)
        for (int64_t j0 = 0; j0 < KT; j0 += 16) {
            for (int64_t j = j0; j < j0 + 16; j++) {
                if (j < n) words_of<PAIRS>(a, a.head_dim, a.k + at[j], word, block + (j - j0) * 16);
                else memset(block + (j - j0) * 16, 0, 64);
            }
            transpose16(block, k + word * KT + j0, KT, words - word < 16 ? words - word : 16);
        }
}

template <bool PAIRS>
static inline void pack_values(const AttentionArgs& a, const int64_t* at, int64_t n, float* values) {
    constexpr int64_t ROWS_A_WORD = PAIRS ? 2 : 1;
    uint32_t* v = (uint32_t*)values;
    alignas(64) uint32_t block[2 * 16];
    const int64_t vp = round_up(a.value_dim, 16), words = PAIRS ? vp / 2 : vp;
    for (int64_t word = 0; word < words; word += 16) {
        const int64_t count = words - word < 16 ? words - word : 16;
        for (int64_t j = 0; j < KT; j += ROWS_A_WORD) {
            for (int64_t r = 0; r < ROWS_A_WORD; r++) {
                if (j + r < n) words_of<PAIRS>(a, a.value_dim, a.v + at[j + r], word, block + r * 16);
                else memset(block + r * 16, 0, 64);
            }
            if (PAIRS) {
                const uint16_t *even = (const uint16_t*)block, *odd = even + 32;
                for (int64_t i = 0; i < 2 * count; i++) v[j / 2 * vp + 2 * word + i] = even[i] | (uint32_t)odd[i] << 16;
            } else {
                memcpy(v + j * vp + word, block, 4 * count);
            }
        }
    }
}

// out[r][0 … NV · 16) (+)= Σ_i x[r][i] · m[i][…], for R rows. With PAIRS i counts pairs.
template <bool PAIRS, int R, int NV>
static inline void small_product(const float* x, int64_t x_stride, const float* m, int64_t m_stride, int64_t steps,
                                 const float* scales, float* out, int64_t out_stride) {
    F acc[R][NV];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = scales ? load(out + r * out_stride + 16 * v) * set1(scales[r]) : zero();
    for (int64_t i = 0; i < steps; i++) {
        if (PAIRS) {
            B w[NV];
            for (int v = 0; v < NV; v++) w[v] = load_b((const uint8_t*)(m + i * m_stride + 16 * v));
            for (int r = 0; r < R; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * x_stride + i, 4);
                for (int v = 0; v < NV; v++) acc[r][v] = dot_bf16(acc[r][v], w[v], pair);
            }
        } else {
            F w[NV];
            for (int v = 0; v < NV; v++) w[v] = load(m + i * m_stride + 16 * v);
            for (int r = 0; r < R; r++) {
                const F s = set1(x[r * x_stride + i]);
                for (int v = 0; v < NV; v++) acc[r][v] = fma(s, w[v], acc[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) store(out + r * out_stride + 16 * v, acc[r][v]);
}

template <bool PAIRS, int R>
static inline void product_rows(const float* x, int64_t xs, const float* m, int64_t ms, int64_t steps, const float* scales,
                                float* out, int64_t os, int64_t columns) {
    constexpr int NV = kFullTiles ? 4 : 2;
    int64_t c = 0;
    for (; c + 16 * NV <= columns; c += 16 * NV)
        small_product<PAIRS, R, NV>(x, xs, m + c, ms, steps, scales, out + c, os);
    for (; c < columns; c += 16) small_product<PAIRS, R, 1>(x, xs, m + c, ms, steps, scales, out + c, os);
}

constexpr int64_t ROWS = kFullTiles ? 6 : 2;

template <bool PAIRS>
static inline void product(const float* x, int64_t xs, const float* m, int64_t ms, int64_t steps, const float* scales, float* out,
                           int64_t os, int64_t columns, int64_t rows) {
    if (rows == ROWS) return product_rows<PAIRS, ROWS>(x, xs, m, ms, steps, scales, out, os, columns);
    int64_t r = 0;
    if (kFullTiles && rows >= 4) product_rows<PAIRS, 4>(x, xs, m, ms, steps, scales, out, os, columns), r = 4;
    for (; r < rows; r++)
        product_rows<PAIRS, 1>(x + r * xs, xs, m, ms, steps, scales ? scales + r : scales, out + r * os, os, columns);
}

template <bool PAIRS>
static void prefill_as(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    const int64_t heads = a.num_heads / a.num_kv_heads, d = a.head_dim, dp = round_up(d, 16);
    const int64_t vd = a.value_dim, vp = round_up(vd, 16), rows = (token1 - token0) * heads;
    const int64_t first = a.seq_lens[seq] - a.query_start_loc[seq + 1];  // position of token t: first + t
    const float scale = a.scale * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
    const int64_t qs = PAIRS ? dp / 2 : dp;  // floats a row
    float *q = scratch, *mixed = q + rows * dp, *keys = mixed + rows * vp, *values = keys + KT * dp;
    float *scores = values + KT * vp, *weights = scores + ROWS * KT;
    Running* running = (Running*)((char*)scratch + round_up((char*)(weights + ROWS * KT) - (char*)scratch, 64));
    int64_t at[KT];
    for (int64_t r = 0; r < rows; r++) {
        const float* from = a.qkv + (token0 + r / heads) * a.qkv_stride + (kv_head * heads + r % heads) * d;
        for (int64_t i = 0; i < dp; i += 16) {
            const F v = load_n(from + i, (int)(d - i < 16 ? d - i : 16)) * set1(scale);
            if (PAIRS) store_bf16((uint16_t*)(q + r * qs) + i, v);
            else store(q + r * qs + i, v);
        }
        for (int64_t i = 0; i < vp; i += 16) store(mixed + r * vp + i, zero());
        running[r] = {-INFINITY, zero()};
        if (a.sinks) {  // a key without a value, which all tokens see
            const float once[16] = {1.0f};
            running[r] = {a.sinks[kv_head * heads + r % heads], load(once)};
        }
    }
    const int64_t length = a.seq_lens[seq], ahead = a.window ? first + token1 - 1 + a.window : length;
    const int64_t last = a.causal ? first + token1 : ahead < length ? ahead : length;  // one beyond the last key
    int64_t low = a.window ? first + token0 - a.window + 1 : 0;
    low = low < 0 ? 0 : low / KT * KT;
    for (int64_t key = low; key < last; key += KT) {
        const int64_t n = last - key < KT ? last - key : KT;
        find_keys(a, seq, kv_head, key, n, at);
        pack_keys<PAIRS>(a, at, n, keys);
        pack_values<PAIRS>(a, at, n, values);
        int64_t r0 = a.causal ? (key - (first + token0)) * heads : 0;  // the first row that sees one of these keys
        for (r0 = r0 < 0 ? 0 : r0; r0 < rows; r0 += ROWS) {
            const int64_t count = rows - r0 < ROWS ? rows - r0 : ROWS;
            float scales[ROWS];
            product<PAIRS>(q + r0 * qs, qs, keys, KT, PAIRS ? dp / 2 : dp, nullptr, scores, KT, KT, count);
            for (int64_t r = 0; r < count; r++) {
                const int64_t token = token0 + (r0 + r) / heads, head = kv_head * heads + (r0 + r) % heads;
                float* s = scores + r * KT;
                scales[r] = soften(a, s, key, n, first + token, head, running + r0 + r);
                if (PAIRS)
                    for (int64_t j = 0; j < KT; j += 16) store_bf16((uint16_t*)(weights + r * KT) + j, load(s + j));
            }
            product<PAIRS>(PAIRS ? weights : scores, KT, values, vp, PAIRS ? KT / 2 : KT, scales, mixed + r0 * vp, vp, vp, count);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float* to = a.out + (token0 + r / heads) * a.out_stride + (kv_head * heads + r % heads) * vd;
        const F factor = set1((a.v_scale ? a.v_scale[kv_head] : 1.0f) / sum(running[r].sum));
        for (int64_t i = 0; i < vp; i += 16) store_n(to + i, load(mixed + r * vp + i) * factor, (int)(vd - i < 16 ? vd - i : 16));
    }
}

static void prefill(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    const bool pairs = kHasBf16 && a.cache != CACHE_F32 && (a.head_dim <= 512 || latent(a));
    if (pairs) prefill_as<true>(a, seq, kv_head, token0, token1, scratch);
    else prefill_as<false>(a, seq, kv_head, token0, token1, scratch);
}

static int64_t prefill_scratch(const AttentionArgs& a, int64_t tokens) {
    const int64_t rows = tokens * (a.num_heads / a.num_kv_heads), dims = round_up(a.head_dim, 16) + round_up(a.value_dim, 16);
    return rows * dims + KT * dims + 2 * ROWS * KT + rows * (int64_t)sizeof(Running) / 4 + 64;
}

}  // namespace ISA
