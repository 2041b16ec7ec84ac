// Choosing the outliers of a block that is encoded: see numerics/outliers.py. Which of equals is chosen is not defined;
// here it is the first.
#pragma once

#include <algorithm>
#include <cmath>

#include "unpack.hpp"

namespace kvbits {
namespace {

// Places of the `count` largest of `size` numbers, none negative or NaN, ascending. `work` has room for all of them.
KVBITS_STAGE void largest_places(const float* x, int64_t size, int count, float* work, uint16_t* places) {
    constexpr int bins = 2048, shift = 20;  // by exponent and three bits more, which order as the numbers do
    uint32_t held[bins] = {};
    for (int64_t i = 0; i < size; ++i) ++held[bits<uint32_t>(x[i]) >> shift];
    int64_t above = 0;
    uint32_t bin = bins - 1;
    for (; above + held[bin] < count; --bin) above += held[bin];
    int64_t candidates = 0;
    for (int64_t i = 0; i < size; ++i)
        if (bits<uint32_t>(x[i]) >> shift == bin) work[candidates++] = x[i];
    std::nth_element(work, work + (count - above - 1), work + candidates, [](float a, float b) { return a > b; });
    const float least = work[count - above - 1];
    int64_t equal = count - above;
    for (int64_t i = 0; i < candidates; ++i) equal -= work[i] > least;
    for (int64_t i = 0; i < size; ++i)
        if (x[i] > least || (x[i] == least && equal-- > 0)) *places++ = uint16_t(i);
}

inline double inverse_of(double deviation) { return 1 / (deviation > 1e-300 ? deviation : 1e-300); }

// How far each of `count` neighbours, which form a group, lies from their mean, in standard deviations. Sums are double,
// and what is compared float32.
inline void distances(const float* x, int64_t count, float* out) {
    constexpr int chains = 16;
    const auto mean_of = [&](auto f) {
        double sums[chains] = {}, all = 0;
        int64_t i = 0;
        for (; i + chains <= count; i += chains)
            for (int j = 0; j < chains; ++j) sums[j] += f(double(x[i + j]));
        for (; i < count; ++i) all += f(double(x[i]));
        for (const double sum : sums) all += sum;
        return all / double(count);
    };
    const double mean = mean_of([](double v) { return v; });
    const double inverse = inverse_of(std::sqrt(mean_of([&](double v) { return (v - mean) * (v - mean); })));
    for (int64_t i = 0; i < count; ++i) out[i] = float(std::fabs(double(x[i]) - mean) * inverse);
}

// The same of rows [tokens][channels], each channel of which is a group.
inline void channel_distances(const float* x, int64_t tokens, int64_t channels, float* out) {
    constexpr int side_by_side = 16;
    for (int64_t c = 0; c < channels; c += side_by_side) {
        const int here = int(channels - c < side_by_side ? channels - c : side_by_side);
        double mean[side_by_side] = {}, squares[side_by_side] = {};
        const auto rows = [&](auto f) {
            for (int64_t t = 0; t < tokens; ++t)
                for (int j = 0; j < here; ++j) f(t * channels + c + j, j);
        };
        rows([&](int64_t at, int j) { mean[j] += double(x[at]); });
        for (double& m : mean) m /= double(tokens);
        rows([&](int64_t at, int j) { squares[j] += (double(x[at]) - mean[j]) * (double(x[at]) - mean[j]); });
        for (double& s : squares) s = inverse_of(std::sqrt(s / double(tokens)));
        rows([&](int64_t at, int j) { out[at] = float(std::fabs(double(x[at]) - mean[j]) * squares[j]); });
    }
}

}  // namespace
}  // namespace kvbits
