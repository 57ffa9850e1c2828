// Products of whole numbers by tile registers.
//
// Each 32 activations have a scale, so sums leave the tile registers after each step of 32 inputs (16 where the weight has a scale
// for as many). They go through memory to the vector registers, which scale and add them. A tile's store is read only when it has
// arrived in the cache, SLOTS steps later; meanwhile the tile registers multiply. So steps are taken off a line of those to come,
// which crosses panels and tiles of tokens.
#pragma once
#include "tiles.h"

namespace ISA {

template <int KIND>
class Whole {
public:
    static constexpr int AT_ONCE = 1;
    static constexpr int HALVES = by_halves(KIND) ? 2 : 1;  // steps a group
    static constexpr int BYTES = GROUP / HALVES;            // inputs a step, of a byte each

    Whole(const LinearArgs& a, const Cut& cut, float* scratch)
        : a_(a), cut_(cut), at_(KIND, a.rows, a.inner), steps_(at_.groups * HALVES), numbers_((uint8_t*)scratch) {}

    // Panels first[i] … first[i] + panels − 1 come next. They are written out once for all tokens.
    void begin(const int64_t* first, int halves, int panels) {
        num_panels_ = halves * panels;
        for (int p = 0; p < num_panels_; p++) {
            panels_[p] = first[p / panels] + p % panels;
            write_out(panels_[p], numbers_ + p * steps_ * BYTES * PANEL);
        }
        panels_a_half_ = panels;
        tile_ = panel_ = step_ = made_ = used_ = 0;
        for (int i = 0; i < SLOTS; i++) make_step();
    }

    void multiply(int half, const Tile* tiles, int, int64_t y_stride) {
        for (int p = 0; p < panels_a_half_; p++) {
            Tile tile = tiles[0];
            tile.y += p * PANEL;
            add_up(panels_[half * panels_a_half_ + p], tile, y_stride);
        }
    }

private:
    static constexpr int SLOTS = 4;  // 4 KB: loads and stores of different slots differ in their lower 12 bits

    // Writes a panel's numbers to `to`: 8 bits each, its zero taken off, in the order of a B tile, which is the panels' own.
    void write_out(int64_t panel, uint8_t* to) const {
        constexpr int64_t group_bytes = KIND == KIND_S8 ? 64 : 64 * code_bits(KIND);
        const uint8_t* codes = a_.packed + (KIND == KIND_S8 ? sparse_panel(a_.packed, panel) : panel * at_.code_bytes);
        const uint8_t* kept = codes + at_.code_bytes;
        for (int64_t g = 0; g < at_.groups; g++, to += GROUP * PANEL) {
            if (KIND != KIND_S8) ask_for_next<KIND, 2>(at_, g, codes, scales(panel), mins(panel));
            const uint8_t* group = codes + g * group_bytes;
#define WRITE(T) store_b(to + 64 * T, codes_of<KIND, T>(group, kept));
            WRITE(0) WRITE(1) WRITE(2) WRITE(3) WRITE(4) WRITE(5) WRITE(6) WRITE(7)
#undef WRITE
            if (code_from(KIND))
                for (int64_t i = 0; i < GROUP * PANEL; i++) to[i] = (uint8_t)(to[i] - code_from(KIND));
        }
    }

    // The next step of the line. At its end there is nothing more to do.
    __attribute__((always_inline)) inline void make_step() {
        if (tile_ == cut_.tiles) return;
        Tiles::clear<0>();
        Tiles::read<4>(a_.x + cut_.first(tile_) * a_.x_stride + step_ * BYTES, a_.x_stride);
        Tiles::read<6>(numbers_ + (panel_ * steps_ + step_) * BYTES * PANEL, 64);
        Tiles::add_int8<0, 4, 6>();
        Tiles::write<0>(slots_[made_++ % SLOTS], 64);
        if (++step_ < steps_) return;
        step_ = 0;
        if (++panel_ == num_panels_) panel_ = 0, tile_++;
    }

    // Scales and adds the sums of a tile of tokens × a panel, as tile_int of linear.h does.
    __attribute__((noinline)) void add_up(int64_t panel, const Tile& tile, int64_t y_stride) {
#define TOKENS _Pragma("GCC unroll 16") for (int t = 0; t < TILE; t++)
        constexpr bool minima = has_mins(KIND) || KIND == KIND_Q4K || KIND == KIND_Q5K;
        const uint8_t *scale_bytes = scales(panel), *min_bytes = mins(panel);
        // Four tokens' addresses are one register and the stride: there are not enough for each to have its own.
        const int64_t stride = a_.x_stride, stride3 = 3 * stride;
        const uint8_t* q[TILE / 4];
        _Pragma("GCC unroll 4") for (int t = 0; t < TILE; t += 4) q[t / 4] = a_.x + (tile.token + t) * stride + at_.groups * GROUP;
        F acc[TILE];
        TOKENS acc[t] = zero(), __builtin_prefetch(tile.y + t * y_stride, 1);
        for (int64_t g = 0; g < at_.groups; g++) {
            auto meta = [&](int t) __attribute__((always_inline)) {
                return (const QGroup*)(q[t / 4] + (t % 4 == 3 ? stride3 : t % 4 * stride)) + g;
            };
            for (int half = 0; half < HALVES; half++) {
                const int32_t* slot = slots_[used_++ % SLOTS];
                auto sum = [&](int t) __attribute__((always_inline)) {
                    I dot;
                    memcpy(&dot, slot + t * PANEL, sizeof dot);
                    return to_float(dot);
                };
                if (scaled_by_row(KIND)) {
                    TOKENS acc[t] = fma(sum(t), set1(meta(t)->scale), acc[t]);
                } else {
                    const F scale = scale_of<KIND>(scale_bytes, g, half);
                    TOKENS acc[t] = fma(sum(t) * set1(meta(t)->scale), scale, acc[t]);
                }
                if (KIND == KIND_Q2K) {
                    const F low = minimum_of<KIND>(scale_bytes, min_bytes, g, half);
                    TOKENS acc[t] = fma(low, set1((float)meta(t)->halves[half] * meta(t)->scale), acc[t]);
                }
                make_step();
            }
            if (minima) {
                const F low = minimum_of<KIND>(scale_bytes, min_bytes, g, 0);
                TOKENS acc[t] = fma(low, set1(meta(t)->sum), acc[t]);
            }
        }
        const F scale = scaled_by_row(KIND) ? load((const float*)scale_bytes) : set1(1.0f);
        alignas(64) float sums[TILE * PANEL];
        TOKENS store(sums + t * PANEL, scaled_by_row(KIND) ? acc[t] * scale : acc[t]);
        put_sums(a_, panel, sums, tile, TILE, y_stride);
#undef TOKENS
    }

    const uint8_t* scales(int64_t panel) const { return a_.packed + at_.scales_at + panel * at_.scale_bytes; }
    const uint8_t* mins(int64_t panel) const { return a_.packed + at_.mins_at + panel * at_.scale_bytes; }

    alignas(64) int32_t slots_[SLOTS][TILE * PANEL];
    const LinearArgs& a_;
    const Cut& cut_;
    const Layout at_;
    const int64_t steps_;  // of a panel
    uint8_t* const numbers_;
    int64_t panels_[4] = {};
    int64_t tile_ = 0, panel_ = 0, step_ = 0;  // the next step to make
    uint64_t made_ = 0, used_ = 0;
    int num_panels_ = 0, panels_a_half_ = 0;
};

}  // namespace ISA
