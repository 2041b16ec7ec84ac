// Keys that are stored before the rotary embedding, and means that were taken off with it.
//
// Token m of block n is roped by base[n] + step[m]. The query is unroped by the base, once per block, and multiplied with
// keys that are roped by the step alone. Numbers of sixteen bits do for that: a code becomes `unit` times a number that
// fills them, a rope is four products, rounded, of twice as many lanes as floats would have, and products with
// the query, sixteen bits as well, are summed exactly.
#pragma once

#include "../angles.hpp"
#include "scores.hpp"

namespace kvbits {
namespace {

constexpr float largest_short = 23000;  // of a key: roped, it stays below 2^15
constexpr float largest_e4m3 = 448;
constexpr int chunk = 32;               // channels of the query that share a step, and whose products share a sum

// Levels as numbers of sixteen bits: level = unit * number + centre.
struct ShortLevels {
    float unit, centre, lowest, highest;
    alignas(16) uint8_t high[16] = {}, low[16] = {};

    explicit ShortLevels(const Side& side) {
        const int count = side.levels_count();
        if (side.levels != Levels::table) {  // a code, moved to the top of its sixteen bits
            lowest = 0;
            highest = float(count - 1);
            centre = float(count / 2);
            unit = 1.0f / float(65536 / count);
            return;
        }
        lowest = highest = side.table[0];
        for (int i = 0; i < count; ++i) {
            lowest = side.table[i] < lowest ? side.table[i] : lowest;
            highest = side.table[i] > highest ? side.table[i] : highest;
        }
        centre = (lowest + highest) / 2;
        unit = highest > lowest ? (highest - lowest) / 2 / 32767 : 1;
        for (int i = 0; i < count; ++i) {
            const int n = int(__builtin_rintf((side.table[i] - centre) / unit));
            high[i] = uint8_t(n >> 8 & 255);
            low[i] = uint8_t(n & 255);
        }
    }

