// Part of `one_token.cu`: rope, the cache and attention of one token. A program takes a part of the keys for some heads. What
// `one_token.cu` calls: `Shares`, `ask_attention` of the warps that ask, and `attend`; over latents they are
// one_token_mla.cu's.

// Splits of the keys of a head: short parts cost less than they save, and all parts are read by every program.
__device__ __forceinline__ int splits_of(int length, int most) {
    const int wanted = (length + 63) / 64, least = length <= 1024 ? most < 8 ? most : 8 : most;
    return wanted < least ? wanted : least;
}

// How a step's keys are dealt out: a program of the first `items` takes a part of them for `heads` heads of keys.
struct Shares {
    int length, heads, splits, each, items;
    __device__ __forceinline__ Shares(int length, int heads, int most)
        : length(length),
          heads(heads),
          splits(splits_of(length, most)),
          each(((length + splits - 1) / (splits ? splits : 1) + 63) / 64 * 64),  // a graph's padding has no keys and no splits
          items(splits * (HK / heads)) {}
};
struct Share {
    int head, split, first, old;  // the first of its heads, its keys first … old − 1 from the cache
    bool last;                    // and whether the new one
    __device__ __forceinline__ Share(const Shares& all, int program)
        : head(program % (HK / all.heads) * all.heads),
          split(program / (HK / all.heads)),
          first(split * all.each),
          old(min(first + all.each, all.length - 1)),
          last(all.length - 1 < first + all.each && all.length - 1 >= first) {}
};

__device__ __forceinline__ void cached(const uint4& v, float* y) {  // a lane's numbers of the cache
    if (CACHE == 16) return numbers(v, y);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (CACHE == 8) {
            from_e4m3(words[i], y[4 * i], y[4 * i + 1]);
            from_e4m3(words[i] >> 16, y[4 * i + 2], y[4 * i + 3]);
        } else
#pragma unroll
            for (int j = 0; j < 4; j++) y[4 * i + j] = (float)(signed char)(words[i] >> 8 * j);
}

__device__ __forceinline__ u16 finite(float x) {
    const u16 code = rounded(x);
    return fabsf(number(code)) < __int_as_float(0x7f800000) ? code : 0;
}
// A number as the cache keeps it (finite: attention reads whole blocks), into the cache and back.
__device__ __forceinline__ float kept(float x, float scale, u8* to, long long at) {
    if (CACHE == 16) {
        const u16 code = finite(x);
        ((u16*)to)[at] = code;
        return number(code);
    }
    x = fabsf(x) < __int_as_float(0x7f800000) ? x / scale : 0.0f;
    if (CACHE == 8) {
        const u32 code = e4m3(x, 0.0f);
        float low, high;
        from_e4m3(code, low, high);
        to[at] = (u8)code;
        return low;
    }
    const int code = __float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f));
    to[at] = (u8)code;
    return (float)code;
}

struct Attention : Share {
    const int* table;  // of blocks
    u8 *k, *v;
    uint4 keys[DEEP], values[DEEP];
    float k_scale, v_scale, cos[PER_LANE], sin[PER_LANE];
    long long block;  // of the new key, with the head

