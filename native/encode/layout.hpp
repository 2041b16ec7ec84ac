// In what order the elements of a block are read, and how much memory its encoder needs.
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
    static int64_t shortest(const Encoder& how) {
        if (how.per == Per::channel) return how.channels;
        return how.channels - (how.groups - 1) * how.length;
    }
    static bool padded(const Encoder& how) { return shortest(how) < E::count; }
    static int64_t width(const Encoder& how) { return (how.length + E::count - 1) / E::count * E::count; }
    static int64_t row_bytes(const Encoder& how) {
        return how.per == Per::channel ? E::count * E::size : how.groups * width(how) * E::size;
    }
    static int64_t code_stride(const Encoder& how) { return how.channels + (padded(how) ? width(how) + E::count : 0); }
    static int64_t floats(const Encoder& how) {
        return how.choice == Choice::half_quadratic ? 2 * I::W * how.length : how.choice == Choice::norm ? how.channels + chains : 0;
    }
    static int64_t scratch_bytes(const Encoder& how) {
        return how.tokens * code_stride(how) + (padded(how) ? how.tokens * row_bytes(how) : 0) +
               4 * floats(how) + 4 * 64;
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
