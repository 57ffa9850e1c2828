// Part of `kernel.cu`: attention over a cache of latents, with the interface of attention.cu. It computes
// `OpSet.mla_queries` and `mla_paged_attention` for one token. A cached row is [rotated key R, latent RANK], and all heads
// read the same rows.
//
// A CTA attends over one split of the rows, for one head; in sequences beyond ONE_HEAD_KEYS keys, for HEADS_PER_BLOCK
// heads:
//
// 1. It projects the heads' queries into latent space with `keys` [NOPE, RANK].
// 2. It attends over its rows.
// 3. It projects the sum of latents to values with `values` [D, RANK]. The projection is linear, so projected splits can
//    be merged, as in other attention, and there is no further grid barrier.
//
// `keys`, latents and `values` come through the ring, long before the queries are ready. CTAs of other splits read the
// same `keys` and `values`, which then come from L2. A stage holds 16 rows of RANK numbers. A warp takes 16 / WARPS of
// the rows, a lane 8 of each 256 numbers. Latents are read twice, as keys and as values. They stay in the ring in
// between, because registers have no room for them.
#if LATENT
static_assert(RANK % 256 == 0 && RANK * 2 <= STEP_BYTES && NOPE % 16 == 0 && D % 16 == 0 && R <= 64 && H % HEADS_PER_BLOCK == 0
                  && CACHE == 16,
              "a shape that one_token.py should refuse");
constexpr int LATENT_PER_LANE = RANK / 256 * 8;  // numbers of a latent that a lane holds
constexpr int ROWS_PER_WARP = 16 / WARPS;        // rows of a stage
constexpr int ROPE_PAIRS = R / 2;                // pairs of a rotated key, one per lane
constexpr u32 RING_DEPTH = LATENT_DEPTH < STAGES ? LATENT_DEPTH : STAGES;

DEVICE SplitPlan plan_splits(int length, int = 0) {  // without windows
    const int heads = length <= ONE_HEAD_KEYS ? 1 : HEADS_PER_BLOCK;
    return SplitPlan(length, heads, min(SPLITS, CTAS / (H / heads)));
}

template <typename Pointer>
DEVICE void produce_attention(const SplitPlan& plan, Pointer pointer, const int* table, Producer& producer) {
    if (producer.cta >= plan.num_active) return;
    const Split split_of(plan, producer.cta);
    const int mine = producer.which * (16 / PRODUCER_WARPS) + producer.lane % (16 / PRODUCER_WARPS);
    auto block_of = [&](int key) { return table[min(key, split_of.cached_end - 1) / BLOCK_SIZE]; };
    auto produce = [&](const u8* from, u64 policy) { producer.copy_stage(from, RANK * 2, nullptr, 0, policy, RING_DEPTH); };
    auto weights = [&](const u8* from, int rows) {
        from += ((long long)split_of.head * rows + mine) * RANK * 2;
#pragma unroll 1
        for (int row = 0; row < plan.heads * rows; row += 16) produce(from + row * RANK * 2, producer.evict_first);
    };
    const u64 evict_normal = evict_normal_policy();
    int block = split_of.first < split_of.cached_end ? block_of(split_of.first + mine) : 0;
    weights(pointer(KEYS_W), NOPE);
    const u8* latents = pointer(K_AT) + R * 2;
#pragma unroll 1
    for (int start = split_of.first; start < split_of.cached_end; start += 16) {
        const int key = min(start + mine, split_of.cached_end - 1), here = block;  // beyond the end: the last row again, unused
        block = block_of(start + 16 + mine);
        produce(latents + ((long long)here * BLOCK_SIZE + key % BLOCK_SIZE) * (R + RANK) * 2, evict_normal);
    }
    weights(pointer(VALUES_W), D);
}

template <int HEADS>
struct LatentAttention : Split {
    static constexpr int BATCH = HEADS == 1 && STAGES >= 4 ? 4 : 1;  // stages between two updates of the softmax
    static constexpr int KEYS_PER_WARP = BATCH * ROWS_PER_WARP;

