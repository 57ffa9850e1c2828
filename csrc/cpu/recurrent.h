// Recurrent layers: causal convolutions, the gated delta rule, Mamba-2 and Mamba-1, token by token, and gated norms
// (slipstream/spec/recurrent.py has the equations). A call computes some channels, columns of a head's state or rows.
//
// 1. The state of a call's columns stays in the nearest cache for all tokens of its sequence. A decode reads and writes it once.
// 2. Each number comes from the same operations in the same order, however the sequence is cut into steps. So a token's result
//    depends on nothing but the tokens before it, bit by bit.
// 3. Forms with products inside chunks of tokens would gain little here, and depend on the chunks: the delta rule has four
//    multiplications for each number of a state and token, they have more than three (benchmarks/CPU_NOTES.md).
#pragma once
#include "emit.h"

namespace ISA {

constexpr int64_t CONV_TOKENS = 16;  // tokens that a convolution computes at once
constexpr int64_t MAX_WIDTH = 16;    // of a convolution
constexpr int64_t TILE_TOKENS = 32;  // tokens whose factors a call prepares at once

static inline int lanes(int64_t left) { return (int)(left < 16 ? left : 16); }

// log(1 + eˣ): x⁺ + log(1 + e), e = e^−|x|, and log(1 + e) = 2 artanh(e / (2 + e)). The argument is at most ⅓: its series ends
// after s¹⁵.
static inline F softplus(F x) {
    const F e = vexp(zero() - vabs(x)), s = e / (e + set1(2.0f)), square = s * s;
    F p = set1(1.0f / 15.0f);
    p = fma(p, square, set1(1.0f / 13.0f));
    p = fma(p, square, set1(1.0f / 11.0f));
    p = fma(p, square, set1(1.0f / 9.0f));
    p = fma(p, square, set1(1.0f / 7.0f));
    p = fma(p, square, set1(1.0f / 5.0f));
    p = fma(p, square, set1(1.0f / 3.0f));
    p = fma(p, square, set1(1.0f));
    return vmax(x, zero()) + (s + s) * p;
}

// --- Convolution ---

static inline F load_conv(const ConvArgs& a, int64_t at, int n) {
    if (!a.bf16) return load_n((const float*)a.state + at, n);
    if (n == 16) return load_bf16((const uint16_t*)a.state + at);
    alignas(64) uint16_t t[16] = {};
    memcpy(t, (const uint16_t*)a.state + at, 2 * n);
    return load_bf16(t);
}

static inline void store_conv(const ConvArgs& a, int64_t at, F v, int n) {
    if (!a.bf16) return store_n((float*)a.state + at, v, n);
    if (n == 16) return store_bf16((uint16_t*)a.state + at, v);
    alignas(64) uint16_t t[16];
    store_bf16(t, v);
    memcpy((uint16_t*)a.state + at, t, 2 * n);
}

// Tokens [t0, t1) of channels c … c + 31 of a sequence. The inputs before them are in `past` [width − 1][32], unless the sequence
// begins here. All are read before any result is written: rows are often a multiple of 4 KB apart, and a processor takes a load
// for one of an earlier store at that distance. W: the convolution's width, 0: any up to MAX_WIDTH.
template <int W, bool WHOLE>
static inline void conv_group(const ConvArgs& a, int64_t seq, int64_t c, int64_t t0, int64_t t1, float* past) {
    const int64_t from = a.step.read[seq], width = W ? W : a.width, before = width - 1;
    const bool first = t0 == a.step.starts[seq], last = t1 == a.step.starts[seq + 1];
    alignas(64) float rows[(W ? W : MAX_WIDTH) - 1 + CONV_TOKENS][GROUP], sums[GROUP];  // the oldest input first
    F weight[W ? W : MAX_WIDTH][2], bias[2];
    int n[2];
    for (int v = 0; v < 2; v++) {
        const int64_t left = a.channels - c - 16 * v;
        n[v] = WHOLE ? 16 : left < 0 ? 0 : lanes(left);
        bias[v] = a.bias ? load_n(a.bias + c + 16 * v, n[v]) : zero();
        for (int64_t j = 0; j < width; j++) weight[j][v] = load_n(a.weight + j * a.channels + c + 16 * v, n[v]);
        for (int64_t j = 0; j < before; j++) {
            if (!first) store(rows[j] + 16 * v, load(past + j * GROUP + 16 * v));
            else store(rows[j] + 16 * v, from ? load_conv(a, (from * before + j) * a.channels + c + 16 * v, n[v]) : zero());
        }
        for (int64_t t = t0; t < t1; t++) {
            const int64_t at = t * a.x_stride + c + 16 * v;
            F in = load_n(a.x + at, n[v]);
            if (a.factor) in = in * load_n(a.factor + at, n[v]);
            if (a.bf16) {
                alignas(64) uint16_t rounded[16];
                store_bf16(rounded, in);
                in = load_bf16(rounded);
            }
            store(rows[before + t - t0] + 16 * v, in);
        }
    }
    for (int64_t t = t0; t < t1; t++) {
        const float* row = rows[t - t0];
        for (int v = 0; v < 2; v++) {
            F y = load(row + 16 * v) * weight[0][v];
            for (int64_t j = 1; j < width; j++) y = fma(load(row + j * GROUP + 16 * v), weight[j][v], y);
            y = y + bias[v];
            if (a.silu) y = y * sigmoid(y);
            if (a.gate) y = y * load_n(a.gate + t * a.x_stride + c + 16 * v, n[v]);
            if (a.form == FORM_F32) store_n((float*)(a.out + t * a.out_stride) + c + 16 * v, y, n[v]);
            else store(sums + 16 * v, y);  // 0 beyond the channels
        }
        if (a.form != FORM_F32) emit_group(a.form, a.out + t * a.out_stride, a.channels, c / GROUP, sums);
        if (const int64_t slot = a.step.write[t])
            for (int64_t j = 0; j < before; j++)
                for (int v = 0; v < 2; v++)
                    store_conv(a, (slot * before + j) * a.channels + c + 16 * v, load(row + (j + 1) * GROUP + 16 * v), n[v]);
    }
    if (!last) memcpy(past, rows[t1 - t0], before * GROUP * 4);
}

static int64_t conv_scratch(const ConvArgs& a) { return (a.width - 1) * padded(a.channels); }

// Channels [c0, c1) of a sequence; c0 is a multiple of 32. Inputs are rounded to the states' type, so that it does not matter
// which of them come from a state. Some tokens at a time, since their rows lie in many pages of memory.
static void conv(const ConvArgs& a, int64_t seq, int64_t c0, int64_t c1, float* scratch) {
    const int64_t end = a.step.starts[seq + 1];
    for (int64_t t0 = a.step.starts[seq]; t0 < end; t0 += CONV_TOKENS) {
        const int64_t t1 = end - t0 < CONV_TOKENS ? end : t0 + CONV_TOKENS;
        for (int64_t c = c0; c < c1; c += GROUP) {
            float* past = scratch + (c - c0) * (a.width - 1);
            if (c + GROUP > c1 || (a.width != 4 && a.width != 3)) conv_group<0, false>(a, seq, c, t0, t1, past);
            else if (a.width == 4) conv_group<4, true>(a, seq, c, t0, t1, past);
            else conv_group<3, true>(a, seq, c, t0, t1, past);
        }
    }
}

// --- Blocks of columns of a state [K, V] ---

// A block of columns: where it is read before a token and written after it, both as rows of whole vectors `stride` floats apart.
struct Columns {
    const float* from;
    int64_t from_stride;
    float* to;
    int64_t to_stride;
    const float* then;  // what is read next, in rows as far apart as `from`; null: it is near already
};

static inline void copy_columns(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t count) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t v = 0; v < count; v += 16) {
            const int n = lanes(count - v);
            store_n(to + i * to_stride + v, load_n(from + i * from_stride + v, n), n);
        }
}

