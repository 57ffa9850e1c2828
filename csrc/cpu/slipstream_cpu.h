// The C interface of libslipstream_cpu: plain pointers and numbers, so that one binary serves every Python and every torch.
//
// 1. An engine is a pool of threads and an instruction set.
// 2. A program is a list of operators over buffers. It is made once for a model and runs for every step.
// 3. A buffer has a row for each token. It is the program's own, or the caller's (`ss_bind`).
// 4. The bindings (slipstream/kernels/cpu/native.py) check shapes; nothing here does.
// 5. Pointers that operators are given must outlive the program.
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

#define SS_ABI 36  // changes with any declaration in this file
SS_API int32_t ss_abi(void);

// Instruction sets by number, the plainest first, and whether this machine can run one: 1 yes, 0 no, −1 with wrong results.
SS_API int32_t ss_num_isas(void);
SS_API const char* ss_isa_name(int32_t isa);
SS_API int32_t ss_isa_usable(int32_t isa);

SS_API ss_engine* ss_engine_create(int32_t num_threads, int32_t isa);
SS_API void ss_engine_destroy(ss_engine* engine);
SS_API void ss_engine_use(ss_engine* engine, int32_t num_threads);  // of its threads; results stay the same
SS_API int64_t ss_engine_last_ns(ss_engine* engine);                // that the last step took, after it was waited for

// Weights. formats.h has the kinds, pack.h the functions. The engine's threads pack rows; without an engine (null) the caller does.
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
SS_API void ss_unpack_sparse(int64_t rows, int64_t inner, const void* sparse, void* packed);  // packed: zeros
SS_API void ss_unpack_rows(int32_t kind, int64_t rows, int64_t inner, const void* packed, const int64_t* which, int64_t count,
                           float* out);

SS_API ss_program* ss_program_create(ss_engine* engine);
SS_API void ss_program_destroy(ss_program* program);
SS_API int32_t ss_buffer(ss_program* program, int64_t row_bytes, int64_t rows_a_token);  // row_bytes 0: `ss_bind` gives its memory
SS_API void ss_bind(ss_program* program, int32_t buffer, void* data, int64_t row_bytes);
SS_API int64_t ss_form_bytes(int32_t form, int64_t size);

// Operators run in the order in which they are added. x, out and the like are buffers. A negative buffer or a null pointer means
// that there is none. alpha and limit are those of the clamped SwiGLU.
SS_API void ss_add_embed(ss_program*, int32_t out, int32_t by_position, int64_t offset, int32_t kind, int64_t rows, int64_t inner,
                         const void* packed, float scale, int32_t accumulate);
SS_API void ss_add_norm(ss_program*, int32_t x, int32_t residual, int32_t out, int32_t form, int32_t layer, int64_t size,
                        const float* weight, const float* bias, float eps, float offset);
// Norms `parts` pieces of a float32 row in place, `size` numbers each, side by side from `column` on. The weights and biases of a
// piece lie `weight_step` after those of the one before it.
SS_API void ss_add_norm_parts(ss_program*, int32_t x, int64_t column, int64_t parts, int32_t layer, int64_t size,
                              const float* weight, const float* bias, int64_t weight_step, float eps, float offset);
// In place, the first `size` numbers of a float32 row: times `factor`, times by_position [positions] at the token's position if
// there is one, and clamped to ±limit if that is above 0.
SS_API void ss_add_scale(ss_program*, int32_t x, int64_t size, float factor, const float* by_position, float limit);
SS_API void ss_add_convert(ss_program*, int32_t x, int32_t out, int32_t form, int64_t size, int64_t rows_a_token);
// `size` float32 columns of x's rows, from `start` on → columns of out's rows, from `column` on.
SS_API void ss_add_place(ss_program*, int32_t x, int64_t start, int32_t out, int64_t column, int64_t size);
// y = (x + y) · factor, in place; without x y · factor.
SS_API void ss_add_sum(ss_program*, int32_t x, int32_t y, int64_t size, float factor);
// x = (norm(x) + scale · row) · factor, in place; an RMS norm over each `size` of x's `inner` numbers. The token's row of a table is
// read as by `ss_add_embed`.
SS_API void ss_add_layer_inputs(ss_program*, int32_t x, int32_t kind, int64_t rows, int64_t inner, const void* packed, float scale,
                                int64_t size, const float* norm, float eps, float offset, float factor);
