// Operators of recurrent layers. Each cuts a step into tasks: some units (channels, or columns of heads' values) of one sequence.
#include "ops.h"

namespace {

constexpr int64_t CHANNELS = 64, COLUMNS = 64;  // in a unit

struct Stateful : Op {
    struct Task {
        int32_t seq;
        int64_t begin, end;  // units
        int64_t tokens;
    };
    int32_t layer = 0;
    std::vector<Task> tasks;

    virtual int64_t units(Program&) = 0;
    virtual int64_t units_together() { return 1; }  // that share work
    virtual void prepare(Program& p, const StateStep& step, const ss_layer_kv& kv) = 0;
    virtual void compute(Program& p, const Task& task, float* scratch) = 0;

    // The longest sequences' tasks come first. A task has as many units as make a chunk of the work that is shared out.
    int chunks(Program& p) override {
        const ss_step& s = p.step();
        prepare(p, {s.query_start_loc, s.state_read, s.state_write}, s.layers[layer]);
        const int64_t all = units(p), wanted = 2 * (int64_t)p.threads() * CHUNKS_PER_THREAD;
        const int64_t each = std::max<int64_t>(1, s.num_tokens * all / wanted);
        tasks.clear();
        for (int64_t i = 0; i < s.num_seqs; i++) {
            const int64_t tokens = s.query_start_loc[i + 1] - s.query_start_loc[i];
            if (tokens == 0) continue;
            int64_t count = std::min(all, std::max<int64_t>(1, each / tokens));
            if (count > units_together()) count -= count % units_together();
            for (int64_t u = 0; u < all; u += count) tasks.push_back({(int32_t)i, u, std::min(all, u + count), tokens});
        }
        std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.tokens > b.tokens; });
        per_chunk = ((int64_t)tasks.size() + MAX_CHUNKS - 1) / MAX_CHUNKS;
        return std::max(1, (int)(((int64_t)tasks.size() + per_chunk - 1) / std::max<int64_t>(1, per_chunk)));
    }
    void run(Program& p, int chunk, int thread) override {
        const int64_t end = std::min<int64_t>((int64_t)tasks.size(), (chunk + 1) * per_chunk);
        for (int64_t i = chunk * per_chunk; i < end; i++) compute(p, tasks[i], p.scratch(thread));
    }

private:
    int64_t per_chunk = 1;
};

struct Conv : Stateful {
    int32_t x, out;
    int64_t column, factor = -1, gate = -1;
    ConvArgs args;
    int64_t scratch_floats(Program& p) override { return p.kernels().conv_scratch(args); }
    int64_t units(Program&) override { return (args.channels + CHANNELS - 1) / CHANNELS; }
    int64_t units_together() override { return 2; }
    void prepare(Program& p, const StateStep& step, const ss_layer_kv& kv) override {
        const float* row = (const float*)p.row(x, 0);
        args.step = step, args.state = (uint8_t*)kv.conv, args.bf16 = kv.conv_type == CACHE_BF16;
        args.x = row + column, args.x_stride = p.stride(x) / 4;
        args.factor = factor < 0 ? nullptr : row + factor, args.gate = gate < 0 ? nullptr : row + gate;
        args.out_stride = p.stride(out);
        args.out = p.row(out, 0) + (out == x ? column * 4 : 0);
    }
    void compute(Program& p, const Task& t, float* scratch) override {
        p.kernels().conv(args, t.seq, t.begin * CHANNELS, std::min(args.channels, t.end * CHANNELS), scratch);
    }
};

// Calls f(head, v0, v1) for a task's units, each some columns of a head's values.
template <class Call>
void by_heads(const Stateful::Task& t, int64_t value_dim, Call f) {
    const int64_t each = (value_dim + COLUMNS - 1) / COLUMNS;
    for (int64_t u = t.begin; u < t.end;) {
        const int64_t head = u / each, end = std::min(t.end, (head + 1) * each);
        f(head, (u - head * each) * COLUMNS, std::min(value_dim, (end - head * each) * COLUMNS));
        u = end;
    }
}

template <class Args>
struct OfHeads : Stateful {
    int32_t out;
    Args args;
    int64_t units(Program&) override { return args.num_heads * units_together(); }
    int64_t units_together() override { return (args.value_dim + COLUMNS - 1) / COLUMNS; }
    void prepare(Program& p, const StateStep& step, const ss_layer_kv& kv) override {
        args.step = step, args.states = kv.recurrent;
        args.out = (float*)p.row(out, 0), args.out_stride = p.stride(out) / 4;
    }
};

struct Delta : OfHeads<DeltaArgs> {
    int32_t x, beta, decay;
    int64_t decay_column;
    int64_t scratch_floats(Program& p) override { return p.kernels().delta_scratch(args); }
    void prepare(Program& p, const StateStep& step, const ss_layer_kv& kv) override {
        OfHeads::prepare(p, step, kv);
        args.x = (const float*)p.row(x, 0), args.x_stride = p.stride(x) / 4;
        args.beta = (const float*)p.row(beta, 0), args.beta_stride = p.stride(beta) / 4;
        args.decay = (const float*)p.row(decay, 0) + decay_column, args.decay_stride = p.stride(decay) / 4;
    }
    void compute(Program& p, const Task& t, float* scratch) override {
        by_heads(t, args.value_dim, [&](int64_t head, int64_t v0, int64_t v1) {
            p.kernels().delta(args, t.seq, head, v0, v1, scratch);
        });
    }
};

