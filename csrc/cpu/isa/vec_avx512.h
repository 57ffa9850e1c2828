// Sixteen lanes in one AVX-512 register. vec_avx2.h and vec_portable.h define the same names, so that each kernel is written once
// in terms of
//   F  16 float32      I  16 int32      B  64 bytes: 16 rows of 4 values, or 16 rows of 2 bfloat16
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "spread.h"

namespace ISA {

struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };
constexpr bool kFullTiles = true;  // 32 registers: tiles of 24 accumulators
// kWords: products of codes below 64 go by `add_words` and `add_joined`, and there is no dot6. kSigned8: dot8 multiplies the code
// less 128, which is the number itself; inputs are never −128. kMemoryOperands: a multiplication reads an operand from memory.
constexpr bool kWords = false, kSigned8 = false, kMemoryOperands = true;

static inline F zero() { return {_mm512_setzero_ps()}; }
static inline F set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }  // n in 0 … 15
static inline F load_n(const float* p, int n) { return n >= 16 ? load(p) : F{_mm512_maskz_loadu_ps(first(n), p)}; }
static inline void store_n(float* p, F a, int n) {
    if (n >= 16) store(p, a);
    else _mm512_mask_storeu_ps(p, first(n), a.v);
}
static inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F inverse(F a) {  // for normal numbers: an estimate of 14 bits and one step of Newton's method
    const __m512 r = _mm512_rcp14_ps(a.v);
    return {_mm512_mul_ps(r, _mm512_fnmadd_ps(a.v, r, _mm512_set1_ps(2.0f)))};
}
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F vmax(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F vmin(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F vabs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline float sum(F a) { return _mm512_reduce_add_ps(a.v); }
static inline float top(F a) { return _mm512_reduce_max_ps(a.v); }

static inline I izero() { return {_mm512_setzero_si512()}; }
static inline I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I nearest(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // ties to even
static inline F whole(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }  // the nearest whole number, ties to even
static inline F times_pow2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // n is whole
static inline F pow2(I n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))}; }
static inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }
static inline void store_words(int16_t* p, I a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(a.v)); }
static inline F to_float(F a) { return a; }
static inline F load_i8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
// From sixteen bytes: their low nibbles, their high nibbles, and the float32 with them as exponents.
static inline F load_u4(const uint8_t* p, bool high) {
    const __m128i v = _mm_loadu_si128((const __m128i*)p);
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(high ? _mm_srli_epi16(v, 4) : v, _mm_set1_epi8(15))))};
}
static inline F load_exponents(const uint8_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23))};
}

static inline F load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
#if defined(__AVX512BF16__)
static inline void store_bf16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
static inline void store_bf16(uint16_t* p, F a) {
    __m512i x = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    x = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x));
}
#endif

