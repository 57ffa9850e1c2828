// Part of `kernel.cu`: a layer's mixture of experts, in place of up and down. A bar is a grid barrier:
//
//     norm → router | shared expert's up; chosen experts' ups, activation | shared expert's down; chosen experts' downs
//
// 1. Each CTA computes some of the router's logits. After the barrier every CTA chooses the experts from all logits. It copies
//    them once: if each warp of all CTAs read these few lines of L2, it would wait for the others (8 µs on an H200).
// 2. The producer warps need the choice too. While they wait for it, they copy the shared expert's weights. Prefetching
//    other weights into L2 meanwhile was slower on an H200: the next layer's q, k, v, or experts predicted from the
//    residual before attention (Eliseev and Mazur, 2023); see benchmarks/results/kernels_cuda_one_token_ahead.json.
// 3. Router logits, and values between two products, are rounded to the model's type, as separate kernels round them.
// 4. The chosen experts' outputs are summed in float32 with their weights, as in `moe_small_batch`. The shared expert's
//    output is added to the residual before them.

// An unsigned code with the order of the floats. No float has code 0.
DEVICE u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float logistic(float x) { return 1.0f / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

DEVICE float unordered(u32 code) { return __uint_as_float(code & 0x80000000u ? code & 0x7fffffffu : ~code); }

// The TOP best of X experts and their weights; of equals the first. Each warp computes all of it from the logits in shared
// memory. A softmax keeps the order of the logits, so without a correction logits are compared.
template <int X_>
DEVICE TopExperts route(const float* logits, const float* correction) {
    constexpr int PER_LANE_ = (X_ + 31) / 32;
    const int lane = threadIdx.x % 32;
    u32 key[PER_LANE_], most = 0;
    float top = 0.0f, total = 1.0f;
    {
        float score[PER_LANE_];
#pragma unroll
        for (int i = 0; i < PER_LANE_; i++) {
            const int expert = lane * PER_LANE_ + i;
            score[i] = expert < X_ ? logits[expert] : 0.0f;
            if (SIGMOID) score[i] = logistic(score[i]);
        }
#pragma unroll
        for (int i = 0; i < PER_LANE_; i++) {
            key[i] = lane * PER_LANE_ + i < X_ ? ordered(score[i]) : 0;
            most = key[i] > most ? key[i] : most;
        }
        if (!SIGMOID) top = unordered(warp_max(most));
        if (!SIGMOID && (CORRECTED || !NORMALIZE)) {
            total = 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE_; i++) {
                score[i] = lane * PER_LANE_ + i < X_ ? exp2_fast(1.4426950408889634f * (score[i] - top)) : 0.0f;
                total += score[i];
            }
            total = warp_reduce(total);
        }
        if (CORRECTED)
#pragma unroll
            for (int i = 0; i < PER_LANE_; i++)
                if (lane * PER_LANE_ + i < X_) key[i] = ordered(score[i] / total + correction[lane * PER_LANE_ + i]);
    }
    TopExperts found;
    u32 chosen = 0;
#pragma unroll 1
    for (int j = 0; j < TOP; j++) {
        u32 best = 0;
        int at = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE_; i++)
            if (key[i] > best) best = key[i], at = i;
        const u32 highest = warp_max(best);
        const int owner = __ffs(__ballot_sync(~0u, best == highest)) - 1;
        const int expert = __shfl_sync(~0u, lane * PER_LANE_ + at, owner);
        if (lane == j) found.expert = expert, chosen = highest;
#pragma unroll
        for (int i = 0; i < PER_LANE_; i++)
            if (lane == owner && i == at) key[i] = 0;
    }
    if (lane < TOP) {
        const float y = CORRECTED ? logits[found.expert] : unordered(chosen);
        if (SIGMOID) found.weight = CORRECTED ? logistic(y) : y;
        else found.weight = exp2_fast(1.4426950408889634f * (y - top)) / total;
    }
    if (NORMALIZE) found.weight /= warp_reduce(found.weight) + 1e-20f;
    found.weight *= WEIGHT_SCALE;
    return found;
}

// This CTA's rows of a product [ROWS, E] that is not quantized. `prefetch` loads them before the grid barrier: the last from
// `last`, if that is given. As the tap of `load_input` it multiplies them with the normed row. `write` stores the results.
template <int ROWS>
struct PlainRows {
    static constexpr int VECTORS = E / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
    static constexpr int ROWS_OF_CTA = (ROWS + CTAS - 1) / CTAS;
    uint4 w[ROWS_OF_CTA][TIMES];
    float sum[ROWS_OF_CTA], bias[ROWS_OF_CTA];