// act(x) · inputs[column : column + size] → out in `form`.
SS_API void ss_add_gated_by(ss_program*, int32_t x, int32_t inputs, int32_t out, int64_t column, int32_t form, int32_t activation,
                            float alpha, float limit, int64_t size);
// A weight of the kind S8 may also be there as I8, `dense` (else null), which steps of `dense_from` tokens and more read.
SS_API void ss_add_linear(ss_program*, int32_t x, int32_t out, int64_t column, int32_t kind, int64_t rows, int64_t inner,
                          const void* packed, const float* bias, int32_t accumulate, const void* dense, int64_t dense_from);
// num_heads products with weights `stride` bytes apart (F32 or BF16). Their inputs stand side by side in x's row, [H · inner] in the
// weights' form; their results begin `column_step` columns apart.
SS_API void ss_add_head_linear(ss_program*, int32_t x, int32_t out, int64_t column, int64_t column_step, int64_t num_heads,
                               int32_t kind, int64_t rows, int64_t inner, const void* packed, int64_t stride);
SS_API void ss_add_gated_linear(ss_program*, int32_t x, int32_t out, int32_t form, int32_t activation, float alpha, float limit,
                                int32_t kind, int64_t rows, int64_t inner, const void* packed, const float* bias,
                                const void* dense, int64_t dense_from);
SS_API void ss_add_activation(ss_program*, int32_t x, int32_t out, int32_t form, int32_t activation, float alpha, float limit,
                              int32_t gated, int64_t size, int64_t rows_a_token);
// A mixture of experts (`OpSet.moe`) is four operators: choose each token's experts, sort the pairs by expert, their products, and
// the weighted sum over each token's. counts: a buffer for int64 [experts], bound if tokens are counted. Weights
// and biases are of the `held` experts from `first` on; the sum leaves the others out. Those from `identity` on (−1: none) return
// their input. With `nearness` above
// 0 the softmax of a choice is over what is left and near the largest logit (`MoESpec.nearness`).
SS_API void ss_add_route(ss_program*, int32_t logits, int64_t num_experts, int64_t each, int32_t sigmoid, float nearness, int32_t normalize,
                         float weight_scale, const float* correction, const float* scales, int64_t num_groups, int64_t num_chosen_groups,
                         int32_t best_two, int64_t first, int64_t held, int64_t identity);
// In the place of `route`, where the choice was made elsewhere: a row of x has the token's experts and then their weights, float32
// [2 · each]. An expert below 0 is none.
SS_API void ss_add_choice(ss_program*, int32_t x, int64_t num_experts, int64_t each);
// `scaled`: the rows are multiplied by the weights of their pairs, in the place of the experts' results.
SS_API void ss_add_gather(ss_program*, int32_t x, int32_t out, int32_t form, int64_t size, int32_t counts, int32_t scaled);
// The experts' weights, [rows, inner] each, lie `stride` bytes apart, their biases `bias_stride` floats. form negative: the result
// is y, from `column` on. Else the product is gate and up, and the result is their activation in that form.
SS_API void ss_add_expert_linear(ss_program*, int32_t x, int32_t out, int64_t column, int32_t form, int32_t activation, float alpha,
                                 float limit, int32_t kind, int64_t rows, int64_t inner, const void* packed, int64_t stride,
                                 const float* bias, int64_t bias_stride);
// shared: a row for each token that is added, if there is a shared_weight times the logistic function of its one number. rows: the
// tokens' rows, added with the weights of the experts that have no result, or −1.
SS_API void ss_add_combine(ss_program*, int32_t x, int32_t out, int64_t size, int32_t shared, int32_t shared_weight,
                           int32_t accumulate, int32_t rows);
