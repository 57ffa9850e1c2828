// The C interface of libslipstream_cpu: plain pointers and numbers, so that one binary serves every Python and every torch.
//
// An engine is a pool of threads and an instruction set. A program is a list of operators over buffers, made once for a model
// and run for every step. Buffers hold a row a token; they are the program's own, or the caller's (`ss_bind`). Nothing here
// checks shapes: the bindings (slipstream/kernels/native.py) do. Pointers that operators are given must outlive the program.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define SS_API __attribute__((visibility("default")))
#else
#define SS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ss_engine ss_engine;
typedef struct ss_program ss_program;

#define SS_ABI 11  // changes with anything in this file
SS_API int32_t ss_abi(void);

// Instruction sets by number, from the plainest; which of them this machine can run.
SS_API int32_t ss_num_isas(void);
SS_API const char* ss_isa_name(int32_t isa);
SS_API int32_t ss_isa_usable(int32_t isa);

SS_API ss_engine* ss_engine_create(int32_t num_threads, int32_t isa);
SS_API void ss_engine_destroy(ss_engine* engine);

// Weights: see formats.h for the kinds and pack.h for the functions. Rows are packed by the engine's threads; without one (null),
// by the caller alone.
SS_API int64_t ss_packed_bytes(int32_t kind, int64_t rows, int64_t inner);
SS_API void ss_pack_dense(ss_engine*, int32_t kind, int64_t rows, int64_t inner, void* packed, const void* values, int32_t bf16,
                          int64_t stride, int64_t count, int64_t row0, const int32_t* to);
SS_API void ss_pack_codes(ss_engine*, int64_t rows, int64_t inner, void* packed, const int8_t* codes, const float* scales,
                          int64_t count, int64_t row0, const int32_t* to);
SS_API void ss_pack_blocks(ss_engine*, int32_t kind, int64_t rows, int64_t inner, void* packed, const void* blocks, int64_t count,
                           int64_t row0, const int32_t* to);
SS_API void ss_pack_codes4(ss_engine*, int32_t kind, int64_t rows, int64_t inner, void* packed, const uint8_t* codes,
                           const float* scales, const float* minima, int64_t count, int64_t row0, const int32_t* to);
SS_API int64_t ss_num_zeros(int64_t rows, int64_t inner, const void* packed);
SS_API int64_t ss_sparse_bytes(int64_t rows, int64_t inner, const void* packed);
SS_API void ss_pack_sparse(int64_t rows, int64_t inner, const void* packed, void* sparse);
SS_API void ss_unpack_rows(int32_t kind, int64_t rows, int64_t inner, const void* packed, const int64_t* which, int64_t count,
                           float* out);

SS_API ss_program* ss_program_create(ss_engine* engine);
SS_API void ss_program_destroy(ss_program* program);
SS_API int32_t ss_buffer(ss_program* program, int64_t row_bytes, int64_t rows_a_token);  // row_bytes 0: to be bound
SS_API void ss_bind(ss_program* program, int32_t buffer, void* data, int64_t row_bytes);
SS_API int64_t ss_form_bytes(int32_t form, int64_t size);

// Operators, in the order of their running. x, out …: buffers. A negative buffer or null pointer: without.
SS_API void ss_add_embed(ss_program*, int32_t out, int32_t by_position, int64_t offset, int32_t kind, int64_t rows, int64_t inner,
                         const void* packed, float scale, int32_t accumulate);
SS_API void ss_add_norm(ss_program*, int32_t x, int32_t residual, int32_t out, int32_t form, int32_t layer, int64_t size,
                        const float* weight, const float* bias, float eps, float offset);
SS_API void ss_add_convert(ss_program*, int32_t x, int32_t out, int32_t form, int64_t size, int64_t rows_a_token);
SS_API void ss_add_linear(ss_program*, int32_t x, int32_t out, int64_t column, int32_t kind, int64_t rows, int64_t inner,
                          const void* packed, const float* bias, int32_t accumulate);
// alpha, limit: of the clamped SwiGLU.
// num_heads products, of weights `stride` bytes apart (F32 or BF16) with inputs that stand side by side in x's row, [H · inner] in
// the weights' form, into columns `column_step` apart.
SS_API void ss_add_head_linear(ss_program*, int32_t x, int32_t out, int64_t column, int64_t column_step, int64_t num_heads,
                               int32_t kind, int64_t rows, int64_t inner, const void* packed, int64_t stride);
SS_API void ss_add_gated_linear(ss_program*, int32_t x, int32_t out, int32_t form, int32_t activation, float alpha, float limit,
                                int32_t kind, int64_t rows, int64_t inner, const void* packed, const float* bias);
SS_API void ss_add_activation(ss_program*, int32_t x, int32_t out, int32_t form, int32_t activation, float alpha, float limit,
                              int32_t gated, int64_t size, int64_t rows_a_token);
