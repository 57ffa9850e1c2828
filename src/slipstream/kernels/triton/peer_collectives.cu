// What ranks add and gather through one another's memory, and what follows a sum: the residual, a norm, rounding to 8 bits.
// After instructions.cu. Names in capitals are defined by peer_collectives.py.
//
// 1. A thread block takes whole rows. It writes its rank's numbers into the memory of other ranks, and waits for theirs in
//    its own. It sends all of its rows before it waits for one, and all thread blocks run at once (PROGRAMS_OF_SM).
// 2. No flag stands beside the numbers. A word that has not arrived is EMPTY, which no rank sends. Who has read a word makes it
//    EMPTY again. So a sum takes one crossing of the link, and no fence.
// 3. A rank's memory has PLACES places, which launches take in turns, with a region for each other rank. A rank writes into a
//    place again two launches later at the earliest. By then it has numbers of every other rank of the launch between, which
//    were sent after the place had been emptied by an earlier launch. `counts` says how many places have been used: a number
//    for each thread block that can be, all of them the same, and the same on all ranks. So a CUDA graph can be replayed.
// 4. Numbers are added in the order of the ranks, in float32, and rounded once, so all ranks get the same bits, whatever STEPS.
// 5. A sum in two STEPS sends each row to one rank, its owner, and the owner sends the sum to all: two crossings of the link
//    and two places, for 2 (n − 1) / n of the bytes instead of n − 1.

enum { SUM, SCATTER, GATHER, EXCHANGE };  // OP: what is left on a rank is the sum; its part of the sum; all ranks' x; its part of each
constexpr u32 EMPTY = 0x80008000u;  // two zeros with a sign, or a float32 of −4.6e-41: sent as 0
constexpr int WIDTH = KIND == 2 ? 4 : 8;  // numbers of 16 bytes. KIND: 0 bfloat16, 1 float16, 2 float32
constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;  // vectors of 16 bytes of a row that a thread has
constexpr int LANES = 128 / WIDTH;  // that have the numbers of a scale, if FORMAT is 3

