// Products of whole numbers by tile registers.
//
// Each 32 activations have a scale, so sums leave the tile registers after each step of 32 inputs (16 where the weight has a scale
// for as many). They go through memory to the vector registers, which scale and add them: BATCH steps of 2 × 2 tiles, then their
// sums, so that a sum is not waited for.
#pragma once
#include "tiles.h"

namespace ISA {

template <int KIND>
class Whole {
public:
    static constexpr int AT_ONCE = 2;
    static constexpr int HALVES = by_halves(KIND) ? 2 : 1;  // steps a group
    static constexpr int BYTES = GROUP / HALVES;            // inputs a step, of a byte each

    Whole(const LinearArgs& a, const Cut&, float* scratch)
        : a_(a), at_(KIND, a.rows, a.inner), steps_(at_.groups * HALVES), numbers_((uint8_t*)scratch) {}

    // Panels first[i] … first[i] + panels − 1 come next. They are written out once for all tokens.
    void begin(const int64_t* first, int halves, int panels) {
        for (int i = 0; i < halves; i++) first_[i] = first[i];
        panels_ = panels;
        for (int p = 0; p < halves * panels; p++) write_out(first[p / panels] + p % panels, numbers_ + p * panel_bytes());
    }

    void multiply(int half, const Tile* tiles, int count, int64_t y_stride) {
        if (count == 2) {
            if (panels_ == 2) multiply<2, 2>(half, tiles, y_stride);
            else multiply<2, 1>(half, tiles, y_stride);
        } else {
            if (panels_ == 2) multiply<1, 2>(half, tiles, y_stride);
            else multiply<1, 1>(half, tiles, y_stride);
        }
    }

private:
    static constexpr int BATCH = 4;

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

    // NT tiles of tokens × NP panels.
    template <int NT, int NP>
    void multiply(int half, const Tile* tiles, int64_t y_stride) {
        const uint8_t *x[2], *numbers[2];
        for (int i = 0; i < NT; i++) x[i] = a_.x + tiles[i].token * a_.x_stride;
        for (int p = 0; p < NP; p++) numbers[p] = numbers_ + (half * panels_ + p) * panel_bytes();
        for (int64_t first = 0; first < steps_; first += BATCH) {
            const int n = (int)(steps_ - first < BATCH ? steps_ - first : BATCH);
            for (int i = 0; i < n; i++) {
                const int64_t at = (first + i) * BYTES;
                Tiles::clear<0>();
                if (NP > 1) Tiles::clear<1>();
                if (NT > 1) Tiles::clear<2>();
                if (NT > 1 && NP > 1) Tiles::clear<3>();
                Tiles::read<4>(x[0] + at, a_.x_stride);
                Tiles::read<6>(numbers[0] + at * PANEL, 64);
                Tiles::add_int8<0, 4, 6>();
                if (NP > 1) Tiles::read<7>(numbers[1] + at * PANEL, 64);
                if (NP > 1) Tiles::add_int8<1, 4, 7>();
                if (NT > 1) Tiles::read<5>(x[1] + at, a_.x_stride);
                if (NT > 1) Tiles::add_int8<2, 5, 6>();
                if (NT > 1 && NP > 1) Tiles::add_int8<3, 5, 7>();
                Tiles::write<0>(sums_[0][i], 64);
                if (NP > 1) Tiles::write<1>(sums_[1][i], 64);
                if (NT > 1) Tiles::write<2>(sums_[2][i], 64);
                if (NT > 1 && NP > 1) Tiles::write<3>(sums_[3][i], 64);
            }
            for (int i = 0; i < NT; i++)
                for (int p = 0; p < NP; p++) add_up(first_[half] + p, tiles[i].token, first, n, sums_[2 * i + p], results_[2 * i + p]);
        }
        for (int i = 0; i < NT; i++)
            for (int p = 0; p < NP; p++) {
                Tile tile = tiles[i];
                tile.y += p * PANEL;
                put_sums(a_, first_[half] + p, results_[2 * i + p], tile, TILE, y_stride);
            }
    }

    // Scales and adds the sums of n steps, for 16 tokens × a panel, as tile_int of linear.h does.
    __attribute__((noinline)) void add_up(int64_t panel, int64_t token, int64_t first, int n, const int32_t (*sums)[TILE * PANEL], float* results) const {
#define TOKENS _Pragma("GCC unroll 16") for (int t = 0; t < TILE; t++)
        constexpr bool minima = has_mins(KIND) || KIND == KIND_Q4K || KIND == KIND_Q5K;
        const uint8_t *scale_bytes = scales(panel), *min_bytes = mins(panel);
        // Four tokens' addresses are one register and the stride: there are not enough for each to have its own.
        const int64_t stride = a_.x_stride, stride3 = 3 * stride;
        const uint8_t *q0 = a_.x + token * stride + at_.groups * GROUP, *q4 = q0 + 4 * stride, *q8 = q4 + 4 * stride, *q12 = q8 + 4 * stride;
        F acc[TILE];
        TOKENS acc[t] = first ? load(results + t * PANEL) : zero();
        for (int i = 0; i < n; i++) {
            const int64_t g = (first + i) / HALVES;
            const int half = HALVES == 2 ? i % 2 : 0;
            auto meta = [&](int t) __attribute__((always_inline)) {
                const uint8_t* q = t < 4 ? q0 : t < 8 ? q4 : t < 12 ? q8 : q12;
                return (const QGroup*)(q + (t % 4 == 3 ? stride3 : t % 4 * stride)) + g;
            };
            auto sum = [&](int t) __attribute__((always_inline)) {
                I dot;
                memcpy(&dot, sums[i] + t * PANEL, sizeof dot);
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
            if (minima) {
                const F low = minimum_of<KIND>(scale_bytes, min_bytes, g, 0);
                TOKENS acc[t] = fma(low, set1(meta(t)->sum), acc[t]);
            }
        }
        if (scaled_by_row(KIND) && first + n == steps_) {
            const F scale = load((const float*)scale_bytes);
            TOKENS acc[t] = acc[t] * scale;
        }
        TOKENS store(results + t * PANEL, acc[t]);
#undef TOKENS
    }

    int64_t panel_bytes() const { return steps_ * BYTES * PANEL; }
    const uint8_t* scales(int64_t panel) const { return a_.packed + at_.scales_at + panel * at_.scale_bytes; }
    const uint8_t* mins(int64_t panel) const { return a_.packed + at_.mins_at + panel * at_.scale_bytes; }

    alignas(64) int32_t sums_[4][BATCH][TILE * PANEL];
    alignas(64) float results_[4][TILE * PANEL];
    const LinearArgs& a_;
    const Layout at_;
    const int64_t steps_;  // of a panel
    uint8_t* const numbers_;
    int64_t first_[2] = {};
    int panels_ = 0;
};

}  // namespace ISA
