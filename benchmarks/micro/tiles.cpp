// What a step of 16 tokens x 16 rows x 32 inputs takes by tile registers, by the distance between a tile's store and its reading.
// g++ -O3 -std=c++17 -march=sapphirerapids -ffp-contract=off tiles.cpp -o tiles && ./tiles
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <immintrin.h>
#include <initializer_list>
#include <sys/syscall.h>
#include <unistd.h>
#define ISA micro
#include "../../csrc/cpu/vec_avx512.h"
#include "../../csrc/cpu/tile_amx.h"
using namespace micro;

template <int R>
static inline void read_t1(const uint8_t* from, int64_t stride) { __asm__ volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(R), "r"(from), "r"(stride) : "memory"); }
template <int C, int A, int B>
static inline void add_int8() { __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
static inline F to_floats(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_load_si512(p))}; }

static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static double cycle_s() {  // of the core's clock: dependent additions
    uint64_t n = 200000000, x = n;
    const double t = now();
    __asm__ volatile("1: dec %0\n jnz 1b" : "+r"(x));
    return (now() - t) / n;
}

struct Meta { float scale, sum; int32_t a, b; };
constexpr int MOST = 48;
static uint8_t* X; static uint8_t* W; static float* S; static float* M;
alignas(4096) static int32_t ring[80][256];
alignas(64) static float out[16 * 16];

// MODE 0: scale of a token; 1: and of a group; 2: and a minimum. PARTS: 1 tiles, 2 vectors, 3 both. D: distance; PAD: words between slots.
template <int MODE, int PARTS, int D, int R, int PAD, int AHEAD = 0, bool GATHERED = false>
__attribute__((noinline)) static void run(int groups, int units, int stride) {
    int32_t* slots = &ring[0][0];
    constexpr int SLOT = 256 + PAD;
    int pg = 0, unit = 0;
    const uint8_t* px = X;
    int64_t step = 0;
    auto produce = [&](int64_t i) __attribute__((always_inline)) {
        if (AHEAD) {
            if (pg % 2 == 0) for (int t = 0; t < 16; t++) __builtin_prefetch(px + t * stride + (pg + AHEAD) * 32);
            for (int j = 0; j < 8; j++) __builtin_prefetch(W + (pg + AHEAD) * 512 + j * 64);
        }
        Tiles::clear<0>();
        Tiles::read<4>(px + pg * 32, stride);
        Tiles::read<6>(W + pg * 512, 64);
        add_int8<0, 4, 6>();
        Tiles::write<0>(slots + (i % R) * SLOT, 64);
        if (++pg == groups) pg = 0, px = X + (++unit % 4) * 16 * stride;
    };
    if (PARTS & 1) for (int i = 0; i < D; i++) produce(i);
    for (int u = 0; u < units; u++) {
        F acc[16];
        for (int t = 0; t < 16; t++) acc[t] = zero();
        const uint8_t* q0 = X + (u % 4) * 16 * stride + groups * 32;
        const uint8_t *q[4] = {q0, q0 + 4 * stride, q0 + 8 * stride, q0 + 12 * stride};
        const int64_t s3 = 3 * stride;
#define META(t) ((const Meta*)(q[(t) / 4] + ((t) % 4 == 3 ? s3 : (t) % 4 * stride)) + g)
        for (int g = 0; g < groups; g++, step++) {
            if (PARTS & 2) {
                const int32_t* dot = slots + (step % R) * SLOT;
                const F scale = load(S + g * 16), low = load(M + g * 16);
                const float* near = GATHERED ? (const float*)(slots + (step % R) * SLOT + 256) : nullptr;
                if (GATHERED) _Pragma("GCC unroll 16") for (int t = 0; t < 16; t++) {
                    if (MODE == 0) acc[t] = fma(to_floats(dot + 16 * t), set1(near[t]), acc[t]);
                    else acc[t] = fma(to_floats(dot + 16 * t) * set1(near[t]), scale, acc[t]);
                    if (MODE == 2) acc[t] = fma(low, set1(near[16 + t]), acc[t]);
                }
                else _Pragma("GCC unroll 16") for (int t = 0; t < 16; t++) {
                    if (MODE == 0) acc[t] = fma(to_floats(dot + 16 * t), set1(META(t)->scale), acc[t]);
                    else acc[t] = fma(to_floats(dot + 16 * t) * set1(META(t)->scale), scale, acc[t]);
                    if (MODE == 2) acc[t] = fma(low, set1(META(t)->sum), acc[t]);
                }
            }
            if (PARTS & 1) produce(step + D);
        }
        for (int t = 0; t < 16; t++) store(out + 16 * t, acc[t]);
    }
}

