// Whole numbers as bfloat16, for the many tokens of a prompt: each 32 activations have a scale, so that sums of whole numbers would
// leave the tile registers after half an instruction's depth, and moving them costs what the tile saves (CPU_NOTES.md). A panel is
// widened once for all tokens of a chunk.
#pragma once
#include "tiles.h"

namespace ISA {

// Writes a panel to `to` in the layout of BF16. Where each row has one scale, the codes alone are written, which bfloat16 holds
// exactly, and the scale multiplies the sums.
template <int KIND>
static void widen_panel(const LinearArgs& a, int64_t panel, uint8_t* to) {
    constexpr bool minima = has_mins(KIND) || KIND == KIND_Q4K || KIND == KIND_Q5K || KIND == KIND_Q2K;
    constexpr int64_t group_bytes = KIND == KIND_S8 ? 64 : 64 * code_bits(KIND);
    const Layout at(KIND, a.rows, a.inner);
    const uint8_t* codes = a.packed + (KIND == KIND_S8 ? sparse_panel(a.packed, panel) : panel * at.code_bytes);
    const uint8_t *kept = codes + at.code_bytes, *scales = a.packed + at.scales_at + panel * at.scale_bytes;
    const uint8_t* mins = a.packed + at.mins_at + panel * at.scale_bytes;
    NextSparse next;
    if (KIND == KIND_S8) next = NextSparse(a.packed, at, panel, 1, 2);
    for (int64_t g = 0; g < at.groups; g++, to += 2 * GROUP * PANEL) {
        if (KIND == KIND_S8) next.ask();
        else ask_for_next<KIND, 2>(at, g, codes, scales, mins);
        const uint8_t* group = codes + g * group_bytes;
        F scale[2], low[2];
        for (int half = 0; half < 2; half++) {
            if (scaled_by_row(KIND)) {
                scale[half] = set1(1.0f), low[half] = set1(-128.0f);
                continue;
            }
            scale[half] = scale_of<KIND>(scales, g, by_halves(KIND) ? half : 0);
            low[half] = minima ? minimum_of<KIND>(scales, mins, g, by_halves(KIND) ? half : 0) : scale[half] * set1(-(float)code_from(KIND));
        }
#define WIDEN(T)                                                                                         \
    {                                                                                                    \
        const B c = codes_of<KIND, T>(group, kept);                                                      \
        const F s = scale[T / 4], m = low[T / 4];                                                        \
        store_b(to + 128 * T, pairs_of(fma(byte_of<0>(c), s, m), fma(byte_of<1>(c), s, m)));             \
        store_b(to + 128 * T + 64, pairs_of(fma(byte_of<2>(c), s, m), fma(byte_of<3>(c), s, m)));        \
    }
        WIDEN(0) WIDEN(1) WIDEN(2) WIDEN(3) WIDEN(4) WIDEN(5) WIDEN(6) WIDEN(7)
#undef WIDEN
    }
}

// `count` panels from `panel` on, in `to`, as a weight of which these are all. Tokens are the widened ones.
template <int KIND>
static LinearArgs widened(const LinearArgs& a, int64_t panel, int64_t count, uint8_t* to) {
    const Layout from(KIND, a.rows, a.inner), at(KIND_BF16, count * PANEL, a.inner);
    for (int64_t p = 0; p < count; p++) widen_panel<KIND>(a, panel + p, to + p * at.code_bytes);
    LinearArgs w = a;
    w.kind = KIND_BF16, w.packed = to, w.inner = padded(a.inner), w.x = a.wide, w.x_stride = form_bytes(FORM_BF16, a.inner);
    w.rows = a.rows - panel * PANEL < count * PANEL ? a.rows - panel * PANEL : count * PANEL;
    w.y = a.y + panel * PANEL;
    if (a.bias) w.bias = a.bias + panel * PANEL;
    if (scaled_by_row(KIND)) w.row_scales = (const float*)(a.packed + from.scales_at) + panel * PANEL;
    return w;
}

// A row of 8-bit activations in bfloat16.
static void widen(const uint8_t* row, int64_t size, uint8_t* to) {
    const QGroup* q = (const QGroup*)(row + padded(size));
    for (int64_t g = 0; g < padded(size) / GROUP; g++)
        for (int64_t i = g * GROUP; i < (g + 1) * GROUP; i += 16)
            store_bf16((uint16_t*)to + i, load_i8((const int8_t*)row + i) * set1(q[g].scale));
}

}  // namespace ISA
