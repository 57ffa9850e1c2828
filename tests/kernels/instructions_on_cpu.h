// `instructions.cu` for a CPU: the same functions, and the CUDA built-ins that `one_token/kernel.cu` calls. Each CUDA thread is
// a fiber that runs until it has to wait for others. Memory is sequentially consistent: races are not seen. Without a
// seed, warps run in turn and copies arrive at once. With a seed, some warps sleep, their order changes each round, and
// copies arrive late.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
using std::min;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DEVICE inline
constexpr int THREADS = WARPS * 32;

// --- fibers
constexpr size_t STACK = 1 << 17;
#ifdef __x86_64__  // a twentieth of the time that swapcontext takes, which makes a system call each time
typedef void* Place;  // its stack's top, where the registers lie that a call keeps
extern "C" void go_to_place(Place* from, Place to);
asm(R"(
    .text
go_to_place:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void go(Place& from, Place& to) { go_to_place(&from, to); }
static void prepare(Place& place, char* stack, void (*function)()) {
    void** top = (void**)(((uintptr_t)stack + STACK) / 16 * 16) - 2;
    *top = (void*)function;  // where the last instruction returns to
    place = top - 6;
}
#else
typedef ucontext_t Place;
static void go(Place& from, Place& to) { swapcontext(&from, &to); }
static void prepare(Place& place, char* stack, void (*function)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack;
    place.uc_stack.ss_size = STACK;
    place.uc_link = nullptr;
    makecontext(&place, function, 0);
}
#endif
struct Barrier {
    int count = 0, pending = 0;
    long long bytes = 0;
    u32 phase = 0;
    void check() {
        if (pending == 0 && bytes == 0) phase++, pending = count;
    }
};
struct Gate {  // barrier of a fixed number of threads
    int arrived = 0;
    u32 generation = 0;
};
struct Warp : Gate {
    u8 slots[2][32][32];
};
struct Block {
    std::vector<u8> memory = std::vector<u8>(SHARED + 256, 255);  // no numbers, until written
    std::map<u32, Barrier> barriers;
    std::vector<Warp> warps = std::vector<Warp>(64);
    Gate together, all, groups[2];
    u8* base() { return (u8*)(((uintptr_t)memory.data() + 127) / 128 * 128); }
};
struct Fiber {
    Place place;
    std::unique_ptr<char[]> stack;
    Block* block;
    int index, program;
    bool done = false;
};
static Fiber* volatile now;
static Place scheduler;
static int block_size;
static std::function<void()> body;
static bool copies_are_late;
static std::vector<std::function<void()>> late;
static void yield() { go(now->place, scheduler); }
static void resume(Fiber& fiber) {
    now = &fiber;
    go(scheduler, fiber.place);
}
inline void pass(Gate& gate, int threads) {
    const u32 mine = gate.generation;
    if (++gate.arrived == threads) gate.arrived = 0, gate.generation++;
    while (gate.generation == mine) yield();
}
static void begin() {
    body();
    now->done = true;
    yield();
}
// Returns 1 if all wait for one another for ever, else 0.
static int on_cpu(int programs, int threads, unsigned seed, std::function<void()> f) {
    body = f;
    copies_are_late = seed;
    late.clear();
    block_size = threads;
    std::vector<Block> blocks(programs);
    std::vector<Fiber> fibers(programs * threads);
    for (int i = 0; i < programs * threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.stack.reset(new char[STACK]);
        fiber.block = &blocks[i / threads];
        fiber.index = i % threads;
        fiber.program = i / threads;
        prepare(fiber.place, fiber.stack.get(), begin);
    }
    std::mt19937 random(seed);
    std::vector<int> order(programs * threads / 32), sleep(order.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
    for (int round = 0; round < 100000; round++) {
        bool any = false;
        if (seed) std::shuffle(order.begin(), order.end(), random);
        for (int warp : order) {
            if (seed && sleep[warp] == 0 && random() % 256 == 0) sleep[warp] = random() % 40;
            const bool asleep = sleep[warp] > 0 && sleep[warp]--;
            for (int lane = 0; lane < 32; lane++) {
                Fiber& fiber = fibers[warp * 32 + lane];
                if (fiber.done) continue;
                any = true;
                if (!asleep) resume(fiber);
            }
        }
        for (auto& copy : late)
            if (copy && random() % 4 == 0) copy(), copy = nullptr;
        late.erase(std::remove(late.begin(), late.end(), nullptr), late.end());
        if (!any) return 0;
    }
    return 1;
}
struct Index { int x; };
#define threadIdx (Index{now->index})
#define blockIdx (Index{now->program % CTAS})
#define THIS_RANK (now->program / CTAS)  // ranks' programs lie one after the other

// --- CUDA's own
inline void __syncthreads() { pass(now->block->all, block_size); }
template <typename T>
inline const u8 (*exchanged(const T& x))[32] {
    Warp& warp = now->block->warps[now->index / 32];
    u8(*slots)[32] = warp.slots[warp.generation & 1];
    memcpy(slots[now->index % 32], &x, sizeof(T));
    pass(warp, 32);
    return slots;
}
inline void __syncwarp() { pass(now->block->warps[now->index / 32], 32); }
template <typename T>
inline T taken(const T& x, int lane) {
    T y;
    memcpy(&y, exchanged(x)[lane & 31], sizeof(T));
    return y;
}
template <typename T> inline T __shfl_sync(u32, T x, int lane) { return taken(x, lane); }
template <typename T> inline T __shfl_xor_sync(u32, T x, int mask) { return taken(x, now->index % 32 ^ mask); }
template <typename T> inline T __shfl_down_sync(u32, T x, int by) { return taken(x, now->index % 32 + by); }
inline u32 __ballot_sync(u32, bool x) {
    const u8(*all)[32] = exchanged(x);
    u32 y = 0;
    for (int lane = 0; lane < 32; lane++) y |= (u32)all[lane][0] << lane;
    return y;
}
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline u32 and_or(u32 x, u32 mask, u32 more) { return (x & mask) | more; }
inline u32 permute(u32 a, u32 b, u32 selector) {
    const u64 both = a | (u64)b << 32;
    u32 y = 0;
    for (int i = 0; i < 4; i++) y |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return y;
}
inline int sum_bytes(u32 word, int more = 0) {
    for (int i = 0; i < 4; i++) more += (signed char)(word >> 8 * i);
    return more;
}
inline u32 warp_max(u32 x) {
    for (int i = 16; i; i >>= 1) x = std::max(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float((u32)x); }
inline u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { return bits_of(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// --- numbers
inline float of_half(u16 x) {  // looked up: the conversion is a call
    static const std::vector<float> all = [] {
        std::vector<float> found(1 << 16);
        for (int i = 0; i < 1 << 16; i++) {
            const u16 bits = (u16)i;
            _Float16 y;
            memcpy(&y, &bits, 2);
            found[i] = (float)y;
        }
        return found;
    }();
    return all.data()[x];
}
inline u16 to_half(float x) { const _Float16 y = (_Float16)x; u16 z; memcpy(&z, &y, 2); return z; }
inline float of_bfloat(u16 x) { return __uint_as_float((u32)x << 16); }
inline float to_float(u16 x) { return HALF ? of_half(x) : of_bfloat(x); }
inline u16 to_bfloat(float x) {
    const u32 y = bits_of(x);
    return (u16)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}
inline u16 from_float(float x) {
    return HALF ? to_half(x) : to_bfloat(x);
}
inline float of_e4m3(u8 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float y = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 128 ? -y : y;
}
inline u8 to_e4m3(float x) {  // to nearest, ties to even
    const float y = std::min(fabsf(x), 448.0f);
    const u32 bits = bits_of(y) + 0x7ffff + (bits_of(y) >> 20 & 1);
    const u8 code = y < 0.015625f ? (u8)nearbyintf(y * 512.0f) : (u8)((bits >> 20) - (120 << 3));
    return code | (x < 0 ? 128 : 0);
}
inline u32 pack_e4m3(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline u32 low_half2(u32 codes) { return to_half(of_e4m3(codes & 255)) | (u32)to_half(of_e4m3(codes >> 8 & 255)) << 16; }
inline u32 high_half2(u32 codes) { return low_half2(codes >> 16); }
inline void unpack_half2(u32 x, float& low, float& high) { low = of_half((u16)x), high = of_half((u16)(x >> 16)); }
template <bool E4M3>
inline void widen_codes(u32 codes, u32& low, u32& high) {
    if (E4M3) low = low_half2(codes), high = high_half2(codes);
    else {
        auto half = [&](int i) { return (u32)to_half((float)(signed char)(codes >> 8 * i)); };
        low = half(0) | half(1) << 16, high = half(2) | half(3) << 16;
    }
}
inline u32 pack_halves(float low, float high) { return to_half(low) | (u32)to_half(high) << 16; }
template <bool HALVES>
inline u32 pack16(float low, float high) {
    return HALVES ? pack_halves(low, high) : to_bfloat(low) | (u32)to_bfloat(high) << 16;
}
inline u32 multiply_pair(u32 x, u32 y) {
    const float low = of_bfloat((u16)x) * of_bfloat((u16)y), high = of_bfloat((u16)(x >> 16)) * of_bfloat((u16)(y >> 16));
    return to_bfloat(low) | (u32)to_bfloat(high) << 16;
}
inline float exp2_fast(float x) { return exp2f(x); }

// --- memory
#define SHARED_MEMORY(name) u8* name = now->block->base()
inline u32 smem_address(const void* p) { return (u32)((const u8*)p - now->block->base()); }
inline uint2 load_smem8(u32 address) { uint2 v; memcpy(&v, now->block->base() + address, 8); return v; }
inline uint4 load_smem16(u32 address) { uint4 v; memcpy(&v, now->block->base() + address, 16); return v; }
inline uint4 load_cg16(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline u16 load_cg2(const u16* p) { return *p; }
inline float load_cg4(const float* p) { return *p; }
inline void sync_consumers() { pass(now->block->together, THREADS); }
inline void sync_group(int group, int threads) { pass(now->block->groups[group], threads); }

// --- barriers in shared memory
inline Barrier& barrier_at(u32 address) { return now->block->barriers[address]; }
inline void barrier_init(u32 address, u32 count) { barrier_at(address).count = barrier_at(address).pending = (int)count; }
inline void barrier_fence() {}
inline void bulk_prefetch(const void*, u32) {}
inline void barrier_arrive(u32 address) {
    Barrier& barrier = barrier_at(address);
    barrier.pending--;
    barrier.check();
}
inline void barrier_expect(u32 address, u32 bytes) {
    barrier_at(address).bytes += bytes;
    barrier_arrive(address);
}
inline void barrier_wait(u32 address, u32 parity) {
    const Barrier& barrier = barrier_at(address);
    while ((barrier.phase & 1) == parity) yield();
}
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 address, u64) {
    Block* block = now->block;
    auto copy = [=] {
        memcpy(block->base() + to, from, bytes);
        Barrier& barrier = block->barriers[address];
        barrier.bytes -= bytes;
        barrier.check();
    };
    if (copies_are_late) late.push_back(copy);
    else copy();
}
inline u64 evict_first_policy() { return 0; }
inline u64 evict_normal_policy() { return 0; }

// --- counters in memory
inline void release_add(u32* counter) { ++*counter; }
inline u32 load_acquire(const u32* counter) { yield(); return *counter; }
inline void release_add_system(u32* counter) { ++*counter; }
inline u32 load_acquire_system(const u32* counter) { return load_acquire(counter); }
inline void store_system16(uint4* p, uint4 v) { *p = v; }
inline uint4 load_system16(const uint4* p) { yield(); return *p; }
inline void pdl_wait() {}
inline u64 cycles() { static u64 count; return count++ << 10; }
inline void relaxed_add(u64* number) { ++*number; }
inline u32 fetch_add(u32* counter) { return (*counter)++; }

// --- tensor cores: a lane holds rows g and g + 8 of a, column g of b, columns 2 t and 2 t + 1 of c, g = lane / 4 and t =
// lane % 4
struct Operands { u32 a[4], b[2]; };
template <typename T, int WIDE, typename Number>  // WIDE numbers to a word
inline void multiplied(T (&c)[4], const Operands& own, Number number_of) {
    const u8(*all)[32] = exchanged(own);
    const int row = now->index % 32 / 4, column = now->index % 4 * 2;
    for (int t = 0; t < 4; t++) {
        Operands a, b[2];
        memcpy(&a, all[row * 4 + t], sizeof a);
        for (int n = 0; n < 2; n++) memcpy(&b[n], all[(column + n) * 4 + t], sizeof b[n]);
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < WIDE; j++) {
                const T x[2] = {number_of(a.a[half * 2], j), number_of(a.a[half * 2 + 1], j)};
                const T y[2] = {number_of(b[0].b[half], j), number_of(b[1].b[half], j)};
                for (int i = 0; i < 4; i++) c[i] += x[i / 2] * y[i % 2];
            }
    }
}
template <bool HALVES>
inline void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiplied<float, 2>(c, {{a0, a1, a2, a3}, {b0, b1}}, [](u32 word, int j) {
        const u16 x = (u16)(word >> 16 * j);
        return HALVES ? of_half(x) : of_bfloat(x);
    });
}
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma16<FORM == 1 || HALF>(c, a0, a1, a2, a3, b0, b1);
}
inline u32 transposed(u32 x) {
    const u8(*all)[32] = exchanged(x);
    const int row = now->index % 32 / 4, column = now->index % 4 * 2;
    u32 y = 0;
    for (int n = 0; n < 2; n++) {
        u32 theirs;
        memcpy(&theirs, all[(column + n) * 4 + row / 2], 4);
        y |= (theirs >> row % 2 * 16 & 0xffff) << 16 * n;
    }
    return y;
}
inline void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiplied<int, 4>(c, {{a0, a1, a2, a3}, {b0, b1}}, [](u32 word, int j) { return (int)(signed char)(word >> 8 * j); });
}
template <bool SIGNED>
inline void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED) return mma(c, a0, a1, a2, a3, b0, b1);
    const u32 by = 0x80808080u;  // bytes without a sign: 128 more than with one
    int all[4] = {};
    mma(c, a0 ^ by, a1 ^ by, a2 ^ by, a3 ^ by, b0, b1);
    mma(all, by, by, by, by, b0, b1);
    for (int i = 0; i < 4; i++) c[i] -= all[i];
}