struct Ssd : OfHeads<SsdArgs> {
    int32_t x, dt;
    int64_t column, dt_column;
    int64_t scratch_floats(Program& p) override { return p.kernels().ssd_scratch(args); }
    void prepare(Program& p, const StateStep& step, const ss_layer_kv& kv) override {
        OfHeads::prepare(p, step, kv);
        args.x = (const float*)p.row(x, 0) + column, args.x_stride = p.stride(x) / 4;
        args.dt = (const float*)p.row(dt, 0) + dt_column, args.dt_stride = p.stride(dt) / 4;
    }
    void compute(Program& p, const Task& t, float* scratch) override {
        by_heads(t, args.value_dim, [&](int64_t head, int64_t v0, int64_t v1) {
            p.kernels().ssd(args, t.seq, head, v0, v1, scratch);
        });
    }
};

struct Scan : Stateful {
    int32_t x, dt, b, c, out;
    ScanArgs args;
    int64_t scratch_floats(Program& p) override { return p.kernels().scan_scratch(args); }
    int64_t units(Program&) override { return (args.channels + 15) / 16; }
    void prepare(Program& p, const StateStep& step, const ss_layer_kv& kv) override {
        args.step = step, args.states = kv.recurrent;
        args.x = (const float*)p.row(x, 0), args.x_stride = p.stride(x) / 4;
        args.dt = (const float*)p.row(dt, 0), args.dt_stride = p.stride(dt) / 4;
        args.b = (const float*)p.row(b, 0), args.b_stride = p.stride(b) / 4;
        args.c = (const float*)p.row(c, 0), args.c_stride = p.stride(c) / 4;
        args.out = (float*)p.row(out, 0), args.out_stride = p.stride(out) / 4;
    }
    void compute(Program& p, const Task& t, float* scratch) override {
        p.kernels().scan(args, t.seq, t.begin * 16, std::min(args.channels, t.end * 16), scratch);
    }
};

struct GatedNorm : RowOp {
    int32_t x, z, out;
    int64_t z_column;
    GatedNormArgs args;
    int64_t scratch_floats(Program&) override { return padded(args.size); }
    int chunks(Program& p) override {
        args.x = (const float*)p.row(x, 0), args.x_stride = p.stride(x) / 4;
        args.z = (const float*)p.row(z, 0) + z_column, args.z_stride = p.stride(z) / 4;
        args.out = p.row(out, 0), args.out_stride = p.stride(out);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float* scratch) override { p.kernels().gated_norm(args, t, scratch); }
};

}  // namespace

void ss_add_conv(ss_program* p, int32_t x, int64_t column, int64_t factor, int64_t gate, int32_t out, int32_t form, int32_t layer,
                 int64_t channels, int64_t width, const float* weight, const float* bias, int32_t silu) {
    auto* op = add<Conv>(p);
    op->x = x, op->column = column, op->factor = factor, op->gate = gate, op->out = out, op->layer = layer, op->args = {};
    ConvArgs& a = op->args;
    a.channels = channels, a.width = width, a.weight = weight, a.bias = bias, a.silu = silu, a.form = form;
}

void ss_add_delta(ss_program* p, int32_t x, int32_t beta, int32_t decay, int64_t decay_column, int32_t out, int32_t layer,
                  int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim, int32_t by_channel, float beta_scale,
                  float bound, const float* rate, const float* time) {
    auto* op = add<Delta>(p);
    op->x = x, op->beta = beta, op->decay = decay, op->decay_column = decay_column, op->out = out, op->layer = layer, op->args = {};
    DeltaArgs& a = op->args;
    a.num_key_heads = num_key_heads, a.num_heads = num_heads, a.key_dim = key_dim, a.value_dim = value_dim;
    a.by_channel = by_channel, a.beta_scale = beta_scale, a.bound = bound, a.rate = rate, a.time = time;
}

void ss_add_ssd(ss_program* p, int32_t x, int64_t column, int32_t dt, int64_t dt_column, int32_t out, int32_t layer,
                int64_t num_groups, int64_t num_heads, int64_t key_dim, int64_t value_dim, float least, float most, const float* rate,
                const float* time, const float* skip) {
    auto* op = add<Ssd>(p);
    op->x = x, op->column = column, op->dt = dt, op->dt_column = dt_column, op->out = out, op->layer = layer, op->args = {};
    SsdArgs& a = op->args;
    a.num_groups = num_groups, a.num_heads = num_heads, a.key_dim = key_dim, a.value_dim = value_dim;
    a.least = least, a.most = most, a.rate = rate, a.time = time, a.skip = skip;
}

void ss_add_scan(ss_program* p, int32_t x, int32_t dt, int32_t b, int32_t c, int32_t out, int32_t layer, int64_t channels,
                 int64_t key_dim, const float* rate, const float* time, const float* skip) {
    auto* op = add<Scan>(p);
    op->x = x, op->dt = dt, op->b = b, op->c = c, op->out = out, op->layer = layer, op->args = {};
    ScanArgs& a = op->args;
    a.channels = channels, a.key_dim = key_dim, a.rate = rate, a.time = time, a.skip = skip;
}

void ss_add_gated_norm(ss_program* p, int32_t x, int32_t z, int64_t z_column, int32_t out, int32_t form, int64_t size, int64_t group,
                       const float* weight, float eps, int32_t silu, int32_t gate_first) {
    auto* op = add<GatedNorm>(p);
    op->x = x, op->z = z, op->z_column = z_column, op->out = out, op->args = {};
    GatedNormArgs& a = op->args;
    a.size = size, a.group = group, a.weight = weight, a.eps = eps, a.silu = silu, a.gate_first = gate_first, a.form = form;
}