    DEVICE void prefetch(int cta, u64 weight, u64 last = 0, u64 biases = 0) {
#pragma unroll
        for (int o = 0; o < ROWS_OF_CTA; o++) {
            const int r = cta + o * CTAS;
            const bool is_last = last && r == ROWS - 1;
            sum[o] = 0.0f;
            bias[o] = biases && r < ROWS && !is_last ? to_float(((const u16*)biases)[r]) : 0.0f;
            const uint4* from = is_last ? (const uint4*)last : (const uint4*)weight + (long long)r * VECTORS;
#pragma unroll
            for (int i = 0; i < TIMES; i++) {
                const int v = i * THREADS + threadIdx.x;
                if (r < ROWS && v < VECTORS) w[o][i] = from[v];
            }
        }
    }
    DEVICE void operator()(int i, const float* y) {
#pragma unroll
        for (int o = 0; o < ROWS_OF_CTA; o++) {
            float z[8];
            unpack8(w[o][i], z);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[o] += to_float(from_float(y[j])) * z[j];
        }
    }
    DEVICE void write(float* results, int cta, u8* memory) {
#pragma unroll
        for (int o = 0; o < ROWS_OF_CTA; o++)
            if (cta + o * CTAS < ROWS) {
                const float y = block_reduce<false>(sum[o], (float*)(memory + SCRATCH_AT)) + bias[o];
                if (threadIdx.x == 0) results[cta + o * CTAS] = to_float(from_float(y));
            }
    }
};

// Store the input rows of the chosen experts' down products, each with its own scale. Lane j returns the factor of expert
// j's sums: its weight times the scale of its row.
template <int K>
DEVICE float load_expert_inputs(const u16* mid, float weight, u8* memory) {
    if (FORM == 0 || is_float4(FORM)) {
        constexpr int VECTORS = TOP * K / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
        uint4 held[TIMES];
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) held[i] = load_cg16((const uint4*)mid + i * THREADS + threadIdx.x);
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) *(uint4*)(memory + INPUT_AT + (i * THREADS + threadIdx.x) * 16) = held[i];
        sync_consumers();
        return weight;
    }
    constexpr int WARPS_PER_ROW = TOP < WARPS ? WARPS / TOP : 1;
    constexpr int TIMES = (K / 8 + WARPS_PER_ROW * 32 - 1) / (WARPS_PER_ROW * 32);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* scratch = (float*)(memory + SCRATCH_AT);
    for (int first = 0; first < TOP; first += WARPS / WARPS_PER_ROW) {
        const int nth = first + warp / WARPS_PER_ROW, start = warp % WARPS_PER_ROW * 32 + lane;
        uint4 held[TIMES];
        float max_abs = 0.0f, y[8];
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const int v = i * WARPS_PER_ROW * 32 + start;
            held[i] = nth < TOP && v < K / 8 ? load_cg16((const uint4*)mid + nth * (K / 8) + v) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            unpack8(held[i], y);
#pragma unroll
            for (int j = 0; j < 8; j++) max_abs = fmaxf(max_abs, fabsf(y[j]));
        }
        max_abs = warp_reduce<true>(max_abs);
        if (lane == 0) scratch[warp] = max_abs;
        sync_consumers();
#pragma unroll
        for (int i = 0; i < WARPS_PER_ROW; i++) max_abs = fmaxf(max_abs, scratch[warp / WARPS_PER_ROW * WARPS_PER_ROW + i]);
        const float scale = quant_scale(max_abs);
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const int v = i * WARPS_PER_ROW * 32 + start;
            unpack8(held[i], y);
            if (nth < TOP && v < K / 8) store_input(y, 1.0f / scale, v, memory + INPUT_AT + nth * input_bytes(K));
        }
        if (nth < TOP && start == 0) scratch[WARPS + nth] = scale;
        sync_consumers();
    }
    return lane < TOP ? weight * scratch[WARPS + lane] : 0.0f;
}

template <int X_>
struct Mixture {
    static constexpr int SIZE = FS ? FS : 16;  // the shared expert's; without one, any size that compiles
    typedef Product<FE, E, CODES_E, ACTIVATE, UP_BIAS, CONCAT, 0, 0, EXPERT_FORM> Up;
    typedef Product<E, FE, CODES_F, ADD, DOWN_BIAS, SUMMED, 0, 0, EXPERT_FORM> Down;
    typedef Product<SIZE, E, CODES_E, ACTIVATE, false> SharedUp;
    typedef Product<E, SIZE, CODES_F, ADD, false> SharedDown;

    // Producer warps. A CTA without tiles of the experts does not wait for the choice: its producers could otherwise be two
    // choices behind its consumers, which a barrier's parity can't tell from none.
    template <typename Pointer>
    static DEVICE void produce(Pointer pointer, const u8* memory, Producer& producer) {
        if (FS) producer.product<SIZE, E, GATED>(pointer(SHARED_UP_W), pointer(SHARED_UP_S));
        TopExperts experts;
        const int cta = producer.cta;
        if (Up::begin(cta) < Up::begin(cta + 1) || Down::begin(cta) < Down::begin(cta + 1)) {
            const float* correction = (const float*)pointer(CORRECTION);
            barrier_wait(producer.smem + ROUTED_BARRIER, producer.routed_layers++ & 1);
            experts = route<X_>((const float*)(memory + LOGITS_AT), correction);
        }
        producer.product<FE, E, GATED, CONCAT, 0, 0, EXPERT_FORM>(pointer(UP_W), pointer(UP_S), experts);
        if (FS) producer.product<E, SIZE, false>(pointer(SHARED_DOWN_W), pointer(SHARED_DOWN_S));
        producer.product<E, FE, false, SUMMED, 0, 0, EXPERT_FORM>(pointer(DOWN_W), pointer(DOWN_S), experts);
    }

