// Part of `one_token.cu`: attention over a cache of latents (`OpSet.mla_queries` and `mla_paged_attention` for one token), by
// the interface of one_token_attention.cu. A cached row is [rotated key, latent], one for all heads.
//
// A program takes a head, or of long sequences TOGETHER of them, and a part of the rows. It makes the head's query for latents
// of the plain one, attends, and makes values of what it has seen: values of sums are sums of values, so that the parts add up
// as those of other attention do, and there is no meeting more. The other parts' programs read the head's `keys` and `values`,
// too, from the cache that all share. These and the latents come through the ring, long before the queries are there: a piece
// is 16 rows of RANK numbers of `keys` [PLAIN, RANK] (a row counts as often as the query's number says), of the cache, or of
// `values` [D, RANK]. A warp takes two rows of a piece, a lane 8 numbers of each 256. Latents stay in the ring until they are
// read as values, too: in registers there is no room for them.
#if LATENT
static_assert(RANK % 256 == 0 && RANK * 2 <= PIECE && PLAIN % 16 == 0 && D % 16 == 0 && R <= 64 && H % TOGETHER == 0
                  && CACHE == 16,
              "a shape that one_token.py should refuse");
constexpr int OWN = RANK / 256 * 8;       // a lane's numbers of a latent
constexpr int ROWS_OF_WARP = 16 / WARPS;  // of a piece
constexpr int TURNED = R / 2;             // pairs of a rotary key: a lane's, if it has one
constexpr u32 UNDER_WAY = LATENT_DEPTH < STAGES ? LATENT_DEPTH : STAGES;

__device__ __forceinline__ Shares shares_of(int length) {
    const int heads = length <= APART ? 1 : TOGETHER;
    return Shares(length, heads, min(SPLITS, PROGRAMS / (H / heads)));
}

template <typename Pointer>
__device__ __forceinline__ void ask_attention(const Shares& shares, Pointer pointer, const int* table, Asker& asker) {
    if (asker.program >= shares.items) return;
    const Share share(shares, asker.program);
    const int mine = asker.which * (16 / ASKERS) + asker.lane % (16 / ASKERS);
    auto block_of = [&](int key) { return table[min(key, share.old - 1) / BLOCK_SIZE]; };
    auto ask = [&](const u8* from, u64 policy) { asker.piece(from, RANK * 2, nullptr, 0, policy, UNDER_WAY); };
    auto weights = [&](const u8* from, int rows) {
        from += ((long long)share.head * rows + mine) * RANK * 2;
#pragma unroll 1
        for (int row = 0; row < shares.heads * rows; row += 16) ask(from + row * RANK * 2, asker.once);
    };
    const u64 again = read_again();
    int block = share.first < share.old ? block_of(share.first + mine) : 0;
    weights(pointer(KEYS_W), PLAIN);
    const u8* latents = pointer(K_AT) + R * 2;
#pragma unroll 1
    for (int start = share.first; start < share.old; start += 16) {
        const int key = min(start + mine, share.old - 1), here = block;  // rows beyond are not used
        block = block_of(start + 16 + mine);
        ask(latents + ((long long)here * BLOCK_SIZE + key % BLOCK_SIZE) * (R + RANK) * 2, again);
    }
    weights(pointer(VALUES_W), D);
}

template <int HEADS>
struct LatentAttention : Share {
    static constexpr int BATCH = HEADS == 1 && STAGES >= 4 ? 4 : 1;  // pieces whose scores are taken together
    static constexpr int KEYS_OF_WARP = BATCH * ROWS_OF_WARP;

    const int* table;
    u8* cache;
    u32 turned[KEYS_OF_WARP];  // of the keys next in turn, this lane's pair
    float cos, sin;            // for number threadIdx.x % R of a rotary key
    uint4 norm[RANK / 256];
    long long new_row;

    __device__ __forceinline__ LatentAttention(const Shares& all, int program, const u64* row, const int* table)
        : Share(all, program), table(table), cache((u8*)row[K_AT]) {}