static inline B load_b(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_b(uint8_t* p, B a) { _mm512_storeu_si512(p, a.v); }
static inline B load_words(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
static inline B repeat(uint32_t x) { return {_mm512_set1_epi32((int32_t)x)}; }
static inline B bzero() { return {_mm512_setzero_si512()}; }
static inline B look_up(B codes, const uint8_t* table) {  // the table has 16 entries
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), codes.v)};
}
// 64 bytes. Those that the mask marks are read from `from`, one after the other; the others are 128, which is number 0. `from`
// moves on, and up to 64 bytes are read. On Zen 5 an expansion into a register depends on its old contents (5 cycles instead of 1),
// unless these are fresh.
static inline B expand(uint64_t mask, const uint8_t*& from) {
#if defined(__AVX512VBMI2__)
    const __m512i found = _mm512_mask_expand_epi8(_mm512_set1_epi8(-128), mask, _mm512_loadu_si512(from));
    from += __builtin_popcountll(mask);
    return {found};
#else
    __m512i found = _mm512_castsi128_si512(spread16(mask & 0xffff, from));
    found = _mm512_inserti32x4(found, spread16(mask >> 16 & 0xffff, from), 1);
    found = _mm512_inserti32x4(found, spread16(mask >> 32 & 0xffff, from), 2);
    found = _mm512_inserti32x4(found, spread16(mask >> 48, from), 3);
    return {_mm512_xor_si512(found, _mm512_set1_epi8(-128))};
#endif
}
static inline B low4(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline B high4(B a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// a | (b << LEFT & mask) in each byte; a negative LEFT shifts right. The mask keeps no bit of a neighbouring byte.
template <int LEFT>
static inline B with_bits(B a, B b, uint8_t mask) {
    const __m512i moved = LEFT >= 0 ? _mm512_slli_epi16(b.v, LEFT >= 0 ? LEFT : 0) : _mm512_srli_epi16(b.v, LEFT < 0 ? -LEFT : 0);
    return {_mm512_ternarylogic_epi64(a.v, moved, _mm512_set1_epi8((char)mask), 0xf8)};
}
// a + Σ over each row's 4 unsigned bytes of w times the 4 signed bytes in x. dot6: w is below 64.
#if defined(__AVX512VNNI__)
// In assembly, since gcc 12 copies the accumulator before and after each of its own intrinsics (half the speed of a tile).
static inline I dot8(I a, B w, int32_t x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(a.v) : "v"(w.v), "v"(_mm512_set1_epi32(x)));
    return a;
}
static inline I dot6(I a, B w, int32_t x) { return dot8(a, w, x); }
#else
static inline I dot8(I a, B w, int32_t x) {
    const __m512i low = _mm512_set1_epi16(255), v = _mm512_set1_epi32(x);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, low), _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(v, 8));
    return {_mm512_add_epi32(a.v, _mm512_add_epi32(even, odd))};
}
static inline I dot6(I a, B w, int32_t x) {
    __m512i pairs = _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(x));
    return {_mm512_add_epi32(a.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif
// a + Σ over each row's 2 signed 16-bit words of w times the 2 of x.
#if defined(__AVX512VNNI__)
static inline I dot_words(I a, B w, B x) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(a.v) : "v"(w.v), "v"(x.v));
    return a;
}
#else
static inline I dot_words(I a, B w, B x) { return {_mm512_add_epi32(a.v, _mm512_madd_epi16(w.v, x.v))}; }
#endif
// a + Σ over each row's 2 bfloat16 of w times the 2 in x.
#if defined(__AVX512BF16__)
constexpr bool kHasBf16 = true;
static inline F dot_pairs(F a, B w, B x) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(a.v) : "v"(w.v), "v"(x.v));
    return a;
}
#else
constexpr bool kHasBf16 = false;
static inline F dot_pairs(F a, B w, B x) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16)), odd = _mm512_castsi512_ps(_mm512_and_si512(w.v, high));
    __m512 xe = _mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16)), xo = _mm512_castsi512_ps(_mm512_and_si512(x.v, high));
    return {_mm512_fmadd_ps(odd, xo, _mm512_fmadd_ps(even, xe, a.v))};
}
#endif
static inline F dot_bf16(F a, B w, uint32_t x) { return dot_pairs(a, w, repeat(x)); }

#if defined(__AVX512BF16__)  // for tiles
// Byte J of each of sixteen fours, unsigned.
template <int J>
static inline F byte_of(B a) {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a.v, 8 * J), _mm512_set1_epi32(255)))};
}
// Sixteen pairs of bfloat16, the first of each from a.
static inline B pairs_of(F a, F b) {
    const __m512i turn = _mm512_set_epi32(0x001f000f, 0x001e000e, 0x001d000d, 0x001c000c, 0x001b000b, 0x001a000a, 0x00190009,
                                          0x00180008, 0x00170007, 0x00160006, 0x00150005, 0x00140004, 0x00130003, 0x00120002,
                                          0x00110001, 0x00100000);
    return {_mm512_permutexvar_epi16(turn, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v))};
}
#endif