static inline void clear_columns(float* to, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) store(to + i, zero());
}

// A block's way through the tokens of its sequence. It lives in `work` [K][width] between tokens; the sequence's first token reads
// its slot, and the last one writes one.
struct Carried {
    float* work;
    int64_t width, rows, columns;  // of the block; `columns` may be fewer than `width`
    float *read, *slots;           // where it begins, null: zeros; slot 0's block
    int64_t slot_size, stride;     // floats
    const float* next;             // the block that is computed after this one
    bool whole() const { return columns == width; }

    // Where the state is before the sequence's first token.
    const float* before(int64_t* from_stride) const {
        if (read && whole()) return *from_stride = stride, read;
        if (read) copy_columns(read, stride, work, width, rows, columns);
        else clear_columns(work, rows * width);
        return *from_stride = width, work;
    }
    // Where the state goes after a token: to a slot if it is the sequence's last, else to `work`. Null: nowhere.
    float* after(bool last, int64_t slot, int64_t* to_stride) const {
        if (last && slot && whole()) return *to_stride = stride, slots + slot * slot_size;
        *to_stride = width;
        return last && !slot ? nullptr : work;
    }
    void keep(bool last, int64_t slot) const {
        if (slot && !(last && whole())) copy_columns(work, width, slots + slot * slot_size, stride, rows, columns);
    }
};

