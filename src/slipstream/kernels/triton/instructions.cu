// PTX instructions without a CUDA C++ intrinsic, one function each. The kernels' sources are appended to this file and
// compiled. Tests without a GPU append them to tests/kernels/instructions_on_cpu.h, which has the same functions.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define DEVICE __device__ __forceinline__
constexpr int THREADS = WARPS * 32;  // consumer threads

// --- numbers
DEVICE float to_float(u16 x) {  // x: the model's type, float16 if HALF, otherwise bfloat16
    float y;
    if (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    else y = __uint_as_float((u32)x << 16);
    return y;
}
DEVICE u16 from_float(float x) {
    u16 y;
    if (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
DEVICE u32 pack_e4m3(float low, float high) {  // two codes
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 low_half2(u32 codes) {  // the low two of four e4m3 codes → float16
    u32 y;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(y) : "r"(codes));
    return y;
}
DEVICE u32 high_half2(u32 codes) {
    u32 y;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(y) : "r"(codes));
    return y;
}
template <bool E4M3>
DEVICE void widen_codes(u32 codes, u32& low, u32& high) {  // four codes, e4m3 or int8, → float16
    if (E4M3) low = low_half2(codes), high = high_half2(codes);
    else  // the byte of x + 128 in the low half of 0x6400 is the float16 1024 + 128 + x
        asm("{.reg .b32 x, k; xor.b32 x, %2, 0x80808080; mov.b32 k, 0x64806480;"
            " prmt.b32 %0, x, 0x64646464, 0x5150; prmt.b32 %1, x, 0x64646464, 0x5352;"
            " sub.f16x2 %0, %0, k; sub.f16x2 %1, %1, k;}"
            : "=&r"(low), "=&r"(high) : "r"(codes));
}
DEVICE u32 pack_halves(float low, float high) {  // → float16
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <bool HALVES>
DEVICE u32 pack16(float low, float high) {  // → float16 if HALVES, else bfloat16
    if (HALVES) return pack_halves(low, high);
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE void unpack_half2(u32 pair, float& low, float& high) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(pair));
}
DEVICE u32 multiply_pair(u32 x, u32 y) {  // two bfloat16
    u32 z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 and_or(u32 x, u32 mask, u32 more) {  // x & mask | more in one instruction
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(more));
    return y;
}

DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }  // by nibble: a byte of a, from 4 on of b
DEVICE int sum_bytes(u32 word, int more = 0) { return __dp4a((int)word, 0x01010101, more); }  // with their signs

// --- memory
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint2 load_smem8(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
DEVICE uint4 load_smem16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
// Loads from L2 (.cg): for what other thread blocks wrote during this kernel, since L1 is not coherent.
DEVICE uint4 load_cg16(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE u16 load_cg2(const u16* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");  // not moved before this thread's writes
    return v;
}
DEVICE float load_cg4(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
DEVICE void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// --- beside the kernel before (`pdl.py`): let the next one start, and wait until the one before has ended
DEVICE void pdl_wait() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
DEVICE u64 cycles() { return clock64(); }

// --- mbarriers in shared memory: a phase ends when `count` threads and all expected bytes have arrived
DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
DEVICE void barrier_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {  // and arrive
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void bulk_prefetch(const void* from, u32 bytes) {  // into L2
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void sync_group(int group, int threads) {  // of consumers; a group has its own barrier
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "r"(threads) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }"
        ::"r"(barrier), "r"(parity)
        : "memory");
}
DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// L2 eviction policies for `bulk_copy`.
DEVICE u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 evict_normal_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// --- counters in memory
DEVICE void release_add(u32* counter) {  // a thread that acquires the new count sees this thread's earlier writes
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE u32 load_acquire(const u32* counter) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
// The same among GPUs that read each other's memory.
DEVICE void release_add_system(u32* counter) {
    asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE u32 load_acquire_system(const u32* counter) {
    u32 count;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
// 16 bytes between GPUs. Each of the four words arrives whole; they may arrive in any order.
DEVICE void store_system16(uint4* p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE uint4 load_system16(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)
                 : "memory");
    return v;
}
DEVICE u32 fetch_add(u32* counter) {  // returns the old count
    u32 count;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
DEVICE void relaxed_add(u64* number) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(number) : "memory");
}

// Transpose a matrix [8, 8] of 16-bit numbers: lane i has numbers 2 (i % 4) and the next of row i / 4.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE u32 warp_max(u32 x) { return __reduce_max_sync(~0u, x); }

// c += a · b on tensor cores: a [16, 16 or 32], b [16 or 32, 8].
template <bool HALVES>  // float16 operands, else bfloat16
DEVICE void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (HALVES)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma16<FORM == 1 || HALF>(c, a0, a1, a2, a3, b0, b1);  // FP8 codes were converted to float16
}
DEVICE void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same of bytes, a [16, 32] without a sign unless SIGNED, b [32, 8] with one.
template <bool SIGNED>
DEVICE void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED) mma(c, a0, a1, a2, a3, b0, b1);
    else
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
