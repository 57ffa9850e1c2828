// AMX's tile registers in plain C++, to test the products over them on any machine. tile_amx.h explains the names.
#pragma once
#include <stdint.h>
#include <string.h>

namespace ISA {

// A register's rows beyond its shape are 0, as in the processor. Using a register that has no shape would be a fault there.
class Tiles {
public:
    Tiles(int rows, int bytes) : rows_(rows), bytes_(bytes) { current() = this; }
    ~Tiles() { current() = nullptr; }
    Tiles(const Tiles&) = delete;

    template <int R>
    static void clear() { memset(current()->data_[R], 0, sizeof current()->data_[R]); }
    template <int R>
    static void read(const uint8_t* from, int64_t stride) {
        clear<R>();
        for (int i = 0; i < current()->height(R); i++) memcpy(current()->data_[R][i], from + i * stride, current()->width(R));
    }
    template <int R>
    static void write(void* to, int64_t stride) {
        for (int i = 0; i < current()->height(R); i++) memcpy((uint8_t*)to + i * stride, current()->data_[R][i], current()->width(R));
    }
    // Even and odd inputs are summed apart, then together, then added. (The processor takes subnormal numbers for 0.)
    template <int C, int A, int B>
    static void add_bf16() {
        Tiles& t = *current();
        float b[16][2][16];
        for (int k = 0; k < t.bytes_ / 4; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 2; i++) b[k][i][n] = number(t.data_[B][k] + 4 * n + 2 * i);
        for (int m = 0; m < t.rows_; m++) {
            float c[16], sums[2][16] = {};
            memcpy(c, t.data_[C][m], 64);
            for (int k = 0; k < t.bytes_ / 4; k++)
                for (int i = 0; i < 2; i++) {
                    const float a = number(t.data_[A][m] + 4 * k + 2 * i);
                    for (int n = 0; n < 16; n++) sums[i][n] += a * b[k][i][n];
                }
            for (int n = 0; n < 16; n++) c[n] += sums[0][n] + sums[1][n];
            memcpy(t.data_[C][m], c, 64);
        }
    }

private:
    static Tiles*& current() {
        static thread_local Tiles* tiles = nullptr;
        return tiles;
    }
    static float number(const uint8_t* p) {
        uint16_t half;
        memcpy(&half, p, 2);
        return widen_bf16(half);
    }
    int height(int r) const { return r < 6 ? rows_ : bytes_ / 4; }
    int width(int r) const { return r == 4 || r == 5 ? bytes_ : 64; }

    int rows_, bytes_;
    uint8_t data_[8][16][64];
};


}  // namespace ISA
