// All layers of a decode step of one sequence in one kernel (`one_token.py` says when, and defines the capitals). It stands
// below `instructions.cu` and the other files of `SOURCES` when it is compiled.
//
// Such a step is bound by reading every weight once. One program stays on each multiprocessor. Its last warps do nothing but
// ask for this program's weights, in the order in which they are wanted, into a ring in shared memory; the other warps multiply
// what has arrived. Weights wait for nobody (but a mixture's for the choice of experts): while programs meet, norm a row or
// attend, the ring fills. A layer is
//
//     norm → q, k, v | rope, cache, attention | parts together → output, into the residual | norm → up, activation | down
//
// with a meeting at each bar: a counter in memory that all programs add to and wait for. In a parallel block up stands beside
// q, k, v and down beside output, so there are three; a mixture of experts, in place of up and down, has one more. Every
// program makes the whole row that a product reads for itself, which is cheaper than waiting for one to do it.
//
// A product's rows are dealt out in tiles of 16 (of a gated one 8 gates and their 8 ups), each program a stretch of them. A
// piece of the ring is 1,024 bytes of each row of a tile. A sum may be taken in any order, so a lane's 16 bytes of a row are
// the operand of tensor cores as they lie there, and the matching inputs are the other: column 0 of 8 that are all the same.
// The warps take pieces' 64-byte columns in turn and add up at a tile's end, always in the same order.
//
// Source: the idea of one kernel a step is "No bubbles" (Spector et al., 2025, megakernels for Llama-1B); products by permuted
// operands and 4-bit codes as bits of larger numbers are Marlin's (Frantar et al., 2024).

