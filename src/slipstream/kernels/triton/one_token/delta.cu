// Part of `kernel.cu`: a layer with the gated delta rule in place of attention, for one token. `spec/recurrent.py` has
// the equations. A bar is a grid barrier:
//
//     norm → q, k, v, z; gates | convolution, rule | norm by head, gate; output
//
// 1. The columns of a head's state [K, V] don't depend on one another. A CTA has DELTA_COLUMNS of a head: it reads them
//    before the barrier, and writes them once. Each thread has 4 columns of some rows in registers.
// 2. Sᵀk and Sᵀq are summed together: with the new state S' = γS + k uᵀ, S'ᵀq = γ Sᵀq + (q·k) u.
// 3. Several CTAs read the convolution's state of q and k. So it is written after the next barrier.
// 4. Every CTA norms and gates the whole row as it loads the input of the output product.

#if DELTA
constexpr int DELTA_PARTS = DELTA_V / DELTA_COLUMNS;  // CTAs of a head
constexpr int DELTA_ACTIVE = DELTA_HEADS * DELTA_PARTS;
static_assert(DELTA_ACTIVE <= CTAS && DV % 256 == 0 && DELTA_CHANNELS % 8 == 0 && RANKS == 1 && !LATENT && !PARALLEL,
              "a shape that one_token.py should refuse");

struct StateSlots {  // 0: the state is zero; the state is not kept
    long long from, to;
};

struct DeltaRule {
    static constexpr int K = DELTA_K, V = DELTA_V, C = DELTA_CHANNELS, W = DELTA_WIDTH, COLUMNS = DELTA_COLUMNS;
    static constexpr int LANES = COLUMNS / 4;             // threads of a row
    static constexpr int ROWS = THREADS / LANES;          // rows that all threads hold at once
    static constexpr int TIMES = K / ROWS;                // rows of a thread
    static constexpr int SUM_LANES = LANES < 32 ? 32 / LANES : 1;  // of a warp, with the same columns
    static constexpr int PARTS_OF_SUM = THREADS / max_of(LANES, 32);
    static constexpr int CHANNELS = 2 * K + COLUMNS, CHANNEL_TIMES = (CHANNELS + THREADS - 1) / THREADS;
    static_assert(K % ROWS == 0 && TIMES <= 16 && CHANNELS + 2 * PARTS_OF_SUM * COLUMNS <= DELTA_BYTES / 4, "");

    const int head, part;
    const StateSlots slots;
    float4 state[TIMES];
    u16 old[CHANNEL_TIMES][W - 1], weight[CHANNEL_TIMES][W], bias[CHANNEL_TIMES];
    float rate, time;

    DEVICE DeltaRule(int cta, StateSlots slots) : head(cta / DELTA_PARTS), part(cta % DELTA_PARTS), slots(slots) {}
    DEVICE int channel(int i) const {  // of q, k, v in turn
        const int key = head / (DELTA_HEADS / DELTA_KEY_HEADS) * K;
        return i < K ? key + i : i < 2 * K ? DELTA_KEY_HEADS * K + key + i - K
                                           : 2 * DELTA_KEY_HEADS * K + head * V + part * COLUMNS + i - 2 * K;
    }
    DEVICE long long place(long long slot, int i) const {  // of this thread's i-th 4 numbers
        const int row = i * ROWS + threadIdx.x / LANES;
        return ((slot * DELTA_HEADS + head) * K + row) * V + part * COLUMNS + threadIdx.x % LANES * 4;
    }

    // Loads that do not depend on this step.
    DEVICE void prefetch(const u64* row) {
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            state[i] = slots.from ? *(const float4*)((const float*)row[STATES] + place(slots.from, i)) : float4{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < CHANNEL_TIMES; i++) {
            const int of = i * THREADS + threadIdx.x, c = channel(of < CHANNELS ? of : 0);
            if constexpr (W == 4) {
                const uint2 all = ((const uint2*)row[CONV_W])[c];
                weight[i][0] = (u16)all.x, weight[i][1] = all.x >> 16, weight[i][2] = (u16)all.y, weight[i][3] = all.y >> 16;
            }
#pragma unroll
            for (int w = 0; w < W; w++) {
                if (W != 4) weight[i][w] = ((const u16*)row[CONV_W])[c * W + w];
                if (w < W - 1) old[i][w] = slots.from ? ((const u16*)row[CONV_STATES])[(slots.from * (W - 1) + w) * C + c] : 0;
            }
            bias[i] = DELTA_CONV_BIAS ? ((const u16*)row[CONV_B])[c] : 0;
        }
        rate = ((const float*)row[DECAY_W])[head];
        time = ((const float*)row[TIME_W])[head];
    }