// --- Gated delta rule ---

// A tile's factors for a head. Rows have `padded(K)` floats.
struct DeltaTile {
    float *k, *kept, *kept_k, *kept_q;     // k; the decay of each row of the state; and its products with k and q
    float *beta, *decay, *qk;              // [TILE_TOKENS]; `decay` is the head's, with one for all rows
    DeltaTile(const DeltaArgs& a, float* scratch) {
        const int64_t rows = TILE_TOKENS * padded(a.key_dim);
        k = scratch, kept_k = k + rows, kept_q = kept_k + rows, kept = kept_q + rows;
        beta = kept + (a.by_channel ? rows : 0), decay = beta + TILE_TOKENS, qk = decay + TILE_TOKENS;
    }
    static int64_t floats(const DeltaArgs& a) { return ((a.by_channel ? 4 : 3) * padded(a.key_dim) + 3) * TILE_TOKENS; }
};

static inline float inverse_norm(const float* x, int64_t n) {
    F squares = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F v = load_n(x + i, lanes(n - i));
        squares = fma(v, v, squares);
    }
    return 1.0f / sqrtf(sum(squares) + 1e-6f);
}

// What tokens keep of the state, for decays with their bias.
static inline F kept_part(const DeltaArgs& a, F raw, int64_t head) {
    const F rate = set1(a.rate[head]);
    return vexp(a.bound ? set1(a.bound) * sigmoid(zero() - raw * rate) : softplus(raw) * rate);
}

static inline void prepare(const DeltaArgs& a, const DeltaTile& tile, int64_t head, int64_t t0, int64_t tokens) {
    const int64_t dim = a.key_dim, size = padded(dim), key_head = head / (a.num_heads / a.num_key_heads);
    const float root = 1.0f / sqrtf((float)dim);
    for (int64_t i = 0; i < TILE_TOKENS; i += 16) {
        if (i >= tokens) break;
        alignas(64) float b[16] = {}, d[16] = {};
        for (int64_t t = i; t < tokens && t < i + 16; t++) {
            b[t - i] = a.beta[(t0 + t) * a.beta_stride + head];
            if (!a.by_channel) d[t - i] = a.decay[(t0 + t) * a.decay_stride + head];
        }
        store(tile.beta + i, sigmoid(load(b)) * set1(a.beta_scale));
        if (!a.by_channel) store(tile.decay + i, kept_part(a, load(d) + set1(a.time[head]), head));
    }
    for (int64_t t = 0; t < tokens; t++) {
        const float *q = a.x + (t0 + t) * a.x_stride + key_head * dim, *k = q + a.num_key_heads * dim;
        const F q_scale = set1(inverse_norm(q, dim) * root), k_scale = set1(inverse_norm(k, dim));
        F products = zero();
        for (int64_t i = 0; i < dim; i += 16) {
            const int n = lanes(dim - i);
            const F own_k = load_n(k + i, n) * k_scale, own_q = load_n(q + i, n) * q_scale;
            F g = set1(tile.decay[t]);
            if (a.by_channel) {
                const F d = load_n(a.decay + (t0 + t) * a.decay_stride + head * dim + i, n) + load_n(a.time + head * dim + i, n);
                g = kept_part(a, d, head);
                store(tile.kept + t * size + i, g);
            }
            store(tile.k + t * size + i, own_k);
            store(tile.kept_k + t * size + i, own_k * g);
            store(tile.kept_q + t * size + i, own_q * g);
            products = fma(own_k, own_q, products);
        }
        tile.qk[t] = sum(products);
    }
}