    const int* table;
    u8* cache;
    u32 rope_keys[KEYS_PER_WARP];  // this lane's pair of each of the next rotated keys
    float cos, sin;                // for number threadIdx.x % R of a rotated key
    uint4 norm[RANK / 256];
    long long new_row;

    DEVICE LatentAttention(const SplitPlan& all, int cta, const u64* row, const int* table)
        : Split(all, cta), table(table), cache((u8*)row[K_AT]) {}

    static DEVICE int key_of(int start, int i) {
        return start + i / ROWS_PER_WARP * 16 + threadIdx.x / 32 * ROWS_PER_WARP + i % ROWS_PER_WARP;
    }
    static DEVICE int column(int j) { return j / 8 * 256 + threadIdx.x % 32 * 8 + j % 8; }
    DEVICE void prefetch_rope(int start) {
#pragma unroll
        for (int i = 0; i < KEYS_PER_WARP; i++) {
            const int key = key_of(start, i);
            if (key < cached_end && threadIdx.x % 32 < ROPE_PAIRS) {
                const long long slot = (long long)table[key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
                rope_keys[i] = *(const u32*)(cache + slot * (R + RANK) * 2 + threadIdx.x % 32 * 4);
            }
        }
    }

    // Loads that do not depend on this layer's queries. They are issued before the grid barrier.
    DEVICE void prefetch(const u64* row, const float* angles, int length) {
        const int d = threadIdx.x % R, angle = INTERLEAVED ? d / 2 : d % ROPE_PAIRS;
#pragma unroll
        for (int i = 0; i < KEYS_PER_WARP; i++) rope_keys[i] = 0;
        prefetch_rope(first);
        cos = angles[angle];
        sin = angles[ROPE_PAIRS + angle];
#pragma unroll
        for (int i = 0; i < RANK / 256; i++) norm[i] = ((const uint4*)row[K_NORM])[i * 32 + threadIdx.x % 32];
        new_row = ((long long)table[(length - 1) / BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE) * (R + RANK);
    }
    // Number threadIdx.x % R of `source` [R], rotated.
    DEVICE float rotated(const u16* source) const {
        const int d = threadIdx.x % R, other = INTERLEAVED ? d ^ 1 : (d + ROPE_PAIRS) % R;
        const float sign = (INTERLEAVED ? d % 2 == 0 : d < ROPE_PAIRS) ? -1.0f : 1.0f;
        return to_float(load_cg2(source + d)) * cos + sign * to_float(load_cg2(source + other)) * sin;
    }
    // Call use(row, this lane's numbers) for each of this warp's rows of the stage at `ring`. The stage stays filled.
    template <typename Use>
    static DEVICE void peek(RingPosition& ring, const u8* memory, Use use) {
        const u32 from = smem_address(memory) + RING_AT + ring.stage * STAGE_BYTES + threadIdx.x % 32 * 16;
        uint4 v[ROWS_PER_WARP][RANK / 256];
        barrier_wait(smem_address(memory) + BARRIERS_AT + ring.stage * 16, ring.parity);
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++)
#pragma unroll
            for (int i = 0; i < RANK / 256; i++)
                v[r][i] = load_smem16(from + (threadIdx.x / 32 * ROWS_PER_WARP + r) * ROW_STRIDE + i * 512);
        ring.next();
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            float y[LATENT_PER_LANE];
            unpack_row(v[r], y);
            use(r, y);
        }
    }
    // The same, and then release the stage to the producers.
    template <typename Use>
    static DEVICE void consume(RingPosition& ring, const u8* memory, Use use) {
        const u32 empty = smem_address(memory) + BARRIERS_AT + ring.stage * 16 + 8;
        peek(ring, memory, use);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }
    static DEVICE void unpack_row(const uint4 (&v)[RANK / 256], float (&y)[LATENT_PER_LANE]) {
#pragma unroll
        for (int i = 0; i < RANK / 256; i++) unpack8(v[i], y + i * 8);
    }
    // Sum each of N numbers over a warp's lanes. Then y[0] of lane i is the sum of number i / (32 / N).
    template <int N, int MASK = 16>
    static DEVICE void reduce_lanes(float* y) {
        if constexpr (N > 1) {
            const bool upper = threadIdx.x & MASK;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float given = upper ? y[i] : y[i + N / 2];
                y[i] = (upper ? y[i + N / 2] : y[i]) + __shfl_xor_sync(~0u, given, MASK);
            }
            reduce_lanes<N / 2, MASK / 2>(y);
        } else if constexpr (MASK > 0) {
            y[0] += __shfl_xor_sync(~0u, y[0], MASK);
            reduce_lanes<1, MASK / 2>(y);
        }
    }
    // Load and store a lane's numbers of a latent in shared memory.
    static DEVICE void load(const float* from, float (&y)[LATENT_PER_LANE]) {
#pragma unroll
        for (int j = 0; j < LATENT_PER_LANE; j += 4) {
            const float4 v = *(const float4*)(from + column(j));
            y[j] = v.x, y[j + 1] = v.y, y[j + 2] = v.z, y[j + 3] = v.w;
        }
    }
    static DEVICE void store(const float (&y)[LATENT_PER_LANE], float* to) {
#pragma unroll
        for (int j = 0; j < LATENT_PER_LANE; j += 4) *(float4*)(to + column(j)) = float4{y[j], y[j + 1], y[j + 2], y[j + 3]};
    }
    // Call use(column, sum over the warps) for each column of `sums` [WARPS, RANK].
    template <typename Use>
    static DEVICE void reduce_warps(const float* sums, Use use) {
        sync_consumers();
        for (int c = threadIdx.x; c < RANK; c += THREADS) {
            float y = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) y += sums[i * RANK + c];
            use(c, y);
        }
    }

    DEVICE void run(const u16* qkv, float* partials, float* softmax, RingPosition& ring, u8* memory) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        constexpr float FACTOR = SCALE * 1.4426950408889634f;
        float* q = (float*)(memory + INPUT_AT);  // [HEADS, RANK]: queries in latent space; later the sums of latents
        float* sums = q + HEADS * RANK;          // [WARPS, RANK]
        float* fresh = sums + WARPS * RANK;      // the new row: latent, rotated key
        float* q_nope = fresh + RANK + R;        // [NOPE], of one head at a time
        float* q_rope = q_nope + NOPE;           // [HEADS, R]
        float* maxima = q_rope + HEADS * R;      // [WARPS, 2]: a warp's largest score and sum of weights
        // --- the new row
        if (has_new_key) {
            if (warp == WARPS - 1) {
                float x[LATENT_PER_LANE], by[LATENT_PER_LANE], squares = 0.0f;
#pragma unroll
                for (int i = 0; i < RANK / 256; i++)
                    unpack8(load_cg16((const uint4*)(qkv + QKV_ROWS) + i * 32 + lane), x + i * 8);
#pragma unroll
                for (int j = 0; j < LATENT_PER_LANE; j++) squares += x[j] * x[j];
                const float factor = rsqrtf(warp_reduce(squares) / RANK + LATENT_EPS);
                unpack_row(norm, by);
#pragma unroll
                for (int j = 0; j < LATENT_PER_LANE; j++) {
                    const u16 code = finite(x[j] * factor * by[j]);
                    if (head == 0) ((u16*)cache)[new_row + R + column(j)] = code;
                    x[j] = to_float(code);
                }
                store(x, fresh);
            }
            if (threadIdx.x < R) {
                const u16 code = finite(rotated(qkv + QKV_ROWS + RANK));
                if (head == 0) ((u16*)cache)[new_row + threadIdx.x] = code;
                fresh[RANK + threadIdx.x] = to_float(code);
            }
        }
        // --- the queries, projected into latent space
