// Part of `one_token.cu`: rope, cache write and attention of one token, out = Σ softmax(scale · q k) v.
//
// The keys of a kv head are divided into splits (Flash-Decoding, Dao et al., 2023). A CTA attends over one split. It
// writes the unnormalised sum of values, the largest score, and the sum of weights. The last CTA of a head merges its splits,
// with a query head's learned score (a sink) where it has one. If all CTAs merged all splits as they load the input of the
// output product, they would read 32 KB to 262 KB each. In a layer with a window the keys before it are in no split.
//
// `one_token.cu` calls `plan_splits`, `produce_attention` (producer warps) and `attend` (consumer warps). For latent
// attention one_token_mla.cu defines these three.

// How many splits a head's keys have. Splits are merged one after the other, so short splits cost more than they save.
DEVICE int num_splits(int length, int most) {
    const int wanted = (length + 63) / 64, least = length <= 1024 ? most < 8 ? most : 8 : most;
    return wanted < least ? wanted : least;
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

DEVICE void widen_cached(const uint4& v, float* y) {  // 16 bytes of the cache → float32
    if (CACHE == 16) return unpack8(v, y);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (CACHE == 8) {
            unpack_e4m3(words[i], y[4 * i], y[4 * i + 1]);
            unpack_e4m3(words[i] >> 16, y[4 * i + 2], y[4 * i + 3]);
        } else
#pragma unroll
            for (int j = 0; j < 4; j++) y[4 * i + j] = (float)(signed char)(words[i] >> 8 * j);
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

struct Attention : Split {
    const int* table;  // the sequence's KV block table
    u8 *k, *v;
    uint4 keys[UNROLL], values[UNROLL];
    float k_scale, v_scale, cos[HEAD_PER_LANE], sin[HEAD_PER_LANE];
    long long block;  // the new key's block · HK + head

    DEVICE Attention(const SplitPlan& all, int cta, const u64* row, const int* table)
        : Split(all, cta), table(table), k((u8*)row[K_AT]), v((u8*)row[V_AT]) {}
    // Byte offset, in k or v, of this head's part of a key's block.
    DEVICE long long block_of(int key) const {
        return ((long long)table[key / BLOCK_SIZE] * HK + head) * (BLOCK_SIZE * D * KV_BYTES);
    }
    // This lane's 16 bytes of a key, or of a value in a cache of 16 bits, which has the same layout.
    DEVICE uint4 load_lane(const u8* from, int key) const {
        return *(const uint4*)(from + block_of(key) + key % BLOCK_SIZE * (D * KV_BYTES) + threadIdx.x % LANES_PER_KEY * 16);
    }
    DEVICE void prefetch_keys(int start) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int key = start + i * KEYS_PER_PASS + threadIdx.x / LANES_PER_KEY;
            if (key < cached_end) keys[i] = load_lane(k, key);
        }
    }
    DEVICE void prefetch_values(int start) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (KV_BYTES == 2) {
                const int key = start + i * KEYS_PER_PASS + threadIdx.x / LANES_PER_KEY;
                if (key < cached_end) values[i] = load_lane(v, key);
            } else {  // 16 keys of one dimension
                const int key = start + (i * PARTIALS + threadIdx.x / D) * 16;
                if (key < cached_end)
                    values[i] = *(const uint4*)(v + block_of(key) + threadIdx.x % D * BLOCK_SIZE + key % BLOCK_SIZE);
            }
    }

    // Loads that do not depend on this layer's q, k and v. They are issued before the grid barrier.
    DEVICE void prefetch(const u64* row, const float* angles, int length) {
        prefetch_keys(first);
        prefetch_values(first);
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

    // Write this split's unnormalised sums of values to `partials` [SPLITS, H, D], and its largest score and sum of
    // weights to `softmax` [SPLITS, H, 2].
    DEVICE void run(const u64* row, const u16* qkv, int length, float* partials, float* softmax, u8* memory) {
        float* q = (float*)(memory + INPUT_AT);  // [G, D], permuted: 4 numbers of a lane, then the next lane's 4
        float* new_k = q + G * D;
        float* new_v = new_k + D;
        float* raw = new_v + D;  // [G + 2, D]
        float* scores = raw + (G + 2) * D;  // [G, CHUNK_KEYS]
        float* rescales = scores + G * CHUNK_KEYS;  // [G]: exp(previous maximum − new maximum)
        float* sums = rescales + G;                 // [PARTIALS, G, D]
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
                if (is_q)
                    q[which * D + ((d % LANE_NUMBERS / 4) * LANES_PER_KEY + d / LANE_NUMBERS) * 4 + d % 4] =
                        to_float(from_float(y));
                else if (is_v)
                    new_v[d] = store_cached(y, v_scale, v, KV_BYTES == 1 ? (block * D + d) * BLOCK_SIZE + inside : key_at + d);
                else
                    new_k[((d % LANE_NUMBERS / 4) * LANES_PER_KEY + d / LANE_NUMBERS) * 4 + d % 4] =
                        store_cached(y, k_scale, k, key_at + d);
            }
        }
        sync_consumers();
        float top = -1e30f, total = 0.0f;  // largest score and sum of weights of head `warp`
        if (has_new_key && warp < G) {
            float score = 0.0f;
            for (int d = lane; d < D; d += 32) score += q[warp * D + d] * new_k[d];
            top = warp_reduce(score) * factor;
            total = 1.0f;
        }
        constexpr int WIDE = KV_BYTES == 2 ? 8 : 1;  // numbers of a value that a thread adds up
        constexpr int SUM_LANES = KV_BYTES == 2 ? 32 / LANES_PER_KEY : 1;  // of a warp, that add up the same numbers
        float acc[(G * WIDE + SUM_LANES - 1) / SUM_LANES * SUM_LANES] = {};
        const int of = KV_BYTES == 2 ? threadIdx.x % LANES_PER_KEY * 8 : threadIdx.x % D;
        // These threads begin with the new value, whose weight is 1.
        const bool begins = has_new_key && threadIdx.x < (KV_BYTES == 2 ? LANES_PER_KEY : D);
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int j = 0; j < WIDE; j++) acc[g * WIDE + j] = begins ? new_v[of + j] : 0.0f;
        for (int start = first; start < cached_end; start += CHUNK_KEYS) {
            constexpr int KEYS = KV_BYTES == 1 ? 2 : G > 4 ? 1 : UNROLL;  // for which a query is loaded once; more would spill
            constexpr int HEADS = G <= 1 ? 1 : G <= 2 ? 2 : G <= 4 ? 4 : 8;
            typedef Scattered<HEADS, LANES_PER_KEY> Scores;
#pragma unroll
            for (int i = 0; i < UNROLL; i += KEYS) {
                float x[KEYS][LANE_NUMBERS], score[KEYS][HEADS] = {};
#pragma unroll
                for (int n = 0; n < KEYS; n++) widen_cached(keys[i + n], x[n]);
#pragma unroll
                for (int g = 0; g < G; g++)
#pragma unroll
                    for (int j = 0; j < LANE_NUMBERS / 4; j++) {
                        const float4 part = ((const float4*)(q + g * D))[j * LANES_PER_KEY + threadIdx.x % LANES_PER_KEY];
#pragma unroll
                        for (int n = 0; n < KEYS; n++)
                            score[n][g] += x[n][4 * j] * part.x + x[n][4 * j + 1] * part.y + x[n][4 * j + 2] * part.z +
                                           x[n][4 * j + 3] * part.w;
                    }
#pragma unroll
                for (int n = 0; n < KEYS; n++) {
                    const int inside = (i + n) * KEYS_PER_PASS + threadIdx.x / LANES_PER_KEY;
                    Scores::sum(score[n]);
#pragma unroll
                    for (int j = 0; j < Scores::kept; j++)
                        if (Scores::stores() && Scores::first() + j < G)
                            scores[(Scores::first() + j) * CHUNK_KEYS + inside] =
                                has(start + inside) ? score[n][j] * factor : -1e30f;
                }
            }
            if (start + CHUNK_KEYS < cached_end) prefetch_keys(start + CHUNK_KEYS);
            sync_consumers();
            if (warp < G) {
                float highest = top;
                for (int i = lane; i < CHUNK_KEYS; i += 32) highest = fmaxf(highest, scores[warp * CHUNK_KEYS + i]);
                highest = warp_reduce<true>(highest);
                float more = 0.0f;
                for (int i = lane; i < CHUNK_KEYS; i += 32) {
                    const float p = has(start + i) ? exp2_fast(scores[warp * CHUNK_KEYS + i] - highest) : 0.0f;
                    scores[warp * CHUNK_KEYS + i] = p;
                    more += p;
                }
                const float rescale = exp2_fast(top - highest);
                total = total * rescale + warp_reduce(more);
                top = highest;
                if (lane == 0) rescales[warp] = rescale;
            }
            sync_consumers();
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int j = 0; j < WIDE; j++) acc[g * WIDE + j] *= rescales[g];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                float x[LANE_NUMBERS];
                const int inside =
                    KV_BYTES == 2 ? i * KEYS_PER_PASS + threadIdx.x / LANES_PER_KEY : (i * PARTIALS + threadIdx.x / D) * 16;
                if (start + inside >= cached_end) continue;
                widen_cached(values[i], x);
