// Scale and zero of a group, from its smallest and its largest element.
#pragma once

#include "../elements.hpp"
#include "../encoder.hpp"
#include "half_quadratic.hpp"

namespace kvbits {
namespace {

template <class I> struct Group {  // one in each lane
    typename I::f32 scale, zero;
    Divisor<I> divisor;
    bool easy;  // whether products do for its quotients

    typename I::u32 scale_bits() const { return bits<typename I::u32>(scale) >> 16; }

    typename I::u32 zero_bits() const {
        uint16_t half[I::W];
        I::store_f16(half, zero);
        return __builtin_convertvector(load<typename I::u16>(half), typename I::u32);
    }
};

template <class I> inline typename I::f32 to_bf16(typename I::f32 x) {  // nearest, ties to even, as a float
    using u32 = typename I::u32;
    u32 word = bits<u32>(x);
    word += 0x7FFF + ((word >> 16) & 1);
    return bits<typename I::f32>(word & 0xFFFF0000u);
}

template <class I> inline typename I::f32 up_to_bf16(typename I::f32 x) {  // x >= 0
    const typename I::f32 nearest = to_bf16<I>(x);
    return nearest < x ? bits<typename I::f32>(bits<typename I::u32>(nearest) + 0x10000u) : nearest;
}

// Chooses them for one group after another, and remembers whether all elements were sound.
template <class I, Type type, Levels levels> class Chooser {
    using E = Elements<I, type>;
    using f32 = typename I::f32;
    using i32 = typename I::i32;

    const Encoder& how_;
    const Divisor<I> span_;

    template <bool Easy> Group<I> chosen(f32 low, f32 high) const {
        const i32 constant = (low == high) & splat<i32>(how_.choice == Choice::open_range ? 0 : -1);
        f32 step, whole;
        if constexpr (levels == Levels::e4m3) {
            whole = maximum(high, -low) + 0.0f;
            step = divide<Easy>(whole, span_);
        } else {
            whole = low;
            step = maximum(divide<Easy>(high, span_) - divide<Easy>(low, span_), maximum(high, -low) * 0x1p-10f);
        }
        const f32 scale = (constant ? to_bf16<I>(whole) : up_to_bf16<I>(step)) + 0.0f;
        const Divisor<I> divisor(scale == 0.0f ? splat<f32>(1.0f) : scale);
        f32 zero{};
        if constexpr (levels != Levels::e4m3)
            zero = through_half<I>((constant ? splat<f32>(1.0f) : splat<f32>(how_.bottom)) - divide<Easy>(low, divisor));
        return {scale, zero, divisor, Easy};
    }

public:
    i32 sound = ~i32{};  // whether elements were finite and within the limit

    explicit Chooser(const Encoder& how) : how_(how), span_(splat<f32>(how.span)) {}

    bool all_sound() const { return all(sound); }

    // The keys of extremes. NaN and infinity are among them, where they occur.
    void see(i32 low_key, i32 high_key) {
        const int32_t limit = E::key_of_limit(how_.limit);
        sound &= (high_key <= limit) & (low_key >= -1 - limit);
    }

    // From the keys of their extremes.
    Group<I> choose(i32 low_key, i32 high_key) {
        see(low_key, high_key);
        const f32 low = E::value(low_key), high = E::value(high_key);
        if (how_.choice == Choice::fixed) {
            const f32 scale = splat<f32>(how_.scale);
            return {scale, f32{}, Divisor<I>(scale, scale, scale), false};
        }
        if constexpr (I::fused)
            if (__builtin_expect(all(easy<I>(low) & easy<I>(high)), 1)) return chosen<true>(low, high);
        return chosen<false>(low, high);
    }
};

}  // namespace
}  // namespace kvbits
