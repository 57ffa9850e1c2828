// Part of `kernel.cu`: sizes, the layout of shared memory, the ring buffer of weights, products, and their input rows.

// --- sizes that follow from one_token.py's definitions
constexpr int G = H / HK;  // query heads of a kv head
constexpr int GATE_ROWS = OUTPUT_GATE ? H * D : 0;  // the first rows of the weight of q, k, v: a gate of attention's output
constexpr bool SECOND = LATENT || FORM == CODED;  // there are two products before attention: GGUF's values may have another type
constexpr int QKV_ROWS = LATENT ? H * (NOPE + R) : GATE_ROWS + (H + (SECOND ? 1 : 2) * HK) * D;  // rows of the weight of q (k, v)
constexpr int LATENT_ROWS = LATENT ? RANK + R : SECOND ? HK * D : 16;  // rows of the weight that makes latents, or values
constexpr int QKV_SIZE = QKV_ROWS + (SECOND ? LATENT_ROWS : 0);        // what the products before attention write
constexpr int Q = H * D;                                              // what attention writes
constexpr int DV = DELTA ? DELTA_HEADS * DELTA_V : 16;                // what the delta rule writes
constexpr int DELTA_CHANNELS = 2 * DELTA_KEY_HEADS * DELTA_K + DV;    // of its convolution: q, k, v
constexpr int DELTA_ROWS = DELTA ? DELTA_CHANNELS + DV : 16;          // and those of the gate z
constexpr int ROW_STRIDE = STEP_BYTES + 64;  // padding puts a stage's rows into different banks
constexpr int SCALE_BYTES = FORM == 2 ? STEP_BYTES * 2 / GROUP * 32 : 0;  // scales in a stage of 4-bit codes
__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int MXFP4 = 4, NVFP4 = 5;  // the forms of weights that `float4.py` has packed
__device__ constexpr bool is_float4(int form) { return form == MXFP4 || form == NVFP4; }
constexpr float RAISED = is_float4(EXPERT_FORM) ? 18446744073709551616.0f : 1.0f;  // 2^64, times which their inputs are stored
constexpr int SLAB = STEP_BYTES * 8;  // such a stage: 8 rows' codes, the other 8 rows', then both rows' scales
__device__ constexpr int chunk_scales(int form) { return form == NVFP4 ? 64 : 32; }  // bytes of 8 rows of 128 inputs
template <int FORM_ = Q4_K> __device__ constexpr int coded_stage() {  // the largest of the types in use
    if constexpr (FORM_ < END_OF_CODED)
        return max_of(ALL_FORMS >> (FORM_ - Q4_K) & 1 ? 2 * Units<FORM_>::SLAB : 0, coded_stage<FORM_ + 1>());
    else return 0;
}
constexpr int STAGE_BYTES = max_of(FORM == CODED ? coded_stage() : is_float4(FORM) ? 0 : 16 * ROW_STRIDE + SCALE_BYTES,
                                   is_float4(EXPERT_FORM) ? 2 * SLAB / 512 * (512 + chunk_scales(EXPERT_FORM)) : 0);
static_assert(EXPERT_FORM == FORM || (is_float4(EXPERT_FORM) && FORM == 0 && !FS),
              "a form of experts that one_token.py should refuse");
static_assert(!is_float4(EXPERT_FORM) || (!HALF && PRODUCER_WARPS == 2), "4-bit floats are expanded to bfloat16");
__device__ constexpr int row_bytes(int inputs, int form = FORM) {
    return is_coded(form) || form == CODED ? inputs : form == 0 ? inputs * 2 : form == 2 ? inputs / 2 : is_float4(form) ? (inputs + 127) / 128 * 64 : inputs;
}
constexpr int DOWN_INPUTS = max_of(F, X ? TOP * FE + FS : 0);  // inputs of a layer's down products, all experts together
constexpr int MAX_INPUTS = max_of(max_of(E, DELTA ? DV : 0), max_of(DOWN_INPUTS, Q));
__device__ constexpr int input_bytes(int inputs) { return inputs * (FORM == 3 ? 1 : 2); }
constexpr int DIGIT_PLANE = MAX_INPUTS + 16;  // bytes of all inputs' high digits, or low ones, in different banks
constexpr int INPUT_BYTES = FORM == CODED ? 2 * DIGIT_PLANE : input_bytes(MAX_INPUTS);
// Sums of inputs. GGUF: [2, inputs / 32] by digit and group of 32; then of 16; then the scales of 256 inputs.
constexpr int SUMS_OF_16 = 2 * MAX_INPUTS / 32 * 4, INPUT_SCALES = SUMS_OF_16 + 2 * MAX_INPUTS / 16 * 4;
constexpr int SUM_BYTES = FORM == 2 ? MAX_INPUTS / 32 * 4 : FORM == CODED ? INPUT_SCALES + MAX_INPUTS / 256 * 4 : 0;

// --- attention
constexpr int KV_BYTES = CACHE == 16 ? 2 : 1;                   // bytes of a cached number
constexpr int HEAD_PER_LANE = (D + 31) / 32;                    // numbers of a head per lane
constexpr int ATTENTION_BYTES = 4 * (LATENT ? HEADS_PER_BLOCK * (R + RANK) + NOPE + R + RANK + WARPS * (RANK + 2)
                                   : G * D / 2 + 2 * D + (G + 2) * D + (2 * WARPS + 1) * 8 + WARPS * G * D);

constexpr int DELTA_BYTES = DELTA ? 4 * (2 * DELTA_K + (1 + 2 * WARPS) * DELTA_COLUMNS) : 0;

// --- shared memory
constexpr int TABLE_SLOTS = 64;  // pointers of a layer that there is room for
constexpr int BARRIERS_AT = 0, ROUTED_BARRIER = 16 * 16, POINTERS_AT = BARRIERS_AT + 16 * 32;
constexpr int TILE_SUMS_AT = POINTERS_AT + 2 * 8 * TABLE_SLOTS;
constexpr int SCRATCH_AT = TILE_SUMS_AT + 2 * WARPS * 16 * 4;
constexpr int FACTORS_AT = SCRATCH_AT + 256;  // [TOP, 16]: what each expert's sums of a tile are multiplied by; then biases
constexpr int LOGITS_AT = FACTORS_AT + (X ? TOP * (DOWN_BIAS ? 128 : 64) : 0);  // of the router, and of the shared expert
constexpr int SUMS_AT = LOGITS_AT + (X ? (X + 1 + 3) / 4 * 16 : 0), INPUT_AT = (SUMS_AT + SUM_BYTES + 127) / 128 * 128;
constexpr int RING_AT = (INPUT_AT + max_of(max_of(INPUT_BYTES, DELTA_BYTES), ATTENTION_BYTES) + 127) / 128 * 128;
constexpr int STAGES = (SHARED - RING_AT) / STAGE_BYTES < 16 ? (SHARED - RING_AT) / STAGE_BYTES : 16;
static_assert(STAGES >= 3, "too little shared memory");
static_assert(STAGES <= 16 && ROUTED_BARRIER + 8 <= POINTERS_AT, "the barriers' places");
static_assert(E % 16 == 0 && F % 16 == 0 && QKV_ROWS % 16 == 0 && LATENT_ROWS % 16 == 0 && G <= 8,
              "a shape that one_token.py should refuse");