DEVICE uint4 sendable(uint4 v) {
    return make_uint4(v.x == EMPTY ? 0 : v.x, v.y == EMPTY ? 0 : v.y, v.z == EMPTY ? 0 : v.z, v.w == EMPTY ? 0 : v.w);
}
DEVICE bool is_there(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

DEVICE void unpack(uint4 v, float* y) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND == 2) y[i] = __uint_as_float(words[i]);
        else y[2 * i] = to_float((u16)words[i]), y[2 * i + 1] = to_float((u16)(words[i] >> 16));
    }
}
DEVICE uint4 pack(const float* y) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND == 2) words[i] = __float_as_uint(y[i]);
        else words[i] = from_float(y[2 * i]) | (u32)from_float(y[2 * i + 1]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
DEVICE void round_to_kind(float* y) { unpack(pack(y), y); }

template <bool MAXIMUM, int COUNT>
DEVICE float over_lanes(float x) {
#pragma unroll
    for (int i = COUNT / 2; i; i >>= 1) {
        const float y = __shfl_xor_sync(~0u, x, i);
        x = MAXIMUM ? fmaxf(x, y) : x + y;
    }
    return x;
}
template <bool MAXIMUM>
DEVICE float over_block(float x, float* scratch) {
    x = over_lanes<MAXIMUM, 32>(x);
    if (WARPS == 1) return x;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync_consumers();
    x = scratch[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) x = MAXIMUM ? fmaxf(x, scratch[i]) : x + scratch[i];
    sync_consumers();  // until all have read `scratch`
    return x;
}

// Where rank `at`, whose memory begins at `base`, has the numbers of rank `of`, in the place number `count`.
DEVICE uint4* place(u64 base, int at, int of, u32 count) {
    return (uint4*)base + ((u64)(count % PLACES) * (RANKS - 1) + (of < at ? of : of - 1)) * PLACE;
}

// Wait for a vector, and empty its place. With `patience` (of 2^20 cycles) no longer than that.
DEVICE uint4 take(uint4* from, int patience) {
    const u64 begin = patience ? cycles() : 0;
    uint4 v = load_system16(from);
    while (!is_there(v)) {
        if (patience && (cycles() - begin) >> 20 > (u64)patience) break;
        v = load_system16(from);
    }
    store_system16(from, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    return v;
}

// `take` of vector `at` of all other ranks, whose loads are under way at once.
DEVICE void take_all(u64 base, u32 count, int at, uint4 (&v)[RANKS], int patience) {
    const u64 begin = patience ? cycles() : 0;
    bool all;
#pragma unroll
    for (int of = 0; of < RANKS; of++)
        if (of != THIS_RANK) v[of] = load_system16(place(base, THIS_RANK, of, count) + at);
    do {
        all = true;
#pragma unroll
        for (int of = 0; of < RANKS; of++) {
            if (of == THIS_RANK || is_there(v[of])) continue;
            all = false;
            v[of] = load_system16(place(base, THIS_RANK, of, count) + at);
        }
    } while (!all && !(patience && (cycles() - begin) >> 20 > (u64)patience));
#pragma unroll
    for (int of = 0; of < RANKS; of++)
        if (of != THIS_RANK)
            store_system16(place(base, THIS_RANK, of, count) + at, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
}

DEVICE void store_codes(u8* out, int at, const float* y, float by) {  // y · by in 8 bits
    u32 codes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
        const float low = y[i] * by, high = y[i + 1] * by;
        u32 pair;
        if constexpr (FORMAT == 2) {
            const int a = __float2int_rn(fminf(fmaxf(low, -127.0f), 127.0f));
            const int b = __float2int_rn(fminf(fmaxf(high, -127.0f), 127.0f));
            pair = (a & 255) | (b & 255) << 8;
        } else {
            pair = pack_e4m3(low, high);
        }
        codes[i / 4] |= pair << (i % 4 * 8);
    }
    if constexpr (KIND == 2) ((u32*)out)[at] = codes[0];
    else ((uint2*)out)[at] = make_uint2(codes[0], codes[1]);
}

// `num_vectors`: of x; of a part of x, one of RANKS, if OP is SCATTER or EXCHANGE. With SCATTER x has `given` vectors, and zeros
// behind them. The last row may be short. `total`: where the result goes: of a sum as many vectors, else RANKS times as many,
// by rank. With RESIDUAL it holds what is added. `most`: thread blocks that a launch can have.
// NORM: 0 none, 1 RMS, 2 layer norm: out and scales, in FORMAT as in pointwise.py.
extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS_OF_SM) peer_collectives(
    const uint4* x, uint4* total, const u64* of_ranks, u32* counts, const uint4* weight, const uint4* bias, u8* out, float* scales,
    int num_vectors, int given, int programs, int most, int patience) {
    SHARED_MEMORY(shared);
    float* scratch = (float*)shared;
    u64 memory[RANKS];
#pragma unroll
    for (int at = 0; at < RANKS; at++) memory[at] = of_ranks[at];
    const u64 base = of_ranks[THIS_RANK];
    uint4 factor[EACH];
    if constexpr (NORM > 0) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = threadIdx.x + e * THREADS;
            if (i < VECTORS) factor[e] = weight[i];
        }
    }
    if (PDL) pdl_wait();
    const u32 count = counts[blockIdx.x];
    const int num_rows = (num_vectors + VECTORS - 1) / VECTORS;
    const int owned = (num_rows + RANKS - 1) / RANKS;  // rows of an owner, the last ranks' less
    float y[EACH][WIDTH];
    uint4 before[EACH];

    // This rank's vector number `at` of the part for rank `to`.
    auto own = [&](int to, int at) {
        if constexpr (OP == SUM || OP == GATHER) return sendable(x[at]);
        const u64 place = (u64)to * num_vectors + at;
        if (OP == SCATTER && place >= (u64)given) return make_uint4(0, 0, 0, 0);
        return sendable(x[place]);
    };
    // All ranks' vectors `local` in the place, and this rank's own: y[e] is their sum, as its kind rounds it.
    auto add = [&](int e, int at, int local) {
        uint4 v[RANKS];
        float part[WIDTH];
        const uint4 mine = own(THIS_RANK, at);
        take_all(base, count, local, v, patience);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) y[e][j] = 0.0f;
