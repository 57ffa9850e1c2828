// Attention of many tokens over the keys that they see (attention_keys.h).
#pragma once
#include <utility>

#include "attention_keys.h"

namespace ISA {

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
    else if (first + count <= d && a.cache == CACHE_BF16)
        for (int64_t i = 0; i < count; i += 16) store(x + i, load_bf16((const uint16_t*)row + first + i));
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
                uint32_t* to = v + j / 2 * vp + 2 * word;
                if (count == 16) {
                    B both[2];
                    zip16(load_b((const uint8_t*)even), load_b((const uint8_t*)odd), both);
                    for (int i = 0; i < 2; i++) store_b((uint8_t*)(to + 16 * i), both[i]);
                } else {
                    for (int64_t i = 0; i < 2 * count; i++) to[i] = even[i] | (uint32_t)odd[i] << 16;
                }
            } else {
                memcpy(v + j * vp + word, block, 4 * count);
            }
        }
    }
}

struct Block {  // of rows by 64 keys, of which there are n
    int64_t key, n;
    int64_t position, head, heads, at;  // of the first row's token; the first of the kv head's heads, their number, and the first row's
    int64_t rows;

    int64_t position_of(int64_t r) const { return position + (at + r) / heads; }
    int64_t head_of(int64_t r) const { return head + (at + r) % heads; }
};

// As `soften` of attention_keys.h, for all rows of a block at a time and without branches on their maxima. The weights, in
// bfloat16, go to `weights` [rows][2 · 64], of which they fill the first half. A masked score's is about 2⁻¹²⁵, which changes no sum.
// `Running::top` is in units of ln 2 here.
template <int64_t ROWS>
static inline void soften_rows(const AttentionArgs& a, const Block& b, float* scores, uint16_t* weights, Running* running, float* scales) {
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
        const float* s = scores + r * KT;
        uint16_t* w = weights + r * 2 * KT;
        scales[r] = before[r] == now[r] ? 1.0f : before[r] == -INFINITY ? 0.0f : factors[r];
        running[r].top = now[r];
        if (!seen[r].any()) {
            memset(w, 0, KT * 2);
            continue;
        }
        F x[KT / 16];
        for (int64_t j = 0; j < KT / 16; j++) x[j] = exp2_below(fma(load(s + 16 * j), set1(LOG2E), set1(-now[r])));
        for (int64_t j = 0; j < KT / 16; j++) store_bf16(w + 16 * j, x[j]);
        running[r].sum = running[r].sum * set1(scales[r]) + ((x[0] + x[1]) + (x[2] + x[3]));
    }
}

// How: how a block of How::ROWS rows (query tokens × heads of the kv head) is multiplied by keys and by values.
template <class How>
static void prefill_by(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    constexpr bool PAIRS = How::PAIRS;
    constexpr int64_t ROWS = How::ROWS;
    const int64_t heads = a.num_heads / a.num_kv_heads, d = a.head_dim, dp = round_up(d, 16);
    const int64_t vd = a.value_dim, vp = round_up(vd, 16), rows = (token1 - token0) * heads;
    const int64_t first = a.seq_lens[seq] - a.query_start_loc[seq + 1];  // position of token t: first + t
    const float scale = a.scale * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
    const int64_t qs = PAIRS ? dp / 2 : dp;  // floats a row
    const int64_t room = rows + ROWS;  // a block of rows may end beyond the last
    float *q = scratch, *mixed = q + room * dp, *keys = mixed + room * vp, *values = keys + KT * dp;
    float *scores = values + KT * vp, *weights = scores + 2 * ROWS * KT;
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
            running[r] = {a.sinks[kv_head * heads + r % heads] * (PAIRS ? LOG2E : 1.0f), load(once)};
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
        float *coming = scores, *known = scores + ROWS * KT;
        auto rows_of = [&](int64_t r) { return rows - r < ROWS ? rows - r : ROWS; };
        auto seen_by = [&](int64_t r) {  // how many of these keys a block's last row may see
            const int64_t seen = a.causal ? first + token0 + (r + rows_of(r) - 1) / heads + 1 - key : n;
            return seen < n ? seen : n;
        };
        auto score = [&](int64_t r) { How::score(q + r * qs, qs, keys, coming, rows_of(r), seen_by(r)); };
        r0 = r0 < 0 ? 0 : r0;
        if (r0 < rows) score(r0);
        for (; r0 < rows; r0 += ROWS) {
            const int64_t count = rows_of(r0);
            alignas(64) float scales[ROWS];
            std::swap(coming, known);
            if (r0 + ROWS < rows) score(r0 + ROWS);  // before this block's, which tile registers compute meanwhile
            const Block block{key, n, first + token0 + r0 / heads, kv_head * heads, heads, r0 % heads, count};
            How::soften(a, block, known, weights, running + r0, scales);
            How::mix(PAIRS ? weights : known, values, scales, mixed + r0 * vp, vp, count, seen_by(r0));
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float* to = a.out + (token0 + r / heads) * a.out_stride + (kv_head * heads + r % heads) * vd;
        const F factor = set1((a.v_scale ? a.v_scale[kv_head] : 1.0f) / sum(running[r].sum));
        for (int64_t i = 0; i < vp; i += 16) store_n(to + i, load(mixed + r * vp + i) * factor, (int)(vd - i < 16 ? vd - i : 16));
    }
}

// Whether bfloat16 is multiplied, and not float32, where there is an instruction for it.
static bool in_pairs(const AttentionArgs& a) { return a.cache != CACHE_F32 && (a.head_dim <= 512 || latent(a)); }

static int64_t scratch_by(const AttentionArgs& a, int64_t tokens, int64_t block_rows) {  // floats
    const int64_t rows = tokens * (a.num_heads / a.num_kv_heads), dims = round_up(a.head_dim, 16) + round_up(a.value_dim, 16);
    return (rows + block_rows) * dims + KT * dims + 3 * block_rows * KT + rows * (int64_t)sizeof(Running) / 4 + 64;
}

}  // namespace ISA
