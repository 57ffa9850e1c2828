// The operators of a mixture of experts. Token–expert pairs are rows sorted by expert, so that an expert's weights are read once
// for all its tokens. A pair's result does not depend on other tokens' choices.
#include <cmath>

#include "ops.h"

namespace {

constexpr float LEAST_WEIGHT = 1e-20f;  // added to the sum that weights are divided by, since all logistic functions may be 0
constexpr int64_t FEW_ROWS = 4;         // with fewer rows an expert's product takes as long as reading its weights
constexpr int64_t TASKS_PER_THREAD = 8;

struct Route : RowOp {
    int32_t logits;
    int64_t num_experts, each;
    bool sigmoid, normalize;
    float weight_scale, nearness;
    const float *correction, *scales;    // may be null
    int64_t num_groups, num_chosen_groups;  // of experts; 0: none
    bool best_two;
    int64_t first, held;  // the experts that are here
    int64_t identity;     // the first expert that returns its input; −1: none

    int chunks(Program& p) override {
        Routing& r = p.routing;
        r.num_experts = held, r.first = first, r.each = each;
        r.chosen.resize(p.step().num_tokens * each);
        r.weights.resize(p.step().num_tokens * each);
        return RowOp::chunks(p);
    }
    int64_t scratch_floats(Program&) override { return 2 * num_experts + num_groups; }

    // The index of the largest of x, the first of equals; −1 if all are −∞.
    static int64_t best(const float* x, int64_t n) {
        int64_t found = -1;
        for (int64_t i = 0; i < n; i++)
            if (x[i] > -INFINITY && (found < 0 || x[i] > x[found])) found = i;
        return found;
    }

    // The next choice's weight: the softmax over those that are left (merits) and whose logit is near the largest of these.
    float near_weight(const float* x, const float* merits, float largest) const {
        float sum = 0.0f;
        for (int64_t i = 0; i < num_experts; i++) {
            const bool is_far = (largest - x[i]) / std::max(std::fabs(x[i]), largest) > nearness;
            if (merits[i] > -INFINITY && !is_far) sum += std::exp(x[i] - largest);
        }
        return 1.0f / sum;
    }

    void row(Program& p, int64_t t, float* scores) override {
        const float* x = (const float*)p.row(logits, t);
        const int64_t n = num_experts;
        float *merits = scores + n, *groups = merits + n;
        float top = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < n; i++) top = std::max(top, x[i]);
        for (int64_t i = 0; i < n; i++) {
            scores[i] = sigmoid ? 1.0f / (1.0f + std::exp(-x[i])) : std::exp(x[i] - top);
            sum += scores[i];
        }
        for (int64_t i = 0; i < n; i++) {
            if (!sigmoid) scores[i] /= sum;
            merits[i] = correction ? scores[i] + correction[i] : scores[i];
        }
        if (num_groups) {
            const int64_t members = n / num_groups;
            for (int64_t g = 0; g < num_groups; g++) {
                float first = -INFINITY, second = -INFINITY;
                for (int64_t i = g * members; i < (g + 1) * members; i++) {
                    second = std::max(second, std::min(first, merits[i]));
                    first = std::max(first, merits[i]);
                }
                groups[g] = best_two ? first + second : first;
            }
            for (int64_t i = 0; i < num_chosen_groups; i++) {
                const int64_t found = best(groups, num_groups);
                if (found >= 0) groups[found] = -INFINITY;
            }
            for (int64_t i = 0; i < n; i++)
                if (groups[i / members] > -INFINITY) merits[i] = -INFINITY;  // its group was not chosen
        }
        int32_t* chosen = p.routing.chosen.data() + t * each;
        float *weights = p.routing.weights.data() + t * each, total = LEAST_WEIGHT;
        for (int64_t j = 0; j < each; j++) {
            chosen[j] = (int32_t)std::max<int64_t>(0, best(merits, n));  // if all are NaN, the first
            weights[j] = nearness > 0.0f ? near_weight(x, merits, x[chosen[j]]) : scores[chosen[j]];
            merits[chosen[j]] = -INFINITY;
            total += weights[j];
        }
        for (int64_t j = 0; j < each; j++) {
            const bool here = chosen[j] >= first && chosen[j] < first + held;
            weights[j] = here || (identity >= 0 && chosen[j] >= identity) ? (normalize ? weights[j] / total : weights[j]) * weight_scale : 0.0f;
            if (scales) weights[j] *= scales[chosen[j]];
        }
    }
};

// The experts that were chosen elsewhere: float32 [2 · each] of a token, its experts and then their weights.
struct Choice : RowOp {
    int32_t x;
    int64_t num_experts, each;