#pragma unroll
                for (int g = 0; g < G; g++)
                    if (KV_BYTES == 2) {
                        const float p = scores[g * CHUNK_KEYS + inside];
#pragma unroll
                        for (int j = 0; j < 8; j++) acc[g * WIDE + j % WIDE] += p * x[j];
                    } else
#pragma unroll
                        for (int j = 0; j < 16; j++) acc[g * WIDE] += scores[g * CHUNK_KEYS + inside + j] * x[j % LANE_NUMBERS];
            }
            if (start + CHUNK_KEYS < cached_end) prefetch_values(start + CHUNK_KEYS);
            sync_consumers();  // until all warps have read the scores that the next chunk overwrites
        }
        // Add the sums of the threads that hold the same numbers of a value.
        if constexpr (KV_BYTES == 2) {
            typedef Scattered<sizeof(acc) / 4, SUM_LANES, LANES_PER_KEY> Values;
            Values::sum(acc);
#pragma unroll
            for (int j = 0; j < Values::kept; j++) {
                const int at = Values::first() + j;
                if (at < G * WIDE) sums[(warp * G + at / WIDE) * D + of + at % WIDE] = acc[j];
            }
        } else
#pragma unroll
            for (int g = 0; g < G; g++) sums[(threadIdx.x / D * G + g) * D + of] = acc[g];
        sync_consumers();
        for (int i = threadIdx.x; i < G * D; i += THREADS) {
            float y = 0.0f;
#pragma unroll
            for (int j = 0; j < PARTIALS; j++) y += sums[j * G * D + i];
            partials[(long long)split * Q + head * G * D + i] = y * v_scale;
        }
        if (warp < G && lane == 0) {
            float* own = softmax + (split * H + head * G + warp) * 2;
            own[0] = top;
            own[1] = total;
        }
        sync_consumers();
    }
};

#if !LATENT
DEVICE SplitPlan plan_splits(int length, int window = 0) { return SplitPlan(length, 1, SPLITS, window); }
// The cached keys (one producer warp) and values (another) of this CTA's split, into L2, while the weights of q, k and v arrive.
template <typename Pointer>
DEVICE void produce_attention(const SplitPlan& all, Pointer pointer, const int* table, Producer& producer) {
    const SplitPlan plan = WINDOWS ? plan_splits(all.length, (int)(u64)pointer(WINDOW)) : all;
    const u8 *k = pointer(K_AT), *v = pointer(V_AT);
    if (producer.cta >= plan.num_active) return;
    const Split own(plan, producer.cta);
    constexpr int BYTES = BLOCK_SIZE * D * KV_BYTES;
    for (int block = own.first / BLOCK_SIZE + producer.lane; block * BLOCK_SIZE < own.cached_end; block += 32)
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
