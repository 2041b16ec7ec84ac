// Scores of a block: query rows times packed keys, lanes = tokens.
#pragma once

#include "../unpack.hpp"
#include "halves.hpp"

namespace kvbits {
namespace {

constexpr int most_rows = 4;  // query rows that share the codes in registers

// Integer dot products of N rows with tiles first_tile .. + count - 1, words `first .. last - 1` of each: out[n][token].
template <class I, int N, int PLANES, bool TABLE>
KVBITS_STAGE void integer_dots(const Tiles& tiles, int first_tile, int count, int first, int last, const uint8_t* const* high,
                         const uint8_t* const* low, const IntegerLevels& levels, float* const* out) {
    constexpr int M = N >= 3 ? 1 : N == 2 ? 2 : 4;  // vectors at a time: enough independent sums to hide latency
    constexpr int parts = 16 / I::W;
    const int vectors = count * parts;
    for (int v = 0; v < vectors; v += M) {
        const int here = vectors - v < M ? vectors - v : M;
        tiles.fetch(first_tile * parts + v, here, tiles.tiles * parts);
        IntegerSums<I, N, PLANES, TABLE, false> sums[M];
        Tile tile[M];
        for (int m = 0; m < M; ++m) {
            const int vector = v + (m < here ? m : 0);
            tile[m] = tiles[first_tile + vector / parts];
            tile[m].at += vector % parts * I::W;
            if constexpr (PLANES == 2) tile[m].at_top += vector % parts * I::W;
        }
        for (int d = first; d < last; ++d) {
            for (int m = 0; m < M; ++m)
                sums[m].add(codes_of<I, PLANES>(tile[m], 16 * d, tiles.mask), high, low, 4 * (d - first), levels);
        }
        for (int m = 0; m < here; ++m)
            for (int n = 0; n < N; ++n) store(out[n] + (v + m) * I::W, sums[m].value(n));
    }
}

// f<PLANES, TABLE>() for what the tiles and levels are.
template <class F> inline void over_codes(const Tiles& tiles, const IntegerLevels& levels, F&& f) {
    const auto planes = [&](auto table) {
        switch (tiles.planes) {
            case 0: return f(std::integral_constant<int, 0>{}, table);
            case 1: return f(std::integral_constant<int, 1>{}, table);
            default: return f(std::integral_constant<int, 2>{}, table);
        }
    };
    if (levels.table)
        planes(std::true_type{});
    else
        planes(std::false_type{});
}

template <class I, int N>
inline void integer_dots(const Tiles& tiles, int first_tile, int count, int first, int last, const uint8_t* const* high,
                         const uint8_t* const* low, const IntegerLevels& levels, float* const* out) {
    over_codes(tiles, levels, [&](auto planes, auto table) {
        integer_dots<I, N, decltype(planes)::value, decltype(table)::value>(tiles, first_tile, count, first, last, high, low, levels, out);
    });
}

// Float dot products of N rows with one tile of float keys [channel][16]: out[n][16].
template <class I, int N>
KVBITS_STAGE void float_dots(const float* keys, int channels, const float* const* query, float* const* out) {
    using f32 = typename I::f32;
    constexpr int C = N >= 3 ? 1 : N == 2 ? 2 : 4;
    for (int part = 0; part < 16; part += I::W) {
        f32 total[C][N] = {};
        for (int d = 0; d < channels; d += C)  // channels are a multiple of 8
            for (int c = 0; c < C; ++c) {
                const f32 k = load<f32>(keys + 16 * (d + c) + part);
                for (int n = 0; n < N; ++n) total[c][n] = I::fma(k, splat<f32>(query[n][d + c]), total[c][n]);
            }
        for (int n = 0; n < N; ++n) {
            f32 all = total[0][n];
            for (int c = 1; c < C; ++c) all += total[c][n];
            store(out[n] + part, all);
        }
    }
}

// Dot products of N rows with tile `tile` of e4m3 keys, whose scales are for later: out[n][16].
template <class I, int N>
KVBITS_STAGE void e4m3_dots(const Tiles& tiles, int tile, int channels, const float* const* query, float* const* out) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    tiles.fetch(tile, 1, tiles.tiles);
    const uint32_t* words = tiles[tile].at;
    for (int part = 0; part < 16; part += I::W) {
        f32 total[N] = {}, more[N] = {};  // two chains of sums each, to hide latency
        for (int d = 0; d < channels; d += 4) {
            f32 key[4];
            I::e4m3(load<u32>(words + 4 * d + part), key);
            for (int n = 0; n < N; ++n) {
                total[n] = I::fma(key[0], splat<f32>(query[n][d]), total[n]);
                more[n] = I::fma(key[1], splat<f32>(query[n][d + 1]), more[n]);
                total[n] = I::fma(key[2], splat<f32>(query[n][d + 2]), total[n]);
                more[n] = I::fma(key[3], splat<f32>(query[n][d + 3]), more[n]);
            }
        }
        for (int n = 0; n < N; ++n) store(out[n] + part, total[n] + more[n]);
    }
}

// Run f<N>(first) over rows in pieces of at most most_rows.
template <class F> inline void over_rows(int rows, F&& f) {
    int first = 0;
    for (; first + 4 <= rows; first += 4) f(std::integral_constant<int, 4>{}, first);
    switch (rows - first) {
        case 3: f(std::integral_constant<int, 3>{}, first); break;
        case 2: f(std::integral_constant<int, 2>{}, first); break;
        case 1: f(std::integral_constant<int, 1>{}, first); break;
        default: break;
    }
}

// Float keys [channel][16] of one tile of codes: levels, and with `apply` the scale and zero as well.
template <class I>
KVBITS_STAGE void float_keys(const Side& side, const Tiles& tiles, int tile, int tokens, bool apply, const float* scale,
                       const float* zero, float* out) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    const Tile here = tiles[tile];
    tiles.fetch(tile, 1, tiles.tiles);
    const int first_token = 16 * tile;
    const float* row_scale = scale + int64_t(side.fixed || side.per == Per::token ? 0 : first_token / side.length) * side.channels;
    const float* row_zero = zero + (row_scale - scale);
    for (int d = 0; d < side.channels; d += 4) {
        for (int part = 0; part < 16; part += I::W) {
            const int word = 4 * d + part;
            const u32 codes = tiles.planes == 0 ? codes_of<I, 0>(here, word, tiles.mask)
                            : tiles.planes == 1 ? codes_of<I, 1>(here, word, tiles.mask) : codes_of<I, 2>(here, word, tiles.mask);
            f32 x[4];
            if (side.levels == Levels::e4m3)
                I::e4m3(codes, x);
            else
                for (int j = 0; j < 4; ++j) {
                    const u32 code = codes >> uint32_t(8 * j) & 255;
                    x[j] = side.levels == Levels::table ? I::lookup(code, side.table) : __builtin_convertvector(code, f32);
                }
            for (int j = 0; j < 4; ++j) {
                if (apply && side.per == Per::token) {
                    const int64_t at = int64_t((d + j) / side.length) * tokens + first_token + part;
                    if (side.zero) x[j] -= load<f32>(zero + at);
                    x[j] *= load<f32>(scale + at);
                } else if (apply) {
                    if (side.zero) x[j] -= row_zero[d + j];
                    x[j] *= row_scale[d + j];
                }
                store(out + 16 * (d + j) + part, x[j]);
            }
        }
    }
}

}  // namespace
}  // namespace kvbits