// A mixture of experts (`OpSet.moe`): each token's experts by the router's numbers; then the tokens' rows in the order of their
// experts, products of these rows, and the sum over each token's. counts: a buffer for int64 [experts], bound if they are counted.
SS_API void ss_add_route(ss_program*, int32_t logits, int64_t num_experts, int64_t each, int32_t sigmoid, int32_t normalize,
                         float weight_scale, const float* correction, int64_t num_groups, int64_t num_chosen_groups,
                         int32_t best_two);
SS_API void ss_add_gather(ss_program*, int32_t x, int32_t out, int32_t form, int64_t size, int32_t counts);
// The weights of all experts, [rows, inner] each, `stride` bytes apart, and their biases, `bias_stride` floats apart. form negative: y,
// from `column` on; else gate and up, whose activation goes out in that form.
SS_API void ss_add_expert_linear(ss_program*, int32_t x, int32_t out, int64_t column, int32_t form, int32_t activation, float alpha,
                                 float limit, int32_t kind, int64_t rows, int64_t inner, const void* packed, int64_t stride,
                                 const float* bias, int64_t bias_stride);
// shared: rows of the tokens' own, added as they are, or times the logistic function of shared_weight's one number.
SS_API void ss_add_combine(ss_program*, int32_t x, int32_t out, int64_t size, int32_t shared, int32_t shared_weight,
                           int32_t accumulate);
// group: whose tables and slots are used (`ss_step.groups`).
SS_API void ss_add_rope_and_cache(ss_program*, int32_t qkv, int32_t layer, int32_t group, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, const float* cos_sin, int64_t rotary_dim, int32_t interleaved,
                                  const float* q_norm, const float* k_norm, float eps, float offset);
// Latent attention (`OpSet.mla_queries`), but for the product: of q, float32 [H, nope_dim + rotary_dim], and row, float32
// [rank + rotary_dim], the cache gets [rotary_dim rotated, rank normed]; the rotated first rotary_dim of each head's rotary_dim + rank
// go to queries (float32), the plain numbers, which a product takes to the other ones, to plain, [H · nope_dim] in `form`.
SS_API void ss_add_latent_queries(ss_program*, int32_t q, int32_t row, int32_t queries, int32_t plain, int32_t form, int32_t layer,
                                  int64_t num_heads, int64_t nope_dim, int64_t rank, const float* norm, float eps,
                                  const float* cos_sin, int64_t rotary_dim, int32_t interleaved);
// value_dim: head_dim, or less, if the values are parts of the keys' rows (`LayerKV.latent`).
SS_API void ss_add_attention(ss_program*, int32_t q, int32_t out, int32_t layer, int32_t group, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t value_dim, float scale, int64_t window,
                             float softcap, const float* slopes, const float* sinks, const float* distance_bias,
                             int64_t bias_range, int32_t causal);
// Every thread does nothing but read, or nothing but multiply and add (formats.h's Ceiling); `data` [bytes] is zeros.
SS_API void ss_add_ceiling(ss_program*, int32_t what, const void* data, int64_t bytes, int64_t rounds);
SS_API int64_t ss_ceiling_macs(ss_engine*, int32_t what, int64_t rounds);  // multiplications of such an operator, all threads'
// Where a row is largest, int64: the first of equals. Of a row there is, or of a product's, which is never written.
SS_API void ss_add_argmax(ss_program*, int32_t x, int32_t out, int64_t size);
SS_API void ss_add_linear_argmax(ss_program*, int32_t x, int32_t out, int32_t kind, int64_t rows, int64_t inner, const void* packed,
                                 const float* bias);

typedef struct {
    void *k, *v;  // [B, K, block_size, D]; of latents v points into the first key
    const float *k_scale, *v_scale;
} ss_layer_kv;

typedef struct {  // where a group of layers finds the sequences' keys and values
    const int32_t *seq_lens, *block_table;
    int64_t table_stride;
    const int64_t* slots;
} ss_group;

typedef struct {  // one step; see AttentionMetadata in slipstream/kernels/metadata.py
    int64_t num_tokens, num_seqs, num_decodes, block_size;
    int32_t cache;  // the cache's type: 0 float32, 1 bfloat16, 2 int8
    const int32_t *token_ids, *query_start_loc;
    const int64_t* positions;
    const ss_group* groups;
    const ss_layer_kv* layers;
} ss_step;

SS_API void ss_run(ss_program* program, ss_program* then, const ss_step* step);  // `then`: another over the same tokens, or null
// The same, in two calls: between them the engine's other threads compute. Packing, running, binding, profiling and destroying wait
// first if they are called meanwhile; adding buffers and operators to these programs is not allowed. All calls are one thread's.
// `step` is copied; what it and the programs point to must live until `ss_wait`.
SS_API void ss_begin(ss_program* program, ss_program* then, const ss_step* step);
SS_API void ss_wait(ss_program* program);
// Nanoseconds that each operator took in all runs since the last call, which started a clock: 1 the wall's, 2 the processor time of
// all threads (which a busy neighbour leaves alone), 0 none. Returns how many operators there are.
SS_API int32_t ss_profile(ss_program* program, int32_t clock, int64_t* ns, int32_t capacity);

#ifdef __cplusplus
}
#endif