extern "C" __global__ void __launch_bounds__(THREADS + ASKERS * 32, 1)
one_token(u16* x, const u64* table, u16* qkv, u16* mid, float* parts, float* tops, u32* counters, const float* cos_sin,
          const long long* positions, const int* block_table, const int* seq_lens, int num_layers) {
    SHARED_MEMORY(memory);
    const int program = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 smem = shared(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            make_barrier(smem + BARRIERS + i * 16, ASKERS);
            make_barrier(smem + BARRIERS + i * 16 + 8, WARPS);
        }
        if (X) make_barrier(smem + ROUTED, 1);
        barriers_made();
    }
    u64* rows = (u64*)(memory + ROWS);
    if (threadIdx.x < NUM_POINTERS) rows[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
    const Shares shares = shares_of(seq_lens[0]);
    if (warp >= WARPS) {
        Asker asker(smem, program, warp - WARPS, lane);
        auto of_table = [&](int layer, int i) {
            return i < NUM_POINTERS && layer < num_layers ? table[layer * NUM_POINTERS + i] : 0;
        };
        u64 row = of_table(0, lane), more = of_table(0, 32 + lane);
        auto pointer = [&](int i) { return (const u8*)__shfl_sync(~0u, i < 32 ? row : more, i % 32); };
        for (int layer = 0; layer < num_layers; layer++) {
            const u64 next = of_table(layer + 1, lane), more_of_next = of_table(layer + 1, 32 + lane);
            asker.product<ASKING, E, false, ONE, 0, QKV / 16>(pointer(QKV_W), pointer(QKV_S));
            if (LATENT) asker.product<LATENTS, E, false, ONE, ASKING / 16, QKV / 16>(pointer(LATENT_W), pointer(LATENT_S));
            if (PARALLEL) asker.product<F, E, GATED>(pointer(UP_W), pointer(UP_S));
            ask_attention(shares, pointer, block_table, asker);
            asker.product<E, Q, false>(pointer(OUT_W), pointer(OUT_S));
            if (X && (!DENSE || pointer(ROUTER_W)))
                Mixture<X>::ask(pointer, asker);
            else {
                if (!PARALLEL) asker.product<F, E, GATED>(pointer(UP_W), pointer(UP_S));
                asker.product<E, F, false>(pointer(DOWN_W), pointer(DOWN_S));
            }
            row = next;
            more = more_of_next;
        }
        return;
    }
    typedef Product<ASKING, E, CODES_E, STORE, QKV_BIAS, ONE, 0, QKV / 16> Qkv;
    typedef Product<LATENTS, E, CODES_E, STORE, false, ONE, ASKING / 16, QKV / 16> Latent;
    typedef Product<E, Q, CODES_Q, ADD, OUT_BIAS> Out;
    typedef Product<F, E, CODES_E, ACTIVATE, UP_BIAS> Up;
    typedef Product<E, F, CODES_F, ADD, DOWN_BIAS> Down;
    const int splits = shares.splits;
    const float* angles = cos_sin + positions[0] * R;
    const int block = block_table[(shares.length - 1) / BLOCK_SIZE];
    const bool counted = X && program == 0 && block > 0;  // not in the null block, as padding is
    Place place;
    u32 met = 0, attended = 0;
    auto residual = [&](int v, float* y) { numbers(fresh16((const uint4*)x + v), y); };
    auto middle = [&](int v, float* y) { numbers(fresh16((const uint4*)mid + v), y); };
    for (int layer = 0; layer < num_layers; layer++) {
        const u64* row = rows + layer % 2 * TABLE;
        if (warp == WARPS - 1 && layer + 1 < num_layers) {
            u64* next = rows + (layer + 1) % 2 * TABLE;
            for (int i = lane; i < NUM_POINTERS; i += 32) next[i] = table[(layer + 1) * NUM_POINTERS + i];
        }
        const u16 *norm = (const u16*)row[NORM_W], *norm_bias = (const u16*)row[NORM_B];
        const u16 *mlp = (const u16*)row[MLP_W], *mlp_bias = (const u16*)row[MLP_B];
        // --- q, k, v
        AtEnd ahead = Qkv::first(program, row, QKV_S, x);
        if (layer) wait(counters, met);
        float x_scale = prepare<E, NORM>(residual, norm, norm_bias, EPS, OFFSET_OF_NORM, memory);
        Qkv::run(ahead, row, QKV_S, qkv, x_scale, place, memory, program);
        if (LATENT) {
            ahead = Latent::first(program, row, LATENT_S, x);
            Latent::run(ahead, row, LATENT_S, qkv + ASKING, x_scale, place, memory, program);
        }
        if (PARALLEL) {
            ahead = Up::first(program, row, UP_S, x);
            if (MLP_NORM) {
                together();
                x_scale = prepare<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, OFFSET_OF_NORM, memory);
            }
            Up::run(ahead, row, UP_S, mid, x_scale, place, memory, program);
        }
        if (warp == 0) {
            __syncwarp();
            if (lane == 0) add(counters);
        }
        met += PROGRAMS;
        // --- attention
        if (program < shares.items) {
            attend(shares, program, row, block_table, angles, qkv, parts, tops, counters, met, place, memory);
            if (threadIdx.x == 0) add(counters + 1);
        }
        attended += shares.items;
        // --- output
        ahead = Out::first(program, row, OUT_S, x);
        wait(counters + 1, attended);
        {
            auto seen = [&](int v, float* y) {
                float top = -1e30f, total = 0.0f;
                for (int from = 0; from < splits; from += 4) {  // so many are asked for at once
                    uint4 low[4], high[4];
                    float tops_of[4], totals[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int split = min(from + i, splits - 1);
                        const float* own = tops + (split * H + v * 8 / D) * 2;
                        low[i] = fresh16(parts + split * Q + v * 8);
                        high[i] = fresh16(parts + split * Q + v * 8 + 4);
                        tops_of[i] = from + i < splits ? fresh4(own) : -1e30f;
                        totals[i] = fresh4(own + 1);
                    }
                    float highest = top;
#pragma unroll
                    for (int i = 0; i < 4; i++) highest = fmaxf(highest, tops_of[i]);
                    const float fade = power2(top - highest);
                    total *= fade;
#pragma unroll
                    for (int j = 0; j < 8; j++) y[j] *= fade;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float w = from + i < splits ? power2(tops_of[i] - highest) : 0.0f;
                        const uint4 l = low[i], h = high[i];
                        const u32 words[8] = {l.x, l.y, l.z, l.w, h.x, h.y, h.z, h.w};
                        total += w * totals[i];
#pragma unroll
                        for (int j = 0; j < 8; j++) y[j] += w * __uint_as_float(words[j]);
                    }
                    top = highest;
                }
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] = number(rounded(y[j] / total));  // as an attention of its own leaves them
            };
            x_scale = prepare<Q, 0>(seen, nullptr, nullptr, 0.0f, 0.0f, memory);
        }
        Out::run(ahead, row, OUT_S, x, x_scale, place, memory, program);
        if (X && (!DENSE || row[ROUTER_W])) {
            Mixture<X>::run(row, x, mid, counters, met, counted, place, memory, program);
        } else {
            // --- up
            if (!PARALLEL) {
                meet(counters, met);
                ahead = Up::first(program, row, UP_S, x);
                wait(counters, met);
                x_scale = prepare<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, OFFSET_OF_NORM, memory);
                Up::run(ahead, row, UP_S, mid, x_scale, place, memory, program);
                meet(counters, met);
            }
            // --- down
            ahead = Down::first(program, row, DOWN_S, x);
            if (PARALLEL) together();  // all are through with the input before
            else wait(counters, met);
            x_scale = prepare<F, 0>(middle, nullptr, nullptr, 0.0f, 0.0f, memory);
            Down::run(ahead, row, DOWN_S, x, x_scale, place, memory, program);
        }
        if (warp == 0) {
            __syncwarp();
            if (lane == 0 && layer + 1 < num_layers) add(counters);
        }
        met += PROGRAMS;
    }
    // The last to leave makes the counters ready for the next step.
    if (threadIdx.x == 0 && add_and_read(counters + 2) == PROGRAMS - 1) counters[0] = counters[1] = counters[2] = 0;
}