// Reads a state for the sums of its decayed rows by the first token's k and q.
template <int NV>
static inline void look(const DeltaTile& tile, int64_t rows, const float* from, int64_t stride, F (&by_k)[NV], F (&by_q)[NV]) {
    for (int v = 0; v < NV; v++) by_k[v] = by_q[v] = zero();
    for (int64_t i = 0; i < rows; i++) {
        const F k = set1(tile.kept_k[i]), q = set1(tile.kept_q[i]);
        for (int v = 0; v < NV; v++) {
            const F s = load(from + i * stride + 16 * v);
            by_k[v] = fma(k, s, by_k[v]);
            by_q[v] = fma(q, s, by_q[v]);
        }
    }
}

// Decays a state and adds k `delta`ᵀ. With NEXT it looks at the new state for the token after.
template <int NV, bool BY_CHANNEL, bool NEXT>
static inline void turn(const DeltaTile& tile, int64_t t, int64_t size, int64_t rows, const Columns& c, const F (&delta)[NV],
                        F (&by_k)[NV], F (&by_q)[NV]) {
    const float *k = tile.k + t * size, *kept = tile.kept + t * size;
    const float *next_k = tile.kept_k + (t + 1) * size, *next_q = tile.kept_q + (t + 1) * size;
    const F head_decay = set1(tile.decay[t]);
    if (NEXT)
        for (int v = 0; v < NV; v++) by_k[v] = by_q[v] = zero();
    for (int64_t i = 0; i < rows; i++) {
        if (!NEXT && c.then)
            for (int v = 0; v < NV; v++) ask_for((const uint8_t*)(c.then + i * c.from_stride + 16 * v));
        const F own = set1(k[i]), g = BY_CHANNEL ? set1(kept[i]) : head_decay;
        F s[NV];
        for (int v = 0; v < NV; v++) s[v] = fma(own, delta[v], load(c.from + i * c.from_stride + 16 * v) * g);
        for (int v = 0; v < NV; v++) store(c.to + i * c.to_stride + 16 * v, s[v]);
        if (NEXT) {
            const F by = set1(next_k[i]), bq = set1(next_q[i]);
            for (int v = 0; v < NV; v++) by_k[v] = fma(by, s[v], by_k[v]), by_q[v] = fma(bq, s[v], by_q[v]);
        }
    }
}

template <int NV, bool BY_CHANNEL>
static void delta_block(const DeltaArgs& a, const DeltaTile& tile, const Carried& carried, int64_t seq, int64_t head, int64_t v0,
                        int64_t t0, int64_t tokens) {
    const int64_t begin = a.step.starts[seq], end = a.step.starts[seq + 1], size = padded(a.key_dim), rows = a.key_dim;
    const int64_t values = 2 * a.num_key_heads * a.key_dim + head * a.value_dim + v0;
    Columns c{};
    if (t0 == begin) c.from = carried.before(&c.from_stride);
    else c.from = carried.work, c.from_stride = carried.width;
    F by_k[NV], by_q[NV], delta[NV];
    look<NV>(tile, rows, c.from, c.from_stride, by_k, by_q);
    for (int64_t t = 0; t < tokens; t++) {
        const F beta = set1(tile.beta[t]), qk = set1(tile.qk[t]);
        const float* x = a.x + (t0 + t) * a.x_stride + values;
        float* out = a.out + (t0 + t) * a.out_stride + head * a.value_dim + v0;
        for (int v = 0; v < NV; v++) {
            const int n = lanes(carried.columns - 16 * v);
            delta[v] = beta * (load_n(x + 16 * v, n) - by_k[v]);
            store_n(out + 16 * v, fma(qk, delta[v], by_q[v]), n);
        }
        const bool last = t0 + t + 1 == end;
        const int64_t slot = a.step.write[t0 + t];
        c.to = carried.after(last, slot, &c.to_stride);
        if (!c.to) return;
        if (end - begin == 1 && c.from == carried.read) c.then = carried.next;
        if (t + 1 < tokens) turn<NV, BY_CHANNEL, true>(tile, t, size, rows, c, delta, by_k, by_q);
        else turn<NV, BY_CHANNEL, false>(tile, t, size, rows, c, delta, by_k, by_q);
        carried.keep(last, slot);
        c.from = carried.work, c.from_stride = carried.width;
    }
}

