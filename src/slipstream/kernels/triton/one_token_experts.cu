// Part of `one_token.cu`: a layer's mixture of experts, between `output` and the next layer,
//
//     norm → router | (shared expert's up) best experts → their ups, activation | (shared expert's down) their downs
//
// with a meeting at each bar. Every program chooses the experts for itself, from the router's numbers of all programs; whoever
// asks for weights waits for those numbers too, and until then asks for the shared expert's. Memory is idle in between; having
// it bring into the cache what is read later (the next layer's q, k, v; experts that the residual before attention would
// choose, after Eliseev and Mazur, 2023) was slower than nothing on an H200 (benchmarks/results/kernels_cuda_one_token_ahead.json).
//
// Rounded to the model's type, as kernels of their own leave them: the router's numbers and what stands between two products.
// All experts of a token are summed in float32, with their weights, as in `moe_small_batch`; a shared one goes into the residual
// first.

// Numbers in the order of their codes, none of which is 0.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logistic(float x) { return 1.0f / (1.0f + power2(-1.4426950408889634f * x)); }

// The TOP best of X experts, of equals the first, and their weights, by each warp for itself. Of a softmax without a correction
// the experts are compared by the router's numbers, which have its order.
template <int X_>
__device__ __forceinline__ Chosen route(const float* logits, const float* correction) {
    constexpr int EACH_ = (X_ + 31) / 32;
    const int lane = threadIdx.x % 32;
    float score[EACH_];
    u32 merit[EACH_], most = 0;
#pragma unroll
    for (int i = 0; i < EACH_; i++) score[i] = lane * EACH_ + i < X_ ? fresh4(logits + lane * EACH_ + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < EACH_; i++) {
        merit[i] = lane * EACH_ + i < X_ ? ordered(score[i]) : 0;
        most = merit[i] > most ? merit[i] : most;
    }
    if (SIGMOID)
#pragma unroll
        for (int i = 0; i < EACH_; i++) score[i] = logistic(score[i]);
    else {
        most = largest(most);
        const float top = __uint_as_float(most & 0x80000000u ? most & 0x7fffffffu : ~most);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH_; i++) {
            score[i] = lane * EACH_ + i < X_ ? power2(1.4426950408889634f * (score[i] - top)) : 0.0f;
            total += score[i];
        }
        if (CORRECTED || !NORMALIZE) {
            total = over_warp(total);
#pragma unroll
            for (int i = 0; i < EACH_; i++) score[i] /= total;
        }
    }
    if (SIGMOID || CORRECTED)
#pragma unroll
        for (int i = 0; i < EACH_; i++)
            if (lane * EACH_ + i < X_) merit[i] = ordered(score[i] + (CORRECTED ? correction[lane * EACH_ + i] : 0.0f));
    Chosen found;
#pragma unroll
    for (int j = 0; j < TOP; j++) {
        u32 best = 0;
        int at = 0;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH_; i++)
            if (merit[i] > best) best = merit[i], at = i, value = score[i];
        const int owner = __ffs(__ballot_sync(~0u, best == largest(best))) - 1;
        const int expert = __shfl_sync(~0u, lane * EACH_ + at, owner);
        value = __shfl_sync(~0u, value, owner);
        if (lane == j) found.expert = expert, found.weight = value;
#pragma unroll
        for (int i = 0; i < EACH_; i++)
            if (lane == owner && i == at) merit[i] = 0;
    }
    if (NORMALIZE) found.weight /= over_warp(found.weight) + 1e-20f;
    found.weight *= WEIGHT_SCALE;
    return found;
}

// This program's rows of the router [X, E], and of the shared expert's weight [1, E] if it has one: asked for first, multiplied
// by the row as `prepare` shows it, and the sums written.
template <int ROUTER_ROWS>
struct RouterRows {
    static constexpr int VECTORS = E / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
    static constexpr int OWN = (ROUTER_ROWS + PROGRAMS - 1) / PROGRAMS;
    uint4 w[OWN][TIMES];
    float sum[OWN], bias[OWN];