// A layer's row of pointers, in the order of `POINTERS` in one_token.py.
enum { NORM_W, NORM_B, MLP_W, MLP_B, Q_NORM, K_NORM, K_AT, V_AT, K_SCALE, V_SCALE, QKV_W, QKV_S, QKV_B, OUT_W, OUT_S, OUT_B,
       UP_W, UP_S, UP_B, DOWN_W, DOWN_S, DOWN_B, ROUTER_W, ROUTER_B, CORRECTION, SHARED_UP_W, SHARED_UP_S, SHARED_DOWN_W,
       SHARED_DOWN_S, SHARED_WEIGHT_W, EXPERT_COUNTS, LOGITS, LATENT_W, LATENT_S, LATENT_B, KEYS_W, VALUES_W,
       SINKS, WINDOW, TABLE, UP_FACTOR, DOWN_FACTOR, GATES_W, CONV_W, CONV_B, DECAY_W, TIME_W, DELTA_NORM_W, CONV_STATES, STATES,
       QKV_ROW, OUT_ROW, UP_ROW, DOWN_ROW, LATENT_ROW, SHARED_UP_ROW, SHARED_DOWN_ROW, FORM_NUMBERS, NUM_POINTERS };
// A product's number among GGUF's types (`with_form`). FORM_NUMBERS has four bits for each.
enum { QKV_FORM = 0, LATENT_FORM = 4, OUT_FORM = 8, UP_FORM = 12, DOWN_FORM = 16 };
DEVICE int form_number(u64 numbers, int of) { return (int)(numbers >> of & 15); }
// Where a product's float32 for each row are, by the place of its scales. 4-bit floats have scales by groups as well.
__device__ constexpr int row_scales(int form, int scales) {
    return !is_float4(form)          ? scales
           : scales == QKV_S         ? QKV_ROW
           : scales == OUT_S         ? OUT_ROW
           : scales == UP_S          ? UP_ROW
           : scales == DOWN_S        ? DOWN_ROW
           : scales == LATENT_S      ? LATENT_ROW
           : scales == SHARED_UP_S   ? SHARED_UP_ROW
           : SHARED_DOWN_ROW;
}

