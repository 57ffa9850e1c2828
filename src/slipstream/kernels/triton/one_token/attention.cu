// Part of `kernel.cu`: rope, cache write and attention of one token, out = Σ softmax(scale · q k) v.
//
// The keys of a kv head are divided into splits (Flash-Decoding, Dao et al., 2023). A CTA attends over one split. It
// writes the unnormalised sum of values, the largest score, and the sum of weights. The last CTA of a head merges its splits,
// with a query head's learned score (a sink) where it has one. If all CTAs merged all splits as they load the input of the
// output product, they would read 32 KB to 262 KB each. In a layer with a window the keys before it are in no split.
//
// `kernel.cu` calls `plan_splits`, `produce_attention` (producer warps) and `attend` (consumer warps). For latent
// attention mla.cu defines these three.

// How many splits a head's keys have. Splits are merged one after the other, so short splits cost more than they save.
DEVICE int num_splits(int length, int most) {
    const int wanted = (length + 63) / 64, enough = length <= 1024 ? 8 : length <= 16384 ? 16 : length / 1024;
    return min(wanted, min(enough, most));
}

// The first `num_active` CTAs attend. Each has one split of the keys, for `heads` kv heads.
// The splits begin at the key `begin`. Keys before `visible` are masked: a cache of 8 bits is read 16 keys at a time.
struct SplitPlan {
    int length, heads, visible, begin, splits, keys_per_split, num_active;
    DEVICE SplitPlan(int length, int heads, int most, int window = 0)
        : length(length),
          heads(heads),
          visible(WINDOWS && window && window < length ? length - window : 0),
          begin(KV_BYTES == 2 ? visible : visible / 16 * 16),
          splits(num_splits(length - begin, most)),
          keys_per_split(((length - begin + splits - 1) / (splits ? splits : 1) + 63) / 64 * 64),  // padding has no splits
          num_active(splits * (HK / heads)) {}
    DEVICE int num_groups() const { return splits ? HK / heads : 0; }  // groups of `heads` kv heads, which share CTAs
    DEVICE int group_of(int cta) const { return cta % (HK / heads); }
};
struct Split {
    int head, split, first, cached_end, visible;  // `head`: the first head; cached keys are first … cached_end − 1
    bool has_new_key;                             // the token's own key is in this split
    DEVICE Split(const SplitPlan& all, int cta)
        : head(all.group_of(cta) * all.heads),
          split(cta / (HK / all.heads)),
          first(all.begin + split * all.keys_per_split),
          cached_end(min(first + all.keys_per_split, all.length - 1)),
          visible(all.visible),
          has_new_key(all.length - 1 < first + all.keys_per_split && all.length - 1 >= first) {}
    DEVICE bool has(int key) const { return key < cached_end && (!WINDOWS || KV_BYTES == 2 || key >= visible); }
};

