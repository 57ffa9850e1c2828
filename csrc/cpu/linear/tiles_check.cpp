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

// Whole numbers that bfloat16 holds exactly.
std::vector<float> whole_numbers(int64_t count) {
    std::vector<float> v(count);
    for (int64_t i = 0; i < count; i++) v[i] = (float)(mixed(i) % 255) - 127.0f;
    return v;
}

// All sums are whole numbers below 2²⁴, so that no order of adding rounds: the results must be equal.
bool agree(int64_t inner, const Kernels& tiles, const Kernels& base) {
    constexpr int32_t kind = KIND_BF16;
    Bytes packed(Layout(kind, ROWS, inner).bytes);
    pack_dense(kind, ROWS, inner, packed.data(), whole_numbers(ROWS * inner).data(), false, inner, ROWS, 0, nullptr);
    const int64_t row = form_bytes(form_of(kind), inner);
    Bytes x(TOKENS * row);
    const std::vector<float> values = whole_numbers(TOKENS * inner);
    for (int64_t t = 0; t < TOKENS; t++) base.convert(&values[t * inner], inner, form_of(kind), x.data() + t * row);
    std::vector<float> y[2];
    for (int i = 0; i < 2; i++) {
        y[i].resize(TOKENS * ROWS);
        const LinearArgs a{kind, ROWS, inner, packed.data(), nullptr, x.data(), row, y[i].data(), ROWS, false};
        const Kernels& kernels = i ? base : tiles;
        Bytes scratch(4 * linear_scratch(a));
        kernels.linear(a, 0, 1, 0, TOKENS, (float*)scratch.data());
    }
    return y[0] == y[1];
}

}  // namespace

bool tiles_agree(const Kernels& tiles, const Kernels& base) { return agree(3 * GROUP, tiles, base); }
