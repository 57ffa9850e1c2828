// The tile registers of AMX. tile_portable.h defines the same names, so that the products over them are written once. There are
// eight registers of up to 16 rows of 64 bytes:
//   0 … 3  C  results: `rows` tokens × 16 panel rows of float32
//   4, 5   A  activations: `rows` tokens × `bytes` of their inputs
//   6, 7   B  weights: bytes / 4 lines of a panel, each with 4 bytes for each of 16 panel rows
// The instructions are assembly: intrinsics take no template argument, and gcc's do not declare the memory that they read.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace ISA {

struct alignas(64) TileShapes {  // as the processor reads them
    uint8_t palette, start_row, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// The registers' shapes while this object lives. After it they are released: a thread that does not use them has no 8 KB more for
// the system to save.
class Tiles {
public:
    Tiles(int rows, int bytes) {
        TileShapes s;
        memset(&s, 0, sizeof s);
        s.palette = 1;
        for (int i = 0; i < 8; i++) {
            s.rows[i] = (uint8_t)(i < 6 ? rows : bytes / 4);
            s.bytes[i] = (uint16_t)(i == 4 || i == 5 ? bytes : 64);
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(s) : "memory");
    }
    ~Tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;

    template <int R>
    static inline void clear() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(R)); }
    template <int R>
    static inline void read(const uint8_t* from, int64_t stride) {
        __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(R), "r"(from), "r"(stride) : "memory");
    }
    template <int R>
    static inline void write(void* to, int64_t stride) {
        __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(R), "r"(to), "r"(stride) : "memory");
    }
    template <int C, int A, int B>
    static inline void add_bf16() { __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
};


}  // namespace ISA
