// Rows of a few channels times a matrix, which rotations of queries and outputs are.
#pragma once

#include "../vec.hpp"

namespace kvbits {
namespace {

// out[c] += the sum over i of row[i] * matrix[i][c], for `count` vectors of columns.
template <class I, int count> inline void add_columns(const float* row, const float* matrix, int channels, float* out) {
    using f32 = typename I::f32;
    f32 sum[count];
    for (int n = 0; n < count; ++n) sum[n] = load<f32>(out + n * I::W);
    for (int i = 0; i < channels; ++i) {
        const f32 factor = splat<f32>(row[i]);
        for (int n = 0; n < count; ++n) sum[n] = I::fma(load<f32>(matrix + int64_t(i) * channels + n * I::W), factor, sum[n]);
    }
    for (int n = 0; n < count; ++n) store(out + n * I::W, sum[n]);
}

// out += row times a square matrix.
template <class I> void add_product(const float* row, const float* matrix, int channels, float* out) {
    int c = 0;
    for (; c + 4 * I::W <= channels; c += 4 * I::W) add_columns<I, 4>(row, matrix + c, channels, out + c);
    for (; c + I::W <= channels; c += I::W) add_columns<I, 1>(row, matrix + c, channels, out + c);
    for (; c < channels; ++c)
        for (int i = 0; i < channels; ++i) out[c] += row[i] * matrix[int64_t(i) * channels + c];
}

}  // namespace
}  // namespace kvbits
