// Attention of many tokens by vectors.
#pragma once
#include <type_traits>

#include "attention_prefill.h"

namespace ISA {

// Unrolled, so that a tile's accumulators are registers.
#define ROWS_OF_TILE _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
#define VECTORS _Pragma("GCC unroll 4") for (int v = 0; v < NV; v++)

template <Arithmetic KIND>
using SumOf = std::conditional_t<KIND == WORDS, I, F>;

// acc[r][v] += Σ_i x[r][i] · m[i][16 v …], i from `begin` by `by`. Of 16 bits i counts pairs.
template <Arithmetic KIND, int R, int NV>
__attribute__((always_inline)) static inline void add_products(SumOf<KIND> (&acc)[R][NV], const float* x, int64_t x_stride, const float* m,
                                                               int64_t m_stride, int64_t begin, int64_t end, int64_t by) {
    for (int64_t i = begin; i < end; i += by) {
        if constexpr (KIND == FLOATS) {
            F w[NV];
            VECTORS w[v] = load(m + i * m_stride + 16 * v);
            ROWS_OF_TILE {
                const F s = set1(x[r * x_stride + i]);
                VECTORS acc[r][v] = fma(s, w[v], acc[r][v]);
            }
        } else {
            B w[NV];
            VECTORS w[v] = load_b((const uint8_t*)(m + i * m_stride + 16 * v));
            ROWS_OF_TILE {
                uint32_t pair;
                memcpy(&pair, x + r * x_stride + i, 4);
                VECTORS {
                    if constexpr (KIND == PAIRS) acc[r][v] = dot_bf16(acc[r][v], w[v], pair);
                    else acc[r][v] = dot_words(acc[r][v], w[v], repeat(pair));
                }
            }
        }
    }
}

// out[r][0 … NV · 16) = Σ_i x[r][i] · m[i][…] for R rows, in the order of `decode_scores`.
template <Arithmetic KIND, int R, int NV>
static inline void score_some(const float* x, int64_t x_stride, const float* m, int64_t m_stride, int64_t steps, const float* factors,
                              float* out, int64_t out_stride) {
    if constexpr (KIND == WORDS) {
        I acc[R][NV];
        ROWS_OF_TILE VECTORS acc[r][v] = izero();
        add_products<KIND, R, NV>(acc, x, x_stride, m, m_stride, 0, steps, 1);
        ROWS_OF_TILE VECTORS store(out + r * out_stride + 16 * v, to_float(acc[r][v]) * set1(factors[r]));
        return;
    } else {
        F twos[R][NV], fours[R][NV];  // sums of so many lanes that wait for as many more
        for (int pair = 0; pair < 4; pair++) {
            F acc[R][NV], other[R][NV];
            ROWS_OF_TILE VECTORS acc[r][v] = other[r][v] = zero();
            add_products<KIND, R, NV>(acc, x, x_stride, m, m_stride, kSumOrder[2 * pair], steps, 8);
            add_products<KIND, R, NV>(other, x, x_stride, m, m_stride, kSumOrder[2 * pair + 1], steps, 8);
            ROWS_OF_TILE VECTORS acc[r][v] = acc[r][v] + other[r][v];
            if (pair % 2) ROWS_OF_TILE VECTORS acc[r][v] = twos[r][v] + acc[r][v];
            if (pair == 1) ROWS_OF_TILE VECTORS fours[r][v] = acc[r][v];
            else if (pair == 3) ROWS_OF_TILE VECTORS store(out + r * out_stride + 16 * v, fours[r][v] + acc[r][v]);
            else ROWS_OF_TILE VECTORS twos[r][v] = acc[r][v];
        }
    }
}

// out[r][…] = out · scale + (Σ_i x[r][i] · m[i][…]) · factor, in the order of `decode_mix`. With scale 0 `out` may be anything.
template <Arithmetic KIND, int R, int NV>
static inline void mix_some(const float* x, int64_t x_stride, const float* m, int64_t m_stride, int64_t steps, const float* scales,
                            const float* factors, float* out, int64_t out_stride) {
    auto before = [&](int r, int v) { return scales[r] == 0.0f ? zero() : load(out + r * out_stride + 16 * v); };
    SumOf<KIND> acc[R][NV];
    if constexpr (KIND == WORDS) ROWS_OF_TILE VECTORS acc[r][v] = izero();
    else ROWS_OF_TILE VECTORS acc[r][v] = before(r, v) * set1(scales[r]);
    add_products<KIND, R, NV>(acc, x, x_stride, m, m_stride, 0, steps, 1);
    ROWS_OF_TILE VECTORS {
        float* to = out + r * out_stride + 16 * v;
        if constexpr (KIND == WORDS) store(to, fma(before(r, v), set1(scales[r]), to_float(acc[r][v]) * set1(factors[r])));
        else store(to, acc[r][v]);
    }
}
#undef ROWS_OF_TILE
#undef VECTORS

template <Arithmetic OF>
struct ByVectors {
    static constexpr Arithmetic KIND = OF;
    static constexpr int64_t ROWS = kFullTiles ? 6 : kMemoryOperands ? 3 : 2;  // with their sums in registers