DEVICE u32 pack2(float low, float high) { return from_float(low) | (u32)from_float(high) << 16; }
DEVICE void unpack8(const uint4& v, float* y) {  // 8 numbers of the model's type
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = to_float((u16)words[i]);
        y[2 * i + 1] = to_float((u16)(words[i] >> 16));
    }
}
DEVICE void unpack_e4m3(u32 codes, float& low, float& high) {  // the low two of four codes
    unpack_half2(low_half2(codes), low, high);
}
DEVICE float activate(float x) {
    if (KIND == 0) return x / (1.0f + exp2_fast(-1.4426950408889634f * x));
    if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (KIND == 2)
        return x / (1.0f + exp2_fast(-2.0f * 1.4426950408889634f * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
    x = fmaxf(x, 0.0f);
    return KIND == 3 ? x : x * x;
}
DEVICE float gated(float x, float up) {
    if (KIND != 5) return activate(x) * up;
    x = fminf(x, LIMIT);
    return x / (1.0f + exp2_fast(-1.4426950408889634f * ALPHA * x)) * (fminf(fmaxf(up, -LIMIT), LIMIT) + 1.0f);
}

// --- ranks. With tensor parallelism a product into the residual gives a part of a sum (`num_sums` counts such products).
// Each rank has shared memory that all ranks can write: parts [2, RANKS, E], float32, then a counter of the other ranks'
// thread blocks that have put theirs there. The residual in memory lacks the last sum: a thread that reads the residual
// adds the sum's parts, and the next product into the residual writes both. Parts alternate between two places:
//
// 1. A thread block that writes part n + 2 has waited for all parts n + 1.
// 2. A thread block arrives with its part n + 1 after it has read part n for the last time.
//
// The counter is never reset, since another rank may be a step ahead; counter 3 says where this step's count begins.
struct Ranks {
    u64 memory[RANKS];  // by rank, as this rank sees it
    u32 begin = 0, num_sums = 0;

    DEVICE float* parts(int at, int of, u32 sum) const { return (float*)memory[at] + ((sum & 1) * RANKS + of) * E; }
    DEVICE u32* counter(int at) const { return (u32*)((float*)memory[at] + 2 * RANKS * E); }
    DEVICE void put(int n, float part) const {
#pragma unroll
        for (int at = 0; at < RANKS; at++) parts(at, THIS_RANK, num_sums)[n] = part;
    }
    DEVICE void arrive() {  // warp 0 has written this thread block's parts
        if (RANKS == 1) return;
        if (threadIdx.x < 32) {
            __syncwarp();
            if (threadIdx.x == 0)
#pragma unroll
                for (int at = 0; at < RANKS; at++)
                    if (at != THIS_RANK) release_add_system(counter(at));
        }
        num_sums++;
    }
    DEVICE void wait() const {  // one thread, for all parts of the sums so far
        if (RANKS == 1 || num_sums == 0) return;
        const u32 end = begin + num_sums * (RANKS - 1) * CTAS;
        while ((int)(load_acquire_system(counter(THIS_RANK)) - end) < 0) {
        }
    }
    // A number of the residual, or eight: `y` is what memory has.
    DEVICE float residual(int n, float y) const {
        if (RANKS == 1 || num_sums == 0) return y;
        float sum = 0.0f;
#pragma unroll
        for (int of = 0; of < RANKS; of++) sum += load_cg4(parts(THIS_RANK, of, num_sums - 1) + n);
        return to_float(from_float(y + sum));
    }
    DEVICE void residual8(int v, float* y) const {
        if (RANKS == 1 || num_sums == 0) return;
        float sum[8] = {};
#pragma unroll
        for (int of = 0; of < RANKS; of++) {
            const float* part = parts(THIS_RANK, of, num_sums - 1) + v * 8;
            const uint4 low = load_cg16(part), high = load_cg16(part + 4);
            const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += __uint_as_float(words[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) y[j] = to_float(from_float(y[j] + sum[j]));
    }
};

// --- grid barriers. Counter 0 counts arrivals of all CTAs, counter 1 groups of heads whose splits are merged, counter 2 exits;
// from SPLITS_OF on there is a counter of splits for each group of heads.
constexpr int SPLITS_OF = 4;
// Wait until `arrivals` are counted, and for all ranks' parts.
DEVICE void grid_wait(const u32* counter, u32 arrivals, const Ranks& ranks = Ranks()) {
    if (threadIdx.x == 0) {
        while (load_acquire(counter) < arrivals) {
        }
        ranks.wait();
    }
    sync_consumers();
}
DEVICE void grid_arrive(u32* counter, u32& arrivals) {  // warp 0 arrives, since it alone writes a product's outputs
    if (threadIdx.x < 32) {
        __syncwarp();
        if (threadIdx.x == 0) release_add(counter);
    }
    arrivals += CTAS;
}

// --- sums and maxima over a warp, and over the consumers
template <bool MAXIMUM = false>
DEVICE float warp_reduce(float x) {
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        const float y = __shfl_xor_sync(~0u, x, i);
        x = MAXIMUM ? fmaxf(x, y) : x + y;
    }
    return x;
}
template <bool MAXIMUM>
DEVICE float block_reduce(float x, float* scratch) {
    x = warp_reduce<MAXIMUM>(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync_consumers();
    x = scratch[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) x = MAXIMUM ? fmaxf(x, scratch[i]) : x + scratch[i];
    sync_consumers();  // until all threads have read `scratch`
    return x;
}

// Sums of each of COUNT numbers over LANES lanes, STRIDE apart. LANES is a power of two; COUNT is one, too, or a multiple of it.
// A lane's first `kept` numbers become the sums from `first` on; of fewer numbers than lanes, several lanes have the same. At
// each step a lane keeps half of its numbers, so that COUNT sums take about COUNT shuffles.
template <int COUNT, int LANES, int STRIDE = 1>
struct Scattered {
    static constexpr int kept = COUNT > LANES ? COUNT / LANES : 1, LANES_OF_NUMBER = LANES > COUNT ? LANES / COUNT : 1;
    static DEVICE int first() { return threadIdx.x / STRIDE % LANES * COUNT / LANES; }
    static DEVICE bool stores() { return threadIdx.x / STRIDE % LANES_OF_NUMBER == 0; }  // the first of the lanes of a number
    static DEVICE void sum(float* y) {
        if constexpr (LANES > 1) {
            constexpr int half = COUNT / 2, left = half ? half : 1;
            const bool upper = half && threadIdx.x / STRIDE & LANES / 2;
#pragma unroll
            for (int j = 0; j < left; j++)
                y[j] = (upper ? y[j + half] : y[j]) + __shfl_xor_sync(~0u, upper ? y[j] : y[j + half], LANES / 2 * STRIDE);
            Scattered<left, LANES / 2, STRIDE>::sum(y);
        }
    }
};

// --- the products
struct RingPosition {  // a stage of the ring; `buffer`: which of two places takes the next tile's sums
    u32 stage = 0, parity = 0, buffer = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    DEVICE void skip(int stages) {
#pragma unroll 1
        for (stage += stages; stage >= STAGES; stage -= STAGES) parity ^= 1;
    }
};

// The matrices of a product: one; one for each chosen expert, with concatenated outputs; the same with summed outputs.
enum MatrixSet { ONE, CONCAT, SUMMED };
struct TopExperts {  // lane j of a warp has the token's j-th expert and its weight
    int expert = 0;
    float weight = 0.0f;
    DEVICE int of(int j) const { return __shfl_sync(~0u, expert, j); }
};
// The row of a weight that is row t of a tile. An expert's weight is N rows of gates and N of ups (GATES), or N rows.
template <int N, bool GATES>
DEVICE int weight_row(int expert, int tile, int t) {
    return GATES ? expert * (2 * N) + (t < 8 ? 0 : N - 8) + tile * 8 + t : expert * N + tile * 16 + t;
}

// First tile of a CTA. Products that share a phase are distributed as one: TILE_TOTAL tiles, this product's from
// TILE_OFFSET on.
template <int TILES_, int TILE_OFFSET = 0, int TILE_TOTAL = 0>
DEVICE int first_tile(int cta) {
    const int tile = (int)((long long)cta * (TILE_TOTAL ? TILE_TOTAL : TILES_) / CTAS) - TILE_OFFSET;
    return tile < 0 ? 0 : tile < TILES_ ? tile : TILES_;
}

// A producer warp. Issuing a copy costs about 60 cycles, so the producers share a stage's rows. At most DEPTH stages are in
// flight. That keeps memory busy; more would delay other accesses, those of the grid barriers included.
struct Producer {
    const u32 smem;
    const int cta, which, lane;
    const u64 evict_first;                 // L2 policy
    RingPosition ring, oldest;             // the next stage to fill, and the oldest in flight
    u32 in_flight = 0, routed_layers = 0;  // stages in flight; layers whose routing this warp has waited for

    DEVICE Producer(u32 smem, int cta, int which, int lane)
        : smem(smem), cta(cta), which(which), lane(lane), evict_first(evict_first_policy()) {}
    // The row of a stage that this lane copies, if lane < 16 / PRODUCER_WARPS.
    DEVICE int row() const { return which * (16 / PRODUCER_WARPS) + lane; }

    // Wait until the next stage is free and may be filled. Its barrier expects `bytes` of this warp. Returns the barrier.
    DEVICE u32 open_stage(int bytes, u32 depth = DEPTH) {
        const u32 full = smem + BARRIERS_AT + ring.stage * 16;
        barrier_wait(full + 8, ring.parity ^ 1);
        for (; in_flight >= depth; in_flight--) {
            barrier_wait(smem + BARRIERS_AT + oldest.stage * 16, oldest.parity);
            oldest.next();
        }
        in_flight++;
        if (lane == 0) barrier_expect(full, bytes);
        __syncwarp();
        return full;
    }
    DEVICE u32 stage_at() const { return smem + RING_AT + ring.stage * STAGE_BYTES; }
    // Fill a stage: `bytes` of each of 16 rows, this lane's from `from`; the last producer copies `more` bytes besides.
    DEVICE void copy_stage(const u8* from, int bytes, const u8* from_more, int more, u64 policy, u32 depth = DEPTH) {
        const u32 full = open_stage(16 / PRODUCER_WARPS * bytes + more, depth), to = stage_at();
        if (lane < 16 / PRODUCER_WARPS) bulk_copy(to + row() * ROW_STRIDE, from, bytes, full, policy);
        if (more && lane == 0) bulk_copy(to + 16 * ROW_STRIDE, from_more, more, full, policy);
        ring.next();
    }
    // Fill a stage with chunks of 4-bit floats [8, 64] and their scales [8, 4 or 8]. Each producer copies those of 8 rows.
    template <int FORM_>
    DEVICE void copy_chunks(const u8* from, const u8* from_scales, int chunks) {
        constexpr int SCALES = chunk_scales(FORM_);
        const u32 full = open_stage(chunks * (512 + SCALES)), to = stage_at();
        if (lane == 0) bulk_copy(to + which * SLAB, from, chunks * 512, full, evict_first);
        if (lane == 1) bulk_copy(to + 2 * SLAB + which * (SLAB / 512 * SCALES), from_scales, chunks * SCALES, full, evict_first);
        ring.next();
    }

    // Fill a stage with units of 8 rows of a GGUF type, the bits above the low four, and factors. Each producer copies 8 rows.
    template <int FORM_>
    DEVICE void copy_units(const u8* codes, const u8* high, const u8* factors, int units) {
        typedef Units<FORM_> Own;
        const u32 full = open_stage(units * (Own::CODES + Own::HIGH + Own::FACTORS)), to = stage_at() + which * Own::SLAB;
        if (lane == 0) bulk_copy(to, codes, units * Own::CODES, full, evict_first);
        if (Own::HIGH && lane == 1) bulk_copy(to + Own::HIGH_AT, high, units * Own::HIGH, full, evict_first);
        if (lane == 2) bulk_copy(to + Own::FACTORS_AT_, factors, units * Own::FACTORS, full, evict_first);
        ring.next();
    }

    // Copy this CTA's tiles of a product [N, K], of which N counts the gates only. Scales of 4-bit codes lie in the order
    // of use: [tile, group, 16].
    template <int N, int K, bool GATES, MatrixSet OF = ONE, int TILE_OFFSET = 0, int TILE_TOTAL = 0, int FORM_ = FORM>
    DEVICE void product(const u8* weight, const u8* scales, TopExperts experts = {}, const u8* high = nullptr) {
        constexpr int MATRIX_TILES = N / (GATES ? 8 : 16), TOTAL = OF == CONCAT ? TOP * MATRIX_TILES : MATRIX_TILES;
        constexpr int NUM_EXPERTS = OF == SUMMED ? TOP : 1;
        constexpr int BYTES_OF_ROW = row_bytes(K, FORM_), K_STEPS = (BYTES_OF_ROW + STEP_BYTES - 1) / STEP_BYTES;
        const int end = first_tile<TOTAL, TILE_OFFSET, TILE_TOTAL>(cta + 1);
        for (int step = first_tile<TOTAL, TILE_OFFSET, TILE_TOTAL>(cta) * NUM_EXPERTS; step < end * NUM_EXPERTS; step++) {
            const int tile = step / NUM_EXPERTS;
            const int expert = OF == ONE ? 0 : experts.of(OF == CONCAT ? tile / MATRIX_TILES : step % NUM_EXPERTS);
            if constexpr (is_coded(FORM_)) {
                typedef Units<FORM_> Own;
                constexpr int UNITS = K / Own::INPUTS;
                const long long first = (long long)weight_row<N, GATES>(expert, tile, which * 8) / 8 * UNITS;
#pragma unroll 1
                for (int at = 0; at < UNITS; at += Own::IN_STAGE)
                    copy_units<FORM_>(weight + (first + at) * Own::CODES, high + (first + at) * Own::HIGH,
                                      scales + (first + at) * Own::FACTORS, min(Own::IN_STAGE, UNITS - at));
                continue;
            } else if constexpr (is_float4(FORM_)) {
                const int row = weight_row<N, GATES>(expert, tile % MATRIX_TILES, which * 8);
                const u8* from = weight + (long long)row * BYTES_OF_ROW;
                constexpr int SCALES = chunk_scales(FORM_);
                const u8* from_scales = scales + (long long)row * (BYTES_OF_ROW / 64 * SCALES / 8);
#pragma unroll 1
                for (int at = 0; at < BYTES_OF_ROW; at += STEP_BYTES)
                    copy_chunks<FORM_>(from + at * 8, from_scales + at / 64 * SCALES, min(STEP_BYTES, BYTES_OF_ROW - at) / 64);
                continue;
            }
            const u8* from = weight + (long long)weight_row<N, GATES>(expert, tile % MATRIX_TILES, row()) * BYTES_OF_ROW;
            const u8* from_scales = scales + (long long)tile * (K / GROUP * 32);
#pragma unroll 1
            for (int i = 0; i < K_STEPS; i++) {
                const int bytes = BYTES_OF_ROW % STEP_BYTES && i == K_STEPS - 1 ? BYTES_OF_ROW % STEP_BYTES : STEP_BYTES;
                const int more = FORM == 2 && which == PRODUCER_WARPS - 1 ? bytes * 2 / GROUP * 32 : 0;
                copy_stage(from + i * STEP_BYTES, bytes, from_scales + i * SCALE_BYTES, more, evict_first);
            }
        }
    }
};

template <int FORM_> struct Sum { typedef float type; };
template <> struct Sum<3> { typedef int type; };

// What the end of a tile needs for each row, loaded one tile ahead. Thread t of 16 has row t.
// It is loaded a tile ahead. Numbers of the model's type are kept as they are: to convert them is to wait for them.
struct Epilogue {
    float scale = 1.0f, sum = 0.0f;  // `sum`: the residual with the ranks' parts
    u16 bias = 0, residual = 0;
    DEVICE float residual_sum() const { return RANKS == 1 ? to_float(residual) : sum; }
};

enum { STORE, ACTIVATE, ADD };

// This CTA's tiles of a product with the input row that `load_input` stored. END says where results go: to `out` (STORE),
// activated to `out` (ACTIVATE), or added to the residual (ADD). A SUMMED product has an input row and a factor for each
// expert; the rows lie one after the other. FORM_ is the weight's form.
template <int N, int K, int CODES, int END, bool BIASED, MatrixSet OF = ONE, int TILE_OFFSET = 0, int TILE_TOTAL = 0,
          int FORM_ = FORM>
struct Product {
    typedef typename Sum<FORM_>::type Total;
    static constexpr bool FLOAT4 = is_float4(FORM_), UNITS = is_coded(FORM_), GATES = END == ACTIVATE && GATED;
    static constexpr bool SCALED = FORM_ == 1 || FORM_ == 3 || FORM_ == NVFP4 || (FLOAT4 && FORM_ == FORM);
    static constexpr int MATRIX_TILES = N / (GATES ? 8 : 16), TOTAL = OF == CONCAT ? TOP * MATRIX_TILES : MATRIX_TILES;
    static constexpr int NUM_EXPERTS = OF == SUMMED ? TOP : 1;
    static constexpr int BYTES_OF_ROW = row_bytes(K, FORM_), STEP = UNITS ? Units<FORM_>::INPUTS * UNITS_IN_STAGE : STEP_BYTES;
    static constexpr int K_STEPS = (BYTES_OF_ROW + STEP - 1) / STEP;
    // Experts of 4-bit floats: two groups of warps take matrices in turn, so that one computes while the other waits at a
    // tile's end.
    static constexpr int GROUPS = FLOAT4 && OF != ONE ? 2 : 1, GROUP_WARPS = WARPS / GROUPS;
    static constexpr int TURNS = STEP_BYTES / 64 / GROUP_WARPS, SUMS_OF = FORM_ == 2 || UNITS ? 1 : FLOAT4 ? 2 : TURNS;
    static constexpr int TILES_IN_TURN = OF == SUMMED ? 1 : GROUPS;  // groups share a tile of SUMMED: each has some experts

    template <int OTHER> using With = Product<N, K, CODES, END, BIASED, OF, TILE_OFFSET, TILE_TOTAL, OTHER>;

    static DEVICE int group() { return GROUPS == 1 ? 0 : threadIdx.x / (GROUP_WARPS * 32); }
    static DEVICE int begin(int cta) { return first_tile<TOTAL, TILE_OFFSET, TILE_TOTAL>(cta); }
    static DEVICE Epilogue load_epilogue(int tile, int end_tile, const u64* row, int scales, const u16* residual,
                                         TopExperts experts, const Ranks& ranks) {
        Epilogue end;
        const int t = threadIdx.x % 16, nth = threadIdx.x % (THREADS / TILES_IN_TURN) / 16;
        const int expert = OF == ONE ? 0 : experts.of(OF == CONCAT ? tile / MATRIX_TILES : nth);
        if (nth < NUM_EXPERTS && tile < end_tile) {
            const int n = weight_row<N, GATES>(expert, tile % MATRIX_TILES, t);
            if (SCALED) end.scale = ((const float*)row[row_scales(FORM_, scales)])[n];
            if (BIASED) end.bias = ((const u16*)row[scales + 1])[n];
            if (END == ADD && nth == 0) {
                const int at = tile * 16 + t;
                end.residual = load_cg2(residual + at);
                if (RANKS > 1) end.sum = ranks.residual(at, to_float(end.residual));
            }
        }
        return end;
    }
    static DEVICE Epilogue first(int cta, const u64* row, int scales, const u16* residual, TopExperts experts = {},
                                 const Ranks& ranks = Ranks()) {
        return load_epilogue(begin(cta) + group() % TILES_IN_TURN, begin(cta + 1), row, scales, residual, experts, ranks);
    }
    // `ahead`: what `first` returned. `x_scale`: the scale of the input's codes, of MXFP4 experts the weight's factor; of a SUMMED
    // product, lane j has the factor of expert j. `input`: where the input row lies in shared memory.
    static __device__ void run(Epilogue ahead, const u64* row, int scales, u16* out, float x_scale, RingPosition& ring,
                               u8* memory, int cta, TopExperts experts = {}, int input = INPUT_AT,
                               const Ranks& ranks = Ranks()) {
        const u32 smem = smem_address(memory);
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, end = begin(cta + 1);
        const u32 mine = (lane / 4) * ROW_STRIDE + lane % 4 * 16;
        float* factors = (float*)(memory + FACTORS_AT);
        int passed = 0;  // matrices whose stages are behind the ring's position
        for (int tile = begin(cta) + group() % TILES_IN_TURN; tile < end; tile += TILES_IN_TURN) {
            const Epilogue now = ahead;
            ahead = load_epilogue(tile + TILES_IN_TURN, end, row, scales, out, experts, ranks);
            if (OF == SUMMED) {
                const float factor = now.scale * __shfl_sync(~0u, x_scale, thread / 16);
                if (thread < NUM_EXPERTS * 16) factors[thread] = factor;
                if (BIASED) {
                    const float by = __shfl_sync(~0u, experts.weight, thread / 16);
                    if (thread < NUM_EXPERTS * 16) factors[TOP * 16 + thread] = by * to_float(now.bias);
                }
                sync_consumers();
            }
            float low = 0.0f, high = 0.0f;
#pragma unroll 1
            for (int nth = OF == SUMMED ? group() : 0; nth < NUM_EXPERTS; nth += GROUPS / TILES_IN_TURN) {
                Total sum[SUMS_OF][4] = {};
                if (GROUPS > 1) {
                    const int matrix = (tile - begin(cta)) * NUM_EXPERTS + nth;
                    ring.skip((matrix - passed) * K_STEPS);
                    passed = matrix + 1;
                }
#pragma unroll 1
                for (int k_step = 0; k_step < K_STEPS; k_step++) {
                    const u32 full = smem + BARRIERS_AT + ring.stage * 16, stage = smem + RING_AT + ring.stage * STAGE_BYTES;
                    const u32 from = smem + input + nth * input_bytes(K);
                    constexpr int TAIL = UNITS ? 0 : BYTES_OF_ROW % STEP_BYTES;
                    const int bytes = TAIL && k_step == K_STEPS - 1 ? TAIL : STEP_BYTES;
                    barrier_wait(full, ring.parity);
                    if constexpr (FLOAT4) mma_chunks(sum, stage, from, memory, k_step, bytes);
                    else if constexpr (UNITS) {
                        typedef Units<FORM_> Own;
                        const int first = k_step * Own::IN_STAGE, sums = Own::GROUP_SIZE == 16 ? SUMS_OF_16 : 0;
                        Own::multiply(sum[0], memory + RING_AT + ring.stage * STAGE_BYTES, memory + input, DIGIT_PLANE,
                                      (const float*)(memory + SUMS_AT + sums), MAX_INPUTS / Own::GROUP_SIZE,
                                      (const float*)(memory + SUMS_AT + INPUT_SCALES), first,
                                      min(Own::IN_STAGE, K / Own::INPUTS - first));
                    } else
#pragma unroll SUMS_OF
                    for (int turn = 0; turn < TURNS; turn++) {
                        const int column = (turn * WARPS + warp) * 64;  // so that a short last stage is shared by all warps
                        if (BYTES_OF_ROW % STEP_BYTES == 0 || column < bytes)
                            mma_columns(sum[turn % SUMS_OF], stage + mine, stage, from, memory, k_step, column, lane);
                    }
                    __syncwarp();
                    if (lane < GROUPS) barrier_arrive(full + 8);
                    ring.next();
                }
                Total own[2] = {};
#pragma unroll
                for (int i = 0; i < SUMS_OF; i++) own[0] += sum[i][0], own[1] += sum[i][2];
                low += (float)own[0] * (OF == SUMMED ? factors[nth * 16 + lane / 4] : 1.0f);
                high += (float)own[1] * (OF == SUMMED ? factors[nth * 16 + lane / 4 + 8] : 1.0f);
                if (OF == SUMMED && BIASED && warp % GROUP_WARPS == 0 && (FORM_ != NVFP4 || lane % 4 == 0)) {
                    low += factors[(TOP + nth) * 16 + lane / 4];
                    high += factors[(TOP + nth) * 16 + lane / 4 + 8];
                }
            }
            float* tiles = (float*)(memory + TILE_SUMS_AT) + ring.buffer * WARPS * 16;
            ring.buffer ^= 1;
            if (UNITS || FORM_ == NVFP4) {  // lanes have groups, and digits
                low += __shfl_xor_sync(~0u, low, 1), high += __shfl_xor_sync(~0u, high, 1);
                low += __shfl_xor_sync(~0u, low, 2), high += __shfl_xor_sync(~0u, high, 2);
            }
            if (lane % 4 == 0) {
                const int r = lane / 4, own_row = UNITS ? r % 2 * 8 + r / 2 : r;
                tiles[warp * 16 + own_row] = low;
                tiles[warp * 16 + own_row + (UNITS ? 4 : 8)] = high;
            }
            if (TILES_IN_TURN == 1) sync_consumers();
            else sync_group(group(), GROUP_WARPS * 32);
            constexpr int TILE_WARPS = WARPS / TILES_IN_TURN;
            if (warp % TILE_WARPS == 0) {
                float y = 0.0f;
                if (lane < 16)
#pragma unroll
                    for (int i = 0; i < TILE_WARPS; i++) y += tiles[(warp + i) * 16 + lane];
                y = y * ((SCALED || FLOAT4) && OF != SUMMED ? now.scale * x_scale : 1.0f);
                if (BIASED && OF != SUMMED) y += to_float(now.bias);
                const float by = FLOAT4 && OF == CONCAT ? RAISED : 1.0f;  // inputs of experts, which are stored as they are
                if (GATES) {
                    const float up = __shfl_down_sync(~0u, y, 8);
                    if (lane < 8) out[tile * 8 + lane] = from_float(gated(y, up) * by);
                } else if (END == ADD && RANKS > 1 && lane < 16) {
                    ranks.put(tile * 16 + lane, y);
                    out[tile * 16 + lane] = from_float(now.residual_sum());
                } else if (lane < 16)
                    out[tile * 16 + lane] = from_float(END == ADD ? now.residual_sum() + y : END == ACTIVATE ? activate(y) * by : y);
            }
        }
        if (GROUPS > 1) {
            ring.skip(((end - begin(cta)) * NUM_EXPERTS - passed) * K_STEPS);
            ring.buffer = 0;
            sync_consumers();  // all outputs are written, not only those of warp 0, which will say so to the other CTAs
        }
    }
    // Multiply 64 bytes of 16 rows.
    static DEVICE void mma_columns(Total (&sum)[4], u32 weights, u32 stage, u32 input, const u8* memory, int k_step,
                                   int column, int lane) {
        const uint4 low = load_smem16(weights + column), high = load_smem16(weights + 8 * ROW_STRIDE + column);
        if constexpr (FORM_ == 1) {
            const u32 at = input + (k_step * STEP_BYTES + column + lane % 4 * 16) * 2;
            const uint4 x = load_smem16(at), more = load_smem16(at + 16);
            mma(sum, low_half2(low.x), low_half2(high.x), high_half2(low.x), high_half2(high.x), x.x, x.y);
            mma(sum, low_half2(low.y), low_half2(high.y), high_half2(low.y), high_half2(high.y), x.z, x.w);
            mma(sum, low_half2(low.z), low_half2(high.z), high_half2(low.z), high_half2(high.z), more.x, more.y);
            mma(sum, low_half2(low.w), low_half2(high.w), high_half2(low.w), high_half2(high.w), more.z, more.w);
        } else if constexpr (FORM_ != 2) {
            const uint4 x = load_smem16(input + k_step * STEP_BYTES + column + lane % 4 * 16);
            mma(sum, low.x, high.x, low.y, high.y, x.x, x.y);
            mma(sum, low.z, high.z, low.w, high.w, x.z, x.w);
        } else {
            // A 16-bit word has one code of each quarter of a chunk (`quantize.pack4`). Code c, as the low bits of a
            // bfloat16 of 128 (float16: 1024), makes the number 128 + c. `sums` corrects for the 128 and for the zero point 8.
            constexpr u32 OFFSET = HALF ? 0x64006400u : 0x43004300u;
            constexpr int CHUNK_BYTES = CODES / 2;
            const int chunk = column / CHUNK_BYTES, inside = column % CHUNK_BYTES / 2;  // `inside`: a multiple of 32
            const u32 first = (k_step * (STEP_BYTES / CHUNK_BYTES) + chunk) * CODES + inside;
            const u32 a[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
            // Each address is computed once; quarters are at constant offsets from it.
            const u16* stage_scales = (const u16*)(memory + (stage - smem_address(memory)) + 16 * ROW_STRIDE);
            const u16* chunk_scales = stage_scales + chunk * (CODES / GROUP) * 16;
            const u16* scales = chunk_scales + lane / 4;
            const float* sums = (const float*)(memory + SUMS_AT) + first / 32;
            const u32 inputs = input + (first + lane % 4 * 8) * 2;
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const uint4 x = load_smem16(inputs + quarter * (CODES / 4) * 2);
                const float correction = sums[quarter * (CODES / 4) / 32];
                float c[4] = {correction, correction, correction, correction};
                u32 b[8];
#pragma unroll
                for (int i = 0; i < 8; i++) b[i] = and_or(a[i] >> 4 * quarter, 0x000f000fu, OFFSET);
                mma(c, b[0], b[1], b[2], b[3], x.x, x.y);
                mma(c, b[4], b[5], b[6], b[7], x.z, x.w);
                const int group = quarter * (CODES / 4) / GROUP;
                sum[0] += c[0] * to_float(scales[group * 16]);
                sum[2] += c[2] * to_float(scales[group * 16 + 8]);
            }
        }
    }
    // Multiply the first `bytes` of a stage of 4-bit floats: this warp's chunks of 128 inputs, two at a time so that they don't
    // wait for one another's results. A lane's 8 words have a code of each quarter, whose bits become a bfloat16's by a shift and
    // a mask (`Float4Linear`), 2^126 too small. Inputs are RAISED, so that sums are not too small for a float32.
    //
    // MXFP4: a quarter is a group, whose sums times its power of two are those of the weight / `factor`, RAISED.
    //
    // NVFP4: four words are of the chunk's first half and four of its second, so each product of tensor cores is a group. Column n
    // of the inputs' operand is zero but in the product of group n, so that a chunk's sums are of its 8 groups, and a lane scales
    // those of two.
    static DEVICE void mma_chunks(float (&sum)[2][4], u32 stage, u32 input, const u8* memory, int k_step, int bytes) {
        const int warp = threadIdx.x / 32 % GROUP_WARPS, lane = threadIdx.x % 32;
        constexpr bool HALVES = FORM_ == NVFP4;
        constexpr int SCALES = chunk_scales(FORM_);
        const u32 own = stage + (HALVES ? lane / 4 * 64 + lane % 4 * 8 : lane * 16);
        const u32 scales_at = stage - smem_address(memory) + 2 * SLAB + lane / 4 * (SCALES / 8) + (HALVES ? lane % 4 / 2 * 4 : 0);
        const int group = lane / 4;
        u32 is_own[8];  // for a group's product two bfloat16, 1 or 0: multiplications are on another pipe than choices
#pragma unroll
        for (int g = 0; g < 8; g++) is_own[g] = group == g ? 0x3f803f80u : 0;
        for (int column = warp * 64; column < bytes; column += 2 * GROUP_WARPS * 64) {
            u32 words[2][8], scales[2][2], inputs[2];
            bool has_end[2];  // the chunk at the row's end, which may have fewer than 128 inputs
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const bool is_there = n == 0 || column + GROUP_WARPS * 64 < bytes;
                const int at = is_there ? column + n * GROUP_WARPS * 64 : column;  // what isn't there has scales 0
                uint4 low, high;
                if (HALVES) {
                    const uint2 a = load_smem8(own + at * 8), b = load_smem8(own + at * 8 + 32);
                    const uint2 c = load_smem8(own + SLAB + at * 8), d = load_smem8(own + SLAB + at * 8 + 32);
                    low = uint4{a.x, a.y, b.x, b.y}, high = uint4{c.x, c.y, d.x, d.y};
                } else
                    low = load_smem16(own + at * 8), high = load_smem16(own + SLAB + at * 8);
                const u32* exponents = (const u32*)(memory + scales_at + at / 64 * SCALES);
                scales[n][0] = is_there ? exponents[0] : 0;
                scales[n][1] = is_there ? exponents[SLAB / 512 * SCALES / 4] : 0;
                const u32 all[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
                for (int i = 0; i < 8; i++) words[n][i] = all[i];
                const int chunk = k_step * (STEP_BYTES / 64) + at / 64;
                inputs[n] = input + (chunk * 128 + lane % 4 * (HALVES ? 4 : 8) + (HALVES ? group * 16 : 0)) * 2;
                has_end[n] = chunk == K / 128;
                if (HALVES && !is_there) words_are_zero(words[n]);
            }
            uint2 x_own[2];  // NVFP4: of the lane's column
            float c_own[2][2][4] = {};
            if constexpr (HALVES) {  // braces: NVRTC loses what follows a pragma behind `if constexpr`
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    x_own[n] = load_smem8(inputs[n]);
                    if (K % 128 && has_end[n] && group >= 4) x_own[n] = uint2{0, 0};  // K is a multiple of 64
                }
            }
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                uint4 x[2];
                float c[2][4] = {};
                u32 a[2][8];
                if constexpr (!HALVES) {
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        x[n] = load_smem16(inputs[n] + quarter * 64);
                        if (K % 128 && quarter >= K % 128 / 32 && has_end[n]) x[n] = uint4{0, 0, 0, 0};
                    }
                }
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const u32 w = words[n][i];
                        a[n][i] = quarter < 3
                                      ? w << 3 * quarter & 0x81c081c0u
                                      : and_or(w << 1, 0x80008000u, and_or(w >> 3, 0x01800180u, w >> 7 & 0x00400040u));
                    }
                if constexpr (HALVES) {
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            const u32 is = is_own[4 * half + quarter];
                            mma(c_own[n][half], a[n][4 * half], a[n][4 * half + 1], a[n][4 * half + 2], a[n][4 * half + 3],
                                multiply_pair(x_own[n].x, is), multiply_pair(x_own[n].y, is));
                        }
                    continue;
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        mma(c[n], a[n][4 * half], a[n][4 * half + 1], a[n][4 * half + 2], a[n][4 * half + 3],
                            half ? x[n].z : x[n].x, half ? x[n].w : x[n].y);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    sum[n][0] += c[n][0] * power_of_two(scales[n][0], quarter);
                    sum[n][2] += c[n][2] * power_of_two(scales[n][1], quarter);
                }
            }
            if constexpr (HALVES) {
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int row = 0; row < 2; row++) {  // groups 2 · (lane % 4) and the next: a half of the word
                        const u32 both = scales[n][row] >> lane % 2 * 16;
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            sum[n][2 * row] += (c_own[n][0][2 * row + i] + c_own[n][1][2 * row + i]) * e5m3(both, i);
                    }
            }
        }
    }
    static DEVICE void words_are_zero(u32 (&words)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = 0;
    }
    // A byte of a word as the exponent and the mantissa of a float32: a scale of NVFP4, times 2^118.
    static DEVICE float e5m3(u32 word, int byte) {
        return __uint_as_float(and_or(byte == 3 ? word >> 4 : word << (20 - 8 * byte), 0x0ff00000u, 0x70000000u));
    }
    // A byte of a word as the exponent of a float32.
    static DEVICE float power_of_two(u32 word, int byte) {
        return __uint_as_float((byte == 3 ? word >> 1 : word << (23 - 8 * byte)) & 0x7f800000u);
    }
};

