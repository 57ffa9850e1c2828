// Norms, activations, rotary embedding and writes to the KV cache, row by row. All arithmetic is float32.
#pragma once
#include <string.h>

#include "emit.h"
#include "kernels.h"

namespace ISA {

static void norm(const NormArgs& a, int64_t row, float* scratch) {
    const float* x = a.x + row * a.x_stride;
    const int64_t n = a.size;
    if (a.residual) {
        float* total = a.residual + row * a.residual_stride;
        for (int64_t i = 0; i < n; i += 16) {
            const int left = (int)(n - i < 16 ? n - i : 16);
            store_n(total + i, load_n(total + i, left) + load_n(x + i, left), left);
        }
        x = total;
    }
    F squares = zero(), values = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F v = load_n(x + i, (int)(n - i < 16 ? n - i : 16));
        values = values + v;
        squares = fma(v, v, squares);
    }
    float mean = 0.0f, variance = sum(squares) / n;
    if (a.layer) {
        mean = sum(values) / n;
        F spread = zero();
        for (int64_t i = 0; i < n; i += 16) {
            const int left = (int)(n - i < 16 ? n - i : 16);
            float centred[16];
            store(centred, load_n(x + i, left) - set1(mean));
            const F v = load_n(centred, left);
            spread = fma(v, v, spread);
        }
        variance = sum(spread) / n;
    }
    const F scale = set1(1.0f / sqrtf(variance + a.eps)), offset = set1(a.offset), centre = set1(mean);
    for (int64_t i = 0; i < n; i += 16) {
        const int left = (int)(n - i < 16 ? n - i : 16);
        F v = (load_n(x + i, left) - centre) * scale * (load_n(a.weight + i, left) + offset);
        if (a.bias) v = v + load_n(a.bias + i, left);
        store_n(scratch + i, v, left);
    }
    emit_row(a.form, a.out + row * a.out_stride, n, scratch);
}

static void activation(const ActivationArgs& a, int64_t row, float* scratch) {
    const float *x = a.x + row * a.x_stride, *up = x + a.size;
    for (int64_t i = 0; i < a.size; i += 16) {
        const int left = (int)(a.size - i < 16 ? a.size - i : 16);
        const F v = load_n(x + i, left);
        store_n(scratch + i, a.gated ? gate_with(a.activation, v, load_n(up + i, left)) : activate(a.activation, v), left);
    }
    emit_row(a.form, a.out + row * a.out_stride, a.size, scratch);
}

static inline void norm_head(float* x, const float* weight, int64_t n, float eps, float offset) {
    float squares = 0.0f;
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(squares / n + eps);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale * (weight ? weight[i] + offset : 1.0f);
}

static inline void turn_head(float* __restrict__ x, const float* __restrict__ cos_sin, int64_t rotary, bool interleaved) {
    const int64_t half = rotary / 2;
    const float *c = cos_sin, *s = cos_sin + half;
    if (interleaved) {
        for (int64_t i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * c[i] - b * s[i];
            x[2 * i + 1] = b * c[i] + a * s[i];
        }
    } else {
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * c[i] - b * s[i];
            x[i + half] = b * c[i] + a * s[i];
        }
    }
}

static inline void write_cache(const AttentionArgs& a, uint8_t* cache, const float* scales, int64_t head, int64_t slot,
                               const float* x) {
    const int64_t d = a.head_dim;
    const int64_t at = ((slot / a.block_size * a.num_kv_heads + head) * a.block_size + slot % a.block_size) * d;
    if (a.cache == CACHE_F32) {
        memcpy((float*)cache + at, x, d * 4);
        return;
    }
    const float inverse = scales ? 1.0f / scales[head] : 1.0f;
    for (int64_t i = 0; i < d; i += 16) {
        const int left = (int)(d - i < 16 ? d - i : 16);
        const F v = load_n(x + i, left);
        alignas(64) uint16_t wide[16];
        int8_t narrow[16];
        if (a.cache == CACHE_BF16) {
            store_bf16(wide, v);
            memcpy((uint16_t*)cache + at + i, wide, 2 * left);
        } else {
            store_bytes(narrow, nearest(vmin(vmax(v * set1(inverse), set1(-127.0f)), set1(127.0f))));
            memcpy(cache + at + i, narrow, left);
        }
    }
}