// group: the one of `ss_step.groups` whose table and slots are used. value_eps ≥ 0: an RMS norm of each value. Without own_values
// the values are the keys before their norm, and the row ends with these. index: the keys go to the layer's index, which has no
// values.
SS_API void ss_add_rope_and_cache(ss_program*, int32_t qkv, int32_t layer, int32_t group, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, const float* cos_sin, int64_t rotary_dim, int32_t interleaved,
                                  const float* q_norm, const float* k_norm, float eps, float offset, float value_eps,
                                  int32_t own_values, int32_t norm_after, int32_t index);
// Latent attention (`OpSet.mla_queries`) without its product. q is float32 [H, nope_dim + rotary_dim], row float32
// [rank + rotary_dim].
// 1. The cache gets the row as [rotary_dim rotated, rank normed].
// 2. queries, float32 [H, rotary_dim + rank], get the heads' rotated numbers.
// 3. plain, [H · nope_dim] in `form`, gets the numbers that the product takes to the queries' other rank numbers.
SS_API void ss_add_latent_queries(ss_program*, int32_t q, int32_t row, int32_t queries, int32_t plain, int32_t form, int32_t layer,
                                  int64_t num_heads, int64_t nope_dim, int64_t rank, const float* norm, float eps,
                                  const float* cos_sin, int64_t rotary_dim, int32_t interleaved);
// value_dim: head_dim; or less if values are parts of the keys' rows (`LayerKV.latent`).
SS_API void ss_add_attention(ss_program*, int32_t q, int32_t out, int32_t layer, int32_t group, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t value_dim, float scale, int64_t window,
                             float softcap, const float* slopes, const float* sinks, const float* distance_bias,
                             int64_t bias_range, int32_t causal);
// Sparse attention (`IndexSpec`). choose: q, float32 [H · D], rotated, and a weight for each head → out, int32 [top_k]: the
// positions of the chosen keys in rising order. Nothing is written for a token that sees up to top_k keys.
SS_API void ss_add_choose(ss_program*, int32_t q, int32_t weights, int32_t out, int32_t layer, int64_t num_heads, int64_t head_dim,
                          int64_t top_k);
// `ss_add_attention` with one kv head over the chosen keys, token by token, so a token's result depends on nothing else in the step.
SS_API void ss_add_sparse_attention(ss_program*, int32_t q, int32_t chosen, int32_t out, int32_t layer, int64_t num_heads,
                                    int64_t head_dim, int64_t value_dim, int64_t top_k, float scale);
// Recurrent layers (slipstream/spec/recurrent.py). States are those of the layer's slots: `ss_step` says which a sequence reads and
// keeps. Columns are those of x's rows.
// conv: the layer's convolution of `channels` columns from `column` on. factor, gate: the first column of what the inputs and the
// results are multiplied by, or −1. weight [width, channels]. out: float32 in place (out = x), or a row of results in `form`.
SS_API void ss_add_conv(ss_program*, int32_t x, int64_t column, int64_t factor, int64_t gate, int32_t out, int32_t form,
                        int32_t layer, int64_t channels, int64_t width, const float* weight, const float* bias, int32_t silu);
// delta: the gated delta rule. x has q, k and v after the convolution; rate is −exp(A). bound: what logs of decays are a
// sigmoid's part of, or 0.
SS_API void ss_add_delta(ss_program*, int32_t x, int32_t beta, int32_t decay, int64_t decay_column, int32_t out, int32_t layer,
                         int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim, int32_t by_channel,
                         float beta_scale, float bound, const float* rate, const float* time);
// ssd: Mamba-2. x has x, B and C after the convolution, from `column` on.
SS_API void ss_add_ssd(ss_program*, int32_t x, int64_t column, int32_t dt, int64_t dt_column, int32_t out, int32_t layer,
                       int64_t num_groups, int64_t num_heads, int64_t key_dim, int64_t value_dim, float least, float most,
                       const float* rate, const float* time, const float* skip);
// scan: Mamba-1 without its gate. rate is −exp(A) · log₂ e, [⌈channels / 16⌉, key_dim, 16].
SS_API void ss_add_scan(ss_program*, int32_t x, int32_t dt, int32_t b, int32_t c, int32_t out, int32_t layer, int64_t channels,
                        int64_t key_dim, const float* rate, const float* time, const float* skip);
