// The kernels of a machine with tile registers: products, their ceilings and the attention of many tokens by
// tiles, all else by the kernels of `BASE`.
#include "attention_tiles.h"
#include "linear_tiles.h"

namespace ISA {

// As `multiply` of ceiling.h, eight times in a round: two tiles of tokens by two of weights, whose operands lie in the nearest cache.
static float multiply_tiles(const uint8_t* data, int64_t rounds) {
    const Tiles registers(TILE, 64);
    Tiles::clear<0>(), Tiles::clear<1>(), Tiles::clear<2>(), Tiles::clear<3>();
    for (int64_t r = 0; r < 8 * rounds; r++) {
        Tiles::read<4>(data, 64), Tiles::read<5>(data + 1024, 64), Tiles::read<6>(data + 2048, 64), Tiles::read<7>(data + 3072, 64);
        Tiles::add_bf16<0, 4, 6>(), Tiles::add_bf16<1, 4, 7>(), Tiles::add_bf16<2, 5, 6>(), Tiles::add_bf16<3, 5, 7>();
    }
    alignas(64) float sums[4][TILE * PANEL];
    Tiles::write<0>(sums[0], 64), Tiles::write<1>(sums[1], 64), Tiles::write<2>(sums[2], 64), Tiles::write<3>(sums[3], 64);
    return sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0];
}

// Whole numbers are multiplied as bfloat16, where there are many tokens.
static bool of_tiles(int32_t what) { return what == CEILING_BF16 || what == CEILING_INT8 || what == CEILING_INT6; }

static float ceiling(int32_t what, const uint8_t* data, int64_t bytes, int64_t rounds) {
    return of_tiles(what) ? multiply_tiles(data, rounds) : BASE()->ceiling(what, data, bytes, rounds);
}

static int64_t ceiling_macs(int32_t what) {
    return of_tiles(what) ? 8 * 4 * TILE * PANEL * 32 : BASE()->ceiling_macs(what);
}

}  // namespace ISA

// A constant, and no code that runs while it is loaded: that would be of this instruction set, on any machine. `with_tiles` of api.cpp
// adds the functions of `BASE`.
#define SLIPSTREAM_TILES(function, label)                                                                                        \
    const Kernels* function() {                                                                                                  \
        static const Kernels table = {label,   ISA::linear,  ISA::gated, nullptr, nullptr,      nullptr,           nullptr, nullptr, \
                                      nullptr, nullptr, ISA::prefill, nullptr, nullptr, nullptr, nullptr, ISA::ceiling, ISA::ceiling_macs, nullptr, \
                                      ISA::prefill_scratch, ISA::widen};                                                     \
        return &table;                                                                                                           \
    }
