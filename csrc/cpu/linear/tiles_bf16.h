// Products of bfloat16 by tile registers. All sums stay in them: with 2 × 2 tiles each read of a register serves two products.
#pragma once
#include "tiles.h"

namespace ISA {

// Products of a chunk's tokens. `ahead`: the weight's next panels are asked for.
class Bf16 {
public:
    static constexpr int AT_ONCE = 2;  // tiles of tokens
    Bf16(const LinearArgs& a, const Cut& cut, bool ahead) : a_(a), cut_(cut), ahead_(ahead) {}

    // A pair of panels, or its only one, by one or two tiles.
    void multiply(int64_t panel, int panels, const Tile* tiles, int count, int64_t y_stride) const {
        if (count == 2) {
            if (panels == 2) multiply<2, 2>(panel, tiles, y_stride);
            else multiply<2, 1>(panel, tiles, y_stride);
        } else {
            if (panels == 2) multiply<1, 2>(panel, tiles, y_stride);
            else multiply<1, 1>(panel, tiles, y_stride);
        }
    }

private:
    // NT tiles of tokens × NP panels.
    template <int NT, int NP>
    __attribute__((noinline)) void multiply(int64_t panel, const Tile* tiles, int64_t y_stride) const {
        const Layout at(KIND_BF16, a_.rows, a_.inner);
        const uint8_t *x[2], *codes[2];
        for (int i = 0; i < NT; i++) x[i] = a_.x + tiles[i].token * a_.x_stride;
        for (int p = 0; p < NP; p++) codes[p] = a_.packed + (panel + p) * at.code_bytes;
        for (int i = 0; i < NT; i++)  // results lie in a row each, which the hardware can't foresee
            for (int t = 0; t < cut_.rows; t++)
                for (int p = 0; p < NP; p++) __builtin_prefetch(tiles[i].y + t * y_stride + p * PANEL, 1);
        Tiles::clear<0>();
        if (NP > 1) Tiles::clear<1>();
        if (NT > 1) Tiles::clear<2>();
        if (NT > 1 && NP > 1) Tiles::clear<3>();
        constexpr int64_t bytes = GROUP * PANEL * 2;
        // The pair of panels that follows is brought near, with few tokens by the only pass over this pair, else each pass brings a part.
        const int64_t pass = (tiles[0].token + tiles[0].skip - cut_.begin) / (AT_ONCE * cut_.rows);
        const int64_t passes = (cut_.tiles + AT_ONCE - 1) / AT_ONCE, parts = passes < 16 ? passes : 16;
        for (int64_t g = 0; g < at.groups; g++) {
            if (ahead_ && pass < parts)
                for (int p = 0; p < NP; p++)
                    for (int64_t i = 64 * pass; i < bytes; i += 64 * parts) ask_for(codes[p] + NP * at.code_bytes + g * bytes + i);
            Tiles::read<4>(x[0] + g * GROUP * 2, a_.x_stride);
            Tiles::read<6>(codes[0] + g * bytes, 64);
            Tiles::add_bf16<0, 4, 6>();
            if (NP > 1) Tiles::read<7>(codes[1] + g * bytes, 64);
            if (NP > 1) Tiles::add_bf16<1, 4, 7>();
            if (NT > 1) Tiles::read<5>(x[1] + g * GROUP * 2, a_.x_stride);
            if (NT > 1) Tiles::add_bf16<2, 5, 6>();
            if (NT > 1 && NP > 1) Tiles::add_bf16<3, 5, 7>();
        }
        alignas(64) float sums[NT][NP][TILE * PANEL];
        Tiles::write<0>(sums[0][0], 64);
        if (NP > 1) Tiles::write<1>(sums[0][NP - 1], 64);
        if (NT > 1) Tiles::write<2>(sums[NT - 1][0], 64);
        if (NT > 1 && NP > 1) Tiles::write<3>(sums[NT - 1][NP - 1], 64);
        for (int i = 0; i < NT; i++)
            for (int p = 0; p < NP; p++) {
                Tile tile = tiles[i];
                tile.y += p * PANEL;
                put_sums(a_, panel + p, sums[i][p], tile, cut_.rows, y_stride);
            }
    }

    const LinearArgs& a_;
    const Cut& cut_;
    const bool ahead_;
};

}  // namespace ISA
