// Attention of a few tokens of a sequence over a range of keys (attention_keys.h).
#pragma once
#include <type_traits>

#include "attention_keys.h"

namespace ISA {

constexpr int64_t MAX_ROWS = 4;  // that share one reading of the keys

template <int CACHE>
static inline F load_kv(const uint8_t* p, int64_t i) {
    return CACHE == CACHE_F32 ? load((const float*)p + i) : load_bf16((const uint16_t*)p + i);
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

struct KeyTile {
    int64_t key, n;
    const int64_t* at;
    Ahead keys, values;
};

// Sixteen lanes hold WIDTH numbers of a value, in BYTES bytes, or half as many of each of two keys. `half`: a value's last numbers,
// where there are half as many.
template <int CACHE>
struct InFloats {
    using Query = float;
    using Lanes = F;
    using Sum = F;
    static constexpr int64_t WIDTH = 16, BYTES = CACHE == CACHE_F32 ? 64 : 32;
    static inline F query(const float* q) { return load_halves(q, q); }
    static inline F keys(const uint8_t* p, const uint8_t* q) {
        return CACHE == CACHE_F32 ? load_halves((const float*)p, (const float*)q) : load_bf16_halves((const uint16_t*)p, (const uint16_t*)q);
    }
    static inline F begin() { return zero(); }
    static inline F add(F s, F q, F k) { return fma(q, k, s); }
};
struct InPairs {
    using Query = uint16_t;
    using Lanes = B;
    using Sum = F;
    static constexpr int64_t WIDTH = 32, BYTES = 64;
    static inline B query(const uint16_t* q) { return keys((const uint8_t*)q, (const uint8_t*)q); }
    static inline B keys(const uint8_t* p, const uint8_t* q) { return load_b_halves(p, q); }
    static inline B value(const uint8_t* row) { return load_b(row); }
    static inline B half(const uint8_t* row) { return load_b_halves(row, row); }
    static inline F begin() { return zero(); }
    static inline F add(F s, B q, B k) { return dot_pairs(s, k, q); }
};
struct InWords {
    using Query = uint16_t;
    using Lanes = B;
    using Sum = I;
    static constexpr int64_t WIDTH = 32, BYTES = 32;
    static inline B query(const uint16_t* q) { return load_b_halves((const uint8_t*)q, (const uint8_t*)q); }
    static inline B keys(const uint8_t* p, const uint8_t* q) { return load_words_halves((const int8_t*)p, (const int8_t*)q); }
    static inline B value(const uint8_t* row) { return load_words((const int8_t*)row); }
    static inline B half(const uint8_t* row) { return keys(row, row); }
    static inline I begin() { return izero(); }
    static inline I add(I s, B q, B k) { return dot_words(s, k, q); }
};

// Scores [NR][64] of NR rows whose queries lie side by side, each times its factor. A key is ND halves of a vector; 0: any number.
template <class How, int NR, int ND>
static inline void decode_scores(const AttentionArgs& a, const typename How::Query* q, const float* factors, const KeyTile& t,
                                 float* scores) {
    constexpr int64_t WIDTH = How::WIDTH / 2, BYTES = How::BYTES / 2;
    constexpr int LINES = ND ? (ND * BYTES + 63) / 64 : 0;
    constexpr int AT_ONCE = kFullTiles ? 4 : 1;  // pairs of keys whose sums are in registers
    const int64_t nd = ND ? ND : a.head_dim / WIDTH, n = t.n;
    typename How::Lanes own[NR][ND ? ND : 1];
    for (int r = 0; r < NR; r++)
        for (int64_t d = 0; d < ND; d++) own[r][d] = How::query(q + (r * nd + d) * WIDTH);
    typename How::Sum part[NR][2];  // of eight keys; each quarter has a lane for each of four
    for (int64_t j0 = 0; j0 < n; j0 += 16) {
        for (int g = 0; g < 2; g++) {
            typename How::Sum s[NR][4];
            for (int i0 = 0; i0 < 4; i0 += AT_ONCE) {
                const uint8_t *low[AT_ONCE], *high[AT_ONCE];
                for (int i = 0; i < AT_ONCE; i++) {
                    const int64_t j = j0 + 8 * g + i0 + i, k = j + 4;
                    low[i] = a.k + t.at[j < n ? j : n - 1], high[i] = a.k + t.at[k < n ? k : n - 1];  // beyond n scores do not count
                    t.keys.fetch<LINES>(j, 0, nd * BYTES), t.keys.fetch<LINES>(k, 0, nd * BYTES);
                    for (int r = 0; r < NR; r++) s[r][i0 + i] = How::begin();
                }
                for (int64_t d = 0; d < nd; d++) {
                    typename How::Lanes x[AT_ONCE];
                    for (int i = 0; i < AT_ONCE; i++) x[i] = How::keys(low[i] + d * BYTES, high[i] + d * BYTES);
                    for (int r = 0; r < NR; r++) {
                        const auto query = ND ? own[r][d] : How::query(q + (r * nd + d) * WIDTH);
                        for (int i = 0; i < AT_ONCE; i++) s[r][i0 + i] = How::add(s[r][i0 + i], query, x[i]);
                    }
                }
            }
            for (int r = 0; r < NR; r++) part[r][g] = sums4(s[r][0], s[r][1], s[r][2], s[r][3]);
        }
        for (int r = 0; r < NR; r++) store(scores + r * KT + j0, to_float(sum_of_halves(part[r][0], part[r][1])) * set1(factors[r]));
    }
}

template <class How, int NR>
__attribute__((always_inline)) static inline void decode_scores_of(const AttentionArgs& a, const KeyTile& t, const typename How::Query* q,
                                                                   const float* factors, float* scores) {
    if (a.head_dim == 64) decode_scores<How, NR, 128 / How::WIDTH>(a, q, factors, t, scores);
    else if (a.head_dim == 128) decode_scores<How, NR, 256 / How::WIDTH>(a, q, factors, t, scores);
    else decode_scores<How, NR, 0>(a, q, factors, t, scores);
}

template <int CACHE, int NR, int NV>
static inline void decode_mix(const AttentionArgs& a, const KeyTile& t, const float* weights, const float* scales, int64_t d0,
                              float* mixed) {
    F acc[NR][NV];
    for (int r = 0; r < NR; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = load(mixed + r * a.value_dim + d0 + 16 * v) * set1(scales[r]);
    for (int64_t j = 0; j < t.n; j++) {
        const uint8_t* value = a.v + t.at[j];
        t.values.fetch<(NV * InFloats<CACHE>::BYTES + 63) / 64>(j, d0 * InFloats<CACHE>::BYTES / 16, 0);
        F x[NV];
        for (int v = 0; v < NV; v++) x[v] = load_kv<CACHE>(value, d0 + 16 * v);
        for (int r = 0; r < NR; r++) {
            const F w = set1(weights[r * KT + j]);
            for (int v = 0; v < NV; v++) acc[r][v] = fma(w, x[v], acc[r][v]);
        }
    }
    for (int r = 0; r < NR; r++)
        for (int v = 0; v < NV; v++) store(mixed + r * a.value_dim + d0 + 16 * v, acc[r][v]);
}

// The same with pairs of two keys' numbers, by rounded weights [NR][64], each row times its factor. NV: vectors of 16 values.
template <class How, int NR, int NV>
static inline void decode_mix_pairs(const AttentionArgs& a, const KeyTile& t, const uint16_t* weights, const float* factors,
                                    const float* scales, int64_t d0, float* mixed) {
    constexpr bool whole = std::is_same_v<typename How::Sum, I>;  // numbers are added first, and then what was there before
    constexpr int NB = (NV + 1) / 2;
    auto at = [&](int r, int v) { return mixed + r * a.value_dim + d0 + 16 * v; };
    typename How::Sum acc[NR][NV];
    for (int r = 0; r < NR; r++)
        for (int v = 0; v < NV; v++) {
            if constexpr (whole) acc[r][v] = How::begin();
            else acc[r][v] = load(at(r, v)) * set1(scales[r]);
        }
    const int64_t offset = d0 / How::WIDTH * How::BYTES;
    for (int64_t j = 0; j < t.n; j += 2) {  // weights beyond n are 0
        const uint8_t *even = a.v + t.at[j] + offset, *odd = a.v + t.at[j + 1 < t.n ? j + 1 : j] + offset;
        t.values.fetch<(NV * How::BYTES / 2 + 63) / 64>(j, offset, 0);
        t.values.fetch<(NV * How::BYTES / 2 + 63) / 64>(j + 1, offset, 0);
        B x[2 * NB];
        if (NV == 1) zip16(How::half(even), How::half(odd), x);
        else
            for (int b = 0; b < NB; b++) zip16(How::value(even + How::BYTES * b), How::value(odd + How::BYTES * b), x + 2 * b);
        for (int r = 0; r < NR; r++) {
            uint32_t pair;
            memcpy(&pair, weights + r * KT + j, 4);
            const B w = repeat(pair);
            for (int v = 0; v < NV; v++) acc[r][v] = How::add(acc[r][v], w, x[v]);
        }
    }
    for (int r = 0; r < NR; r++)
        for (int v = 0; v < NV; v++) {
            if constexpr (whole) store(at(r, v), fma(load(at(r, v)), set1(scales[r]), to_float(acc[r][v]) * set1(factors[r])));
            else store(at(r, v), acc[r][v]);
        }
}

// Not inlined: its loop over keys takes all registers.
template <class How, int NR>
__attribute__((noinline)) static void decode_mix_rounded(const AttentionArgs& a, const KeyTile& t, const uint16_t* weights,
                                                         const float* factors, const float* scales, float* mixed) {
    int64_t d = 0;
    for (; d + 64 <= a.value_dim; d += 64) decode_mix_pairs<How, NR, 4>(a, t, weights, factors, scales, d, mixed);
    for (; d + 32 <= a.value_dim; d += 32) decode_mix_pairs<How, NR, 2>(a, t, weights, factors, scales, d, mixed);
    if (d < a.value_dim) decode_mix_pairs<How, NR, 1>(a, t, weights, factors, scales, d, mixed);
}

template <int CACHE>
using Multiplied = std::conditional_t<arithmetic(CACHE) == WORDS, InWords, std::conditional_t<arithmetic(CACHE) == PAIRS, InPairs, InFloats<CACHE>>>;

// NR rows of `b`, whose queries are `q`, or in 16 bits `rounded`.
template <int CACHE, int NR>
static inline void decode_tile(const AttentionArgs& a, const KeyTile& t, const Block& b, const float* q, const uint16_t* rounded,
                               const float* factors, float* scores, Running* running, float* mixed) {
    using How = Multiplied<CACHE>;
    constexpr Arithmetic kind = arithmetic(CACHE);
    const int64_t dim = a.value_dim;
    float scales[NR], weight_factors[NR];
    alignas(64) uint16_t weights[kind == FLOATS ? 1 : NR * KT];
    if constexpr (kind == FLOATS) decode_scores_of<How, NR>(a, t, q, factors, scores);
    else decode_scores_of<How, NR>(a, t, rounded, factors, scores);
    if constexpr (kind != FLOATS) {
        soften_rows<kind, NR>(a, b, scores, weights, KT, running, scales, weight_factors);
        return decode_mix_rounded<How, NR>(a, t, weights, weight_factors, scales, mixed);
    } else {
        for (int r = 0; r < NR; r++) scales[r] = soften(a, scores + r * KT, b.key, b.n, b.position_of(r), b.head_of(r), running + r);
        constexpr int NV = kFullTiles ? 4 : NR == 1 ? 4 : NR == 4 ? 1 : 2;  // whose sums fit into registers
        int64_t d = 0;
        for (; d + 16 * NV <= dim; d += 16 * NV) decode_mix<CACHE, NR, NV>(a, t, scores, scales, d, mixed);
        for (; d < dim; d += 16) decode_mix<CACHE, NR, 1>(a, t, scores, scales, d, mixed);
    }
}

template <int CACHE>
static void decode_cache(const AttentionArgs& a, const KeyRange& range, const KeyRange* then, Partial* part, float* mixed,
                         float* scratch) {
    constexpr Arithmetic kind = arithmetic(CACHE);
    const int64_t seq = range.seq, kv_head = range.kv_head, key0 = range.begin, key1 = range.end;
    const int64_t heads = a.num_heads / a.num_kv_heads, d = a.head_dim, vd = a.value_dim;
    const int64_t rows = range.tokens * heads, position = a.seq_lens[seq] - range.tokens;  // of the first token
    const float scale = a.scale * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
    float *q = scratch, *factors = q + rows * d, *scores = factors + round_up(rows, 16);
    uint16_t* rounded = (uint16_t*)(scores + MAX_ROWS * KT);
    Running* running = (Running*)((char*)scratch + round_up((char*)(rounded + rows * d) - (char*)scratch, 64));
    int64_t places[2][KT], *at = places[0], *next = places[1];
    for (int64_t r = 0; r < rows; r++) {
        const float* from = a.qkv + (a.query_start_loc[seq] + r / heads) * a.qkv_stride + (kv_head * heads + r % heads) * d;
        float* to = q + r * d;
        for (int64_t i = 0; i < d; i += 16) store(to + i, load(from + i) * set1(scale));
        factors[r] = 1.0f, running[r] = {-INFINITY, zero()};
        if (kind == FLOATS) continue;
        uint16_t* own = rounded + r * d;
        if (kind == WORDS) factors[r] = round_words(to, own, d, largest_word(d));
        else
            for (int64_t i = 0; i < d; i += 16) store_bf16(own + i, load(to + i));
    }
    for (int64_t i = 0; i < rows * vd; i += 16) store(mixed + i, zero());
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
        KeyTile t{key, n, at, {a.k, next, coming}, {a.v, next, latent(a) ? 0 : coming}};
        t.keys.fetch_rest(n, d * element_bytes(CACHE)), t.values.fetch_rest(n, vd * element_bytes(CACHE));
        for (int64_t r = 0; r < rows; r += MAX_ROWS) {
            const int64_t left = rows - r;
            const Block block{key, n, position + r / heads, kv_head * heads, heads, r % heads, left < MAX_ROWS ? left : MAX_ROWS};
            const auto tile = left >= 4   ? decode_tile<CACHE, 4>
                              : left == 3 ? decode_tile<CACHE, 3>
                              : left == 2 ? decode_tile<CACHE, 2>
                                          : decode_tile<CACHE, 1>;
            tile(a, t, block, q + r * d, rounded + r * d, factors + r, scores, running + r, mixed + r * vd);
            t.keys.n = t.values.n = 0;  // the first rows have asked for them all
        }
    }
    for (int64_t r = 0; r < rows; r++) part[r] = {running[r].top, sum(running[r].sum)};
}

// Writes to mixed [rows, V] the sum of weight · value, still to be divided by part[row].sum. A row is a token and a head of this kv
// head. head_dim and value_dim are multiples of 16.
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

static int64_t decode_scratch(const AttentionArgs& a, int64_t tokens) {
    const int64_t rows = tokens * (a.num_heads / a.num_kv_heads);
    return rows * (2 * a.head_dim + (int64_t)sizeof(Running) / 4) + round_up(rows, 16) + MAX_ROWS * KT + 64;
}

// Joins `count` ranges of keys, the first at `part` and `mixed`, the others behind it, and writes the rows' results.
template <bool BASE2>
static void join_by(const AttentionArgs& a, const KeyRange& range, const Partial* part, const float* mixed, int64_t count) {
    const int64_t heads = a.num_heads / a.num_kv_heads, vd = a.value_dim, rows = range.tokens * heads;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = range.kv_head * heads + r % heads;
        float* to = a.out + (a.query_start_loc[range.seq] + r / heads) * a.out_stride + head * vd;
        Partial total = before_keys<BASE2>(a, head);
        if (a.sinks) memset(to, 0, 4 * vd);
        for (int64_t i = 0; i < count; i++) join<BASE2>(&total, to, part[i * rows + r], mixed + (i * rows + r) * vd, vd);
        const F factor = set1((a.v_scale ? a.v_scale[range.kv_head] : 1.0f) / total.sum);
        for (int64_t i = 0; i < vd; i += 16) store(to + i, load(to + i) * factor);
    }
}

static void join_ranges(const AttentionArgs& a, const KeyRange& range, const Partial* part, const float* mixed, int64_t count) {
    if (arithmetic(a.cache) != FLOATS) join_by<true>(a, range, part, mixed, count);
    else join_by<false>(a, range, part, mixed, count);
}

}  // namespace ISA
