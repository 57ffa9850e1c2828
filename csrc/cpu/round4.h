// Rounds a group of weights to 4 bits: codes 0 … 15, a scale and a minimum, such that the squared error is small.
//
// Steps that reach from the group's smallest number to its largest are wide if there is one outlier, and then most numbers are
// rounded badly. So several widths are tried, as llama.cpp does for Q4_K. Each gives codes, and a least-squares fit gives the best
// scale and minimum for these codes. With normally distributed numbers the squared error is 45 % below that of rounding to a
// symmetric range (28 % in groups of 128).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t to_half(float f) {  // rounds to nearest even; a number beyond float16's range becomes its largest
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint16_t sign = (uint16_t)(x >> 16 & 0x8000);
    const float a = fabsf(f);
    if (!(a < 65504.0f)) return (uint16_t)(sign | 0x7bff);
    if (a < 0x1p-14f) return (uint16_t)(sign | (uint16_t)lrintf(a * 0x1p24f));
    x &= 0x7fffffff;
    return (uint16_t)(sign | (((x + 0xfff + (x >> 13 & 1)) >> 13) - (112 << 10)));
}

// Compiled for AVX2 and AVX-512 as well, and chosen when the library is loaded: the arithmetic is the same, in more lanes.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE __attribute__((always_inline)) inline

struct Round4 {
    enum { MOST = 128 };
    float scale, minimum;
    uint8_t codes[MOST];

    // 32 or 128 numbers. `halves`: scale and minimum are float16 numbers.
    CLONES void of_32(const float* x, bool halves) { of<2>(x, halves); }
    CLONES void of_128(const float* x, bool halves) { of<8>(x, halves); }

   private:
    static constexpr int STEPS = 10;
    typedef float Lanes __attribute__((vector_size(64)));
    typedef int32_t Ints __attribute__((vector_size(64)));

    template <int N>
    INLINE void of(const float* numbers, bool halves) {
        Lanes x[N], low, high, sums = {};
        memcpy(x, numbers, sizeof x);
        low = high = x[0];
        for (int i = 0; i < N; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high, sums += x[i];
        float least = low[0], most = high[0];
        for (int i = 1; i < 16; i++) least = low[i] < least ? low[i] : least, most = high[i] > most ? high[i] : most;
        const float sum = total(sums), n = 16.0f * N;
        scale = 0.0f, minimum = kept(least, halves);
        memset(codes, 0, sizeof codes);
        if (!(most > least)) return;
        float best = INFINITY;
        for (int step = 0; step <= STEPS; step++) {
            float s = (most - least) / (14.0f + 0.2f * (float)step), m = least;
            Lanes ones = {}, squares = {}, products = {}, errors = {};
            for (int i = 0; i < N; i++) {
                Lanes code;
                code_of(x[i], 1.0f / s, m, code);
                ones += code, squares += code * code, products += code * x[i];
            }
            // The line through the numbers over their codes.
            const float a = total(ones), b = total(squares), c = total(products), d = n * b - a * a;
            if (d > 0.0f) s = (n * c - sum * a) / d, m = (b * sum - a * c) / d;
            s = kept(s, halves), m = kept(m, halves);
            if (!(s > 0.0f)) continue;
            for (int i = 0; i < N; i++) {
                Lanes error;
                code_of(x[i], 1.0f / s, m, error);
                error = error * s + m - x[i];
                errors += error * error;
            }
            const float error = total(errors);
            if (error < best) best = error, scale = s, minimum = m;
        }
        for (int i = 0; i < N && best < INFINITY; i++) {
            Lanes code;
            code_of(x[i], 1.0f / scale, minimum, code);
            for (int j = 0; j < 16; j++) codes[16 * i + j] = (uint8_t)code[j];
        }
    }

    static INLINE float kept(float f, bool halves) { return halves ? isa_pack::half_to_float(to_half(f)) : f; }

    static INLINE void code_of(const Lanes& x, float inverse, float m, Lanes& code) {
        code = (x - m) * inverse;
        code = code > 0.0f ? code : Lanes{};
        code = code < 15.0f ? code : Lanes{} + 15.0f;
        code = __builtin_convertvector(__builtin_convertvector(code + 0.5f, Ints), Lanes);
    }

    static INLINE float total(Lanes& x) {
        x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
        x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
        x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
        return x[0] + x[1];
    }
};