#pragma unroll 1
        for (int g = 0; g < HEADS; g++) {
            const u16* source = qkv + (head + g) * (NOPE + R);
            for (int i = threadIdx.x; i < NOPE; i += THREADS) q_nope[i] = to_float(load_cg2(source + i));
            if (threadIdx.x < R) q_rope[g * R + threadIdx.x] = to_float(from_float(rotated(source + NOPE))) * FACTOR;
            sync_consumers();
            float sum[LATENT_PER_LANE] = {};
#pragma unroll 1
            for (int start = 0; start < NOPE; start += 16)
                consume(ring, memory, [&](int r, const float(&y)[LATENT_PER_LANE]) {
                    const float by = q_nope[start + warp * ROWS_PER_WARP + r];
#pragma unroll
                    for (int j = 0; j < LATENT_PER_LANE; j++) sum[j] += by * y[j];
                });
            store(sum, sums + warp * RANK);
            reduce_warps(sums, [&](int c, float y) { q[g * RANK + c] = to_float(from_float(y)) * FACTOR; });
        }
        sync_consumers();
        // --- attention over the rows
        float query[LATENT_PER_LANE], sum[HEADS][LATENT_PER_LANE], top[HEADS], total[HEADS], pair[HEADS][2], x[LATENT_PER_LANE];
        const bool has_pair = lane < ROPE_PAIRS;
        load(q, query);  // stays loaded if HEADS is 1
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            pair[g][0] = has_pair ? q_rope[g * R + 2 * lane] : 0.0f;
            pair[g][1] = has_pair ? q_rope[g * R + 2 * lane + 1] : 0.0f;
            top[g] = -1e30f, total[g] = 0.0f;
