// The C interface: instruction sets, weights, buffers, running. Operators are added in program.cpp and experts.cpp.
#include "pack.h"
#include "program.h"
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

struct Set {
    const Kernels* (*kernels)();
    bool (*usable)();
    bool (*right)() = nullptr;  // whether it computes what it should, where machines are known not to
};

// Packs `count` rows on an engine's threads. Each piece is whole panels, so that threads share few cache lines.
template <class Pack>
struct Pieces final : Job {
    Pieces(int64_t count, int64_t pieces, Pack pack) : count(count), each(round_up((count + pieces - 1) / pieces, PANEL)), pack(pack) {}
    int num_ops() const override { return 1; }
    int begin(int) override { return (int)((count + each - 1) / each); }
    void run(int, int chunk, int) override { pack(chunk * each, std::min(count, (chunk + 1) * each)); }
    void ended(int) override {}
    int64_t count, each;
    Pack pack;
};

template <class Pack>
void in_pieces(ss_engine* engine, int64_t count, Pack pack) {
    if (!engine || count < 2 * PANEL) return pack((int64_t)0, count);
    Pool& pool = shared(engine)->pool;
    Pieces<Pack> job(count, 8 * pool.num_threads(), pack);
    pool.run(job);
}

bool always() { return true; }

Kernels with_tiles(Kernels base, const Kernels& tiles) {
    base.name = tiles.name, base.linear = tiles.linear, base.gated = tiles.gated;
    base.prefill = tiles.prefill, base.prefill_scratch = tiles.prefill_scratch, base.widen = tiles.widen;
    base.ceiling = tiles.ceiling, base.ceiling_macs = tiles.ceiling_macs;
    return base;
}
const Kernels* kernels_portable_amx() {
    static const Kernels table = with_tiles(*kernels_portable(), *tiles_portable());
    return &table;
}
bool portable_amx_right() { return tiles_agree(*tiles_portable(), *kernels_portable()); }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
#if defined(SLIPSTREAM_AVXVNNI)
bool has_avxvnni();
#endif
#if defined(SLIPSTREAM_AMX)
bool has_amx();
const Kernels* kernels_amx() {
    static const Kernels table = with_tiles(*kernels_avx512bf16(), *tiles_amx());
    return &table;
}
bool amx_right() { return tiles_agree(*tiles_amx(), *kernels_avx512bf16()); }
#endif
#if defined(SLIPSTREAM_AVX512)
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_vbmi2() { return has_vnni() && __builtin_cpu_supports("avx512vbmi2"); }
bool has_bf16() { return has_vbmi2() && __builtin_cpu_supports("avx512bf16"); }
#endif
#elif defined(__aarch64__) && defined(__linux__)
bool has_neon() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_i8mm() { return has_neon() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) && (getauxval(AT_HWCAP2) & HWCAP2_BF16); }
#endif

const Set sets[] = {
    {kernels_portable_amx, always, portable_amx_right}, {kernels_portable, always},
#if defined(__x86_64__)
    {kernels_avx2, has_avx2},
#if defined(SLIPSTREAM_AVXVNNI)
    {kernels_avxvnni, has_avxvnni},
#endif
#if defined(SLIPSTREAM_AVX512)
    {kernels_avx512, has_avx512},
#if defined(SLIPSTREAM_AVX512_BETWEEN)
    {kernels_avx512vnni, has_vnni}, {kernels_avx512vbmi2, has_vbmi2},
#endif
    {kernels_avx512bf16, has_bf16},
#endif
#if defined(SLIPSTREAM_AMX)
    {kernels_amx, has_amx, amx_right},
#endif
#elif defined(__aarch64__) && defined(__linux__)
    {kernels_neon, has_neon},       {kernels_neoni8mm, has_i8mm},
#endif
};

}  // namespace

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
namespace {
#if defined(SLIPSTREAM_AVXVNNI)
bool has_avxvnni() {
    unsigned a = 0, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif
#if defined(SLIPSTREAM_AMX)
// Linux saves the tile registers of a process that has asked for them, all of its threads. It refuses where a thread's stack for
// signals is too small for them.
bool may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return may;
}
bool has_amx() {
    unsigned a, b, c, d = 0;
    constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, all = bf16 | tile;
    return has_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all && may_use_tiles();
}
#endif
}  // namespace
#endif

int32_t ss_abi(void) { return SS_ABI; }
int32_t ss_num_isas(void) { return (int32_t)(sizeof sets / sizeof *sets); }
const char* ss_isa_name(int32_t isa) { return sets[isa].kernels()->name; }
int32_t ss_isa_usable(int32_t isa) {
    const Set& set = sets[isa];
    return !set.usable() ? 0 : !set.right || set.right() ? 1 : -1;
}

ss_engine* ss_engine_create(int32_t num_threads, int32_t isa) {
    return (ss_engine*)new std::shared_ptr<Engine>(std::make_shared<Engine>(num_threads, sets[isa].kernels()));
}
void ss_engine_destroy(ss_engine* engine) { delete &shared(engine); }
void ss_engine_use(ss_engine* engine, int32_t num_threads) { shared(engine)->pool.use(num_threads); }
int64_t ss_engine_last_ns(ss_engine* engine) { return shared(engine)->pool.last_ns(); }

