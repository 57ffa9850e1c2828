// Drawing a token of a row of logits without sorting it. A threshold is found by passes that count, or add up, what is at or above a
// value. Once few tokens are between two such values, only these are read.
#pragma once
#include <float.h>

#include "emit.h"
#include "kernels.h"

namespace ISA {

constexpr float LEAST_WEIGHT = 1e-30f;  // below it a weight counts as 0: what `vexp` makes of −∞ is 1e-38
constexpr int64_t FEW = 512, PART = 1024;

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

static int64_t gather_between(const float* x, int64_t n, float low, float high, float* to) {  // low ≤ x < high
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        to[count] = x[i];
        count += x[i] >= low && x[i] < high;
    }
    return count;
}

// The largest value at or above which there is enough of x: `wanted` of them, or of their sum. There is enough at or above `low`, and
// too little at or above `high`. room: n + 1 floats, for the values between the two once they are few.
static float last_needed(const float* x, int64_t n, bool by_mass, double wanted, float low, float high, Above at_low, Above at_high,
                         float* room) {
    Above before = {0.0, 0};
    while (true) {
        if (x != room && at_low.count - at_high.count <= FEW) {
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

// A token of x [size]. scratch: 2 · size + 32 floats.
static int64_t draw(const DrawParams& d, const float* x, int64_t size, float* scratch) {
    const float best = largest(x, size);
    const int64_t likeliest = argmax(x, size);
    if (!(d.temperature > 0.0f)) return likeliest;
    float *w = scratch, *room = scratch + size + 16;
    const F heat = set1(d.temperature), most = set1(best);
    for (int64_t i = 0; i < size; i += 16) {
        const int left = (int)(size - i < 16 ? size - i : 16);
        store_n(w + i, vexp((load_n(x + i, left) - most) / heat), left);
    }
    if (d.top_k > 0 && d.top_k < size) {
        const float least = kth_largest(x, size, d.top_k, best, d.temperature, room);
        for (int64_t i = 0; i < size; i++) w[i] = x[i] >= least ? w[i] : 0.0f;
    }
    float least = d.min_p < LEAST_WEIGHT ? LEAST_WEIGHT : d.min_p > 1.0f ? 1.0f : d.min_p;
    if (d.top_p < 1.0f) least = least_of_top_p(w, size, d.top_p, least, room);
    double total = 0.0;
    for (int64_t i = 0; i < size; i += PART) total += above(w + i, size - i < PART ? size - i : PART, least).mass;
    const double target = d.u * total;
    double running = 0.0;
    int64_t last = likeliest;  // if rounding leaves none
    for (int64_t i = 0; i < size; i += PART) {
        const int64_t n = size - i < PART ? size - i : PART;
        const double mass = above(w + i, n, least).mass;
        if (running + mass <= target) {
            running += mass;
            continue;
        }
        for (int64_t j = i; j < i + n; j++)
            if (w[j] >= least) {
                last = j;
                if ((running += w[j]) > target) return j;
            }
    }
    return last;
}

}  // namespace ISA