    __device__ __forceinline__ Attention(const Shares& all, int program, const u64* row, const int* table)
        : Share(all, program), table(table), k((u8*)row[K_AT]), v((u8*)row[V_AT]) {}
    // Where the block of a key begins in k or v, this head's.
    __device__ __forceinline__ long long block_of(int key) const {
        return ((long long)table[key / BLOCK_SIZE] * HK + head) * (BLOCK_SIZE * D * BYTES);
    }
    // This lane's numbers of a key or, where they lie as keys do, of a value.
    __device__ __forceinline__ uint4 lane_of(const u8* from, int key) const {
        return *(const uint4*)(from + block_of(key) + key % BLOCK_SIZE * (D * BYTES) + threadIdx.x % LANES * 16);
    }
    __device__ __forceinline__ void ask_keys(int start) {
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            const int key = start + i * KEYS + threadIdx.x / LANES;
            if (key < old) keys[i] = lane_of(k, key);
        }
    }
    __device__ __forceinline__ void ask_values(int start) {
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if (BYTES == 2) {
                const int key = start + i * KEYS + threadIdx.x / LANES;
                if (key < old) values[i] = lane_of(v, key);
            } else {  // 16 keys of one dimension
                const int key = start + (i * ALIKE + threadIdx.x / D) * 16;
                if (key < old) values[i] = *(const uint4*)(v + block_of(key) + threadIdx.x % D * BLOCK_SIZE + key % BLOCK_SIZE);
            }
    }

    // All that does not wait for this layer's q, k and v.
    __device__ __forceinline__ void ask(const u64* row, const float* angles, int length) {
        ask_keys(first);
        ask_values(first);
        k_scale = CACHE == 16 ? 1.0f : ((const float*)row[K_SCALE])[head];
        v_scale = CACHE == 16 ? 1.0f : ((const float*)row[V_SCALE])[head];
        block = (long long)table[(length - 1) / BLOCK_SIZE] * HK + head;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int d = i * 32 + threadIdx.x % 32, angle = INTERLEAVED ? d / 2 : d % (R / 2 ? R / 2 : 1);
            cos[i] = d < R ? angles[angle] : 1.0f;
            sin[i] = d < R ? angles[R / 2 + angle] : 0.0f;
        }
    }

    // Its part of the heads' sums to `parts` [SPLITS, H, D] and `tops` [SPLITS, H, 2]: not yet divided, the largest score and
    // the sum of weights.
    __device__ __forceinline__ void run(const u64* row, const u16* qkv, int length, float* parts, float* tops, u8* memory) {
        float* q = (float*)(memory + INPUT_AT);  // [G, D], a lane's four numbers beside the next lane's
        float* new_k = q + G * D;
        float* new_v = new_k + D;
        float* raw = new_v + D;  // [G + 2, D]
        float* scores = raw + (G + 2) * D;  // [G, CHUNK]
        float* fades = scores + G * CHUNK;
        float* sums = fades + G;  // [ALIKE, G, D]
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const float factor = SCALE * 1.4426950408889634f * k_scale;
        for (int which = warp; which < G + 2 * last; which += WARPS) {
            const bool is_q = which < G, is_v = which == G + 1;
            const u16* source = qkv + (is_q ? head * G + which : is_v ? H + HK + head : H + head) * D;
            float x[PER_LANE], squares = 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                x[i] = i * 32 + lane < D ? number(fresh2(source + i * 32 + lane)) : 0.0f;
                squares += x[i] * x[i];
            }
            if (QK_NORM && !is_v) {
#pragma unroll
                for (int i = 16; i; i >>= 1) squares += __shfl_xor_sync(~0u, squares, i);
                const float by = rsqrtf(squares / D + QK_EPS);
                const u16* weight = (const u16*)row[is_q ? Q_NORM : K_NORM];
#pragma unroll
                for (int i = 0; i < PER_LANE; i++)
                    if (i * 32 + lane < D) x[i] *= by * (number(weight[i * 32 + lane]) + QK_OFFSET);
            }
            float* own = raw + which * D;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                if (i * 32 + lane < D) own[i * 32 + lane] = x[i];
            __syncwarp();
            const int inside = (length - 1) % BLOCK_SIZE;
            const long long key_at = (block * BLOCK_SIZE + inside) * D;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const int d = i * 32 + lane;
                if (d >= D) continue;
                float y = x[i];
                if (!is_v && d < R) {
                    const int other = INTERLEAVED ? d ^ 1 : (d + R / 2) % (R ? R : 1);
                    const float sign = (INTERLEAVED ? d % 2 == 0 : d < R / 2) ? -1.0f : 1.0f;
                    y = y * cos[i] + sign * own[other] * sin[i];
                }
                if (is_q)
                    q[which * D + ((d % EACH / 4) * LANES + d / EACH) * 4 + d % 4] = number(rounded(y));
                else if (is_v)
                    new_v[d] = kept(y, v_scale, v, BYTES == 1 ? (block * D + d) * BLOCK_SIZE + inside : key_at + d);
                else
                    new_k[((d % EACH / 4) * LANES + d / EACH) * 4 + d % 4] = kept(y, k_scale, k, key_at + d);
            }
        }
        together();
        float top = -1e30f, total = 0.0f;  // of head `warp`
        if (last && warp < G) {
            float score = 0.0f;
            for (int d = lane; d < D; d += 32) score += q[warp * D + d] * new_k[d];
#pragma unroll
            for (int i = 16; i; i >>= 1) score += __shfl_xor_sync(~0u, score, i);
            top = score * factor;
            total = 1.0f;
        }
        constexpr int WIDE = BYTES == 2 ? 8 : 1;  // numbers of a value that a thread adds up
        float acc[G][WIDE];
        const int of = BYTES == 2 ? threadIdx.x % LANES * 8 : threadIdx.x % D;
        const bool begins = last && threadIdx.x < (BYTES == 2 ? LANES : D);  // with the new value
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int j = 0; j < WIDE; j++) acc[g][j] = begins ? new_v[of + j] : 0.0f;
        for (int start = first; start < old; start += CHUNK) {
#pragma unroll
            for (int i = 0; i < DEEP; i++) {
                const int inside = i * KEYS + threadIdx.x / LANES;
                float x[EACH];
                cached(keys[i], x);
#pragma unroll
                for (int g = 0; g < G; g++) {
                    float score = 0.0f;
#pragma unroll
                    for (int j = 0; j < EACH / 4; j++) {
                        const float4 part = ((const float4*)(q + g * D))[j * LANES + threadIdx.x % LANES];
                        score += x[4 * j] * part.x + x[4 * j + 1] * part.y + x[4 * j + 2] * part.z + x[4 * j + 3] * part.w;
                    }
#pragma unroll
                    for (int l = LANES / 2; l; l >>= 1) score += __shfl_xor_sync(~0u, score, l);
                    if (threadIdx.x % LANES == 0) scores[g * CHUNK + inside] = start + inside < old ? score * factor : -1e30f;
                }
            }
            if (start + CHUNK < old) ask_keys(start + CHUNK);
            together();
            if (warp < G) {
                float highest = top;
                for (int i = lane; i < CHUNK; i += 32) highest = fmaxf(highest, scores[warp * CHUNK + i]);
#pragma unroll
                for (int i = 16; i; i >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, i));
                float more = 0.0f;
                for (int i = lane; i < CHUNK; i += 32) {
                    const float p = start + i < old ? power2(scores[warp * CHUNK + i] - highest) : 0.0f;
                    scores[warp * CHUNK + i] = p;
                    more += p;
                }
#pragma unroll
                for (int i = 16; i; i >>= 1) more += __shfl_xor_sync(~0u, more, i);
                const float fade = power2(top - highest);
                total = total * fade + more;
                top = highest;
                if (lane == 0) fades[warp] = fade;
            }
            together();
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int j = 0; j < WIDE; j++) acc[g][j] *= fades[g];
#pragma unroll
            for (int i = 0; i < DEEP; i++) {
                float x[EACH];
                const int inside = BYTES == 2 ? i * KEYS + threadIdx.x / LANES : (i * ALIKE + threadIdx.x / D) * 16;
                if (start + inside >= old) continue;
                cached(values[i], x);
#pragma unroll
                for (int g = 0; g < G; g++)
                    if (BYTES == 2) {
                        const float p = scores[g * CHUNK + inside];
#pragma unroll
                        for (int j = 0; j < 8; j++) acc[g][j % WIDE] += p * x[j];
                    } else
#pragma unroll
                        for (int j = 0; j < 16; j++) acc[g][0] += scores[g * CHUNK + inside + j] * x[j % EACH];
            }
            if (start + CHUNK < old) ask_values(start + CHUNK);
            together();  // before the next scores are written
        }
        // Threads with the same numbers of a value together.
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                float y = acc[g][j];
                if (BYTES == 2)