// Batches: tiles of G groups and two panels by one read of the tokens, then vectors, eight tokens x two panels at a time. ALT: the next
// batch's tiles between the vectors.
template <int MODE, int G>
__attribute__((noinline)) static void batches(int groups, int units, int stride) {
    alignas(4096) static int32_t room[2][G * 2 * 256 + 512];
    auto sums = [&](int64_t b, int g, int p) __attribute__((always_inline)) { return room[b] + (g * 2 + p) * 256; };
    alignas(64) static float kept[2][16][16];
    int64_t total = (int64_t)units / 2 * (groups / G), made = 0;
    auto produce = [&](int64_t b, int g) __attribute__((always_inline)) {
        const int at = (int)(b % (groups / G)) * G + g;
        const uint8_t* x = X + (b / (groups / G) % 4) * 16 * stride;
        Tiles::clear<0>(), Tiles::clear<1>();
        Tiles::read<4>(x + at * 32, stride);
        Tiles::read<6>(W + at * 512, 64);
        add_int8<0, 4, 6>();
        Tiles::read<7>(W + (groups + at) * 512, 64);
        add_int8<1, 4, 7>();
        Tiles::write<0>(sums(b % 2, g, 0), 64);
        Tiles::write<1>(sums(b % 2, g, 1), 64);
    };
    for (int g = 0; g < G; g++) produce(0, g);
    for (int64_t b = 0; b < total; b++) {
        const uint8_t* x = X + (b / (groups / G) % 4) * 16 * stride;
        const int first = (int)(b % (groups / G)) * G;
        for (int half = 0; half < 2; half++) {
            F acc[8][2];
            _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) acc[t][0] = load(kept[0][8 * half + t]), acc[t][1] = load(kept[1][8 * half + t]);
            const uint8_t* q0 = x + 8 * half * stride + groups * 32;
            const uint8_t *q[2] = {q0, q0 + 4 * stride};
            const int64_t s3 = 3 * stride;
            for (int i = 0; i < G; i++) {
                const int g = first + i;
                const F scale0 = load(S + g * 16), scale1 = load(S + (groups + g) * 16), low0 = load(M + g * 16), low1 = load(M + (groups + g) * 16);
                _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) {
                    const F ts = set1(META(t)->scale);
                    const F d0 = to_floats(sums(b % 2, i, 0) + (8 * half + t) * 16), d1 = to_floats(sums(b % 2, i, 1) + (8 * half + t) * 16);
                    if (MODE == 0) acc[t][0] = fma(d0, ts, acc[t][0]), acc[t][1] = fma(d1, ts, acc[t][1]);
                    else acc[t][0] = fma(d0 * ts, scale0, acc[t][0]), acc[t][1] = fma(d1 * ts, scale1, acc[t][1]);
                    if (MODE == 2) {
                        const F s = set1(META(t)->sum);
                        acc[t][0] = fma(low0, s, acc[t][0]), acc[t][1] = fma(low1, s, acc[t][1]);
                    }
                }
                if (i % 2 == half && b + 1 < total) produce(b + 1, i);  // each group once, spread over both halves
            }
            _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) store(kept[0][8 * half + t], acc[t][0]), store(kept[1][8 * half + t], acc[t][1]);
        }
        (void)made;
    }
}

// What a step of tiles is made of. LOADS, STORES: whether there are any. SLOT: words from one of four places of sums to the next. NEAR: the
// operands lie together (A 512 bytes, B 512 bytes a step) and in the nearest cache.
template <bool LOADS, bool STORES, int SLOT, bool NEAR>
__attribute__((noinline)) static void pieces(int groups, int units, int stride) {
    int32_t* slots = &ring[0][0];
    Tiles::read<4>(X, stride), Tiles::read<6>(W, 64);
    for (int u = 0; u < units; u++)
        for (int g = 0; g < groups; g++) {
            Tiles::clear<0>();
            if (LOADS && NEAR) Tiles::read<4>(W + 16384 + g % 8 * 512, 32), Tiles::read<6>(W + g % 8 * 512, 64);
            else if (LOADS) Tiles::read<4>(X + (u % 4) * 16 * stride + g * 32, stride), Tiles::read<6>(W + g * 512, 64);
            add_int8<0, 4, 6>();
            if (STORES) Tiles::write<0>(slots + g % 4 * SLOT, 64);
        }
}