    // Consumer warps: add the mixture to the residual x. `counted`: this CTA counts the chosen experts.
    static DEVICE void run(const u64* row, u16* x, u16* mid, u32* counters, u32& arrivals, bool counted,
                           RingPosition& ring, u8* memory, int cta) {
        float *shared_logits = (float*)row[LOGITS], *logits = (float*)(memory + LOGITS_AT);
        grid_arrive(counters, arrivals);
        PlainRows<X_ + WEIGHED> own;
        own.prefetch(cta, row[ROUTER_W], WEIGHED ? row[SHARED_WEIGHT_W] : 0, ROUTER_BIAS ? row[ROUTER_B] : 0);
        Epilogue shared_ahead;
        if (FS) shared_ahead = SharedUp::first(cta, row, SHARED_UP_S, x);
        grid_wait(counters, arrivals);
        auto residual = [&](int v, float* y) { unpack8(load_cg16((const uint4*)x + v), y); };
        const u16 *norm = (const u16*)row[MLP_W], *norm_bias = (const u16*)row[MLP_B];
        auto tap = [&](int i, float* y) {
            own(i, y);
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] *= is_float4(FORM) ? 1.0f : RAISED;  // else they are raised as they are stored
        };
        const float x_scale = load_input<E, MLP_NORM>(residual, norm, norm_bias, MLP_EPS, NORM_OFFSET, memory, tap);
        const float up_scale = EXPERT_FORM != FORM ? __uint_as_float((u32)row[UP_FACTOR]) / RAISED : x_scale;
        own.write(shared_logits, cta, memory);
        grid_arrive(counters, arrivals);
        if (FS) SharedUp::run(shared_ahead, row, SHARED_UP_S, mid + TOP * FE, x_scale, ring, memory, cta);
        grid_wait(counters, arrivals);
        for (int i = threadIdx.x; i < X_ + WEIGHED; i += THREADS) logits[i] = load_cg4(shared_logits + i);
        sync_consumers();
        if (threadIdx.x == 0) barrier_arrive(smem_address(memory) + ROUTED_BARRIER);
        const TopExperts experts = route<X_>(logits, (const float*)row[CORRECTION]);
        if (counted && threadIdx.x < TOP && row[EXPERT_COUNTS]) relaxed_add((u64*)row[EXPERT_COUNTS] + experts.expert);
        Up::run(Up::first(cta, row, UP_S, x, experts), row, UP_S, mid, up_scale, ring, memory, cta, experts);
        grid_arrive(counters, arrivals);
        if (FS) shared_ahead = SharedDown::first(cta, row, SHARED_DOWN_S, x);
        const float down_factor = EXPERT_FORM != FORM ? __uint_as_float((u32)row[DOWN_FACTOR]) / RAISED : 1.0f / RAISED;
        Epilogue ahead;
        if (!FS) ahead = Down::first(cta, row, DOWN_S, x, experts);
        grid_wait(counters, arrivals);
        if (FS) {
            constexpr int SHARED_INPUT_AT = INPUT_AT + input_bytes(TOP * FE);
            const float by = WEIGHED ? logistic(logits[X]) : 1.0f;
            auto middle = [&](int v, float* y) {
                unpack8(load_cg16((const uint4*)(mid + TOP * FE) + v), y);
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] *= by;
            };
            const float shared_scale =
                load_input<SIZE, 0>(middle, nullptr, nullptr, 0.0f, 0.0f, memory, NoTap(), SHARED_INPUT_AT);
            const float each = load_expert_inputs<FE>(mid, down_factor * experts.weight, memory);
            SharedDown::run(shared_ahead, row, SHARED_DOWN_S, x, shared_scale, ring, memory, cta, TopExperts(),
                            SHARED_INPUT_AT);
            Down::run(Down::first(cta, row, DOWN_S, x, experts), row, DOWN_S, x, each, ring, memory, cta, experts);
        } else {
            const float each = load_expert_inputs<FE>(mid, down_factor * experts.weight, memory);
            Down::run(ahead, row, DOWN_S, x, each, ring, memory, cta, experts);
        }
    }
};
template <>
struct Mixture<0> {
    template <typename... T> static DEVICE void produce(T&&...) {}
    template <typename... T> static DEVICE void run(T&&...) {}
};
