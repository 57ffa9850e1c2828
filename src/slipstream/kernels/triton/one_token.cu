// All layers of a decode step of one sequence in one persistent kernel. `one_token.py` says for which models and defines
// the names in capitals. The files of `SOURCES` are compiled as one text, in their order.
//
// Such a step is bound by reading every weight once. One thread block (CTA) runs on each multiprocessor:
//
// 1. PRODUCER_WARPS warps only copy this CTA's weights, in order of use, into a ring in shared memory.
// 2. WARPS consumer warps multiply what has arrived.
// 3. Weights depend on nothing (but a mixture's on the choice of experts), so the ring fills while CTAs synchronise, norm
//    a row or attend.
//
// A layer is
//
//     norm → q, k, v | rope, cache, attention | merge splits → output, into the residual | norm → up, activation | down
//
// with a grid barrier at each bar: a counter in memory that all CTAs add to and wait for. A parallel layer computes up
// beside q, k, v and down beside output, so it has three. A mixture of experts, in place of up and down, has one more.
// Every CTA computes a product's whole input row for itself, which is cheaper than waiting for one CTA to do it.
//
// A product's rows are cut into tiles of 16 (a gated one's: 8 gates and their 8 ups); each CTA has a contiguous range of
// tiles. A ring stage holds STEP_BYTES of each of a tile's 16 rows. A sum may be taken in any order, so a lane's 16
// contiguous bytes of a row are a tensor core's operand as they lie, with the matching inputs as the other operand
// (column 0 of 8 equal ones). Warps take a stage's 64-byte columns in turn and add up at the tile's end, always in the
// same order.
//
// Sources: one kernel per step is "No bubbles" (Spector et al., 2025, megakernels for Llama-1B). Permuted operands and
// 4-bit codes as bits of larger numbers are Marlin's (Frantar et al., 2024).

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_WARPS * 32, 1)
one_token(u16* x, const u64* table, u16* qkv, u16* mid, float* partials, float* softmax, u32* counters, const float* cos_sin,
          const long long* positions, const int* block_table, const int* seq_lens, int num_layers) {
    SHARED_MEMORY(memory);
    const int cta = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 smem = smem_address(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem + BARRIERS_AT + i * 16, PRODUCER_WARPS);
            barrier_init(smem + BARRIERS_AT + i * 16 + 8, WARPS);
        }
        if (X) barrier_init(smem + ROUTED_BARRIER, 1);
        barrier_fence();
    }
    u64* rows = (u64*)(memory + POINTERS_AT);
    if (threadIdx.x < NUM_POINTERS) rows[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
    const SplitPlan plan = plan_splits(seq_lens[0]);
    if (warp >= WARPS) {
        Producer producer(smem, cta, warp - WARPS, lane);
        auto of_table = [&](int layer, int i) {
            return i < NUM_POINTERS && layer < num_layers ? table[layer * NUM_POINTERS + i] : 0;
        };
        u64 row = of_table(0, lane), more = of_table(0, 32 + lane);
        auto pointer = [&](int i) { return (const u8*)__shfl_sync(~0u, i < 32 ? row : more, i % 32); };
        for (int layer = 0; layer < num_layers; layer++) {
            const u64 next = of_table(layer + 1, lane), more_of_next = of_table(layer + 1, 32 + lane);
            producer.product<QKV_ROWS, E, false, ONE, 0, QKV_SIZE / 16>(pointer(QKV_W), pointer(QKV_S));
            if (LATENT)
                producer.product<LATENT_ROWS, E, false, ONE, QKV_ROWS / 16, QKV_SIZE / 16>(pointer(LATENT_W),
                                                                                          pointer(LATENT_S));
            if (PARALLEL) producer.product<F, E, GATED>(pointer(UP_W), pointer(UP_S));
            produce_attention(plan, pointer, block_table, producer);
            producer.product<E, Q, false>(pointer(OUT_W), pointer(OUT_S));
            if (X && (!DENSE || pointer(ROUTER_W)))
                Mixture<X>::produce(pointer, producer);
            else {
                if (!PARALLEL) producer.product<F, E, GATED>(pointer(UP_W), pointer(UP_S));
                producer.product<E, F, false>(pointer(DOWN_W), pointer(DOWN_S));
            }
            row = next;
            more = more_of_next;
        }
        return;
    }
    typedef Product<QKV_ROWS, E, CODES_E, STORE, QKV_BIAS, ONE, 0, QKV_SIZE / 16> Qkv;
    typedef Product<LATENT_ROWS, E, CODES_E, STORE, false, ONE, QKV_ROWS / 16, QKV_SIZE / 16> Latent;
    typedef Product<E, Q, CODES_Q, ADD, OUT_BIAS> Out;
    typedef Product<F, E, CODES_E, ACTIVATE, UP_BIAS> Up;
    typedef Product<E, F, CODES_F, ADD, DOWN_BIAS> Down;
    const int splits = plan.splits;
    const float* angles = cos_sin + positions[0] * R;
    const int block = block_table[(plan.length - 1) / BLOCK_SIZE];
    const bool counted = X && cta == 0 && block > 0;  // padding writes to the null block
    RingPosition ring;
    u32 arrivals = 0, attended = 0;
    auto residual = [&](int v, float* y) { unpack8(load_cg16((const uint4*)x + v), y); };
    auto middle = [&](int v, float* y) { unpack8(load_cg16((const uint4*)mid + v), y); };
    for (int layer = 0; layer < num_layers; layer++) {
        const u64* row = rows + layer % 2 * TABLE_SLOTS;
        if (warp == WARPS - 1 && layer + 1 < num_layers) {
            u64* next = rows + (layer + 1) % 2 * TABLE_SLOTS;
            for (int i = lane; i < NUM_POINTERS; i += 32) next[i] = table[(layer + 1) * NUM_POINTERS + i];
        }
        const u16 *norm = (const u16*)row[NORM_W], *norm_bias = (const u16*)row[NORM_B];
        const u16 *mlp = (const u16*)row[MLP_W], *mlp_bias = (const u16*)row[MLP_B];
        // --- q, k, v
        Epilogue ahead = Qkv::first(cta, row, QKV_S, x);
        if (layer) grid_wait(counters, arrivals);
        float x_scale = load_input<E, NORM>(residual, norm, norm_bias, EPS, NORM_OFFSET, memory);
        Qkv::run(ahead, row, QKV_S, qkv, x_scale, ring, memory, cta);
        if (LATENT) {
            ahead = Latent::first(cta, row, LATENT_S, x);
            Latent::run(ahead, row, LATENT_S, qkv + QKV_ROWS, x_scale, ring, memory, cta);
        }
        if (PARALLEL) {
            ahead = Up::first(cta, row, UP_S, x);
            if (MLP_NORM) {
                sync_consumers();
                x_scale = load_input<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, NORM_OFFSET, memory);
            }
            Up::run(ahead, row, UP_S, mid, x_scale, ring, memory, cta);
        }
        if (warp == 0) {
            __syncwarp();
            if (lane == 0) release_add(counters);
        }
        arrivals += CTAS;
        // --- attention
        if (cta < plan.num_active) {
            attend(plan, cta, row, block_table, angles, qkv, partials, softmax, counters, arrivals, ring, memory);
            if (threadIdx.x == 0) release_add(counters + 1);
        }
        attended += plan.num_active;
        // --- output
        ahead = Out::first(cta, row, OUT_S, x);
        grid_wait(counters + 1, attended);
        {
            auto seen = [&](int v, float* y) {
                float top = -1e30f, total = 0.0f;
                for (int from = 0; from < splits; from += 4) {  // loads in flight together
                    uint4 low[4], high[4];
                    float maxima[4], totals[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int split = min(from + i, splits - 1);
                        const float* own = softmax + (split * H + v * 8 / D) * 2;
                        low[i] = load_cg16(partials + split * Q + v * 8);
                        high[i] = load_cg16(partials + split * Q + v * 8 + 4);
                        maxima[i] = from + i < splits ? load_cg4(own) : -1e30f;
                        totals[i] = load_cg4(own + 1);
                    }
                    float highest = top;
#pragma unroll
                    for (int i = 0; i < 4; i++) highest = fmaxf(highest, maxima[i]);
                    const float rescale = exp2_fast(top - highest);
                    total *= rescale;
#pragma unroll
                    for (int j = 0; j < 8; j++) y[j] *= rescale;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float w = from + i < splits ? exp2_fast(maxima[i] - highest) : 0.0f;
                        const uint4 l = low[i], h = high[i];
                        const u32 words[8] = {l.x, l.y, l.z, l.w, h.x, h.y, h.z, h.w};
                        total += w * totals[i];
#pragma unroll
                        for (int j = 0; j < 8; j++) y[j] += w * __uint_as_float(words[j]);
                    }
                    top = highest;
                }
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] = to_float(from_float(y[j] / total));
            };
            x_scale = load_input<Q, 0>(seen, nullptr, nullptr, 0.0f, 0.0f, memory);
        }
        Out::run(ahead, row, OUT_S, x, x_scale, ring, memory, cta);
        if (X && (!DENSE || row[ROUTER_W])) {
            Mixture<X>::run(row, x, mid, counters, arrivals, counted, ring, memory, cta);
        } else {
            // --- up
            if (!PARALLEL) {
                grid_arrive(counters, arrivals);
                ahead = Up::first(cta, row, UP_S, x);
                grid_wait(counters, arrivals);
                x_scale = load_input<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, NORM_OFFSET, memory);
                Up::run(ahead, row, UP_S, mid, x_scale, ring, memory, cta);
                grid_arrive(counters, arrivals);
            }
            // --- down
            ahead = Down::first(cta, row, DOWN_S, x);
            if (PARALLEL) sync_consumers();  // the previous input is no longer read
            else grid_wait(counters, arrivals);
            x_scale = load_input<F, 0>(middle, nullptr, nullptr, 0.0f, 0.0f, memory);
            Down::run(ahead, row, DOWN_S, x, x_scale, ring, memory, cta);
        }
        if (warp == 0) {
            __syncwarp();
            if (lane == 0 && layer + 1 < num_layers) release_add(counters);
        }
        arrivals += CTAS;
    }
    // The last CTA to leave resets the counters for the next step.
    if (threadIdx.x == 0 && fetch_add(counters + 2) == CTAS - 1) counters[0] = counters[1] = counters[2] = 0;
}
