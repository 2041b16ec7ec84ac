// Channels whose scales and zeros are given. Any scale is: quotients are true ones, and may be far outside.
#pragma once

#include "block.hpp"
#include "codes.hpp"

namespace kvbits {
namespace {

template <class I, Type type, Levels levels>
KVBITS_STAGE void BlockEncoder<I, type, levels>::static_channels() {
    const int64_t width = padded_ ? int64_t(E::count) : how_.channels, last = width - E::count;
    typename E::Extremes seen;
    for (int64_t c = 0; c < width; c += E::count) {
        const int64_t channel = c < last ? c : last;
        f32 scale[2], zero[2];
        channel_parameters(statics_.scale, channel, scale);
        channel_parameters(statics_.zero, channel, zero);
        for (f32& s : scale) s = s == 0.0f ? splat<f32>(1.0f) : s;
        float edges[32];
        std::memcpy(edges, edges_, sizeof edges);
        for (int64_t t = 0; t < how_.tokens; ++t) {
            const uint8_t* at = data_ + t * stride_ + channel * E::size;
            seen.see(at);
            f32 x[2];
            i32 codes[2];
            E::load(at, x);
            for (int v = 0; v < 2; ++v) {
                const f32 level = x[v] / scale[v] + zero[v];
                if constexpr (levels == Levels::table) codes[v] = bits<i32>(search<I>(level, edges));
                else codes[v] = I::round(minimum(maximum(level, f32{}), splat<f32>(float(top_))));
            }
            E::store_codes(code_at(t, channel), codes, top_);
        }
    }
    i32 low[2], high[2];
    E::split(seen.low, low);
    E::split(seen.high, high);
    for (int v = 0; v < 2; ++v) chooser_.see(low[v], high[v]);
}

// Those from `channel` on, in the order of elements; the last again where there are fewer.
template <class I, Type type, Levels levels>
inline void BlockEncoder<I, type, levels>::channel_parameters(const float* all, int64_t channel, f32* out) const {
    if (!padded_) return E::arrange(all + channel, out);
    float wide[E::count];
    for (int64_t i = 0; i < E::count; ++i) wide[i] = all[i < how_.channels ? i : how_.channels - 1];
    E::arrange(wide, out);
}

}  // namespace
}  // namespace kvbits