DEVICE uint4 pack8(const float* y) {
    return make_uint4(pack2(y[0], y[1]), pack2(y[2], y[3]), pack2(y[4], y[5]), pack2(y[6], y[7]));
}
// Store 8 numbers of a product's input in the product's format. FP8 is rounded to e4m3, then stored as float16.
DEVICE void store_input(const float* y, float inverse_scale, int v, u8* input) {
    if (FORM == 1) {
        u32 z[4];
#pragma unroll
        for (int j = 0; j < 4; j++) z[j] = low_half2(pack_e4m3(y[2 * j] * inverse_scale, y[2 * j + 1] * inverse_scale));
        *(uint4*)(input + v * 16) = make_uint4(z[0], z[1], z[2], z[3]);
    } else if (FORM == 3) {
        u32 z[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; j++) z[j / 4] |= (u32)(__float2int_rn(y[j] * inverse_scale) & 255) << 8 * (j % 4);
        *(uint2*)(input + v * 8) = make_uint2(z[0], z[1]);
    } else if (is_float4(FORM)) {
        float z[8];
#pragma unroll
        for (int j = 0; j < 8; j++) z[j] = y[j] * inverse_scale;
        *(uint4*)(input + v * 16) = pack8(z);
    } else
        *(uint4*)(input + v * 16) = pack8(y);
}
// Store 8 numbers of GGUF's products as 16-bit integers, by digit, with sums of 16 and 32 numbers, and the scale of the warp's 256.
DEVICE void store_digits(const float* y, int v, u8* memory, int input) {
    float max_abs = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) max_abs = fmaxf(max_abs, fabsf(y[j]));
    max_abs = __uint_as_float(warp_max(__float_as_uint(max_abs)));
    const float inverse = max_abs > 0.0f ? 32512.0f / max_abs : 0.0f;  // 127 · 256
    u32 low[8], high[8], digits[2][2];
