// Attention of many tokens over the keys that they see (attention_keys.h).
#pragma once
#include <utility>

#include "attention_keys.h"

namespace ISA {

// Sixteen words of a key or value of d numbers, from word `word` on. A word is one float32, two bfloat16 or two 16-bit numbers.
// Words beyond d are 0.
template <Arithmetic KIND>
static inline void words_of(const AttentionArgs& a, int64_t d, const uint8_t* row, int64_t word, uint32_t* to) {
    constexpr int64_t count = KIND == FLOATS ? 16 : 32;
    const int64_t first = word * count / 16;
    if (KIND == WORDS) {  // of an 8-bit cache
        if (first + count <= d) return store_b((uint8_t*)to, load_words((const int8_t*)row + first));
        for (int64_t i = 0; i < count; i++) ((int16_t*)to)[i] = first + i < d ? ((const int8_t*)row)[first + i] : 0;
        return;
    }
    if (first + count <= d && a.cache == (KIND == PAIRS ? CACHE_BF16 : CACHE_F32)) {
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
    if (KIND == PAIRS)
        for (int64_t i = 0; i < count; i += 16) store_bf16((uint16_t*)to + i, load(x + i));
    else
        memcpy(to, x, 64);
}

// A tile's keys transposed, [D][64], and its values, [64][V]. Of 16 bits two dimensions of a key, or a dimension of two values, lie
// side by side.
template <Arithmetic KIND>
static inline void pack_keys(const AttentionArgs& a, const int64_t* at, int64_t n, float* keys) {
    uint32_t* k = (uint32_t*)keys;
    alignas(64) uint32_t block[16 * 16];
    const int64_t dp = round_up(a.head_dim, 16), words = KIND == FLOATS ? dp : dp / 2;
    for (int64_t word = 0; word < words; word += 16)
        for (int64_t j0 = 0; j0 < KT; j0 += 16) {
            for (int64_t j = j0; j < j0 + 16; j++) {
                if (j < n) words_of<KIND>(a, a.head_dim, a.k + at[j], word, block + (j - j0) * 16);
                else memset(block + (j - j0) * 16, 0, 64);
            }
            transpose16(block, k + word * KT + j0, KT, words - word < 16 ? words - word : 16);
        }
}

template <Arithmetic KIND>
static inline void pack_values(const AttentionArgs& a, const int64_t* at, int64_t n, float* values) {
    constexpr int64_t ROWS_A_WORD = KIND == FLOATS ? 1 : 2;
    uint32_t* v = (uint32_t*)values;
    alignas(64) uint32_t block[2 * 16];
    const int64_t vp = round_up(a.value_dim, 16), words = KIND == FLOATS ? vp : vp / 2;
    for (int64_t word = 0; word < words; word += 16) {
        const int64_t count = words - word < 16 ? words - word : 16;
        for (int64_t j = 0; j < KT; j += ROWS_A_WORD) {
            for (int64_t r = 0; r < ROWS_A_WORD; r++) {
                if (j + r < n) words_of<KIND>(a, a.value_dim, a.v + at[j + r], word, block + r * 16);
                else memset(block + r * 16, 0, 64);
            }
            if (KIND != FLOATS) {
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

// How: how a block of How::ROWS rows (query tokens × heads of the kv head) is multiplied by keys and by values.
template <class How>
static void prefill_by(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    constexpr Arithmetic KIND = How::KIND;
    constexpr int64_t ROWS = How::ROWS;
    const int64_t heads = a.num_heads / a.num_kv_heads, d = a.head_dim, dp = round_up(d, 16);
    const int64_t vd = a.value_dim, vp = round_up(vd, 16), rows = (token1 - token0) * heads;
    const int64_t first = a.seq_lens[seq] - a.query_start_loc[seq + 1];  // position of token t: first + t
    const float scale = a.scale * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
    const int64_t qs = KIND == FLOATS ? dp : dp / 2;  // floats a row
    const int64_t room = rows + ROWS;  // a block of rows may end beyond the last
    float *q = scratch, *mixed = q + room * dp, *sums = mixed + room * vp, *factors = sums + room * vp, *keys = factors + round_up(room, 16);
    float *values = keys + KT * dp, *scores = values + KT * vp, *weights = scores + 2 * ROWS * KT;
    Running* running = (Running*)((char*)scratch + round_up((char*)(weights + ROWS * KT) - (char*)scratch, 64));
    Partial* totals = (Partial*)(running + rows);
    int64_t at[KT];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = kv_head * heads + r % heads;
        const float* from = a.qkv + (token0 + r / heads) * a.qkv_stride + head * d;
        float *own = q + r * qs, *in_floats = KIND == WORDS ? keys : own;
        for (int64_t i = 0; i < dp; i += 16) {
            const F v = load_n(from + i, (int)(d - i < 16 ? d - i : 16)) * set1(scale);
            if (KIND == PAIRS) store_bf16((uint16_t*)own + i, v);
            else store(in_floats + i, v);
        }
        if (KIND == WORDS) factors[r] = round_words(in_floats, (uint16_t*)own, dp, largest_word(d));
        if (a.sinks) memset(sums + r * vp, 0, 4 * vp);
        running[r] = {-INFINITY, zero()};
        totals[r] = before_keys<KIND != FLOATS>(a, head);
    }
    const int64_t length = a.seq_lens[seq], ahead = a.window ? first + token1 - 1 + a.window : length;
    const int64_t last = a.causal ? first + token1 : ahead < length ? ahead : length;  // one beyond the last key
    int64_t low = a.window ? first + token0 - a.window + 1 : 0;
    low = low < 0 ? 0 : low / KT * KT;
    int64_t range0 = 0;  // the first row that sees keys of this range
    for (int64_t key = low; key < last; key += KT) {
        const int64_t n = last - key < KT ? last - key : KT;
        find_keys(a, seq, kv_head, key, n, at);
        pack_keys<KIND>(a, at, n, keys);
        pack_values<KIND>(a, at, n, values);
        float* added = a.sinks || key >= KEY_RANGE ? mixed : sums;  // the first range has nothing to be joined to
        int64_t r0 = a.causal ? (key - (first + token0)) * heads : 0;  // the first row that sees one of these keys
        float *coming = scores, *known = scores + ROWS * KT;
        auto rows_of = [&](int64_t r) { return rows - r < ROWS ? rows - r : ROWS; };
        auto seen_by = [&](int64_t r) {  // how many of these keys a block's last row may see
            const int64_t seen = a.causal ? first + token0 + (r + rows_of(r) - 1) / heads + 1 - key : n;
            return seen < n ? seen : n;
        };
        auto score = [&](int64_t r) { How::score(q + r * qs, qs, keys, factors + r, coming, rows_of(r), seen_by(r)); };
        r0 = r0 < 0 ? 0 : r0;
        if (key % KEY_RANGE == 0 || key == low) range0 = r0;
        if (r0 < rows) score(r0);
        for (; r0 < rows; r0 += ROWS) {
            const int64_t count = rows_of(r0);
            alignas(64) float scales[ROWS];
            std::swap(coming, known);
            if (r0 + ROWS < rows) score(r0 + ROWS);  // before this block's, which tile registers compute meanwhile
            const Block block{key, n, first + token0 + r0 / heads, kv_head * heads, heads, r0 % heads, count};
            How::soften_and_mix(a, block, known, weights, running + r0, scales, values, added + r0 * vp, vp, seen_by(r0));
        }
        if ((key + KT) % KEY_RANGE != 0 && key + KT < last) continue;
        for (int64_t r = range0; r < rows; r++) {
            const Partial own{running[r].top, sum(running[r].sum)};
            if (added == sums) totals[r] = own;
            else join<KIND != FLOATS>(totals + r, sums + r * vp, own, mixed + r * vp, vp);
            running[r] = {-INFINITY, zero()};
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float* to = a.out + (token0 + r / heads) * a.out_stride + (kv_head * heads + r % heads) * vd;
        const F factor = set1((a.v_scale ? a.v_scale[kv_head] : 1.0f) / totals[r].sum);
        for (int64_t i = 0; i < vp; i += 16) store_n(to + i, load(sums + r * vp + i) * factor, (int)(vd - i < 16 ? vd - i : 16));
    }
}

static int64_t scratch_by(const AttentionArgs& a, int64_t tokens, int64_t block_rows) {  // floats
    const int64_t rows = tokens * (a.num_heads / a.num_kv_heads), dp = round_up(a.head_dim, 16), vp = round_up(a.value_dim, 16);
    const int64_t room = rows + block_rows;
    return (room + KT) * (dp + vp) + room * vp + round_up(room, 16) + 3 * block_rows * KT +
           rows * (int64_t)(sizeof(Running) + sizeof(Partial)) / 4 + 64;
}

}  // namespace ISA
