// Sixteen lanes in two AVX2 registers. vec_avx512.h explains the names.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "spread.h"

namespace ISA {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };
constexpr bool kFullTiles = false, kMemoryOperands = true;
constexpr bool kHasBf16 = false;

static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline F load_n(const float* p, int n) {
    if (n >= 16) return load(p);
    float t[16] = {};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return load(t);
}
static inline void store_n(float* p, F x, int n) {
    if (n >= 16) { store(p, x); return; }
    float t[16];
    store(t, x);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
static inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F inverse(F x) { return set1(1.0f) / x; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F vmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F vmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F vabs(F x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline float sum(F x) {
    __m256 v = _mm256_add_ps(x.a, x.b);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_shuffle_ps(w, w, 1)));
}
static inline float top(F x) {
    __m256 v = _mm256_max_ps(x.a, x.b);
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_shuffle_ps(w, w, 1)));
}

static inline I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I iset1(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I nearest(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline __m256 pow2_half(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline F pow2(I n) { return {pow2_half(n.a), pow2_half(n.b)}; }
static inline F whole(F a) { return to_float(nearest(a)); }
static inline F times_pow2(F a, F n) { return a * pow2(nearest(n)); }  // n is whole
static inline __m128i narrow16(__m256i x) {  // 8 int32 → 8 int16, saturated
    return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
static inline void store_bytes(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(narrow16(x.a), narrow16(x.b))); }
static inline void store_words(int16_t* p, I x) {
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}
static inline F to_float(F x) { return x; }
static inline F load_i8(const int8_t* p) {
    __m128i v = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
static inline F widen_bytes(__m128i v) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
static inline F load_u4(const uint8_t* p, bool high) {
    const __m128i v = _mm_loadu_si128((const __m128i*)p);
    return widen_bytes(_mm_and_si128(high ? _mm_srli_epi16(v, 4) : v, _mm_set1_epi8(15)));
}
static inline F load_exponents(const uint8_t* p) {
    const __m128i v = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(v), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)), 23))};
}
static inline F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m256 widen_bf16(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
static inline F load_bf16(const uint16_t* p) {
    return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m128i round_bf16(__m256 v) {
    __m256i x = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    x = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
static inline void store_bf16(uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, round_bf16(x.a));
    _mm_storeu_si128((__m128i*)(p + 8), round_bf16(x.b));
}

static inline B load_b(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline void store_b(uint8_t* p, B x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
static inline B bzero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline B look_up(B codes, const uint8_t* table) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(t, codes.a), _mm256_shuffle_epi8(t, codes.b)};
}
static inline __m256i expand_half(uint32_t mask, const uint8_t*& from) {
    const __m128i low = spread16(mask & 0xffff, from);
    return _mm256_xor_si256(_mm256_set_m128i(spread16(mask >> 16, from), low), _mm256_set1_epi8(-128));
}
static inline B expand(uint64_t mask, const uint8_t*& from) {
    const __m256i a = expand_half((uint32_t)mask, from);
    return {a, expand_half((uint32_t)(mask >> 32), from)};
}
static inline B low4(B x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline B high4(B x) { return low4({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
template <int LEFT>
static inline B with_bits(B x, B y, uint8_t mask) {
    constexpr int left = LEFT >= 0 ? LEFT : 0, right = LEFT < 0 ? -LEFT : 0;
    const __m256i m = _mm256_set1_epi8((char)mask);
    const __m256i a = _mm256_srli_epi16(_mm256_slli_epi16(y.a, left), right);
    const __m256i b = _mm256_srli_epi16(_mm256_slli_epi16(y.b, left), right);
    return {_mm256_or_si256(x.a, _mm256_and_si256(a, m)), _mm256_or_si256(x.b, _mm256_and_si256(b, m))};
}
#if defined(__AVXVNNI__)
constexpr bool kWords = false, kSigned8 = false;
static inline I dot8(I s, B w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    return {_mm256_dpbusd_avx_epi32(s.a, w.a, v), _mm256_dpbusd_avx_epi32(s.b, w.b, v)};
}
static inline I dot6(I s, B w, int32_t x) { return dot8(s, w, x); }
#else
constexpr bool kWords = true, kSigned8 = true;
// maddubs adds two products of an unsigned and a signed byte in 16 bits. Of codes below 64 the sums of several inputs fit into such
// words; `add_joined` adds up each row's two.
static inline I add_words(I words, B w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    I sum = {_mm256_add_epi16(words.a, _mm256_maddubs_epi16(w.a, v)), _mm256_add_epi16(words.b, _mm256_maddubs_epi16(w.b, v))};
    __asm__("" : "+x"(sum.a), "+x"(sum.b));  // or the compiler computes all products first, and keeps them on the stack
    return sum;
}
static inline I add_joined(I s, I words) {
    const __m256i one = _mm256_set1_epi16(1);
    I all = {_mm256_add_epi32(s.a, _mm256_madd_epi16(words.a, one)), _mm256_add_epi32(s.b, _mm256_madd_epi16(words.b, one))};
    __asm__("" : "+x"(all.a), "+x"(all.b));
    return all;
}
// Of 8 bits the code less 128: its magnitude times the input with its sign. Two such products are at most 2 · 128 · 127.
static inline __m256i signed_words(__m256i w, __m256i v) {
    const __m256i number = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(v, number));
}
static inline I dot8(I s, B w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    return add_joined(s, {signed_words(w.a, v), signed_words(w.b, v)});
}
#endif
static inline __m256 pairs_half(__m256 s, __m256i w, __m256i x) {
    const __m256i high = _mm256_set1_epi32((int32_t)0xffff0000);
    s = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), s);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, high)), _mm256_castsi256_ps(_mm256_and_si256(x, high)), s);
}
static inline F dot_pairs(F s, B w, B x) { return {pairs_half(s.a, w.a, x.a), pairs_half(s.b, w.b, x.b)}; }
// a + Σ over each row's 2 signed 16-bit words of w times the 2 of x.
static inline I dot_words(I s, B w, B x) {
    return {_mm256_add_epi32(s.a, _mm256_madd_epi16(w.a, x.a)), _mm256_add_epi32(s.b, _mm256_madd_epi16(w.b, x.b))};
}
static inline B load_words(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + 1))};
}
static inline B repeat(uint32_t x) {
    const __m256i v = _mm256_set1_epi32((int32_t)x);
    return {v, v};
}
static inline F dot_bf16(F s, B w, uint32_t x) { return dot_pairs(s, w, repeat(x)); }
static inline void zip16(B x, B y, B* to) {  // unpacking works within each 128-bit lane
    __m256i low = _mm256_unpacklo_epi16(x.a, y.a), high = _mm256_unpackhi_epi16(x.a, y.a);
    to[0] = {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
    low = _mm256_unpacklo_epi16(x.b, y.b), high = _mm256_unpackhi_epi16(x.b, y.b);
    to[1] = {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}
// Transposes sixteen rows of sixteen words: word i of row j goes to to[i * stride + j], for i below `count`.
__attribute__((always_inline)) static inline void transpose16(const uint32_t* from, uint32_t* to, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < 16; j++) to[i * stride + j] = from[16 * j + i];
}

// Lane i of each quarter of the result is the sum of that quarter of the i-th.
static inline __m256 sums4_half(__m256 a, __m256 b, __m256 c, __m256 d) {
    return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
}
static inline F sums4(F a, F b, F c, F d) { return {sums4_half(a.a, b.a, c.a, d.a), sums4_half(a.b, b.b, c.b, d.b)}; }
// The sums of each half's quarters: a's, then b's.
static inline __m256 join_quarters(__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
static inline F sum_of_halves(F a, F b) { return {join_quarters(a.a, a.b), join_quarters(b.a, b.b)}; }
static inline __m256i sums4_half(__m256i a, __m256i b, __m256i c, __m256i d) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
}
static inline I sums4(I a, I b, I c, I d) { return {sums4_half(a.a, b.a, c.a, d.a), sums4_half(a.b, b.b, c.b, d.b)}; }
static inline __m256i join_quarters(__m256i x, __m256i y) {
    return _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
}
static inline I sum_of_halves(I a, I b) { return {join_quarters(a.a, a.b), join_quarters(b.a, b.b)}; }
// The first half from p, the other from q.
static inline F load_halves(const float* p, const float* q) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(q)}; }
static inline F load_bf16_halves(const uint16_t* p, const uint16_t* q) {
    return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)q))};
}
static inline B load_b_halves(const uint8_t* p, const uint8_t* q) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)q)};
}
static inline B load_words_halves(const int8_t* p, const int8_t* q) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)q))};
}
// The lanes of a half whose sums in pairs, of these in pairs, and so on, are what `sums4` and `sum_of_halves` make of them.
constexpr int kSumOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};

}  // namespace ISA