#pragma unroll
    for (int j = 0; j < 8; j++) {  // an integer's lower 16 bits; its high digit is rounded, since the low one has a sign
        low[j] = __float_as_uint(fmaf(y[j], inverse, 12582912.0f));
        high[j] = low[j] + 128;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 *h = high + 4 * i, *l = low + 4 * i;
        digits[0][i] = permute(permute(h[0], h[1], 0x51), permute(h[2], h[3], 0x51), 0x5410);
        digits[1][i] = permute(permute(l[0], l[1], 0x40), permute(l[2], l[3], 0x40), 0x5410);
    }
    // Both sums in a word: at most 32 · 128 each.
    int both = sum_bytes(digits[0][0], sum_bytes(digits[0][1])) * 65536 + sum_bytes(digits[1][0], sum_bytes(digits[1][1]));
    u8* sums = memory + SUMS_AT;
    const bool is_there = v < MAX_INPUTS / 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {  // of 16, then of 32
        both += __shfl_xor_sync(~0u, both, 1 + i);
        const int group = i ? 32 : 16, low_sum = (short)both;
        float* own = (float*)(sums + (i ? 0 : SUMS_OF_16)) + v * 8 / group;
        if (v * 8 % group == 0 && is_there)
            own[0] = (float)((both - low_sum) >> 16), own[MAX_INPUTS / group] = (float)low_sum;
    }
    if (!is_there) return;
    if (v % 32 == 0) ((float*)(sums + INPUT_SCALES))[v / 32] = max_abs / 32512.0f;
    *(uint2*)(memory + input + v * 8) = make_uint2(digits[0][0], digits[0][1]);
    *(uint2*)(memory + input + DIGIT_PLANE + v * 8) = make_uint2(digits[1][0], digits[1][1]);
}
DEVICE float quant_scale(float max_abs) {
    return fmaxf(max_abs, SMALLEST) / (FORM == 1 ? 448.0f : 127.0f);
}

