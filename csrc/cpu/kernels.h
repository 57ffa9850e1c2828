// The table of functions that each instruction set has. A call computes a part of an operator; several threads call at once.
#pragma once
#include <stdint.h>

#include "formats.h"

// Asks for a line of weights, keys or values that is needed soon. It goes to the second cache: misses of the first have few places
// to wait in, and the two threads of a core share them (benchmarks/CPU_NOTES.md). Always inlined, as
// its callers must be that do nothing else: the compiler removes a call to a function without effects.
__attribute__((always_inline)) static inline void ask_for(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

struct LinearArgs {
    int32_t kind;
    int64_t rows, inner;
    const uint8_t* packed;
    const float* bias;  // may be null
    const uint8_t* x;   // in form_of(kind)
    int64_t x_stride;   // bytes
    float* y;
    int64_t y_stride;  // floats
    bool accumulate;   // y += instead of y =
    // Whole numbers may be multiplied as bfloat16 for tokens from `wide_from` on, whose rows in bfloat16 are `wide` (tiles_widened.h).
    const uint8_t* wide = nullptr;
    int64_t wide_from = 0;
    const float* row_scales = nullptr;  // of the sums of such a product
    uint8_t* unfolded = nullptr;        // where a product with S8 leaves a pair of panels as I8 for the tokens that follow (linear.h)
};

struct DrawParams {  // ss_draw_params
    int64_t seed, position;
    const uint32_t* mask;
    int32_t* logprobs;
    int64_t token;
    float temperature, top_p, min_p;
    int32_t top_k, mask_words, num_top;
};

constexpr int64_t DRAW_PART = 128;  // logits that are summed up together, a multiple of 32
static inline int64_t draw_parts(int64_t size) { return (size + DRAW_PART - 1) / DRAW_PART; }

struct DrawParts {  // of a row of logits: each part's largest, and its sum of e to (x − largest) / temperature; `plain` without
    float *top, *mass, *plain_top, *plain_mass;  // mask and temperature, for log-probabilities
};

struct Activated {  // ACT_CLAMPED_SWIGLU and ACT_XIELU alone have alpha and limit
    int32_t kind;
    float alpha, limit;
};

struct GatedArgs {  // rows: gate, then up; both rows / 2, a multiple of 32
    LinearArgs linear;
    Activated activation;
    int32_t form;
    uint8_t* out;
    int64_t out_stride;
};

struct NormArgs {
    bool layer;  // else rms
    int64_t size;
    const float *x, *weight, *bias;
    int64_t x_stride;
    float* residual;  // null: x is normed; else residual += x, and the sum is normed
    int64_t residual_stride;
    float eps, offset;
    int32_t form;
    uint8_t* out;
    int64_t out_stride;
};

struct ActivationArgs {
    Activated activation;
    int32_t form;
    bool gated;
    int64_t size;  // of a row of the result
    const float* x;
    int64_t x_stride;
    uint8_t* out;
    int64_t out_stride;
};

struct AttentionArgs {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    const int32_t* chosen = nullptr;  // positions of the keys that are read, in the place of 0, 1, …
    int64_t value_dim;  // head_dim; or less, and values are parts of the keys' rows (latent attention)
    float *qkv, *out;  // `out` may be columns of a wider buffer
    int64_t qkv_stride, out_stride;
    uint8_t *k, *v;  // [B, K, block_size, D] of the type `cache`; with latents v points into the first key
    const float *k_scale, *v_scale;
    int32_t cache;
    const int32_t *block_table, *query_start_loc, *seq_lens;
    int64_t table_stride;
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
    const float *slopes, *sinks;
    const float* distance_bias;  // [H, 2 · bias_range + 1], by key position − query position cut to ± bias_range
    int64_t bias_range;
    bool causal;  // else a token sees all of its sequence, or the window on both sides
    // rope_and_cache
    const int64_t *positions, *slots;
    const float *cos_sin, *q_norm, *k_norm;
    int64_t rotary_dim;
    bool interleaved, norm_after;  // norm_after: norms come behind the rotation
    float norm_eps, norm_offset;
    float value_eps;  // below 0: values have no norm
    bool own_values;  // else they are the keys before their norm
};

static inline bool latent(const AttentionArgs& a) { return a.value_dim < a.head_dim; }

// A token in latent attention. `q` has nope_dim and rotary numbers for each head, `row` the latent and the rotary key.
struct LatentArgs {
    const float *q, *row;
    int64_t q_stride, row_stride;
    int64_t nope_dim, rank;
    const float* norm;  // [rank]
    float* queries;     // [H, rotary + rank]: the first part of each, rotated
    int64_t queries_stride;
    int32_t form;
    uint8_t* plain;  // [H · nope_dim] in `form`
    int64_t plain_stride;
};

struct Partial {  // the softmax's running maximum and sum of one row; the weighted values are stored elsewhere
    float top, sum;
};

struct KeyRange {  // keys of a sequence and kv head that a decode task reads, for all of the sequence's new tokens
    int64_t seq, kv_head, begin, end, tokens;
};

struct StateStep {  // the tokens of a step's sequences; the slots that they read and keep, 0 for none (StateMetadata)
    const int32_t *starts, *read, *write;
};

struct ConvArgs {
    StateStep step;
    const float *x, *factor, *gate;  // one row stride. `factor` multiplies inputs, `gate` results; both may be null
    int64_t x_stride, channels, width;
    const float *weight, *bias;  // [width, channels], the newest input's row last; the bias may be null
    bool silu, bf16;             // bf16: the type of `state`, else float32
    uint8_t* state;              // [N, width − 1, channels]
    int32_t form;
    uint8_t* out;  // may be x, in float32
    int64_t out_stride;
};

struct DeltaArgs {
    StateStep step;
    const float *x, *beta, *decay;  // [T, q, k and v], [T, H], [T, H] or by channel [T, H · K]
    int64_t x_stride, beta_stride, decay_stride;
    const float *rate, *time;  // −exp(A) [H]; [H] or [H · K]
    int64_t num_key_heads, num_heads, key_dim, value_dim;
    bool by_channel;
    float beta_scale, bound;
    float* states;  // [N, H, K, V]
    float* out;     // [T, H · V]
    int64_t out_stride;
};

struct SsdArgs {
    StateStep step;
    const float *x, *dt;  // [T, x, B and C], [T, H]
    int64_t x_stride, dt_stride;
    const float *rate, *time, *skip;  // −exp(A), the bias of dt, D: [H]
    int64_t num_groups, num_heads, key_dim, value_dim;
    float least, most;
    float *states, *out;
    int64_t out_stride;
};

struct ScanArgs {
    StateStep step;
    const float *x, *dt, *b, *c;
    int64_t x_stride, dt_stride, b_stride, c_stride;
    const float *rate, *time, *skip;  // −exp(A) · log₂ e [⌈C / 16⌉, K, 16]; [C]
    int64_t channels, key_dim;
    float *states, *out;  // [N, C, K]
    int64_t out_stride;
};

struct GatedNormArgs {
    const float *x, *z, *weight;  // weight [size], null: no norm
    int64_t x_stride, z_stride, size, group;
    float eps;
    bool silu, gate_first;  // silu: z · σ(z), else σ(z)
    int32_t form;
    uint8_t* out;
    int64_t out_stride;
};

struct Kernels {
    const char* name;
    // scratch: linear_scratch() floats from a multiple of 64 bytes
    void (*linear)(const LinearArgs&, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch);
    void (*gated)(const GatedArgs&, int64_t pair0, int64_t pair1, int64_t token0, int64_t token1, float* scratch);
    void (*norm)(const NormArgs&, int64_t row, float* scratch);
    void (*activation)(const ActivationArgs&, int64_t row, float* scratch);
    void (*convert)(const float* x, int64_t size, int32_t form, uint8_t* out);
    void (*rope_and_cache)(const AttentionArgs&, int64_t token, float* scratch);
    void (*latent_row)(const AttentionArgs&, const LatentArgs&, int64_t token, float* scratch);
    void (*decode)(const AttentionArgs&, const KeyRange& range, const KeyRange* then, Partial* part, float* mixed, float* scratch);
    void (*join_ranges)(const AttentionArgs&, const KeyRange& range, const Partial* part, const float* mixed, int64_t count);
    void (*prefill)(const AttentionArgs&, int64_t seq, int64_t kv_head, int64_t token0, int64_t token1, float* scratch);
    float (*largest)(const float* x, int64_t size);
    int64_t (*argmax)(const float* x, int64_t size);
    void (*summarize)(const DrawParams&, const float* x, int64_t first, int64_t n, int64_t part, const DrawParts&);
    // The parts are overwritten. scratch: 4 · size + draw_parts(size) + 64 floats
    int64_t (*draw)(const DrawParams&, const float* x, int64_t size, const DrawParts&, float* scratch);
    float (*ceiling)(int32_t what, const uint8_t* data, int64_t bytes, int64_t rounds);
    int64_t (*ceiling_macs)(int32_t what);
    int64_t (*decode_scratch)(const AttentionArgs&, int64_t tokens);  // floats
    int64_t (*prefill_scratch)(const AttentionArgs&, int64_t tokens);
    void (*widen)(const uint8_t* row, int64_t size, uint8_t* to);  // from 8 bits to bfloat16; null where products have no use for it
    // Recurrent layers. scratch: the number of floats that the function with its name and `_scratch` tells
    void (*conv)(const ConvArgs&, int64_t seq, int64_t c0, int64_t c1, float* scratch) = nullptr;
    void (*delta)(const DeltaArgs&, int64_t seq, int64_t head, int64_t v0, int64_t v1, float* scratch) = nullptr;
    void (*ssd)(const SsdArgs&, int64_t seq, int64_t head, int64_t v0, int64_t v1, float* scratch) = nullptr;
    void (*scan)(const ScanArgs&, int64_t seq, int64_t c0, int64_t c1, float* scratch) = nullptr;
    void (*gated_norm)(const GatedNormArgs&, int64_t row, float* scratch) = nullptr;
    int64_t (*conv_scratch)(const ConvArgs&) = nullptr;
    int64_t (*delta_scratch)(const DeltaArgs&) = nullptr;
    int64_t (*ssd_scratch)(const SsdArgs&) = nullptr;
    int64_t (*scan_scratch)(const ScanArgs&) = nullptr;
    // scores[j] = Σ weights[h] · max(0, q[h] · key j) of a sequence's first n keys; scratch: (H + 1) · D, each D a multiple of 16
    void (*index_scores)(const AttentionArgs&, int64_t seq, int64_t n, const float* q, const float* weights, float* scores,
                         float* scratch) = nullptr;
};

// Room for two pairs of panels of whole numbers, unpacked to I8 or bfloat16 for many tokens.
static inline int64_t linear_scratch(const LinearArgs& a) {
    return form_of(a.kind) == FORM_Q ? Layout(KIND_BF16, 4 * PANEL, a.inner).bytes / 4 : 0;
}

constexpr int64_t KEY_TILE = 64;
constexpr int64_t KEY_RANGE = 128;  // keys that have a softmax of their own, and that a decode's task reads

const Kernels* kernels_portable();
const Kernels* tiles_portable();  // products and attention alone
bool tiles_agree(const Kernels& tiles, const Kernels& base);  // in some small products
#if defined(__x86_64__)
const Kernels* kernels_avx2();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512vnni();
const Kernels* kernels_avx512vbmi2();
const Kernels* kernels_avx512bf16();
#if defined(SLIPSTREAM_AMX)
const Kernels* tiles_amx();  // the same
#endif
#elif defined(__aarch64__) && defined(__linux__)
const Kernels* kernels_neon();
const Kernels* kernels_neoni8mm();
#endif