    int chunks(Program& p) override {
        Routing& r = p.routing;
        r.num_experts = num_experts, r.first = 0, r.each = each;
        r.chosen.resize(p.step().num_tokens * each);
        r.weights.resize(p.step().num_tokens * each);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float*) override {
        const float* from = (const float*)p.row(x, t);
        for (int64_t j = 0; j < each; j++) {
            p.routing.chosen[t * each + j] = (int32_t)from[j];
            p.routing.weights[t * each + j] = from[each + j];
        }
    }
};

// Sorts the pairs by expert, counts them, and writes the rows that the experts read. Pairs of experts that are not here come last, and
// have no rows.
struct Gather : RowOp {
    int32_t x, out, form;
    int64_t size;
    int32_t counts;
    bool scaled;

    int64_t scratch_floats(Program&) override { return scaled ? padded(size) : 0; }
    int chunks(Program& p) override {
        Routing& r = p.routing;
        const ss_step& s = p.step();
        const int64_t n = s.num_tokens * r.each;
        rows_a_token = r.each;
        r.begin.assign(r.num_experts + 2, 0);
        r.token.resize(n), r.place.resize(n), r.scale.resize(scaled ? n : 0);
        auto bin = [&](int64_t i) {
            const int64_t own = r.chosen[i] - r.first;
            return own < 0 || own >= r.num_experts ? r.num_experts : own;
        };
        for (int64_t i = 0; i < n; i++) r.begin[bin(i) + 1]++;
        for (int64_t e = 0; e <= r.num_experts; e++) r.begin[e + 1] += r.begin[e];
        for (int64_t i = 0; i < n; i++) {  // begin[e] moves to the end of expert e, and is moved back below
            const int32_t row = r.begin[bin(i)]++;
            r.place[i] = row, r.token[row] = (int32_t)(i / r.each);
            if (scaled) r.scale[row] = r.weights[i], r.weights[i] = 1.0f;
        }
        for (int64_t e = r.num_experts + 1; e > 0; e--) r.begin[e] = r.begin[e - 1];
        r.begin[0] = 0;
        if (int64_t* counted = counts < 0 ? nullptr : (int64_t*)p.row(counts, 0))
            for (int64_t i = 0; i < n; i++) counted[r.chosen[i]] += s.groups->slots[i / r.each] >= s.block_size;  // slots of the null block are padding
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t i, float* scratch) override {
        if (i >= p.routing.begin[p.routing.num_experts]) return;
        float* from = (float*)p.row(x, p.routing.token[i]);
        if (scaled) {
            for (int64_t k = 0; k < size; k++) scratch[k] = from[k] * p.routing.scale[i];
            from = scratch;
        }
        p.kernels().convert(from, size, form, p.row(out, i));
    }
};

struct ExpertLinear : Op {
    struct Task {
        int32_t expert;
        int64_t pair0, pair1;
    };
    int32_t x, out;
    int64_t column, stride, bias_stride;
    bool gated;
    GatedArgs args;
    std::vector<Task> tasks;
    int64_t per_chunk = 1;

    int chunks(Program& p) override {
        LinearArgs& a = args.linear;
        a.x = p.row(x, 0), a.x_stride = p.stride(x);
        if (gated) args.out = p.row(out, 0), args.out_stride = p.stride(out);
        else a.y = (float*)p.row(out, 0) + column, a.y_stride = p.stride(out) / 4;
        const int64_t pairs = ((gated ? a.rows / 2 : a.rows) + 2 * PANEL - 1) / (2 * PANEL);
        const std::vector<int32_t>& begin = p.routing.begin;
        auto cost = [&](int64_t e) { return begin[e + 1] == begin[e] ? 0 : pairs * std::max<int64_t>(FEW_ROWS, begin[e + 1] - begin[e]); };
        int64_t total = 0;
        for (int64_t e = 0; e < p.routing.num_experts; e++) total += cost(e);
        const int64_t share = std::max<int64_t>(1, total / (p.threads() * TASKS_PER_THREAD));
        tasks.clear();
        for (int64_t e = 0; e < p.routing.num_experts; e++) {
            if (cost(e) == 0) continue;
            const int64_t cuts = std::min(pairs, (cost(e) + share - 1) / share), each = (pairs + cuts - 1) / cuts;
            for (int64_t pair = 0; pair < pairs; pair += each) tasks.push_back({(int32_t)e, pair, std::min(pairs, pair + each)});
        }
        const int64_t count = std::max<int64_t>(1, (int64_t)tasks.size());  // none is here if all tokens chose experts of other ranks
        per_chunk = (count + MAX_CHUNKS - 1) / MAX_CHUNKS;
        return (int)((count + per_chunk - 1) / per_chunk);
    }
    int64_t scratch_floats(Program&) override { return linear_scratch(args.linear); }
    void run(Program& p, int chunk, int thread) override {
        const int64_t end = std::min<int64_t>((int64_t)tasks.size(), (chunk + 1) * per_chunk);
        for (int64_t i = chunk * per_chunk; i < end; i++) {
            const Task& t = tasks[i];
            GatedArgs own = args;
            own.linear.packed += t.expert * stride;
            if (own.linear.bias) own.linear.bias += t.expert * bias_stride;
            const int64_t first = p.routing.begin[t.expert], last = p.routing.begin[t.expert + 1];
            if (gated) p.kernels().gated(own, t.pair0, t.pair1, first, last, p.scratch(thread));
            else p.kernels().linear(own.linear, t.pair0, t.pair1, first, last, p.scratch(thread));
        }
    }
};