// The 16-bit words of a and b interleaved, a's first, in two registers.
static inline void zip16(B a, B b, B* to) {
    const __m512i turn = _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a, 0x00290009,
                                          0x00280008, 0x00270007, 0x00260006, 0x00250005, 0x00240004, 0x00230003, 0x00220002,
                                          0x00210001, 0x00200000);
    to[0] = {_mm512_permutex2var_epi16(a.v, turn, b.v)};
    to[1] = {_mm512_permutex2var_epi16(a.v, _mm512_add_epi16(turn, _mm512_set1_epi16(16)), b.v)};
}

// Transposes sixteen rows of sixteen words: word i of row j goes to to[i * stride + j], for i below `count`. Rows are unpacked in
// pairs within each quarter of a register, then pairs of pairs; then the quarters change places.
__attribute__((always_inline)) static inline void transpose16(const uint32_t* from, uint32_t* to, int64_t stride, int64_t count) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_load_si512(from + 16 * i);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)  // a[i + w]: words w, 4 + w, 8 + w, 12 + w of rows i … i + 3
        for (int h = 0; h < 2; h++) {
            a[i + 2 * h] = _mm512_unpacklo_epi64(b[i + h], b[i + 2 + h]);
            a[i + 2 * h + 1] = _mm512_unpackhi_epi64(b[i + h], b[i + 2 + h]);
        }
    for (int w = 0; w < 4; w++) {
        const __m512i p = _mm512_shuffle_i32x4(a[w], a[4 + w], 0x88), q = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0x88);
        const __m512i r = _mm512_shuffle_i32x4(a[w], a[4 + w], 0xdd), s = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0xdd);
        b[w] = _mm512_shuffle_i32x4(p, q, 0x88), b[8 + w] = _mm512_shuffle_i32x4(p, q, 0xdd);
        b[4 + w] = _mm512_shuffle_i32x4(r, s, 0x88), b[12 + w] = _mm512_shuffle_i32x4(r, s, 0xdd);
    }
    if (count == 16)
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * stride, b[i]);
    else
        for (int i = 0; i < 16; i++)
            if (i < count) _mm512_storeu_si512(to + i * stride, b[i]);
}

// Lane i of each quarter of the result is the sum of that quarter of the i-th.
static inline F sums4(F a, F b, F c, F d) {
    const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));  // a02 b02 a13 b13
    const __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512d p = _mm512_castps_pd(x), q = _mm512_castps_pd(y);
    return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)))};
}
// The sums of each half's quarters: a's, then b's.
static inline F sum_of_halves(F a, F b) {
    return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xdd))};
}
static inline I sums4(I a, I b, I c, I d) {
    const __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(a.v, b.v), _mm512_unpackhi_epi32(a.v, b.v));
    const __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(c.v, d.v), _mm512_unpackhi_epi32(c.v, d.v));
    return {_mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y))};
}
static inline I sum_of_halves(I a, I b) {
    return {_mm512_add_epi32(_mm512_shuffle_i32x4(a.v, b.v, 0x88), _mm512_shuffle_i32x4(a.v, b.v, 0xdd))};
}
// The first half from p, the other from q.
static inline F load_halves(const float* p, const float* q) {
    return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p)), _mm256_loadu_ps(q), 1)};
}
static inline __m256i bytes_of_halves(const void* p, const void* q) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)), _mm_loadu_si128((const __m128i*)q), 1);
}
static inline F load_bf16_halves(const uint16_t* p, const uint16_t* q) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bytes_of_halves(p, q)), 16))};
}
static inline B load_b_halves(const uint8_t* p, const uint8_t* q) {
    return {_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)), _mm256_loadu_si256((const __m256i*)q), 1)};
}
static inline B load_words_halves(const int8_t* p, const int8_t* q) { return {_mm512_cvtepi8_epi16(bytes_of_halves(p, q))}; }
// The lanes of a half whose sums in pairs, of these in pairs, and so on, are what `sums4` and `sum_of_halves` make of them.
constexpr int kSumOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};

}  // namespace ISA