#pragma unroll
            for (int j = 0; j < LATENT_PER_LANE; j++) sum[g][j] = 0.0f;
        }
        if (has_new_key && warp == 0) {
            load(fresh, x);
            const float low = has_pair ? fresh[RANK + 2 * lane] : 0.0f, high = has_pair ? fresh[RANK + 2 * lane + 1] : 0.0f;
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float score = pair[g][0] * low + pair[g][1] * high;
                if (HEADS > 1) load(q + g * RANK, query);
#pragma unroll
                for (int j = 0; j < LATENT_PER_LANE; j++) score += query[j] * x[j], sum[g][j] = x[j];
                top[g] = warp_reduce(score), total[g] = 1.0f;
            }
        }
#pragma unroll 1
        for (int start = first; start < cached_end; start += BATCH * 16) {
            float scores[HEADS][KEYS_PER_WARP] = {};
            RingPosition ahead = ring;
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (start + b * 16 < cached_end)
                    peek(ahead, memory, [&](int r, const float(&y)[LATENT_PER_LANE]) {
                        const u32 own = rope_keys[b * ROWS_PER_WARP + r];
#pragma unroll
                        for (int g = 0; g < HEADS; g++) {
                            float score = pair[g][0] * to_float((u16)own) + pair[g][1] * to_float((u16)(own >> 16));
                            if (HEADS > 1) load(q + g * RANK, query);
#pragma unroll
                            for (int j = 0; j < LATENT_PER_LANE; j++) score += query[j] * y[j];
                            scores[g][b * ROWS_PER_WARP + r] = score;
                        }
                    });
            prefetch_rope(start + BATCH * 16);
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float highest = top[g];
#pragma unroll
                for (int i = 0; i < KEYS_PER_WARP; i++) {
                    scores[g][i] = warp_reduce(scores[g][i]);
                    if (key_of(start, i) >= cached_end) scores[g][i] = -1e30f;
                    highest = fmaxf(highest, scores[g][i]);
                }
                const float rescale = exp2_fast(top[g] - highest);
                total[g] *= rescale;
                top[g] = highest;
#pragma unroll
                for (int j = 0; j < LATENT_PER_LANE; j++) sum[g][j] *= rescale;
#pragma unroll
                for (int i = 0; i < KEYS_PER_WARP; i++) {
                    scores[g][i] = key_of(start, i) < cached_end ? exp2_fast(scores[g][i] - highest) : 0.0f;
                    total[g] += scores[g][i];
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (start + b * 16 < cached_end)
                    consume(ring, memory, [&](int r, const float(&y)[LATENT_PER_LANE]) {
#pragma unroll
                        for (int g = 0; g < HEADS; g++)
#pragma unroll
                            for (int j = 0; j < LATENT_PER_LANE; j++) sum[g][j] += scores[g][b * ROWS_PER_WARP + r] * y[j];
                    });
        }
        // --- merge the warps' sums, project them to values
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            if (lane == 0) maxima[warp * 2] = top[g], maxima[warp * 2 + 1] = total[g];
            sync_consumers();
            float highest = maxima[0], all = 0.0f;
#pragma unroll
            for (int i = 1; i < WARPS; i++) highest = fmaxf(highest, maxima[i * 2]);
#pragma unroll
            for (int i = 0; i < WARPS; i++) all += maxima[i * 2 + 1] * exp2_fast(maxima[i * 2] - highest);
            const float rescale = exp2_fast(top[g] - highest);
#pragma unroll
            for (int j = 0; j < LATENT_PER_LANE; j++) x[j] = sum[g][j] * rescale;
            store(x, sums + warp * RANK);
            reduce_warps(sums, [&](int c, float y) { q[g * RANK + c] = y; });
            if (threadIdx.x == 0) {
                float* own = softmax + (split * H + head + g) * 2;
                own[0] = highest;
                own[1] = all;
            }
        }
        sync_consumers();