// Count a split whose results this CTA has written. The last CTA of a group of heads writes what they attended to, [Q] of the
// model's type. `splits`: those of a group up to this layer's.
DEVICE void merge_splits(const SplitPlan& plan, int cta, const u64* row, const float* partials, const float* softmax,
                         u16* attention, u32* counters, u32 splits, u8* memory) {
    u32* is_last = (u32*)(memory + SCRATCH_AT);
    sync_consumers();
    if (threadIdx.x == 0) *is_last = fetch_add(counters + SPLITS_OF + plan.group_of(cta)) == splits - 1;
    sync_consumers();
    if (!*is_last) return;
    constexpr int IN_FLIGHT = 8;  // splits whose loads are in flight
    const int numbers = plan.heads * G * D, begin = plan.group_of(cta) * numbers;
    for (int at = begin + threadIdx.x * 4; at < begin + numbers; at += THREADS * 4) {
        const int head = at / D;
        float top = -1e30f, total = 0.0f, y[4] = {};
        if (SINKED) top = 1.4426950408889634f * to_float(((const u16*)row[SINKS])[head]), total = 1.0f;
        for (int from = 0; from < plan.splits; from += IN_FLIGHT) {
            uint4 part[IN_FLIGHT];
            float maxima[IN_FLIGHT], totals[IN_FLIGHT], highest = top;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                const int split = min(from + i, plan.splits - 1);
                part[i] = load_cg16(partials + (long long)split * Q + at);
                maxima[i] = load_cg4(softmax + (split * H + head) * 2);
                totals[i] = load_cg4(softmax + (split * H + head) * 2 + 1);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) highest = fmaxf(highest, from + i < plan.splits ? maxima[i] : highest);
            const float rescale = exp2_fast(top - highest);
            total *= rescale;
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] *= rescale;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                const float w = from + i < plan.splits ? exp2_fast(maxima[i] - highest) : 0.0f;
                const u32 words[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
                total += w * totals[i];
#pragma unroll
                for (int j = 0; j < 4; j++) y[j] += w * __uint_as_float(words[j]);
            }
            top = highest;
        }
        *(uint2*)(attention + at) = make_uint2(pack2(y[0] / total, y[1] / total), pack2(y[2] / total, y[3] / total));
    }
    sync_consumers();
    if (threadIdx.x == 0) release_add(counters + 1);
}

DEVICE u16 finite(float x) {
    const u16 code = from_float(x);
    return fabsf(to_float(code)) < __int_as_float(0x7f800000) ? code : 0;
}
// Store x in the cache, and return the value that was stored. It is always finite: attention reads whole blocks, and
// multiplies what is beyond the end by 0.
DEVICE float store_cached(float x, float scale, u8* to, long long at) {
    if (CACHE == 16) {
        const u16 code = finite(x);
        ((u16*)to)[at] = code;
        return to_float(code);
    }
    x = fabsf(x) < __int_as_float(0x7f800000) ? x / scale : 0.0f;
    if (CACHE == 8) {
        const u32 code = pack_e4m3(x, 0.0f);
        float low, high;
        unpack_e4m3(code, low, high);
        to[at] = (u8)code;
        return low;
    }
    const int code = __float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f));
    to[at] = (u8)code;
    return (float)code;
}

// Each warp attends to KEYS keys at a time, on tensor cores: scores [16 keys, 8 heads] = K [16, D] · q [D, 8], and the sum of
// values [D, 8 heads] = V [D, 16 keys] · weights [16, 8]. Operands go from memory to registers, 16 bytes to a lane where they
// lie together; the loads of the next keys are in flight while these are computed. Warps meet once, at the end.
//
// Lane (g, t) = (lane / 4, lane % 4) has rows g and g + 8 of a tile of K or V. The order of a sum is free, so the numbers of a
// row that a lane has are consecutive. An 8-bit cache becomes float16; it holds values by dimension, 16 keys to 16 bytes, so
// lane t has keys t · KEYS / 4 … of each dimension, and the rows of K follow that order. A cache of 16 bits holds values by
// key, and `transposed` turns them.
struct Attention : Split {
    static constexpr int KEYS = KV_BYTES * D <= 128 ? 32 : 16, TILES = KEYS / 16;
    static constexpr int WORDS = D * KV_BYTES < 64 ? D * KV_BYTES / 16 : 4;  // a lane's words of a chunk of a key
    static constexpr int CHUNKS = D * KV_BYTES / 16 / WORDS, NUMBERS = WORDS * 4 / KV_BYTES, STEPS = NUMBERS / 4;
    static constexpr int DIMS = D / 16;  // tiles of dimensions
    // Values are loaded in slices of the dimensions, the first ahead: of wide heads all would take too many registers.
    static constexpr int SLICES = D > 128 ? 2 * KV_BYTES : 1, VALUE_WORDS = KV_BYTES == 1 ? TILES : 2 * TILES;
    static constexpr int BLOCKS = KV_BYTES == 1 ? 2 : 2 * TILES;  // table entries of a lane's rows
    static constexpr bool HALVES = KV_BYTES == 1 || HALF;         // float16 operands