// Calls f(v, columns, width) for blocks of the columns [v0, v1), each of a width of 16, 32, 64 or 128 floats.
template <class Block>
static inline void in_blocks(int64_t v0, int64_t v1, int64_t widest, Block f) {
    for (int64_t v = v0; v < v1;) {
        int64_t width = widest;
        while (width > 16 && width > v1 - v) width /= 2;
        f(v, width < v1 - v ? width : v1 - v, width);
        v += width;
    }
}

static int64_t delta_scratch(const DeltaArgs& a) { return DeltaTile::floats(a) + a.key_dim * round_up(a.value_dim, 16); }

// Columns [v0, v1) of a head's values; v0 is a multiple of 64.
static void delta(const DeltaArgs& a, int64_t seq, int64_t head, int64_t v0, int64_t v1, float* scratch) {
    const DeltaTile tile(a, scratch);
    float* work = scratch + DeltaTile::floats(a);
    const int64_t begin = a.step.starts[seq], end = a.step.starts[seq + 1], from = a.step.read[seq];
    const int64_t head_size = a.key_dim * a.value_dim, slot_size = a.num_heads * head_size;
    for (int64_t t0 = begin; t0 < end; t0 += TILE_TOKENS) {
        const int64_t tokens = end - t0 < TILE_TOKENS ? end - t0 : TILE_TOKENS;
        prepare(a, tile, head, t0, tokens);
        const int64_t widest = end - begin == 1 && kFullTiles ? 128 : 32;  // a decode's rows are read whole
        in_blocks(v0, v1, widest, [&](int64_t v, int64_t columns, int64_t width) {
            float *slots = a.states + head * head_size + v, *read = from ? slots + from * slot_size : nullptr;
            const float* next = read + (v + width < a.value_dim ? width : head_size - v);
            float* own = work + (v - v0) * a.key_dim;
            const Carried carried{own, width, a.key_dim, columns, read, slots, slot_size, a.value_dim, next};
#define BLOCK(NV) (a.by_channel ? delta_block<NV, true> : delta_block<NV, false>)(a, tile, carried, seq, head, v, t0, tokens)
            if (width == 128) BLOCK(8);
            else if (width == 64) BLOCK(4);
            else if (width == 32) BLOCK(2);
            else BLOCK(1);
#undef BLOCK
        });
    }
}

// --- Mamba-2 ---

// NT tokens in one pass over the state. y is their results without D.
template <int NV, int NT>
static inline void ssd_turn(int64_t rows, const Columns& c, const float* const (&b)[NT], const float* const (&by)[NT],
                            const float* decay, const F (&x)[NT][NV], F (&y)[NT][NV]) {
    F kept[NT];
    for (int t = 0; t < NT; t++) {
        kept[t] = set1(decay[t]);
        for (int v = 0; v < NV; v++) y[t][v] = zero();
    }
    for (int64_t i = 0; i < rows; i++) {
        F s[NV];
        for (int v = 0; v < NV; v++) s[v] = load(c.from + i * c.from_stride + 16 * v);
        for (int t = 0; t < NT; t++) {
            const F own = set1(b[t][i]), reads = set1(by[t][i]);
            for (int v = 0; v < NV; v++) s[v] = fma(own, x[t][v], s[v] * kept[t]);
            for (int v = 0; v < NV; v++) y[t][v] = fma(reads, s[v], y[t][v]);
        }
        if (c.to)
            for (int v = 0; v < NV; v++) store(c.to + i * c.to_stride + 16 * v, s[v]);
    }
}