    static __device__ __forceinline__ int key_of(int start, int i) {
        return start + i / ROWS_OF_WARP * 16 + threadIdx.x / 32 * ROWS_OF_WARP + i % ROWS_OF_WARP;
    }
    static __device__ __forceinline__ int column(int j) { return j / 8 * 256 + threadIdx.x % 32 * 8 + j % 8; }
    __device__ __forceinline__ void ask_turned(int start) {
#pragma unroll
        for (int i = 0; i < KEYS_OF_WARP; i++) {
            const int key = key_of(start, i);
            if (key < old && threadIdx.x % 32 < TURNED) {
                const long long slot = (long long)table[key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
                turned[i] = *(const u32*)(cache + slot * (R + RANK) * 2 + threadIdx.x % 32 * 4);
            }
        }
    }

    // All that does not wait for this layer's queries.
    __device__ __forceinline__ void ask(const u64* row, const float* angles, int length) {
        const int d = threadIdx.x % R, angle = INTERLEAVED ? d / 2 : d % TURNED;
#pragma unroll
        for (int i = 0; i < KEYS_OF_WARP; i++) turned[i] = 0;
        ask_turned(first);
        cos = angles[angle];
        sin = angles[TURNED + angle];
#pragma unroll
        for (int i = 0; i < RANK / 256; i++) norm[i] = ((const uint4*)row[K_NORM])[i * 32 + threadIdx.x % 32];
        new_row = ((long long)table[(length - 1) / BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE) * (R + RANK);
    }
    // Number threadIdx.x % R of a rotary key, rotated.
    __device__ __forceinline__ float rotated(const u16* source) const {
        const int d = threadIdx.x % R, other = INTERLEAVED ? d ^ 1 : (d + TURNED) % R;
        const float sign = (INTERLEAVED ? d % 2 == 0 : d < TURNED) ? -1.0f : 1.0f;
        return number(fresh2(source + d)) * cos + sign * number(fresh2(source + other)) * sin;
    }
    // The rows of this warp of the piece at `place`, which stays: use(row, this lane's numbers).
    template <typename Use>
    static __device__ __forceinline__ void look(Place& place, const u8* memory, Use use) {
        const u32 from = shared(memory) + RING + place.stage * STAGE + threadIdx.x % 32 * 16;
        uint4 v[ROWS_OF_WARP][RANK / 256];
        until(shared(memory) + BARRIERS + place.stage * 16, place.parity);
#pragma unroll
        for (int r = 0; r < ROWS_OF_WARP; r++)
#pragma unroll
            for (int i = 0; i < RANK / 256; i++) v[r][i] = at16(from + (threadIdx.x / 32 * ROWS_OF_WARP + r) * ROW + i * 512);
        place.next();
#pragma unroll
        for (int r = 0; r < ROWS_OF_WARP; r++) {
            float y[OWN];
            wide(v[r], y);
            use(r, y);
        }
    }
    // The same, and the piece may be written over.
    template <typename Use>
    static __device__ __forceinline__ void take(Place& place, const u8* memory, Use use) {
        const u32 empty = shared(memory) + BARRIERS + place.stage * 16 + 8;
        look(place, memory, use);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty);
    }
    static __device__ __forceinline__ void wide(const uint4 (&v)[RANK / 256], float (&y)[OWN]) {
#pragma unroll
        for (int i = 0; i < RANK / 256; i++) numbers(v[i], y + i * 8);
    }
    // Sums of N numbers over a warp's lanes: lane i's y[0] is number i / (32 / N)'s then.
    template <int N, int MASK = 16>
    static __device__ __forceinline__ void over_lanes(float* y) {
        if constexpr (N > 1) {
            const bool upper = threadIdx.x & MASK;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float given = upper ? y[i] : y[i + N / 2];
                y[i] = (upper ? y[i + N / 2] : y[i]) + __shfl_xor_sync(~0u, given, MASK);
            }
            over_lanes<N / 2, MASK / 2>(y);
        } else if constexpr (MASK > 0) {
            y[0] += __shfl_xor_sync(~0u, y[0], MASK);
            over_lanes<1, MASK / 2>(y);
        }
    }
    // Numbers of a latent, from or to shared memory.
    static __device__ __forceinline__ void load(const float* from, float (&y)[OWN]) {
#pragma unroll
        for (int j = 0; j < OWN; j += 4) {
            const float4 v = *(const float4*)(from + column(j));
            y[j] = v.x, y[j + 1] = v.y, y[j + 2] = v.z, y[j + 3] = v.w;
        }
    }
    static __device__ __forceinline__ void store(const float (&y)[OWN], float* to) {
#pragma unroll
        for (int j = 0; j < OWN; j += 4) *(float4*)(to + column(j)) = float4{y[j], y[j + 1], y[j + 2], y[j + 3]};
    }
    // The warps' sums [WARPS, RANK] together.
    template <typename Use>
    static __device__ __forceinline__ void merge(const float* sums, Use use) {
        together();
        for (int c = threadIdx.x; c < RANK; c += THREADS) {
            float y = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) y += sums[i * RANK + c];
            use(c, y);
        }
    }

    __device__ __forceinline__ void run(const u16* qkv, float* parts, float* tops, Place& place, u8* memory) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        constexpr float FACTOR = SCALE * 1.4426950408889634f;
        float* q = (float*)(memory + INPUT_AT);  // [HEADS, RANK]: for latents; later what was seen of them
        float* sums = q + HEADS * RANK;          // [WARPS, RANK]
        float* fresh = sums + WARPS * RANK;      // the new row: latent and rotated key
        float* plain = fresh + RANK + R;         // [PLAIN], of one head at a time
        float* q_turned = plain + PLAIN;         // [HEADS, R]
        float* tops_of = q_turned + HEADS * R;   // [WARPS, 2]
        // --- the new row
        if (last) {
            if (warp == WARPS - 1) {
                float x[OWN], by[OWN], squares = 0.0f;
#pragma unroll
                for (int i = 0; i < RANK / 256; i++) numbers(fresh16((const uint4*)(qkv + ASKING) + i * 32 + lane), x + i * 8);
#pragma unroll
                for (int j = 0; j < OWN; j++) squares += x[j] * x[j];
                const float factor = rsqrtf(over_warp(squares) / RANK + LATENT_EPS);
                wide(norm, by);
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    const u16 code = finite(x[j] * factor * by[j]);
                    if (head == 0) ((u16*)cache)[new_row + R + column(j)] = code;
                    x[j] = number(code);
                }
                store(x, fresh);
            }
            if (threadIdx.x < R) {
                const u16 code = finite(rotated(qkv + ASKING + RANK));
                if (head == 0) ((u16*)cache)[new_row + threadIdx.x] = code;
                fresh[RANK + threadIdx.x] = number(code);
            }
        }
        // --- queries for latents