// gated_norm: x times the gate of z (silu: z · σ(z), else σ(z)), RMS-normed in groups after that (gate_first) or before; without a
// weight [size] not normed.
SS_API void ss_add_gated_norm(ss_program*, int32_t x, int32_t z, int64_t z_column, int32_t out, int32_t form, int64_t size,
                              int64_t group, const float* weight, float eps, int32_t silu, int32_t gate_first);
// Every thread only reads, or only multiplies and adds (formats.h's Ceiling). `data` [bytes] is zeros.
SS_API void ss_add_ceiling(ss_program*, int32_t what, const void* data, int64_t bytes, int64_t rounds);
SS_API int64_t ss_ceiling_macs(ss_engine*, int32_t what, int64_t rounds);  // multiplications of such an operator on all threads
// The index of a row's largest number, int64, of equals the first. The second takes the row of a product, which is never stored.
SS_API void ss_add_argmax(ss_program*, int32_t x, int32_t out, int64_t size);
SS_API void ss_add_linear_argmax(ss_program*, int32_t x, int32_t out, int32_t kind, int64_t rows, int64_t inner, const void* packed,
                                 const float* bias);

typedef struct {  // how a row's token is drawn
    int64_t seed, position;  // a number in (0, 1) comes of these alone
    const uint32_t* mask;  // bits of the tokens that may be drawn, mask_words of them; null: all may
    int32_t* logprobs;  // where the log-probabilities of the logits go, without the mask; null: they are not wanted
    int64_t token;  // at least 0: this one, and none is drawn
    float temperature, top_p, min_p;  // 0 is greedy, 1 is off, 0 is off
    int32_t top_k;  // 0 is off
    int32_t mask_words, num_top;
} ss_draw_params;
// A token of each row of logits, int64. `params` has a row's ss_draw_params. Log-probabilities are the token's and its rank, then
// the ids of the num_top likeliest tokens and theirs: 2 + 2 · num_top words.
SS_API void ss_add_draw(ss_program*, int32_t x, int32_t params, int32_t out, int64_t size);
// The same of a product. Its results are left in `logits`.
SS_API void ss_add_linear_draw(ss_program*, int32_t x, int32_t logits, int32_t params, int32_t out, int32_t kind, int64_t rows,
                               int64_t inner, const void* packed, const float* bias);

typedef struct {
    void *k, *v;  // [B, K, block_size, D]; with latents v points into the first key
    const float *k_scale, *v_scale;
    void* conv;        // a recurrent layer's states: [N, width − 1, channels] of the type conv_type, and
    float* recurrent;  // [N, H, K, V], or [N, channels, K]
    void* index;       // [B, 1, block_size, I] of the cache's type: keys of the layer's index
    int32_t conv_type;  // 0 float32, 1 bfloat16
} ss_layer_kv;

typedef struct {  // the block tables and slots of a group of layers
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
    const int32_t *state_read, *state_write;  // by sequence, by token: slots of recurrent states; 0: none
} ss_step;

SS_API void ss_run(ss_program* program, ss_program* then, const ss_step* step);  // `then` runs next, over the same tokens; or null
// The same in two calls. Between them the engine's other threads compute.
// 1. Packing, running, binding, profiling and destroying wait for the step. Buffers and operators may not be added meanwhile.
// 2. All calls come from one thread.
// 3. `step` is copied; the memory that it and the programs point to must live until `ss_wait`.
SS_API void ss_begin(ss_program* program, ss_program* then, const ss_step* step);
SS_API void ss_wait(ss_program* program);
// `ss_run` of operators that read of a step only the number of its tokens, as a function that a GPU's driver can call when the GPU
// has come so far. `job` is an ss_job. Calls that follow one another in a stream may come from any thread.
typedef struct {
    ss_program* program;
    int64_t num_tokens;
} ss_job;
SS_API void ss_run_job(void* job);
// Writes the nanoseconds of each operator in all runs since the last call, and starts a clock: 1 wall time, 2 processor time of all
// threads (which other processes do not change), 0 none. Returns the number of operators.
SS_API int32_t ss_profile(ss_program* program, int32_t clock, int64_t* ns, int32_t capacity);

#ifdef __cplusplus
}
#endif