// Norm a product's input row, store it at `input` in the product's format, and return the scale of its codes.
// NORM_: 0 none, 1 RMS, 2 layer norm, with `weight` and `bias`. load(v, y) loads the numbers 8 v … 8 v + 7. tap(i, y) is
// given a thread's i-th 8 normed numbers, before rounding, and may change them.
struct NoTap {
    DEVICE void operator()(int, const float*) {}
};
template <int K, int NORM_, typename Load, typename Tap = NoTap>
DEVICE float load_input(Load load, const u16* weight, const u16* bias, float eps, float offset, u8* memory,
                        Tap&& tap = Tap(), int input = INPUT_AT) {
    constexpr int VECTORS = K / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
    float* scratch = (float*)(memory + SCRATCH_AT);
    float y[TIMES][8];
    uint4 w[NORM_ ? TIMES : 1], b[NORM_ ? TIMES : 1];
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const int v = i * THREADS + threadIdx.x;
#pragma unroll
        for (int j = 0; j < 8; j++) y[i][j] = 0.0f;
        if (v < VECTORS) {
            load(v, y[i]);
            if (NORM_) w[i] = ((const uint4*)weight)[v];
            if (NORM_ && NORM_BIAS) b[i] = ((const uint4*)bias)[v];
        }
    }
    if (NORM_ == 2) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < TIMES; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum += y[i][j];
        const float mean = block_reduce<false>(sum, scratch) / K;
