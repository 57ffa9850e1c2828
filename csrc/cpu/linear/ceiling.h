// The most that a thread reads and multiplies when it does nothing else: the roofline's ceilings.
#pragma once
#include "linear.h"

namespace ISA {

// A tile of a product: panels by as many tokens as the registers hold.
static constexpr int kCeilingTokens = kFullTiles ? 6 : 4, kCeilingPanels = kFullTiles ? 2 : 1;

// Multiplies one tile again and again, eight times in a round. The operands lie in the nearest cache. The result is returned, since
// the compiler would otherwise remove the loop.
template <int WHAT, int MR, int NP>
static float multiply(const uint8_t* data, int64_t rounds) {
    constexpr bool by_words = WHAT == CEILING_INT6 && kWords;
    I whole[MR][NP], words[MR][NP];
    F acc[MR][NP];
    TOKENS PANELS whole[t][p] = izero(), acc[t][p] = zero();
    for (int64_t r = 0; r < rounds; r++) {
        TOKENS PANELS words[t][p] = izero();
        for (int i = 0; i < 8; i++) {
            __asm__ volatile("" ::: "memory");  // the compiler may not hoist anything out of the loop
            B w[NP];
            F f[NP];
            PANELS w[p] = load_b(data + 64 * p), f[p] = load((const float*)data + 16 * p);
            TOKENS {
                const int32_t x = load4(data + 128 + 4 * t);
                PANELS {
                    if constexpr (by_words) words[t][p] = add_words(words[t][p], w[p], x);
                    else if constexpr (WHAT == CEILING_INT6) whole[t][p] = dot6(whole[t][p], w[p], x);
                    else if constexpr (WHAT == CEILING_INT8) whole[t][p] = dot8(whole[t][p], w[p], x);
                    else if constexpr (WHAT == CEILING_BF16) acc[t][p] = dot_bf16(acc[t][p], w[p], (uint32_t)x);
                    else acc[t][p] = fma(f[p], set1(((const float*)data)[32 + t]), acc[t][p]);
                }
            }
        }
        if constexpr (by_words) TOKENS PANELS whole[t][p] = add_joined(whole[t][p], words[t][p]);
    }
    F all = zero();
    TOKENS PANELS all = all + acc[t][p] + to_float(whole[t][p]);
    return sum(all);
}

template <int WHAT>
static float multiply(const uint8_t* data, int64_t rounds) {
    return multiply<WHAT, kCeilingTokens, kCeilingPanels>(data, rounds);
}

static float read_all(const uint8_t* data, int64_t bytes, int64_t rounds) {
    F acc[8];
    for (F& a : acc) a = zero();
    for (int64_t r = 0; r < rounds; r++)
        for (int64_t at = 0; at + 512 <= bytes; at += 512) {
            _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) acc[i] = acc[i] + load((const float*)(data + at + 64 * i));
        }
    for (int i = 1; i < 8; i++) acc[0] = acc[0] + acc[i];
    return sum(acc[0]);
}

static float ceiling(int32_t what, const uint8_t* data, int64_t bytes, int64_t rounds) {
    switch (what) {
        case CEILING_READ: return read_all(data, bytes, rounds);
        case CEILING_INT8: return multiply<CEILING_INT8>(data, rounds);
        case CEILING_INT6: return multiply<CEILING_INT6>(data, rounds);
        case CEILING_BF16: return multiply<CEILING_BF16>(data, rounds);
        default: return multiply<CEILING_F32>(data, rounds);
    }
}

// Multiplications of a round, each with its addition.
static int64_t ceiling_macs(int32_t what) {
    const bool whole = what == CEILING_INT8 || what == CEILING_INT6;
    return 8 * kCeilingTokens * kCeilingPanels * 16 * (whole ? 4 : what == CEILING_BF16 ? 2 : what == CEILING_F32 ? 1 : 0);
}

}  // namespace ISA
