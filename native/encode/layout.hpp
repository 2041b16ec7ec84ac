// How the elements of a block are met, and how much memory its encoder needs.
//
// Groups shorter than two vectors are first widened, in rows of their own, by their last element.
#pragma once

#include "../elements.hpp"
#include "../encoder.hpp"

namespace kvbits {
namespace {

constexpr int chains = 16;  // sums of doubles beside each other

template <class I, Type type> struct Layout {
    using E = Elements<I, type>;

    // Elements of the shortest group along a vector.
    static int64_t shortest(const Encoder& told) {
        if (told.per == Per::channel) return told.channels;
        return told.channels - (told.groups - 1) * told.length;
    }
    static bool padded(const Encoder& told) { return shortest(told) < E::count; }
    static int64_t width(const Encoder& told) { return (told.length + E::count - 1) / E::count * E::count; }
    static int64_t row_bytes(const Encoder& told) {
        return told.per == Per::channel ? E::count * E::size : told.groups * width(told) * E::size;
    }
    static int64_t code_stride(const Encoder& told) { return told.channels + (padded(told) ? width(told) + E::count : 0); }
    static int64_t floats(const Encoder& told) {
        return told.choice == Choice::half_quadratic ? 2 * I::W * told.length : told.choice == Choice::norm ? told.channels + chains : 0;
    }
    static int64_t scratch_bytes(const Encoder& told) {
        return told.tokens * code_stride(told) + (padded(told) ? told.tokens * row_bytes(told) : 0) +
               4 * floats(told) + 4 * 64;
    }
};

// Call f(offset) for vectors that cover `length` elements; the last may overlap the one before.
template <class E, class F> inline void cover(int64_t length, F f) {
    const int64_t last = length - E::count;
    if (last == E::count) {  // what most groups are, without a loop
        f(0);
        return f(last);
    }
    for (int64_t i = 0; i < last; i += E::count) f(i);
    f(last);
}

}  // namespace
}  // namespace kvbits
