// Drawing a token of a row of logits without sorting it. Each part of a row is summed up once, while it lies in a core's cache; then
// only parts are read that can hold a token which top_k, top_p or min_p keep. Their thresholds are found by passes that count, or add
// up, what is at or above a value. Once few tokens are between two such values, only these are read.
#pragma once
#include <float.h>
#include <math.h>
#include <string.h>

#include "emit.h"
#include "kernels.h"

namespace ISA {

constexpr float LEAST_WEIGHT = 1e-30f;  // below it a weight counts as 0: what `vexp` makes of −∞ is 1e-38
constexpr int64_t FEW = 64, PART = 1024;

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

// The smallest of the weights that top_p keeps: a weight is needed while the mass above it is less than `wanted`, the largest always.
static float least_of_top_p(const float* w, int64_t n, double wanted, float floor, float* room) {
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

// The logits [n ≤ DRAW_PART] from token `first` on, a multiple of 32, with −∞ for those that the mask forbids, which are copied to
// `kept`; null if it forbids all.
static const float* allowed(const DrawParams& d, const float* x, int64_t first, int64_t n, float* kept) {
    if (!d.mask) return x;
    uint32_t any = 0;
    for (int64_t i = 0; i < n; i += 32) {
        const int64_t word = (first + i) / 32;
        const uint32_t bits = word < d.mask_words ? d.mask[word] : 0;
        any |= bits;
        if (n - i >= 32)
            for (int j = 0; j < 32; j++) kept[i + j] = bits & (1u << j) ? x[i + j] : -INFINITY;
        else
            for (int64_t j = 0; j < n - i; j++) kept[i + j] = bits & (1u << j) ? x[i + j] : -INFINITY;
    }
    return any ? kept : nullptr;
}

static float mass_below(const float* x, int64_t n, float most, float colder) {  // Σ e to (x − most) · colder
    F sums = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sums = sums + vexp((load(x + i) - set1(most)) * set1(colder));
    float found = sum(sums);
    for (; i < n; i++) found += expf((x[i] - most) * colder);
    return found;
}

static bool cold(const DrawParams& d) { return !(d.temperature > 1e-38f); }  // its inverse would be infinite

// Writes what `draw` asks of the logits [n] from `first` on, which are part `part` of a row.
static void summarize(const DrawParams& d, const float* x, int64_t first, int64_t n, int64_t part, const DrawParts& to) {
    if (d.token < 0) {
        float kept[DRAW_PART];
        const float* y = allowed(d, x, first, n, kept);
        const float most = to.top[part] = y ? largest(y, n) : -INFINITY;
        if (!cold(d)) to.mass[part] = most > -INFINITY ? mass_below(y, n, most, 1.0f / d.temperature) : 0.0f;
    }
    if (d.logprobs) {
        const float most = to.plain_top[part] = largest(x, n);
        to.plain_mass[part] = most > -INFINITY ? mass_below(x, n, most, 1.0f) : 0.0f;
    }
}

// Makes the parts' masses those of weights whose largest is 1, and `weights` [n] the largest of each part. Returns their sum.
static double weigh(const float* top, float* mass, int64_t n, float best, float colder, float* weights) {
    double total = 0.0;
    for (int64_t i = 0; i < n; i += 16) {
        const int left = (int)(n - i < 16 ? n - i : 16);
        store_n(weights + i, vexp((load_n(top + i, left) - set1(best)) * set1(colder)), left);
    }
    for (int64_t i = 0; i < n; i++) total += mass[i] *= weights[i];
    return total;
}

// A number in (0, 1) of the row's own, times `total`.
static double target_in(const DrawParams& d, double total) { return uniform(d.seed, d.position) * total; }

// A place in x [n]. all: the sum of the weights of which top_p keeps a share, if x lacks some of them, else below 0.
// scratch: 2 · n + 32 floats.
static int64_t draw_listed(const DrawParams& d, const float* x, int64_t n, double all, float* scratch) {
    const int64_t likeliest = argmax(x, n);
    const float best = x[likeliest];
    float *w = scratch, *room = scratch + n + 16;
    const F colder = set1(1.0f / d.temperature), most = set1(best);
    for (int64_t i = 0; i < n; i += 16) {
        const int left = (int)(n - i < 16 ? n - i : 16);
        store_n(w + i, vexp((load_n(x + i, left) - most) * colder), left);
    }
    if (d.top_k > 0 && d.top_k < n) {
        const float least = kth_largest(x, n, d.top_k, best, d.temperature, room);
        for (int64_t i = 0; i < n; i++) w[i] = x[i] >= least ? w[i] : 0.0f;
    }
    float least = d.min_p < LEAST_WEIGHT ? LEAST_WEIGHT : d.min_p > 1.0f ? 1.0f : d.min_p;
    if (d.top_p < 1.0f) least = least_of_top_p(w, n, d.top_p * (all >= 0.0 ? all : above(w, n, least).mass), least, room);
    const double target = target_in(d, above(w, n, least).mass);
    double running = 0.0;
    int64_t last = likeliest;  // if rounding leaves none
    for (int64_t i = 0; i < n; i++)
        if (w[i] >= least) {
            last = i;
            if ((running += w[i]) > target) break;
        }
    return last;
}

// A value at or above which are all logits that d's cuts keep. `weights` and `mass` are as `weigh` leaves them. room: n + 16 floats.
static float least_kept(const DrawParams& d, const DrawParts& parts, int64_t n, int64_t size, float best, const float* weights,
                        double total, float* room) {
    if (d.top_k > 0 && d.top_k < size)  // as many parts have a logit as large
        return d.top_k < n ? kth_largest(parts.top, n, d.top_k, best, d.temperature, room) : -FLT_MAX;
    double low = d.min_p > 1.0f ? 1.0f : d.min_p;
    if (d.min_p < LEAST_WEIGHT) {
        for (low = 0.25;; low *= 0.25) {  // until all below it is less than what top_p drops
            double dropped = 0.0;
            for (int64_t i = 0; i < n; i++) dropped += weights[i] < low ? (double)parts.mass[i] : DRAW_PART * low;
            if (dropped < (1.0 - d.top_p) * total * 0.999) break;
            if (low < LEAST_WEIGHT) return -FLT_MAX;
        }
    }
    const double reach = (1e-4 - log(low) * 1.0001) * d.temperature;  // beyond what rounding makes of weights
    const float found = nextafterf((float)((double)best - reach), -INFINITY);
    return found > -FLT_MAX ? found : -FLT_MAX;
}

// A token by the sums of its parts alone, where nothing is cut. Of one part the logits are read.
static int64_t draw_whole(const DrawParams& d, const float* x, int64_t size, const DrawParts& parts, float best, double total,
                          int64_t likeliest) {
    const double target = target_in(d, total);
    double running = 0.0;
    int64_t last = likeliest;  // if rounding leaves none
    for (int64_t first = 0, i = 0; first < size; first += DRAW_PART, i++) {
        if (running + parts.mass[i] <= target) {
            running += parts.mass[i];
            continue;
        }
        float kept[DRAW_PART];
        const int64_t n = size - first < DRAW_PART ? size - first : DRAW_PART;
        const float* y = allowed(d, x + first, first, n, kept);
        for (int64_t j = 0; y && j < n; j++) {
            const double w = exp(((double)y[j] - best) / d.temperature);
            if (w < LEAST_WEIGHT) continue;
            last = first + j;
            if ((running += w) > target) return last;
        }
    }
    return last;
}

static int64_t draw_token(const DrawParams& d, const float* x, int64_t size, const DrawParts& parts, float* scratch) {
    const int64_t n = draw_parts(size);
    int64_t at = 0;
    for (int64_t i = 1; i < n; i++) at = parts.top[i] > parts.top[at] ? i : at;
    const float best = parts.top[at];
    if (best == -INFINITY) {  // all that is allowed is as unlikely
        for (int64_t i = 0; d.mask && i < size && i / 32 < d.mask_words; i++)
            if (d.mask[i / 32] & (1u << i % 32)) return i;
        return 0;
    }
    auto some = [&](int64_t first) { return size - first < DRAW_PART ? size - first : DRAW_PART; };
    float kept[DRAW_PART];
    const int64_t from = at * DRAW_PART, likeliest = from + argmax(allowed(d, x + from, from, some(from), kept), some(from));
    if (cold(d)) return likeliest;
    float* weights = scratch;
    scratch += n + 16;
    const double total = weigh(parts.top, parts.mass, n, best, 1.0f / d.temperature, weights);
    const bool by_rank = d.top_k > 0 && d.top_k < size, by_weight = d.min_p >= LEAST_WEIGHT;
    if (!by_rank && !by_weight && !(d.top_p < 1.0f)) return draw_whole(d, x, size, parts, best, total, likeliest);
    const float least = least_kept(d, parts, n, size, best, weights, total, scratch);
    float* values = scratch;
    int32_t* ids = (int32_t*)(scratch + size);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (parts.top[i] < least) continue;
        const int64_t first = i * DRAW_PART;
        const float* y = allowed(d, x + first, first, some(first), kept);
        for (int64_t j = 0; j < some(first); j += 16) {
            const int64_t left = some(first) - j < 16 ? some(first) - j : 16;
            if (left == 16 && top(load(y + j)) < least) continue;
            for (int64_t k = j; k < j + left; k++) {
                values[count] = y[k], ids[count] = (int32_t)(first + k);
                count += y[k] >= least ? 1 : 0;
            }
        }
    }
    return ids[draw_listed(d, values, count, by_rank || by_weight ? -1.0 : total, scratch + 2 * size)];
}

// Writes what ss_draw_params says of log-probabilities. Among equal tokens the lower id comes first. room: the parts, and 16 floats.
static void log_probabilities(const DrawParams& d, const float* x, int64_t size, int64_t token, const DrawParts& parts, float* room) {
    const int64_t n = draw_parts(size), num = d.num_top;
    const float best = largest(parts.plain_top, n), own = x[token];
    const double log_z = (double)best + log(weigh(parts.plain_top, parts.plain_mass, n, best, 1.0f, room));
    float* values = (float*)d.logprobs + 2 + num;
    int32_t* ids = d.logprobs + 2;
    int64_t rank = 1, count = 0;
    for (int64_t first = 0, i = 0; first < size; first += DRAW_PART, i++) {
        const int64_t end = first + DRAW_PART < size ? first + DRAW_PART : size;
        const float most = parts.plain_top[i];
        if (most > own) {
            int32_t higher = 0;
            for (int64_t j = first; j < end; j++) higher += x[j] > own ? 1 : 0;
            rank += higher;
        }
        if (!num || (count == num && most <= values[num - 1])) continue;
        for (int64_t j = first; j < end; j++) {
            if (count == num && x[j] <= values[num - 1]) continue;
            int64_t at = count < num ? count++ : num - 1;
            for (; at && values[at - 1] < x[j]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = x[j], ids[at] = (int32_t)j;
        }
    }
    for (int64_t i = 0; i < num; i++) values[i] = (float)((double)values[i] - log_z);
    const float chosen = (float)((double)own - log_z);
    memcpy(d.logprobs, &chosen, 4);
    d.logprobs[1] = (int32_t)rank;
}

static int64_t draw(const DrawParams& d, const float* x, int64_t size, const DrawParts& parts, float* scratch) {
    const int64_t token = d.token >= 0 ? d.token : draw_token(d, x, size, parts, scratch);
    if (d.logprobs) log_probabilities(d, x, size, token, parts, scratch);
    return token;
}

}  // namespace ISA