    const int* table;
    u8 *k, *v;
    int blocks[BLOCKS];  // of the next keys; −1 beyond the end
    u32 keys[TILES][2][CHUNKS][WORDS], values[DIMS / SLICES][2][VALUE_WORDS];
    float k_scale, v_scale, cos[HEAD_PER_LANE], sin[HEAD_PER_LANE];
    long long block;  // the new key's block · HK + head

    DEVICE Attention(const SplitPlan& all, int cta, const u64* row, const int* table)
        : Split(all, cta), table(table), k((u8*)row[K_AT]), v((u8*)row[V_AT]) {}
    static DEVICE int group() { return threadIdx.x % 32 / 4; }
    static DEVICE int quarter() { return threadIdx.x % 4; }
    DEVICE int begin() const { return first + threadIdx.x / 32 * KEYS; }
    // The key of row g or g + 8 (`half`) of a tile, of those that the warp attends to.
    static DEVICE int key_of(int tile, int half) {
        return KV_BYTES == 1 ? group() / 2 * (KEYS / 4) + tile * 4 + half * 2 + group() % 2 : tile * 16 + half * 8 + group();
    }
    // The dimension of row g or g + 8 of a tile of values.
    static DEVICE int dim_of(int tile, int half) {
        return KV_BYTES == 1 ? tile * 16 + half * 8 + group()
                             : tile / 2 * 32 + group() / 2 * 8 + tile % 2 * 4 + half * 2 + group() % 2;
    }
    DEVICE void find_blocks(int start) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int own = KV_BYTES == 1 ? (i ? quarter() : group() / 2) * (KEYS / 4) : key_of(i / 2, i % 2);
            blocks[i] = start + own < cached_end ? table[(start + own) / BLOCK_SIZE] : -1;
        }
    }
    // Byte offset of this head's part of a block.
    DEVICE long long part_of(int found) const { return ((long long)found * HK + head) * (BLOCK_SIZE * D * KV_BYTES); }
    template <int COUNT>
    static DEVICE void load(u32 (&to)[COUNT], const u8* from, int offset = 0) {
        if constexpr (COUNT == 1) to[0] = *(const u32*)from;
        else if constexpr (COUNT == 2) {
            const uint2 words = *(const uint2*)from;
            to[0] = words.x, to[1] = words.y;
        } else {
            const uint4 words = *(const uint4*)from;
            to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
        }
    }
    DEVICE void load_keys(int start) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int found = blocks[KV_BYTES == 1 ? 0 : tile * 2 + half], key = start + key_of(tile, half);
                const u8* from = k + part_of(found) + key % BLOCK_SIZE * (D * KV_BYTES) + quarter() * (WORDS * 4);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    if (found >= 0) load(keys[tile][half][c], from + c * (WORDS * 16));
                    else
