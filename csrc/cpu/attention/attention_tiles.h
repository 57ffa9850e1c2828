// Attention of many tokens by tile registers, in bfloat16: 16 rows by 64 keys or by 64 columns of the values at a time. The processor
// adds in another order than its vectors: few tokens, which go through `decode`, get other bits.
#pragma once
#include "attention_prefill.h"
#include "tiles.h"

namespace ISA {

struct ByTiles {
    static constexpr Arithmetic KIND = PAIRS;
    static constexpr int64_t ROWS = TILE;

    // scores [16][64] = q [16][dims pairs] · keys [dims pairs][64 keys]. Rows beyond `rows` are any numbers, here and below.
    static inline void score(const float* q, int64_t dims, const float* keys, const float*, float* scores, int64_t, int64_t) {
        clear<4>();
        add<4>(q, dims, dims, keys, KT);
        write<4>(scores, KT);
    }

    static inline void soften_and_mix(const AttentionArgs& a, const Block& b, float* scores, float* weights, Running* running,
                                      float* scales, const float* values, float* mixed, int64_t columns, int64_t) {
        soften_rows<PAIRS, ROWS>(a, b, scores, (uint16_t*)weights, 2 * KT, running, scales, nullptr);
        mix(weights, values, scales, mixed, columns, b.rows);
    }

private:
    // mixed [16][columns] = mixed · scales + weights [16][32 pairs of keys] · values [32][columns pairs]
    static inline void mix(const float* weights, const float* values, const float* scales, float* mixed, int64_t columns, int64_t rows) {
        for (int64_t r = 0; r < rows; r++)
            if (scales[r] == 0.0f) memset(mixed + r * columns, 0, 4 * columns);  // which may have been anything
            else if (scales[r] != 1.0f)
                for (int64_t i = 0; i < columns; i += 16) store(mixed + r * columns + i, load(mixed + r * columns + i) * set1(scales[r]));
        for (int64_t c = 0; c < columns; c += 64) {
            const int64_t tiles = (columns - c) / 16;
            if (tiles >= 4) mix_some<4>(weights, values + c, mixed + c, columns);
            else if (tiles == 3) mix_some<3>(weights, values + c, mixed + c, columns);
            else if (tiles == 2) mix_some<2>(weights, values + c, mixed + c, columns);
            else mix_some<1>(weights, values + c, mixed + c, columns);
        }
    }

    template <int N>
    static inline void mix_some(const float* weights, const float* values, float* mixed, int64_t columns) {
        Tiles::read<0>((const uint8_t*)mixed, 4 * columns);
        if (N > 1) Tiles::read<1>((const uint8_t*)(mixed + 16), 4 * columns);
        if (N > 2) Tiles::read<2>((const uint8_t*)(mixed + 32), 4 * columns);
        if (N > 3) Tiles::read<3>((const uint8_t*)(mixed + 48), 4 * columns);
        add<N>(weights, KT, KT / 2, values, columns);
        write<N>(mixed, columns);
    }
    // Registers 0 … N − 1 += x [16][pairs] · m [pairs][N · 16]
    template <int N>
    static inline void add(const float* x, int64_t x_stride, int64_t pairs, const float* m, int64_t m_stride) {
        for (int64_t i = 0; i < pairs; i += 16) {
            const uint8_t* from = (const uint8_t*)(m + i * m_stride);
            Tiles::read<4>((const uint8_t*)(x + i), 4 * x_stride);
            Tiles::read<6>(from, 4 * m_stride);
            Tiles::add_bf16<0, 4, 6>();
            if (N > 1) Tiles::read<7>(from + 64, 4 * m_stride), Tiles::add_bf16<1, 4, 7>();
            if (N > 2) Tiles::read<6>(from + 128, 4 * m_stride), Tiles::add_bf16<2, 4, 6>();
            if (N > 3) Tiles::read<7>(from + 192, 4 * m_stride), Tiles::add_bf16<3, 4, 7>();
        }
    }
    template <int N>
    static inline void clear() {
        Tiles::clear<0>();
        if (N > 1) Tiles::clear<1>();
        if (N > 2) Tiles::clear<2>();
        if (N > 3) Tiles::clear<3>();
    }
    template <int N>
    static inline void write(float* to, int64_t stride) {
        Tiles::write<0>(to, 4 * stride);
        if (N > 1) Tiles::write<1>(to + 16, 4 * stride);
        if (N > 2) Tiles::write<2>(to + 32, 4 * stride);
        if (N > 3) Tiles::write<3>(to + 48, 4 * stride);
    }
};

static bool attends_by_tiles(const AttentionArgs& a) {
    return a.cache != CACHE_F32 && (a.head_dim <= 512 || latent(a)) && round_up(a.head_dim, 16) % 32 == 0;
}

static void prefill(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch) {
    if (!attends_by_tiles(a)) return BASE()->prefill(a, seq, kv_head, token0, token1, scratch);
    const Tiles registers(TILE, 64);
    prefill_by<ByTiles>(a, seq, kv_head, token0, token1, scratch);
}

// More than the base set's. It may not depend on the cache, which the step brings later.
static int64_t prefill_scratch(const AttentionArgs& a, int64_t tokens) { return scratch_by(a, tokens, TILE); }

}  // namespace ISA