    // rows: what the product made [DELTA_ROWS]; gates [2, DELTA_HEADS]: b, then a. Writes this CTA's columns of the result to
    // `mixed` [DV], before its norm.
    DEVICE void run(const u64* row, const u16* rows, const float* gates, float* mixed, u8* memory) {
        float* q = (float*)(memory + INPUT_AT);
        float *k = q + K, *v = k + K, *sums = q + CHANNELS;  // sums [PARTS_OF_SUM, 2, COLUMNS]
        const int lane = threadIdx.x % 32;
        const float b = load_cg4(gates + head), a = load_cg4(gates + DELTA_HEADS + head);
        u16 x[CHANNEL_TIMES];
#pragma unroll
        for (int i = 0; i < CHANNEL_TIMES; i++) {
            const int of = i * THREADS + threadIdx.x;
            x[i] = load_cg2(rows + channel(of < CHANNELS ? of : 0));
        }
#pragma unroll
        for (int i = 0; i < CHANNEL_TIMES; i++) {
            float y = to_float(bias[i]) + to_float(x[i]) * to_float(weight[i][W - 1]);
#pragma unroll
            for (int w = 0; w < W - 1; w++) y += to_float(old[i][w]) * to_float(weight[i][w]);
            if (i * THREADS + threadIdx.x < CHANNELS) q[i * THREADS + threadIdx.x] = y * logistic(y);
        }
        sync_consumers();
        float squares_q = 0.0f, squares_k = 0.0f, product = 0.0f;  // each warp computes all of them
#pragma unroll
        for (int i = lane; i < K; i += 32) squares_q += q[i] * q[i], squares_k += k[i] * k[i], product += q[i] * k[i];
        const float of_k = rsqrtf(warp_reduce(squares_k) + 1e-6f);
        const float of_q = rsqrtf(warp_reduce(squares_q) + 1e-6f) * DELTA_SCALE;
        product = warp_reduce(product) * of_q * of_k;
        const float raw = a + time;
        const float kept = expf(-expf(rate) * (fmaxf(raw, 0.0f) + log1pf(expf(-fabsf(raw)))));
        const float beta = (DELTA_TWICE ? 2.0f : 1.0f) * logistic(b);
        float sum[8] = {};  // Sᵀk, then Sᵀq
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const float of_row = k[i * ROWS + threadIdx.x / LANES], by = q[i * ROWS + threadIdx.x / LANES];
            const float s[4] = {state[i].x, state[i].y, state[i].z, state[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += s[j] * of_row, sum[4 + j] += s[j] * by;
        }
        typedef Scattered<8, SUM_LANES, LANES < 32 ? LANES : 32> Columns;
        Columns::sum(sum);
        const int column = threadIdx.x % LANES * 4, share = threadIdx.x / max_of(LANES, 32);
#pragma unroll
        for (int j = 0; j < Columns::kept; j++) {
            const int n = Columns::first() + j;
            if (Columns::stores()) sums[(share * 2 + n / 4) * COLUMNS + column + n % 4] = sum[j];
        }
        sync_consumers();
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < PARTS_OF_SUM; i++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float4 more = *(const float4*)(sums + (i * 2 + n) * COLUMNS + column);
                sum[n * 4] += more.x, sum[n * 4 + 1] += more.y, sum[n * 4 + 2] += more.z, sum[n * 4 + 3] += more.w;
            }
        float u[4], y[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u[j] = beta * (v[column + j] - kept * of_k * sum[j]);
            y[j] = kept * of_q * sum[4 + j] + product * u[j];
        }
        if (threadIdx.x < LANES) *(float4*)(mixed + head * V + part * COLUMNS + column) = float4{y[0], y[1], y[2], y[3]};
        if (slots.to)
#pragma unroll
            for (int i = 0; i < TIMES; i++) {
                const float by = of_k * k[i * ROWS + threadIdx.x / LANES];
                const float4 s = state[i];
                *(float4*)((float*)row[STATES] + place(slots.to, i)) =
                    float4{kept * s.x + by * u[0], kept * s.y + by * u[1], kept * s.z + by * u[2], kept * s.w + by * u[3]};
            }
    }
};