struct Combine : RowOp {  // the weighted sum over a token's experts, in the order of its choices
    int32_t x, out, shared, shared_weight, rows;
    int64_t size;
    bool accumulate;
    void row(Program& p, int64_t t, float*) override {
        const Routing& r = p.routing;
        float* to = (float*)p.row(out, t);
        if (!accumulate) std::fill(to, to + size, 0.0f);
        auto join = [&](const float* from, float weight) {
            for (int64_t i = 0; i < size; i++) to[i] += weight * from[i];
        };
        float kept = 0.0f;
        for (int64_t j = t * r.each; j < (t + 1) * r.each; j++)
            if (r.place[j] < r.begin[r.num_experts]) join((const float*)p.row(x, r.place[j]), r.weights[j]);
            else if (r.chosen[j] - r.first >= r.num_experts) kept += r.weights[j];
        if (rows >= 0 && kept != 0.0f) join((const float*)p.row(rows, t), kept);
        if (shared < 0) return;
        join((const float*)p.row(shared, t), shared_weight < 0 ? 1.0f : 1.0f / (1.0f + std::exp(-*(const float*)p.row(shared_weight, t))));
    }
};

}  // namespace

void ss_add_route(ss_program* p, int32_t logits, int64_t num_experts, int64_t each, int32_t sigmoid, float nearness, int32_t normalize,
                  float weight_scale, const float* correction, const float* scales, int64_t num_groups, int64_t num_chosen_groups,
                  int32_t best_two, int64_t first, int64_t held, int64_t identity) {
    auto* op = add<Route>(p);
    op->logits = logits, op->num_experts = num_experts, op->each = each, op->sigmoid = sigmoid, op->nearness = nearness, op->normalize = normalize;
    op->weight_scale = weight_scale, op->correction = correction, op->scales = scales;
    op->num_groups = num_groups, op->num_chosen_groups = num_chosen_groups, op->best_two = best_two;
    op->first = first, op->held = held, op->identity = identity;
}

void ss_add_choice(ss_program* p, int32_t x, int64_t num_experts, int64_t each) {
    auto* op = add<Choice>(p);
    op->x = x, op->num_experts = num_experts, op->each = each;
}

void ss_add_gather(ss_program* p, int32_t x, int32_t out, int32_t form, int64_t size, int32_t counts, int32_t scaled) {
    auto* op = add<Gather>(p);
    op->x = x, op->out = out, op->form = form, op->size = size, op->counts = counts, op->scaled = scaled;
}

void ss_add_expert_linear(ss_program* p, int32_t x, int32_t out, int64_t column, int32_t form, int32_t activation, float alpha,
                          float limit, int32_t kind, int64_t rows, int64_t inner, const void* packed, int64_t stride,
                          const float* bias, int64_t bias_stride) {
    auto* op = add<ExpertLinear>(p);
    op->x = x, op->out = out, op->column = column, op->gated = form >= 0, op->args = {};
    op->args.linear = linear_args(kind, rows, inner, packed, bias, false), op->stride = stride, op->bias_stride = bias_stride;
    op->args.activation = {activation, alpha, limit}, op->args.form = form;
}

void ss_add_combine(ss_program* p, int32_t x, int32_t out, int64_t size, int32_t shared, int32_t shared_weight, int32_t accumulate,
                    int32_t rows) {
    auto* op = add<Combine>(p);
    op->x = x, op->out = out, op->size = size, op->shared = shared, op->shared_weight = shared_weight, op->accumulate = accumulate;
    op->rows = rows;
}
