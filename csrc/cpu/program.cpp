#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "ops.h"
#include "pack.h"

namespace {

// A tile of prefill has QUERY_ROWS rows (query tokens × heads of a kv head), fewer where a head is wider than QUERY_DIM. So its
// queries and results stay in a core's own cache.
constexpr int64_t QUERY_ROWS = 384;
constexpr int64_t QUERY_DIM = 256;
constexpr int64_t NEAR_BYTES = 768 << 10;  // a product's inputs and results that stay in a core's own cache (1 MB and more)
constexpr int64_t NEAR_WIDE_BYTES = 1536 << 10;  // the same of inputs in bfloat16 for tile registers (2 MB and more)
constexpr int64_t WIDEN_FROM = 64;               // tokens of prompts from which on whole numbers are multiplied as bfloat16 by tiles
constexpr int64_t FEW_ROWS = 24;  // of a sequence, up to which its keys are read as they lie: packing them takes longer

int64_t now_ns(int32_t clock) {
    timespec t;
    clock_gettime(clock == 2 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

struct Embed : RowOp {
    int32_t out, by_position, kind, accumulate;
    int64_t offset, rows, inner;
    const uint8_t* packed;
    float scale;
    int64_t scratch_floats(Program&) override { return inner; }
    void row(Program& p, int64_t t, float* scratch) override {
        const int64_t id = by_position ? p.step().positions[t] + offset : p.step().token_ids[t];
        float* to = (float*)p.row(out, t);
        unpack_row(kind, rows, inner, packed, id, accumulate ? scratch : to);
        if (accumulate)
            for (int64_t i = 0; i < inner; i++) to[i] += scratch[i] * scale;
        else if (scale != 1.0f)
            for (int64_t i = 0; i < inner; i++) to[i] *= scale;
    }
};

struct Sum : RowOp {
    int32_t x, y;
    int64_t size;
    float factor;
    void row(Program& p, int64_t t, float*) override {
        float* to = (float*)p.row(y, t);
        const float* from = x < 0 ? nullptr : (float*)p.row(x, t);
        for (int64_t i = 0; i < size; i++) to[i] = (from ? from[i] + to[i] : to[i]) * factor;
    }
};

struct LayerInputs : RowOp {
    int32_t x, kind;
    int64_t rows, inner, size;
    const uint8_t* packed;
    const float* norm;
    float scale, eps, offset, factor;
    int64_t scratch_floats(Program&) override { return inner; }
    void row(Program& p, int64_t t, float* scratch) override {
        float* to = (float*)p.row(x, t);
        unpack_row(kind, rows, inner, packed, p.step().token_ids[t], scratch);
        for (int64_t at = 0; at < inner; at += size) {
            float squares = 0.0f;
            for (int64_t i = 0; i < size; i++) squares += to[at + i] * to[at + i];
            const float less = 1.0f / std::sqrt(squares / size + eps);
            for (int64_t i = 0; i < size; i++)
                to[at + i] = (to[at + i] * less * (norm[i] + offset) + scratch[at + i] * scale) * factor;
        }
    }
};

struct GatedBy : RowOp {
    int32_t x, inputs, out;
    int64_t column;
    ActivationArgs args;
    int64_t scratch_floats(Program&) override { return padded(2 * args.size) + padded(args.size); }
    void row(Program& p, int64_t t, float* scratch) override {
        ActivationArgs own = args;
        memcpy(scratch, p.row(x, t), own.size * 4);
        memcpy(scratch + own.size, (float*)p.row(inputs, t) + column, own.size * 4);
        own.x = scratch, own.x_stride = 0, own.out = p.row(out, t), own.out_stride = 0;
        p.kernels().activation(own, 0, scratch + padded(2 * own.size));
    }
};

struct Norm : RowOp {
    int32_t x, residual, out;
    NormArgs args;
    int64_t scratch_floats(Program&) override { return padded(args.size); }
    int chunks(Program& p) override {
        args.x = (float*)p.row(x, 0), args.x_stride = p.stride(x) / 4;
        args.residual = residual < 0 ? nullptr : (float*)p.row(residual, 0);
        args.residual_stride = residual < 0 ? 0 : p.stride(residual) / 4;
        args.out = p.row(out, 0), args.out_stride = p.stride(out);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float* scratch) override { p.kernels().norm(args, t, scratch); }
};

struct NormParts : RowOp {
    int32_t x;
    int64_t column, parts, weight_step;
    NormArgs args;
    int64_t scratch_floats(Program&) override { return padded(args.size); }
    void row(Program& p, int64_t t, float* scratch) override {
        NormArgs a = args;
        for (int64_t i = 0; i < parts; i++) {
            float* at = (float*)p.row(x, t) + column + i * a.size;
            a.x = at, a.out = (uint8_t*)at;
            p.kernels().norm(a, 0, scratch);
            a.weight += weight_step;
            if (a.bias) a.bias += weight_step;
        }
    }
};

struct Scale : RowOp {
    int32_t x;
    int64_t size;
    float factor, limit;
    const float* by_position;
    void row(Program& p, int64_t t, float*) override {
        float* at = (float*)p.row(x, t);
        const float times = by_position ? factor * by_position[p.step().positions[t]] : factor;
        for (int64_t i = 0; i < size; i++) at[i] *= times;
        if (limit > 0.0f)
            for (int64_t i = 0; i < size; i++) at[i] = std::min(std::max(at[i], -limit), limit);
    }
};

struct Convert : RowOp {
    int32_t x, out, form;
    int64_t size;
    void row(Program& p, int64_t t, float*) override { p.kernels().convert((float*)p.row(x, t), size, form, p.row(out, t)); }
};

struct Place : RowOp {
    int32_t x, out;
    int64_t start, column, size;
    void row(Program& p, int64_t t, float*) override {
        memcpy((float*)p.row(out, t) + column, (const float*)p.row(x, t) + start, size * sizeof(float));
    }
};

struct Activate : RowOp {
    int32_t x, out;
    ActivationArgs args;
    int64_t scratch_floats(Program&) override { return padded(args.size); }
    int chunks(Program& p) override {
        args.x = (float*)p.row(x, 0), args.x_stride = p.stride(x) / 4;
        args.out = p.row(out, 0), args.out_stride = p.stride(out);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float* scratch) override { p.kernels().activation(args, t, scratch); }
};

struct Argmax : RowOp {
    int32_t x, out;
    int64_t size;
    void row(Program& p, int64_t t, float*) override { *(int64_t*)p.row(out, t) = p.kernels().argmax((float*)p.row(x, t), size); }
};

struct CeilingOp : Op {  // every thread does the same work on its own share of the data
    int32_t what;
    const uint8_t* data;
    int64_t bytes, rounds;
    std::vector<float> found;
    int chunks(Program& p) override {
        found.assign(p.threads() * CHUNKS_PER_THREAD, 0.0f);
        return (int)found.size();
    }
    void run(Program& p, int chunk, int) override {
        const int64_t share = bytes / (int64_t)found.size() / 64 * 64;
        found[chunk] = p.kernels().ceiling(what, data + chunk * share, share, rounds);
    }
};

// The size of chunks with which equally fast threads finish `count` soonest. It is between most / 2 and `most`, since smaller
// chunks cost more than they gain.
int64_t even_chunk(int64_t count, int64_t threads, int64_t most) {
    int64_t best = most, least = count;
    for (int64_t size = most; size >= std::max<int64_t>(1, most / 2); size--) {
        const int64_t chunks = (count + size - 1) / size, longest = (chunks + threads - 1) / threads * size;
        if (longest < least) best = size, least = longest;
    }
    return best;
}

// The chunk that a thread computes when it claims number `claimed`. A chunk ends with a prefetch of the weights that follow it in
// memory, so each thread gets chunks that follow one another.
int64_t in_turns(int64_t claimed, int64_t chunks, int64_t threads) {
    const int64_t each = chunks / threads;
    return claimed < each * threads ? claimed % threads * each + claimed / threads : claimed;
}

// A product, in chunks of panels, and of tokens where many threads have few panels. Or a product for each of `heads`, with the
// given distances between their inputs, weights and results.
struct Linear : Op {
    int32_t x, out;
    int64_t column = 0, heads = 1, x_step = 0, weight_step = 0, column_step = 0;
    bool gated = false;
    GatedArgs args;
    int32_t kind = 0;  // of `packed`
    const uint8_t *packed = nullptr, *dense = nullptr;
    int64_t dense_from = 0;
    int64_t pairs_a_head = 0, pairs = 0, pairs_per_chunk = 0, tokens_per_chunk = 0, pair_chunks = 0;
    int64_t wide_from = 0;               // the first token that is multiplied as bfloat16
    std::vector<int64_t> widened_first;  // by thread: the first of the rows that its scratch has in bfloat16

    int chunks(Program& p) override {
        LinearArgs& a = args.linear;
        const bool is_dense = dense && p.step().num_tokens >= dense_from;
        a.kind = is_dense ? (int32_t)KIND_I8 : kind, a.packed = is_dense ? dense : packed;
        a.x = p.row(x, 0);
        if (gated) args.out = p.row(out, 0);
        else a.y = (float*)p.row(out, 0) + column;
        cut(p);
        widened_first.assign(p.threads(), -1);
        return (int)(pair_chunks * ((p.step().num_tokens + tokens_per_chunk - 1) / tokens_per_chunk));
    }
    void cut(Program& p) {
        LinearArgs& a = args.linear;
        const ss_step& s = p.step();
        const int64_t tokens = s.num_tokens, wanted = (int64_t)p.threads() * CHUNKS_PER_THREAD;
        // A decode's product must not depend on how many others there are, so decodes are left out.
        const bool widens = p.kernels().widen && form_of(kind) == FORM_Q && heads == 1 && s.num_seqs > s.num_decodes && tokens - s.num_decodes >= WIDEN_FROM;
        wide_from = widens ? s.num_decodes : tokens;
        a.x_stride = p.stride(x);
        if (gated) args.out_stride = p.stride(out);
        else a.y_stride = p.stride(out) / 4;
        pairs_a_head = ((gated ? a.rows / 2 : a.rows) + 2 * PANEL - 1) / (2 * PANEL);
        pairs = heads * pairs_a_head;
        pairs_per_chunk = even_chunk(pairs, p.threads(), std::max<int64_t>(1, pairs / wanted));
        pair_chunks = (pairs + pairs_per_chunk - 1) / pairs_per_chunk;
        // A chunk's tokens: few enough that each thread has work, and that the cache holds them while all weights are read.
        const int64_t for_all = std::min((wanted + pair_chunks - 1) / pair_chunks, (tokens + 23) / 24);
        const int64_t a_token = widens ? wide_bytes() : (a.x_stride + p.stride(out)) / std::min(heads, pair_chunks);
        const int64_t most = widens ? NEAR_WIDE_BYTES : NEAR_BYTES;
        const int64_t near = std::min((tokens * a_token + most - 1) / most, MAX_CHUNKS / pair_chunks);
        const int64_t cuts = std::max<int64_t>(1, std::max(for_all, near)), each = (tokens + cuts - 1) / cuts;
        tokens_per_chunk = std::max<int64_t>(1, round_up(each, each > 24 ? 48 : 12));  // whole tiles: of 6, 12 or, with AMX, 16
    }
    int64_t wide_bytes() const { return form_bytes(FORM_BF16, args.linear.inner); }
    int64_t product_scratch() const {
        LinearArgs largest = args.linear;
        largest.kind = kind;
        return linear_scratch(largest);
    }
    int64_t scratch_floats(Program& p) override {
        cut(p);
        const int64_t tokens = std::min(tokens_per_chunk, p.step().num_tokens);
        return product_scratch() + (wide_from < p.step().num_tokens ? tokens * wide_bytes() / 4 : 0);
    }
    // Rows [begin, end) in bfloat16, as if row 0 were there. A thread keeps them for its next chunks.
    const uint8_t* widened(Program& p, int64_t begin, int64_t end, int thread) {
        const LinearArgs& a = args.linear;
        uint8_t* to = (uint8_t*)(p.scratch(thread) + product_scratch()) - begin * wide_bytes();
        if (widened_first[thread] != begin)
            for (int64_t t = begin; t < end; t++) p.kernels().widen(a.x + t * a.x_stride, a.inner, to + t * wide_bytes());
        widened_first[thread] = begin;
        return to;
    }
    void weights(const LinearArgs& of, const void* as_dense, int64_t from) {
        args.linear = of, kind = of.kind, packed = of.packed, dense = (const uint8_t*)as_dense, dense_from = from;
    }
    void run(Program& p, int chunk, int thread) override {
        const int64_t pair0 = in_turns(chunk % pair_chunks, pair_chunks, p.threads()) * pairs_per_chunk;
        const int64_t token0 = chunk / pair_chunks * tokens_per_chunk;
        const int64_t pair1 = std::min(pairs, pair0 + pairs_per_chunk);
        const int64_t token1 = std::min(p.step().num_tokens, token0 + tokens_per_chunk);
        GatedArgs a = args;
        a.linear.wide_from = wide_from;
        if (wide_from < token1) a.linear.wide = widened(p, std::max(token0, wide_from), token1, thread);
        if (gated) return p.kernels().gated(a, pair0, pair1, token0, token1, p.scratch(thread));
        for (int64_t pair = pair0; pair < pair1;) {
            const int64_t head = pair / pairs_a_head, begin = head * pairs_a_head, end = std::min(pair1, begin + pairs_a_head);
            LinearArgs own = a.linear;
            own.x += head * x_step, own.packed += head * weight_step, own.y += head * column_step;
            p.kernels().linear(own, pair - begin, end - begin, token0, token1, p.scratch(thread));
            pair = end;
        }
    }
};

// A product whose results are looked at while they lie in a core's cache.
struct LinearHead : Op {
    static constexpr int64_t PAIRS = 16, TOKENS = 48;
    static constexpr int64_t COLUMNS = PAIRS * 2 * PANEL;
    int32_t x, out;
    LinearArgs args;
    int64_t pairs = 0, pairs_per_chunk = 0, num_chunks = 0, whole_pairs = 1;  // a chunk has a multiple of them

    int chunks(Program& p) override {
        args.x = p.row(x, 0), args.x_stride = p.stride(x), args.y_stride = COLUMNS;
        pairs = (args.rows + 2 * PANEL - 1) / (2 * PANEL);
        const int64_t each = pairs / ((int64_t)p.threads() * CHUNKS_PER_THREAD);
        pairs_per_chunk = round_up(even_chunk(pairs, p.threads(), std::max<int64_t>(1, each)), whole_pairs);
        num_chunks = (pairs + pairs_per_chunk - 1) / pairs_per_chunk;
        return (int)num_chunks;
    }
    int64_t scratch_floats(Program&) override { return TOKENS * COLUMNS + linear_scratch(args); }

    void run(Program& p, int claimed, int thread) override {
        const int64_t chunk = in_turns(claimed, num_chunks, p.threads());
        const int64_t tokens = p.step().num_tokens, pair1 = std::min(pairs, (chunk + 1) * pairs_per_chunk);
        float *results = p.scratch(thread), *rest = results + TOKENS * COLUMNS;
        LinearArgs own = args;
        for (int64_t pair = chunk * pairs_per_chunk; pair < pair1; pair += PAIRS) {
            const int64_t end = std::min(pair1, pair + PAIRS), row = pair * 2 * PANEL;
            const int64_t columns = std::min(args.rows, end * 2 * PANEL) - row;
            for (int64_t token = 0; token < tokens; token += TOKENS) {
                const int64_t count = std::min(TOKENS, tokens - token);
                own.x = args.x + token * args.x_stride, own.y = results - row;
                p.kernels().linear(own, pair, end, 0, count, rest);
                for (int64_t t = 0; t < count; t++) look(p, chunk, token + t, results + t * COLUMNS, row, columns);
            }
        }
        ended(p);
    }
    // At y [columns], the results of a token from row `row` of the weight on.
    virtual void look(Program& p, int64_t chunk, int64_t token, const float* y, int64_t row, int64_t columns) = 0;
    virtual void ended(Program&) {}  // after each chunk
};

// The index of the largest number in each row of a product that is never stored.
struct LinearArgmax : LinearHead {
    struct Found {
        float value;
        int64_t at;
    };
    std::vector<Found> found;  // [chunks, tokens]
    std::atomic<int64_t> left{0};

    int chunks(Program& p) override {
        LinearHead::chunks(p);
        found.assign(num_chunks * p.step().num_tokens, {-INFINITY, 0});
        left.store(num_chunks, std::memory_order_relaxed);
        return (int)num_chunks;
    }
    void look(Program& p, int64_t chunk, int64_t token, const float* y, int64_t row, int64_t columns) override {
        Found& best = found[chunk * p.step().num_tokens + token];
        const float most = p.kernels().largest(y, columns);  // seldom more than what was found before
        if (most > best.value) best = {most, row + p.kernels().argmax(y, columns)};
    }
    void ended(Program& p) override {
        if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        const int64_t tokens = p.step().num_tokens;
        for (int64_t t = 0; t < tokens; t++) {  // the last chunk to end compares them all; of equals the first counts
            Found most = found[t];
            for (int64_t i = 1; i < num_chunks; i++)
                if (found[i * tokens + t].value > most.value) most = found[i * tokens + t];
            *(int64_t*)p.row(out, t) = most.at;
        }
    }
};

// Sums of the parts of rows of logits, [tokens, 4, parts].
struct RowParts {
    int32_t params;
    int64_t size;
    std::vector<float> sums;
    void expect(int64_t tokens) { sums.resize(std::max<size_t>(sums.size(), tokens * 4 * draw_parts(size))); }
    DrawParts of(int64_t t) {
        const int64_t n = draw_parts(size);
        float* at = sums.data() + t * 4 * n;
        return {at, at + n, at + 2 * n, at + 3 * n};
    }
    const DrawParams& wanted(Program& p, int64_t t) const { return *(const DrawParams*)p.row(params, t); }
    void summarize(Program& p, int64_t t, const float* x, int64_t first, int64_t end) {  // x: from `first` on
        for (int64_t i = first; i < end; i += DRAW_PART)
            p.kernels().summarize(wanted(p, t), x + i - first, i, std::min(end - i, DRAW_PART), i / DRAW_PART, of(t));
    }
};

// Logits as a product, and the sums of their parts.
struct LinearParts : LinearHead {
    std::shared_ptr<RowParts> parts;
    int chunks(Program& p) override {
        parts->expect(p.step().num_tokens);
        return LinearHead::chunks(p);
    }
    void look(Program& p, int64_t, int64_t token, const float* y, int64_t row, int64_t columns) override {
        parts->summarize(p, token, y, row, row + columns);
        memcpy((float*)p.row(out, token) + row, y, columns * 4);
    }
};

struct Draw : RowOp {
    int32_t x, out;
    bool summarized;  // by a LinearParts
    std::shared_ptr<RowParts> parts;
    int64_t scratch_floats(Program&) override { return 4 * parts->size + draw_parts(parts->size) + 64; }
    int chunks(Program& p) override {
        parts->expect(p.step().num_tokens);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float* scratch) override {
        const float* logits = (float*)p.row(x, t);
        if (!summarized) parts->summarize(p, t, logits, 0, parts->size);
        *(int64_t*)p.row(out, t) = p.kernels().draw(parts->wanted(p, t), logits, parts->size, parts->of(t), scratch);
    }
};

struct Rope : WithCache {
    int64_t scratch_floats(Program&) override { return args.head_dim; }
    int chunks(Program& p) override {
        read_step(p);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float* scratch) override { p.kernels().rope_and_cache(args, t, scratch); }
};

struct LatentQueries : WithCache {
    int32_t row_of, queries, plain;
    LatentArgs latents;
    int64_t scratch_floats(Program&) override { return padded(args.head_dim) + padded(args.num_heads * latents.nope_dim); }
    int chunks(Program& p) override {
        read_step(p);
        LatentArgs& l = latents;
        l.q = args.qkv, l.q_stride = args.qkv_stride;
        l.row = (float*)p.row(row_of, 0), l.row_stride = p.stride(row_of) / 4;
        l.queries = (float*)p.row(queries, 0), l.queries_stride = p.stride(queries) / 4;
        l.plain = p.row(plain, 0), l.plain_stride = p.stride(plain);
        return RowOp::chunks(p);
    }
    void row(Program& p, int64_t t, float* scratch) override { p.kernels().latent_row(args, latents, t, scratch); }
};

// A step's attention as tasks. First come tiles of tokens of sequences with many, the latest first, since they see most keys. Then
// come sequences with few, in ranges of keys; the last range of a sequence to end joins them. Both give a token the same result.
struct Attention : WithCache {
    int32_t out;

    struct Task {
        KeyRange keys;                         // of a sequence with few tokens
        int64_t begin, end;                    // tokens
        int32_t range, num_ranges, first_row;  // of `partials`. num_ranges 0: a tile of tokens
    };
    std::vector<Task> tasks;
    int64_t per_chunk = 1;
    std::vector<Partial> partials;
    std::vector<float> mixed;
    std::unique_ptr<std::atomic<int>[]> arrived;  // ranges, by a sequence's and head's first row
    size_t num_arrived = 0;

    int64_t heads() const { return args.num_heads / args.num_kv_heads; }
    int64_t tile_tokens() const {
        return std::max<int64_t>(1, QUERY_ROWS * QUERY_DIM / std::max(QUERY_DIM, args.head_dim) / heads());
    }
    int64_t few_tokens(Program& p) const {
        const bool whole_vectors = args.head_dim % 16 == 0 && args.value_dim % 16 == 0;  // tiles of tokens pad others
        if (!whole_vectors) return 0;
        if (p.kernels().widen) return 1;  // tile registers add in an order of their own, whatever the chunk of a prompt
        return std::max<int64_t>(1, FEW_ROWS / heads());
    }

    int64_t scratch_floats(Program& p) override {
        const int64_t most = std::min(tile_tokens(), p.step().num_tokens);
        return std::max(p.kernels().prefill_scratch(args, most), p.kernels().decode_scratch(args, std::max<int64_t>(1, few_tokens(p))));
    }

    int chunks(Program& p) override {
        read_step(p);
        args.out = (float*)p.row(out, 0), args.out_stride = p.stride(out) / 4;
        tasks.clear();
        const ss_step& s = p.step();
        const int64_t kv_heads = args.num_kv_heads, few = few_tokens(p);
        auto num_tokens = [&](int64_t seq) { return s.query_start_loc[seq + 1] - s.query_start_loc[seq]; };
        for (int64_t i = 0; i < s.num_seqs; i++) {
            const int64_t begin = s.query_start_loc[i], end = begin + num_tokens(i);
            if (end - begin <= few) continue;
            for (int64_t t = end; t > begin; t -= tile_tokens())
                for (int64_t h = 0; h < kv_heads; h++) tasks.push_back({{i, h, 0, 0, 0}, std::max(begin, t - tile_tokens()), t, 0, 0, 0});
        }
        int64_t num_rows = 0;
        const int64_t wanted = (int64_t)p.threads() * CHUNKS_PER_THREAD;
        for (int64_t i = 0; i < s.num_seqs; i++) {
            const int64_t tokens = num_tokens(i), begin = s.query_start_loc[i], length = args.seq_lens[i];
            if (tokens > few || tokens == 0) continue;
            const int64_t low = args.window ? std::max<int64_t>(0, length - tokens - args.window + 1) / KEY_TILE * KEY_TILE : 0;
            const int64_t first = low / KEY_RANGE, ranges = std::max<int64_t>(1, (length + KEY_RANGE - 1) / KEY_RANGE - first);
            const int64_t rows = tokens * heads();
            // The heads of a range follow one another, since their keys lie side by side in each block.
            for (int64_t j = 0; j < ranges; j++)
                for (int64_t h = 0; h < kv_heads; h++) {
                    const int64_t from = (first + j) * KEY_RANGE, to = std::min(length, from + KEY_RANGE);
                    tasks.push_back({{i, h, std::max(low, from), to, tokens}, begin, begin + tokens, (int32_t)j, (int32_t)ranges,
                                     (int32_t)(num_rows + h * ranges * rows)});
                }
            num_rows += kv_heads * ranges * rows;
        }
        partials.resize(num_rows);
        mixed.resize(num_rows * args.value_dim);
        if (num_arrived < (size_t)num_rows) {
            num_arrived = (size_t)num_rows;
            arrived.reset(new std::atomic<int>[num_arrived]);
        }
        for (const Task& t : tasks)
            if (t.num_ranges) arrived[t.first_row].store(0, std::memory_order_relaxed);
        const int64_t n = (int64_t)tasks.size(), most = std::min<int64_t>(MAX_CHUNKS, 8 * wanted);
        per_chunk = std::max<int64_t>(1, (n + most - 1) / most);
        if (n >= wanted * kv_heads) per_chunk = round_up(per_chunk, kv_heads);
        return std::max(1, (int)((n + per_chunk - 1) / per_chunk));
    }

    void run(Program& p, int chunk, int thread) override {
        const int64_t end = std::min<int64_t>((int64_t)tasks.size(), (chunk + 1) * per_chunk);
        for (int64_t i = chunk * per_chunk; i < end; i++) {
            const Task& t = tasks[i];
            if (args.seq_lens[t.keys.seq] == 0) clear(t);
            else if (t.num_ranges == 0) p.kernels().prefill(args, t.keys.seq, t.keys.kv_head, t.begin, t.end, p.scratch(thread));
            else decode(p, t, i + 1 < end && tasks[i + 1].num_ranges ? &tasks[i + 1].keys : nullptr, p.scratch(thread));
        }
    }

    void clear(const Task& t) {  // padding may get any finite numbers
        for (int64_t token = t.begin; token < t.end; token++)
            memset(args.out + token * args.out_stride + t.keys.kv_head * heads() * args.value_dim, 0, heads() * args.value_dim * 4);
    }

    void decode(Program& p, const Task& t, const KeyRange* next, float* scratch) {
        const int64_t rows = t.keys.tokens * heads();
        Partial* parts = partials.data() + t.first_row;
        float* sums = mixed.data() + t.first_row * args.value_dim;
        p.kernels().decode(args, t.keys, next, parts + t.range * rows, sums + t.range * rows * args.value_dim, scratch);
        if (arrived[t.first_row].fetch_add(1, std::memory_order_acq_rel) + 1 < t.num_ranges) return;
        p.kernels().join_ranges(args, t.keys, parts, sums, t.num_ranges);
    }
};

}  // namespace

Program::Program(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), scratch_(engine_->pool.num_threads()) {}

int32_t Program::add_buffer(int64_t row_bytes, int64_t rows_a_token) {
    buffers_.push_back({});
    buffers_.back().stride = row_bytes;
    buffers_.back().rows_a_token = rows_a_token;
    return (int32_t)buffers_.size() - 1;
}

void Program::bind(int32_t buffer, void* data, int64_t row_bytes) {
    wait();  // a step that was begun may still read the buffer
    buffers_[buffer].data = (uint8_t*)data;
    buffers_[buffer].stride = row_bytes;
    buffers_[buffer].bound = true;
}

void Program::begin_step(const ss_step& step, Program* then) {
    wait();
    prepare(step);
    if (then) then->prepare(step);
    then_ = then;
    started_ = profile_ ? now_ns(profile_) : 0;
    engine_->pool.begin(*this);
}

void Program::prepare(const ss_step& step) {
    step_ = step;
    then_ = nullptr;
    if (step.num_tokens > capacity_) {
        capacity_ = step.num_tokens;
        for (Buffer& b : buffers_) {
            if (b.bound || b.stride == 0) continue;
            b.own.reset((uint8_t*)std::aligned_alloc(64, round_up(b.stride * capacity_ * b.rows_a_token, 64)));
            b.data = b.own.get();
        }
    }
    int64_t floats = 0;
    for (auto& op : ops) floats = std::max(floats, op->scratch_floats(*this));
    if (floats > scratch_floats_) {
        scratch_floats_ = floats;
        for (auto& s : scratch_) s.reset((uint8_t*)std::aligned_alloc(64, round_up(floats * 4, 64)));
    }
    ns_.resize(ops.size());
}

void Program::ended(int op) {
    if (!own(op)) return then_->ended(op - (int)ops.size());
    if (then_ && then_->profile_ && op + 1 == (int)ops.size()) then_->started_ = now_ns(then_->profile_);
    if (!profile_) return;
    const int64_t now = now_ns(profile_);
    ns_[op] += now - started_;
    started_ = now;
}

int32_t Program::profile(int32_t clock, int64_t* ns, int32_t capacity) {
    wait();
    for (int32_t i = 0; i < capacity && i < (int32_t)ns_.size(); i++) ns[i] = ns_[i];
    std::fill(ns_.begin(), ns_.end(), 0);
    profile_ = clock;
    return (int32_t)ops.size();
}

void ss_add_embed(ss_program* p, int32_t out, int32_t by_position, int64_t offset, int32_t kind, int64_t rows, int64_t inner,
                  const void* packed, float scale, int32_t accumulate) {
    auto* op = add<Embed>(p);
    op->out = out, op->by_position = by_position, op->offset = offset, op->kind = kind, op->rows = rows, op->inner = inner;
    op->packed = (const uint8_t*)packed, op->scale = scale, op->accumulate = accumulate;
}

void ss_add_sum(ss_program* p, int32_t x, int32_t y, int64_t size, float factor) {
    auto* op = add<Sum>(p);
    op->x = x, op->y = y, op->size = size, op->factor = factor;
}

void ss_add_layer_inputs(ss_program* p, int32_t x, int32_t kind, int64_t rows, int64_t inner, const void* packed, float scale,
                         int64_t size, const float* norm, float eps, float offset, float factor) {
    auto* op = add<LayerInputs>(p);
    op->x = x, op->kind = kind, op->rows = rows, op->inner = inner, op->packed = (const uint8_t*)packed, op->scale = scale;
    op->size = size, op->norm = norm, op->eps = eps, op->offset = offset, op->factor = factor;
}

void ss_add_gated_by(ss_program* p, int32_t x, int32_t inputs, int32_t out, int64_t column, int32_t form, int32_t activation,
                     float alpha, float limit, int64_t size) {
    auto* op = add<GatedBy>(p);
    op->x = x, op->inputs = inputs, op->out = out, op->column = column, op->args = {};
    op->args.activation = {activation, alpha, limit}, op->args.form = form, op->args.gated = true, op->args.size = size;
}

void ss_add_norm(ss_program* p, int32_t x, int32_t residual, int32_t out, int32_t form, int32_t layer, int64_t size,
                 const float* weight, const float* bias, float eps, float offset) {
    auto* op = add<Norm>(p);
    op->x = x, op->residual = residual, op->out = out, op->args = {};
    op->args.layer = layer, op->args.size = size, op->args.weight = weight, op->args.bias = bias;
    op->args.eps = eps, op->args.offset = offset, op->args.form = form;
}

void ss_add_norm_parts(ss_program* p, int32_t x, int64_t column, int64_t parts, int32_t layer, int64_t size, const float* weight,
                       const float* bias, int64_t weight_step, float eps, float offset) {
    auto* op = add<NormParts>(p);
    op->x = x, op->column = column, op->parts = parts, op->weight_step = weight_step, op->args = {};
    op->args.layer = layer, op->args.size = size, op->args.weight = weight, op->args.bias = bias;
    op->args.eps = eps, op->args.offset = offset, op->args.form = FORM_F32;
}

void ss_add_scale(ss_program* p, int32_t x, int64_t size, float factor, const float* by_position, float limit) {
    auto* op = add<Scale>(p);
    op->x = x, op->size = size, op->factor = factor, op->by_position = by_position, op->limit = limit;
}

void ss_add_convert(ss_program* p, int32_t x, int32_t out, int32_t form, int64_t size, int64_t rows_a_token) {
    auto* op = add<Convert>(p);
    op->x = x, op->out = out, op->form = form, op->size = size, op->rows_a_token = rows_a_token;
}

void ss_add_place(ss_program* p, int32_t x, int64_t start, int32_t out, int64_t column, int64_t size) {
    auto* op = add<Place>(p);
    op->x = x, op->start = start, op->out = out, op->column = column, op->size = size;
}

void ss_add_linear(ss_program* p, int32_t x, int32_t out, int64_t column, int32_t kind, int64_t rows, int64_t inner,
                   const void* packed, const float* bias, int32_t accumulate, const void* dense, int64_t dense_from) {
    auto* op = add<Linear>(p);
    op->x = x, op->out = out, op->column = column, op->args = {};
    op->weights(linear_args(kind, rows, inner, packed, bias, accumulate), dense, dense_from);
}

void ss_add_head_linear(ss_program* p, int32_t x, int32_t out, int64_t column, int64_t column_step, int64_t num_heads, int32_t kind,
                        int64_t rows, int64_t inner, const void* packed, int64_t stride) {
    auto* op = add<Linear>(p);
    op->x = x, op->out = out, op->column = column, op->column_step = column_step, op->heads = num_heads, op->args = {};
    op->x_step = inner * code_bits(kind) / 8, op->weight_step = stride;
    op->weights(linear_args(kind, rows, inner, packed, nullptr, false), nullptr, 0);
}

void ss_add_gated_linear(ss_program* p, int32_t x, int32_t out, int32_t form, int32_t activation, float alpha, float limit,
                         int32_t kind, int64_t rows, int64_t inner, const void* packed, const float* bias, const void* dense,
                         int64_t dense_from) {
    auto* op = add<Linear>(p);
    op->x = x, op->out = out, op->gated = true, op->args = {};
    op->weights(linear_args(kind, rows, inner, packed, bias, false), dense, dense_from);
    op->args.activation = {activation, alpha, limit}, op->args.form = form;
}

void ss_add_activation(ss_program* p, int32_t x, int32_t out, int32_t form, int32_t activation, float alpha, float limit,
                       int32_t gated, int64_t size, int64_t rows_a_token) {
    auto* op = add<Activate>(p);
    op->x = x, op->out = out, op->args = {}, op->rows_a_token = rows_a_token;
    op->args.activation = {activation, alpha, limit}, op->args.form = form, op->args.gated = gated, op->args.size = size;
}

void ss_add_rope_and_cache(ss_program* p, int32_t qkv, int32_t layer, int32_t group, int64_t num_heads, int64_t num_kv_heads,
                           int64_t head_dim, const float* cos_sin, int64_t rotary_dim, int32_t interleaved, const float* q_norm,
                           const float* k_norm, float eps, float offset, float value_eps, int32_t own_values,
                           int32_t norm_after, int32_t index) {
    auto* op = add<Rope>(p);
    op->q = qkv, op->layer = layer, op->group = group, op->index = index, op->args = {};
    AttentionArgs& a = op->args;
    a.num_heads = num_heads, a.num_kv_heads = num_kv_heads, a.head_dim = head_dim, a.cos_sin = cos_sin, a.rotary_dim = rotary_dim;
    a.interleaved = interleaved, a.q_norm = q_norm, a.k_norm = k_norm, a.norm_eps = eps, a.norm_offset = offset;
    a.norm_after = norm_after;
    a.value_eps = value_eps, a.own_values = own_values;
}

void ss_add_latent_queries(ss_program* p, int32_t q, int32_t row, int32_t queries, int32_t plain, int32_t form, int32_t layer,
                           int64_t num_heads, int64_t nope_dim, int64_t rank, const float* norm, float eps,
                           const float* cos_sin, int64_t rotary_dim, int32_t interleaved) {
    auto* op = add<LatentQueries>(p);
    op->q = q, op->row_of = row, op->queries = queries, op->plain = plain, op->layer = layer, op->args = {}, op->latents = {};
    AttentionArgs& a = op->args;
    a.num_heads = num_heads, a.num_kv_heads = 1, a.head_dim = rotary_dim + rank, a.value_dim = rank, a.cos_sin = cos_sin;
    a.rotary_dim = rotary_dim, a.interleaved = interleaved, a.norm_eps = eps;
    op->latents.nope_dim = nope_dim, op->latents.rank = rank, op->latents.norm = norm, op->latents.form = form;
}

void ss_add_attention(ss_program* p, int32_t q, int32_t out, int32_t layer, int32_t group, int64_t num_heads, int64_t num_kv_heads,
                      int64_t head_dim, int64_t value_dim, float scale, int64_t window, float softcap, const float* slopes,
                      const float* sinks, const float* distance_bias, int64_t bias_range, int32_t causal) {
    auto* op = add<Attention>(p);
    op->q = q, op->out = out, op->layer = layer, op->group = group, op->args = {};
    AttentionArgs& a = op->args;
    a.num_heads = num_heads, a.num_kv_heads = num_kv_heads, a.head_dim = head_dim, a.value_dim = value_dim;
    a.scale = scale, a.window = window;
    a.softcap = softcap, a.slopes = slopes, a.sinks = sinks;
    a.distance_bias = distance_bias, a.bias_range = bias_range, a.causal = causal;
}

void ss_add_ceiling(ss_program* p, int32_t what, const void* data, int64_t bytes, int64_t rounds) {
    auto* op = add<CeilingOp>(p);
    op->what = what, op->data = (const uint8_t*)data, op->bytes = bytes, op->rounds = rounds;
}

int64_t ss_ceiling_macs(ss_engine* engine, int32_t what, int64_t rounds) {
    const Engine& e = *shared(engine);
    return e.kernels->ceiling_macs(what) * rounds * e.pool.num_threads() * CHUNKS_PER_THREAD;
}

void ss_add_argmax(ss_program* p, int32_t x, int32_t out, int64_t size) {
    auto* op = add<Argmax>(p);
    op->x = x, op->out = out, op->size = size;
}

void ss_add_draw(ss_program* p, int32_t x, int32_t params, int32_t out, int64_t size) {
    auto* op = add<Draw>(p);
    op->x = x, op->out = out, op->summarized = false, op->parts = std::make_shared<RowParts>();
    op->parts->params = params, op->parts->size = size;
}

void ss_add_linear_draw(ss_program* p, int32_t x, int32_t logits, int32_t params, int32_t out, int32_t kind, int64_t rows,
                        int64_t inner, const void* packed, const float* bias) {
    auto* product = add<LinearParts>(p);
    ss_add_draw(p, logits, params, out, rows);
    auto* op = (Draw*)((Program*)p)->ops.back().get();
    op->summarized = true;
    product->x = x, product->out = logits, product->args = linear_args(kind, rows, inner, packed, bias, false);
    product->parts = op->parts, product->whole_pairs = DRAW_PART / (2 * PANEL);
}

void ss_add_linear_argmax(ss_program* p, int32_t x, int32_t out, int32_t kind, int64_t rows, int64_t inner, const void* packed,
                          const float* bias) {
    auto* op = add<LinearArgmax>(p);
    op->x = x, op->out = out, op->args = linear_args(kind, rows, inner, packed, bias, false);
}
