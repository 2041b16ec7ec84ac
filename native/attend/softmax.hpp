// Scores to weights: an online softmax. Sums so far shrink where a larger score appears.
#pragma once

#include "piece.hpp"

namespace kvbits {
namespace {

// softcap * tanh(score / softcap)
template <class I> inline void cap(float softcap, float* score, int tokens) {
    using f32 = typename I::f32;
    for (int t = 0; t < tokens; t += I::W) {
        const f32 x = load<f32>(score + t) * (1.0f / softcap);
        const f32 magnitude = maximum<f32>(x, -x), e = exponential<I>(magnitude * -2.0f);
        const f32 y = (1.0f - e) / (1.0f + e);
        store(score + t, (x < 0.0f ? -y : y) * softcap);
    }
}

// Make the scores of `rows` rows over a stretch of tokens into weights against the running maximum.
template <class I> KVBITS_STAGE void Piece<I>::weigh(Partial& partial, int first_row, int rows, const Stretch& tokens) {
    int biased = -1;
    for (int r = 0; r < rows; ++r) {
        const int row = first_row + r;
        float* score = s.score + int64_t(r) * s.tokens;
        if (job.softcap > 0) cap<I>(job.softcap, score, tokens.count);
        if (!sees_all(job, row % job.queries, tokens)) {
            const int which = job.mask_heads > 1 ? row : row % job.queries;
            if (biased != which) make_bias<I>(job, batch, head, row, tokens, s.bias);
            biased = which;
            for (int t = 0; t < tokens.count; t += I::W) {
                const f32 bias = load<f32>(s.bias + t);  // what is hidden stays hidden, also where it is NaN
                store(score + t, bias == -__builtin_inff() ? bias : load<f32>(score + t) + bias);
            }
        }
        weigh_row(partial, first_row, r, tokens.count);
    }
}

template <class I> inline void Piece<I>::weigh_row(Partial& partial, int first_row, int r, int tokens) {
    const int row = first_row + r, whole = padded(tokens);
    float* score = s.score + int64_t(r) * s.tokens;
    for (int t = tokens; t < whole; ++t) score[t] = -__builtin_inff();
    f32 peak = splat<f32>(-__builtin_inff());
    for (int t = 0; t < whole; t += I::W) peak = maximum<f32>(load<f32>(score + t), peak);
    const float top = largest(peak), old = partial.top(row);
    // A NaN among the scores loses every comparison; it still reaches the sums below.
    const float now = top > old ? top : old;
    peak_weight[r] = now == -__builtin_inff() ? 0.0f : __builtin_expf(top - now);
    if (now == -__builtin_inff()) {  // nothing seen, or nothing but NaN
        f32 all{};
        for (int t = 0; t < whole; t += I::W) all += load<f32>(score + t);
        const float total = sum(all);
        if (total != total) partial.weight(row) = total;
        std::memset(score, 0, sizeof(float) * size_t(whole));
        return;
    }
    if (now > old) {
        const float factor = old == -__builtin_inff() ? 0.0f : __builtin_expf(old - now);
        partial.top(row) = now;
        partial.weight(row) *= factor;
        float* total = partial.total(row);
        for (int c = 0; c < s.value_width; c += I::W) store(total + c, load<f32>(total + c) * factor);
    }
    f32 sum_of_weights{};
    for (int t = 0; t < whole; t += I::W) {
        const f32 w = exponential<I>(load<f32>(score + t) - now);
        store(score + t, w);
        sum_of_weights += w;
    }
    partial.weight(row) += sum(sum_of_weights);
}

}  // namespace
}  // namespace kvbits
