// Products of bfloat16 by AMX's tile registers: 16 tokens × 16 rows of a weight by one instruction.
//
// 1. The sums stay in the tile registers. The processor adds in another order than its instruction for single vectors, so any number
//    of tokens goes through tiles: a token's result must not depend on how many others there are.
// 2. Whole numbers go the base set's way. Each 32 of them have a scale, so sums leave the registers after half an instruction's depth:
//    0.4 to 0.9 of the speed up to 64 tokens, and none gained at 512 (kernels_cpu_isas.json).
#pragma once
#include "put_gated.h"

namespace ISA {

constexpr int TILE = 16;  // tokens, at most

// A chunk's tokens as tiles of one height. The last one begins before the one ahead of it ends, where they do not come out even.
struct Cut {
    int64_t tiles;
    int rows;
    explicit Cut(int64_t tokens) {
        tiles = (tokens + TILE - 1) / TILE;
        rows = (int)((tokens + tiles - 1) / tiles);
    }
};

struct Tile {  // of tokens
    int64_t token;
    int skip;  // tokens at its beginning that are done already
    float* y;  // the first result of its first token
};

static void put_sums(const LinearArgs& a, int64_t panel, const float* sums, const Tile& tile, int rows, int64_t y_stride) {
    const int64_t row = panel * PANEL;
    const int n = (int)(a.rows - row < PANEL ? a.rows - row : PANEL);
    const F bias = a.bias ? load_n(a.bias + row, n) : zero();
    for (int t = tile.skip; t < rows; t++) {
        F v = load(sums + t * PANEL) + bias;
        float* to = tile.y + t * y_stride;
        if (a.accumulate) v = v + load_n(to, n);
        store_n(to, v, n);
    }
}

// NT tiles of tokens × NP panels of bfloat16. All sums stay in registers: with 2 × 2 each read of a register serves two products.
template <int NT, int NP>
__attribute__((noinline)) static void tiles_bf16(const LinearArgs& a, int64_t panel, bool ahead, const Tile* tiles, int rows, int64_t y_stride) {
    const Layout at(KIND_BF16, a.rows, a.inner);
    const uint8_t *x[2], *codes[2];
    for (int i = 0; i < NT; i++) x[i] = a.x + tiles[i].token * a.x_stride;
    for (int p = 0; p < NP; p++) codes[p] = a.packed + (panel + p) * at.code_bytes;
    Tiles::clear<0>();
    if (NP > 1) Tiles::clear<1>();
    if (NT > 1) Tiles::clear<2>();
    if (NT > 1 && NP > 1) Tiles::clear<3>();
    for (int64_t g = 0; g < at.groups; g++) {
        constexpr int64_t bytes = GROUP * PANEL * 2;
        if (ahead)  // the pair of panels that follows: with few tokens a product is bound by reading them
            for (int p = 0; p < NP; p++)
                for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(codes[p] + NP * at.code_bytes + g * bytes + i);
        Tiles::read<4>(x[0] + g * GROUP * 2, a.x_stride);
        Tiles::read<6>(codes[0] + g * bytes, 64);
        Tiles::add_bf16<0, 4, 6>();
        if (NP > 1) Tiles::read<7>(codes[1] + g * bytes, 64);
        if (NP > 1) Tiles::add_bf16<1, 4, 7>();
        if (NT > 1) Tiles::read<5>(x[1] + g * GROUP * 2, a.x_stride);
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
            put_sums(a, panel + p, sums[i][p], tile, rows, y_stride);
        }
}

constexpr int TILES_AT_ONCE = 2;

// A pair of panels (or its only one) by one or two tiles of tokens.
static void pair_by(const LinearArgs& a, int64_t panel, int64_t panels, bool ahead, const Tile* tiles, int count, int rows, int64_t y_stride) {
    if (count == 2) {
        if (panels == 2) tiles_bf16<2, 2>(a, panel, ahead, tiles, rows, y_stride);
        else tiles_bf16<2, 1>(a, panel, ahead, tiles, rows, y_stride);
    } else {
        if (panels == 2) tiles_bf16<1, 2>(a, panel, ahead, tiles, rows, y_stride);
        else tiles_bf16<1, 1>(a, panel, ahead, tiles, rows, y_stride);
    }
}

// The tokens of tiles i … i + count − 1.
static inline void cut_out(const Cut& cut, int64_t token0, int64_t token1, int64_t i, int count, Tile* tiles) {
    for (int j = 0; j < count; j++) {
        const int64_t wanted = token0 + (i + j) * cut.rows;
        tiles[j].token = wanted < token1 - cut.rows ? wanted : token1 - cut.rows;
        tiles[j].skip = (int)(wanted - tiles[j].token);
    }
}

static bool by_tiles(const LinearArgs& a) {
    return a.kind == KIND_BF16 && a.inner % GROUP == 0;  // heads' inputs may lie side by side, and end within a tile
}

static void linear(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (!by_tiles(a)) return BASE()->linear(a, pair0, pair1, token0, token1, scratch);
    if (token0 >= token1) return;
    const Cut cut(token1 - token0);
    const Tiles registers(cut.rows, 64);
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t panel = 2 * pair, count = panels - panel < 2 ? 1 : 2;
        for (int64_t i = 0; i < cut.tiles; i += TILES_AT_ONCE) {
            Tile tiles[TILES_AT_ONCE];
            const int n = cut.tiles - i < TILES_AT_ONCE ? 1 : TILES_AT_ONCE;
            cut_out(cut, token0, token1, i, n, tiles);
            for (int j = 0; j < n; j++) tiles[j].y = a.y + tiles[j].token * a.y_stride + panel * PANEL;
            pair_by(a, panel, count, i == 0, tiles, n, cut.rows, a.y_stride);
        }
    }
}

static void gated(const GatedArgs& g, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const LinearArgs& a = g.linear;
    if (!by_tiles(a)) return BASE()->gated(g, pair0, pair1, token0, token1, scratch);
    if (token0 >= token1) return;
    const Cut cut(token1 - token0);
    const Tiles registers(cut.rows, 64);
    alignas(64) float both[2][2 * TILE * GROUP];  // gate and up
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t first[2] = {2 * pair, a.rows / 2 / PANEL + 2 * pair};
        for (int64_t i = 0; i < cut.tiles; i += TILES_AT_ONCE) {
            Tile tiles[TILES_AT_ONCE];
            const int n = cut.tiles - i < TILES_AT_ONCE ? 1 : TILES_AT_ONCE;
            cut_out(cut, token0, token1, i, n, tiles);
            for (int half = 0; half < 2; half++) {
                for (int j = 0; j < n; j++) tiles[j].y = both[half] + j * TILE * GROUP;
                pair_by(a, first[half], 2, i == 0, tiles, n, cut.rows, GROUP);
            }
            for (int j = 0; j < n; j++) {
                const int skip = tiles[j].skip, at = (j * TILE + skip) * GROUP;
                if (g.activation.kind == ACT_SILU) put_gated<true>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
                else put_gated<false>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
            }
        }
    }
}

}  // namespace ISA
