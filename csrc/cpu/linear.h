// Products of activations and packed weights. A pair of panels (32 rows) stays in the nearest cache while all tokens pass.
#pragma once
#include <string.h>

#include "emit.h"
#include "kernels.h"

namespace ISA {

static inline int32_t load4(const uint8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// The loops over a tile's tokens and panels are unrolled, or its accumulators would not be registers.
#define TOKENS _Pragma("GCC unroll 16") for (int t = 0; t < MR; t++)
#define PANELS _Pragma("GCC unroll 2") for (int p = 0; p < NP; p++)

template <int MR, int NP>
static inline void put(const LinearArgs& a, F (&acc)[MR][NP], int64_t panel, float* y, int64_t y_stride) {
    PANELS {
        const int64_t row = (panel + p) * PANEL;
        const int n = (int)(a.rows - row < PANEL ? a.rows - row : PANEL);
        const F bias = a.bias ? load_n(a.bias + row, n) : zero();
        TOKENS {
            float* to = y + t * y_stride + p * PANEL;
            F v = acc[t][p] + bias;
            if (a.accumulate) v = v + load_n(to, n);
            store_n(to, v, n);
        }
    }
}

// With one token a product is as fast as its weights come. A panel's codes, scales and minima are three short streams, which the
// processor's own look-ahead meets anew at each panel; so the next panels' bytes are asked for here. Past the end it is harmless.
template <int KIND, int NP>
static inline void ask_for_next(const Layout& at, int64_t g, const uint8_t* codes, const uint8_t* scales, const uint8_t* mins) {
    constexpr int64_t bytes = KIND >= KIND_Q4 ? GROUP / 2 * PANEL : GROUP * PANEL;
    const uint8_t* next = codes + NP * at.code_bytes + g * bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
    if (KIND == KIND_I8 || g % 2 == 1) return;
    __builtin_prefetch(scales + NP * at.scale_bytes + g * 2 * PANEL);
    if (KIND == KIND_Q4M) __builtin_prefetch(mins + NP * at.scale_bytes + g * 2 * PANEL);
}

// MR tokens × NP panels of whole numbers. Each group's sum is exact in int32 and joins the rest in float32.
template <int KIND, int MR, int NP>
static inline void tile_int(const LinearArgs& a, int64_t panel, int64_t token, float* y, int64_t y_stride) {
    const Layout at(KIND, a.rows, a.inner);
    const uint8_t *codes[NP], *scales[NP], *mins[NP], *x[MR];
    const QGroup* q[MR];
    F acc[MR][NP];
    PANELS {
        codes[p] = a.packed + (panel + p) * at.code_bytes;
        scales[p] = a.packed + at.scales_at + (panel + p) * at.scale_bytes;
        mins[p] = a.packed + at.mins_at + (panel + p) * at.scale_bytes;
    }
    TOKENS {
        x[t] = a.x + (token + t) * a.x_stride;
        q[t] = (const QGroup*)(x[t] + at.groups * GROUP);
        PANELS acc[t][p] = zero();
    }
    for (int64_t g = 0; g < at.groups; g++) {
        if (MR == 1) PANELS ask_for_next<KIND, NP>(at, g, codes[p], scales[p], mins[p]);
        I dot[MR][NP];
        TOKENS PANELS dot[t][p] = KIND == KIND_Q4M ? izero() : iset1(KIND == KIND_Q4 ? q[t][g].minus8 : q[t][g].minus128);
        if (KIND >= KIND_Q4) {
            _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++) {
                B both[NP];
                PANELS both[p] = load_b(codes[p] + g * 256 + s * 64);
                TOKENS {
                    const int32_t x0 = load4(x[t] + g * GROUP + 4 * s);
                    PANELS dot[t][p] = dot4(dot[t][p], low4(both[p]), x0);
                }
                TOKENS {
                    const int32_t x1 = load4(x[t] + g * GROUP + 4 * s + 16);
                    PANELS dot[t][p] = dot4(dot[t][p], high4(both[p]), x1);
                }
            }
        } else {
            _Pragma("GCC unroll 8") for (int s = 0; s < 8; s++) {
                B w[NP];
                PANELS w[p] = load_b(codes[p] + g * 512 + s * 64);
                TOKENS {
                    const int32_t x0 = load4(x[t] + g * GROUP + 4 * s);
                    PANELS dot[t][p] = dot8(dot[t][p], w[p], x0);
                }
            }
        }
        PANELS {
            if (KIND == KIND_I8) {
                TOKENS acc[t][p] = fma(to_float(dot[t][p]), set1(q[t][g].scale), acc[t][p]);
            } else {
                const F scale = load_f16((const uint16_t*)scales[p] + g * PANEL);
                TOKENS acc[t][p] = fma(to_float(dot[t][p]) * set1(q[t][g].scale), scale, acc[t][p]);
            }
            if (KIND == KIND_Q4M) {
                const F low = load_f16((const uint16_t*)mins[p] + g * PANEL);
                TOKENS acc[t][p] = fma(low, set1(q[t][g].sum), acc[t][p]);
            }
        }
    }
    if (KIND == KIND_I8) {
        PANELS {
            const F scale = load((const float*)scales[p]);
            TOKENS acc[t][p] = acc[t][p] * scale;
        }
    }
    put<MR, NP>(a, acc, panel, y, y_stride);
}

template <int KIND, int MR, int NP>
static inline void tile_float(const LinearArgs& a, int64_t panel, int64_t token, float* y, int64_t y_stride) {
    const Layout at(KIND, a.rows, a.inner);
    const int64_t steps = KIND == KIND_F32 ? a.inner : (a.inner + 1) / 2;
    const uint8_t *codes[NP], *x[MR];
    F acc[MR][NP];
    PANELS codes[p] = a.packed + (panel + p) * at.code_bytes;
    TOKENS {
        x[t] = a.x + (token + t) * a.x_stride;
        PANELS acc[t][p] = zero();
    }
    for (int64_t k = 0; k < steps; k++) {
        B w[NP];
        F f[NP];
        PANELS {
            if (KIND == KIND_F32) f[p] = load((const float*)(codes[p] + k * 64));
            else w[p] = load_b(codes[p] + k * 64);
        }
        TOKENS {
            if (KIND == KIND_F32) {
                const F v = set1(((const float*)x[t])[k]);
                PANELS acc[t][p] = fma(f[p], v, acc[t][p]);
            } else {
                const uint32_t v = (uint32_t)load4(x[t] + 4 * k);
                PANELS acc[t][p] = dot_bf16(acc[t][p], w[p], v);
            }
        }
    }
    put<MR, NP>(a, acc, panel, y, y_stride);
}

template <int KIND, int MR, int NP>
static void tile(const LinearArgs& a, int64_t panel, int64_t token, float* y, int64_t y_stride) {
    if (KIND >= KIND_I8) tile_int<KIND, MR, NP>(a, panel, token, y, y_stride);
    else tile_float<KIND, MR, NP>(a, panel, token, y, y_stride);
}

template <int KIND>
struct Tiles {  // the most tokens at once that the registers hold beside two panels
    static constexpr int MAX = kFullTiles ? (KIND >= KIND_I8 ? 6 : 12) : 4;
    static constexpr int NP = kFullTiles ? 2 : 1;
};

// y points at the first of these tokens and rows. `count` is at most Tiles::MAX.
template <int KIND, int NP>
static inline int some_tokens(const LinearArgs& a, int64_t panel, int64_t token, int64_t left, float* y, int64_t stride) {
    constexpr int MAX = Tiles<KIND>::MAX;
    if (left >= MAX) return tile<KIND, MAX, NP>(a, panel, token, y, stride), MAX;
    if (left >= 4) return tile<KIND, 4, NP>(a, panel, token, y, stride), 4;
    if (left >= 2) return tile<KIND, 2, NP>(a, panel, token, y, stride), 2;
    return tile<KIND, 1, NP>(a, panel, token, y, stride), 1;
}

template <int KIND>
static inline int pair_of_panels(const LinearArgs& a, int64_t panel, int64_t panels, int64_t token, int64_t left, float* y,
                                 int64_t stride) {
    if (panels == 2 && Tiles<KIND>::NP == 2) return some_tokens<KIND, 2>(a, panel, token, left, y, stride);
    int done = 0;
    for (int64_t p = 0; p < panels; p++) done = some_tokens<KIND, 1>(a, panel + p, token, left, y + p * PANEL, stride);
    return done;
}

template <int KIND>
static void linear_kind(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1) {
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    for (int64_t pair = pair0; pair < pair1; pair++) {
        const int64_t panel = 2 * pair, count = panels - panel < 2 ? 1 : 2;
        for (int64_t t = token0; t < token1;)
            t += pair_of_panels<KIND>(a, panel, count, t, token1 - t, a.y + t * a.y_stride + panel * PANEL, a.y_stride);
    }
}

// Gate and up of 32 inner features at a time: their activation is one group of the next product's inputs.
template <int KIND>
static void gated_kind(const GatedArgs& g, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1) {
    const LinearArgs& a = g.linear;
    const int64_t half = a.rows / 2;
    alignas(64) float gate[12 * GROUP], up[12 * GROUP];
    for (int64_t pair = pair0; pair < pair1; pair++) {
        for (int64_t t = token0; t < token1;) {
            const int done = pair_of_panels<KIND>(a, 2 * pair, 2, t, token1 - t, gate, GROUP);
            pair_of_panels<KIND>(a, half / PANEL + 2 * pair, 2, t, token1 - t, up, GROUP);
            for (int i = 0; i < done; i++) {
                float* v = gate + i * GROUP;
                for (int j = 0; j < GROUP; j += 16)
                    store(v + j, activate(g.activation, load(v + j)) * load(up + i * GROUP + j));
                emit_group(g.form, g.out + (t + i) * g.out_stride, half, pair, v);
            }
            t += done;
        }
    }
}

#define BY_KIND(f, kind, ...)                                      \
    switch (kind) {                                                \
        case KIND_F32: return f<KIND_F32>(__VA_ARGS__);            \
        case KIND_BF16: return f<KIND_BF16>(__VA_ARGS__);          \
        case KIND_I8: return f<KIND_I8>(__VA_ARGS__);              \
        case KIND_Q8: return f<KIND_Q8>(__VA_ARGS__);              \
        case KIND_Q4: return f<KIND_Q4>(__VA_ARGS__);              \
        default: return f<KIND_Q4M>(__VA_ARGS__);                  \
    }

static void linear(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1) {
    BY_KIND(linear_kind, a.kind, a, pair0, pair1, token0, token1)
}

static void gated(const GatedArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1) {
    BY_KIND(gated_kind, a.linear.kind, a, pair0, pair1, token0, token1)
}

}  // namespace ISA
