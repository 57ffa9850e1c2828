// Attention of one token over a range of keys (attention_keys.h).
#pragma once
#include <type_traits>

#include "attention_keys.h"

namespace ISA {

constexpr int64_t MOST_HEADS = 4;  // query heads that share one reading of the keys

template <int CACHE>
static inline F load_kv(const uint8_t* p, int64_t i) {
    return CACHE == CACHE_F32 ? load((const float*)p + i) : CACHE == CACHE_BF16 ? load_bf16((const uint16_t*)p + i) : load_i8((const int8_t*)p + i);
}

// Prefetch of the next tile's keys or values, a row with each of this tile's: a burst would fill the queue of cache misses. A head's
// rows lie together in a block, but blocks lie anywhere, so the hardware can't foresee them.
struct Ahead {
    const uint8_t* rows;
    const int64_t* at;
    int64_t n;

    // The row in the place of this tile's `key`, from `offset` bytes on: LINES cache lines, or with 0 `bytes`.
    template <int LINES>
    __attribute__((always_inline)) inline void fetch(int64_t key, int64_t offset, int64_t bytes) const {
        if (key >= n) return;
        const uint8_t* row = rows + at[key] + offset;
        if (LINES)
            for (int i = 0; i < LINES; i++) ask_for(row + 64 * i);
        else
            for (int64_t i = 0; i < bytes; i += 64) ask_for(row + i);
    }
    // The rows from `key` on, where this tile is shorter than the next.
    __attribute__((always_inline)) inline void fetch_rest(int64_t key, int64_t bytes) const {
        for (; key < n; key++) fetch<0>(key, 0, bytes);
    }
};

// A tile of keys, for one token.
struct KeyTile {
    int64_t key, n, position;
    const int64_t* at;
    Ahead keys, values;
};

// How a query and keys, or weights and values, are multiplied: in float32; as pairs of bfloat16, for which query and weights are
// rounded; or, of an 8-bit cache, as pairs of 16-bit whole numbers, for which they are scaled to ±32,767 and rounded. (A lane of 32
// bits holds 512 products of 16 and 8 bits, and has 2 of every 32 numbers: a head may have 8,192.) A vector of keys is WIDTH numbers
// in BYTES bytes.
template <int CACHE>
struct InFloats {
    using Query = float;
    using Lanes = F;
    using Sum = F;
    static constexpr int64_t WIDTH = 16, BYTES = CACHE == CACHE_F32 ? 64 : CACHE == CACHE_BF16 ? 32 : 16;
    static inline F query(const float* q) { return load(q); }
    static inline F key(const uint8_t* row) { return load_kv<CACHE>(row, 0); }
    static inline F begin() { return zero(); }
    static inline F add(F s, F q, F k) { return fma(q, k, s); }
};
struct InPairs {
    using Query = uint16_t;
    using Lanes = B;
    using Sum = F;
    static constexpr int64_t WIDTH = 32, BYTES = 64;
    static inline B query(const uint16_t* q) { return load_b((const uint8_t*)q); }
    static inline B key(const uint8_t* row) { return load_b(row); }
    static inline F begin() { return zero(); }
    static inline F add(F s, B q, B k) { return dot_pairs(s, k, q); }
    // Rounds n numbers, a multiple of 16. Returns the factor of products with them.
    static inline float round(const float* from, uint16_t* to, int64_t n) {
        for (int64_t i = 0; i < n; i += 16) store_bf16(to + i, load(from + i));
        return 1.0f;
    }
};
struct InWords {
    using Query = uint16_t;
    using Lanes = B;
    using Sum = I;
    static constexpr int64_t WIDTH = 32, BYTES = 32;
    static inline B query(const uint16_t* q) { return load_b((const uint8_t*)q); }
    static inline B key(const uint8_t* row) { return load_words((const int8_t*)row); }
    static inline I begin() { return izero(); }
    static inline I add(I s, B q, B k) { return dot_words(s, k, q); }
    static inline float round(const float* from, uint16_t* to, int64_t n) {
        F most = vabs(load(from));
        for (int64_t i = 16; i < n; i += 16) most = vmax(most, vabs(load(from + i)));
        const float largest = top(most);
        if (!(largest > 1e-30f)) {  // else 32,767 times its inverse could be infinite
            memset(to, 0, 2 * n);
            return 0.0f;
        }
        const F scale = set1(32767.0f / largest);
        for (int64_t i = 0; i < n; i += 16) store_words((int16_t*)to + i, nearest(load(from + i) * scale));
        return largest / 32767.0f;
    }
};

// Scores [NH][64] of NH heads whose queries lie side by side, each times its factor. A head has ND vectors; 0: any number.
template <class How, int NH, int ND>
static inline void decode_scores(const AttentionArgs& a, const typename How::Query* q, const float* factors, const KeyTile& t,
                                 float* scores) {
    const int64_t nd = ND ? ND : a.head_dim / How::WIDTH, n = t.n;
    constexpr int LINES = ND ? (ND * How::BYTES + 63) / 64 : 0;
    typename How::Lanes own[NH][ND ? ND : 1];
    for (int h = 0; h < NH; h++)
        for (int64_t d = 0; d < ND; d++) own[h][d] = How::query(q + (h * nd + d) * How::WIDTH);
    F part[NH][4];  // each quarter has a lane for each of four keys
    for (int64_t j0 = 0; j0 < n; j0 += 16) {
        for (int g = 0; g < 4; g++) {
            typename How::Sum s[NH][4];
            for (int i = 0; i < 4; i++) {
                const int64_t j = j0 + 4 * g + i;
                const uint8_t* key = a.k + t.at[j < n ? j : n - 1];  // of keys beyond n the scores do not count
                t.keys.fetch<LINES>(j, 0, nd * How::BYTES);
                for (int h = 0; h < NH; h++) s[h][i] = How::begin();
                for (int64_t d = 0; d < nd; d++) {
                    const auto x = How::key(key + d * How::BYTES);
                    for (int h = 0; h < NH; h++)
                        s[h][i] = How::add(s[h][i], ND ? own[h][d] : How::query(q + (h * nd + d) * How::WIDTH), x);
                }
            }
            for (int h = 0; h < NH; h++)
                part[h][g] = sums4(to_float(s[h][0]), to_float(s[h][1]), to_float(s[h][2]), to_float(s[h][3]));
        }
        for (int h = 0; h < NH; h++)
            store(scores + h * KT + j0, sum_of_quarters(part[h][0], part[h][1], part[h][2], part[h][3]) * set1(factors[h]));
    }
}

template <class How, int NH>
__attribute__((always_inline)) static inline void decode_scores_of(const AttentionArgs& a, const KeyTile& t, const typename How::Query* q,
                                                                   const float* factors, float* scores) {
    if (a.head_dim == 64) decode_scores<How, NH, 64 / How::WIDTH>(a, q, factors, t, scores);
    else if (a.head_dim == 128) decode_scores<How, NH, 128 / How::WIDTH>(a, q, factors, t, scores);
    else decode_scores<How, NH, 0>(a, q, factors, t, scores);
}

template <int CACHE, int NH, int NV>
static inline void decode_mix(const AttentionArgs& a, const KeyTile& t, const float* weights, const float* scales, int64_t d0,
                              float* mixed) {
    F acc[NH][NV];
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < NV; v++) acc[h][v] = load(mixed + h * a.value_dim + d0 + 16 * v) * set1(scales[h]);
    for (int64_t j = 0; j < t.n; j++) {
        const uint8_t* value = a.v + t.at[j];
        t.values.fetch<(NV * InFloats<CACHE>::BYTES + 63) / 64>(j, d0 * InFloats<CACHE>::BYTES / 16, 0);
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

// The same with pairs of two keys' numbers, by rounded weights. NB: vectors of 32 values.
template <class How, int NH, int NB>
static inline void decode_mix_pairs(const AttentionArgs& a, const KeyTile& t, const uint16_t* weights, const float* factors,
                                    const float* scales, int64_t d0, float* mixed) {
    typename How::Sum acc[NH][2 * NB];
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < 2 * NB; v++) acc[h][v] = How::begin();
    const int64_t offset = d0 / How::WIDTH * How::BYTES;
    for (int64_t j = 0; j < t.n; j += 2) {  // weights beyond n are 0
        const uint8_t *even = a.v + t.at[j] + offset, *odd = a.v + t.at[j + 1 < t.n ? j + 1 : j] + offset;
        t.values.fetch<(NB * How::BYTES + 63) / 64>(j, offset, 0);
        t.values.fetch<(NB * How::BYTES + 63) / 64>(j + 1, offset, 0);
        B x[2 * NB];
        for (int b = 0; b < NB; b++) zip16(How::key(even + How::BYTES * b), How::key(odd + How::BYTES * b), x + 2 * b);
        for (int h = 0; h < NH; h++) {
            uint32_t pair;
            memcpy(&pair, weights + h * KT + j, 4);
            const B w = repeat(pair);
            for (int v = 0; v < 2 * NB; v++) acc[h][v] = How::add(acc[h][v], w, x[v]);
        }
    }
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < 2 * NB; v++) {
            float* to = mixed + h * a.value_dim + d0 + 16 * v;
            store(to, fma(load(to), set1(scales[h]), to_float(acc[h][v]) * set1(factors[h])));
        }
}

