// Drawing a token of a row of logits without sorting it. A threshold is found by passes that count, or add up, what is at or above a
// value. Once few tokens are between two such values, only these are read.
#pragma once
#include <float.h>
#include <math.h>
#include <string.h>

#include "emit.h"
#include "kernels.h"

namespace ISA {

constexpr float LEAST_WEIGHT = 1e-30f;  // below it a weight counts as 0: what `vexp` makes of −∞ is 1e-38
constexpr int64_t FEW = 64, PART = 1024, MAX_PARTS = 1024;

struct Above {
    double mass;
    int64_t count;
};

static Above above(const float* w, int64_t n, float t) {  // the sum and the number of w ≥ t
    Above found = {0.0, 0};
    for (int64_t first = 0; first < n; first += PART) {
        const int64_t end = first + PART < n ? first + PART : n;
        float mass[16] = {};
        int32_t count[16] = {};
        int64_t i = first;
#if defined(__AVX512F__)
        const __m512 least = _mm512_set1_ps(t);
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (; i + 64 <= end; i += 64)
            for (int j = 0; j < 4; j++) {
                const __m512 v = _mm512_loadu_ps(w + i + 16 * j);
                const __mmask16 kept = _mm512_cmp_ps_mask(v, least, _CMP_GE_OQ);
                sums[j] = _mm512_mask_add_ps(sums[j], kept, sums[j], v);
                found.count += __builtin_popcount(kept);
            }
        _mm512_storeu_ps(mass, _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
#endif
        for (; i + 16 <= end; i += 16)
            for (int j = 0; j < 16; j++) {
                mass[j] += w[i + j] >= t ? w[i + j] : 0.0f;
                count[j] += w[i + j] >= t ? 1 : 0;
            }
        for (; i < end; i++)
            if (w[i] >= t) mass[0] += w[i], count[0]++;
        for (int j = 0; j < 16; j++) found.mass += mass[j], found.count += count[j];
    }
    return found;
}

// Writes the values with low ≤ x < high one after the other, and up to 15 numbers more. x and `to` may be the same.
static int64_t gather_between(const float* x, int64_t n, float low, float high, float* to) {
    int64_t count = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(low), most = _mm512_set1_ps(high);
    for (; i + 16 <= n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        const __mmask16 kept = _mm512_cmp_ps_mask(v, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(v, most, _CMP_LT_OQ);
        _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(kept, v));
        count += __builtin_popcount(kept);
    }
#endif
    for (; i < n; i++) {
        const float v = x[i];
        to[count] = v;
        count += v >= low && v < high;
    }
    return count;
}

// The largest value at or above which there is enough of x: `wanted` of them, or of their sum. There is enough at or above `low`, and
// too little at or above `high`. room: n + 16 floats, for the values between the two once they are few.
static float last_needed(const float* x, int64_t n, bool by_mass, double wanted, float low, float high, Above at_low, Above at_high,
                         float* room) {
    Above before = {0.0, 0};
    while (true) {
        if (n > FEW && (at_low.count - at_high.count) * 4 <= n) {
            n = gather_between(x, n, low, high, room);
            x = room, before = at_high;
        }
        const float middle = low * 0.5f + high * 0.5f;
        if (!(middle > low && middle < high)) return low;
        Above found = above(x, n, middle);
        found.mass += before.mass, found.count += before.count;
        if ((by_mass ? found.mass : (double)found.count) >= wanted) low = middle, at_low = found;
        else high = middle, at_high = found;
    }
}

// The k-th largest of x, whose largest is `best`. `reach` is how far below it is looked first.
static float kth_largest(const float* x, int64_t n, int64_t k, float best, float reach, float* room) {
    if (above(x, n, -FLT_MAX).count <= k) return -FLT_MAX;  // the others are −∞
    float high = nextafterf(best, INFINITY), low;
    Above at_high = {0.0, 0}, at_low;
    for (;; reach *= 4.0f, high = low, at_high = at_low) {
        low = best - reach;
        if (!(low > -FLT_MAX)) low = -FLT_MAX;
        at_low = above(x, n, low);
        if (at_low.count >= k) break;
    }
    return last_needed(x, n, false, (double)k, low, high, at_low, at_high, room);
}

// The smallest of the weights that top_p keeps: a weight is needed while the mass above it is too small, the largest always.
static float least_of_top_p(const float* w, int64_t n, float top_p, float floor, float* room) {
    const double wanted = (double)top_p * above(w, n, floor).mass;
    float high = nextafterf(1.0f, 2.0f), low = 0.5f;
    Above at_high = {0.0, 0}, at_low;
    for (;; low *= 0.25f) {
        if (low < floor) low = floor;
        at_low = above(w, n, low);
        if (at_low.mass >= wanted || low <= floor) break;
        high = low, at_high = at_low;
    }
    return last_needed(w, n, true, wanted, low, high, at_low, at_high, room);
}

static uint64_t mixed_bits(uint64_t x) {  // SplitMix64's
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static double uniform(int64_t seed, int64_t position) {  // in (0, 1); `uniform` in kernels/cpu/sampling.py has the same bits
    constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
    const uint64_t x = mixed_bits(mixed_bits((uint64_t)seed + (uint64_t)position * golden) + golden);
    return ((double)(x >> 41) + 0.5) / 8388608.0;
}

// A token of x [size]. scratch: 2 · size + 32 floats.
static int64_t draw_any(const DrawParams& d, const float* x, int64_t size, float* scratch) {
    const int64_t likeliest = argmax(x, size);
    if (!(d.temperature > 1e-38f)) return likeliest;  // its inverse would be infinite
    const float best = x[likeliest];
    float *w = scratch, *room = scratch + size + 16;
    const F colder = set1(1.0f / d.temperature), most = set1(best);
    for (int64_t i = 0; i < size; i += 16) {
        const int left = (int)(size - i < 16 ? size - i : 16);
        store_n(w + i, vexp((load_n(x + i, left) - most) * colder), left);
    }
    if (d.top_k > 0 && d.top_k < size) {
        const float least = kth_largest(x, size, d.top_k, best, d.temperature, room);
        for (int64_t i = 0; i < size; i++) w[i] = x[i] >= least ? w[i] : 0.0f;
    }
    float least = d.min_p < LEAST_WEIGHT ? LEAST_WEIGHT : d.min_p > 1.0f ? 1.0f : d.min_p;
    if (d.top_p < 1.0f) least = least_of_top_p(w, size, d.top_p, least, room);
    double masses[MAX_PARTS], total = 0.0;
    const int64_t part = PART * ((size + PART * MAX_PARTS - 1) / (PART * MAX_PARTS));
    for (int64_t i = 0, n = 0; i < size; i += part, n++) {
        masses[n] = above(w + i, size - i < part ? size - i : part, least).mass;
        total += masses[n];
    }
    const double target = uniform(d.seed, d.position) * total;
    double running = 0.0;
    int64_t last = likeliest;  // if rounding leaves none
    for (int64_t i = 0, n = 0; i < size; i += part, n++) {
        if (running + masses[n] <= target) {
            running += masses[n];
            continue;
        }
        const int64_t end = size - i < part ? size : i + part;
        for (int64_t j = i; j < end; j++)
            if (w[j] >= least) {
                last = j;
                if ((running += w[j]) > target) return j;
            }
    }
    return last;
}

// A token that the mask allows. Where it allows few, nothing else is read. scratch: 3 · size + 80 floats.
static int64_t draw_masked(const DrawParams& d, const float* x, int64_t size, float* scratch) {
    float* kept = scratch + 2 * size + 32;
    const int64_t words = d.mask_words < (size + 31) / 32 ? d.mask_words : (size + 31) / 32;
    int64_t count = 0;
    for (int64_t i = 0; i < words; i++) count += __builtin_popcount(d.mask[i]);
    if (count <= size / 8) {
        int32_t* ids = (int32_t*)kept + size / 2;
        int64_t n = 0;
        for (int64_t i = 0; i < words; i++)
            for (uint32_t bits = d.mask[i]; bits; bits &= bits - 1) {
                const int64_t id = i * 32 + __builtin_ctz(bits);
                if (id < size) kept[n] = x[id], ids[n++] = (int32_t)id;
            }
        return n ? ids[draw_any(d, kept, n, scratch)] : 0;
    }
    for (int64_t i = 0; i < size; i += 32) {
        const uint32_t bits = i / 32 < words ? d.mask[i / 32] : 0;
        const int64_t n = size - i < 32 ? size - i : 32;
        if (n == 32)
            for (int j = 0; j < 32; j++) kept[i + j] = bits & (1u << j) ? x[i + j] : -INFINITY;
        else
            for (int64_t j = 0; j < n; j++) kept[i + j] = bits & (1u << j) ? x[i + j] : -INFINITY;
    }
    return draw_any(d, kept, size, scratch);
}

// Writes what ss_draw_params says of log-probabilities. Among equal tokens the lower id comes first.
static void log_probabilities(const DrawParams& d, const float* x, int64_t size, int64_t token) {
    const float best = largest(x, size), own = x[token];
    const F most = set1(best);
    double total = 0.0;
    int64_t rank = 1;
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t end = first + PART < size ? first + PART : size;
        F mass = zero();
        int32_t higher = 0;
        int64_t i = first;
        for (; i + 16 <= end; i += 16) mass = mass + vexp(load(x + i) - most);
        total += sum(mass);
        for (; i < end; i++) total += expf(x[i] - best);
        for (i = first; i < end; i++) higher += x[i] > own ? 1 : 0;
        rank += higher;
    }
    const double log_z = (double)best + log(total);
    const int64_t num = d.num_top;
    float* values = (float*)d.logprobs + 2 + num;
    int32_t* ids = d.logprobs + 2;
    const float chosen = (float)((double)own - log_z);
    memcpy(d.logprobs, &chosen, 4);
    d.logprobs[1] = (int32_t)rank;
    int64_t count = 0;
    for (int64_t first = 0; first < size && num; first += 64) {
        const int64_t end = first + 64 < size ? first + 64 : size;
        if (count == num && largest(x + first, end - first) <= values[num - 1]) continue;
        for (int64_t i = first; i < end; i++) {
            if (count == num && x[i] <= values[num - 1]) continue;
            int64_t at = count < num ? count++ : num - 1;
            for (; at && values[at - 1] < x[i]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = x[i], ids[at] = (int32_t)i;
        }
    }
    for (int64_t i = 0; i < num; i++) values[i] = (float)((double)values[i] - log_z);
}

static int64_t draw(const DrawParams& d, const float* x, int64_t size, float* scratch) {
    const int64_t token = d.token >= 0 ? d.token : d.mask ? draw_masked(d, x, size, scratch) : draw_any(d, x, size, scratch);
    if (d.logprobs) log_probabilities(d, x, size, token);
    return token;
}

}  // namespace ISA