    __device__ __forceinline__ void ask(const u64* row, int program) {
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const int r = program + o * PROGRAMS;
            sum[o] = 0.0f;
            bias[o] = ROUTER_BIAS && r < X ? number(((const u16*)row[ROUTER_B])[r]) : 0.0f;
            const uint4* from = (const uint4*)row[ROUTER_W] + (long long)r * VECTORS;
            if (WEIGHED && r == X) from = (const uint4*)row[SHARED_WEIGHT_W];
#pragma unroll
            for (int i = 0; i < TIMES; i++) {
                const int v = i * THREADS + threadIdx.x;
                if (r < ROUTER_ROWS && v < VECTORS) w[o][i] = from[v];
            }
        }
    }
    __device__ __forceinline__ void operator()(int i, const float* y) {
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            float z[8];
            numbers(w[o][i], z);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[o] += number(rounded(y[j])) * z[j];
        }
    }
    __device__ __forceinline__ void write(float* logits, int program, u8* memory) {
#pragma unroll
        for (int o = 0; o < OWN; o++)
            if (program + o * PROGRAMS < ROUTER_ROWS) {
                const float y = over_all<false>(sum[o], (float*)(memory + SCRATCH)) + bias[o];
                if (threadIdx.x == 0) logits[program + o * PROGRAMS] = number(rounded(y));
            }
    }
};

// What the chosen experts' downs read, each expert's row with a scale of its own. Lane j's result is what part j's sums are to
// be multiplied with.
template <int K>
__device__ __forceinline__ float prepare_each(const u16* mid, float weight, u8* memory) {
    if (FORM == 0) {
        constexpr int VECTORS = TOP * K / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
        uint4 held[TIMES];
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) held[i] = fresh16((const uint4*)mid + i * THREADS + threadIdx.x);
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) *(uint4*)(memory + INPUT_AT + (i * THREADS + threadIdx.x) * 16) = held[i];
        together();
        return weight;
    }
    constexpr int ALIKE = TOP < WARPS ? WARPS / TOP : 1, TIMES = (K / 8 + ALIKE * 32 - 1) / (ALIKE * 32);  // warps of a row
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* scratch = (float*)(memory + SCRATCH);
    for (int first = 0; first < TOP; first += WARPS / ALIKE) {
        const int part = first + warp / ALIKE, start = warp % ALIKE * 32 + lane;
        uint4 held[TIMES];
        float top = 0.0f, y[8];
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const int v = i * ALIKE * 32 + start;
            held[i] = part < TOP && v < K / 8 ? fresh16((const uint4*)mid + part * (K / 8) + v) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            numbers(held[i], y);
#pragma unroll
            for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(y[j]));
        }
#pragma unroll
        for (int i = 16; i; i >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        if (lane == 0) scratch[warp] = top;
        together();
#pragma unroll
        for (int i = 0; i < ALIKE; i++) top = fmaxf(top, scratch[warp / ALIKE * ALIKE + i]);
        const float scale = scale_of(top);
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const int v = i * ALIKE * 32 + start;
            numbers(held[i], y);
            if (part < TOP && v < K / 8) put(y, 1.0f / scale, v, memory + INPUT_AT + part * input_bytes(K));
        }
        if (part < TOP && start == 0) scratch[WARPS + part] = scale;
        together();
    }
    return lane < TOP ? weight * scratch[WARPS + lane] : 0.0f;
}

template <int X_>
struct Mixture {
    static constexpr int SIZE = FS ? FS : 16;  // of the shared expert, if there is one
    typedef Product<FE, E, CODES_E, ACTIVATE, false, BESIDE> Up;
    typedef Product<E, FE, CODES_F, ADD, false, SUMMED> Down;
    typedef Product<SIZE, E, CODES_E, ACTIVATE, false> SharedUp;
    typedef Product<E, SIZE, CODES_F, ADD, false> SharedDown;

