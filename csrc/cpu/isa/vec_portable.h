// Sixteen lanes in plain C++, for any machine. vec_avx512.h explains the names. The compiler vectorises them (SSE2, NEON).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EACH for (int i = 0; i < 16; i++)

namespace ISA {

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };
constexpr bool kFullTiles = false, kMemoryOperands = false;
constexpr bool kWords = false, kSigned8 = false;
constexpr bool kHasBf16 = false;

static inline F set1(float x) { F r; EACH r.v[i] = x; return r; }
static inline F zero() { return set1(0.0f); }
static inline F load(const float* p) { F r; memcpy(r.v, p, 64); return r; }
static inline void store(float* p, F a) { memcpy(p, a.v, 64); }
static inline F load_n(const float* p, int n) { F r; EACH r.v[i] = i < n ? p[i] : 0.0f; return r; }
static inline void store_n(float* p, F a, int n) { EACH if (i < n) p[i] = a.v[i]; }
static inline F operator+(F a, F b) { EACH a.v[i] += b.v[i]; return a; }
static inline F operator-(F a, F b) { EACH a.v[i] -= b.v[i]; return a; }
static inline F operator*(F a, F b) { EACH a.v[i] *= b.v[i]; return a; }
static inline F operator/(F a, F b) { EACH a.v[i] /= b.v[i]; return a; }
static inline F inverse(F x) { return set1(1.0f) / x; }
static inline F fma(F a, F b, F c) { EACH c.v[i] += a.v[i] * b.v[i]; return c; }
static inline F vmax(F a, F b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F vmin(F a, F b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F vabs(F a) { EACH a.v[i] = a.v[i] < 0 ? -a.v[i] : a.v[i]; return a; }
static inline float sum(F a) { float s = 0; EACH s += a.v[i]; return s; }
static inline float top(F a) { float s = a.v[0]; EACH s = s > a.v[i] ? s : a.v[i]; return s; }

static inline I iset1(int32_t x) { I r; EACH r.v[i] = x; return r; }
static inline I izero() { return iset1(0); }
static inline F to_float(I a) { F r; EACH r.v[i] = (float)a.v[i]; return r; }
static inline I nearest(F a) {  // adding 1.5 · 2²³ rounds to the nearest whole number, ties to even (|a| < 2²²)
    I r;
    EACH {
        volatile float t = a.v[i] + 12582912.0f;
        r.v[i] = (int32_t)(t - 12582912.0f);
    }
    return r;
}
static inline F pow2(I n) {
    F r;
    EACH {
        uint32_t bits = (uint32_t)(n.v[i] + 127) << 23;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
static inline F whole(F a) { return to_float(nearest(a)); }
static inline F times_pow2(F a, F n) { return a * pow2(nearest(n)); }  // n is whole
static inline void store_bytes(int8_t* p, I a) { EACH p[i] = (int8_t)(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]); }
static inline int32_t sum_bytes(const int8_t* p) { int32_t s = 0; EACH s += p[i]; return s; }  // of sixteen
static inline void store_words(int16_t* p, I a) { EACH p[i] = (int16_t)(a.v[i] > 32767 ? 32767 : a.v[i] < -32768 ? -32768 : a.v[i]); }
static inline F to_float(F a) { return a; }
static inline F load_i8(const int8_t* p) { F r; EACH r.v[i] = p[i]; return r; }
static inline F load_u4(const uint8_t* p, bool high) { F r; EACH r.v[i] = high ? p[i] >> 4 : p[i] & 15; return r; }
static inline F load_exponents(const uint8_t* p) {
    F r;
    EACH {
        const uint32_t bits = (uint32_t)p[i] << 23;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13, bits;
    float f;
    if (rest >= 0x0f800000) bits = rest + 0x70000000;  // infinity and NaN
    else if (rest >= 0x00800000) bits = rest + 0x38000000;
    else {  // subnormal: a multiple of 2⁻²⁴
        f = (float)(h & 0x7fff) * 5.9604644775390625e-08f;
        memcpy(&bits, &f, 4);
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
static inline F load_f16(const uint16_t* p) { F r; EACH r.v[i] = half_to_float(p[i]); return r; }
static inline float widen_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline F load_bf16(const uint16_t* p) { F r; EACH r.v[i] = widen_bf16(p[i]); return r; }
static inline void store_bf16(uint16_t* p, F a) {
    EACH {
        uint32_t x;
        memcpy(&x, &a.v[i], 4);
        p[i] = (uint16_t)((x + ((x >> 16) & 1) + 0x7fff) >> 16);
    }
}

// For tiles.
template <int J>
static inline F byte_of(B a) { F r; EACH r.v[i] = a.v[4 * i + J]; return r; }
static inline B pairs_of(F a, F b) {
    uint16_t x[16], y[16];
    store_bf16(x, a), store_bf16(y, b);
    B r;
    EACH memcpy(r.v + 4 * i, x + i, 2), memcpy(r.v + 4 * i + 2, y + i, 2);
    return r;
}
static inline B load_b(const uint8_t* p) { B r; memcpy(r.v, p, 64); return r; }
static inline void store_b(uint8_t* p, B a) { memcpy(p, a.v, 64); }
static inline B bzero() { B r; memset(r.v, 0, 64); return r; }
static inline B look_up(B codes, const uint8_t* table) { for (int i = 0; i < 64; i++) codes.v[i] = table[codes.v[i]]; return codes; }
// 64 bytes. Those that the mask marks are read from `from`, one after the other; the others are 128, which is number 0. `from`
// moves on, and up to 64 bytes are read.
static inline B expand(uint64_t mask, const uint8_t*& from) {
    B r;
    for (int i = 0; i < 64; i++) r.v[i] = 128;
    for (; mask; mask &= mask - 1) r.v[__builtin_ctzll(mask)] = *from++;
    return r;
}
static inline B low4(B a) { for (int i = 0; i < 64; i++) a.v[i] &= 15; return a; }
static inline B high4(B a) { for (int i = 0; i < 64; i++) a.v[i] >>= 4; return a; }
template <int LEFT>
static inline B with_bits(B a, B b, uint8_t mask) {
    for (int i = 0; i < 64; i++) a.v[i] |= (LEFT >= 0 ? b.v[i] << (LEFT >= 0 ? LEFT : 0) : b.v[i] >> (LEFT < 0 ? -LEFT : 0)) & mask;
    return a;
}
static inline I dot8(I a, B w, int32_t x) {
    int8_t v[4];
    memcpy(v, &x, 4);
    EACH a.v[i] += w.v[4 * i] * v[0] + w.v[4 * i + 1] * v[1] + w.v[4 * i + 2] * v[2] + w.v[4 * i + 3] * v[3];
    return a;
}
static inline I dot6(I a, B w, int32_t x) { return dot8(a, w, x); }
static inline F dot_pairs(F a, B w, B x) {
    EACH {
        uint16_t p[2], q[2];
        memcpy(p, w.v + 4 * i, 4);
        memcpy(q, x.v + 4 * i, 4);
        a.v[i] += widen_bf16(p[0]) * widen_bf16(q[0]);
        a.v[i] += widen_bf16(p[1]) * widen_bf16(q[1]);
    }
    return a;
}
static inline B load_words(const int8_t* p) {
    B r;
    for (int i = 0; i < 32; i++) {
        const int16_t word = p[i];
        memcpy(r.v + 2 * i, &word, 2);
    }
    return r;
}
static inline B repeat(uint32_t x) {
    B r;
    EACH memcpy(r.v + 4 * i, &x, 4);
    return r;
}
// a + Σ over each row's 2 signed 16-bit words of w times the 2 of x.
static inline I dot_words(I a, B w, B x) {
    EACH {
        int16_t p[2], q[2];
        memcpy(p, w.v + 4 * i, 4), memcpy(q, x.v + 4 * i, 4);
        a.v[i] += p[0] * q[0] + p[1] * q[1];
    }
    return a;
}
static inline F dot_bf16(F a, B w, uint32_t x) { return dot_pairs(a, w, repeat(x)); }
static inline void zip16(B a, B b, B* to) {
    for (int i = 0; i < 64; i++) to[i / 32].v[i % 32 / 2 * 4 + i % 2] = a.v[i], to[i / 32].v[i % 32 / 2 * 4 + 2 + i % 2] = b.v[i];
}
// Transposes sixteen rows of sixteen words: word i of row j goes to to[i * stride + j], for i below `count`.
__attribute__((always_inline)) static inline void transpose16(const uint32_t* from, uint32_t* to, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < 16; j++) to[i * stride + j] = from[16 * j + i];
}

// Lane i of each quarter of the result is the sum of that quarter of the i-th.
template <class V>
static inline auto sum_of_quarter(V a, int i) { return (a.v[i] + a.v[i + 1]) + (a.v[i + 2] + a.v[i + 3]); }
template <class V>
static inline V sums4(V a, V b, V c, V d) {
    V r;
    for (int i = 0; i < 16; i += 4) {
        r.v[i] = sum_of_quarter(a, i), r.v[i + 1] = sum_of_quarter(b, i);
        r.v[i + 2] = sum_of_quarter(c, i), r.v[i + 3] = sum_of_quarter(d, i);
    }
    return r;
}
// The sums of each half's quarters: a's, then b's.
template <class V>
static inline V sum_of_halves(V a, V b) {
    V r;
    EACH r.v[i] = (i < 8 ? a : b).v[i % 8 / 4 * 8 + i % 4] + (i < 8 ? a : b).v[i % 8 / 4 * 8 + i % 4 + 4];
    return r;
}
// The first half from p, the other from q.
static inline F load_halves(const float* p, const float* q) { F r; EACH r.v[i] = i < 8 ? p[i] : q[i - 8]; return r; }
static inline F load_bf16_halves(const uint16_t* p, const uint16_t* q) {
    F r;
    EACH r.v[i] = widen_bf16(i < 8 ? p[i] : q[i - 8]);
    return r;
}
static inline B load_b_halves(const uint8_t* p, const uint8_t* q) { B r; memcpy(r.v, p, 32), memcpy(r.v + 32, q, 32); return r; }
static inline B load_words_halves(const int8_t* p, const int8_t* q) {
    int8_t both[32];
    memcpy(both, p, 16), memcpy(both + 16, q, 16);
    return load_words(both);
}
// The lanes of a half whose sums in pairs, of these in pairs, and so on, are what `sums4` and `sum_of_halves` make of them.
constexpr int kSumOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};

}  // namespace ISA

#undef EACH
