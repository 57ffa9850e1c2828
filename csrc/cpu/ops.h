// Base classes and helpers of a program's operators.
#pragma once
#include "program.h"

constexpr int CHUNKS_PER_THREAD = 4;  // so that others take the chunks of a thread that is delayed
constexpr int64_t MAX_CHUNKS = 4096;

// An operator that computes row by row. The step has `rows_a_token` rows for each token.
struct RowOp : Op {
    int64_t rows_a_token = 1, num_rows = 0, per_chunk = 1;
    int chunks(Program& p) override {
        const int64_t n = num_rows = p.step().num_tokens * rows_a_token, most = (int64_t)p.threads() * CHUNKS_PER_THREAD;
        per_chunk = n <= p.threads() ? 1 : (n + most - 1) / most;
        return (int)((n + per_chunk - 1) / per_chunk);
    }
    void run(Program& p, int chunk, int thread) override {
        const int64_t first = chunk * per_chunk, end = std::min(first + per_chunk, num_rows);
        for (int64_t t = first; t < end; t++) row(p, t, p.scratch(thread));
    }
    virtual void row(Program&, int64_t, float*) {}
};

// An operator that reads or writes the cache of a layer.
struct WithCache : RowOp {
    int32_t q, layer, group = 0;
    bool index = false;  // the keys of the layer's index, in the place of its keys and values
    AttentionArgs args;
    void read_step(Program& p) {
        const ss_step& s = p.step();
        const ss_layer_kv& kv = s.layers[layer];
        const ss_group& g = s.groups[group];
        args.qkv = (float*)p.row(q, 0), args.qkv_stride = p.stride(q) / 4;
        args.k = (uint8_t*)kv.k, args.v = (uint8_t*)kv.v, args.k_scale = kv.k_scale, args.v_scale = kv.v_scale;
        if (index) args.k = args.v = (uint8_t*)kv.index;
        args.cache = s.cache, args.block_size = s.block_size, args.query_start_loc = s.query_start_loc;
        args.block_table = g.block_table, args.table_stride = g.table_stride, args.seq_lens = g.seq_lens;
        args.positions = s.positions, args.slots = g.slots;
    }
};

template <class T>
inline T* add(ss_program* program) {
    auto op = std::make_unique<T>();
    T* kept = op.get();
    ((Program*)program)->ops.push_back(std::move(op));
    return kept;
}

inline LinearArgs linear_args(int32_t kind, int64_t rows, int64_t inner, const void* packed, const float* bias, bool accumulate) {
    LinearArgs a{};
    a.kind = kind, a.rows = rows, a.inner = inner, a.packed = (const uint8_t*)packed, a.bias = bias, a.accumulate = accumulate;
    return a;
}