    // Whether the keys of a block can be roped as such numbers: four neighbours must share a group. What shares a
    // static scale for the whole layer may be of any size beside it, and is roped as floats.
    static bool fit(const Side& side, const Steps& steps) {
        const bool whole = side.per == Per::channel || (side.per == Per::token && side.length % 4 == 0);
        return whole && !steps.shorts.empty() && side.levels != Levels::exact;
    }
};

// What makes numbers of levels into keys: key = unit * (factor * number / 2^15 + offset).
struct ShortFactors {
    int16_t *factor, *offset;  // per channel [group][channel, in the order of words]; per token [group][token], each twice
    float* unit;               // of each channel, or of each token
    int stride;                // from group to group, in numbers
};

// The order of four channels in a word's two vectors of pairs.
template <class V> inline V word_order(V x) {
    constexpr int W = int(sizeof(V) / sizeof(x[0]));
    if constexpr (W == 4) return __builtin_shufflevector(x, x, 0, 2, 1, 3);
    else if constexpr (W == 8) return __builtin_shufflevector(x, x, 0, 2, 1, 3, 4, 6, 5, 7);
    else return __builtin_shufflevector(x, x, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}

template <class I>
KVBITS_STAGE void short_factors(const Side& side, const ShortLevels& levels, const Steps& steps, const float* scale, const float* zero,
                                const ShortFactors& out) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    const bool per_token = side.per == Per::token;
    const int count = per_token ? steps.tokens : side.channels;
    if (side.levels == Levels::e4m3) {
        for (int i = 0; i < count; i += I::W) store(out.unit + i, load<f32>(scale + i) * (largest_e4m3 / largest_short));
        return;
    }
    const auto zeros = [&](int g, int i) { return side.zero ? load<f32>(zero + int64_t(g) * count + i) : f32{}; };
    for (int i = 0; i < count; i += I::W) {  // the largest magnitude that any code stands for
        f32 peak{};
        for (int g = 0; g < side.groups; ++g) {
            const f32 s = load<f32>(scale + int64_t(g) * count + i), z = zeros(g, i);
            const f32 low = s * (levels.lowest - z), high = s * (levels.highest - z);
            peak = maximum<f32>(peak, maximum<f32>(maximum<f32>(low, -low), maximum<f32>(high, -high)));
        }
        store(out.unit + i, peak);
    }
    if (!per_token)  // both channels of a pair have the same unit
        for (int p = 0; p < steps.pairs; ++p) {
            float &x = out.unit[steps.interleaved ? 2 * p : p], &y = out.unit[steps.interleaved ? 2 * p + 1 : p + steps.pairs];
            x = y = x > y ? x : y;
        }
    for (int i = 0; i < count; i += I::W) {
        const f32 peak = load<f32>(out.unit + i), inverse = peak > 1e-30f ? largest_short / peak : f32{};
        for (int g = 0; g < side.groups; ++g) {
            const f32 s = load<f32>(scale + int64_t(g) * count + i) * inverse;
            const u32 factor = bits<u32>(I::round(s * (levels.unit * 32768.0f))), offset = bits<u32>(I::round(s * (levels.centre - zeros(g, i))));
            int16_t *f = out.factor + int64_t(g) * out.stride, *o = out.offset + int64_t(g) * out.stride;
            if (per_token) {
                store(f + 2 * i, (factor & 0xFFFF) | factor << 16);
                store(o + 2 * i, (offset & 0xFFFF) | offset << 16);
            } else {
                store(f + i, __builtin_convertvector(word_order(factor), typename I::u16));
                store(o + i, __builtin_convertvector(word_order(offset), typename I::u16));
            }
        }
        store(out.unit + i, peak * (1.0f / largest_short));
    }
}

// Sixteen tokens of keys, roped by their steps: two channels of each token beside each other, [channels / 2][16][2].
template <class I, Levels LEVELS, bool TOP, bool PER_TOKEN>
KVBITS_STAGE void roped_tile(const Side& side, const ShortLevels& levels, const Tiles& tiles, int tile, const Steps& steps,
                              const ShortFactors& factors, int16_t* out) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    using i16 = typename I::wide_i16;
    const Tile here = tiles[tile];
    tiles.fetch(tile, 1, tiles.tiles);
    const int shift = 16 - side.bits - (TOP ? 0 : here.shift), pairs = steps.pairs, words = side.channels / 4;
    const uint32_t field = (0xFFFFu & ~(0xFFFFu >> side.bits)) * 0x00010001u;
    const int64_t group = PER_TOKEN || side.fixed ? 0 : int64_t(16 * tile / side.length) * factors.stride;
    for (int part = 0; part < 16; part += I::W) {
        const auto key = [&](int w, i16* x) {
            u32 even, odd;
            if constexpr (LEVELS == Levels::e4m3) {
                f32 value[4];
                u32 number[4];
                I::e4m3(load<u32>(here.at + 16 * w + part), value);
                for (int j = 0; j < 4; ++j) number[j] = bits<u32>(I::round(value[j] * (largest_short / largest_e4m3)));
                x[0] = bits<i16>((number[0] & 0xFFFF) | number[2] << 16);
                x[1] = bits<i16>((number[1] & 0xFFFF) | number[3] << 16);
                return;
            } else if constexpr (LEVELS == Levels::table) {
                const u32 codes = tiles.planes == 0 ? codes_of<I, 0>(here, 16 * w + part, tiles.mask)
                                : TOP ? codes_of<I, 2>(here, 16 * w + part, tiles.mask) : codes_of<I, 1>(here, 16 * w + part, tiles.mask);
                const u32 high = I::lookup(codes, levels.high), low = I::lookup(codes, levels.low);
                even = (high << 8 & 0xFF00FF00u) | (low & 0x00FF00FFu);
                odd = (high & 0xFF00FF00u) | (low >> 8 & 0x00FF00FFu);
            } else {  // to the top of sixteen bits each, half of their range below zero
                const u32 codes = TOP ? codes_of<I, 2>(here, 16 * w + part, tiles.mask) : load<u32>(here.at + 16 * w + part);
                even = (codes << shift & field) ^ 0x80008000u;
                odd = ((shift >= 8 ? codes << (shift - 8) : codes >> (8 - shift)) & field) ^ 0x80008000u;
            }
            const int64_t at = PER_TOKEN ? int64_t(4 * w / side.length) * factors.stride + 2 * (16 * tile + part) : group + 4 * w;
            const auto factor = [&](const int16_t* from) {
                return PER_TOKEN ? load<i16>(from + at) : bits<i16>(splat<u32>(load<uint32_t>(from + at)));
            };
            const auto next = [&](const int16_t* from) { return PER_TOKEN ? from : from + 2; };
            x[0] = I::scaled(bits<i16>(even), factor(factors.factor)) + factor(factors.offset);
            x[1] = I::scaled(bits<i16>(odd), factor(next(factors.factor))) + factor(next(factors.offset));
        };
        const auto rope = [&](int angle, i16 x, i16 y, int a, int b) {
            const int16_t* at = steps.shorts[size_t(tile) * size_t(pairs) + size_t(2 * angle)].at + 2 * part;
            const i16 c = load<i16>(at), s = load<i16>(at + 32);
            store(out + 32 * a + 2 * part, i16(I::scaled(x, c) - I::scaled(y, s)));
            store(out + 32 * b + 2 * part, i16(I::scaled(y, c) + I::scaled(x, s)));
        };
        i16 x[2], y[2];
        int w = 0;
        if (steps.interleaved) {
            for (; w < pairs / 2; ++w) {
                key(w, x);
                rope(w, x[0], x[1], 2 * w, 2 * w + 1);
            }
        } else {
            for (; w < pairs / 4; ++w) {
                key(w, x);
                key(w + pairs / 4, y);
                for (int j = 0; j < 2; ++j) rope(2 * w + j, x[j], y[j], 2 * w + j, 2 * w + j + pairs / 2);
            }
            w = pairs / 2;
        }
        for (; w < words; ++w) {  // channels without a pair
            key(w, x);
            for (int j = 0; j < 2; ++j) store(out + 32 * (2 * w + j) + 2 * part, x[j]);
        }
    }
}

// A query for such keys: numbers of sixteen bits in the order of words, and a step for each chunk. Their magnitudes
// sum to less than 2^16 over a chunk, so that no sum of products leaves 32 bits.
template <class I> inline void shorten(const float* x, int width, int16_t* out, float* steps) {
    using f32 = typename I::f32;
    for (int c = 0; c < width; c += chunk) {
        const int end = c + chunk < width ? c + chunk : width;
        f32 total{}, peak{};
        for (int i = c; i < end; i += I::W) {
            const f32 v = load<f32>(x + i), magnitude = maximum<f32>(v, -v);
            total += magnitude;
            peak = maximum<f32>(peak, magnitude);
        }
        const float all = sum(total) / 65500.0f, one = largest(peak) / 32700.0f, step = one > all ? one : all;
        const f32 inverse = splat<f32>(step > 1e-35f && step < __builtin_inff() ? 1.0f / step : 0.0f);
        for (int i = c; i < end; i += I::W)
            store(out + i, __builtin_convertvector(word_order(I::round(load<f32>(x + i) * inverse)), typename I::i16));
        *steps++ = step < __builtin_inff() ? step : __builtin_nanf("");  // what is not finite spoils the whole sum
    }
}

// Dot products of N such queries with one tile of roped keys: out[n][16].
template <class I, int N>
KVBITS_STAGE void short_dots(const int16_t* keys, int channels, const int16_t* const* query, const float* const* steps, float* const* out) {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    using i16 = typename I::wide_i16;
    constexpr int C = N >= 3 ? 1 : N == 2 ? 2 : 4;
    for (int part = 0; part < 16; part += I::W) {
        f32 total[N] = {};
        for (int first = 0, n = 0; first < channels; first += chunk, ++n) {
            const int last = first + chunk < channels ? first + chunk : channels;
            i32 sums[C][N] = {};
            for (int d = first; d < last; d += 2 * C)  // channels are a multiple of 8
                for (int c = 0; c < C; ++c) {
                    const i16 key = load<i16>(keys + 16 * (d + 2 * c) + 2 * part);
                    for (int r = 0; r < N; ++r)
                        sums[c][r] = I::dot(sums[c][r], key, bits<i16>(splat<i32>(load<int32_t>(query[r] + d + 2 * c))));
                }
            for (int r = 0; r < N; ++r) {
                for (int c = 1; c < C; ++c) sums[0][r] += sums[c][r];
                total[r] = I::fma(__builtin_convertvector(sums[0][r], f32), splat<f32>(steps[r][n]), total[r]);
            }
        }
        for (int r = 0; r < N; ++r) store(out[r] + part, total[r]);
    }
}

// Float keys [channel][16] of one tile, roped by their steps.
template <class I> inline void rope_keys(float* keys, const Steps& steps, int tile) {
    using f32 = typename I::f32;
    for (int i = 0; i < steps.pairs; ++i) {
        const size_t at = size_t(tile) * size_t(steps.pairs) + size_t(i);
        float* a = keys + 16 * (steps.interleaved ? 2 * i : i);
        float* b = keys + 16 * (steps.interleaved ? 2 * i + 1 : i + steps.pairs);
        for (int part = 0; part < 16; part += I::W) {
            const f32 x = load<f32>(a + part), y = load<f32>(b + part);
            const f32 c = load<f32>(steps.cos[at].at + part), s = load<f32>(steps.sin[at].at + part);
            store(a + part, I::fma(x, c, -(y * s)));
            store(b + part, I::fma(y, c, x * s));
        }
    }
}

// `query` unroped by the angles of a block's first token.
inline void unrope(const float* __restrict query, const float* cos, const float* sin, int pairs, bool interleaved, float* __restrict out) {
    for (int i = 0; i < pairs; ++i) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + pairs;
        out[a] = query[a] * cos[i] + query[b] * sin[i];
        out[b] = query[b] * cos[i] - query[a] * sin[i];
    }
}

// Products of N queries with a mean that is roped with the tokens of tile `tile`, added to out[n][16]. Of each pair, a is
// the product with the mean as it is, and b with the mean roped by a right angle.
template <class I, int N>
KVBITS_STAGE void mean_dots(const Steps& steps, int tile, const float* const* a, const float* const* b, float* const* out) {
    using f32 = typename I::f32;
    const TileFloats *cos = steps.cos.data() + size_t(tile) * size_t(steps.pairs), *sin = steps.sin.data() + (cos - steps.cos.data());
    for (int part = 0; part < 16; part += I::W) {
        f32 first[N], second[N] = {};
        for (int n = 0; n < N; ++n) first[n] = load<f32>(out[n] + part);
        for (int i = 0; i < steps.pairs; ++i) {
            const f32 c = load<f32>(cos[i].at + part), s = load<f32>(sin[i].at + part);
            for (int n = 0; n < N; ++n) {
                first[n] = I::fma(c, splat<f32>(a[n][i]), first[n]);
                second[n] = I::fma(s, splat<f32>(b[n][i]), second[n]);
            }
        }
        for (int n = 0; n < N; ++n) store(out[n] + part, first[n] + second[n]);
    }
}

}  // namespace
}  // namespace kvbits
