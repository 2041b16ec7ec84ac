// Choosing the outliers of a block that is encoded: see numerics/outliers.py. Which of equals is chosen is not defined;
// here it is the first.
#pragma once

#include <algorithm>
#include <cmath>

#include "../unpack.hpp"

namespace kvbits {
namespace {

// Places of the `count` largest of `size` numbers, none negative or NaN, ascending. `work` has room for twice as many.
//
// Numbers are dealt out to heaps. As many heaps as are wanted have a greatest number of at least `least`, so every
// number that is wanted is at least that, and few heaps have to be looked into.
KVBITS_STAGE void largest_places(const float* x, int64_t size, int count, float* work, uint16_t* places) {
    const auto descending = [](float a, float b) { return a > b; };
    int64_t deal = 1;  // numbers in a heap; they lie `heaps` apart
    while (deal < 64 && size % (2 * deal) == 0 && size / (2 * deal) >= 2 * int64_t(count)) deal *= 2;
    const int64_t heaps = size / deal;
    float *greatest = work, *wanted = work + heaps;
    for (int64_t i = 0; i < heaps; ++i) greatest[i] = x[i];
    for (int64_t d = 1; d < deal; ++d)
        for (int64_t i = 0; i < heaps; ++i) greatest[i] = x[d * heaps + i] > greatest[i] ? x[d * heaps + i] : greatest[i];
    std::copy(greatest, greatest + heaps, wanted);
    std::nth_element(wanted, wanted + count - 1, wanted + heaps, descending);
    const float least = wanted[count - 1];
    int64_t found = 0;
    auto* place = reinterpret_cast<uint32_t*>(wanted);
    for (int64_t i = 0; i < heaps; ++i)
        for (int64_t d = 0; d < deal && greatest[i] >= least; ++d)
            if (x[d * heaps + i] >= least) place[found++] = uint32_t(d * heaps + i);
    // Places that order as their numbers do, equal ones by themselves.
    const auto before = [&](uint32_t a, uint32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    if (found > count) std::nth_element(place, place + count - 1, place + found, before);
    std::sort(place, place + count);
    for (int i = 0; i < count; ++i) places[i] = uint16_t(place[i]);
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
