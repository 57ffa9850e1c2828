// Sparse attention (slipstream_cpu.h): an index scores the keys that a token sees, and the best are attended to.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace {

// An operator over a token's own keys. `seq_of` has each token's sequence.
struct TokenKeys : WithCache {
    int64_t top_k;
    std::vector<int32_t> seq_of;

    int chunks(Program& p) override {
        read_step(p);
        const ss_step& s = p.step();
        seq_of.assign(s.num_tokens, 0);
        for (int64_t i = 0; i < s.num_seqs; i++)
            for (int64_t t = s.query_start_loc[i]; t < s.query_start_loc[i + 1]; t++) seq_of[t] = (int32_t)i;
        return RowOp::chunks(p);
    }
    int64_t seen(int64_t t) const {  // keys that the token sees; 0 for padding
        return std::min<int64_t>(args.positions[t] + 1, args.seq_lens[seq_of[t]]);
    }
};

struct Choose : TokenKeys {
    int32_t weights, out;

    static int64_t longest(Program& p) {
        const ss_group& g = p.step().groups[0];
        int64_t most = 0;
        for (int64_t i = 0; i < p.step().num_seqs; i++) most = std::max<int64_t>(most, g.seq_lens[i]);
        return most;
    }
    int64_t room() const { return (args.num_heads + 1) * round_up(args.head_dim, 16); }
    int64_t scratch_floats(Program& p) override { return room() + 2 * longest(p); }

    void row(Program& p, int64_t t, float* scratch) override {
        const int64_t n = seen(t);
        if (n <= top_k) return;
        float* scores = scratch + room();
        int32_t* order = (int32_t*)(scores + n);
        p.kernels().index_scores(args, seq_of[t], n, (float*)p.row(q, t), (float*)p.row(weights, t), scores, scratch);
        for (int32_t j = 0; j < (int32_t)n; j++) {
            order[j] = j;
            if (std::isnan(scores[j])) scores[j] = -INFINITY;  // an order needs numbers
        }
        auto before = [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
        std::nth_element(order, order + top_k, order + n, before);
        std::sort(order, order + top_k);
        memcpy(p.row(out, t), order, top_k * 4);
    }
};

// Each row is a token's HEADS heads, which the kernels of dense attention compute as a sequence of its own.
struct SparseAttention : TokenKeys {
    static constexpr int64_t HEADS = 16;
    int32_t chosen, out;

    bool one_by_one() const { return args.head_dim % 16 == 0 && args.value_dim % 16 == 0; }
    AttentionArgs of_heads(int64_t count) const {
        AttentionArgs a = args;
        a.num_heads = count;
        return a;
    }
    int64_t scratch_floats(Program& p) override {
        const AttentionArgs a = of_heads(std::min(HEADS, args.num_heads));
        return one_by_one() ? p.kernels().decode_scratch(a, 1) : p.kernels().prefill_scratch(a, 1);
    }

    void row(Program& p, int64_t i, float* scratch) override {
        const int64_t t = i / rows_a_token, first = i % rows_a_token * HEADS, vd = args.value_dim;
        AttentionArgs a = of_heads(std::min(HEADS, args.num_heads - first));
        a.out = (float*)p.row(out, t) + first * vd;
        const int64_t n = std::min(top_k, seen(t));
        if (n == 0) {
            memset(a.out, 0, a.num_heads * vd * 4);
            return;
        }
        const int32_t starts[2] = {0, 1}, length = (int32_t)n;
        a.qkv = args.qkv + t * args.qkv_stride + first * a.head_dim;
        a.block_table = args.block_table + seq_of[t] * args.table_stride;
        a.query_start_loc = starts, a.seq_lens = &length;
        a.chosen = seen(t) > top_k ? (int32_t*)p.row(chosen, t) : nullptr;
        if (!one_by_one()) return p.kernels().prefill(a, 0, 0, 0, 1, scratch);
        Partial parts[HEADS];
        p.kernels().decode(a, {0, 0, 0, n, 1}, nullptr, parts, a.out, scratch);
        for (int64_t h = 0; h < a.num_heads; h++)
            for (int64_t j = 0; j < vd; j++) a.out[h * vd + j] /= parts[h].sum;
    }
};

}  // namespace

void ss_add_choose(ss_program* p, int32_t q, int32_t weights, int32_t out, int32_t layer, int64_t num_heads, int64_t head_dim,
                   int64_t top_k) {
    auto* op = add<Choose>(p);
    op->q = q, op->weights = weights, op->out = out, op->layer = layer, op->index = true, op->top_k = top_k, op->args = {};
    op->args.num_heads = num_heads, op->args.num_kv_heads = 1, op->args.head_dim = head_dim;
}

void ss_add_sparse_attention(ss_program* p, int32_t q, int32_t chosen, int32_t out, int32_t layer, int64_t num_heads,
                             int64_t head_dim, int64_t value_dim, int64_t top_k, float scale) {
    auto* op = add<SparseAttention>(p);
    op->q = q, op->chosen = chosen, op->out = out, op->layer = layer, op->top_k = top_k, op->args = {};
    op->rows_a_token = (num_heads + SparseAttention::HEADS - 1) / SparseAttention::HEADS;
    AttentionArgs& a = op->args;
    a.num_heads = num_heads, a.num_kv_heads = 1, a.head_dim = head_dim, a.value_dim = value_dim;
    a.scale = scale, a.causal = true;
}