// 2 x 2 tiles of G groups, then their sums a unit of 16 tokens x a panel after the other.
template <int MODE, int G>
__attribute__((noinline)) static void phases(int groups, int units, int stride) {
    alignas(64) static float kept[4][16][16];
    int32_t* sums = &ring[0][0];
    for (int u = 0; u < units / 4; u++) {
        const uint8_t* x = X + (u % 2) * 32 * stride;
        for (int first = 0; first < groups; first += G) {
            const int n = groups - first < G ? groups - first : G;
            for (int i = 0; i < n; i++) {
                const int g = first + i;
                Tiles::clear<0>(), Tiles::clear<1>(), Tiles::clear<2>(), Tiles::clear<3>();
                Tiles::read<4>(x + g * 32, stride), Tiles::read<6>(W + g * 512, 64);
                add_int8<0, 4, 6>();
                Tiles::read<7>(W + (groups + g) * 512, 64);
                add_int8<1, 4, 7>();
                Tiles::read<5>(x + 16 * stride + g * 32, stride);
                add_int8<2, 5, 6>(), add_int8<3, 5, 7>();
                Tiles::write<0>(sums + (0 * G + i) * 256, 64), Tiles::write<1>(sums + (1 * G + i) * 256, 64);
                Tiles::write<2>(sums + (2 * G + i) * 256, 64), Tiles::write<3>(sums + (3 * G + i) * 256, 64);
            }
            for (int c = 0; c < 4; c++) {
                F acc[16];
                _Pragma("GCC unroll 16") for (int t = 0; t < 16; t++) acc[t] = first ? load(kept[c][t]) : zero();
                const uint8_t* q0 = x + c / 2 * 16 * stride + groups * 32;
                const uint8_t *q[4] = {q0, q0 + 4 * stride, q0 + 8 * stride, q0 + 12 * stride};
                const int64_t s3 = 3 * stride;
                for (int i = 0; i < n; i++) {
                    const int g = first + i;
                    const int32_t* dot = sums + (c * G + i) * 256;
                    const F scale = load(S + (c % 2 * groups + g) * 16), low = load(M + (c % 2 * groups + g) * 16);
                    _Pragma("GCC unroll 16") for (int t = 0; t < 16; t++) {
                        if (MODE == 0) acc[t] = fma(to_floats(dot + 16 * t), set1(META(t)->scale), acc[t]);
                        else acc[t] = fma(to_floats(dot + 16 * t) * set1(META(t)->scale), scale, acc[t]);
                        if (MODE == 2) acc[t] = fma(low, set1(META(t)->sum), acc[t]);
                    }
                }
                _Pragma("GCC unroll 16") for (int t = 0; t < 16; t++) store(kept[c][t], acc[t]);
            }
        }
    }
}

// All inputs in the registers: 2 x 2 tiles.
// AHEAD: steps whose operands are asked for ahead of time.
template <bool BF16, int AHEAD, bool T1 = false>
__attribute__((noinline)) static void whole(int groups, int units, int stride) {
    const int steps = BF16 ? groups : groups / 2, bytes = 1024;
    for (int u = 0; u < units / 4; u++) {
        const uint8_t* x = X + (u % 2) * 32 * stride;
        Tiles::clear<0>(), Tiles::clear<1>(), Tiles::clear<2>(), Tiles::clear<3>();
        for (int g = 0; g < steps; g++) {
            if (AHEAD) {
                const uint8_t *a = x + (g + AHEAD) * 64, *b = W + (g + AHEAD) * bytes;
                for (int i = 0; i < 32; i++) __builtin_prefetch(a + i * stride);
                for (int i = 0; i < 16; i++) __builtin_prefetch(b + i * 64), __builtin_prefetch(b + steps * bytes + i * 64);
            }
            if (T1) read_t1<4>(x + g * 64, stride); else Tiles::read<4>(x + g * 64, stride);
            Tiles::read<6>(W + g * bytes, 64);
            if (BF16) Tiles::add_bf16<0, 4, 6>(); else add_int8<0, 4, 6>();
            Tiles::read<7>(W + (steps + g) * bytes, 64);
            if (BF16) Tiles::add_bf16<1, 4, 7>(); else add_int8<1, 4, 7>();
            if (T1) read_t1<5>(x + 16 * stride + g * 64, stride); else Tiles::read<5>(x + 16 * stride + g * 64, stride);
            if (BF16) Tiles::add_bf16<2, 5, 6>(); else add_int8<2, 5, 6>();
            if (BF16) Tiles::add_bf16<3, 5, 7>(); else add_int8<3, 5, 7>();
        }
        Tiles::write<0>(ring[0], 64), Tiles::write<1>(ring[4], 64), Tiles::write<2>(ring[8], 64), Tiles::write<3>(ring[12], 64);
    }
}