// Rotates q in place in qkv, and writes k, rotated, and v to the cache. `scratch` has room for a head.
static void rope_and_cache(const AttentionArgs& a, int64_t token, float* scratch) {
    float* row = a.qkv + token * a.qkv_stride;
    const int64_t d = a.head_dim, heads = a.num_heads + a.num_kv_heads;
    if (!a.own_values || a.value_eps >= 0)
        for (int64_t h = 0; h < a.num_kv_heads; h++) {
            memcpy(scratch, row + (a.own_values ? heads + h : a.num_heads + h) * d, d * 4);
            if (a.value_eps >= 0) norm_head(scratch, nullptr, d, a.value_eps, 0.0f);
            write_cache(a, a.v, a.v_scale, h, a.slots[token], scratch);
        }
    for (int64_t h = 0; h < heads; h++) {
        float* x = row + h * d;
        const float* weight = h < a.num_heads ? a.q_norm : a.k_norm;
        if (weight && !a.norm_after) norm_head(x, weight, d, a.norm_eps, a.norm_offset);
        if (a.cos_sin) turn_head(x, a.cos_sin + a.positions[token] * a.rotary_dim, a.rotary_dim, a.interleaved);
        if (weight && a.norm_after) norm_head(x, weight, d, a.norm_eps, a.norm_offset);
    }
    for (int64_t h = 0; h < a.num_kv_heads; h++) {
        write_cache(a, a.k, a.k_scale, h, a.slots[token], row + (a.num_heads + h) * d);
        if (a.own_values && a.value_eps < 0) write_cache(a, a.v, a.v_scale, h, a.slots[token], row + (heads + h) * d);
    }
}

// A token of latent attention. Writes the key's row [rotary numbers, normed latent] to the cache, the heads' rotated numbers to
// their queries, and their nope_dim numbers, which a product will take to the latents' space, to `plain`. `scratch` has room for a
// key and all heads' nope_dim numbers, padded.
static void latent_row(const AttentionArgs& a, const LatentArgs& l, int64_t token, float* scratch) {
    const int64_t rotary = a.rotary_dim, width = l.nope_dim + rotary;
    const float *q = l.q + token * l.q_stride, *row = l.row + token * l.row_stride;
    const float* cos_sin = a.cos_sin + a.positions[token] * rotary;
    float *key = scratch, *plain = scratch + padded(a.head_dim);
    memcpy(key, row + l.rank, rotary * 4);
    memcpy(key + rotary, row, l.rank * 4);
    turn_head(key, cos_sin, rotary, a.interleaved);
    norm_head(key + rotary, l.norm, l.rank, a.norm_eps, 0.0f);
    write_cache(a, a.k, nullptr, 0, a.slots[token], key);
    for (int64_t h = 0; h < a.num_heads; h++) {
        float* query = l.queries + token * l.queries_stride + h * a.head_dim;
        memcpy(plain + h * l.nope_dim, q + h * width, l.nope_dim * 4);
        memcpy(query, q + h * width + l.nope_dim, rotary * 4);
        turn_head(query, cos_sin, rotary, a.interleaved);
    }
    emit_row(l.form, l.plain + token * l.plain_stride, a.num_heads * l.nope_dim, plain);
}

static float largest(const float* x, int64_t size) {
    F most = set1(-INFINITY);
    int64_t i = 0;
    for (; i + 64 <= size; i += 64)
        most = vmax(vmax(vmax(load(x + i), load(x + i + 16)), vmax(load(x + i + 32), load(x + i + 48))), most);
    float best = top(most);
    for (; i < size; i++) best = x[i] > best ? x[i] : best;
    return best;
}

static int64_t argmax(const float* x, int64_t size) {  // the first of equals
    const float best = largest(x, size);
    int64_t i = 0;
    while (i + 64 <= size && largest(x + i, 64) != best) i += 64;
    for (; i < size; i++)
        if (x[i] == best) return i;
    return 0;
}

}  // namespace ISA
