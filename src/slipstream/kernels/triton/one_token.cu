// All layers of a decode step of one sequence in one kernel (`one_token.py` says when, and defines the capitals below).
//
// Such a step is bound by reading every weight once. One program stays on each multiprocessor. Its last warps do nothing but
// ask for this program's weights, in the order in which they are wanted, into a ring in shared memory; the other warps
// multiply what has arrived. Weights wait for nobody: while programs meet, norm a row or attend, the ring fills. A layer is
//
//     norm → q, k, v | rope, cache, attention | parts together → output, into the residual | norm → up, activation | down
//
// with a meeting at each bar: a counter in memory that all programs add to and wait for. In a parallel block up stands beside
// q, k, v and down beside output, so there are three. Every program makes the whole row that a product reads for itself, which
// is cheaper than waiting for one to do it.
//
// A product's rows are dealt out in tiles of 16 (of a gated one 8 gates and their 8 ups), each program a stretch of them. A
// piece of the ring is 1,024 bytes of each row of a tile. A sum may be taken in any order, so a lane's 16 bytes of a row are the
// operand of tensor cores as they lie there, and the matching inputs are the other: column 0 of 8 that are all the same. The
// warps take pieces' 64-byte columns in turn and add up at a tile's end, always in the same order.
//
// Source: the idea of one kernel a step is "No bubbles" (Spector et al., 2025, megakernels for Llama-1B); products by permuted
// operands and 4-bit codes as bits of larger numbers are Marlin's (Frantar et al., 2024).