#pragma unroll
        for (int i = 0; i < TIMES; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) y[i][j] = i * THREADS + threadIdx.x < VECTORS ? y[i][j] - mean : 0.0f;
    }
    if (NORM_) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < TIMES; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) squares += y[i][j] * y[i][j];
        const float factor = rsqrtf(block_reduce<false>(squares, scratch) / K + eps);
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) {
                float gamma[8], beta[8];
                unpack8(w[i], gamma);
                if (NORM_BIAS) unpack8(b[i], beta);
#pragma unroll
                for (int j = 0; j < 8; j++) y[i][j] = y[i][j] * factor * (gamma[j] + offset) + (NORM_BIAS ? beta[j] : 0.0f);
            }
    }
#pragma unroll
    for (int i = 0; i < TIMES; i++)
        if (i * THREADS + threadIdx.x < VECTORS) tap(i, y[i]);
    float scale = is_float4(FORM) ? 1.0f / RAISED : 1.0f;
    if (FORM == 1 || FORM == 3) {
        float max_abs = 0.0f;
#pragma unroll
        for (int i = 0; i < TIMES; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) max_abs = fmaxf(max_abs, fabsf(y[i][j]));
        scale = quant_scale(block_reduce<true>(max_abs, scratch));
    }
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const int v = i * THREADS + threadIdx.x;
        if (FORM == 2) {  // the correction of 4-bit products: −136 (float16: −1032) times the sum of each 32 inputs
            float z[8], sum = 0.0f;
            unpack8(pack8(y[i]), z);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += z[j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (v < VECTORS && v % 4 == 0) ((float*)(memory + SUMS_AT))[v / 4] = sum * -(HALF ? 1032.0f : 136.0f);
        }
        if (FORM == CODED) store_digits(y[i], v, memory, input);
        else if (v < VECTORS) store_input(y[i], 1.0f / scale, v, memory + input);
    }
    sync_consumers();
    return scale;
}