#pragma unroll 1
        for (int g = 0; g < HEADS; g++) {
            const u16* source = qkv + (head + g) * (PLAIN + R);
            for (int i = threadIdx.x; i < PLAIN; i += THREADS) plain[i] = number(fresh2(source + i));
            if (threadIdx.x < R) q_turned[g * R + threadIdx.x] = number(rounded(rotated(source + PLAIN))) * FACTOR;
            together();
            float sum[OWN] = {};
#pragma unroll 1
            for (int start = 0; start < PLAIN; start += 16)
                take(place, memory, [&](int r, const float(&y)[OWN]) {
                    const float by = plain[start + warp * ROWS_OF_WARP + r];
#pragma unroll
                    for (int j = 0; j < OWN; j++) sum[j] += by * y[j];
                });
            store(sum, sums + warp * RANK);
            merge(sums, [&](int c, float y) { q[g * RANK + c] = number(rounded(y)) * FACTOR; });
        }
        together();
        // --- over the rows
        float query[OWN], sum[HEADS][OWN], top[HEADS], total[HEADS], pair[HEADS][2], x[OWN];
        const bool has_pair = lane < TURNED;
        load(q, query);  // stays, if there is only one
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            pair[g][0] = has_pair ? q_turned[g * R + 2 * lane] : 0.0f;
            pair[g][1] = has_pair ? q_turned[g * R + 2 * lane + 1] : 0.0f;
            top[g] = -1e30f, total[g] = 0.0f;
#pragma unroll
            for (int j = 0; j < OWN; j++) sum[g][j] = 0.0f;
        }
        if (last && warp == 0) {
            load(fresh, x);
            const float low = has_pair ? fresh[RANK + 2 * lane] : 0.0f, high = has_pair ? fresh[RANK + 2 * lane + 1] : 0.0f;
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float score = pair[g][0] * low + pair[g][1] * high;
                if (HEADS > 1) load(q + g * RANK, query);
#pragma unroll
                for (int j = 0; j < OWN; j++) score += query[j] * x[j], sum[g][j] = x[j];
                top[g] = over_warp(score), total[g] = 1.0f;
            }
        }
