// Products of many tokens by AMX's tile registers: 16 tokens × 16 rows of a weight by one instruction.
//
// 1. Whole numbers. A pair of panels is written out once for all tokens of the chunk: 8 bits a number, its zero taken off, in the
//    order of a B tile, which is the panels' own. A group's sums are exact, and are scaled and added in float32 as in linear.h, so
//    results are the same bit by bit. Few tokens go there.
// 2. bfloat16. The sums stay in the tile registers. The processor adds in another order than its instruction for single vectors, so
//    any number of tokens goes through tiles: a token's result must not depend on how many others there are.
// 3. float32 has no tiles.
#pragma once
#include "linear_parts.h"

namespace ISA {

constexpr int64_t FEWEST_TOKENS = 4;  // of a chunk, for tiles of whole numbers
constexpr int TILE = 16;              // tokens, at most

// A chunk's tokens as tiles of one height. The last one begins before the one ahead of it ends, where they do not come out even.
struct Cut {
    int64_t tiles;
    int rows;
    Cut(int64_t tokens, int multiple) {
        tiles = (tokens + TILE - 1) / TILE;
        rows = (int)round_up((tokens + tiles - 1) / tiles, multiple);
        if (rows > tokens) tiles++, rows = (int)round_up((tokens + tiles - 1) / tiles, multiple);
    }
};

struct Tile {  // of tokens
    int64_t token;
    int skip;  // tokens at its beginning that are done already
    float* y;  // the first result of its first token
};

constexpr int64_t line_bytes(int64_t inner) { return (inner + GROUP - 1) / GROUP * GROUP * PANEL; }  // of a panel of 8 bits

// Writes a panel's numbers to `to`.
template <int KIND>
static void write_out(const LinearArgs& a, int64_t panel, uint8_t* to) {
    constexpr int64_t group_bytes = KIND == KIND_S8 ? 64 : 64 * code_bits(KIND);
    const Layout at(KIND, a.rows, a.inner);
    const uint8_t* codes = a.packed + (KIND == KIND_S8 ? sparse_panel(a.packed, panel) : panel * at.code_bytes);
    const uint8_t* kept = codes + at.code_bytes;
    const uint8_t *scales = a.packed + at.scales_at + panel * at.scale_bytes, *mins = a.packed + at.mins_at + panel * at.scale_bytes;
    for (int64_t g = 0; g < at.groups; g++, to += GROUP * PANEL, codes += group_bytes) {
        if (KIND != KIND_S8) ask_for_next<KIND, 2>(at, g, codes - g * group_bytes, scales, mins);
#define WRITE(T) store_b(to + 64 * T, less(codes_of<KIND, T>(codes, kept), code_from(KIND)));
        WRITE(0) WRITE(1) WRITE(2) WRITE(3) WRITE(4) WRITE(5) WRITE(6) WRITE(7)
#undef WRITE
    }
}

// A tile of MR tokens × a panel, whose numbers are written out. The sums of a step (a group, or a half where 16 inputs share a scale)
// go through memory from the tile registers to the vector ones. They are fetched two steps later, when they have arrived.
template <int KIND, int MR>
__attribute__((noinline)) static void tile_int(const LinearArgs& a, int64_t panel, const uint8_t* numbers, const Tile& tile, int64_t y_stride) {
#define TOKENS UNROLLED for (int t = 0; t < MR; t++)
    constexpr bool minima = has_mins(KIND) || KIND == KIND_Q4K || KIND == KIND_Q5K;
    constexpr int halves = by_halves(KIND) ? 2 : 1;
    constexpr int64_t inputs = GROUP / halves;  // of a step
    const Layout at(KIND, a.rows, a.inner);
    const int64_t steps = at.groups * halves, stride = a.x_stride, stride3 = 3 * stride;
    const uint8_t* scales = a.packed + at.scales_at + panel * at.scale_bytes;
    const uint8_t* mins = a.packed + at.mins_at + panel * at.scale_bytes;
    const uint8_t *x = a.x + tile.token * stride, *q[MR / 4];
    for (int t = 0; t < MR; t += 4) q[t / 4] = x + at.groups * GROUP + t * stride;
    alignas(64) int32_t sums[4][TILE * PANEL];
    F acc[MR];
    TOKENS acc[t] = zero();
    TOKENS __builtin_prefetch(tile.y + t * y_stride, 1);

#define MULTIPLY(R, i)                                                            \
    {                                                                             \
        Tiles::clear<R>();                                                        \
        Tiles::read<4 + R>(x + (i) * inputs, stride);                             \
        Tiles::read<6 + R>(numbers + (i) * inputs * PANEL, 64);                   \
        Tiles::add_int8<R, 4 + R, 6 + R>();                                       \
        Tiles::write<R>(sums[(i) % 4], 64);                                       \
    }
// Four tokens' addresses are one register and the stride: there are not enough for each to have its own.
#define META(t) ((const QGroup*)(q[(t) / 4] + ((t) % 4 == 3 ? stride3 : (t) % 4 * stride)) + g)
    auto join = [&](int64_t i) __attribute__((always_inline)) {
        const int64_t g = i / halves;
        const int half = (int)(i % halves);
        const int32_t* dot = sums[i % 4];
        if (scaled_by_row(KIND)) {
            TOKENS acc[t] = fma(to_float(load_int(dot + t * PANEL)), set1(META(t)->scale), acc[t]);
        } else {
            const F scale = scale_of<KIND>(scales, g, half);
            TOKENS acc[t] = fma(to_float(load_int(dot + t * PANEL)) * set1(META(t)->scale), scale, acc[t]);
        }
        if (KIND == KIND_Q2K) {
            const F low = minimum_of<KIND>(scales, mins, g, half);
            TOKENS acc[t] = fma(low, set1((float)META(t)->halves[half] * META(t)->scale), acc[t]);
        }
        if (minima) {
            const F low = minimum_of<KIND>(scales, mins, g, 0);
            TOKENS acc[t] = fma(low, set1(META(t)->sum), acc[t]);
        }
    };
    for (int64_t i = 0; i < steps; i += 2) {
        MULTIPLY(0, i)
        if (i + 1 < steps) MULTIPLY(1, i + 1)
        if (i > 0) join(i - 2), join(i - 1);
    }
    for (int64_t i = (steps - 1) / 2 * 2; i < steps; i++) join(i);
#undef MULTIPLY
#undef META
    const int64_t row = panel * PANEL;
    const int n = (int)(a.rows - row < PANEL ? a.rows - row : PANEL);
    const F bias = a.bias ? load_n(a.bias + row, n) : zero();
    const F scale = scaled_by_row(KIND) ? load((const float*)scales) : set1(1.0f);
    TOKENS {
        F v = (scaled_by_row(KIND) ? acc[t] * scale : acc[t]) + bias;
        float* to = tile.y + t * y_stride;
        if (t < tile.skip) continue;
        if (a.accumulate) v = v + load_n(to, n);
        store_n(to, v, n);
    }
#undef TOKENS
}

template <int KIND>
static inline void tile_of(const LinearArgs& a, int64_t panel, const uint8_t* numbers, const Tile& tile, int rows, int64_t y_stride) {
    switch (rows) {
        case 4: return tile_int<KIND, 4>(a, panel, numbers, tile, y_stride);
        case 8: return tile_int<KIND, 8>(a, panel, numbers, tile, y_stride);
        case 12: return tile_int<KIND, 12>(a, panel, numbers, tile, y_stride);
        default: return tile_int<KIND, 16>(a, panel, numbers, tile, y_stride);
    }
}

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

template <int KIND>
static constexpr int tiles_at_once() { return KIND == KIND_BF16 ? 2 : 1; }

// A pair of panels (or its only one) by one or two tiles of tokens.
template <int KIND>
static void pair_by(const LinearArgs& a, int64_t panel, int64_t panels, const uint8_t* numbers, bool ahead, const Tile* tiles, int count,
                    int rows, int64_t y_stride) {
    if (KIND == KIND_BF16) {
        if (count == 2) {
            if (panels == 2) tiles_bf16<2, 2>(a, panel, ahead, tiles, rows, y_stride);
            else tiles_bf16<2, 1>(a, panel, ahead, tiles, rows, y_stride);
        } else {
            if (panels == 2) tiles_bf16<1, 2>(a, panel, ahead, tiles, rows, y_stride);
            else tiles_bf16<1, 1>(a, panel, ahead, tiles, rows, y_stride);
        }
    } else {
        for (int64_t p = 0; p < panels; p++) {
            Tile tile = tiles[0];
            tile.y += p * PANEL;
            tile_of<KIND == KIND_BF16 ? KIND_I8 : KIND>(a, panel + p, numbers + p * line_bytes(a.inner), tile, rows, y_stride);
        }
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

template <int KIND>
static void linear_by(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (token0 >= token1) return;
    const Cut cut(token1 - token0, KIND == KIND_BF16 ? 1 : 4);
    const Tiles registers(cut.rows, KIND == KIND_BF16 ? 64 : by_halves(KIND) ? 16 : 32);
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    uint8_t* numbers = (uint8_t*)scratch;
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t panel = 2 * pair, count = panels - panel < 2 ? 1 : 2;
        for (int64_t p = 0; KIND != KIND_BF16 && p < count; p++)
            write_out<KIND == KIND_BF16 ? KIND_I8 : KIND>(a, panel + p, numbers + p * line_bytes(a.inner));
        for (int64_t i = 0; i < cut.tiles; i += tiles_at_once<KIND>()) {
            Tile tiles[2];
            const int n = cut.tiles - i < tiles_at_once<KIND>() ? 1 : tiles_at_once<KIND>();
            cut_out(cut, token0, token1, i, n, tiles);
            for (int j = 0; j < n; j++) tiles[j].y = a.y + tiles[j].token * a.y_stride + panel * PANEL;
            pair_by<KIND>(a, panel, count, numbers, i == 0, tiles, n, cut.rows, a.y_stride);
        }
    }
}

template <int KIND>
static void gated_by(const GatedArgs& g, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (token0 >= token1) return;
    const LinearArgs& a = g.linear;
    const Cut cut(token1 - token0, KIND == KIND_BF16 ? 1 : 4);
    const Tiles registers(cut.rows, KIND == KIND_BF16 ? 64 : by_halves(KIND) ? 16 : 32);
    alignas(64) float both[2][2 * TILE * GROUP];  // gate and up
    uint8_t* numbers = (uint8_t*)scratch;
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t first[2] = {2 * pair, a.rows / 2 / PANEL + 2 * pair};
        for (int p = 0; KIND != KIND_BF16 && p < 4; p++)
            write_out<KIND == KIND_BF16 ? KIND_I8 : KIND>(a, first[p / 2] + p % 2, numbers + p * line_bytes(a.inner));
        for (int64_t i = 0; i < cut.tiles; i += tiles_at_once<KIND>()) {
            Tile tiles[2];
            const int n = cut.tiles - i < tiles_at_once<KIND>() ? 1 : tiles_at_once<KIND>();
            cut_out(cut, token0, token1, i, n, tiles);
            for (int half = 0; half < 2; half++) {
                for (int j = 0; j < n; j++) tiles[j].y = both[half] + j * TILE * GROUP;
                pair_by<KIND>(a, first[half], 2, numbers + half * 2 * line_bytes(a.inner), i == 0, tiles, n, cut.rows, GROUP);
            }
            for (int j = 0; j < n; j++) {
                const int skip = tiles[j].skip, at = (j * TILE + skip) * GROUP;
                if (g.activation.kind == ACT_SILU) put_gated<true>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
                else put_gated<false>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
            }
        }
    }
}

static bool by_tiles(const LinearArgs& a, int64_t tokens) {
    if (a.kind == KIND_F32) return false;
    if (a.kind == KIND_BF16) return a.inner % GROUP == 0;  // heads' inputs may lie side by side, and end within a tile
    return tokens >= FEWEST_TOKENS;
}

static int64_t linear_scratch(const LinearArgs& a) {
    const int64_t written = a.kind == KIND_F32 || a.kind == KIND_BF16 ? 0 : 4 * line_bytes(a.inner) / 4;
    const int64_t few = BASE()->linear_scratch(a);
    return few > written ? few : written;
}

static void linear(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (!by_tiles(a, token1 - token0)) return BASE()->linear(a, pair0, pair1, token0, token1, scratch);
    BY_KIND_BUT_F32(linear_by, a.kind, a, pair0, pair1, token0, token1, scratch)
}

static void gated(const GatedArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (!by_tiles(a.linear, token1 - token0)) return BASE()->gated(a, pair0, pair1, token0, token1, scratch);
    BY_KIND_BUT_F32(gated_by, a.linear.kind, a, pair0, pair1, token0, token1, scratch)
}

}  // namespace ISA