template <int NV, int NT>
static inline void ssd_tokens(const SsdArgs& a, const Columns& c, int64_t head, int64_t v0, int64_t columns, int64_t token,
                              const float* dt, const float* decay) {
    const int64_t group = head / (a.num_heads / a.num_groups);
    const float *b[NT], *by[NT];
    F x[NT][NV], y[NT][NV];
    for (int t = 0; t < NT; t++) {
        const float* row = a.x + (token + t) * a.x_stride;
        b[t] = row + a.num_heads * a.value_dim + group * a.key_dim, by[t] = b[t] + a.num_groups * a.key_dim;
        const float* values = row + head * a.value_dim + v0;
        for (int v = 0; v < NV; v++) x[t][v] = load_n(values + 16 * v, lanes(columns - 16 * v)) * set1(dt[t]);
    }
    ssd_turn<NV, NT>(a.key_dim, c, b, by, decay, x, y);
    for (int t = 0; t < NT; t++)
        for (int v = 0; v < NV; v++) {
            const int64_t at = head * a.value_dim + v0 + 16 * v;
            const int n = lanes(columns - 16 * v);
            const F skipped = load_n(a.x + (token + t) * a.x_stride + at, n);
            store_n(a.out + (token + t) * a.out_stride + at, fma(skipped, set1(a.skip[head]), y[t][v]), n);
        }
}

template <int NV>
static void ssd_block(const SsdArgs& a, const Carried& carried, int64_t seq, int64_t head, int64_t v0, int64_t t0, int64_t tokens,
                      const float* dt, const float* decay) {
    const int64_t begin = a.step.starts[seq], end = a.step.starts[seq + 1];
    Columns c{};
    if (t0 == begin) c.from = carried.before(&c.from_stride);
    else c.from = carried.work, c.from_stride = carried.width;
    for (int64_t t = 0; t < tokens;) {
        const bool two = t + 1 < tokens && !a.step.write[t0 + t];
        const int64_t final = t + (two ? 1 : 0), slot = a.step.write[t0 + final];
        const bool last = t0 + final + 1 == end;
        c.to = carried.after(last, slot, &c.to_stride);
        if (two) ssd_tokens<NV, 2>(a, c, head, v0, carried.columns, t0 + t, dt + t, decay + t);
        else ssd_tokens<NV, 1>(a, c, head, v0, carried.columns, t0 + t, dt + t, decay + t);
        carried.keep(last, slot);
        c.from = carried.work, c.from_stride = carried.width;
        t = final + 1;
    }
}

static int64_t ssd_scratch(const SsdArgs& a) { return 2 * TILE_TOKENS + a.key_dim * round_up(a.value_dim, 16); }

static void ssd(const SsdArgs& a, int64_t seq, int64_t head, int64_t v0, int64_t v1, float* scratch) {
    float *dt = scratch, *decay = dt + TILE_TOKENS, *work = decay + TILE_TOKENS;
    const int64_t begin = a.step.starts[seq], end = a.step.starts[seq + 1], from = a.step.read[seq];
    const int64_t head_size = a.key_dim * a.value_dim, slot_size = a.num_heads * head_size;
    for (int64_t t0 = begin; t0 < end; t0 += TILE_TOKENS) {
        const int64_t tokens = end - t0 < TILE_TOKENS ? end - t0 : TILE_TOKENS;
        for (int64_t i = 0; i < tokens; i += 16) {
            alignas(64) float raw[16] = {};
            for (int64_t t = i; t < tokens && t < i + 16; t++) raw[t - i] = a.dt[(t0 + t) * a.dt_stride + head];
            const F step = vmin(vmax(softplus(load(raw) + set1(a.time[head])), set1(a.least)), set1(a.most));
            store(dt + i, step);
            store(decay + i, vexp(step * set1(a.rate[head])));
        }
        in_blocks(v0, v1, kFullTiles ? 64 : 32, [&](int64_t v, int64_t columns, int64_t width) {
            float *slots = a.states + head * head_size + v, *read = from ? slots + from * slot_size : nullptr;
            float* own = work + (v - v0) * a.key_dim;
            const Carried carried{own, width, a.key_dim, columns, read, slots, slot_size, a.value_dim, nullptr};
            const auto block = width == 64 ? ssd_block<4> : width == 32 ? ssd_block<2> : ssd_block<1>;
            block(a, carried, seq, head, v, t0, tokens, dt, decay);
        });
    }
}

// --- Mamba-1 ---

// 2ˣ for x ≤ 0, to an ulp, and nearer around 0, so that slow decays stay what they are; below −125 about 2⁻¹²⁵.
static inline F decay2(F x) {
    x = vmax(x, set1(-125.0f));
    const F n = whole(x), r = x - n;
    F p = fma(set1(1.546144746e-4f), r, set1(1.339086735e-3f));
    p = fma(p, r, set1(9.61805667e-3f));
    p = fma(p, r, set1(5.550357104e-2f));
    p = fma(p, r, set1(2.402265092e-1f));
    p = fma(p, r, set1(6.93147188e-1f));
    return times_pow2(fma(p, r, set1(1.0f)), n);
}

