// Products by AMX's tile registers: 16 tokens × 16 rows of a weight by one instruction.
//
// 1. bfloat16 (tiles_bf16.h). The sums stay in the tile registers. The processor adds in another order than its instruction for
//    single vectors, so any number of tokens goes through tiles: a token's result must not depend on how many others there are.
// 2. Whole numbers (tiles_whole.h). Sums are exact, and are scaled and added as in linear.h: results are the same bit by bit, so
//    few tokens go the base set's way, and so do those that are left over.
// 3. float32 has no tiles.
#pragma once
#include "tiles_bf16.h"
#include "tiles_whole.h"

namespace ISA {

// How: the products of a chunk's tokens, up to How::AT_ONCE tiles of them at a time.
template <class How>
static void linear_by(const LinearArgs& a, int64_t pair0, int64_t pair1, const Cut& cut, float* scratch) {
    const Tiles registers(cut.rows, How::BYTES);
    How how(a, cut, scratch);
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t panel = 2 * pair;
        how.begin(&panel, 1, panels - panel < 2 ? 1 : 2);
        for (int64_t i = 0; i < cut.tiles; i += How::AT_ONCE) {
            Tile tiles[How::AT_ONCE];
            const int n = cut.some(i, How::AT_ONCE, tiles);
            for (int j = 0; j < n; j++) tiles[j].y = a.y + tiles[j].token * a.y_stride + panel * PANEL;
            how.multiply(0, tiles, n, a.y_stride);
        }
    }
}

template <class How>
static void gated_by(const GatedArgs& g, int64_t pair0, int64_t pair1, const Cut& cut, float* scratch) {
    const LinearArgs& a = g.linear;
    const Tiles registers(cut.rows, How::BYTES);
    How how(a, cut, scratch);
    alignas(64) float both[2][How::AT_ONCE * TILE * GROUP];  // gate and up
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t first[2] = {2 * pair, a.rows / 2 / PANEL + 2 * pair};
        how.begin(first, 2, 2);
        for (int64_t i = 0; i < cut.tiles; i += How::AT_ONCE) {
            Tile tiles[How::AT_ONCE];
            const int n = cut.some(i, How::AT_ONCE, tiles);
            for (int half = 0; half < 2; half++) {
                for (int j = 0; j < n; j++) tiles[j].y = both[half] + j * TILE * GROUP;
                how.multiply(half, tiles, n, GROUP);
            }
            for (int j = 0; j < n; j++) {
                const int skip = tiles[j].skip, at = (j * TILE + skip) * GROUP;
                if (g.activation.kind == ACT_SILU) put_gated<true>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
                else put_gated<false>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
            }
        }
    }
}

template <int KIND>
static void linear_whole(const LinearArgs& a, int64_t pair0, int64_t pair1, const Cut& cut, float* scratch) {
    linear_by<Whole<KIND>>(a, pair0, pair1, cut, scratch);
}
template <int KIND>
static void gated_whole(const GatedArgs& g, int64_t pair0, int64_t pair1, const Cut& cut, float* scratch) {
    gated_by<Whole<KIND>>(g, pair0, pair1, cut, scratch);
}

// Tokens token0 … token1 − 1 as tiles. Those from cut.end on go the base set's way.
static Cut cut_of(const LinearArgs& a, int64_t token0, int64_t token1) {
    if (form_of(a.kind) == FORM_Q) return Cut::sixteens(token0, token1);
    const bool tiles = a.kind == KIND_BF16 && a.inner % GROUP == 0;  // heads' inputs may lie side by side, and end within a tile
    return Cut::evenly(token0, tiles ? token1 : token0);
}

static void linear(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const Cut cut = cut_of(a, token0, token1);
    if (cut.end < token1) BASE()->linear(a, pair0, pair1, cut.end, token1, scratch);
    if (cut.tiles == 0) return;
    if (a.kind == KIND_BF16) return linear_by<Bf16>(a, pair0, pair1, cut, scratch);
    BY_WHOLE_KIND(linear_whole, a.kind, a, pair0, pair1, cut, scratch)
}

static void gated(const GatedArgs& g, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const Cut cut = cut_of(g.linear, token0, token1);
    if (cut.end < token1) BASE()->gated(g, pair0, pair1, cut.end, token1, scratch);
    if (cut.tiles == 0) return;
    if (g.linear.kind == KIND_BF16) return gated_by<Bf16>(g, pair0, pair1, cut, scratch);
    BY_WHOLE_KIND(gated_whole, g.linear.kind, g, pair0, pair1, cut, scratch)
}

}  // namespace ISA
