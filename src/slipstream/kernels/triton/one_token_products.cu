// Part of `one_token.cu`: its sizes and shared memory, the ring of weights, the products, and the rows that they read.

// --- what is computed from one_token.py's numbers
constexpr int G = H / HK;
constexpr int ASKING = LATENT ? H * (PLAIN + R) : (H + 2 * HK) * D;  // rows of the weight of queries (and keys and values)
constexpr int LATENTS = LATENT ? RANK + R : 16;                      // of the one that makes a latent and the key beside it
constexpr int QKV = ASKING + (LATENT ? LATENTS : 0), Q = H * D;      // numbers before attention and behind it
constexpr int ROW = PIECE + 64;  // rows of a piece must not meet in shared memory's banks
constexpr int SCALE_BYTES = FORM == 2 ? PIECE * 2 / GROUP * 32 : 0;  // of a piece with 4-bit codes
constexpr int STAGE = 16 * ROW + SCALE_BYTES;
__device__ constexpr int row_bytes(int inputs) { return FORM == 0 ? inputs * 2 : FORM == 2 ? inputs / 2 : inputs; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int MIDS = most(F, X ? TOP * FE + FS : 0);  // what a layer's down products read, of experts one beside the other
constexpr int WIDEST = most(E, most(MIDS, Q));
__device__ constexpr int input_bytes(int inputs) { return inputs * (FORM == 3 ? 1 : 2); }
constexpr int INPUT = input_bytes(WIDEST);
constexpr int SUMS = FORM == 2 ? WIDEST / 32 * 4 : 0;

// --- attention
constexpr int BYTES = CACHE == 16 ? 2 : 1;     // of a cached number
constexpr int LANES = D * BYTES / 16;          // of a key
constexpr int EACH = 16 / BYTES;               // numbers of a lane
constexpr int KEYS = THREADS / LANES;          // taken at once
constexpr int DEEP = 4, CHUNK = DEEP * KEYS;   // asked for at once
constexpr int PER_LANE = (D + 31) / 32;        // numbers of a head
constexpr int ALIKE = BYTES == 1 ? THREADS / D : WARPS;  // partial sums of a value's number, when all keys are through
constexpr int ATTEND = 4 * (LATENT ? TOGETHER * (R + RANK) + PLAIN + R + RANK + WARPS * (RANK + 2)
                                   : G * D + 2 * D + (G + 2) * D + G * CHUNK + G + ALIKE * G * D);

// --- shared memory
constexpr int TABLE = 64;  // pointers of a layer there is room for
constexpr int BARRIERS = 0, ROUTED = 16 * 16, ROWS = BARRIERS + 16 * 32, TILES = ROWS + 2 * 8 * TABLE;
constexpr int SCRATCH = TILES + 2 * WARPS * 16 * 4;
constexpr int FACTORS = SCRATCH + 256;  // of a tile's sums over experts [TOP, 16]
constexpr int SUMS_AT = FACTORS + (X ? TOP * 64 : 0), INPUT_AT = (SUMS_AT + SUMS + 127) / 128 * 128;
constexpr int RING = (INPUT_AT + most(INPUT, ATTEND) + 127) / 128 * 128;
constexpr int STAGES = (SHARED - RING) / STAGE < 16 ? (SHARED - RING) / STAGE : 16;
static_assert(STAGES >= 3, "too little shared memory");
static_assert(STAGES <= 16 && ROUTED + 8 <= ROWS, "the barriers' places");
static_assert(E % 16 == 0 && F % 16 == 0 && ASKING % 16 == 0 && LATENTS % 16 == 0 && G <= 8 && LANES <= 32,
              "a shape that one_token.py should refuse");

// What a layer's row of the table points at, in this order (`POINTERS`).
enum { NORM_W, NORM_B, MLP_W, MLP_B, Q_NORM, K_NORM, K_AT, V_AT, K_SCALE, V_SCALE, QKV_W, QKV_S, QKV_B, OUT_W, OUT_S, OUT_B,
       UP_W, UP_S, UP_B, DOWN_W, DOWN_S, DOWN_B, ROUTER_W, ROUTER_B, CORRECTION, SHARED_UP_W, SHARED_UP_S, SHARED_DOWN_W,
       SHARED_DOWN_S, SHARED_WEIGHT_W, EXPERT_COUNTS, LOGITS, LATENT_W, LATENT_S, KEYS_W, VALUES_W, NUM_POINTERS };

__device__ __forceinline__ u32 pair(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
__device__ __forceinline__ void numbers(const uint4& v, float* y) {  // 8 of the model's type
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = number((u16)words[i]);
        y[2 * i + 1] = number((u16)(words[i] >> 16));
    }
}
__device__ __forceinline__ void from_e4m3(u32 codes, float& low, float& high) {  // the low two
    apart(halves(codes), low, high);
}
__device__ __forceinline__ float activate(float x) {
    if (KIND == 0) return x / (1.0f + power2(-1.4426950408889634f * x));
    if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (KIND == 2) return x / (1.0f + power2(-2.0f * 1.4426950408889634f * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
    x = fmaxf(x, 0.0f);
    return KIND == 3 ? x : x * x;
}

// --- meetings: of all programs (counter 0), and of those that attend (1); counter 2 counts who leaves
__device__ __forceinline__ void wait(const u32* counter, u32 arrivals, u32 tell = 0) {  // `tell`: a barrier to arrive at then
    if (threadIdx.x == 0) {
        while (read(counter) < arrivals) {
        }
        if (tell) arrive(tell);
    }
    together();
}
__device__ __forceinline__ void meet(u32* counter, u32& arrivals) {  // when warp 0, which writes what products give, is through
    if (threadIdx.x < 32) {
        __syncwarp();
        if (threadIdx.x == 0) add(counter);
    }
    arrivals += PROGRAMS;
}

// --- sums and maxima over a warp, and over the threads that multiply
__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
    for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
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

// Which matrices a product has: one; of each chosen expert one, with outputs side by side; or such, whose outputs are summed
// up.
enum Matrices { ONE, BESIDE, SUMMED };
struct Chosen {  // lane j of a warp: a token's expert j and its weight
    int expert = 0;
    float weight = 0.0f;
    __device__ __forceinline__ int of(int j) const { return __shfl_sync(~0u, expert, j); }
};
// The row of a weight [experts, N (of gates and of ups) or N] that is row t of a tile.
template <int N, bool GATES>
__device__ __forceinline__ int row_in(int expert, int tile, int t) {
    return GATES ? expert * (2 * N) + (t < 8 ? 0 : N - 8) + tile * 8 + t : expert * N + tile * 16 + t;
}

// Tiles are dealt out to the programs; those of a product that stands among AMONG tiles, behind BEFORE of them, together with
// the others.
template <int TILES_, int BEFORE = 0, int AMONG = 0>
__device__ __forceinline__ int first_tile(int program) {
    const int tile = (int)((long long)program * (AMONG ? AMONG : TILES_) / PROGRAMS) - BEFORE;
    return tile < 0 ? 0 : tile < TILES_ ? tile : TILES_;
}

// A warp that asks for weights, one of ASKERS: a copy costs the warp that asks for it some 60 cycles, so they share a piece's
// rows. No more than DEPTH pieces are under way: beyond what keeps the memory busy, it only becomes slower, for the meetings
// too.
struct Asker {
    const u32 smem;
    const int program, which, lane;
    const u64 once;        // the policy of what is read once
    Place place, arrived;  // of the next piece, and of the oldest under way
    u32 under_way = 0, choices = 0;  // pieces; layers whose choice of experts was waited for

    __device__ __forceinline__ Asker(u32 smem, int program, int which, int lane)
        : smem(smem), program(program), which(which), lane(lane), once(read_once()) {}
    // The row of a piece that this lane asks for, if it is one of the first.
    __device__ __forceinline__ int row() const { return which * (16 / ASKERS) + lane; }

    // Asks for 16 rows of a piece, `bytes` of each from this lane's `from` on, and `more` behind them (the last asker).
    __device__ __forceinline__ void piece(const u8* from, int bytes, const u8* from_more, int more, u64 policy,
                                          u32 depth = DEPTH) {
        const u32 full = smem + BARRIERS + place.stage * 16, to = smem + RING + place.stage * STAGE;
        until(full + 8, place.parity ^ 1);
        for (; under_way >= depth; under_way--) {
            until(smem + BARRIERS + arrived.stage * 16, arrived.parity);
            arrived.next();
        }
        under_way++;
        if (lane == 0) expect(full, 16 / ASKERS * bytes + more);
        __syncwarp();
        if (lane < 16 / ASKERS) bring(to + row() * ROW, from, bytes, full, policy);
        if (more && lane == 0) bring(to + 16 * ROW, from_more, more, full, policy);
        place.next();
    }

    // Asks for this program's tiles of a product [N, K]; a gated one's N counts its gates alone. The scales of 4-bit codes lie
    // as they are wanted: [tile, group, 16].
    template <int N, int K, bool GATES, Matrices OF = ONE, int BEFORE = 0, int AMONG = 0>
    __device__ __forceinline__ void product(const u8* weight, const u8* scales, Chosen chosen = {}) {
        constexpr int EACH_ = N / (GATES ? 8 : 16), TOTAL = OF == BESIDE ? TOP * EACH_ : EACH_, PARTS = OF == SUMMED ? TOP : 1;
        constexpr int BYTES_OF_ROW = row_bytes(K), PIECES = (BYTES_OF_ROW + PIECE - 1) / PIECE;
        const int end = first_tile<TOTAL, BEFORE, AMONG>(program + 1);
        for (int step = first_tile<TOTAL, BEFORE, AMONG>(program) * PARTS; step < end * PARTS; step++) {
            const int tile = step / PARTS;
            const int expert = OF == ONE ? 0 : chosen.of(OF == BESIDE ? tile / EACH_ : step % PARTS);
            const u8* from = weight + (long long)row_in<N, GATES>(expert, tile % EACH_, row()) * BYTES_OF_ROW;
            const u8* from_scales = scales + (long long)tile * (K / GROUP * 32);
#pragma unroll 1
            for (int i = 0; i < PIECES; i++) {
                const int bytes = BYTES_OF_ROW % PIECE && i == PIECES - 1 ? BYTES_OF_ROW % PIECE : PIECE;
                const int more = FORM == 2 && which == ASKERS - 1 ? bytes * 2 / GROUP * 32 : 0;
                piece(from + i * PIECE, bytes, from_scales + i * SCALE_BYTES, more, once);
            }
        }
    }
};

template <int F_> struct Sum { typedef float type; };
template <> struct Sum<3> { typedef int type; };
typedef Sum<FORM>::type Total;

// What a row of a tile needs at its end, asked for a tile ahead. Thread t of the first 16 has row t.
struct AtEnd {
    float scale = 1.0f, bias = 0.0f, residual = 0.0f;
};

enum { STORE, ACTIVATE, ADD };

// This program's tiles of a product with the input that `prepare` left, to out (STORE, ACTIVATE) or into the residual (ADD).
// What is summed over experts has the inputs of each, one beside the other, and all that a part's sums are multiplied with.
template <int N, int K, int CODES, int END, bool BIASED, Matrices OF = ONE, int BEFORE = 0, int AMONG = 0>
struct Product {
    static constexpr bool GATES = END == ACTIVATE && GATED, SCALED = FORM == 1 || FORM == 3;
    static constexpr int OF_ONE = N / (GATES ? 8 : 16), TOTAL = OF == BESIDE ? TOP * OF_ONE : OF_ONE;
    static constexpr int PARTS = OF == SUMMED ? TOP : 1;
    static constexpr int BYTES_OF_ROW = row_bytes(K), PIECES = (BYTES_OF_ROW + PIECE - 1) / PIECE;
    static constexpr int TURNS = PIECE / 64 / WARPS, SUMS_OF = FORM == 2 ? 1 : TURNS;

    // A program's first tile.
    static __device__ __forceinline__ int begin(int program) { return first_tile<TOTAL, BEFORE, AMONG>(program); }
    static __device__ __forceinline__ AtEnd end_of(int tile, int end_tile, const u64* row, int scales, const u16* residual,
                                                   Chosen chosen) {
        AtEnd end;
        const int t = threadIdx.x % 16, part = threadIdx.x / 16;
        const int expert = OF == ONE ? 0 : chosen.of(OF == BESIDE ? tile / OF_ONE : part);
        if (part < PARTS && tile < end_tile) {
            const int n = row_in<N, GATES>(expert, tile % OF_ONE, t);
            if (SCALED) end.scale = ((const float*)row[scales])[n];
            if (BIASED) end.bias = number(((const u16*)row[scales + 1])[n]);
            if (END == ADD && part == 0) end.residual = number(fresh2(residual + tile * 16 + t));
        }
        return end;
    }
    static __device__ __forceinline__ AtEnd first(int program, const u64* row, int scales, const u16* residual,
                                                  Chosen chosen = {}) {
        return end_of(begin(program), begin(program + 1), row, scales, residual, chosen);
    }
    // `ahead` is what `first` said; x_scale what the input's codes are to be multiplied with, or in lane j part j's sums;
    // `input` where it is.
    static __device__ void run(AtEnd ahead, const u64* row, int scales, u16* out, float x_scale, Place& place, u8* memory,
                               int program, Chosen chosen = {}, int input = INPUT_AT) {
        const u32 smem = shared(memory);
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, end = begin(program + 1);
        const u32 mine = (lane / 4) * ROW + lane % 4 * 16;
        float* factors = (float*)(memory + FACTORS);
        for (int tile = begin(program); tile < end; tile++) {
            const AtEnd now = ahead;
            ahead = end_of(tile + 1, end, row, scales, out, chosen);
            if (OF == SUMMED) {
                const float factor = now.scale * __shfl_sync(~0u, x_scale, thread / 16);
                if (thread < PARTS * 16) factors[thread] = factor;
                together();
            }
            float low = 0.0f, high = 0.0f;
#pragma unroll 1
            for (int part = 0; part < PARTS; part++) {
                Total sum[SUMS_OF][4] = {};
#pragma unroll 1
                for (int piece = 0; piece < PIECES; piece++) {
                    const u32 full = smem + BARRIERS + place.stage * 16, stage = smem + RING + place.stage * STAGE;
                    const u32 from = smem + input + part * input_bytes(K);
                    const int bytes = BYTES_OF_ROW % PIECE && piece == PIECES - 1 ? BYTES_OF_ROW % PIECE : PIECE;
                    until(full, place.parity);
#pragma unroll SUMS_OF
                    for (int turn = 0; turn < TURNS; turn++) {
                        const int column = (warp * TURNS + turn) * 64;
                        if (BYTES_OF_ROW % PIECE == 0 || column < bytes)
                            columns(sum[turn % SUMS_OF], stage + mine, stage, from, memory, piece, column, lane);
                    }
                    __syncwarp();
                    if (lane == 0) arrive(full + 8);
                    place.next();
                }
                Total own[2] = {};
#pragma unroll
                for (int i = 0; i < SUMS_OF; i++) own[0] += sum[i][0], own[1] += sum[i][2];
                low += (float)own[0] * (OF == SUMMED ? factors[part * 16 + lane / 4] : 1.0f);
                high += (float)own[1] * (OF == SUMMED ? factors[part * 16 + lane / 4 + 8] : 1.0f);
            }
            float* tiles = (float*)(memory + TILES) + place.buffer * WARPS * 16;
            place.buffer ^= 1;
            if (lane % 4 == 0) {
                tiles[warp * 16 + lane / 4] = low;
                tiles[warp * 16 + lane / 4 + 8] = high;
            }
            together();
            if (warp == 0) {
                float y = 0.0f;
                if (lane < 16)
#pragma unroll
                    for (int i = 0; i < WARPS; i++) y += tiles[i * 16 + lane];
                y = y * (SCALED && OF != SUMMED ? now.scale * x_scale : 1.0f) + now.bias;
                if (GATES) {
                    const float up = __shfl_down_sync(~0u, y, 8);
                    if (lane < 8) out[tile * 8 + lane] = rounded(activate(y) * up);
                } else if (lane < 16)
                    out[tile * 16 + lane] = rounded(END == ADD ? now.residual + y : END == ACTIVATE ? activate(y) : y);
            }
        }
    }
    // 64 bytes of 16 rows
    static __device__ __forceinline__ void columns(Total (&sum)[4], u32 weights, u32 stage, u32 input, const u8* memory,
                                                   int piece, int column, int lane) {
        const uint4 low = at16(weights + column), high = at16(weights + 8 * ROW + column);
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
            const int chunk = column / CHUNK_BYTES, inside = column % CHUNK_BYTES / 2;  // a multiple of 32
            const u32 first = (piece * (PIECE / CHUNK_BYTES) + chunk) * CODES + inside;
            const u32 a[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
            // One address each; a quarter is a constant beyond it.
            const u16* of_chunk = (const u16*)(memory + (stage - shared(memory)) + 16 * ROW) + chunk * (CODES / GROUP) * 16;
            const u16* scales = of_chunk + lane / 4;
            const float* sums = (const float*)(memory + SUMS_AT) + first / 32;
            const u32 inputs = input + (first + lane % 4 * 8) * 2;
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const uint4 x = at16(inputs + quarter * (CODES / 4) * 2);
                const float much = sums[quarter * (CODES / 4) / 32];
                float c[4] = {much, much, much, much};
                u32 b[8];
#pragma unroll
                for (int i = 0; i < 8; i++) b[i] = and_or(a[i] >> 4 * quarter, 0x000f000fu, OFFSET);
                multiply(c, b[0], b[1], b[2], b[3], x.x, x.y);
                multiply(c, b[4], b[5], b[6], b[7], x.z, x.w);
                const int group = quarter * (CODES / 4) / GROUP;
                sum[0] += c[0] * number(scales[group * 16]);
                sum[2] += c[2] * number(scales[group * 16 + 8]);
            }
        }
    }
};

__device__ __forceinline__ uint4 in_model(const float* y) {
    return make_uint4(pair(y[0], y[1]), pair(y[2], y[3]), pair(y[4], y[5]), pair(y[6], y[7]));
}
// 8 numbers of a product's input, in its form; `back` makes codes of them. FP8's are rounded, but as float16.
__device__ __forceinline__ void put(const float* y, float back, int v, u8* input) {
    if (FORM == 1) {
        u32 z[4];
#pragma unroll
        for (int j = 0; j < 4; j++) z[j] = halves(e4m3(y[2 * j] * back, y[2 * j + 1] * back));
        *(uint4*)(input + v * 16) = make_uint4(z[0], z[1], z[2], z[3]);
    } else if (FORM == 3) {
        u32 z[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; j++) z[j / 4] |= (u32)(__float2int_rn(y[j] * back) & 255) << 8 * (j % 4);
        *(uint2*)(input + v * 8) = make_uint2(z[0], z[1]);
    } else
        *(uint4*)(input + v * 16) = in_model(y);
}
__device__ __forceinline__ float scale_of(float top) {  // of codes
    return fmaxf(top, SMALLEST) / (FORM == 1 ? 448.0f : 127.0f);
}

// The row that a product reads, in its form; returns what codes are to be multiplied with. `load(v, y)` gives numbers 8 v …
// 8 v + 7. NORM_ is 0, 1 (root mean square) or 2 (layer); `weight` and `bias` are the norm's. also(i, y) sees a thread's i-th 8
// numbers as they are before they are codes; `input` is where the row goes.
struct Nothing {
    __device__ __forceinline__ void operator()(int, const float*) {}
};
template <int K, int NORM_, typename Load, typename Also = Nothing>
__device__ __forceinline__ float prepare(Load load, const u16* weight, const u16* bias, float eps, float offset, u8* memory,
                                         Also&& also = Also(), int input = INPUT_AT) {
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
#pragma unroll
    for (int i = 0; i < TIMES; i++)
        if (i * THREADS + threadIdx.x < VECTORS) also(i, y[i]);
    float scale = 1.0f;
    if (FORM == 1 || FORM == 3) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < TIMES; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(y[i][j]));
        scale = scale_of(over_all<true>(top, scratch));
    }
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const int v = i * THREADS + threadIdx.x;
        if (FORM == 2) {  // of each 32 inputs
            float z[8], sum = 0.0f;
            numbers(in_model(y[i]), z);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += z[j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (v < VECTORS && v % 4 == 0) ((float*)(memory + SUMS_AT))[v / 4] = sum * -(HALF ? 1032.0f : 136.0f);
        }
        if (v < VECTORS) put(y[i], 1.0f / scale, v, memory + input);
    }
    together();
    return scale;
}
