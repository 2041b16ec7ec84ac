// Vectors of W lanes, written with the compiler's vector extension so that one source serves every instruction set.
// What the extension cannot say (dot products of bytes, shuffles, halves) each instruction set supplies; see isa/.
//
// Everything that is compiled once per instruction set lives in unnamed namespaces: with external linkage the linker
// would keep one copy of an inline function, perhaps the one with instructions that this processor lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvbits {
namespace {

// A stage of the work that profilers should see by itself; none is called more than a few times per block.
#define KVBITS_STAGE __attribute__((noinline))

template <int W> struct Lanes {
    typedef float f32 __attribute__((vector_size(4 * W)));
    typedef int32_t i32 __attribute__((vector_size(4 * W)));
    typedef uint32_t u32 __attribute__((vector_size(4 * W)));
    typedef uint16_t u16 __attribute__((vector_size(2 * W)));
    typedef uint8_t u8 __attribute__((vector_size(W)));
    typedef int8_t i8 __attribute__((vector_size(W)));
    typedef int16_t i16 __attribute__((vector_size(2 * W)));
    // Twice as many lanes, for elements of 16 bits.
    typedef int16_t wide_i16 __attribute__((vector_size(4 * W)));
    typedef uint8_t wide_u8 __attribute__((vector_size(2 * W)));
};

template <class V> inline V load(const void* at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

template <class V> inline void store(void* at, V v) { std::memcpy(at, &v, sizeof v); }

template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// x - 0 is x, also for -0, so nothing is left of the subtraction.
template <class V, class T> inline V splat(T x) { return x - V{}; }

template <class V> inline V maximum(V a, V b) { return a > b ? a : b; }
template <class V> inline V minimum(V a, V b) { return a < b ? a : b; }

// Lanes 0, 2, 4, ... of a and then of b; and 1, 3, 5, ...
template <class V> inline V even_lanes(V a, V b) {
    constexpr int W = int(sizeof(V) / sizeof(a[0]));
    if constexpr (W == 4) return __builtin_shufflevector(a, b, 0, 2, 4, 6);
    else if constexpr (W == 8) return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    else return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

template <class V> inline V odd_lanes(V a, V b) {
    constexpr int W = int(sizeof(V) / sizeof(a[0]));
    if constexpr (W == 4) return __builtin_shufflevector(a, b, 1, 3, 5, 7);
    else if constexpr (W == 8) return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
    else return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// float32 of W bfloat16.
template <class I> inline typename I::f32 load_bf16(const uint16_t* at) {
    return bits<typename I::f32>(__builtin_convertvector(load<typename I::u16>(at), typename I::u32) << 16);
}

// Round to nearest even; what is stored is finite.
template <class I> inline void store_bf16(uint16_t* at, typename I::f32 x) {
    using u32 = typename I::u32;
    u32 word = bits<u32>(x);
    word += 0x7FFF + ((word >> 16) & 1);
    store(at, __builtin_convertvector(word >> 16, typename I::u16));
}

// e^x to about 2e-7 relative; 0 for x below -87, -inf included. NaN stays NaN.
template <class I> inline typename I::f32 exponential(typename I::f32 x) {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    const f32 lowest = splat<f32>(-87.0f);
    const f32 y = x < lowest ? lowest : x;
    const i32 n = I::round(y * 1.44269504f);
    const f32 whole = __builtin_convertvector(n, f32);
    f32 r = I::fma(whole, splat<f32>(-0.693359375f), y);
    r = I::fma(whole, splat<f32>(2.12194440e-4f), r);
    f32 p = splat<f32>(1.9875691500e-4f);
    p = I::fma(p, r, splat<f32>(1.3981999507e-3f));
    p = I::fma(p, r, splat<f32>(8.3334519073e-3f));
    p = I::fma(p, r, splat<f32>(4.1665795894e-2f));
    p = I::fma(p, r, splat<f32>(1.6666665459e-1f));
    p = I::fma(p, r, splat<f32>(5.0000001201e-1f));
    p = I::fma(p, r * r, r + 1.0f);
    const f32 result = p * bits<f32>((n + 127) << 23);
    return x < lowest ? f32{} : result;
}

// Fold the lanes of a vector with f, halves first.
template <class V, class F> inline auto fold(V x, F f) {
    constexpr int W = int(sizeof(V) / sizeof(x[0]));
    if constexpr (W == 16)
        return fold(f(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)), f);
    else if constexpr (W == 8)
        return fold(f(__builtin_shufflevector(x, x, 0, 1, 2, 3), __builtin_shufflevector(x, x, 4, 5, 6, 7)), f);
    else {
        static_assert(W == 4);
        x = f(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
        return f(x, __builtin_shufflevector(x, x, 1, 0, 3, 2))[0];
    }
}

template <class V> inline auto sum(V x) {
    return fold(x, [](auto a, auto b) { return a + b; });
}

template <class V> inline auto largest(V x) {
    return fold(x, [](auto a, auto b) { return a > b ? a : b; });
}

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return bits<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    // A float32 with the half's exponent and mantissa in place is 2^112 too small; subnormals come out right as well.
    const float value = bits<float>(magnitude << 13) * 5.192296858534828e33f;
    return bits<float>(bits<uint32_t>(value) | sign);
}

inline uint16_t float_to_half(float x) {  // round to nearest even
    const uint32_t word = bits<uint32_t>(x), sign = word >> 16 & 0x8000, magnitude = word & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (magnitude >= 0x47800000) return uint16_t(sign | 0x7C00);
    if (magnitude < 0x38800000) {  // subnormal half: let the addition round
        const float shifted = bits<float>(magnitude) + 0.5f;
        return uint16_t(sign | (bits<uint32_t>(shifted) - 0x3F000000));
    }
    const uint32_t rounded = magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1);
    return uint16_t(sign | rounded >> 13);
}

inline float bf16_to_float(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

// Value of an e4m3 byte (never NaN here).
inline float e4m3_to_float(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float scale = bits<float>(uint32_t((exponent ? exponent : 1) + 117) << 23);  // 2^(e - 10)
    const float magnitude = float(exponent ? 8 + mantissa : mantissa) * scale;
    return byte & 0x80 ? -magnitude : magnitude;
}

}  // namespace
}  // namespace kvbits