#pragma unroll 1
        for (int start = first; start < old; start += BATCH * 16) {
            float scores[HEADS][KEYS_OF_WARP] = {};
            Place ahead = place;
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (start + b * 16 < old)
                    look(ahead, memory, [&](int r, const float(&y)[OWN]) {
                        const u32 own = turned[b * ROWS_OF_WARP + r];
#pragma unroll
                        for (int g = 0; g < HEADS; g++) {
                            float score = pair[g][0] * number((u16)own) + pair[g][1] * number((u16)(own >> 16));
                            if (HEADS > 1) load(q + g * RANK, query);
#pragma unroll
                            for (int j = 0; j < OWN; j++) score += query[j] * y[j];
                            scores[g][b * ROWS_OF_WARP + r] = score;
                        }
                    });
            ask_turned(start + BATCH * 16);
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float highest = top[g];
#pragma unroll
                for (int i = 0; i < KEYS_OF_WARP; i++) {
                    scores[g][i] = over_warp(scores[g][i]);
                    if (key_of(start, i) >= old) scores[g][i] = -1e30f;
                    highest = fmaxf(highest, scores[g][i]);
                }
                const float fade = power2(top[g] - highest);
                total[g] *= fade;
                top[g] = highest;
#pragma unroll
                for (int j = 0; j < OWN; j++) sum[g][j] *= fade;
#pragma unroll
                for (int i = 0; i < KEYS_OF_WARP; i++) {
                    scores[g][i] = key_of(start, i) < old ? power2(scores[g][i] - highest) : 0.0f;
                    total[g] += scores[g][i];
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (start + b * 16 < old)
                    take(place, memory, [&](int r, const float(&y)[OWN]) {
#pragma unroll
                        for (int g = 0; g < HEADS; g++)
#pragma unroll
                            for (int j = 0; j < OWN; j++) sum[g][j] += scores[g][b * ROWS_OF_WARP + r] * y[j];
                    });
        }
        // --- the warps together, and values of what they saw
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            if (lane == 0) tops_of[warp * 2] = top[g], tops_of[warp * 2 + 1] = total[g];
            together();
            float highest = tops_of[0], all = 0.0f;
#pragma unroll
            for (int i = 1; i < WARPS; i++) highest = fmaxf(highest, tops_of[i * 2]);
#pragma unroll
            for (int i = 0; i < WARPS; i++) all += tops_of[i * 2 + 1] * power2(tops_of[i * 2] - highest);
            const float fade = power2(top[g] - highest);
#pragma unroll
            for (int j = 0; j < OWN; j++) x[j] = sum[g][j] * fade;
            store(x, sums + warp * RANK);
            merge(sums, [&](int c, float y) { q[g * RANK + c] = y; });
            if (threadIdx.x == 0) {
                float* own = tops + (split * H + head + g) * 2;
                own[0] = highest;
                own[1] = all;
            }
        }
        together();
#pragma unroll 1
        for (int g = 0; g < HEADS; g++) {
            constexpr int VALUES = D / 16 * ROWS_OF_WARP;  // of this warp
            float value[VALUES];
            load(q + g * RANK, x);
#pragma unroll
            for (int piece = 0; piece < D / 16; piece++)
                take(place, memory, [&](int r, const float(&y)[OWN]) {
                    float& own = value[piece * ROWS_OF_WARP + r];
                    own = 0.0f;
#pragma unroll
                    for (int j = 0; j < OWN; j++) own += x[j] * y[j];
                });
            static_assert(VALUES <= 32 && (VALUES & (VALUES - 1)) == 0, "halved until one is left");
            over_lanes<VALUES>(value);
            const int which = lane / (32 / VALUES);
            const int d = which / ROWS_OF_WARP * 16 + warp * ROWS_OF_WARP + which % ROWS_OF_WARP;
            if (lane % (32 / VALUES) == 0) parts[(long long)split * Q + (head + g) * D + d] = value[0];
        }
        together();
    }
};

template <int HEADS>
__device__ __forceinline__ void attend_with(const Shares& shares, int program, const u64* row, const int* table,
                                            const float* angles, const u16* qkv, float* parts, float* tops,
                                            const u32* counters, u32 met, Place& place, u8* memory) {
    LatentAttention<HEADS> a(shares, program, row, table);
    a.ask(row, angles, shares.length);
    wait(counters, met);
    a.run(qkv, parts, tops, place, memory);
}
__device__ __forceinline__ void attend(const Shares& shares, int program, const u64* row, const int* table,
                                       const float* angles, const u16* qkv, float* parts, float* tops,
                                       const u32* counters, u32 met, Place& place, u8* memory) {
    if (shares.heads == 1) attend_with<1>(shares, program, row, table, angles, qkv, parts, tops, counters, met, place, memory);
    else attend_with<TOGETHER>(shares, program, row, table, angles, qkv, parts, tops, counters, met, place, memory);
}
#endif
