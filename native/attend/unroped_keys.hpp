// Scores of keys that are stored unroped, in numbers of sixteen bits, and of means that are. See rope.hpp.
#pragma once

#include "piece.hpp"

namespace kvbits {
namespace {

// The function that ropes tiles of such codes.
template <class I, Levels LEVELS> inline auto roped_tile_of(const Side& side, const Tiles& tiles) {
    const bool top = tiles.planes == 2;
    if (side.per == Per::token) return top ? roped_tile<I, LEVELS, true, true> : roped_tile<I, LEVELS, false, true>;
    return top ? roped_tile<I, LEVELS, true, false> : roped_tile<I, LEVELS, false, false>;
}

template <class I> inline void Piece<I>::short_scores(int first_row, int rows) {
    const Side& k = job.record.key;
    const bool per_token = k.per == Per::token;
    shorten_rows(first_row, rows);
    const auto roped = k.levels == Levels::e4m3 ? roped_tile<I, Levels::e4m3, false, false>
                      : k.levels == Levels::table ? roped_tile_of<I, Levels::table>(k, keys) : roped_tile_of<I, Levels::uniform>(k, keys);
    for (int tile = 0; tile < job.record.tokens / 16; ++tile) {
        roped(k, short_levels, keys, tile, *job.steps, factors(), s.short_keys);
        over_rows(rows, [&](auto n, int first) {
            constexpr int N = decltype(n)::value;
            const int16_t* query[N];
            const float* steps[N];
            float* out[N];
            for (int i = 0; i < N; ++i) {
                query[i] = s.short_query + int64_t(first + i) * s.key_width;
                steps[i] = s.step_k + int64_t(first + i) * (s.key_width / chunk + 1);
                out[i] = s.score + int64_t(first + i) * s.tokens + 16 * tile;
            }
            short_dots<I, N>(s.short_keys, k.channels, query, steps, out);
        });
    }
    for (int r = 0; r < rows && per_token; ++r) {
        float* score = s.score + int64_t(r) * s.tokens;
        for (int t = 0; t < job.record.tokens; t += I::W) store(score + t, load<f32>(score + t) * load<f32>(s.unit_k + t));
    }
}

template <class I> KVBITS_STAGE void Piece<I>::shorten_rows(int first_row, int rows) {
    const bool per_token = job.record.key.per == Per::token;
    const int in_pairs = 2 * job.pairs();
    for (int r = 0; r < rows; ++r) {
        const float* row = s.unroped + int64_t(first_row + r) * s.key_width;
        for (int c = 0; c < s.key_width; ++c) {
            const float unit = per_token || c >= job.record.key.channels ? 1.0f : s.unit_k[c];
            s.weights[c] = row[c] * unit * (c < in_pairs ? job.steps->norm : 1.0f);
        }
        shorten<I>(s.weights, s.key_width, s.short_query + int64_t(r) * s.key_width, s.step_k + int64_t(r) * (s.key_width / chunk + 1));
    }
}

template <class I> inline ShortFactors Piece<I>::factors() const {
    const Side& k = job.record.key;
    return {s.factor_k, s.offset_k, s.unit_k, k.per == Per::token ? 2 * job.record.tokens : s.key_width};
}

template <class I> inline void Piece<I>::mean_scores(int first_row, int rows) {
    const int pairs = job.pairs();
    over_rows(rows, [&](auto n, int first) {
        constexpr int N = decltype(n)::value;
        const float *a[N], *b[N];
        for (int i = 0; i < N; ++i) {
            a[i] = s.unroped_mean + int64_t(first_row + first + i) * 2 * pairs;
            b[i] = a[i] + pairs;
        }
        for (int t = 0; t < job.record.tokens; t += 16) {
            float* out[N];
            for (int i = 0; i < N; ++i) out[i] = s.score + int64_t(first + i) * s.tokens + t;
            mean_dots<I, N>(*job.steps, t / 16, a, b, out);
        }
    });
}

}  // namespace
}  // namespace kvbits
