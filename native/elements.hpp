// Elements as they lie in a tensor, two vectors at a time.
//
// Three things keep the encoders' one pass short. Minimum and maximum are taken of the elements' bit patterns, made to
// sort as integers: twice as many 16-bit elements per operation as there would be floats, and NaN and infinity come out
// as an extreme, so that the search for them costs nothing. Two bfloat16 of a word become floats by one shift and one
// mask, so vectors hold every other element; codes and scales are stored the same way. And a division by a scale is two
// products (see Divisor).
#pragma once

#include "format.hpp"
#include "vec.hpp"

namespace kvbits {
namespace {

template <class I, Type type> struct Elements {
    static_assert(type == Type::f32 || type == Type::bf16 || type == Type::f16);
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    using u32 = typename I::u32;
    using i16 = typename I::wide_i16;
    using half = typename I::i16;
    static constexpr int W = I::W, count = 2 * W, size = type == Type::f32 ? 4 : 2;
    using Word = std::conditional_t<type == Type::f32, int32_t, int16_t>;
    using Key = std::conditional_t<type == Type::f32, i32, i16>;
    static constexpr int vectors = size / 2;

    // `count` elements, in two vectors.
    static void load(const uint8_t* at, f32* out) {
        if constexpr (type == Type::f32) {
            out[0] = kvbits::load<f32>(at);
            out[1] = kvbits::load<f32>(at + 4 * W);
        } else if constexpr (type == Type::f16) {
            out[0] = I::from_f16(kvbits::load<typename I::u16>(at));
            out[1] = I::from_f16(kvbits::load<typename I::u16>(at + 2 * W));
        } else {
            const u32 pairs = kvbits::load<u32>(at);
            out[0] = bits<f32>(pairs << 16);
            out[1] = bits<f32>(pairs & 0xFFFF0000u);
        }
    }

    // Floats in the order of `load`.
    static void arrange(const float* at, f32* out) {
        const f32 a = kvbits::load<f32>(at), b = kvbits::load<f32>(at + W);
        out[0] = type == Type::bf16 ? even_lanes(a, b) : a;
        out[1] = type == Type::bf16 ? odd_lanes(a, b) : b;
    }

    static float one(const uint8_t* at) {
        if constexpr (type == Type::f32) return kvbits::load<float>(at);
        else if constexpr (type == Type::f16) return half_to_float(kvbits::load<uint16_t>(at));
        else return bf16_to_float(kvbits::load<uint16_t>(at));
    }

    // An element's bits, which order as its values do; -0 is below 0. The mapping is its own inverse.
    template <class V> static V ordered(V word) {
        constexpr int top = 8 * int(sizeof(word[0])) - 1;
        return word ^ (word >> top & Word(size == 4 ? 0x7FFFFFFF : 0x7FFF));
    }

    struct Extremes {
        Key low[vectors], high[vectors];

        Extremes() {
            for (int v = 0; v < vectors; ++v) {
                low[v] = splat<Key>(Word(size == 4 ? 0x7FFFFFFF : 0x7FFF));
                high[v] = ~low[v];
            }
        }

        void see(const uint8_t* at) {
            for (int v = 0; v < vectors; ++v) {
                const Key key = ordered(kvbits::load<Key>(at + 4 * W * v));
                low[v] = minimum(low[v], key);
                high[v] = maximum(high[v], key);
            }
        }
    };

    // Keys in the order of `load`.
    static void split(const Key* key, i32* out) {
        if constexpr (type == Type::f32) {
            out[0] = key[0];
            out[1] = key[1];
        } else if constexpr (type == Type::f16) {
            half halves[2];
            std::memcpy(halves, key, sizeof halves);
            out[0] = __builtin_convertvector(halves[0], i32);
            out[1] = __builtin_convertvector(halves[1], i32);
        } else {
            const i32 pairs = bits<i32>(key[0]);
            out[0] = pairs << 16 >> 16;
            out[1] = pairs >> 16;
        }
    }

    static f32 value(i32 key) {
        const i32 word = key ^ (key >> 31 & (size == 4 ? 0x7FFFFFFF : 0x7FFF));
        if constexpr (type == Type::f32) return bits<f32>(word);
        else if constexpr (type == Type::bf16) return bits<f32>(word << 16);
        else return I::from_f16(__builtin_convertvector(word, typename I::u16));
    }

    static int32_t key_of_limit(float limit) {
        if constexpr (type == Type::f32) return bits<int32_t>(limit);
        else if constexpr (type == Type::bf16) return bits<int32_t>(limit) >> 16;
        else return float_to_half(limit);
    }

    // Numbers below 2^15 in magnitude, in the order of `load`, as bytes clamped to 0 .. top.
    static void store_codes(uint8_t* at, const i32* code, int top) {
        i16 both;
        if constexpr (type == Type::bf16) {
            both = bits<i16>((bits<u32>(code[0]) & 0xFFFFu) | bits<u32>(code[1]) << 16);
        } else {
            const half halves[2] = {__builtin_convertvector(code[0], half), __builtin_convertvector(code[1], half)};
            std::memcpy(&both, halves, sizeof both);
        }
        both = minimum(maximum(both, i16{}), splat<i16>(int16_t(top)));
        store(at, __builtin_convertvector(both, typename I::wide_u8));
    }

    // 16-bit patterns, in the order of `load`.
    static void store_halves(uint16_t* at, const u32* word) {
        if constexpr (type == Type::bf16) {
            store(at, word[0] | word[1] << 16);
        } else {
            store(at, __builtin_convertvector(word[0], typename I::u16));
            store(at + W, __builtin_convertvector(word[1], typename I::u16));
        }
    }
};

// The quotient that division gives, by two products.
//
// With r = 1 / s and the rest (1 - s r) r, exact but for its last bits, x r + x rest lies within 2^-45 of x / s,
// relatively. Where s has at most 8 significant bits, as every scale has, x / s lies at least 2^-33 away from the
// middle of two neighbouring floats (their middle times s would have 25 significant bits, which x has not), so both
// round alike. That needs fused products, and sizes that keep the rest normal: see `easy`.
template <class I> struct Divisor {
    using f32 = typename I::f32;
    f32 whole, first, rest;

    explicit Divisor(f32 s) : whole(s), first(splat<f32>(1.0f) / s), rest(I::fma(-s, first, splat<f32>(1.0f)) * first) {}
    Divisor(f32 s, f32 f, f32 r) : whole(s), first(f), rest(r) {}
};

template <bool Easy, class I> inline typename I::f32 divide(typename I::f32 x, const Divisor<I>& by) {
    if constexpr (Easy) return I::fma(x, by.first, x * by.rest);
    else return x / by.whole;
}

// Extremes of a group whose quotients may be had by `divide<true>`. Smaller elements between them may then lose bits to
// underflow, where their quotients are far too small to move a code.
template <class I> inline typename I::i32 easy(typename I::f32 extreme) {
    const typename I::i32 magnitude = bits<typename I::i32>(extreme) & 0x7FFFFFFF;
    return (magnitude == 0) | ((magnitude >= 0x0D800000) & (magnitude <= 0x5D800000));  // 2^-100 to 2^60
}

template <class V> inline bool all(V mask) {
    return fold(mask, [](auto a, auto b) { return a & b; }) != 0;
}

}  // namespace
}  // namespace kvbits