// The states of `n` channels: [n][dim] in a slot, [dim][16] by lanes.
static inline void to_lanes(const float* slot, float* by_lanes, float* scratch, int64_t dim, int n) {
    if (dim == 16 && n == 16) {
        memcpy(scratch, slot, 4 * 16 * 16);
        return transpose16((const uint32_t*)scratch, (uint32_t*)by_lanes, 16, 16);
    }
    for (int64_t i = 0; i < dim; i++)
        for (int64_t c = 0; c < 16; c++) by_lanes[i * 16 + c] = c < n ? slot[c * dim + i] : 0.0f;
}
static inline void from_lanes(const float* by_lanes, float* slot, int64_t dim, int n) {
    if (dim == 16 && n == 16) return transpose16((const uint32_t*)by_lanes, (uint32_t*)slot, 16, 16);
    for (int64_t c = 0; c < n; c++)
        for (int64_t i = 0; i < dim; i++) slot[c * dim + i] = by_lanes[i * 16 + c];
}

static int64_t scan_scratch(const ScanArgs& a) { return 16 * a.key_dim + 16 * 16; }

// Channels [c0, c1), sixteen at a time: a lane for each, whose state is transposed.
static void scan(const ScanArgs& a, int64_t seq, int64_t c0, int64_t c1, float* scratch) {
    const int64_t begin = a.step.starts[seq], end = a.step.starts[seq + 1], from = a.step.read[seq], dim = a.key_dim;
    float* states = scratch;
    for (int64_t base = c0; base < c1; base += 16) {
        const int n = lanes(c1 - base);
        if (from) to_lanes(a.states + (from * a.channels + base) * dim, states, scratch + 16 * dim, dim, n);
        else clear_columns(states, 16 * dim);
        const float* rates = a.rate + base * dim;
        const F time = load_n(a.time + base, n), skip = load_n(a.skip + base, n);
        for (int64_t t = begin; t < end; t++) {
            const float *b = a.b + t * a.b_stride, *by = a.c + t * a.c_stride;
            const F x = load_n(a.x + t * a.x_stride + base, n);
            const F dt = softplus(load_n(a.dt + t * a.dt_stride + base, n) + time), added = dt * x;
            F y = x * skip;
            for (int64_t i = 0; i < dim; i++) {
                const F s = fma(added, set1(b[i]), load(states + 16 * i) * decay2(load(rates + 16 * i) * dt));
                store(states + 16 * i, s);
                y = fma(s, set1(by[i]), y);
            }
            store_n(a.out + t * a.out_stride + base, y, n);
            if (const int64_t slot = a.step.write[t]) from_lanes(states, a.states + (slot * a.channels + base) * dim, dim, n);
        }
    }
}

// --- Gates and norms of results ---

static void gated_norm(const GatedNormArgs& a, int64_t row, float* scratch) {
    const float *x = a.x + row * a.x_stride, *z = a.z + row * a.z_stride;
    for (int64_t g = 0; g < a.size; g += a.group) {
        F squares = zero();
        for (int64_t i = g; i < g + a.group; i += 16) {
            const int n = lanes(g + a.group - i);
            F v = load_n(x + i, n);
            if (a.gate_first || !a.weight) {
                const F gate = load_n(z + i, n), part = sigmoid(gate);
                v = v * (a.silu ? gate * part : part);
            }
            squares = fma(v, v, squares);
            store_n(scratch + i, v, n);
        }
        if (!a.weight) continue;
        const F scale = set1(1.0f / sqrtf(sum(squares) / a.group + a.eps));
        for (int64_t i = g; i < g + a.group; i += 16) {
            const int n = lanes(g + a.group - i);
            F v = load_n(scratch + i, n) * scale * load_n(a.weight + i, n);
            if (!a.gate_first) {
                const F gate = load_n(z + i, n), part = sigmoid(gate);
                v = v * (a.silu ? gate * part : part);
            }
            store_n(scratch + i, v, n);
        }
    }
    emit_row(a.form, a.out + row * a.out_stride, a.size, scratch);
}

}  // namespace ISA
