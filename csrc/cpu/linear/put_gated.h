// Writes gated activations, for the kernels of products.
#pragma once
#include "emit.h"
#include "kernels.h"

namespace ISA {

// Writes the activation of `count` tokens' gate and up as group `pair` of their rows. SiLU has an instance of its own, since to
// choose the function for every sixteen numbers takes as long as to compute it.
template <bool SILU>
static inline void put_gated(const GatedArgs& g, int64_t pair, int64_t token, int count, float* gate, const float* up) {
    for (int i = 0; i < count; i++) {
        float* v = gate + i * GROUP;
        _Pragma("GCC unroll 2") for (int j = 0; j < GROUP; j += 16) {
            const F a = load(v + j), b = load(up + i * GROUP + j);
            store(v + j, SILU ? a * sigmoid(a) * b : gate_with(g.activation, a, b));
        }
        emit_group(g.form, g.out + (token + i) * g.out_stride, g.linear.rows / 2, pair, v);
    }
}

}  // namespace ISA
