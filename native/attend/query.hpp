// The query rows of one row of the batch and KV head, as exact and as packed keys need them.
#pragma once

#include "../elements.hpp"
#include "../job.hpp"
#include "../unpack.hpp"
#include "product.hpp"

namespace kvbits {
namespace {

// Rows of padded(channels) floats, scaled.
template <class I> void read_query(const Job& job, int batch, int head, float* out) {
    const int channels = job.record.key.channels, width = padded(channels);
    for (int r = 0; r < job.rows(); ++r, out += width) {
        const int q_head = head * job.group + r / job.queries;
        to_float<I>(job.query.type, job.query.at(batch, q_head, r % job.queries), channels, out);
        for (int c = 0; c < channels; ++c) out[c] *= job.scaling;
        for (int c = channels; c < width; ++c) out[c] = 0;
    }
}

// The same, balanced and rotated as the packed keys were.
template <class I> void packed_query(const Job& job, int batch, int head, float* out) {
    const int channels = job.record.key.channels, width = padded(channels);
    read_query<I>(job, batch, head, out);
    const float* balance = job.key_balance ? job.key_balance + int64_t(head) * channels : nullptr;
    for (int r = 0; r < job.rows(); ++r, out += width) {
        for (int c = 0; c < channels && balance; ++c) out[c] *= balance[c];
        if (!job.key_rotation) continue;
        float row[most_channels];
        std::memcpy(row, out, sizeof(float) * size_t(channels));
        std::memset(out, 0, sizeof(float) * size_t(channels));
        add_product<I>(row, job.key_rotation, channels, out);
    }
}

}  // namespace
}  // namespace kvbits
