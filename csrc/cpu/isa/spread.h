// Functions that AVX2 and AVX-512 share: the sum of bytes, and spreading packed bytes by a mask where the machine has no
// instruction for it. Eight bytes are spread at a time by a shuffle from a table.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace ISA {

struct Spread {  // at[mask][i]: the packed byte that goes to place i. Above 127 there is none, and the shuffle writes 0
    alignas(64) uint8_t at[256][8];
    constexpr Spread() : at() {
        for (int mask = 0; mask < 256; mask++)
            for (int i = 0, next = 0; i < 8; i++) at[mask][i] = mask >> i & 1 ? (uint8_t)next++ : 0x80;
    }
};
static constexpr Spread kSpread{};

// The bytes are number + 128. Places that the shuffle leaves at 0 become number 0.
static inline __m128i spread8(uint64_t mask, const uint8_t*& from) {
    const __m128i packed = _mm_xor_si128(_mm_loadl_epi64((const __m128i*)from), _mm_set1_epi8(-128));
    from += __builtin_popcountll(mask);
    return _mm_shuffle_epi8(packed, _mm_loadl_epi64((const __m128i*)kSpread.at[mask]));
}
static inline __m128i spread16(uint64_t mask, const uint8_t*& from) {
    const __m128i low = spread8(mask & 255, from);
    return _mm_unpacklo_epi64(low, spread8(mask >> 8, from));
}

// The sum of sixteen. 128 is added to each, and an instruction sums eight unsigned bytes.
static inline int32_t sum_bytes(const int8_t* p) {
    const __m128i whole = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(-128));
    const __m128i eights = _mm_sad_epu8(whole, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_unpackhi_epi64(eights, eights))) - 16 * 128;
}

}  // namespace ISA