// Not inlined: its loop over keys takes all registers.
template <class How, int NH>
__attribute__((noinline)) static void decode_mix_rounded(const AttentionArgs& a, const KeyTile& t, const float* scores,
                                                         const float* scales, float* mixed) {
    alignas(64) uint16_t weights[NH * KT];
    float factors[NH];
    for (int h = 0; h < NH; h++) factors[h] = How::round(scores + h * KT, weights + h * KT, KT);
    int64_t d = 0;
    for (; d + 64 <= a.value_dim; d += 64) decode_mix_pairs<How, NH, 2>(a, t, weights, factors, scales, d, mixed);
    for (; d < a.value_dim; d += 32) decode_mix_pairs<How, NH, 1>(a, t, weights, factors, scales, d, mixed);
}

// How keys and values of a cache are multiplied where their numbers come in vectors of 32, if not in float32.
template <int CACHE>
using Rounded = std::conditional_t<CACHE == CACHE_I8, InWords, InPairs>;

template <int CACHE>
static inline bool is_rounded(int64_t dim) {
    return dim % 32 == 0 && (CACHE == CACHE_I8 || (CACHE == CACHE_BF16 && kHasBf16));
}

template <int CACHE, int NH>
static inline void decode_tile(const AttentionArgs& a, const KeyTile& t, int64_t head, const float* q, const uint16_t* rounded,
                               const float* factors, float* scores, Running* running, float* mixed) {
    const int64_t dim = a.value_dim;
    if (is_rounded<CACHE>(a.head_dim)) decode_scores_of<Rounded<CACHE>, NH>(a, t, rounded, factors, scores);
    else decode_scores_of<InFloats<CACHE>, NH>(a, t, q, factors, scores);
    float scales[NH];
    for (int h = 0; h < NH; h++) scales[h] = soften(a, scores + h * KT, t.key, t.n, t.position, head + h, running + h);
    if (is_rounded<CACHE>(dim)) return decode_mix_rounded<Rounded<CACHE>, NH>(a, t, scores, scales, mixed);
    constexpr int NV = kFullTiles ? 4 : NH == 1 ? 4 : NH == 4 ? 1 : 2;  // whose sums fit into registers
    int64_t d = 0;
    for (; d + 16 * NV <= dim; d += 16 * NV) decode_mix<CACHE, NH, NV>(a, t, scores, scales, d, mixed);
    for (; d < dim; d += 16) decode_mix<CACHE, NH, 1>(a, t, scores, scales, d, mixed);
}

