// Weighted sums of the values of a block, lanes = channels.
#pragma once

#include "scores.hpp"

namespace kvbits {
namespace {

// Integer sums over tiles `first .. last - 1` (4 tokens each) of N rows of weights, for M vectors of channels from
// word `word` on: f(m, n, sum) gets each.
template <class I, int N, int M, int PLANES, bool TABLE, class F>
KVBITS_STAGE void integer_sums(const Tiles& tiles, int first, int last, int word, const uint8_t* const* high, const uint8_t* const* low,
                         const IntegerLevels& levels, F&& f) {
    tiles.fetch(word / I::W, M, tiles.words / I::W);
    IntegerSums<I, N, PLANES, TABLE, true> sums[M];
    for (int t = first; t < last; ++t) {
        const Tile tile = tiles[t];
        for (int m = 0; m < M; ++m)
            sums[m].add(codes_of<I, PLANES>(tile, word + m * I::W, tiles.mask), high, low, 4 * (t - first), levels);
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) f(m, n, sums[m].value(n));
}

// The same for channels begin .. end - 1; f(channel, n, sum) gets W lanes from `channel` on, some perhaps outside.
template <class I, int N, class F>
inline void integer_sums(const Tiles& tiles, int first, int last, int begin, int end, const uint8_t* const* high,
                         const uint8_t* const* low, const IntegerLevels& levels, F&& f) {
    constexpr int M = N >= 3 ? 1 : N == 2 ? 2 : 4;
    over_codes(tiles, levels, [&](auto planes, auto table) {
        constexpr int P = decltype(planes)::value;
        constexpr bool T = decltype(table)::value;
        int word = begin / I::W * I::W;
        const auto put = [&](int m, int n, typename I::f32 sum) { f(word + m * I::W, n, sum); };
        for (; word + M * I::W <= tiles.words && word + (M - 1) * I::W < end; word += M * I::W)
            integer_sums<I, N, M, P, T>(tiles, first, last, word, high, low, levels, put);
        for (; word < end; word += I::W)
            integer_sums<I, N, 1, P, T>(tiles, first, last, word, high, low, levels, put);
    });
}

// total[n] += sum over tiles of e4m3 values, 4 tokens each, of weight[n][token] * value.
template <class I, int N>
KVBITS_STAGE void e4m3_sums(const Tiles& tiles, const float* const* weight, float* const* total) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    for (int c = 0; c < tiles.words; c += I::W) {
        tiles.fetch(c / I::W, 1, tiles.words / I::W);
        f32 sum[N], more[N] = {};  // two chains of sums each, to hide latency
        for (int n = 0; n < N; ++n) sum[n] = load<f32>(total[n] + c);
        for (int t = 0; t < tiles.tiles; ++t) {
            f32 value[4];
            I::e4m3(load<u32>(tiles.low + int64_t(t) * tiles.words + c), value);
            for (int n = 0; n < N; ++n) {
                sum[n] = I::fma(value[0], splat<f32>(weight[n][4 * t]), sum[n]);
                more[n] = I::fma(value[1], splat<f32>(weight[n][4 * t + 1]), more[n]);
                sum[n] = I::fma(value[2], splat<f32>(weight[n][4 * t + 2]), sum[n]);
                more[n] = I::fma(value[3], splat<f32>(weight[n][4 * t + 3]), more[n]);
            }
        }
        for (int n = 0; n < N; ++n) store(total[n] + c, sum[n] + more[n]);
    }
}

// total[n] += sum over `count` rows of weight[n][t] * row[t]; rows are `width` floats, a multiple of I::W.
template <class I, int N>
KVBITS_STAGE void float_sums(const float* rows, int count, int width, const float* const* weight, float* const* total) {
    using f32 = typename I::f32;
    constexpr int M = N >= 3 ? 2 : 4;
    int c = 0;
    const auto piece = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        f32 sum[V][N];
        for (int m = 0; m < V; ++m)
            for (int n = 0; n < N; ++n) sum[m][n] = load<f32>(total[n] + c + m * I::W);
        for (int t = 0; t < count; ++t)
            for (int m = 0; m < V; ++m) {
                const f32 v = load<f32>(rows + int64_t(t) * width + c + m * I::W);
                for (int n = 0; n < N; ++n) sum[m][n] = I::fma(v, splat<f32>(weight[n][t]), sum[m][n]);
            }
        for (int m = 0; m < V; ++m)
            for (int n = 0; n < N; ++n) store(total[n] + c + m * I::W, sum[m][n]);
    };
    for (; c + M * I::W <= width; c += M * I::W) piece(std::integral_constant<int, M>{});
    for (; c < width; c += I::W) piece(std::integral_constant<int, 1>{});
}

// Float rows of `count` exact tokens, `width` floats each, padded with zeros.
template <class I>
inline void float_rows(const Side& side, const uint8_t* rows, ptrdiff_t stride, int count, int width, float* out) {
    for (int t = 0; t < count; ++t) {
        float* to = out + int64_t(t) * width;
        for (int c = side.channels; c < width; ++c) to[c] = 0;
        to_float<I>(side.type, rows + t * stride, side.channels, to);
    }
}

}  // namespace
}  // namespace kvbits