// A producer warp: this CTA's part of the state into L2, while weights arrive.
DEVICE void prefetch_state(const u8* states, StateSlots slots, const Producer& producer) {
    if (!slots.from || producer.cta >= DELTA_ACTIVE) return;
    const int head = producer.cta / DELTA_PARTS, part = producer.cta % DELTA_PARTS;
    const float* from = (const float*)states + (slots.from * DELTA_HEADS + head) * (DELTA_K * DELTA_V) + part * DELTA_COLUMNS;
    for (int row = producer.which * 32 + producer.lane; row < DELTA_K; row += PRODUCER_WARPS * 32)
        bulk_prefetch(from + (long long)row * DELTA_V, DELTA_COLUMNS * 4);
}

// This thread's 8 channels of the convolution's state, if it has any: `load` before and `add` after q, k, v are there.
struct ConvState {
    static constexpr int C = DELTA_CHANNELS, W = DELTA_WIDTH;
    int at;
    uint4 rows[W - 1];
    DEVICE void load(const u64* row, int cta, StateSlots slots) {
        at = ((int)threadIdx.x * CTAS + cta) * 8;
#pragma unroll
        for (int w = 0; w < W - 2; w++)
            rows[w] = at < C && slots.from
                          ? *(const uint4*)((const u16*)row[CONV_STATES] + (slots.from * (W - 1) + w + 1) * C + at)
                          : uint4{0, 0, 0, 0};
    }
    DEVICE void add(const u16* x) {
        if (at < C) rows[W - 2] = load_cg16(x + at);
    }
    DEVICE void store(const u64* row, StateSlots slots) const {
        if (at < C && slots.to)
#pragma unroll
            for (int w = 0; w < W - 1; w++)
                *(uint4*)((u16*)row[CONV_STATES] + (slots.to * (W - 1) + w) * C + at) = rows[w];
    }
};
static_assert(DELTA_CHANNELS <= THREADS * CTAS * 8, "a thread has 8 channels at most");

// The tap of `load_input` that norms the rule's result by head and multiplies it by the gate.
struct DeltaEnd {
    static constexpr int VECTORS = DV / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
    uint4 weight[TIMES], z[TIMES];
    DEVICE void prefetch(const u64* row) {
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            weight[i] = ((const uint4*)row[DELTA_NORM_W])[(i * THREADS + threadIdx.x) % (DELTA_V / 8)];
    }
    DEVICE void load(const u16* gate) {
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) z[i] = load_cg16((const uint4*)gate + i * THREADS + threadIdx.x);
    }
    DEVICE void operator()(int i, float* y) const {
        float squares = 0.0f, w[8], by[8];
#pragma unroll
        for (int j = 0; j < 8; j++) squares += y[j] * y[j];
#pragma unroll
        for (int lanes = DELTA_V / 16; lanes; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
        const float factor = rsqrtf(squares / DELTA_V + DELTA_EPS);
        unpack8(weight[i], w);
        unpack8(z[i], by);
#pragma unroll
        for (int j = 0; j < 8; j++)
            y[j] = to_float(from_float(y[j] * factor * w[j] * logistic(by[j]) * (DELTA_SIGMOID ? 1.0f : by[j])));
    }
};
#endif

// The tap of `load_input` that multiplies attention's result by its gate.
struct OutputGate {
    static constexpr int VECTORS = Q / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
    uint4 z[OUTPUT_GATE ? TIMES : 1];
    DEVICE void load(const u16* gate) {
        if (OUTPUT_GATE)
#pragma unroll
            for (int i = 0; i < TIMES; i++)
                if (i * THREADS + threadIdx.x < VECTORS) z[i] = load_cg16((const uint4*)gate + i * THREADS + threadIdx.x);
    }
    DEVICE void operator()(int i, float* y) const {
        if (!OUTPUT_GATE) return;
        float by[8];
        unpack8(z[i], by);
#pragma unroll
        for (int j = 0; j < 8; j++) y[j] = to_float(from_float(y[j] * to_float(from_float(logistic(by[j])))));
    }
};