#pragma unroll
                        for (int i = 0; i < WORDS; i++) keys[tile][half][c][i] = 0;
            }
    }
    // The values of the keys from `start` on, whose entries are `found`.
    DEVICE void load_values(int start, int slice, const int (&found)[BLOCKS]) {
        if constexpr (KV_BYTES == 1) {
            const u8* from = v + part_of(found[1]) + (start + quarter() * (KEYS / 4)) % BLOCK_SIZE;
#pragma unroll
            for (int tile = 0; tile < DIMS / SLICES; tile++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (found[1] >= 0)
                        load(values[tile][half], from + dim_of(slice * (DIMS / SLICES) + tile, half) * BLOCK_SIZE);
                    else
#pragma unroll
                        for (int i = 0; i < VALUE_WORDS; i++) values[tile][half][i] = 0;
        } else {  // the words of two tiles of dimensions lie together
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                const int key = start + key_of(i / 2, i % 2);
                const u8* from = v + part_of(found[i]) + key % BLOCK_SIZE * (D * 2) + quarter() * 16;
#pragma unroll
                for (int c = 0; c < DIMS / SLICES / 2; c++) {
                    u32 words[4] = {};
                    if (found[i] >= 0) load(words, from + (slice * (DIMS / SLICES / 2) + c) * 64);
#pragma unroll
                    for (int n = 0; n < 4; n++) values[c * 2 + n / 2][n % 2][i] = words[n];
                }
            }
        }
    }

    // Loads that do not depend on this layer's q, k and v. They are issued before the grid barrier.
    DEVICE void prefetch(const u64* row, const float* angles, int length) {
        find_blocks(begin());
        load_keys(begin());
        load_values(begin(), 0, blocks);
        k_scale = CACHE == 16 ? 1.0f : ((const float*)row[K_SCALE])[head];
        v_scale = CACHE == 16 ? 1.0f : ((const float*)row[V_SCALE])[head];
        block = (long long)table[(length - 1) / BLOCK_SIZE] * HK + head;
#pragma unroll
        for (int i = 0; i < HEAD_PER_LANE; i++) {
            const int d = i * 32 + threadIdx.x % 32, angle = INTERLEAVED ? d / 2 : d % (R / 2 ? R / 2 : 1);
            cos[i] = d < R ? angles[angle] : 1.0f;
            sin[i] = d < R ? angles[R / 2 + angle] : 0.0f;
        }
    }

    // Four numbers of a cached row, from word `step` (8 bits) or words 2 `step` and 2 `step` + 1, as pairs.
    template <int COUNT>
    static DEVICE uint2 pairs(const u32 (&words)[COUNT], int step) {
        uint2 found;
        if constexpr (KV_BYTES == 1) widen_codes<CACHE == 8>(words[step], found.x, found.y);
        else found = make_uint2(words[2 * step % COUNT], words[(2 * step + 1) % COUNT]);
        return found;
    }

    // Write this split's unnormalised sums of values to `partials` [SPLITS, H, D], and its largest score and sum of
    // weights to `softmax` [SPLITS, H, 2].
    DEVICE void run(const u64* row, const u16* qkv, int length, float* partials, float* softmax, u8* memory) {
        u16* q = (u16*)(memory + INPUT_AT);  // [G, D], in the operands' type
        float* new_k = (float*)(q + G * D);
        float* new_v = new_k + D;
        float* raw = new_v + D;              // [G + 2, D]
        float* maxima = raw + (G + 2) * D;   // [WARPS + 1, 8]: largest scores; last, those of the new key
        float* totals = maxima + (WARPS + 1) * 8;  // [WARPS, 8]: sums of weights
        float* sums = totals + WARPS * 8;          // [WARPS, G, D]
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const float factor = SCALE * 1.4426950408889634f * k_scale;
        for (int which = warp; which < G + 2 * has_new_key; which += WARPS) {
            const bool is_q = which < G, is_v = which == G + 1;
            const u16* source = qkv + (is_q ? head * G + which : is_v ? H + HK + head : H + head) * D;
            float x[HEAD_PER_LANE], squares = 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD_PER_LANE; i++) {
                x[i] = i * 32 + lane < D ? to_float(load_cg2(source + i * 32 + lane)) : 0.0f;
                squares += x[i] * x[i];
            }
            if (QK_NORM && !is_v) {
                const float by = rsqrtf(warp_reduce(squares) / D + QK_EPS);
                const u16* weight = (const u16*)row[is_q ? Q_NORM : K_NORM];
#pragma unroll
                for (int i = 0; i < HEAD_PER_LANE; i++)
                    if (i * 32 + lane < D) x[i] *= by * (to_float(weight[i * 32 + lane]) + QK_OFFSET);
            }
            float* own = raw + which * D;
#pragma unroll
            for (int i = 0; i < HEAD_PER_LANE; i++)
                if (i * 32 + lane < D) own[i * 32 + lane] = x[i];
            __syncwarp();
            const int inside = (length - 1) % BLOCK_SIZE;
            const long long key_at = (block * BLOCK_SIZE + inside) * D;
#pragma unroll
            for (int i = 0; i < HEAD_PER_LANE; i++) {
                const int d = i * 32 + lane;
                if (d >= D) continue;
                float y = x[i];
                if (!is_v && d < R) {
                    const int other = INTERLEAVED ? d ^ 1 : (d + R / 2) % (R ? R : 1);
                    const float sign = (INTERLEAVED ? d % 2 == 0 : d < R / 2) ? -1.0f : 1.0f;
                    y = y * cos[i] + sign * own[other] * sin[i];
                }
                if (is_q) {
                    const float rounded = to_float(from_float(y));
                    q[which * D + d] = HALVES ? (u16)pack_halves(rounded, 0.0f) : from_float(y);
                } else if (is_v)
                    new_v[d] = store_cached(y, v_scale, v, KV_BYTES == 1 ? (block * D + d) * BLOCK_SIZE + inside : key_at + d);
                else
                    new_k[d] = store_cached(y, k_scale, k, key_at + d);
            }
        }
        sync_consumers();
        for (int g = warp; g < G; g += WARPS) {
            float score = 0.0f;
            if (has_new_key)
                for (int d = lane; d < D; d += 32) {
                    float number = to_float(q[g * D + d]), unused;
                    if (HALVES) unpack_half2(q[g * D + d], number, unused);
                    score += number * new_k[d];
                }
            score = warp_reduce(score) * factor;
            if (lane == 0) maxima[WARPS * 8 + g] = has_new_key ? score : -1e30f;
        }
        float acc[DIMS][4] = {}, top[2] = {-1e30f, -1e30f}, total[2] = {};  // of heads 2 t and 2 t + 1
        const u32 queries = smem_address(q) + min(group(), G - 1) * (D * 2) + quarter() * (NUMBERS * 2);
