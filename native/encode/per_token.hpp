// Groups of channels, W at a time, one in each lane.
#pragma once

#include "block.hpp"
#include "codes.hpp"
#include "half_quadratic.hpp"

namespace kvbits {
namespace {

// Fold each of W vectors; lane i is vector i's.
template <class V, class F> inline V across(V* v, F f) {
    constexpr int W = int(sizeof(V) / sizeof(v[0][0]));
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) v[i] = f(even_lanes(v[2 * i], v[2 * i + 1]), odd_lanes(v[2 * i], v[2 * i + 1]));
    return v[0];
}

// Groups first .. first + count - 1, counted token by token.
template <class I, Type type, Levels levels>
inline void BlockEncoder<I, type, levels>::token_groups(int64_t first, int count) {
    const uint8_t* at[W];
    int64_t length[W];
    i32 low[W], high[W];
    const int64_t groups = how_.groups, step = how_.length, read_bytes = read_step_ * E::size;
    const int64_t short_one = padded_ ? read_step_ : length_of(groups - 1), whole = padded_ ? read_step_ : step;
    int64_t token = first / groups, group = first % groups;
    const uint8_t* read = data_ + token * stride_ + group * read_bytes;
    uint8_t* write_at = codes_ + token * code_stride_ + group * step;
    uint8_t* code[W];
    for (int j = 0; j < count; ++j) {
        at[j] = read;
        code[j] = write_at;
        length[j] = group == groups - 1 ? short_one : whole;
        typename E::Extremes seen;
        cover<E>(length[j], [&](int64_t i) { seen.see(at[j] + i * E::size); });
        i32 keys[2];
        E::split(seen.low, keys);
        low[j] = minimum(keys[0], keys[1]);
        E::split(seen.high, keys);
        high[j] = maximum(keys[0], keys[1]);
        read += read_bytes;
        write_at += step;
        if (++group == groups) {
            group = 0;
            read += stride_ - groups * read_bytes;
            write_at += code_stride_ - groups * step;
        }
    }
    for (int j = count; j < W; ++j) {
        low[j] = low[0];
        high[j] = high[0];
    }
    Group<I> made = chooser_.choose(across(low, [](i32 a, i32 b) { return minimum(a, b); }),
                                    across(high, [](i32 a, i32 b) { return maximum(a, b); }));
    if (how_.choice == Choice::half_quadratic) made.zero = solved(made, first, count, at, E::value(high[0]) == E::value(low[0]));
    if (out_.scale) {
        uint16_t halves[W];
        store(halves, __builtin_convertvector(made.scale_bits(), typename I::u16));
        std::memcpy(out_.scale + first, halves, size_t(count) * 2);
    }
    if (out_.zero) {
        uint16_t halves[W];
        I::store_f16(halves, made.zero);
        std::memcpy(out_.zero + first, halves, size_t(count) * 2);
    }
    if (made.easy) write<true>(made, count, at, length, code);
    else write<false>(made, count, at, length, code);
}

template <class I, Type type, Levels levels>
template <bool Easy>
inline void BlockEncoder<I, type, levels>::write(const Group<I>& made, int count, const uint8_t* const* at, const int64_t* length,
                                                 uint8_t* const* code_at) {
    float whole[W], first[W], rest[W], zero[W];
    store(whole, made.divisor.whole);
    store(first, made.divisor.first);
    store(rest, made.divisor.rest);
    store(zero, made.zero);
    float edges[32];  // no store to bytes can change these
    std::memcpy(edges, edges_, sizeof edges);
    for (int j = 0; j < count; ++j) {
        const Divisor<I> divisor(splat<f32>(whole[j]), splat<f32>(first[j]), splat<f32>(rest[j]));
        const f32 from = splat<f32>(zero[j]);
        cover<E>(length[j], [&](int64_t i) {
            f32 x[2];
            E::load(at[j] + i * E::size, x);
            const i32 codes[2] = {code_of<I, levels, Easy>(x[0], divisor, from, edges), code_of<I, levels, Easy>(x[1], divisor, from, edges)};
            E::store_codes(code_at[j] + i, codes, top_);
        });
    }
}

template <class I, Type type, Levels levels>
KVBITS_STAGE typename I::f32 BlockEncoder<I, type, levels>::solved(const Group<I>& made, int64_t first, int count,
                                                                   const uint8_t* const* at, i32 constant) {
    i32 lengths = splat<i32>(1);
    std::memset(floats_, 0, size_t(4 * W * how_.length));
    for (int j = 0; j < count; ++j) {
        lengths[j] = int32_t(length_of((first + j) % how_.groups));
        for (int i = 0; i < lengths[j]; ++i) floats_[i * W + j] = E::one(at[j] + i * E::size);
    }
    for (int64_t i = 0; i < how_.length; ++i) store(floats_ + i * W, load<f32>(floats_ + i * W) / made.divisor.whole);
    return constant ? made.zero : half_quadratic_zero<I>(floats_, how_.length, lengths, made.zero, top_);
}

}  // namespace
}  // namespace kvbits
