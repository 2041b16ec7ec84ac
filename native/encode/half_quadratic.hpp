// The zeros of HQQ: half-quadratic splitting for W groups at once, one in each lane. See codecs/half_quadratic.py.
#pragma once

#include "../vec.hpp"

namespace kvbits {
namespace {

// x^-0.3 as 2^(-0.3 log2 x), to 4e-6 relative for x from 1e-12 to 1e5: both factors are polynomials, of degree 7 and 4.
// A zero keeps 11 bits, so that few see the error; and of two zeros it mistakes the better one only where both are
// equally good to five digits.
template <class I> inline typename I::f32 power(typename I::f32 x) {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    const i32 word = bits<i32>(x) - 0x3F3504F3;  // sqrt(1/2): the mantissa lies around 1
    const i32 exponent = word >> 23;
    const f32 r = bits<f32>((word & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
    f32 p = splat<f32>(0.170658351f);
    p = I::fma(p, r, splat<f32>(-0.272686573f));
    p = I::fma(p, r, splat<f32>(0.297250479f));
    p = I::fma(p, r, splat<f32>(-0.358963206f));
    p = I::fma(p, r, splat<f32>(0.480466246f));
    p = I::fma(p, r, splat<f32>(-0.721375828f));
    p = I::fma(p, r, splat<f32>(1.4426997f));
    const f32 y = I::fma(p, r, __builtin_convertvector(exponent, f32)) * -0.3f;
    const i32 n = I::round(y);
    const f32 f = y - __builtin_convertvector(n, f32);
    f32 q = splat<f32>(0.00957010143f);
    q = I::fma(q, f, splat<f32>(0.0559178603f));
    q = I::fma(q, f, splat<f32>(0.240247448f));
    q = I::fma(q, f, splat<f32>(0.693121815f));
    q = I::fma(q, f, splat<f32>(0.999999261f));
    return bits<f32>(bits<i32>(q) + (n << 23));
}

// x rounded to float16.
template <class I> inline typename I::f32 through_half(typename I::f32 x) {
    uint16_t half[I::W];
    I::store_f16(half, x);
    return I::from_f16(load<typename I::u16>(half));
}

// The zero of the least error that the splitting visits. `levels` holds x / scale of element i of the group of lane l at
// [i * W + l]; a group has `lengths` of them, and anything finite up to `length`.
template <class I>
KVBITS_STAGE typename I::f32 half_quadratic_zero(const float* levels, int64_t length, typename I::i32 lengths,
                                                 typename I::f32 zero, int top) {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    constexpr int steps = 20;
    const f32 count = __builtin_convertvector(lengths, f32);
    f32 best = zero, least = splat<f32>(__builtin_inff());
    double beta = 10;
    for (int step = 0; step <= steps; ++step) {  // the error of a zero, and the next zero
        const f32 inverse = splat<f32>(float(1 / beta));
        f32 error{}, move{};
        for (int64_t i = 0; i < length; ++i) {
            const f32 x = load<f32>(levels + i * I::W);
            const i32 code = minimum(maximum(I::round(x + zero), i32{}), splat<i32>(top));
            const f32 off = x - (__builtin_convertvector(code, f32) - zero);
            const i32 sign = bits<i32>(off) & int32_t(0x80000000), real = lengths > int32_t(i);
            const f32 size = bits<f32>(bits<i32>(off) & 0x7FFFFFFF & real);
            const f32 steep = power<I>(maximum(size, splat<f32>(1e-12f)));
            error = I::fma(size, steep, error);  // |e|^0.7
            const f32 shrunk = maximum(size - steep * inverse, f32{});
            // The next zero is the mean of code - (x - shrunk); without `zero`, which they share, less is rounded.
            move += bits<f32>((bits<i32>(shrunk) | sign) & real) - bits<f32>(bits<i32>(off) & real);
        }
        const i32 better = error < least;
        best = better ? zero : best;
        least = better ? error : least;
        zero = through_half<I>(zero + move / count);
        beta *= 1.01;
    }
    return best;
}

}  // namespace
}  // namespace kvbits