#pragma unroll 1
        for (int start = begin(); start < cached_end; start += WARPS * KEYS) {
            const int next = start + WARPS * KEYS;
            int here[BLOCKS];
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) here[i] = blocks[i];
            find_blocks(next);
            float scores[TILES][4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int step = 0; step < STEPS; step += 2) {
                    const uint4 given = load_smem16(queries + (c * 4 * NUMBERS + step * 4) * 2);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const uint2 upper = pairs(keys[tile][0][c], step + i), lower = pairs(keys[tile][1][c], step + i);
                            mma16<HALVES>(scores[tile], upper.x, lower.x, upper.y, lower.y, i ? given.z : given.x,
                                          i ? given.w : given.y);
                        }
                }
            if (next < cached_end) load_keys(next);
            float highest[2] = {top[0], top[1]};
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& own = scores[tile][i];
                    own = has(start + key_of(tile, i / 2)) ? own * factor : -2e30f;
                    highest[i % 2] = fmaxf(highest[i % 2], own);
                }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int by = 4; by < 32; by *= 2) highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], by));
                const float rescale = exp2_fast(top[i] - highest[i]);
                total[i] *= rescale;
                top[i] = highest[i];
#pragma unroll
                for (int tile = 0; tile < DIMS; tile++) acc[tile][i] *= rescale, acc[tile][i + 2] *= rescale;
            }
            uint2 weights[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[tile][i] = exp2_fast(scores[tile][i] - top[i % 2]);
                    total[i % 2] += scores[tile][i];
                }
                weights[tile].x = transposed(pack16<HALVES>(scores[tile][0], scores[tile][1]));
                weights[tile].y = transposed(pack16<HALVES>(scores[tile][2], scores[tile][3]));
            }
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                if (slice) load_values(start, slice, here);
#pragma unroll
                for (int n = 0; n < DIMS / SLICES; n++)
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        float(&own)[4] = acc[slice * (DIMS / SLICES) + n];
                        if constexpr (KV_BYTES == 1) {
                            const uint2 upper = pairs(values[n][0], tile), lower = pairs(values[n][1], tile);
                            mma16<HALVES>(own, upper.x, lower.x, upper.y, lower.y, weights[tile].x, weights[tile].y);
                        } else
                            mma16<HALVES>(own, transposed(values[n][0][tile * 2]), transposed(values[n][1][tile * 2]),
                                          transposed(values[n][0][tile * 2 + 1]), transposed(values[n][1][tile * 2 + 1]),
                                          weights[tile].x, weights[tile].y);
                    }
            }
            if (next < cached_end) load_values(next, 0, blocks);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int by = 4; by < 32; by *= 2) total[i] += __shfl_xor_sync(~0u, total[i], by);
            const int g = quarter() * 2 + i;
            if (group() == 0) maxima[warp * 8 + g] = top[i], totals[warp * 8 + g] = total[i];
            if (g < G)
