// Whether products by tile registers come out right on this machine. A virtual machine may offer registers that it does not keep.
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pack.h"

namespace {

constexpr int64_t TOKENS = 31, ROWS = 24;  // two tiles that overlap, and a pair of panels of which the last is not full

struct Bytes {  // from a multiple of 64
    explicit Bytes(int64_t size) : all(size + 64) {}
    uint8_t* data() { return all.data() + (64 - (uintptr_t)all.data() % 64) % 64; }
    std::vector<uint8_t> all;
};

uint32_t mixed(int64_t i) { return (uint32_t)(i + 1) * 2654435761u >> 16; }

// Whole numbers of which each 32 have 127 as the largest, so that they are rounded to themselves.
std::vector<float> whole_numbers(int64_t count) {
    std::vector<float> v(count);
    for (int64_t i = 0; i < count; i++) v[i] = i % GROUP == 0 ? 127.0f : (float)(mixed(i) % 255) - 127.0f;
    return v;
}

// All sums are whole numbers below 2²⁴, so that no order of adding rounds: the results must be equal.
bool agree(int32_t kind, int64_t inner, const Kernels& tiles, const Kernels& base) {
    Bytes packed(Layout(kind, ROWS, inner).bytes);
    if (is_k(kind)) {  // Q6_K: 192 bytes of codes, 16 scales, a float16
        std::vector<uint8_t> blocks(ROWS * inner / (SUPER * GROUP) * block_bytes(kind));
        for (size_t i = 0; i < blocks.size(); i++) {
            const int64_t at = (int64_t)i % block_bytes(kind);
            blocks[i] = (uint8_t)(at < 192 ? mixed((int64_t)i) : at < 208 ? mixed((int64_t)i) % 16 : at == 208 ? 0 : 0x3c);
        }
        pack_blocks(kind, ROWS, inner, packed.data(), blocks.data(), ROWS, 0, nullptr);
    } else {
        pack_dense(kind, ROWS, inner, packed.data(), whole_numbers(ROWS * inner).data(), false, inner, ROWS, 0, nullptr);
    }
    const int64_t row = form_bytes(form_of(kind), inner);
    Bytes x(TOKENS * row);
    const std::vector<float> values = whole_numbers(TOKENS * inner);
    for (int64_t t = 0; t < TOKENS; t++) base.convert(&values[t * inner], inner, form_of(kind), x.data() + t * row);
    std::vector<float> y[2];
    for (int i = 0; i < 2; i++) {
        y[i].resize(TOKENS * ROWS);
        const LinearArgs a{kind, ROWS, inner, packed.data(), nullptr, x.data(), row, y[i].data(), ROWS, false};
        const Kernels& kernels = i ? base : tiles;
        Bytes scratch(4 * kernels.linear_scratch(a));
        kernels.linear(a, 0, 1, 0, TOKENS, (float*)scratch.data());
    }
    return y[0] == y[1];
}

}  // namespace

// The three shapes of registers: 32 and 16 numbers of 8 bits, and 32 of bfloat16.
bool tiles_agree(const Kernels& tiles, const Kernels& base) {
    return agree(KIND_I8, 3 * GROUP, tiles, base) && agree(KIND_Q6K, SUPER * GROUP, tiles, base) && agree(KIND_BF16, 3 * GROUP, tiles, base);
}
