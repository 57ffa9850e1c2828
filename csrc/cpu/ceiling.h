// The most that a thread reads and multiplies when it does nothing else: the roofline's ceilings.
#pragma once
#include "kernels.h"

namespace ISA {

static constexpr int kCeilingTokens = kFullTiles ? 6 : 2;
#define EVERY_ACCUMULATOR                                              \
    _Pragma("GCC unroll 6") for (int t = 0; t < kCeilingTokens; t++)   \
        _Pragma("GCC unroll 2") for (int p = 0; p < 2; p++)

// Multiplies one tile of a product again and again: two panels by as many tokens as the registers hold. The operands lie in the
// nearest cache. The result is returned, since the compiler would otherwise remove the loop.
template <int WHAT>
static float multiply(const uint8_t* data, int64_t rounds) {
    constexpr int T = kCeilingTokens;  // loops over tokens are unrolled, so that the accumulators are registers
    I whole[T][2];
    F acc[T][2];
    EVERY_ACCUMULATOR whole[t][p] = izero(), acc[t][p] = zero();
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" ::: "memory");  // the compiler may not hoist anything out of the loop
        const B w[2] = {load_b(data), load_b(data + 64)};
        const F f[2] = {load((const float*)data), load((const float*)data + 16)};
        EVERY_ACCUMULATOR {
            int32_t x;
            __builtin_memcpy(&x, data + 128 + 4 * t, 4);
            if (WHAT == CEILING_INT8) whole[t][p] = dot8(whole[t][p], w[p], x);
            else if (WHAT == CEILING_BF16) acc[t][p] = dot_bf16(acc[t][p], w[p], (uint32_t)x);
            else acc[t][p] = fma(f[p], set1(((const float*)data)[32 + t]), acc[t][p]);
        }
    }
    F all = zero();
    EVERY_ACCUMULATOR all = all + acc[t][p] + to_float(whole[t][p]);
    return sum(all);
}
#undef EVERY_ACCUMULATOR

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
        case CEILING_BF16: return multiply<CEILING_BF16>(data, rounds);
        default: return multiply<CEILING_F32>(data, rounds);
    }
}

// Multiplications of a round, each with its addition.
static int64_t ceiling_macs(int32_t what) {
    return kCeilingTokens * 2 * 16 * (what == CEILING_INT8 ? 4 : what == CEILING_BF16 ? 2 : what == CEILING_F32 ? 1 : 0);
}

}  // namespace ISA