#pragma unroll
                for (int tile = 0; tile < DIMS; tile++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        sums[(warp * G + g) * D + dim_of(tile, half)] = acc[tile][half * 2 + i];
        }
        sync_consumers();
        for (int i = threadIdx.x; i < G * D; i += THREADS) {
            const int g = i / D;
            float highest = maxima[WARPS * 8 + g];
#pragma unroll
            for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, maxima[w * 8 + g]);
            const float weight = has_new_key ? exp2_fast(maxima[WARPS * 8 + g] - highest) : 0.0f;
            float y = has_new_key ? weight * new_v[i % D] : 0.0f, all = weight;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float by = exp2_fast(maxima[w * 8 + g] - highest);
                y += by * sums[w * G * D + i];
                all += by * totals[w * 8 + g];
            }
            partials[(long long)split * Q + head * G * D + i] = y * v_scale;
            if (i % D == 0) {
                float* own = softmax + (split * H + head * G + g) * 2;
                own[0] = highest;
                own[1] = all;
            }
        }
        sync_consumers();
    }
};

#if !LATENT
DEVICE SplitPlan plan_splits(int length, int window = 0) { return SplitPlan(length, 1, SPLITS, window); }
// The first cached keys (one producer warp) and values (another) of this CTA's split, into L2, while the weights of q, k and v
// arrive: what all CTAs prefetch must fit into it.
constexpr int PREFETCHED = 128 << 10;
template <typename Pointer>
DEVICE void produce_attention(const SplitPlan& all, Pointer pointer, const int* table, Producer& producer) {
    const SplitPlan plan = WINDOWS ? plan_splits(all.length, (int)(u64)pointer(WINDOW)) : all;
    const u8 *k = pointer(K_AT), *v = pointer(V_AT);
    if (producer.cta >= plan.num_active) return;
    const Split own(plan, producer.cta);
    constexpr int BYTES = BLOCK_SIZE * D * KV_BYTES;
    const int end = min(own.cached_end, own.first + PREFETCHED / (2 * D * KV_BYTES));
    for (int block = own.first / BLOCK_SIZE + producer.lane; block * BLOCK_SIZE < end; block += 32)
        for (int i = producer.which; i < 2; i += PRODUCER_WARPS)
            bulk_prefetch((i ? v : k) + ((long long)table[block] * HK + own.head) * BYTES, BYTES);
}
DEVICE void attend(const SplitPlan& plan, int cta, const u64* row, const int* table, const float* angles, const u16* qkv,
                   float* partials, float* softmax, const u32* counters, u32 arrivals, RingPosition&, u8* memory) {
    Attention a(plan, cta, row, table);
    a.prefetch(row, angles, plan.length);
    grid_wait(counters, arrivals);
    a.run(row, qkv, plan.length, partials, softmax, memory);
}
#endif