int64_t ss_packed_bytes(int32_t kind, int64_t rows, int64_t inner) { return Layout(kind, rows, inner).bytes; }
void ss_pack_dense(ss_engine* engine, int32_t kind, int64_t rows, int64_t inner, void* packed, const void* values, int32_t bf16,
                   int64_t stride, int64_t count, int64_t row0, const int32_t* to) {
    in_pieces(engine, count, [=](int64_t i, int64_t end) {
        const uint8_t* from = (const uint8_t*)values + i * stride * (bf16 ? 2 : 4);
        pack_dense(kind, rows, inner, (uint8_t*)packed, from, bf16, stride, end - i, row0 + i, to ? to + i : to);
    });
}
void ss_pack_codes(ss_engine* engine, int64_t rows, int64_t inner, void* packed, const int8_t* codes, const float* scales,
                   int64_t count, int64_t row0, const int32_t* to) {
    in_pieces(engine, count, [=](int64_t i, int64_t end) {
        pack_codes(rows, inner, (uint8_t*)packed, codes + i * inner, scales + i, end - i, row0 + i, to ? to + i : to);
    });
}
void ss_pack_blocks(ss_engine* engine, int32_t kind, int64_t rows, int64_t inner, void* packed, const void* blocks, int64_t count,
                    int64_t row0, const int32_t* to) {
    const int64_t row_bytes = inner / (is_k(kind) ? SUPER * GROUP : GROUP) * block_bytes(kind);
    in_pieces(engine, count, [=](int64_t i, int64_t end) {
        const uint8_t* from = (const uint8_t*)blocks + i * row_bytes;
        pack_blocks(kind, rows, inner, (uint8_t*)packed, from, end - i, row0 + i, to ? to + i : to);
    });
}
void ss_pack_codes4(ss_engine* engine, int32_t kind, int64_t rows, int64_t inner, void* packed, const uint8_t* codes,
                    const float* scales, const float* minima, int64_t count, int64_t row0, const int32_t* to) {
    const int64_t each = groups_a_scale(kind), num_scales = (inner / GROUP + each - 1) / each;
    in_pieces(engine, count, [=](int64_t i, int64_t end) {
        const float* low = minima ? minima + i * num_scales : minima;
        pack_codes4(kind, rows, inner, (uint8_t*)packed, codes + i * inner, scales + i * num_scales, low, end - i, row0 + i,
                    to ? to + i : to);
    });
}
int64_t ss_num_zeros(int64_t rows, int64_t inner, const void* packed) { return num_zeros(rows, inner, (const uint8_t*)packed); }
int64_t ss_sparse_bytes(int64_t rows, int64_t inner, const void* packed) { return sparse_bytes(rows, inner, (const uint8_t*)packed); }
void ss_pack_sparse(int64_t rows, int64_t inner, const void* packed, void* sparse) {
    pack_sparse(rows, inner, (const uint8_t*)packed, (uint8_t*)sparse);
}
void ss_unpack_sparse(int64_t rows, int64_t inner, const void* sparse, void* packed) {
    unpack_sparse(rows, inner, (const uint8_t*)sparse, (uint8_t*)packed);
}
void ss_unpack_rows(int32_t kind, int64_t rows, int64_t inner, const void* packed, const int64_t* which, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) unpack_row(kind, rows, inner, (const uint8_t*)packed, which[i], out + i * inner);
}

int64_t ss_form_bytes(int32_t form, int64_t size) { return form_bytes(form, size); }

ss_program* ss_program_create(ss_engine* engine) { return (ss_program*)new Program(shared(engine)); }
void ss_program_destroy(ss_program* program) { delete (Program*)program; }
int32_t ss_buffer(ss_program* program, int64_t row_bytes, int64_t rows_a_token) {
    return ((Program*)program)->add_buffer(row_bytes, rows_a_token);
}
void ss_bind(ss_program* program, int32_t buffer, void* data, int64_t row_bytes) {
    ((Program*)program)->bind(buffer, data, row_bytes);
}
void ss_run(ss_program* program, ss_program* then, const ss_step* step) {
    ss_begin(program, then, step);
    ss_wait(program);
}
void ss_begin(ss_program* program, ss_program* then, const ss_step* step) {
    if (step->num_tokens > 0) ((Program*)program)->begin_step(*step, (Program*)then);
}
void ss_wait(ss_program* program) { ((Program*)program)->wait(); }
void ss_run_job(void* job) {
    ss_step step{};
    step.num_tokens = ((ss_job*)job)->num_tokens;
    ss_run(((ss_job*)job)->program, nullptr, &step);
}
int32_t ss_profile(ss_program* program, int32_t clock, int64_t* ns, int32_t capacity) {
    return ((Program*)program)->profile(clock, ns, capacity);
}
