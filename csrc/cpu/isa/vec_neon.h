// Sixteen lanes in four NEON registers. vec_avx512.h explains the names.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

namespace ISA {

struct F { float32x4_t a, b, c, d; };
struct I { int32x4_t a, b, c, d; };
struct B { uint8x16_t a, b, c, d; };
constexpr bool kFullTiles = false, kMemoryOperands = false;

// The same function on each register of one, two or three values.
#define EACH1(f, x) {f(x.a), f(x.b), f(x.c), f(x.d)}
#define EACH2(f, x, y) {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}
#define EACH3(f, x, y, z) {f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)}

static inline F set1(float x) { const float32x4_t v = vdupq_n_f32(x); return {v, v, v, v}; }
static inline F zero() { return set1(0.0f); }
static inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
static inline void store(float* p, F x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d); }
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
static inline F operator+(F x, F y) { return EACH2(vaddq_f32, x, y); }
static inline F operator-(F x, F y) { return EACH2(vsubq_f32, x, y); }
static inline F operator*(F x, F y) { return EACH2(vmulq_f32, x, y); }
static inline F operator/(F x, F y) { return EACH2(vdivq_f32, x, y); }
static inline F inverse(F x) { return set1(1.0f) / x; }
static inline F fma(F x, F y, F z) { return EACH3(vfmaq_f32, z, x, y); }
static inline F vmax(F x, F y) { return EACH2(vmaxq_f32, x, y); }
static inline F vmin(F x, F y) { return EACH2(vminq_f32, x, y); }
static inline F vabs(F x) { return EACH1(vabsq_f32, x); }
static inline float sum(F x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d))); }
static inline float top(F x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }

static inline I iset1(int32_t x) { const int32x4_t v = vdupq_n_s32(x); return {v, v, v, v}; }
static inline I izero() { return iset1(0); }
static inline F to_float(I x) { return EACH1(vcvtq_f32_s32, x); }
static inline I nearest(F x) { return EACH1(vcvtnq_s32_f32, x); }  // ties to even
static inline float32x4_t pow2_quarter(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
static inline F pow2(I n) { return EACH1(pow2_quarter, n); }
static inline F whole(F a) { return to_float(nearest(a)); }
static inline F times_pow2(F a, F n) { return a * pow2(nearest(n)); }  // n is whole
static inline void store_bytes(int8_t* p, I x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)), high = vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
static inline int32_t sum_bytes(const int8_t* p) { return vaddlvq_s8(vld1q_s8(p)); }
static inline void store_words(int16_t* p, I x) {
    vst1q_s16(p, vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)));
    vst1q_s16(p + 8, vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d)));
}
static inline F to_float(F x) { return x; }
static inline F load_i8(const int8_t* p) {
    const int8x16_t v = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
    return to_float(I{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)});
}
static inline I widen_bytes(uint8x16_t v) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_high_u8(v);
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))};
}
static inline F load_u4(const uint8_t* p, bool high) {
    const uint8x16_t v = vld1q_u8(p);
    return to_float(widen_bytes(high ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15))));
}
static inline float32x4_t with_exponent(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(n, 23)); }
static inline F load_exponents(const uint8_t* p) {
    const I n = widen_bytes(vld1q_u8(p));
    return EACH1(with_exponent, n);
}
static inline float32x4_t widen_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline F load_f16(const uint16_t* p) { return {widen_f16(p), widen_f16(p + 4), widen_f16(p + 8), widen_f16(p + 12)}; }
static inline float32x4_t widen_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline F load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 4), widen_bf16(p + 8), widen_bf16(p + 12)}; }
static inline uint16x4_t round_bf16(float32x4_t v) {
    const uint32x4_t x = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(x, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}
static inline void store_bf16(uint16_t* p, F x) {
    vst1q_u16(p, vcombine_u16(round_bf16(x.a), round_bf16(x.b)));
    vst1q_u16(p + 8, vcombine_u16(round_bf16(x.c), round_bf16(x.d)));
}

static inline B load_b(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
static inline void store_b(uint8_t* p, B x) { vst1q_u8(p, x.a), vst1q_u8(p + 16, x.b), vst1q_u8(p + 32, x.c), vst1q_u8(p + 48, x.d); }
static inline B bset1(uint8_t x) { const uint8x16_t v = vdupq_n_u8(x); return {v, v, v, v}; }
static inline B bzero() { return bset1(0); }
static inline B look_up(B codes, const uint8_t* table) {
    const uint8x16_t t = vld1q_u8(table);
    return {vqtbl1q_u8(t, codes.a), vqtbl1q_u8(t, codes.b), vqtbl1q_u8(t, codes.c), vqtbl1q_u8(t, codes.d)};
}
static inline B expand(uint64_t mask, const uint8_t*& from) {
    uint8_t t[64];
    store_b(t, bset1(128));
    for (; mask; mask &= mask - 1) t[__builtin_ctzll(mask)] = *from++;
    return load_b(t);
}
static inline B low4(B x) { const B m = bset1(15); return EACH2(vandq_u8, x, m); }
static inline uint8x16_t high4_quarter(uint8x16_t x) { return vshrq_n_u8(x, 4); }
static inline B high4(B x) { return EACH1(high4_quarter, x); }
template <int LEFT>
static inline uint8x16_t with_bits_quarter(uint8x16_t x, uint8x16_t y, uint8x16_t mask) {  // a shift by less than 0 goes right
    return vorrq_u8(x, vandq_u8(vshlq_u8(y, vdupq_n_s8(LEFT)), mask));
}
template <int LEFT>
static inline B with_bits(B x, B y, uint8_t mask) { const B m = bset1(mask); return EACH3(with_bits_quarter<LEFT>, x, y, m); }

static inline int32x4_t dot_signed(int32x4_t s, uint8x16_t w, int8x16_t v) { return vdotq_s32(s, vreinterpretq_s8_u8(w), v); }
static inline I dot6(I s, B w, int32_t x) {  // bytes below 64 are the same signed and unsigned
    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(x));
    return {dot_signed(s.a, w.a, v), dot_signed(s.b, w.b, v), dot_signed(s.c, w.c, v), dot_signed(s.d, w.d, v)};
}
constexpr bool kWords = false;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSigned8 = false;
static inline I dot8(I s, B w, int32_t x) {
    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(x));
    return {vusdotq_s32(s.a, w.a, v), vusdotq_s32(s.b, w.b, v), vusdotq_s32(s.c, w.c, v), vusdotq_s32(s.d, w.d, v)};
}
#else
constexpr bool kSigned8 = true;
static inline I dot8(I s, B w, int32_t x) {
    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(x));
    const B half = bset1(128), y = EACH2(veorq_u8, w, half);
    return {dot_signed(s.a, y.a, v), dot_signed(s.b, y.b, v), dot_signed(s.c, y.c, v), dot_signed(s.d, y.d, v)};
}
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kHasBf16 = true;
static inline float32x4_t pairs_quarter(float32x4_t s, uint8x16_t w, uint8x16_t x) {
    return vbfdotq_f32(s, vreinterpretq_bf16_u8(w), vreinterpretq_bf16_u8(x));
}
#else
constexpr bool kHasBf16 = false;
static inline float32x4_t even_bf16(uint8x16_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x), 16)); }
static inline float32x4_t odd_bf16(uint8x16_t x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x), vdupq_n_u32(0xffff0000)));
}
static inline float32x4_t pairs_quarter(float32x4_t s, uint8x16_t w, uint8x16_t x) {
    return vfmaq_f32(vfmaq_f32(s, even_bf16(w), even_bf16(x)), odd_bf16(w), odd_bf16(x));
}
#endif
static inline F dot_pairs(F s, B w, B x) { return EACH3(pairs_quarter, s, w, x); }
// a + Σ over each row's 2 signed 16-bit words of w times the 2 of x.
static inline int32x4_t words_quarter(int32x4_t s, uint8x16_t w, uint8x16_t x) {
    const int16x8_t p = vreinterpretq_s16_u8(w), q = vreinterpretq_s16_u8(x);
    return vaddq_s32(s, vpaddq_s32(vmull_s16(vget_low_s16(p), vget_low_s16(q)), vmull_high_s16(p, q)));
}
static inline I dot_words(I s, B w, B x) { return EACH3(words_quarter, s, w, x); }
static inline B load_words(const int8_t* p) {
    const int8x16_t x = vld1q_s8(p), y = vld1q_s8(p + 16);
    return {vreinterpretq_u8_s16(vmovl_s8(vget_low_s8(x))), vreinterpretq_u8_s16(vmovl_high_s8(x)),
            vreinterpretq_u8_s16(vmovl_s8(vget_low_s8(y))), vreinterpretq_u8_s16(vmovl_high_s8(y))};
}
static inline B repeat(uint32_t x) {
    const uint8x16_t v = vreinterpretq_u8_u32(vdupq_n_u32(x));
    return {v, v, v, v};
}
static inline F dot_bf16(F s, B w, uint32_t x) { return dot_pairs(s, w, repeat(x)); }
static inline uint8x16_t zip_low(uint8x16_t x, uint8x16_t y) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(x), vreinterpretq_u16_u8(y)));
}
static inline uint8x16_t zip_high(uint8x16_t x, uint8x16_t y) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(x), vreinterpretq_u16_u8(y)));
}
static inline void zip16(B x, B y, B* to) {
    to[0] = {zip_low(x.a, y.a), zip_high(x.a, y.a), zip_low(x.b, y.b), zip_high(x.b, y.b)};
    to[1] = {zip_low(x.c, y.c), zip_high(x.c, y.c), zip_low(x.d, y.d), zip_high(x.d, y.d)};
}
// Transposes sixteen rows of sixteen words: word i of row j goes to to[i * stride + j], for i below `count`.
__attribute__((always_inline)) static inline void transpose16(const uint32_t* from, uint32_t* to, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < 16; j++) to[i * stride + j] = from[16 * j + i];
}
// Lane i of each quarter of the result is the sum of that quarter of the i-th.
static inline float32x4_t sums4_quarter(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}
static inline F sums4(F a, F b, F c, F d) {
    return {sums4_quarter(a.a, b.a, c.a, d.a), sums4_quarter(a.b, b.b, c.b, d.b), sums4_quarter(a.c, b.c, c.c, d.c),
            sums4_quarter(a.d, b.d, c.d, d.d)};
}
// The sums of each half's quarters: a's, then b's.
static inline F sum_of_halves(F x, F y) {
    return {vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d), vaddq_f32(y.a, y.b), vaddq_f32(y.c, y.d)};
}
static inline int32x4_t sums4_quarter(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
static inline I sums4(I a, I b, I c, I d) {
    return {sums4_quarter(a.a, b.a, c.a, d.a), sums4_quarter(a.b, b.b, c.b, d.b), sums4_quarter(a.c, b.c, c.c, d.c),
            sums4_quarter(a.d, b.d, c.d, d.d)};
}
static inline I sum_of_halves(I x, I y) {
    return {vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d), vaddq_s32(y.a, y.b), vaddq_s32(y.c, y.d)};
}
// The first half from p, the other from q.
static inline F load_halves(const float* p, const float* q) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(q), vld1q_f32(q + 4)}; }
static inline F load_bf16_halves(const uint16_t* p, const uint16_t* q) { return {widen_bf16(p), widen_bf16(p + 4), widen_bf16(q), widen_bf16(q + 4)}; }
static inline B load_b_halves(const uint8_t* p, const uint8_t* q) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(q), vld1q_u8(q + 16)}; }
static inline B load_words_halves(const int8_t* p, const int8_t* q) {
    const int8x16_t x = vld1q_s8(p), y = vld1q_s8(q);
    return {vreinterpretq_u8_s16(vmovl_s8(vget_low_s8(x))), vreinterpretq_u8_s16(vmovl_high_s8(x)),
            vreinterpretq_u8_s16(vmovl_s8(vget_low_s8(y))), vreinterpretq_u8_s16(vmovl_high_s8(y))};
}
// The lanes of a half whose sums in pairs, of these in pairs, and so on, are what `sums4` and `sum_of_halves` make of them.
constexpr int kSumOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};

#undef EACH1
#undef EACH2
#undef EACH3

}  // namespace ISA
