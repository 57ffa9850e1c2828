// Attention over the KV cache, which is read in place. Keys are read in tiles of 64 with a running softmax (Milakov, Gimelshein:
// Online normalizer calculation for softmax, 2018). The scale of an 8-bit cache's keys multiplies the scores, and that of its
// values the result. In latent attention a value is a part of its key's row.
//
// attention_decode.h computes one token of a sequence over a range of its keys, for the query heads of one kv head;
// attention_prefill.h a tile of tokens over all keys that they see. Here is what both need.
#pragma once
#include <string.h>

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

}  // namespace ISA
