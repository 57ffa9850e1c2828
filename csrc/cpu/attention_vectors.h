// Attention of many tokens by vectors.
#pragma once
#include "attention_prefill.h"

namespace ISA {

// Unrolled, so that a tile's accumulators are registers.
#define ROWS_OF_TILE _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
#define VECTORS _Pragma("GCC unroll 4") for (int v = 0; v < NV; v++)

// out[r][0 … NV · 16) (+)= Σ_i x[r][i] · m[i][…], for R rows. With PAIRS i counts pairs.
template <bool PAIRS, int R, int NV>
static inline void small_product(const float* x, int64_t x_stride, const float* m, int64_t m_stride, int64_t steps,
                                 const float* scales, float* out, int64_t out_stride) {
    F acc[R][NV];
    ROWS_OF_TILE VECTORS acc[r][v] = scales ? load(out + r * out_stride + 16 * v) * set1(scales[r]) : zero();
    for (int64_t i = 0; i < steps; i++) {
        if (PAIRS) {
            B w[NV];
            VECTORS w[v] = load_b((const uint8_t*)(m + i * m_stride + 16 * v));
            ROWS_OF_TILE {
                uint32_t pair;
                memcpy(&pair, x + r * x_stride + i, 4);
                VECTORS acc[r][v] = dot_bf16(acc[r][v], w[v], pair);
            }
        } else {
            F w[NV];
            VECTORS w[v] = load(m + i * m_stride + 16 * v);
            ROWS_OF_TILE {
                const F s = set1(x[r * x_stride + i]);
                VECTORS acc[r][v] = fma(s, w[v], acc[r][v]);
            }
        }
    }
    ROWS_OF_TILE VECTORS store(out + r * out_stride + 16 * v, acc[r][v]);
}
#undef ROWS_OF_TILE
#undef VECTORS

template <bool PAIRS, int R>
static inline void product_rows(const float* x, int64_t xs, const float* m, int64_t ms, int64_t steps, const float* scales,
                                float* out, int64_t os, int64_t columns) {
    constexpr int NV = kFullTiles ? 4 : 2;
    int64_t c = 0;
    for (; c + 16 * NV <= columns; c += 16 * NV)
        small_product<PAIRS, R, NV>(x, xs, m + c, ms, steps, scales, out + c, os);
    for (; c < columns; c += 16) small_product<PAIRS, R, 1>(x, xs, m + c, ms, steps, scales, out + c, os);
}

// With PAIRS numbers are bfloat16, and dims count pairs of them.
template <bool IN_PAIRS>
struct ByVectors {
    static constexpr bool PAIRS = IN_PAIRS;
    static constexpr int64_t ROWS = kFullTiles ? 6 : kMemoryOperands ? 3 : 2;  // with their sums in registers

    // scores [rows][64] = q [rows][dims] · keys, of the first `seen` keys at least
    static inline void score(const float* q, int64_t dims, const float* keys, float* scores, int64_t rows, int64_t seen) {
        product(q, dims, keys, KT, dims, nullptr, scores, KT, round_up(seen, 16), rows);
    }
    // Leaves the weights in `scores`, or with PAIRS, in bfloat16, in `weights`.
    static inline void soften(const AttentionArgs& a, const Block& b, float* scores, float* weights, Running* running, float* scales) {
        if (PAIRS) return soften_rows<ROWS>(a, b, scores, (uint16_t*)weights, running, scales);
        for (int64_t r = 0; r < b.rows; r++)
            scales[r] = ISA::soften(a, scores + r * KT, b.key, b.n, b.position_of(r), b.head_of(r), running + r);
    }
    // mixed [rows][columns] = mixed · scales + weights [rows][seen] · values
    static inline void mix(const float* weights, const float* values, const float* scales, float* mixed, int64_t columns, int64_t rows,
                           int64_t seen) {
        product(weights, KT, values, columns, PAIRS ? (seen + 1) / 2 : seen, scales, mixed, columns, columns, rows);
    }

private:
    static inline void product(const float* x, int64_t xs, const float* m, int64_t ms, int64_t steps, const float* scales, float* out,
                               int64_t os, int64_t columns, int64_t rows) {
        if (rows == ROWS) return product_rows<PAIRS, ROWS>(x, xs, m, ms, steps, scales, out, os, columns);
        int64_t r = 0;
        if (kFullTiles && rows >= 4) product_rows<PAIRS, 4>(x, xs, m, ms, steps, scales, out, os, columns), r = 4;
        for (; r < rows; r++)
            product_rows<PAIRS, 1>(x + r * xs, xs, m, ms, steps, scales ? scales + r : scales, out + r * os, os, columns);
    }
};

static void prefill(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    if (kHasBf16 && in_pairs(a)) prefill_by<ByVectors<true>>(a, seq, kv_head, token0, token1, scratch);
    else prefill_by<ByVectors<false>>(a, seq, kv_head, token0, token1, scratch);
}

static int64_t prefill_scratch(const AttentionArgs& a, int64_t tokens) { return scratch_by(a, tokens, ByVectors<false>::ROWS); }

}  // namespace ISA
