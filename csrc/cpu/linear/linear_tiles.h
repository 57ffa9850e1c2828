// Products by AMX's tile registers: 16 tokens × 16 rows of a weight by one instruction.
//
// 1. bfloat16 (tiles_bf16.h). The sums stay in the tile registers. The processor adds in another order than its instruction for
//    single vectors, so any number of tokens goes through tiles: a token's result must not depend on how many others there are.
// 2. Whole numbers as bfloat16 (tiles_widened.h), for tokens that the program says. Other tokens use the base set's kernels.
// 3. float32 has no tiles.
#pragma once
#include "tiles_bf16.h"
#include "tiles_widened.h"

namespace ISA {

static void linear_by(const LinearArgs& a, int64_t pair0, int64_t pair1, const Cut& cut, bool ahead) {
    const Bf16 products(a, cut, ahead);
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t panel = 2 * pair;
        for (int64_t i = 0; i < cut.tiles; i += Bf16::AT_ONCE) {
            Tile tiles[Bf16::AT_ONCE];
            const int n = cut.some(i, Bf16::AT_ONCE, tiles);
            for (int j = 0; j < n; j++) tiles[j].y = a.y + tiles[j].token * a.y_stride + panel * PANEL;
            products.multiply(panel, panels - panel < 2 ? 1 : 2, tiles, n, a.y_stride);
        }
    }
}

// The 32 hidden numbers of `pair`, whose gates and ups are pairs of panels of two weights, or of the same one.
static void gated_by(const GatedArgs& g, const LinearArgs* gate_up, const int64_t* panel, int64_t pair, const Cut& cut, bool ahead) {
    alignas(64) float both[2][Bf16::AT_ONCE * TILE * GROUP];
    for (int64_t i = 0; i < cut.tiles; i += Bf16::AT_ONCE) {
        Tile tiles[Bf16::AT_ONCE];
        const int n = cut.some(i, Bf16::AT_ONCE, tiles);
        for (int half = 0; half < 2; half++) {
            for (int j = 0; j < n; j++) tiles[j].y = both[half] + j * TILE * GROUP;
            Bf16(gate_up[half], cut, ahead).multiply(panel[half], 2, tiles, n, GROUP);
        }
        for (int j = 0; j < n; j++) {
            const int skip = tiles[j].skip, at = (j * TILE + skip) * GROUP;
            if (g.activation.kind == ACT_SILU) put_gated<true>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
            else put_gated<false>(g, pair, tiles[j].token + skip, cut.rows - skip, both[0] + at, both[1] + at);
        }
    }
}

template <int KIND>
static void linear_widened(const LinearArgs& a, int64_t pair0, int64_t pair1, const Cut& cut, float* scratch) {
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    for (int64_t pair = pair0; pair < pair1; pair++)
        linear_by(widened<KIND>(a, 2 * pair, panels - 2 * pair < 2 ? 1 : 2, (uint8_t*)scratch), 0, 1, cut, false);
}

template <int KIND>
static void gated_widened(const GatedArgs& g, int64_t pair0, int64_t pair1, const Cut& cut, float* scratch) {
    const LinearArgs& a = g.linear;
    const int64_t zero[2] = {};
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const LinearArgs gate_up[2] = {widened<KIND>(a, 2 * pair, 2, (uint8_t*)scratch),
                                       widened<KIND>(a, a.rows / 2 / PANEL + 2 * pair, 2, (uint8_t*)(scratch + linear_scratch(a) / 2))};
        gated_by(g, gate_up, zero, pair, cut, false);
    }
}

// The first token that goes through tiles: token1 if none does.
static int64_t tiles_from(const LinearArgs& a, int64_t token0, int64_t token1) {
    if (a.kind == KIND_BF16) return a.inner % GROUP == 0 ? token0 : token1;  // heads' inputs may lie side by side, and end within a tile
    if (form_of(a.kind) != FORM_Q || !a.wide || a.wide_from >= token1) return token1;
    return a.wide_from < token0 ? token0 : a.wide_from;
}

static void linear(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const int64_t from = tiles_from(a, token0, token1);
    if (token0 < from) BASE()->linear(a, pair0, pair1, token0, from, scratch);
    if (from >= token1) return;
    const Cut cut(from, token1);
    const Tiles registers(cut.rows, 64);
    if (a.kind == KIND_BF16) return linear_by(a, pair0, pair1, cut, true);
    BY_WHOLE_KIND(linear_widened, a.kind, a, pair0, pair1, cut, scratch)
}

static void gated(const GatedArgs& g, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const LinearArgs& a = g.linear;
    const int64_t from = tiles_from(a, token0, token1);
    if (token0 < from) BASE()->gated(g, pair0, pair1, token0, from, scratch);
    if (from >= token1) return;
    const Cut cut(from, token1);
    const Tiles registers(cut.rows, 64);
    if (a.kind != KIND_BF16) BY_WHOLE_KIND(gated_widened, a.kind, g, pair0, pair1, cut, scratch)
    const LinearArgs gate_up[2] = {a, a};
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t panel[2] = {2 * pair, a.rows / 2 / PANEL + 2 * pair};
        gated_by(g, gate_up, panel, pair, cut, true);
    }
}

}  // namespace ISA