// --- what is computed from one_token.py's numbers
constexpr int Q = H * D, QKV = (H + 2 * HK) * D, G = H / HK;
constexpr int ROW = PIECE + 64;  // rows of a piece must not meet in shared memory's banks
constexpr int SCALE_BYTES = FORM == 2 ? PIECE * 2 / GROUP * 32 : 0;  // of a piece with 4-bit codes
constexpr int STAGE = 16 * ROW + SCALE_BYTES;
__device__ constexpr int row_bytes(int inputs) { return FORM == 0 ? inputs * 2 : FORM == 2 ? inputs / 2 : inputs; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int WIDEST = most(E, most(F, Q));
constexpr int INPUT = WIDEST * (FORM == 3 ? 1 : 2);
constexpr int SUMS = FORM == 2 ? WIDEST / 32 * 4 : 0;

// --- attention
constexpr int BYTES = CACHE == 16 ? 2 : 1;     // of a cached number
constexpr int LANES = D * BYTES / 16;          // of a key
constexpr int EACH = 16 / BYTES;               // numbers of a lane
constexpr int KEYS = THREADS / LANES;          // taken at once
constexpr int DEEP = 4, CHUNK = DEEP * KEYS;   // asked for at once
constexpr int PER_LANE = (D + 31) / 32;        // numbers of a head
constexpr int ALIKE = BYTES == 1 ? THREADS / D : WARPS;  // partial sums of a value's number, when all keys are through
constexpr int ATTEND = 4 * (G * D + 2 * D + (G + 2) * D + G * CHUNK + G + ALIKE * G * D);

// --- shared memory
constexpr int BARRIERS = 0, ROWS = BARRIERS + 16 * 32, TILES = ROWS + 2 * 8 * 32, SCRATCH = TILES + 2 * WARPS * 16 * 4;
constexpr int SUMS_AT = SCRATCH + 256, INPUT_AT = (SUMS_AT + SUMS + 127) / 128 * 128;
constexpr int RING = (INPUT_AT + most(INPUT, ATTEND) + 127) / 128 * 128;
constexpr int STAGES = (SHARED - RING) / STAGE < 16 ? (SHARED - RING) / STAGE : 16;
static_assert(STAGES >= 3, "too little shared memory");
static_assert(E % 16 == 0 && F % 16 == 0 && QKV % 16 == 0 && G <= 8 && LANES <= 32, "a shape that one_token.py should refuse");

// What a layer's row of the table points at, in this order (`POINTERS`).
enum { NORM_W, NORM_B, MLP_W, MLP_B, Q_NORM, K_NORM, K_AT, V_AT, K_SCALE, V_SCALE, QKV_W, QKV_S, QKV_B, OUT_W, OUT_S, OUT_B, UP_W,
       UP_S, UP_B, DOWN_W, DOWN_S, DOWN_B, NUM_POINTERS };

__device__ __forceinline__ u32 pair(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
__device__ __forceinline__ void numbers(const uint4& v, float* y) {  // 8 of the model's type
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = number((u16)words[i]);
        y[2 * i + 1] = number((u16)(words[i] >> 16));
    }
}
__device__ __forceinline__ void from_e4m3(u32 codes, float& low, float& high) { apart(halves(codes), low, high); }  // the low two
__device__ __forceinline__ float activate(float x) {
    if (KIND == 0) return x / (1.0f + power2(-1.4426950408889634f * x));
    if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (KIND == 2) return x / (1.0f + power2(-2.0f * 1.4426950408889634f * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
    x = fmaxf(x, 0.0f);
    return KIND == 3 ? x : x * x;
}

// --- meetings: of all programs (counter 0), and of those that attend (1); counter 2 counts who leaves
__device__ __forceinline__ void wait(const u32* counter, u32 arrivals) {
    if (threadIdx.x == 0)
        while (read(counter) < arrivals) {
        }
    together();
}

// --- sums and maxima over the threads that multiply
template <bool MAXIMUM>
__device__ __forceinline__ float over_all(float x, float* scratch) {
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        const float y = __shfl_xor_sync(~0u, x, i);
        x = MAXIMUM ? fmaxf(x, y) : x + y;
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    together();
    x = scratch[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) x = MAXIMUM ? fmaxf(x, scratch[i]) : x + scratch[i];
    together();  // before the next writes there
    return x;
}

// --- the products
struct Place {  // in the ring, and which of two buffers takes a tile's sums
    u32 stage = 0, parity = 0, buffer = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

template <int TILES_>
__device__ __forceinline__ int first_tile(int program) { return (int)((long long)program * TILES_ / PROGRAMS); }

// Asks for this program's tiles of a product [N, K]; a gated one's N counts its gates alone. A copy costs the warp that asks for
// it some 60 cycles, so ASKERS share a piece's rows. No more than DEPTH pieces are under way: beyond what keeps the memory busy,
// it only becomes slower, for the meetings too. The scales of 4-bit codes lie as they are wanted: [tile, group, 16].
template <int N, int K, bool GATES>
__device__ __forceinline__ void ask(const u8* weight, const u8* scales, Place& place, Place& arrived, u32& asked, u32 smem, int program, int asker, int lane, u64 policy) {
    constexpr int TOTAL = N / (GATES ? 8 : 16), BYTES_OF_ROW = row_bytes(K), PIECES = (BYTES_OF_ROW + PIECE - 1) / PIECE;
    const int end = first_tile<TOTAL>(program + 1), mine = asker * (16 / ASKERS) + lane;
    for (int tile = first_tile<TOTAL>(program); tile < end; tile++) {
        const int row = GATES ? (mine < 8 ? tile * 8 + mine : N + tile * 8 + mine - 8) : tile * 16 + mine;
        const u8 *from = weight + (long long)row * BYTES_OF_ROW, *from_scales = scales + (long long)tile * (K / GROUP * 32);
#pragma unroll 1
        for (int piece = 0; piece < PIECES; piece++) {
            const u32 full = smem + BARRIERS + place.stage * 16, to = smem + RING + place.stage * STAGE;
            const int bytes = BYTES_OF_ROW % PIECE && piece == PIECES - 1 ? BYTES_OF_ROW % PIECE : PIECE;
            const int more = FORM == 2 && asker == ASKERS - 1 ? bytes * 2 / GROUP * 32 : 0;
            until(full + 8, place.parity ^ 1);
            if (asked++ >= DEPTH) {
                until(smem + BARRIERS + arrived.stage * 16, arrived.parity);
                arrived.next();
            }
            if (lane == 0) expect(full, 16 / ASKERS * bytes + more);
            __syncwarp();
            if (lane < 16 / ASKERS) bring(to + mine * ROW, from + piece * PIECE, bytes, full, policy);
            if (FORM == 2 && more && lane == 0) bring(to + 16 * ROW, from_scales + piece * SCALE_BYTES, more, full, policy);
            place.next();
        }
    }
}

template <int F_> struct Sum { typedef float type; };
template <> struct Sum<3> { typedef int type; };
typedef Sum<FORM>::type Total;

// What a row of a tile needs at its end, asked for a tile ahead. Thread t of the first 16 has row t.
struct AtEnd {
    float scale = 1.0f, bias = 0.0f, residual = 0.0f;
};

enum { STORE, ACTIVATE, ADD };

// This program's tiles of a product with the input that `prepare` left, to out (STORE, ACTIVATE) or into the residual (ADD).
template <int N, int K, int CODES, int END, bool BIASED>
struct Product {
    static constexpr bool GATES = END == ACTIVATE && GATED;
    static constexpr int TOTAL = N / (GATES ? 8 : 16), BYTES_OF_ROW = row_bytes(K), PIECES = (BYTES_OF_ROW + PIECE - 1) / PIECE;
    static constexpr int TURNS = PIECE / 64 / WARPS, SUMS_OF = FORM == 2 ? 1 : TURNS;

    static __device__ __forceinline__ int row_of(int tile) {
        const int t = threadIdx.x;
        return GATES ? (t < 8 ? tile * 8 + t : N + tile * 8 + t - 8) : tile * 16 + t;
    }
    static __device__ __forceinline__ AtEnd end_of(int tile, int end_tile, const u64* row, int scales, const u16* residual) {
        AtEnd end;
        if (threadIdx.x < 16 && tile < end_tile) {
            const int n = row_of(tile);
            if (FORM == 1 || FORM == 3) end.scale = ((const float*)row[scales])[n];
            if (BIASED) end.bias = number(((const u16*)row[scales + 1])[n]);
            if (END == ADD) end.residual = number(fresh2(residual + n));
        }
        return end;
    }
    static __device__ __forceinline__ AtEnd first(int program, const u64* row, int scales, const u16* residual) {
        return end_of(first_tile<TOTAL>(program), first_tile<TOTAL>(program + 1), row, scales, residual);
    }
    // `ahead` is what `first` said; x_scale what the input's codes are to be multiplied with.
    static __device__ void run(AtEnd ahead, const u64* row, int scales, u16* out, float x_scale, Place& place, u8* memory, int program) {
        const u32 smem = shared(memory);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, end = first_tile<TOTAL>(program + 1);
        const u32 mine = (lane / 4) * ROW + lane % 4 * 16;
        for (int tile = first_tile<TOTAL>(program); tile < end; tile++) {
            const AtEnd now = ahead;
            ahead = end_of(tile + 1, end, row, scales, out);
            Total sum[SUMS_OF][4] = {};
#pragma unroll 1
            for (int piece = 0; piece < PIECES; piece++) {
                const u32 full = smem + BARRIERS + place.stage * 16, stage = smem + RING + place.stage * STAGE;
                const int bytes = BYTES_OF_ROW % PIECE && piece == PIECES - 1 ? BYTES_OF_ROW % PIECE : PIECE;
                until(full, place.parity);
#pragma unroll SUMS_OF
                for (int turn = 0; turn < TURNS; turn++) {
                    const int column = (warp * TURNS + turn) * 64;
                    if (BYTES_OF_ROW % PIECE == 0 || column < bytes) columns(sum[turn % SUMS_OF], stage + mine, stage, memory, piece, column, lane);
                }
                __syncwarp();
                if (lane == 0) arrive(full + 8);
                place.next();
            }
            float* tiles = (float*)(memory + TILES) + place.buffer * WARPS * 16;
            place.buffer ^= 1;
            if (lane % 4 == 0) {
                Total low = 0, high = 0;
#pragma unroll
                for (int i = 0; i < SUMS_OF; i++) low += sum[i][0], high += sum[i][2];
                tiles[warp * 16 + lane / 4] = (float)low;
                tiles[warp * 16 + lane / 4 + 8] = (float)high;
            }
            together();
            if (warp == 0) {
                float y = 0.0f;
                if (lane < 16)
#pragma unroll
                    for (int i = 0; i < WARPS; i++) y += tiles[i * 16 + lane];
                y = y * (FORM == 1 || FORM == 3 ? now.scale * x_scale : 1.0f) + now.bias;
                const int n = row_of(tile);
                if (GATES) {
                    const float up = __shfl_down_sync(~0u, y, 8);
                    if (lane < 8) out[n] = rounded(activate(y) * up);
                } else if (lane < 16)
                    out[n] = rounded(END == ADD ? now.residual + y : END == ACTIVATE ? activate(y) : y);
            }
        }
    }
    // 64 bytes of 16 rows
    static __device__ __forceinline__ void columns(Total (&sum)[4], u32 weights, u32 stage, const u8* memory, int piece, int column, int lane) {
        const uint4 low = at16(weights + column), high = at16(weights + 8 * ROW + column);
        const u32 input = shared(memory) + INPUT_AT;
        if constexpr (FORM == 1) {
            const u32 at = input + (piece * PIECE + column + lane % 4 * 16) * 2;
            const uint4 x = at16(at), more = at16(at + 16);
            multiply(sum, halves(low.x), halves(high.x), high_halves(low.x), high_halves(high.x), x.x, x.y);
            multiply(sum, halves(low.y), halves(high.y), high_halves(low.y), high_halves(high.y), x.z, x.w);
            multiply(sum, halves(low.z), halves(high.z), high_halves(low.z), high_halves(high.z), more.x, more.y);
            multiply(sum, halves(low.w), halves(high.w), high_halves(low.w), high_halves(high.w), more.z, more.w);
        } else if constexpr (FORM != 2) {
            const uint4 x = at16(input + piece * PIECE + column + lane % 4 * 16);
            multiply(sum, low.x, high.x, low.y, high.y, x.x, x.y);
            multiply(sum, low.z, high.z, low.w, high.w, x.z, x.w);
        } else {
            // Four codes of a 16-bit word belong to the quarters of a chunk (`quantize.pack4`). A code c in the low bits of
            // bfloat16's 128 (float16's 1024) makes 128 + c; `sums` holds what that is too much.
            constexpr u32 OFFSET = HALF ? 0x64006400u : 0x43004300u;
            constexpr int CHUNK_BYTES = CODES / 2;
            const int chunk = column / CHUNK_BYTES, inside = column % CHUNK_BYTES / 2;
            const int first = (piece * (PIECE / CHUNK_BYTES) + chunk) * CODES + inside;
            const u32 a[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
            const u16* scales = (const u16*)(memory + (stage - shared(memory)) + 16 * ROW) + chunk * (CODES / GROUP) * 16;
            const float* sums = (const float*)(memory + SUMS_AT);
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const int from = first + quarter * (CODES / 4);
                const uint4 x = at16(input + (from + lane % 4 * 8) * 2);
                const float much = sums[from / 32];
                float c[4] = {much, much, much, much};
                u32 b[8];
#pragma unroll
                for (int i = 0; i < 8; i++) b[i] = (a[i] >> 4 * quarter & 0x000f000fu) | OFFSET;
                multiply(c, b[0], b[1], b[2], b[3], x.x, x.y);
                multiply(c, b[4], b[5], b[6], b[7], x.z, x.w);
                const int group = quarter * (CODES / 4) / GROUP;
                sum[0] += c[0] * number(scales[group * 16 + lane / 4]);
                sum[2] += c[2] * number(scales[group * 16 + lane / 4 + 8]);
            }
        }
    }
};

// The row that a product reads, in its form; returns what codes are to be multiplied with. `load(v, y)` gives numbers 8 v …
// 8 v + 7. NORM_ is 0, 1 (root mean square) or 2 (layer); `weight` and `bias` are the norm's.
template <int K, int NORM_, typename Load>
__device__ __forceinline__ float prepare(Load load, const u16* weight, const u16* bias, float eps, float offset, u8* memory) {
    constexpr int VECTORS = K / 8, TIMES = (VECTORS + THREADS - 1) / THREADS;
    float* scratch = (float*)(memory + SCRATCH);
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
        const float mean = over_all<false>(sum, scratch) / K;
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
        const float factor = rsqrtf(over_all<false>(squares, scratch) / K + eps);
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (i * THREADS + threadIdx.x < VECTORS) {
                float by[8], and_[8];
                numbers(w[i], by);
                if (NORM_BIAS) numbers(b[i], and_);
#pragma unroll
                for (int j = 0; j < 8; j++) y[i][j] = y[i][j] * factor * (by[j] + offset) + (NORM_BIAS ? and_[j] : 0.0f);
            }
    }
    float scale = 1.0f;
    if (FORM == 1 || FORM == 3) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < TIMES; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(y[i][j]));
        scale = fmaxf(over_all<true>(top, scratch), SMALLEST) / (FORM == 1 ? 448.0f : 127.0f);
    }
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const int v = i * THREADS + threadIdx.x;
        if (FORM == 1) {  // rounded, as float16
            const float back = 1.0f / scale;
            u32 z[4];
#pragma unroll
            for (int j = 0; j < 4; j++) z[j] = halves(e4m3(y[i][2 * j] * back, y[i][2 * j + 1] * back));
            if (v < VECTORS) *(uint4*)(memory + INPUT_AT + v * 16) = make_uint4(z[0], z[1], z[2], z[3]);
        } else if (FORM == 3) {
            const float back = 1.0f / scale;
            u32 z[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < 8; j++) z[j / 4] |= (u32)(__float2int_rn(y[i][j] * back) & 255) << 8 * (j % 4);
            if (v < VECTORS) *(uint2*)(memory + INPUT_AT + v * 8) = make_uint2(z[0], z[1]);
        } else {
            const uint4 x = make_uint4(pair(y[i][0], y[i][1]), pair(y[i][2], y[i][3]), pair(y[i][4], y[i][5]), pair(y[i][6], y[i][7]));
            if (v < VECTORS) *(uint4*)(memory + INPUT_AT + v * 16) = x;
            if (FORM == 2) {  // of each 32 inputs
                float z[8], sum = 0.0f;
                numbers(x, z);
#pragma unroll
                for (int j = 0; j < 8; j++) sum += z[j];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (v < VECTORS && v % 4 == 0) ((float*)(memory + SUMS_AT))[v / 4] = sum * -(HALF ? 1032.0f : 136.0f);
            }
        }
    }
    together();
    return scale;
}