    // For those who ask for weights. A program that has nothing of the experts' does not wait for the choice: only so is a
    // program never two choices ahead of its own.
    template <typename Pointer>
    static __device__ __forceinline__ void ask(Pointer pointer, Asker& asker) {
        if (FS) asker.product<SIZE, E, GATED>(pointer(SHARED_UP_W), pointer(SHARED_UP_S));
        Chosen chosen;
        const int program = asker.program;
        if (Up::begin(program) < Up::begin(program + 1) || Down::begin(program) < Down::begin(program + 1)) {
            float* logits = (float*)pointer(LOGITS);
            const float* correction = (const float*)pointer(CORRECTION);
            until(asker.smem + ROUTED, asker.choices++ & 1);
            chosen = route<X_>(logits, correction);
        }
        asker.product<FE, E, GATED, BESIDE>(pointer(UP_W), pointer(UP_S), chosen);
        if (FS) asker.product<E, SIZE, false>(pointer(SHARED_DOWN_W), pointer(SHARED_DOWN_S));
        asker.product<E, FE, false, SUMMED>(pointer(DOWN_W), pointer(DOWN_S), chosen);
    }

    // From the product before it, x, into x. `counted`: this program counts the choice.
    static __device__ __forceinline__ void run(const u64* row, u16* x, u16* mid, u32* counters, u32& met, bool counted,
                                               Place& place, u8* memory, int program) {
        float* logits = (float*)row[LOGITS];
        meet(counters, met);
        RouterRows<X_ + WEIGHED> own;
        own.ask(row, program);
        AtEnd shared_ahead;
        if (FS) shared_ahead = SharedUp::first(program, row, SHARED_UP_S, x);
        wait(counters, met);
        auto residual = [&](int v, float* y) { numbers(fresh16((const uint4*)x + v), y); };
        const u16 *norm = (const u16*)row[MLP_W], *norm_bias = (const u16*)row[MLP_B];
        const float x_scale = prepare<E, MLP_NORM>(residual, norm, norm_bias, MLP_EPS, OFFSET_OF_NORM, memory, own);
        own.write(logits, program, memory);
        meet(counters, met);
        if (FS) SharedUp::run(shared_ahead, row, SHARED_UP_S, mid + TOP * FE, x_scale, place, memory, program);
        wait(counters, met, shared(memory) + ROUTED);
        const Chosen chosen = route<X_>(logits, (const float*)row[CORRECTION]);
        if (counted && threadIdx.x < TOP && row[EXPERT_COUNTS]) count((u64*)row[EXPERT_COUNTS] + chosen.expert);
        Up::run(Up::first(program, row, UP_S, x, chosen), row, UP_S, mid, x_scale, place, memory, program, chosen);
        meet(counters, met);
        if (FS) shared_ahead = SharedDown::first(program, row, SHARED_DOWN_S, x);
        wait(counters, met);
        if (FS) {
            constexpr int AT = INPUT_AT + input_bytes(TOP * FE);
            const float by = WEIGHED ? logistic(fresh4(logits + X)) : 1.0f;
            auto middle = [&](int v, float* y) {
                numbers(fresh16((const uint4*)(mid + TOP * FE) + v), y);
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] *= by;
            };
            const float shared_scale = prepare<SIZE, 0>(middle, nullptr, nullptr, 0.0f, 0.0f, memory, Nothing(), AT);
            const float each = prepare_each<FE>(mid, chosen.weight, memory);
            SharedDown::run(shared_ahead, row, SHARED_DOWN_S, x, shared_scale, place, memory, program, Chosen(), AT);
            Down::run(Down::first(program, row, DOWN_S, x, chosen), row, DOWN_S, x, each, place, memory, program, chosen);
        } else {
            const AtEnd ahead = Down::first(program, row, DOWN_S, x, chosen);
            const float each = prepare_each<FE>(mid, chosen.weight, memory);
            Down::run(ahead, row, DOWN_S, x, each, place, memory, program, chosen);
        }
    }
};
template <>
struct Mixture<0> {
    template <typename... T> static __device__ __forceinline__ void ask(T&&...) {}
    template <typename... T> static __device__ __forceinline__ void run(T&&...) {}
};
