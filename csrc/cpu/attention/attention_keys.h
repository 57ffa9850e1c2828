// Attention over the KV cache, which is read in place. Keys are read in tiles of 64 with a running softmax (Milakov, Gimelshein:
// Online normalizer calculation for softmax, 2018). The scale of an 8-bit cache's keys multiplies the scores, and that of its
// values the result. In latent attention a value is a part of its key's row.
//
// attention_decode.h computes a few tokens of a sequence over a range of its keys, for the query heads of one kv head;
// attention_prefill.h a tile of tokens over all keys that they see. Here is what both need.
//
// Both add in the same order, so that a row (a token's query head) gets the same bits however many are computed together:
// 1. A score is 8 sums over every eighth dimension, or pair of them, and then their tree (kSumOrder). Sums of whole numbers are exact.
// 2. A tile of 64 keys has a maximum and weights. Its values are added key by key, or pair by pair, to those of the tiles before it.
// 3. Each KEY_RANGE keys have a softmax of their own. `join` adds the ranges, the first one first.
// Tiles and ranges begin at multiples of their sizes, whatever the row sees of them.
#pragma once
#include <string.h>

#include <algorithm>

#include "emit.h"
#include "kernels.h"

namespace ISA {

constexpr int64_t KT = KEY_TILE;

static inline int64_t element_bytes(int32_t cache) { return cache == CACHE_F32 ? 4 : cache == CACHE_BF16 ? 2 : 1; }

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
    if (a.chosen) {
        for (int64_t j = 0; j < n; j++) {
            const int64_t key = a.chosen[key0 + j];
            at[j] = ((table[key / size] * a.num_kv_heads + kv_head) * size + key % size) * bytes;
        }
        return;
    }
    for (int64_t j = 0; j < n; block++, offset = 0) {
        const int64_t first = (table[block] * a.num_kv_heads + kv_head) * size;
        for (; offset < size && j < n; offset++, j++) at[j] = (first + offset) * bytes;
    }
}

// How queries and keys, and weights and values, are multiplied. PAIRS: pairs of bfloat16, to which queries and weights are rounded.
// WORDS: pairs of 16-bit whole numbers; queries and weights are scaled and rounded to them.
enum Arithmetic { FLOATS, PAIRS, WORDS };

static constexpr Arithmetic arithmetic(int32_t cache) {
    return cache == CACHE_I8 ? WORDS : cache == CACHE_BF16 && kHasBf16 ? PAIRS : FLOATS;
}

// The largest word of a query: the sum of `dims` products with 8-bit numbers fits into 32 bits.
static inline float largest_word(int64_t dims) { return (float)std::min<int64_t>(32767, 2147483647 / (127 * dims)); }

// Rounds n numbers, a multiple of 16, to words up to ±most. Returns the factor of products with them.
static inline float round_words(const float* from, uint16_t* to, int64_t n, float most) {
    F all = vabs(load(from));
    for (int64_t i = 16; i < n; i += 16) all = vmax(all, vabs(load(from + i)));
    const float largest = top(all);
    if (!(largest > 1e-30f)) {  // else `most` times its inverse could be infinite
        memset(to, 0, 2 * n);
        return 0.0f;
    }
    const F scale = set1(most / largest);
    for (int64_t i = 0; i < n; i += 16) store_words((int16_t*)to + i, nearest(load(from + i) * scale));
    return largest / most;
}

struct Block {  // of rows by 64 keys, of which there are n
    int64_t key, n;
    int64_t position, head, heads, at;  // of the first row's token; the first of the kv head's heads, their number, and the first row's
    int64_t rows;

    int64_t position_of(int64_t r) const { return position + (at + r) / heads; }
    int64_t head_of(int64_t r) const { return head + (at + r) % heads; }
};

struct Running {  // the softmax's running maximum and sum; the sum stays in lanes until the end, `soften_rows` has units of ln 2
    float top;
    F sum;
};

// The keys of a tile that a query sees: `low` … `high` − 1 of its 64.
struct Seen {
    int64_t low, high;
    bool any() const { return low < high; }
    bool masked() const { return low > 0 || high < KT; }
    void put(float* scores, float others) const {  // where the query does not see
        for (int64_t j = 0; j < low; j++) scores[j] = others;
        for (int64_t j = high; j < KT; j++) scores[j] = others;
    }
};

// Applies cap, slope, bias and mask to the scores of keys key0 … key0 + 63 for a query at `position`.
static inline Seen bend(const AttentionArgs& a, float* scores, int64_t key0, int64_t n, int64_t position, int64_t head) {
    int64_t low = a.window ? position - a.window + 1 - key0 : 0, high = a.causal ? position + 1 - key0 : n;
    if (a.window && !a.causal) high = position + a.window - key0;
    const Seen seen{low < 0 ? 0 : low, high > n ? n : high};
    if (!seen.any()) return seen;
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
    if (seen.masked()) seen.put(scores, -INFINITY);
    return seen;
}