#pragma unroll 1
        for (int g = 0; g < HEADS; g++) {
            constexpr int VALUES = D / 16 * ROWS_PER_WARP;  // rows of `values` that this warp multiplies
            float value[VALUES];
            load(q + g * RANK, x);
#pragma unroll
            for (int step = 0; step < D / 16; step++)
                consume(ring, memory, [&](int r, const float(&y)[LATENT_PER_LANE]) {
                    float& own = value[step * ROWS_PER_WARP + r];
                    own = 0.0f;
#pragma unroll
                    for (int j = 0; j < LATENT_PER_LANE; j++) own += x[j] * y[j];
                });
            static_assert(VALUES <= 32 && (VALUES & (VALUES - 1)) == 0, "reduce_lanes halves their number until one is left");
            reduce_lanes<VALUES>(value);
            const int which = lane / (32 / VALUES);
            const int d = which / ROWS_PER_WARP * 16 + warp * ROWS_PER_WARP + which % ROWS_PER_WARP;
            if (lane % (32 / VALUES) == 0) partials[(long long)split * Q + (head + g) * D + d] = value[0];
        }
        sync_consumers();
    }
};

template <int HEADS>
DEVICE void attend_with(const SplitPlan& plan, int cta, const u64* row, const int* table, const float* angles,
                        const u16* qkv, float* partials, float* softmax, const u32* counters, u32 arrivals,
                        RingPosition& ring, u8* memory) {
    LatentAttention<HEADS> a(plan, cta, row, table);
    a.prefetch(row, angles, plan.length);
    grid_wait(counters, arrivals);
    a.run(qkv, partials, softmax, ring, memory);
}
DEVICE void attend(const SplitPlan& plan, int cta, const u64* row, const int* table, const float* angles, const u16* qkv,
                   float* partials, float* softmax, const u32* counters, u32 arrivals, RingPosition& ring, u8* memory) {
    if (plan.heads == 1)
        attend_with<1>(plan, cta, row, table, angles, qkv, partials, softmax, counters, arrivals, ring, memory);
    else
        attend_with<HEADS_PER_BLOCK>(plan, cta, row, table, angles, qkv, partials, softmax, counters, arrivals, ring, memory);
}
#endif
