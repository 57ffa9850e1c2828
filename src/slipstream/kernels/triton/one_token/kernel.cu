// One decode step of one sequence, all layers, in one persistent kernel. `one_token.py` says which models it runs, and
// defines the names in capitals. The files of `SOURCES` are compiled as one text, in their order.
//
// The step's time is the time to read every weight once. One thread block (CTA) runs on each multiprocessor:
//
// 1. PRODUCER_WARPS warps copy this CTA's weights, in order of use, into a ring buffer in shared memory.
// 2. WARPS consumer warps compute: products, norms, attention.
// 3. Weights depend on no result (except an expert's, which depend on the routing). So producers keep copying while
//    consumers wait at a grid barrier, norm a row or attend.
//
// A layer runs in phases. At each bar all CTAs wait at a grid barrier: a counter in memory that each of them increments.
//
//     norm → q, k, v | rope, cache, attention, merge of splits | output, into the residual | norm → up, activation | down
//
// Some layers may have the gated delta rule in place of attention (`delta.cu`). A parallel layer computes up in the
// phase of q, k, v, and down in the phase of output; it has three barriers. A mixture of experts takes the place of up and
// down, and has one barrier more. Every CTA computes the whole input row of a product: that is cheaper than another barrier.
// With tensor parallelism ranks add up what output and down give, through each other's memory, at the barriers behind these
// (`Ranks`).
//
// Products:
//
// 1. A weight is cut into tiles of 16 rows. A tile of a gated product has 8 rows of gates and the 8 matching rows of ups.
// 2. Each CTA has a contiguous range of tiles.
// 3. A stage of the ring holds STEP_BYTES of each of a tile's 16 rows.
// 4. A lane's 16 contiguous bytes of a row are a tensor core's operand without a permutation, because the order of a sum
//    is free. The inputs that match them are the other operand, repeated in its 8 columns; column 0 is read.
// 5. Warps take a stage's 64-byte columns in turn. Their sums are added at the end of the tile, always in one order.
//
// Sources: "No bubbles" (Spector et al., 2025) runs Llama-1B in one kernel. Marlin (Frantar et al., 2024) permutes
// operands, and reads 4-bit codes as low bits of larger numbers.

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_WARPS * 32, 1)
one_token(u16* x, const u64* table, u16* qkv, u16* mid, float* partials, float* softmax, u32* counters, const float* cos_sin,
          const long long* positions, const int* block_table, const int* seq_lens, const u64* shared, const int* second_table,
          const int* state_read, const int* state_write, int num_layers) {
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
        auto produce_up = [&] {
            with_form<UP_FORMS>(form_number((u64)pointer(FORM_NUMBERS), UP_FORM), [&](auto form) {
                producer.product<F, E, GATED, ONE, 0, 0, decltype(form)::value>(pointer(UP_W), pointer(UP_S), {},
                                                                                pointer(UP_ROW));
            });
        };
        for (int layer = 0; layer < num_layers; layer++) {
            const u64 next = of_table(layer + 1, lane), more_of_next = of_table(layer + 1, 32 + lane);
#if DELTA
            if (const u64 states = (u64)pointer(STATES)) {
                producer.product<DELTA_ROWS, E, false>(pointer(QKV_W), pointer(QKV_S));
                prefetch_state((const u8*)states, {state_read[0], state_write[0]}, producer);
                producer.product<E, DV, false>(pointer(OUT_W), pointer(OUT_S));
            } else
#endif
            {
                const u64 forms = (u64)pointer(FORM_NUMBERS);
                with_form<QKV_FORMS>(form_number(forms, QKV_FORM), [&](auto form) {
                    producer.product<QKV_ROWS, E, false, ONE, 0, QKV_SIZE / 16, decltype(form)::value>(
                        pointer(QKV_W), pointer(QKV_S), {}, pointer(QKV_ROW));
                });
                if (SECOND)
                    with_form<LATENT_FORMS>(form_number(forms, LATENT_FORM), [&](auto form) {
                        producer.product<LATENT_ROWS, E, false, ONE, QKV_ROWS / 16, QKV_SIZE / 16, decltype(form)::value>(
                            pointer(LATENT_W), pointer(LATENT_S), {}, pointer(LATENT_ROW));
                    });
                if (PARALLEL) produce_up();
                const int* blocks = TABLES > 1 && pointer(TABLE) ? second_table : block_table;
                produce_attention(plan, pointer, blocks, producer);
                with_form<OUT_FORMS>(form_number(forms, OUT_FORM), [&](auto form) {
                    producer.product<E, Q, false, ONE, 0, 0, decltype(form)::value>(pointer(OUT_W), pointer(OUT_S), {},
                                                                                    pointer(OUT_ROW));
                });
            }
            if (X && (!DENSE || pointer(ROUTER_W)))
                Mixture<X>::produce(pointer, memory, producer);
            else {
                if (!PARALLEL) produce_up();
                with_form<DOWN_FORMS>(form_number((u64)pointer(FORM_NUMBERS), DOWN_FORM), [&](auto form) {
                    producer.product<E, F, false, ONE, 0, 0, decltype(form)::value>(pointer(DOWN_W), pointer(DOWN_S), {},
                                                                                    pointer(DOWN_ROW));
                });
            }
            row = next;
            more = more_of_next;
        }
        return;
    }
    typedef Product<QKV_ROWS, E, CODES_E, STORE, QKV_BIAS, ONE, 0, QKV_SIZE / 16> Qkv;
    typedef Product<LATENT_ROWS, E, CODES_E, STORE, QKV_BIAS && !LATENT, ONE, QKV_ROWS / 16, QKV_SIZE / 16> Latent;
    typedef Product<E, Q, CODES_Q, ADD, OUT_BIAS> Out;
    typedef Product<F, E, CODES_E, ACTIVATE, UP_BIAS> Up;
    typedef Product<E, F, CODES_F, ADD, DOWN_BIAS> Down;
