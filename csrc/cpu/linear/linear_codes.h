// The codes, scales and minima of a panel (formats.h), for the kernels of products.
#pragma once
#include <string.h>

#include "put_gated.h"

namespace ISA {

static inline uint64_t load8(const uint8_t* p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

// Prefetch of the next panels. With few tokens a product is bound by reading its weights, and the hardware's prefetcher loses the
// streams of codes, scales and minima at the end of each panel. Only the first tokens of a panel prefetch (`ahead`). A prefetch
// past the end is harmless.
template <int KIND, int NP>
__attribute__((always_inline)) static inline void ask_for_next(const Layout& at, int64_t g, const uint8_t* codes, const uint8_t* scales, const uint8_t* mins) {
    constexpr int64_t bytes = 64 * code_bits(KIND);
    const uint8_t* next = codes + NP * at.code_bytes + g * bytes;
    for (int64_t i = 0; i < bytes; i += 64) ask_for(next + i);
    if (scaled_by_row(KIND) || (!is_k(KIND) && g % (KIND == KIND_MX ? 4 : 2) != 0)) return;
    ask_for(scales + NP * at.scale_bytes + scale_at(KIND, g));
    if (has_mins(KIND)) ask_for(mins + NP * at.scale_bytes + scale_at(KIND, g));
}

// The same for `count` panels of S8 and those that begin `distance` panels later. These are taken to be as long.
class NextSparse {
public:
    NextSparse() = default;
    NextSparse(const uint8_t* packed, const Layout& of, int64_t panel, int64_t count, int64_t distance)
        : at_(packed + sparse_panel(packed, panel + distance < of.panels ? panel + distance : of.panels)),
          step_((sparse_panel(packed, panel + count) - sparse_panel(packed, panel) + of.groups - 1) / of.groups) {}
    __attribute__((always_inline)) inline void ask() {  // once for each group
        for (int64_t i = 0; i < step_; i += 64) ask_for(at_ + i);
        at_ += step_;
    }

private:
    const uint8_t* at_ = nullptr;
    int64_t step_ = 0;
};

// The codes of inputs 4T … 4T + 3 of a group, for a panel's rows. `group` points at the group's codes (S8: at its masks).
template <int KIND, int T>
static inline B codes_of(const uint8_t* group, const uint8_t*& kept) {
    if (KIND == KIND_S8) return expand(load8(group + 8 * T), kept);
    if (code_bits(KIND) == 8) return load_b(group + 64 * T);
    if (code_bits(KIND) < 4) {
        const B two = with_bits<-2 * (T % 4)>(bzero(), load_b(group + 64 * (T / 4)), 3);
        return code_bits(KIND) == 3 ? with_bits<2 - T>(two, load_b(group + 128), 4) : two;
    }
    const B both = load_b(group + 64 * (T % 4)), w = T < 4 ? low4(both) : high4(both);
    if (code_bits(KIND) == 5) return with_bits<4 - T>(w, load_b(group + 256), 0x10);
    if (code_bits(KIND) == 6) return with_bits<4 - 2 * (T % 4)>(w, load_b(group + 256 + 64 * (T / 4)), 0x30);
    return KIND == KIND_MX ? look_up(w, MX_NUMBERS) : w;
}

// The scales of a group, or of one of its halves.
template <int KIND>
static inline F scale_of(const uint8_t* scales, int64_t g, int half) {
    const uint8_t* at = scales + scale_at(KIND, g);
    if (is_w4(KIND)) return load((const float*)at);
    if (KIND == KIND_MX) return load_exponents(at);
    if (!is_k(KIND)) return load_f16((const uint16_t*)at);
    const F d = load_f16((const uint16_t*)(scales + super_at(KIND, g)));
    if (KIND == KIND_Q2K) return load_u4(at + half * PANEL, false) * d;
    return load_i8((const int8_t*)at + (by_halves(KIND) ? half * PANEL : 0)) * d;
}

template <int KIND>
static inline F minimum_of(const uint8_t* scales, const uint8_t* mins, int64_t g, int half) {
    const uint8_t* at = mins + scale_at(KIND, g);
    if (is_w4(KIND)) return load((const float*)at);
    if (!is_k(KIND)) return load_f16((const uint16_t*)at);
    const F e = load_f16((const uint16_t*)(scales + super_at(KIND, g) + 2 * PANEL));
    if (KIND == KIND_Q2K) return load_u4(scales + scale_at(KIND, g) + half * PANEL, true) * e;
    return load_i8((const int8_t*)scales + scale_at(KIND, g) + PANEL) * e;
}

// f<kind>(…) for a kind of whole numbers.
#define BY_WHOLE_KIND(f, kind, ...)                                \
    switch (kind) {                                                \
        case KIND_I8: return f<KIND_I8>(__VA_ARGS__);              \
        case KIND_Q8: return f<KIND_Q8>(__VA_ARGS__);              \
        case KIND_Q4: return f<KIND_Q4>(__VA_ARGS__);              \
        case KIND_Q4M: return f<KIND_Q4M>(__VA_ARGS__);            \
        case KIND_S8: return f<KIND_S8>(__VA_ARGS__);              \
        case KIND_Q5: return f<KIND_Q5>(__VA_ARGS__);              \
        case KIND_Q5M: return f<KIND_Q5M>(__VA_ARGS__);            \
        case KIND_Q4K: return f<KIND_Q4K>(__VA_ARGS__);            \
        case KIND_Q5K: return f<KIND_Q5K>(__VA_ARGS__);            \
        case KIND_Q6K: return f<KIND_Q6K>(__VA_ARGS__);            \
        case KIND_W4: return f<KIND_W4>(__VA_ARGS__);              \
        case KIND_W4M: return f<KIND_W4M>(__VA_ARGS__);            \
        case KIND_W4M32: return f<KIND_W4M32>(__VA_ARGS__);        \
        case KIND_MX: return f<KIND_MX>(__VA_ARGS__);              \
        case KIND_Q2K: return f<KIND_Q2K>(__VA_ARGS__);            \
        default: return f<KIND_Q3K>(__VA_ARGS__);                  \
    }

}  // namespace ISA
