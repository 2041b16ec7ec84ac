// Groups of tokens, with channels in the lanes.
#pragma once

#include "block.hpp"
#include "codes.hpp"
#include "half_quadratic.hpp"

namespace kvbits {
namespace {

// Group n, of tokens first .. first + length - 1.
template <class I, Type type, Levels levels>
inline void BlockEncoder<I, type, levels>::channel_groups(int64_t n, int64_t first) {
    const uint8_t* rows = data_ + first * stride_;
    const int64_t width = padded_ ? int64_t(E::count) : how_.channels, last = width - E::count;
    int64_t c = 0;
    for (; c + 4 * E::count <= width; c += 4 * E::count) channels<4>(n, first, rows, c);
    for (; c < width; c += E::count) channels<1>(n, first, rows, c < last ? c : last);
}

template <class I, Type type, Levels levels>
template <int Units>
inline void BlockEncoder<I, type, levels>::channels(int64_t n, int64_t first, const uint8_t* rows, int64_t c) {
    typename E::Extremes seen[Units];
    for (int64_t t = 0; t < how_.length; ++t)
        for (int u = 0; u < Units; ++u) seen[u].see(rows + t * stride_ + (c + u * E::count) * E::size);
    for (int u = 0; u < Units; ++u) {
        const int64_t channel = c + u * E::count;
        const uint8_t* at = rows + channel * E::size;
        i32 low[2], high[2];
        E::split(seen[u].low, low);
        E::split(seen[u].high, high);
        Group<I> made[2] = {chooser_.choose(low[0], high[0]), chooser_.choose(low[1], high[1])};
        if (how_.choice == Choice::half_quadratic) solve_channels(made, at, low, high);
        const u32 scale[2] = {made[0].scale_bits(), made[1].scale_bits()}, zero[2] = {made[0].zero_bits(), made[1].zero_bits()};
        uint16_t halves[2][E::count];
        E::store_halves(halves[0], scale);
        E::store_halves(halves[1], zero);
        const size_t bytes = 2 * size_t(padded_ ? how_.channels : int64_t(E::count));
        std::memcpy(out_.scale + n * how_.channels + channel, halves[0], bytes);
        std::memcpy(out_.zero + n * how_.channels + channel, halves[1], bytes);
        uint8_t* code_at = codes_ + first * code_stride_ + channel;
        if (made[0].easy && made[1].easy) write_channels<true>(made, at, code_at);
        else write_channels<false>(made, at, code_at);
    }
}

template <class I, Type type, Levels levels>
template <bool Easy>
inline void BlockEncoder<I, type, levels>::write_channels(const Group<I>* made, const uint8_t* at, uint8_t* code_at) {
    float edges[32];
    std::memcpy(edges, edges_, sizeof edges);
    const Divisor<I> a = made[0].divisor, b = made[1].divisor;
    const f32 zero[2] = {made[0].zero, made[1].zero};
    for (int64_t t = 0; t < how_.length; ++t) {
        f32 x[2];
        E::load(at + t * stride_, x);
        const i32 codes[2] = {code_of<I, levels, Easy>(x[0], a, zero[0], edges), code_of<I, levels, Easy>(x[1], b, zero[1], edges)};
        E::store_codes(code_at + t * code_stride_, codes, top_);
    }
}

template <class I, Type type, Levels levels>
KVBITS_STAGE void BlockEncoder<I, type, levels>::solve_channels(Group<I>* made, const uint8_t* at, const i32* low, const i32* high) {
    for (int64_t t = 0; t < how_.length; ++t) {
        f32 x[2];
        E::load(at + t * stride_, x);
        for (int v = 0; v < 2; ++v) store(floats_ + (v * how_.length + t) * W, x[v] / made[v].divisor.whole);
    }
    for (int v = 0; v < 2; ++v) {
        const f32 solved = half_quadratic_zero<I>(floats_ + v * how_.length * W, how_.length, splat<i32>(int32_t(how_.length)),
                                                  made[v].zero, top_);
        made[v].zero = E::value(low[v]) == E::value(high[v]) ? made[v].zero : solved;
    }
}

}  // namespace
}  // namespace kvbits