#if DELTA
    typedef Product<DELTA_ROWS, E, CODES_E, STORE, false> DeltaIn;
    typedef Product<E, DV, CODES_V, ADD, false> DeltaOut;
    const StateSlots slots = {state_read[0], state_write[0]};
#endif
    const float* angles = cos_sin + positions[0] * R;
    const int block = block_table[(plan.length - 1) / BLOCK_SIZE];
    const bool counted = X && cta == 0 && block > 0;  // padding has the null block, and is not counted
    RingPosition ring;
    u32 arrivals = 0, splits = 0, merges = 0;  // splits of each group of heads, and merges of all, up to this layer's
    u16* attention = qkv + max_of(QKV_SIZE, DELTA_ROWS);  // what attention writes [Q]
    Ranks ranks;
    if (RANKS > 1) {
#pragma unroll
        for (int i = 0; i < RANKS; i++) ranks.memory[i] = shared[i];
        ranks.begin = load_acquire(counters + 3);
    }
    auto residual = [&](int v, float* y) {
        unpack8(load_cg16((const uint4*)x + v), y);
        ranks.residual8(v, y);
    };
    auto run_up = [&](const Epilogue& ahead, const u64* row, float x_scale) {
        with_form<UP_FORMS>(form_number(row[FORM_NUMBERS], UP_FORM), [&](auto form) {
            Up::With<decltype(form)::value>::run(ahead, row, UP_S, mid, x_scale, ring, memory, cta);
        });
    };
    auto middle = [&](int v, float* y) { unpack8(load_cg16((const uint4*)mid + v), y); };
    for (int layer = 0; layer < num_layers; layer++) {
        const u64* row = rows + layer % 2 * TABLE_SLOTS;
        if (warp == WARPS - 1 && layer + 1 < num_layers) {
            u64* next = rows + (layer + 1) % 2 * TABLE_SLOTS;
            for (int i = lane; i < NUM_POINTERS; i += 32) next[i] = table[(layer + 1) * NUM_POINTERS + i];
        }
        const u16 *norm = (const u16*)row[NORM_W], *norm_bias = (const u16*)row[NORM_B];
        const u16 *mlp = (const u16*)row[MLP_W], *mlp_bias = (const u16*)row[MLP_B];
        Epilogue ahead;
        float x_scale;
#if DELTA
        if (row[STATES]) {
            // --- q, k, v, z, gates
            PlainRows<2 * DELTA_HEADS> gates;
            gates.prefetch(cta, row[GATES_W]);
            ahead = DeltaIn::first(cta, row, QKV_S, x);
            if (layer) grid_wait(counters, arrivals);
            x_scale = load_input<E, NORM>(residual, norm, norm_bias, EPS, NORM_OFFSET, memory, gates);
            gates.write(softmax, cta, memory);
            DeltaIn::run(ahead, row, QKV_S, qkv, x_scale, ring, memory, cta);
            grid_arrive(counters, arrivals);
            // --- the delta rule
            merges += DELTA_ACTIVE;
            if (cta < DELTA_ACTIVE) {
                DeltaRule rule(cta, slots);
                rule.prefetch(row);
                grid_wait(counters, arrivals);
                rule.run(row, qkv, softmax, partials, memory);
                sync_consumers();
                if (threadIdx.x == 0) release_add(counters + 1);
            }
            // --- output
            ahead = DeltaOut::first(cta, row, OUT_S, x);
            ConvState kept;
            kept.load(row, cta, slots);
            DeltaEnd end;
            end.prefetch(row);
            grid_wait(counters + 1, merges);
            kept.add(qkv);
            end.load(qkv + DELTA_CHANNELS);
            auto mixed = [&](int v, float* y) {
                const uint4 low = load_cg16(partials + v * 8), high = load_cg16(partials + v * 8 + 4);
                const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] = __uint_as_float(words[j]);
            };
            x_scale = load_input<DV, 0>(mixed, nullptr, nullptr, 0.0f, 0.0f, memory, end);
            DeltaOut::run(ahead, row, OUT_S, x, x_scale, ring, memory, cta);
            kept.store(row, slots);
        } else
