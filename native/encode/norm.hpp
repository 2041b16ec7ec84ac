// Rows with a norm. A row is divided by its root mean square, and its scale is what then fits the levels best: see
// codecs/lloyd_max.py. Sums are double, so that their order is not seen once they are rounded.
#pragma once

#include <cmath>

#include "../unpack.hpp"
#include "block.hpp"
#include "codes.hpp"

namespace kvbits {
namespace {

template <class F> inline double doubles(int64_t count, F f) {  // `count` is a multiple of `chains`
    double sums[chains] = {}, all = 0;
    for (int64_t i = 0; i < count; i += chains)
        for (int j = 0; j < chains; ++j) sums[j] += f(i + j);
    for (const double sum : sums) all += sum;
    return all;
}

template <class I, Type type, Levels levels>
KVBITS_STAGE void BlockEncoder<I, type, levels>::normed_row(int64_t token) {
    const int64_t channels = how_.channels, whole = (channels + chains - 1) / chains * chains;
    float* unit = floats_;
    to_float<I>(type, data_ + token * stride_, channels, unit);
    for (int64_t i = channels; i < whole; ++i) unit[i] = 0;
    f32 peak{};
    for (int64_t i = 0; i < whole; i += W) {
        const f32 x = load<f32>(unit + i), magnitude = maximum<f32>(x, -x);
        chooser_.sound &= magnitude <= how_.limit;  // nor is NaN
        peak = maximum<f32>(peak, magnitude);
    }
    const float found = kvbits::largest(peak), largest = found == 0 ? 1.0f : found;
    for (int64_t i = 0; i < whole; i += W) store(unit + i, load<f32>(unit + i) / largest);
    const double square = doubles(whole, [&](int64_t i) { return double(unit[i]) * double(unit[i]); });
    const float mean = float(std::sqrt(square / double(channels))), divisor = mean == 0 ? 1.0f : mean;
    const double product = levels_of_row(unit, divisor, whole, code_at(token, 0));
    const float scale = float(square > 0 ? square / product : 0) * largest;
    out_.scale[token] = float_to_bf16(scale);
}

// Codes of a row, and its product with their levels.
template <class I, Type type, Levels levels>
inline double BlockEncoder<I, type, levels>::levels_of_row(const float* unit, float divisor, int64_t whole, uint8_t* code) const {
    float edges[32], decoded[chains];
    std::memcpy(edges, edges_, sizeof edges);
    double sums[chains] = {}, all = 0;
    for (int64_t i = 0; i < whole; i += chains) {
        uint8_t codes[chains];
        for (int j = 0; j < chains; j += W) {
            const u32 found = search<I>(load<f32>(unit + i + j) / divisor, edges);
            store(codes + j, __builtin_convertvector(found, typename I::u8));
            store(decoded + j, I::lookup(found, how_.table));
        }
        for (int j = 0; j < chains; ++j) sums[j] += double(unit[i + j]) * double(decoded[j]);
        std::memcpy(code + i, codes, size_t(how_.channels - i < chains ? how_.channels - i : chains));
    }
    for (const double sum : sums) all += sum;
    return all;
}

}  // namespace
}  // namespace kvbits