// 16 tokens x 16 rows x 32 inputs by VNNI, 6 tokens x 2 panels at a time, as linear.h.
template <int MODE>
__attribute__((noinline)) static void vnni(int groups, int units, int stride) {
    for (int u = 0; u < units * 16 / 12; u++) {
        F acc[6][2];
        for (auto& a : acc) a[0] = a[1] = zero();
        const uint8_t* x = X + (u % 8) * 6 * stride;
        for (int g = 0; g < groups; g++) {
            I dot[6][2];
            _Pragma("GCC unroll 6") for (int t = 0; t < 6; t++) dot[t][0] = dot[t][1] = iset1(((const Meta*)(x + t * stride + groups * 32))[g].a);
            _Pragma("GCC unroll 8") for (int T = 0; T < 8; T++) {
                const B w0 = load_b(W + g * 512 + 64 * T), w1 = load_b(W + (groups + g) * 512 + 64 * T);
                _Pragma("GCC unroll 6") for (int t = 0; t < 6; t++) {
                    int32_t four;
                    memcpy(&four, x + t * stride + g * 32 + 4 * T, 4);
                    dot[t][0] = dot8(dot[t][0], w0, four), dot[t][1] = dot8(dot[t][1], w1, four);
                }
            }
            _Pragma("GCC unroll 6") for (int t = 0; t < 6; t++) {
                const Meta& m = ((const Meta*)(x + t * stride + groups * 32))[g];
                for (int p = 0; p < 2; p++) {
                    if (MODE == 0) acc[t][p] = fma(to_float(dot[t][p]), set1(m.scale), acc[t][p]);
                    else acc[t][p] = fma(to_float(dot[t][p]) * set1(m.scale), load(S + g * 16), acc[t][p]);
                    if (MODE == 2) acc[t][p] = fma(load(M + g * 16), set1(m.sum), acc[t][p]);
                }
            }
        }
        for (int t = 0; t < 6; t++) store(out + 16 * t, acc[t][0] + acc[t][1]);
    }
}

template <class Run>
static void measure(const char* name, int bytes, Run run, int groups, int units, int stride) {
    double best = 1e9, cycle = 1e9;
    for (int i = 0; i < 9; i++) {
        const Tiles registers(16, bytes);
        const double t = now();
        run(groups, units, stride);
        best = now() - t < best ? now() - t : best;
    }
    for (int i = 0; i < 2; i++) { const double c = cycle_s(); cycle = c < cycle ? c : cycle; }
    const double per = best / ((double)units * groups);
    printf("%-58s %3d groups: %6.1f cycles, %6.0f GOP/s\n", name, groups, per / cycle, 2 * 8192 / per / 1e9);
    fflush(stdout);
}