#endif
        {
            // --- q, k, v
            ahead = Qkv::first(cta, row, QKV_S, x);
            if (layer) grid_wait(counters, arrivals, ranks);
            x_scale = load_input<E, NORM>(residual, norm, norm_bias, EPS, NORM_OFFSET, memory);
            with_form<QKV_FORMS>(form_number(row[FORM_NUMBERS], QKV_FORM), [&](auto form) {
                Qkv::With<decltype(form)::value>::run(ahead, row, QKV_S, qkv, x_scale, ring, memory, cta);
            });
            if (SECOND) {
                ahead = Latent::first(cta, row, LATENT_S, x);
                with_form<LATENT_FORMS>(form_number(row[FORM_NUMBERS], LATENT_FORM), [&](auto form) {
                    Latent::With<decltype(form)::value>::run(ahead, row, LATENT_S, qkv + QKV_ROWS, x_scale, ring, memory, cta);
                });
            }
            if (PARALLEL) {
                ahead = Up::first(cta, row, UP_S, x);
                if (MLP_NORM) {
                    sync_consumers();
                    x_scale = load_input<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, NORM_OFFSET, memory);
                }
                run_up(ahead, row, x_scale);
            }
            if (warp == 0) {
                __syncwarp();
                if (lane == 0) release_add(counters);
            }
            arrivals += CTAS;
            // --- attention
            const SplitPlan own_plan = WINDOWS ? plan_splits(plan.length, (int)row[WINDOW]) : plan;
            splits += own_plan.splits;
            merges += own_plan.num_groups();
            if (cta < own_plan.num_active) {
                const int* blocks = TABLES > 1 && row[TABLE] ? second_table : block_table;
                attend(own_plan, cta, row, blocks, angles, qkv + GATE_ROWS, partials, softmax, counters, arrivals, ring, memory);
                merge_splits(own_plan, cta, row, partials, softmax, attention, counters, splits, memory);
            }
            // --- output
            ahead = Out::first(cta, row, OUT_S, x, {}, ranks);
            grid_wait(counters + 1, merges);
            {
                auto merged = [&](int v, float* y) { unpack8(load_cg16((const uint4*)attention + v), y); };
                OutputGate gate;
                gate.load(qkv);
                x_scale = load_input<Q, 0>(merged, nullptr, nullptr, 0.0f, 0.0f, memory, gate);
            }
            with_form<OUT_FORMS>(form_number(row[FORM_NUMBERS], OUT_FORM), [&](auto form) {
                Out::With<decltype(form)::value>::run(ahead, row, OUT_S, x, x_scale, ring, memory, cta, {}, INPUT_AT, ranks);
            });
        }
        ranks.arrive();
        if (X && (!DENSE || row[ROUTER_W])) {
            Mixture<X>::run(row, x, mid, counters, arrivals, counted, ring, memory, cta);
        } else {
            // --- up
            if (!PARALLEL) {
                grid_arrive(counters, arrivals);
                ahead = Up::first(cta, row, UP_S, x);
                grid_wait(counters, arrivals, ranks);
                x_scale = load_input<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, NORM_OFFSET, memory);
                run_up(ahead, row, x_scale);
                grid_arrive(counters, arrivals);
            }
            // --- down
            ahead = Down::first(cta, row, DOWN_S, x, {}, ranks);
            if (PARALLEL) sync_consumers();  // until all warps have read the input that the next one overwrites
            else grid_wait(counters, arrivals);
            x_scale = load_input<F, 0>(middle, nullptr, nullptr, 0.0f, 0.0f, memory);
            with_form<DOWN_FORMS>(form_number(row[FORM_NUMBERS], DOWN_FORM), [&](auto form) {
                Down::With<decltype(form)::value>::run(ahead, row, DOWN_S, x, x_scale, ring, memory, cta, {}, INPUT_AT, ranks);
            });
            ranks.arrive();
        }
        if (warp == 0) {
            __syncwarp();
            if (lane == 0 && layer + 1 < num_layers) release_add(counters);
        }
        arrivals += CTAS;
    }
    if (RANKS > 1 && warp == 0) {  // the last sum
        if (lane == 0) ranks.wait();
        __syncwarp();
        for (int tile = Down::begin(cta); tile < Down::begin(cta + 1); tile++) {
            const int n = tile * 16 + lane;
            if (lane < 16) x[n] = from_float(ranks.residual(n, to_float(load_cg2(x + n))));
        }
    }
    // The last CTA to exit resets the counters for the next step.
    if (threadIdx.x == 0 && fetch_add(counters + 2) == CTAS - 1) {
        counters[0] = counters[1] = counters[2] = 0;
        for (int i = 0; i < HK; i++) counters[SPLITS_OF + i] = 0;
        counters[3] += ranks.num_sums * (RANKS - 1) * CTAS;
    }
}
