// Elements to codes.
#pragma once

#include "../elements.hpp"

namespace kvbits {
namespace {

// How many edges are below x; what a table lacks is infinite.
template <class I> inline typename I::u32 search(typename I::f32 x, const float* edges) {
    using u32 = typename I::u32;
    u32 i = x > edges[7] ? splat<u32>(8u) : u32{};
    i = x > I::lookup(i, edges + 3) ? i + 4 : i;
    i = x > I::lookup(i, edges + 1) ? i + 2 : i;
    return x > I::lookup(i, edges) ? i + 1 : i;
}

template <class I, Levels levels, bool Easy>
inline typename I::i32 code_of(typename I::f32 x, const Divisor<I>& divisor, typename I::f32 zero, const float* edges) {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    using u32 = typename I::u32;
    if constexpr (levels == Levels::uniform) return I::round(divide<Easy>(x, divisor) + zero);
    if constexpr (levels == Levels::table) return bits<i32>(search<I>(divide<Easy>(x, divisor) + zero, edges));
    const u32 word = bits<u32>(x);
    const f32 y = minimum(divide<Easy>(bits<f32>(word & 0x7FFFFFFF), divisor), splat<f32>(448.0f));
    const i32 place = bits<i32>(y);
    const i32 normal = ((place + 0x7FFFF + (place >> 20 & 1)) >> 20) - 960;  // 8 * (127 - 7): the exponents' biases
    const i32 small = I::round(y * 512.0f);
    return (y < 0x1p-6f ? small : normal) | bits<i32>(word >> 24 & 0x80);
}

}  // namespace
}  // namespace kvbits