int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return printf("no tile registers\n"), 1;
    const int most_stride = 2 * 1536 + 1024;
    X = (uint8_t*)aligned_alloc(4096, 64 * most_stride + 4096), W = (uint8_t*)aligned_alloc(4096, 4 * MOST * 1024 + 4096);
    S = (float*)aligned_alloc(4096, 2 * MOST * 64), M = (float*)aligned_alloc(4096, 2 * MOST * 64);
    for (int i = 0; i < 64 * most_stride; i++) X[i] = (uint8_t)(i * 7919 % 63);
    for (int i = 0; i < 4 * MOST * 1024; i++) W[i] = (uint8_t)(i * 7907 % 61);
    for (int i = 0; i < 2 * MOST * 16; i++) S[i] = 1.0f / (i + 1), M[i] = 0.5f / (i + 1);
    for (int groups : {18, 48}) {
        const int stride = groups * 48, units = 20000 * 18 / groups;
        for (int t = 0; t < 64; t++)
            for (int g = 0; g < groups; g++) ((Meta*)(X + t * stride + groups * 32))[g] = {0.01f * (t + 1), 0.5f, 3, 4};
#define SAY(name, bytes, ...) measure(name, bytes, __VA_ARGS__, groups, units, stride)
        SAY("VNNI: token scale", 32, vnni<0>);
        SAY("VNNI: token and group scale", 32, vnni<1>);
        SAY("VNNI: and a minimum", 32, vnni<2>);
        SAY("tiles alone", 32, (run<0, 1, 4, 4, 0>));
        SAY("vectors alone: token scale", 32, (run<0, 2, 4, 4, 0>));
        SAY("vectors alone: token and group scale", 32, (run<1, 2, 4, 4, 0>));
        SAY("vectors alone: and a minimum", 32, (run<2, 2, 4, 4, 0>));
        SAY("both, distance 2 of 4 slots: token scale", 32, (run<0, 3, 2, 4, 0>));
        SAY("both, distance 3 of 4: token scale", 32, (run<0, 3, 3, 4, 0>));
        SAY("both, distance 4 of 4: token scale", 32, (run<0, 3, 4, 4, 0>));
        SAY("both, distance 6 of 8: token scale", 32, (run<0, 3, 6, 8, 0>));
        SAY("both, distance 8 of 8: token scale", 32, (run<0, 3, 8, 8, 0>));
        SAY("both, distance 12 of 16: token scale", 32, (run<0, 3, 12, 16, 0>));
        SAY("both, distance 16 of 16: token scale", 32, (run<0, 3, 16, 16, 0>));
        SAY("both, distance 8 of 8, slots apart: token scale", 32, (run<0, 3, 8, 8, 16>));
        SAY("both, distance 4 of 4: token and group scale", 32, (run<1, 3, 4, 4, 0>));
        SAY("both, distance 8 of 8: token and group scale", 32, (run<1, 3, 8, 8, 0>));
        SAY("both, distance 4 of 4: and a minimum", 32, (run<2, 3, 4, 4, 0>));
        SAY("both, distance 8 of 8: and a minimum", 32, (run<2, 3, 8, 8, 0>));
        SAY("both, distance 16 of 16: and a minimum", 32, (run<2, 3, 16, 16, 0>));
        SAY("both, distance 4 of 4: and a minimum, asked for 4 ahead", 32, (run<2, 3, 4, 4, 0, 4>));
        SAY("tiles alone, asked for 4 ahead", 32, (run<0, 1, 4, 4, 0, 4>));
        // slots in pages of their own, all at the same place in them: other loads seldom look like an overlap
        SAY("both, distance 2 of 3, a page apart: token scale", 32, (run<0, 3, 2, 3, 768>));
        SAY("both, distance 4 of 5, a page apart: token scale", 32, (run<0, 3, 4, 5, 768>));
        SAY("both, distance 8 of 9, a page apart: token scale", 32, (run<0, 3, 8, 9, 768>));
        SAY("both, distance 16 of 17, a page apart: token scale", 32, (run<0, 3, 16, 17, 768>));
        SAY("both, distance 4 of 4, scales gathered: token scale", 32, (run<0, 3, 4, 4, 32, 0, true>));
        SAY("both, distance 4 of 4, scales gathered: and a minimum", 32, (run<2, 3, 4, 4, 32, 0, true>));
        SAY("both, distance 3 of 3, scales gathered: and a minimum", 32, (run<2, 3, 3, 3, 32, 0, true>));
        SAY("batches of 6 groups x 2 panels: token scale", 32, (batches<0, 6>));
        SAY("batches of 6 groups x 2 panels: token and group scale", 32, (batches<1, 6>));
        SAY("batches of 6 groups x 2 panels: and a minimum", 32, (batches<2, 6>));
        SAY("batches of 3 groups x 2 panels: and a minimum", 32, (batches<2, 3>));
        SAY("pieces: loads near", 32, (pieces<true, false, 256, true>));
        SAY("pieces: loads far", 32, (pieces<true, false, 256, false>));
        SAY("pieces: stores", 32, (pieces<false, true, 256, true>));
        SAY("pieces: loads near and stores", 32, (pieces<true, true, 256, true>));
        SAY("pieces: loads far and stores", 32, (pieces<true, true, 256, false>));
        SAY("pieces: loads near and stores a page apart", 32, (pieces<true, true, 1024, true>));
        SAY("phases of 2 groups: token scale", 32, (phases<0, 2>));
        SAY("phases of 4 groups: token scale", 32, (phases<0, 4>));
        SAY("phases of 6 groups: token scale", 32, (phases<0, 6>));
        SAY("phases of 4 groups: and a minimum", 32, (phases<2, 4>));
        SAY("phases of 6 groups: and a minimum", 32, (phases<2, 6>));
        SAY("whole depth, int8, 2 x 2", 64, (whole<false, 0>));
        measure("whole depth, bfloat16, 2 x 2", 64, whole<true, 0>, groups, units, groups * 64);
        measure("whole depth, bfloat16, 2 x 2, tokens with the hint T1", 64, whole<true, 0, true>, groups, units, groups * 64);
        measure("whole depth, bfloat16, 2 x 2, asked for 1 ahead", 64, whole<true, 1>, groups, units, groups * 64);
        measure("whole depth, bfloat16, 2 x 2, asked for 2 ahead", 64, whole<true, 2>, groups, units, groups * 64);
        measure("whole depth, bfloat16, 2 x 2, 4 steps alone", 64, whole<true, 0>, 4, units, groups * 64);
    }
}