#pragma unroll
        for (int of = 0; of < RANKS; of++) {
            unpack(of == THIS_RANK ? mine : v[of], part);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) y[e][j] += part[j];
        }
        round_to_kind(y[e]);
    };
    // What follows the sum `y` of a row.
    auto finish = [&](int row) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = threadIdx.x + e * THREADS, at = row * VECTORS + i;
            if (i >= VECTORS || at >= num_vectors) {
#pragma unroll
                for (int j = 0; j < WIDTH; j++) y[e][j] = 0.0f;
                continue;
            }
            if (RESIDUAL) {
                float part[WIDTH];
                unpack(before[e], part);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) y[e][j] += part[j];
                round_to_kind(y[e]);
            }
            total[at] = pack(y[e]);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum += NORM == 2 ? y[e][j] : y[e][j] * y[e][j];
        }
        if constexpr (NORM > 0) {
            constexpr float size = VECTORS * WIDTH;
            sum = over_block<false>(sum, scratch) / size;
            if constexpr (NORM == 2) {
                float squares = 0.0f;
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    const bool inside = threadIdx.x + e * THREADS < VECTORS;
#pragma unroll
                    for (int j = 0; j < WIDTH; j++) {
                        y[e][j] = inside ? y[e][j] - sum : 0.0f;
                        squares += y[e][j] * y[e][j];
                    }
                }
                sum = over_block<false>(squares, scratch) / size;
            }
            const float scale = rsqrtf(sum + EPS);
            float largest = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int i = threadIdx.x + e * THREADS;
                float w[WIDTH], b[WIDTH];
                if (i < VECTORS) {
                    unpack(factor[e], w);
                    if (BIAS) unpack(bias[i], b);
#pragma unroll
                    for (int j = 0; j < WIDTH; j++) {
                        y[e][j] = y[e][j] * scale * (w[j] + OFFSET) + (BIAS ? b[j] : 0.0f);
                        largest = fmaxf(largest, fabsf(y[e][j]));
                    }
                    if (FORMAT == 0) ((uint4*)out)[row * VECTORS + i] = pack(y[e]);
                }
                if constexpr (FORMAT == 3) {
                    const float tile = fmaxf(over_lanes<true, LANES>(largest), SMALLEST) / 448.0f;
                    if (i < VECTORS && i % LANES == 0) scales[(row * VECTORS + i) / LANES] = tile;
                    if (i < VECTORS) store_codes(out, row * VECTORS + i, y[e], 1.0f / tile);
                    largest = 0.0f;
                }
            }
            if constexpr (FORMAT == 1 || FORMAT == 2) {
                const float step = fmaxf(over_block<true>(largest, scratch), SMALLEST) / (FORMAT == 1 ? 448.0f : 127.0f);
                if (threadIdx.x == 0) scales[row] = step;
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    const int i = threadIdx.x + e * THREADS;
                    if (i < VECTORS) store_codes(out, row * VECTORS + i, y[e], 1.0f / step);
                }
            }
        }
    };
    auto each_vector = [&](int row, auto work) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = threadIdx.x + e * THREADS, at = row * VECTORS + i;
            if (i < VECTORS && at < num_vectors) work(e, at);
        }
    };
    auto remember = [&](int row) {
        if (RESIDUAL) each_vector(row, [&](int e, int at) { before[e] = total[at]; });
    };

    if constexpr (STEPS == 2) {
        for (int row = blockIdx.x; row < num_rows; row += programs) {
            const int owner = row / owned, from = owner * owned * VECTORS;
            if (owner == THIS_RANK) continue;
            each_vector(row, [&](int, int at) {
                store_system16(place(of_ranks[owner], owner, THIS_RANK, count) + at - from, own(owner, at));
            });
        }
        for (int row = blockIdx.x; row < num_rows; row += programs) {
            const int from = THIS_RANK * owned * VECTORS;
            if (row / owned != THIS_RANK) continue;
            remember(row);
            each_vector(row, [&](int e, int at) {
                add(e, at, at - from);
                const uint4 v = sendable(pack(y[e]));
#pragma unroll
                for (int to = 0; to < RANKS; to++)
                    if (to != THIS_RANK) store_system16(place(memory[to], to, THIS_RANK, count + 1) + at - from, v);
                unpack(v, y[e]);
            });
            finish(row);
        }
        for (int row = blockIdx.x; row < num_rows; row += programs) {
            const int owner = row / owned, from = owner * owned * VECTORS;
            if (owner == THIS_RANK) continue;
            remember(row);
            each_vector(row, [&](int e, int at) {
                unpack(take(place(base, THIS_RANK, owner, count + 1) + at - from, patience), y[e]);
            });
            finish(row);
        }
    } else {
        for (int row = blockIdx.x; row < num_rows; row += programs)
            each_vector(row, [&](int, int at) {
#pragma unroll
                for (int to = 0; to < RANKS; to++)
                    if (to != THIS_RANK) store_system16(place(memory[to], to, THIS_RANK, count) + at, own(to, at));
            });
        for (int row = blockIdx.x; row < num_rows; row += programs) {
            if constexpr (OP == SUM || OP == SCATTER) {
                remember(row);
                each_vector(row, [&](int e, int at) { add(e, at, at); });
                finish(row);
            } else {
                each_vector(row, [&](int, int at) {
                    uint4 v[RANKS];
                    const uint4 mine = own(THIS_RANK, at);
                    take_all(base, count, at, v, patience);
#pragma unroll
                    for (int of = 0; of < RANKS; of++) total[(u64)of * num_vectors + at] = of == THIS_RANK ? mine : v[of];
                });
            }
        }
    }
    for (int i = blockIdx.x + programs * threadIdx.x; i < most; i += programs * THREADS) {
        if (i != blockIdx.x) counts[i] = count + STEPS;
    }
    sync_consumers();  // until all have read the count
    if (threadIdx.x == 0) counts[blockIdx.x] = count + STEPS;
}