    // scores [rows][64] = q [rows][dims] · keys · factors [rows], of the first `seen` keys at least. Of 16 bits dims count pairs.
    static inline void score(const float* q, int64_t dims, const float* keys, const float* factors, float* scores, int64_t rows, int64_t seen) {
        in_tiles<kFullTiles && KIND != WORDS ? 2 : MAX_VECTORS>(rows, round_up(seen, 16), [=](auto of, auto vectors, int64_t r, int64_t c) {
            score_some<KIND, of(), vectors()>(q + r * dims, dims, keys + c, KT, dims, factors + r, scores + r * KT + c, KT);
        });
    }
    // mixed [rows][columns] = mixed · scales + weights [rows][seen] · values, with the weights of `scores`.
    static inline void soften_and_mix(const AttentionArgs& a, const Block& b, float* scores, float* weights, Running* running,
                                      float* scales, const float* values, float* mixed, int64_t columns, int64_t seen) {
        float factors[ROWS];
        uint16_t* words = (uint16_t*)weights;
        if (KIND != FLOATS) soften_rows<KIND, ROWS>(a, b, scores, words, 2 * KT, running, scales, factors);
        else
            for (int64_t r = 0; r < b.rows; r++)
                scales[r] = soften(a, scores + r * KT, b.key, b.n, b.position_of(r), b.head_of(r), running + r);
        const float *x = KIND == FLOATS ? scores : weights, *known = scales, *by = factors;
        in_tiles<MAX_VECTORS>(b.rows, columns, [=](auto of, auto vectors, int64_t r, int64_t c) {
            mix_some<KIND, of(), vectors()>(x + r * KT, KT, values + c, columns, KIND == FLOATS ? seen : (seen + 1) / 2, known + r, by + r,
                                            mixed + r * columns + c, columns);
        });
    }

private:
    static constexpr int MAX_VECTORS = kFullTiles ? 4 : 2;

    // compute(number of rows, number of vectors, first row, first column) for tiles of all rows and columns.
    template <int NV, class Compute>
    static inline void in_tiles(int64_t rows, int64_t columns, Compute compute) {
        int64_t r = 0;
        if (rows == ROWS) return in_columns<ROWS, NV>(r, columns, compute);
        if (kFullTiles && rows >= 4) in_columns<4, NV>(r, columns, compute), r = 4;
        for (; r < rows; r++) in_columns<1, NV>(r, columns, compute);
    }
    template <int R, int NV, class Compute>
    static inline void in_columns(int64_t r, int64_t columns, Compute compute) {
        const std::integral_constant<int, R> rows;
        int64_t c = 0;
        for (; c + 16 * NV <= columns; c += 16 * NV) compute(rows, std::integral_constant<int, NV>(), r, c);
        for (; c < columns; c += 16) compute(rows, std::integral_constant<int, 1>(), r, c);
    }
};

static void prefill(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    const Arithmetic kind = arithmetic(a.cache);
    if (kind == FLOATS) prefill_by<ByVectors<FLOATS>>(a, seq, kv_head, token0, token1, scratch);
    else if (kind == WORDS) prefill_by<ByVectors<WORDS>>(a, seq, kv_head, token0, token1, scratch);
    else if constexpr (kHasBf16) prefill_by<ByVectors<PAIRS>>(a, seq, kv_head, token0, token1, scratch);
}

static int64_t prefill_scratch(const AttentionArgs& a, int64_t tokens) { return scratch_by(a, tokens, ByVectors<FLOATS>::ROWS); }

}  // namespace ISA
