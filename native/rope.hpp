// Scores of keys that are stored before the rotary embedding: rotated on the way from codes to products.
#pragma once

#include "scores.hpp"

namespace kvbits {
namespace {

// How a code becomes a key: factor * number + offset. A uniform code of a byte, put behind the point of 1.0, is the
// number 1 + code / 256: two operations, where a conversion takes three. Its rounding is 2^-16 of a level.
struct FloatLevels {
    bool uniform, per_token;
    const float *factor, *offset;  // [group][channel] or [group][token], as the scales
    int64_t group_of_word[128];    // where the factors of each word of four channels begin

    // Whether four neighbouring channels always share a group and a word.
    static bool fits(const Side& side, int pairs, bool interleaved) {
        const bool whole = side.per != Per::token || side.length % 4 == 0;
        return whole && !side.outliers && side.levels != Levels::exact && (interleaved ? pairs % 2 == 0 : pairs % 4 == 0);
    }

    template <class I> FloatLevels(const Side& side, int tokens, float* scale, float* zero, I) {
        using f32 = typename I::f32;
        uniform = side.levels == Levels::uniform;
        per_token = side.per == Per::token;
        const int64_t count = int64_t(side.groups) * (per_token ? tokens : side.channels);
        for (int64_t i = 0; i < count; i += I::W) {
            const f32 s = load<f32>(scale + i), z = side.zero ? load<f32>(zero + i) : f32{};
            store(scale + i, uniform ? s * 256.0f : s);
            store(zero + i, uniform ? s * (-256.0f - z) : s * -z);
        }
        factor = scale;
        offset = zero;
        for (int w = 0; w < side.channels / 4; ++w) group_of_word[w] = per_token ? int64_t(4 * w / side.length) * tokens : 4 * w;
    }
};

template <class I, int PLANES>
inline void four_numbers(const Side& side, const Tile& tile, int word, uint32_t mask, typename I::f32* x) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    const u32 codes = codes_of<I, PLANES>(tile, word, mask);
    if (side.levels == Levels::uniform) {
        const uint32_t field = 0x007F8000, one = 0x3F800000;
        x[0] = bits<f32>((codes << 15 & field) | one);
        x[1] = bits<f32>((codes << 7 & field) | one);
        x[2] = bits<f32>((codes >> 1 & field) | one);
        x[3] = bits<f32>((codes >> 9 & field) | one);
    } else if (side.levels == Levels::e4m3) {
        I::e4m3(codes, x);
    } else {
        for (int j = 0; j < 4; ++j) x[j] = I::lookup(codes >> uint32_t(8 * j) & 255, side.table);
    }
}

// Dot products of N rows with tile `tile` of keys, rotated by angles [pair][16]; `shift` as FloatLevels' groups.
template <class I, int N, int PLANES>
KVBITS_STAGE void rotated_dots(const Side& side, const FloatLevels& levels, const Tiles& tiles, int tile, int pairs, bool interleaved,
                               const float* cos, const float* sin, const float* const* query, float* const* out) {
    using f32 = typename I::f32;
    const Tile here = tiles[tile];
    tiles.fetch(tile, 1, tiles.tiles);
    const int64_t channel_group = side.fixed || levels.per_token ? 0 : int64_t(16 * tile / side.length) * side.channels;
    for (int part = 0; part < 16; part += I::W) {
        f32 first[N] = {}, second[N] = {};
        const auto key = [&](int w, f32* x) {
            four_numbers<I, PLANES>(side, here, 16 * w + part, tiles.mask, x);
            if (levels.per_token) {
                const int64_t at = levels.group_of_word[w] + 16 * tile + part;
                const f32 f = load<f32>(levels.factor + at), o = load<f32>(levels.offset + at);
                for (int j = 0; j < 4; ++j) x[j] = I::fma(x[j], f, o);
            } else {
                const float *f = levels.factor + channel_group + 4 * w, *o = levels.offset + channel_group + 4 * w;
                for (int j = 0; j < 4; ++j) x[j] = I::fma(x[j], splat<f32>(f[j]), splat<f32>(o[j]));
            }
        };
        const auto turn = [&](int pair, f32 x, f32 y, int a, int b) {
            const f32 c = load<f32>(cos + 16 * pair + part), s = load<f32>(sin + 16 * pair + part);
            const f32 p = I::fma(x, c, -(y * s)), q = I::fma(y, c, x * s);
            for (int n = 0; n < N; ++n) {
                first[n] = I::fma(p, splat<f32>(query[n][a]), first[n]);
                second[n] = I::fma(q, splat<f32>(query[n][b]), second[n]);
            }
        };
        f32 x[4], y[4];
        int w = 0;
        if (interleaved) {
            for (; w < pairs / 2; ++w) {
                key(w, x);
                turn(2 * w, x[0], x[1], 4 * w, 4 * w + 1);
                turn(2 * w + 1, x[2], x[3], 4 * w + 2, 4 * w + 3);
            }
        } else {
            for (; w < pairs / 4; ++w) {
                key(w, x);
                key(w + pairs / 4, y);
                for (int j = 0; j < 4; ++j) turn(4 * w + j, x[j], y[j], 4 * w + j, 4 * w + j + pairs);
            }
            w = pairs / 2;
        }
        for (; w < side.channels / 4; ++w) {  // channels that are not rotated
            key(w, x);
            for (int j = 0; j < 4; ++j)
                for (int n = 0; n < N; ++n) first[n] = I::fma(x[j], splat<f32>(query[n][4 * w + j]), first[n]);
        }
        for (int n = 0; n < N; ++n) store(out[n] + part, first[n] + second[n]);
    }
}

}  // namespace
}  // namespace kvbits