// `bend`, then the running softmax. Leaves in `scores` the weights relative to the new maximum. Returns the factor of the values
// that were added before.
static inline float soften(const AttentionArgs& a, float* scores, int64_t key0, int64_t n, int64_t position, int64_t head,
                           Running* p) {
    const Seen seen = bend(a, scores, key0, n, position, head);
    if (!seen.any()) {
        memset(scores, 0, KT * 4);
        return 1.0f;
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
    if (seen.masked()) {  // vexp of a masked score is e⁻⁸⁷, not 0
        seen.put(scores, 0.0f);
        for (int64_t j = 0; j < KT / 16; j++) x[j] = load(scores + 16 * j);
    }
    p->sum = p->sum + ((x[0] + x[1]) + (x[2] + x[3]));
    return scale;
}

// As `soften`, for all rows of a block at a time and without branches on their maxima. The weights, as `KIND` has them, go to
// `weights`, and what words are multiplied by to `word_factors`. `Running::top` is in units of ln 2 here.
template <Arithmetic KIND, int64_t ROWS>
static inline void soften_rows(const AttentionArgs& a, const Block& b, float* scores, uint16_t* weights, int64_t stride,
                               Running* running, float* scales, float* word_factors) {
    Seen seen[ROWS];
    alignas(64) float before[16] = {}, now[16] = {}, factors[16];  // maxima in units of ln 2
    for (int64_t r = 0; r < b.rows; r++) {
        float* s = scores + r * KT;
        seen[r] = bend(a, s, b.key, b.n, b.position_of(r), b.head_of(r));
        before[r] = now[r] = running[r].top;
        if (!seen[r].any()) continue;
        const float most = LOG2E * top(vmax(vmax(load(s), load(s + 16)), vmax(load(s + 32), load(s + 48))));
        now[r] = most > now[r] ? most : now[r];
    }
    store(factors, exp2_below(load(before) - load(now)));
    for (int64_t r = 0; r < b.rows; r++) {
        float* s = scores + r * KT;
        uint16_t* w = weights + r * stride;
        scales[r] = before[r] == now[r] ? 1.0f : before[r] == -INFINITY ? 0.0f : factors[r];
        running[r].top = now[r];
        if (!seen[r].any()) {
            memset(w, 0, KT * 2);
            if (KIND == WORDS) word_factors[r] = 0.0f;
            continue;
        }
        F x[KT / 16];
        for (int64_t j = 0; j < KT / 16; j++) x[j] = exp2_below(fma(load(s + 16 * j), set1(LOG2E), set1(-now[r])));
        if (KIND == WORDS || seen[r].masked())
            for (int64_t j = 0; j < KT / 16; j++) store(s + 16 * j, x[j]);
        if (seen[r].masked()) {  // their weights are about 2⁻¹²⁵, not 0
            seen[r].put(s, 0.0f);
            for (int64_t j = 0; j < KT / 16; j++) x[j] = load(s + 16 * j);
        }
        if (KIND == WORDS) word_factors[r] = round_words(s, w, KT, largest_word(1));
        else
            for (int64_t j = 0; j < KT / 16; j++) store_bf16(w + 16 * j, x[j]);
        running[r].sum = running[r].sum * set1(scales[r]) + ((x[0] + x[1]) + (x[2] + x[3]));
    }
}

// A row's softmax and values so far, and those of the next range of keys, whose maxima are in units of ln 2 if BASE2.
template <bool BASE2>
static inline void join(Partial* total, float* values, const Partial& next, const float* added, int64_t dims) {
    if (next.top == -INFINITY) return;
    if (total->top == -INFINITY) {
        *total = next;
        memcpy(values, added, 4 * dims);
        return;
    }
    auto ratio = [](float below, float above) {
        if (!(below < above)) return 1.0f;
        const F x = set1(below - above);
        float t[16];
        store(t, BASE2 ? exp2_below(x) : vexp(x));
        return t[0];
    };
    const float old = ratio(total->top, next.top), fresh = ratio(next.top, total->top);
    *total = {std::max(total->top, next.top), total->sum * old + next.sum * fresh};
    for (int64_t i = 0; i < dims; i += 16) store(values + i, fma(load(added + i), set1(fresh), load(values + i) * set1(old)));
}

// Before the first range: nothing, or a sink, which is a key without a value.
template <bool BASE2>
static inline Partial before_keys(const AttentionArgs& a, int64_t head) {
    if (!a.sinks) return {-INFINITY, 0.0f};
    return {a.sinks[head] * (BASE2 ? LOG2E : 1.0f), 1.0f};
}

}  // namespace ISA