// --- attention
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

// A number as the cache keeps it (finite: attention reads whole blocks), into the cache and back.
__device__ __forceinline__ float kept(float x, float scale, u8* to, long long at) {
    if (CACHE == 16) {
        u16 code = rounded(x);
        if (!(fabsf(number(code)) < __int_as_float(0x7f800000))) code = 0;
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

struct Attention {
    const int* table;  // of blocks
    int head, first, old, last;  // this program's kv head, its keys first … old − 1 from the cache, and whether the new one
    u8 *k, *v;
    uint4 keys[DEEP], values[DEEP];
    float k_scale, v_scale, cos[PER_LANE], sin[PER_LANE];
    long long block;  // of the new key, with the head

    __device__ __forceinline__ void ask_keys(int start) {
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            const int key = start + i * KEYS + threadIdx.x / LANES;
            if (key < old)
                keys[i] = *(const uint4*)(k + (((long long)table[key / BLOCK_SIZE] * HK + head) * BLOCK_SIZE + key % BLOCK_SIZE) * (D * BYTES) + threadIdx.x % LANES * 16);
        }
    }
    __device__ __forceinline__ void ask_values(int start) {
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if (BYTES == 2) {
                const int key = start + i * KEYS + threadIdx.x / LANES;
                if (key < old)
                    values[i] = *(const uint4*)(v + (((long long)table[key / BLOCK_SIZE] * HK + head) * BLOCK_SIZE + key % BLOCK_SIZE) * (D * BYTES) + threadIdx.x % LANES * 16);
            } else {  // 16 keys of one dimension
                const int key = start + (i * ALIKE + threadIdx.x / D) * 16;
                if (key < old)
                    values[i] = *(const uint4*)(v + (((long long)table[key / BLOCK_SIZE] * HK + head) * D + threadIdx.x % D) * BLOCK_SIZE + key % BLOCK_SIZE);
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

    // Its part of the heads' sums to `parts` [SPLITS, H, D] and `tops` [SPLITS, H, 2]: not yet divided, the largest score and the
    // sum of weights.
    __device__ __forceinline__ void run(const u64* row, const u16* qkv, int length, int split, float* parts, float* tops, u8* memory) {
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
            const int at = length - 1;
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
                    new_v[d] = kept(y, v_scale, v, BYTES == 1 ? (block * D + d) * BLOCK_SIZE + at % BLOCK_SIZE : (block * BLOCK_SIZE + at % BLOCK_SIZE) * D + d);
                else
                    new_k[((d % EACH / 4) * LANES + d / EACH) * 4 + d % 4] = kept(y, k_scale, k, (block * BLOCK_SIZE + at % BLOCK_SIZE) * D + d);
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
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int j = 0; j < WIDE; j++) acc[g][j] = last && (BYTES == 2 ? threadIdx.x / LANES == 0 : threadIdx.x / D == 0) ? new_v[of + j] : 0.0f;
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

// Splits of the keys of a head: short parts cost less than they save, and all parts are read by every program.
__device__ __forceinline__ int splits_of(int length) {
    const int wanted = (length + 63) / 64, least = length <= 1024 ? SPLITS < 8 ? SPLITS : 8 : SPLITS;
    return wanted < least ? wanted : least;
}

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
        barriers_made();
    }
    u64* rows = (u64*)(memory + ROWS);
    if (threadIdx.x < NUM_POINTERS) rows[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
    Place place;
    if (warp >= WARPS) {
        const int asker = warp - WARPS;
        const u64 policy = read_once();
        u64 row = lane < NUM_POINTERS ? table[lane] : 0;
        Place arrived;
        u32 asked = 0;
        auto pointer = [&](int i) { return (const u8*)__shfl_sync(~0u, row, i); };
        for (int layer = 0; layer < num_layers; layer++) {
            const u64 next = lane < NUM_POINTERS && layer + 1 < num_layers ? table[(layer + 1) * NUM_POINTERS + lane] : 0;
            ask<QKV, E, false>(pointer(QKV_W), pointer(QKV_S), place, arrived, asked, smem, program, asker, lane, policy);
            if (PARALLEL) ask<F, E, GATED>(pointer(UP_W), pointer(UP_S), place, arrived, asked, smem, program, asker, lane, policy);
            ask<E, Q, false>(pointer(OUT_W), pointer(OUT_S), place, arrived, asked, smem, program, asker, lane, policy);
            if (!PARALLEL) ask<F, E, GATED>(pointer(UP_W), pointer(UP_S), place, arrived, asked, smem, program, asker, lane, policy);
            ask<E, F, false>(pointer(DOWN_W), pointer(DOWN_S), place, arrived, asked, smem, program, asker, lane, policy);
            row = next;
        }
        return;
    }
    typedef Product<QKV, E, CODES_E, STORE, QKV_BIAS> Qkv;
    typedef Product<E, Q, CODES_Q, ADD, OUT_BIAS> Out;
    typedef Product<F, E, CODES_E, ACTIVATE, UP_BIAS> Up;
    typedef Product<E, F, CODES_F, ADD, DOWN_BIAS> Down;
    const int length = seq_lens[0], splits = splits_of(length), items = splits * HK;
    const int each = ((length + splits - 1) / splits + 63) / 64 * 64;  // keys of a split
    const float* angles = cos_sin + positions[0] * R;
    u32 met = 0, attended = 0;
    auto residual = [&](int v, float* y) { numbers(fresh16((const uint4*)x + v), y); };
    auto middle = [&](int v, float* y) { numbers(fresh16((const uint4*)mid + v), y); };
    for (int layer = 0; layer < num_layers; layer++) {
        const u64* row = rows + layer % 2 * 32;
        if (warp == WARPS - 1 && lane < NUM_POINTERS && layer + 1 < num_layers) rows[(layer + 1) % 2 * 32 + lane] = table[(layer + 1) * NUM_POINTERS + lane];
        const u16 *norm = (const u16*)row[NORM_W], *norm_bias = (const u16*)row[NORM_B], *mlp = (const u16*)row[MLP_W], *mlp_bias = (const u16*)row[MLP_B];
        // --- q, k, v
        AtEnd ahead = Qkv::first(program, row, QKV_S, x);
        if (layer) wait(counters, met);
        float x_scale = prepare<E, NORM>(residual, norm, norm_bias, EPS, OFFSET_OF_NORM, memory);
        Qkv::run(ahead, row, QKV_S, qkv, x_scale, place, memory, program);
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
        if (program < items) {
            Attention a;
            const int split = program / HK;
            a.table = block_table;
            a.head = program % HK;
            a.first = split * each;
            a.old = min((split + 1) * each, length - 1);
            a.last = length - 1 < (split + 1) * each && length - 1 >= split * each;
            a.k = (u8*)row[K_AT];
            a.v = (u8*)row[V_AT];
            a.ask(row, angles, length);
            wait(counters, met);
            a.run(row, qkv, length, split, parts, tops, memory);
            if (threadIdx.x == 0) add(counters + 1);
        }
        attended += items;
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
                        const u32 words[8] = {low[i].x, low[i].y, low[i].z, low[i].w, high[i].x, high[i].y, high[i].z, high[i].w};
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
        // --- up
        if (!PARALLEL) {
            if (warp == 0) {
                __syncwarp();
                if (lane == 0) add(counters);
            }
            met += PROGRAMS;
            ahead = Up::first(program, row, UP_S, x);
            wait(counters, met);
            x_scale = prepare<E, MLP_NORM>(residual, mlp, mlp_bias, MLP_EPS, OFFSET_OF_NORM, memory);
            Up::run(ahead, row, UP_S, mid, x_scale, place, memory, program);
            if (warp == 0) {
                __syncwarp();
                if (lane == 0) add(counters);
            }
            met += PROGRAMS;
        }
        // --- down
        ahead = Down::first(program, row, DOWN_S, x);
        if (PARALLEL) together();  // all are through with the input before
        else wait(counters, met);
        x_scale = prepare<F, 0>(middle, nullptr, nullptr, 0.0f, 0.0f, memory);
        Down::run(ahead, row, DOWN_S, x, x_scale, place, memory, program);
        if (warp == 0) {
            __syncwarp();
            if (lane == 0 && layer + 1 < num_layers) add(counters);
        }
        met += PROGRAMS;
    }
    // The last to leave makes the counters ready for the next step.
    if (threadIdx.x == 0 && add_and_read(counters + 2) == PROGRAMS - 1) counters[0] = counters[1] = counters[2] = 0;
}