#pragma unroll
                    for (int l = LANES; l < 32; l *= 2) y += __shfl_xor_sync(~0u, y, l);
                const int alike = BYTES == 2 ? warp : threadIdx.x / D;
                if (BYTES == 1 || lane < LANES) sums[(alike * G + g) * D + of + j] = y;
            }
        together();
        for (int i = threadIdx.x; i < G * D; i += THREADS) {
            float y = 0.0f;
#pragma unroll
            for (int j = 0; j < ALIKE; j++) y += sums[j * G * D + i];
            parts[(long long)split * Q + head * G * D + i] = y * v_scale;
        }
        if (warp < G && lane == 0) {
            float* own = tops + (split * H + head * G + warp) * 2;
            own[0] = top;
            own[1] = total;
        }
        together();
    }
};

#if !LATENT
__device__ __forceinline__ Shares shares_of(int length) { return Shares(length, 1, SPLITS); }
template <typename Pointer>
__device__ __forceinline__ void ask_attention(const Shares&, Pointer, const int*, Asker&) {}  // no weights
__device__ __forceinline__ void attend(const Shares& shares, int program, const u64* row, const int* table,
                                       const float* angles, const u16* qkv, float* parts, float* tops,
                                       const u32* counters, u32 met, Place&, u8* memory) {
    Attention a(shares, program, row, table);
    a.ask(row, angles, shares.length);
    wait(counters, met);
    a.run(row, qkv, shares.length, parts, tops, memory);
}
#endif
