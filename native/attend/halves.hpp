// Sixteen-bit factors as two signed bytes, so that dot products of bytes reach sixteen-bit accuracy.
//
// x ~ step * (256 * high + low). The rounding that is left, summed over x, is kept in `rest`: times the middle level it
// removes the part of the error that does not average out, since codes are never negative.
#pragma once

#include "../format.hpp"
#include "../vec.hpp"

namespace kvbits {
namespace {

struct Halves {
    float step = 0, total = 0, rest = 0;
};

constexpr float largest_factor = 127 * 256;

// Halves of numbers whose magnitudes are at most `peak`, vector by vector.
template <class I> class Halver {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    const float step_;
    const f32 inverse_;
    f32 total_{};
    i32 integers_{};

public:
    explicit Halver(float peak)
        : step_(peak > 1e-30f ? peak / largest_factor : 0), inverse_(splat<f32>(peak > 1e-30f ? largest_factor / peak : 0)) {}

    void put(f32 x, uint8_t* high, uint8_t* low) {
        const i32 n = I::round(x * inverse_);
        total_ += x;
        integers_ += n;
        store(high, __builtin_convertvector((n + 128) >> 8, typename I::u8));
        store(low, __builtin_convertvector(n, typename I::u8));
    }

    Halves made() const {
        const float total = sum(total_);
        return {step_, total, total - step_ * float(sum(integers_))};
    }
};

// `x` holds `count` floats and zeros up to the next multiple of I::W; so will `high` and `low`.
template <class I> KVBITS_STAGE Halves halve(const float* x, int count, uint8_t* high, uint8_t* low) {
    using f32 = typename I::f32;
    f32 peak{};
    for (int i = 0; i < count; i += I::W) {
        const f32 v = load<f32>(x + i);
        peak = maximum<f32>(peak, maximum<f32>(v, -v));
    }
    Halver<I> halver(largest(peak));
    for (int i = 0; i < count; i += I::W) halver.put(load<f32>(x + i), high + i, low + i);
    return halver.made();
}

// Levels for the integer path: level ~ base + unit * n with 16-bit n = 256 * high + low, or the code itself.
struct IntegerLevels {
    bool table = false;
    float base = 0, unit = 1, middle = 0;
    alignas(16) uint8_t high[16] = {}, low[16] = {};

    explicit IntegerLevels(const Side& side) {
        const int count = side.levels_count();
        if (side.levels != Levels::table) {
            middle = float(count - 1) / 2;
            return;
        }
        table = true;
        float top = side.table[0], sum = 0;
        base = side.table[0];
        for (int i = 0; i < count; ++i) {
            base = side.table[i] < base ? side.table[i] : base;
            top = side.table[i] > top ? side.table[i] : top;
        }
        unit = (top - base) / 65535.0f;
        if (unit == 0) unit = 1;
        for (int i = 0; i < count; ++i) {
            const int n = int(__builtin_rintf((side.table[i] - base) / unit));
            high[i] = uint8_t(n >> 8);
            low[i] = uint8_t(n & 255);
            sum += float(n);
        }
        middle = sum / float(count);
    }

    // sum of x * level from the integer dot product of the halves and the codes.
    float scale(const Halves& x) const { return unit * x.step; }
    float offset(const Halves& x) const { return base * x.total + unit * middle * x.rest; }
};

// Sums of the products of codes with the halves of N rows, exact, in each lane. Of the products with levels of a table,
// those of both low bytes are below the accuracy where factors have nothing in common, as those of a query. Weights of
// many tokens may all be the same, so that what is left out adds up: EXACT has them too.
template <class I, int N, int PLANES, bool TABLE, bool EXACT> struct IntegerSums {
    typename I::i32 top[N] = {}, bottom[N] = {}, lowest[N] = {};

    // Four codes in each lane, times the factors of every row from byte `at` on.
    void add(typename I::u32 codes, const uint8_t* const* high, const uint8_t* const* low, int at, const IntegerLevels& levels) {
        using i32 = typename I::i32;
        [[maybe_unused]] i32 level_high{}, level_low{};
        if constexpr (TABLE) {
            level_high = (i32)I::lookup(codes, levels.high);
            level_low = (i32)I::lookup(codes, levels.low);
        }
        for (int n = 0; n < N; ++n) {
            const i32 h = splat<i32>(load<int32_t>(high[n] + at)), l = splat<i32>(load<int32_t>(low[n] + at));
            if constexpr (TABLE) {
                top[n] = I::template dot<true>(top[n], level_high, h);
                bottom[n] = I::template dot<true>(bottom[n], level_high, l);
                bottom[n] = I::template dot<true>(bottom[n], level_low, h);
                if constexpr (EXACT) lowest[n] = I::template dot<true>(lowest[n], level_low, l);
            } else {
                top[n] = I::template dot<PLANES == 0>(top[n], (i32)codes, h);
                bottom[n] = I::template dot<PLANES == 0>(bottom[n], (i32)codes, l);
            }
        }
    }

    typename I::f32 value(int n) const {
        using f32 = typename I::f32;
        const f32 t = __builtin_convertvector(top[n], f32), b = __builtin_convertvector(bottom[n], f32);
        if constexpr (TABLE && EXACT) return t * 65536.0f + (b * 256.0f + __builtin_convertvector(lowest[n], f32));
        return TABLE ? t * 65536.0f + b * 256.0f : t * 256.0f + b;
    }
};

}  // namespace
}  // namespace kvbits
