// Functions over sixteen lanes, and writing a row in the form that the next product reads.
#pragma once
#include <math.h>

#include "kernels.h"

namespace ISA {

constexpr float LOG2E = 1.44269504f;

// exp to 2 ulp; below −87 it is 0 to float32's precision, above 88 it stays e⁸⁸.
static inline F vexp(F x) {
    x = vmin(vmax(x, set1(-87.3f)), set1(88.0f));
    const I n = nearest(x * set1(LOG2E));
    const F whole = to_float(n);
    F r = fma(whole, set1(-0.693359375f), x);
    r = fma(whole, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return p * pow2(n);
}

// 2ˣ for x ≤ 0, to 2.7e-6 of it; below −125 about 2⁻¹²⁵, still a normal number. Half the instructions of `vexp`.
static inline F exp2_below(F x) {
    x = vmax(x, set1(-125.0f));
    const F n = whole(x), r = x - n;
    F p = fma(set1(9.570100345e-3f), r, set1(5.591785908e-2f));
    p = fma(p, r, set1(2.402474433e-1f));
    p = fma(p, r, set1(6.931217909e-1f));
    return times_pow2(fma(p, r, set1(9.999992847e-1f)), n);
}

static inline F sigmoid(F x) { return inverse(set1(1.0f) + vexp(zero() - x)); }
static inline F vtanh(F x) { return set1(1.0f) - set1(2.0f) * inverse(vexp(x + x) + set1(1.0f)); }

static inline F activate(const Activated& a, F x) {
    switch (a.kind) {
        case ACT_SILU: return x * sigmoid(x);
        case ACT_GELU_TANH: return x * sigmoid(x * fma(x * x, set1(2.0f * 0.7978845608f * 0.044715f), set1(2.0f * 0.7978845608f)));
        case ACT_RELU: return vmax(x, zero());
        case ACT_XIELU: {  // x / 2, plus alpha · x² above 0 and limit · (eˣ − 1 − x) below
            const F low = vmin(x, zero()), high = vmax(x, zero());
            return fma(set1(0.5f), x, set1(a.alpha) * high * high + set1(a.limit) * (vexp(low) - set1(1.0f) - low));
        }
        case ACT_RELU2: { const F y = vmax(x, zero()); return y * y; }
        default: {  // gelu: x⁺ − ½·|x|·erfc(|x|/√2), erfc to 1.5e-7 (Abramowitz, Stegun 1964, 7.1.26)
            const F size = vabs(x), z = size * set1(0.70710678f), t = inverse(fma(z, set1(0.3275911f), set1(1.0f)));
            F p = fma(t, set1(1.061405429f), set1(-1.453152027f));
            p = fma(p, t, set1(1.421413741f));
            p = fma(p, t, set1(-0.284496736f));
            p = fma(p, t, set1(0.254829592f));
            return vmax(x, zero()) - set1(0.5f) * size * p * t * vexp(zero() - z * z);
        }
    }
}

static inline F gate_with(const Activated& a, F gate, F up) {
    if (a.kind != ACT_CLAMPED_SWIGLU) return activate(a, gate) * up;
    gate = vmin(gate, set1(a.limit));
    up = vmin(vmax(up, set1(-a.limit)), set1(a.limit));
    return gate * sigmoid(gate * set1(a.alpha)) * (up + set1(1.0f));
}

// Writes 32 values as group `g` of the row `out`, which has `size` values.
static inline void emit_group(int32_t form, uint8_t* out, int64_t size, int64_t g, const float* v) {
    const F a = load(v), b = load(v + 16);
    if (form == FORM_F32) {
        store((float*)out + g * GROUP, a);
        store((float*)out + g * GROUP + 16, b);
    } else if (form == FORM_BF16) {
        store_bf16((uint16_t*)out + g * GROUP, a);
        store_bf16((uint16_t*)out + g * GROUP + 16, b);
    } else {
        const float most = top(vmax(vabs(a), vabs(b)));
        const F inverse = set1(most > 0.0f ? 127.0f / most : 0.0f);
        const I p = nearest(a * inverse), q = nearest(b * inverse);
        store_bytes((int8_t*)out + g * GROUP, p);
        store_bytes((int8_t*)out + g * GROUP + 16, q);
        const int32_t halves[2] = {sum_bytes((int8_t*)out + g * GROUP), sum_bytes((int8_t*)out + g * GROUP + 16)};
        const int32_t total = halves[0] + halves[1];
        QGroup* meta = (QGroup*)(out + padded(size)) + g;
        meta->scale = most / 127.0f;
        meta->sum = (float)total * meta->scale;
        for (int i = 0; i < 2; i++) meta->halves[i] = (int16_t)halves[i];
        meta->minus128 = -128 * total;
    }
}

// Writes a whole row. v is padded with zeros up to the next multiple of 32.
static inline void emit_row(int32_t form, uint8_t* out, int64_t size, float* v) {
    if (form == FORM_F32) {
        for (int64_t i = 0; i < size; i++) ((float*)out)[i] = v[i];
        return;
    }
    for (int64_t i = size; i < padded(size); i++) v[i] = 0.0f;
    for (int64_t g = 0; g < padded(size) / GROUP; g++) emit_group(form, out, size, g, v + g * GROUP);
}

static inline void convert(const float* x, int64_t size, int32_t form, uint8_t* out) {
    const int64_t whole = form == FORM_F32 ? 0 : size / GROUP;
    for (int64_t g = 0; g < whole; g++) emit_group(form, out, size, g, x + g * GROUP);
    if (form == FORM_F32) {
        for (int64_t i = 0; i < size; i++) ((float*)out)[i] = x[i];
    } else if (whole * GROUP < size) {
        float t[GROUP] = {};
        for (int64_t i = whole * GROUP; i < size; i++) t[i - whole * GROUP] = x[i];
        emit_group(form, out, size, whole, t);
    }
}

}  // namespace ISA
