#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The path through a bit-shift trellis whose values are nearest to x, by Viterbi's algorithm. A state has `state_bits` bits;
   each step shifts in `bits`. values[state] is what a state stands for. Sequences are independent, of `length` numbers;
   y gets the values. The start is free. */
int trellis(const float *x, float *y, int64_t sequences, int64_t length, int bits, int state_bits, const float *values)
{
    const int fan = 1 << bits, groups = 1 << (state_bits - bits), states = 1 << state_bits;
    float *cost = aligned_alloc(64, states * sizeof(float)), *best = aligned_alloc(64, (groups < 16 ? 16 : groups) * sizeof(float));
    uint8_t *from = malloc((size_t)length * groups);
    if (!cost || !best || !from)
        return 1;
    for (int64_t n = 0; n < sequences; n++) {
        const float *in = x + n * length;
        for (int s = 0; s < states; s++)
            cost[s] = (in[0] - values[s]) * (in[0] - values[s]);
        for (int64_t t = 1; t < length; t++) {
            uint8_t *own = from + t * groups;
            memcpy(best, cost, groups * sizeof(float));
            memset(own, 0, groups);
            for (int h = 1; h < fan; h++) {
                const float *c = cost + (size_t)h * groups;
                for (int g = 0; g < groups; g++) {
                    int better = c[g] < best[g];
                    best[g] = better ? c[g] : best[g];
                    own[g] = better ? h : own[g];
                }
            }
            const float target = in[t];
            for (int g = 0; g < groups; g++)
                for (int b = 0; b < fan; b++) {
                    float d = target - values[g * fan + b];
                    cost[g * fan + b] = best[g] + d * d;
                }
        }
        int at = 0;
        for (int s = 1; s < states; s++)
            at = cost[s] < cost[at] ? s : at;
        for (int64_t t = length - 1; t >= 0; t--) {
            y[n * length + t] = values[at];
            if (t)
                at = from[t * groups + (at >> bits)] * groups + (at >> bits);
        }
    }
    free(cost);
    free(best);
    free(from);
    return 0;
}