template <int CACHE>
static void decode_cache(const AttentionArgs& a, const KeyRange& range, const KeyRange* then, Partial* part, float* mixed,
                         float* scratch) {
    const int64_t seq = range.seq, kv_head = range.kv_head, key0 = range.begin, key1 = range.end;
    const int64_t heads = a.num_heads / a.num_kv_heads, d = a.head_dim, vd = a.value_dim;
    const int64_t position = a.seq_lens[seq] - 1;
    const float* q0 = a.qkv + a.query_start_loc[seq] * a.qkv_stride + kv_head * heads * d;
    const float scale = a.scale * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
    float *q = scratch, *factors = q + heads * d, *scores = factors + round_up(heads, 16);
    uint16_t* rounded = (uint16_t*)(scores + MOST_HEADS * KT);
    Running* running = (Running*)((char*)scratch + round_up((char*)(rounded + heads * d) - (char*)scratch, 64));
    int64_t places[2][KT], *at = places[0], *next = places[1];
    for (int64_t i = 0; i < heads * d; i += 16) store(q + i, load(q0 + i) * set1(scale));
    for (int64_t h = 0; h < heads; h++)
        factors[h] = is_rounded<CACHE>(d) ? Rounded<CACHE>::round(q + h * d, rounded + h * d, d) : 1.0f;
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
        KeyTile t{key, n, position, at, {a.k, next, coming}, {a.v, next, latent(a) ? 0 : coming}};
        t.keys.fetch_rest(n, d * element_bytes(CACHE)), t.values.fetch_rest(n, vd * element_bytes(CACHE));
        for (int64_t h = 0; h < heads;) {
            const int64_t left = heads - h, head = kv_head * heads + h;
            const auto tile = left >= 4   ? decode_tile<CACHE, 4>
                              : left == 3 ? decode_tile<CACHE, 3>
                              : left == 2 ? decode_tile<CACHE, 2>
                                          : decode_tile<CACHE, 1>;
            tile(a, t, head, q + h * d, rounded + h * d, factors + h, scores, running + h, mixed + h * vd);
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

static void index_scores(const AttentionArgs& a, int64_t seq, int64_t n, const float* q, const float* weights, float* scores,
                         float* scratch) {
    const int64_t d = a.head_dim, dp = round_up(d, 16);
    float *queries = scratch, *key = scratch + a.num_heads * dp;
    int64_t at[KT];
    for (int64_t i = 0; i < a.num_heads * dp; i++) queries[i] = i % dp < d ? q[i / dp * d + i % dp] : 0.0f;
    for (int64_t i = d; i < dp; i++) key[i] = 0.0f;
    for (int64_t first = 0; first < n; first += KT) {
        const int64_t count = n - first < KT ? n - first : KT;
        find_keys(a, seq, 0, first, count, at);
        for (int64_t j = 0; j < count; j++) {
            for (int64_t i = 0; i < d; i++) key[i] = scalar_kv(a.cache, a.k + at[j], i);
            float score = 0.0f;
            for (int64_t h = 0; h < a.num_heads; h++) {
                F s = zero();
                for (int64_t i = 0; i < dp; i += 16) s = fma(load(queries + h * dp + i), load(key + i), s);
                const float dot = sum(s);
                score += weights[h] * (dot > 0.0f ? dot : 0.0f);
            }
            scores[first + j] = score;
        }
    }
}

static int64_t decode_scratch(const AttentionArgs& a) {
    const int64_t heads = a.num_heads / a.num_kv_heads;
    return heads * (2 * a.head_dim + (int64_t)sizeof(Running) / 4) + round_up(heads, 16) + MOST_HEADS * KT + 64;
}

}  // namespace ISA
