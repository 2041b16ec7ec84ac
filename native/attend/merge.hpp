// Pieces of the context joined (log-sum-exp) into the output.
#pragma once

#include "../job.hpp"
#include "../unpack.hpp"
#include "product.hpp"

namespace kvbits {
namespace {

inline int value_width(const Job& job) { return padded(job.record.value.channels); }

// The partials of one row of the batch and KV head; the first `packed` of them are of packed tokens.
template <class I> void merge(const Job& job, int batch, int head, Partial* partials, int count, int packed, uint8_t* scratch) {
    using f32 = typename I::f32;
    const int channels = job.record.value.channels, width = value_width(job);
    float* sums[2] = {reinterpret_cast<float*>(scratch), reinterpret_cast<float*>(scratch) + width};
    for (int r = 0; r < job.rows(); ++r) {
        const int q_head = head * job.group + r / job.queries;
        float top = job.sink_logits ? job.sink_logits[q_head] : -__builtin_inff();
        for (int p = 0; p < count; ++p) top = partials[p].top(r) > top ? partials[p].top(r) : top;
        float weight = job.sink_logits ? __builtin_expf(job.sink_logits[q_head] - top) : 0, packed_weight = 0;
        for (int c = 0; c < width; ++c) sums[0][c] = sums[1][c] = 0;
        if (top == -__builtin_inff()) weight = 0;
        for (int p = 0; p < count; ++p) {
            // Its weight is zero where it saw nothing, and NaN must not vanish.
            if (partials[p].top(r) == -__builtin_inff() && partials[p].weight(r) == 0) continue;
            const float factor = __builtin_expf(partials[p].top(r) - top), here = factor * partials[p].weight(r);
            weight += here;
            if (p < packed) packed_weight += here;
            float* sum = sums[p < packed && job.value_unrotation ? 1 : 0];
            const float* total = partials[p].total(r);
            for (int c = 0; c < width; c += I::W)
                store(sum + c, I::fma(load<f32>(total + c), splat<f32>(factor), load<f32>(sum + c)));
        }
        float* out = sums[0];
        if (job.value_unrotation) add_product<I>(sums[1], job.value_unrotation, channels, out);
        if (job.value_mean)
            for (int c = 0; c < channels; ++c) out[c] += packed_weight * job.value_mean[int64_t(head) * channels + c];
        const float inverse = weight == 0 ? 0.0f : 1.0f / weight;
        for (int c = 0; c < channels; ++c) out[c] *= inverse;
        from_float<I>(job.output.type, out, channels, job.output.at(batch, q_head, r % job.queries));
        if (job.log_sums)  // -inf where nothing was seen
            job.log_sums[(int64_t(batch) * job.heads * job.group + q_head) * job.queries + r % job.queries] = top + __builtin_logf(weight);
    }
}

}  // namespace
}  // namespace kvbits
