// Products of activations and packed weights. A pair of panels (32 rows) stays in the nearest cache for all tokens of the chunk.
#pragma once
#include "linear_codes.h"

namespace ISA {

static inline int32_t load4(const uint8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// The loops over a tile's tokens and panels are unrolled, so that its accumulators are registers.
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

// The initial value of a group's dot products, or of one half's where 16 inputs share a scale: with it they are those of the numbers,
// not of the codes.
template <int KIND>
static inline I before(const QGroup& q, int half) {
    constexpr int shift = code_from(KIND) == 16 ? 3 : code_from(KIND) == 8 ? 4 : 0;
    if (code_from(KIND) == 0 || (kSigned8 && code_bits(KIND) == 8)) return izero();
    if (KIND == KIND_MX) return iset1((q.minus128 >> 7) * code_from(KIND));
    return iset1(by_halves(KIND) ? -code_from(KIND) * q.halves[half] : q.minus128 >> shift);
}

// How many `add_words` a 16-bit word can hold of codes below 64. It divides the 4 or 8 between two JOINs.
template <int KIND>
constexpr int safe_words() {
    constexpr int largest = KIND == KIND_MX ? 24 : (1 << code_bits(KIND)) - 1, most = 32767 / (2 * 127 * largest);
    constexpr int whole = by_halves(KIND) ? 4 : 8, found = most >= whole ? whole : most >= 4 ? 4 : 2;
    static_assert(found <= most, "two products are added in each word");
    return found;
}

template <int KIND>
struct Tiles {  // the most tokens whose accumulators fit into the registers beside two panels
    static constexpr int MAX = kFullTiles ? (KIND >= KIND_I8 ? 6 : 12) : 4;
    static constexpr int NP = kFullTiles ? 2 : 1;
};

// A tile of MR tokens × NP panels of integer codes. A group's sum is exact in int32; groups are added in float32.
template <int KIND, int MR, int NP>
static inline void tile_int(const LinearArgs& a, int64_t panel, int64_t token, bool ahead, float* y, int64_t y_stride) {
    constexpr bool minima = has_mins(KIND) || KIND == KIND_Q4K || KIND == KIND_Q5K;
    constexpr int64_t group_bytes = KIND == KIND_S8 ? 64 : 64 * code_bits(KIND);
    const Layout at(KIND, a.rows, a.inner);
    const uint8_t *codes[NP], *kept[NP], *scales[NP], *mins[NP], *x[MR];
    const QGroup* q[MR];
    F acc[MR][NP];
    PANELS {
        codes[p] = a.packed + (KIND == KIND_S8 ? sparse_panel(a.packed, panel + p) : (panel + p) * at.code_bytes);
        kept[p] = codes[p] + at.code_bytes;
        scales[p] = a.packed + at.scales_at + (panel + p) * at.scale_bytes;
        mins[p] = a.packed + at.mins_at + (panel + p) * at.scale_bytes;
    }
    TOKENS {
        x[t] = a.x + (token + t) * a.x_stride;
        q[t] = (const QGroup*)(x[t] + at.groups * GROUP);
        PANELS acc[t][p] = zero();
    }
    const bool unfolds = KIND == KIND_S8 && MR == Tiles<KIND>::MAX && a.unfolded;
    uint8_t* unfolded = a.unfolded + (unfolds ? panel % 2 * Layout(KIND_I8, PANEL, a.inner).code_bytes : 0);
    NextSparse next;
    if (KIND == KIND_S8) next = NextSparse(a.packed, at, panel, NP, NP);
    for (int64_t g = 0; g < at.groups; g++) {
        if (ahead && KIND == KIND_S8) {
            next.ask();
        } else if (ahead) {
            PANELS ask_for_next<KIND, NP>(at, g, codes[p], scales[p], mins[p]);
        }
        I dot[MR][NP], words[MR][NP];
        constexpr bool by_words = kWords && code_bits(KIND) < 8;
#define BEGIN(half) TOKENS PANELS dot[t][p] = before<KIND>(q[t][g], half), words[t][p] = izero();
#define MULTIPLY(T, count)                                                                              \
    {                                                                                                   \
        B w[NP];                                                                                        \
        PANELS w[p] = codes_of<KIND, T>(codes[p] + g * group_bytes, kept[p]);                           \
        if (unfolds) PANELS store_b(unfolded + (p * at.groups * 8 + g * 8 + T) * 64, w[p]);             \
        TOKENS {                                                                                        \
            const int32_t four = load4(x[t] + g * GROUP + 4 * T);                                       \
            PANELS {                                                                                    \
                if constexpr (by_words) words[t][p] = add_words(words[t][p], w[p], four);               \
                else if constexpr (code_bits(KIND) == 8) dot[t][p] = dot8(dot[t][p], w[p], four);       \
                else dot[t][p] = dot6(dot[t][p], w[p], four);                                           \
            }                                                                                           \
        }                                                                                               \
        if constexpr (by_words) {                                                                       \
            if ((count) % safe_words<KIND>() == 0)                                                      \
                TOKENS PANELS dot[t][p] = add_joined(dot[t][p], words[t][p]), words[t][p] = izero();    \
        }                                                                                               \
    }
#define JOIN(half)                                                                                      \
    PANELS {                                                                                            \
        if (scaled_by_row(KIND)) {                                                                      \
            TOKENS acc[t][p] = fma(to_float(dot[t][p]), set1(q[t][g].scale), acc[t][p]);                \
        } else {                                                                                        \
            const F scale = scale_of<KIND>(scales[p], g, half);                                         \
            TOKENS acc[t][p] = fma(to_float(dot[t][p]) * set1(q[t][g].scale), scale, acc[t][p]);        \
        }                                                                                               \
        if (KIND == KIND_Q2K) {                                                                         \
            const F low = minimum_of<KIND>(scales[p], mins[p], g, half);                                \
            TOKENS acc[t][p] = fma(low, set1((float)q[t][g].halves[half] * q[t][g].scale), acc[t][p]);  \
        }                                                                                               \
    }
        BEGIN(0)
        if (by_halves(KIND)) {
            MULTIPLY(0, 1) MULTIPLY(1, 2) MULTIPLY(2, 3) MULTIPLY(3, 4)
            JOIN(0)
            BEGIN(1)
            MULTIPLY(4, 1) MULTIPLY(5, 2) MULTIPLY(6, 3) MULTIPLY(7, 4)
        } else if (code_bits(KIND) == 8) {
            MULTIPLY(0, 1) MULTIPLY(1, 2) MULTIPLY(2, 3) MULTIPLY(3, 4) MULTIPLY(4, 5) MULTIPLY(5, 6) MULTIPLY(6, 7) MULTIPLY(7, 8)
        } else {  // the codes that share bytes are computed together
            MULTIPLY(0, 1) MULTIPLY(4, 2) MULTIPLY(1, 3) MULTIPLY(5, 4) MULTIPLY(2, 5) MULTIPLY(6, 6) MULTIPLY(3, 7) MULTIPLY(7, 8)
        }
        JOIN(1)
#undef BEGIN
#undef MULTIPLY
#undef JOIN
        if (minima) {
            PANELS {
                const F low = minimum_of<KIND>(scales[p], mins[p], g, 0);
                TOKENS acc[t][p] = fma(low, set1(q[t][g].sum), acc[t][p]);
            }
        }
    }
    if (scaled_by_row(KIND)) {
        PANELS {
            const F scale = load((const float*)scales[p]);
            TOKENS acc[t][p] = acc[t][p] * scale;
        }
    }
    put<MR, NP>(a, acc, panel, y, y_stride);
}

template <int KIND, int MR, int NP>
static inline void tile_float(const LinearArgs& a, int64_t panel, int64_t token, bool ahead, float* y, int64_t y_stride) {
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
        if (ahead) PANELS ask_for(codes[p] + NP * at.code_bytes + k * 64);
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

// Not inlined: `linear` and `gated` share it, which halves the time to compile. The results are prefetched before they are
// computed: each lies in a row of its own, which the hardware can't foresee.
template <int KIND, int MR, int NP>
__attribute__((noinline)) static void tile(const LinearArgs& a, int64_t panel, int64_t token, bool ahead, float* y,
                                           int64_t y_stride) {
    TOKENS PANELS __builtin_prefetch(y + t * y_stride + p * PANEL, 1);
    if constexpr (KIND >= KIND_I8) tile_int<KIND, MR, NP>(a, panel, token, ahead, y, y_stride);
    else tile_float<KIND, MR, NP>(a, panel, token, ahead, y, y_stride);
}

// Computes up to Tiles::MAX of the `left` tokens, and returns how many. y points at the first token's first result.
template <int KIND, int NP>
static inline int some_tokens(const LinearArgs& a, int64_t panel, int64_t token, int64_t left, bool ahead, float* y,
                              int64_t stride) {
    constexpr int MAX = Tiles<KIND>::MAX;
    if (left >= MAX) return tile<KIND, MAX, NP>(a, panel, token, ahead, y, stride), MAX;
    if (left >= 4) return tile<KIND, 4, NP>(a, panel, token, ahead, y, stride), 4;
    if (left >= 2) return tile<KIND, 2, NP>(a, panel, token, ahead, y, stride), 2;
    return tile<KIND, 1, NP>(a, panel, token, ahead, y, stride), 1;
}

// Products of a pair of panels with tokens, the first ones first. Where S8 meets more tokens than a tile has, the first tile leaves
// its panels unfolded in `scratch`, and the other tokens' tiles read them there as a weight of the kind I8.
template <int KIND>
class Pair {
public:
    Pair(const LinearArgs& a, int64_t tokens, float* scratch) : own_(a), unfolded_(a) {
        if (KIND == KIND_S8 && tokens > Tiles<KIND>::MAX) own_.unfolded = (uint8_t*)scratch;
        unfolded_.kind = KIND_I8, unfolded_.packed = own_.unfolded;
    }
    // Before the products of its first tokens.
    void begin(int64_t panel, int64_t count) {
        panel_ = panel, count_ = count, ahead_ = true;
        if (!own_.unfolded) return;
        const Layout from(KIND_S8, own_.rows, own_.inner), to(KIND_I8, count * PANEL, own_.inner);
        unfolded_.rows = own_.rows - panel * PANEL < count * PANEL ? own_.rows - panel * PANEL : count * PANEL;
        if (own_.bias) unfolded_.bias = own_.bias + panel * PANEL;
        memcpy(own_.unfolded + to.scales_at, own_.packed + from.scales_at + panel * from.scale_bytes, count * from.scale_bytes);
    }
    // As `some_tokens`.
    int multiply(int64_t token, int64_t left, float* y, int64_t stride) {
        const bool ahead = ahead_;
        ahead_ = false;
        if (!ahead && own_.unfolded) return panels<KIND_I8>(unfolded_, 0, token, left, false, y, stride);
        return panels<KIND>(own_, panel_, token, left, ahead, y, stride);
    }

private:
    template <int OF>
    int panels(const LinearArgs& a, int64_t panel, int64_t token, int64_t left, bool ahead, float* y, int64_t stride) const {
        if (count_ == 2 && Tiles<OF>::NP == 2) return some_tokens<OF, 2>(a, panel, token, left, ahead, y, stride);
        int done = 0;
        for (int64_t p = 0; p < count_; p++) done = some_tokens<OF, 1>(a, panel + p, token, left, ahead, y + p * PANEL, stride);
        return done;
    }

    LinearArgs own_, unfolded_;
    int64_t panel_ = 0, count_ = 0;
    bool ahead_ = false;
};

template <int KIND>
static void linear_kind(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    Pair<KIND> own(a, token1 - token0, scratch);
    for (int64_t pair = pair0; pair < pair1; pair++) {
        own.begin(2 * pair, panels - 2 * pair < 2 ? 1 : 2);
        for (int64_t t = token0; t < token1;)
            t += own.multiply(t, token1 - t, a.y + 2 * pair * PANEL + t * a.y_stride, a.y_stride);
    }
}

// Computes gate and up of 32 hidden numbers at a time: their activation is one group of the next product's inputs.
template <int KIND>
static void gated_kind(const GatedArgs& g, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    const LinearArgs& a = g.linear;
    const int64_t half = a.rows / 2;
    alignas(64) float gate[12 * GROUP], up[12 * GROUP];
    Pair<KIND> gates(a, token1 - token0, scratch), ups(a, token1 - token0, scratch + linear_scratch(a) / 2);
    for (int64_t pair = pair0; pair < pair1; pair++) {
        gates.begin(2 * pair, 2), ups.begin(half / PANEL + 2 * pair, 2);
        for (int64_t t = token0; t < token1;) {
            const int done = gates.multiply(t, token1 - t, gate, GROUP);
            ups.multiply(t, token1 - t, up, GROUP);
            if (g.activation.kind == ACT_SILU) put_gated<true>(g, pair, t, done, gate, up);
            else put_gated<false>(g, pair, t, done, gate, up);
            t += done;
        }
    }
}

static void linear(const LinearArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (a.kind == KIND_F32) return linear_kind<KIND_F32>(a, pair0, pair1, token0, token1, scratch);
    if (a.kind == KIND_BF16) return linear_kind<KIND_BF16>(a, pair0, pair1, token0, token1, scratch);
    BY_WHOLE_KIND(linear_kind, a.kind, a, pair0, pair1, token0, token1, scratch)
}

static void gated(const GatedArgs& a, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch) {
    if (a.linear.kind == KIND_F32) return gated_kind<KIND_F32>(a, pair0, pair1, token0, token1, scratch);
    if (a.linear.kind == KIND_BF16) return gated_kind<KIND_BF16>(a, pair0, pair1, token0, token1, scratch);
    BY_WHOLE_KIND(gated_kind, a.linear.kind, a, pair0, pair1, token0, token1, scratch)
}

}  // namespace ISA
