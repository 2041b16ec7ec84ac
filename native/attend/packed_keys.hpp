// Scores of query rows against the packed keys of a block.
#pragma once

#include "piece.hpp"

namespace kvbits {
namespace {

// The product of the last, incomplete vectors, of channels from c on.
template <class I> inline typename I::f32 Piece<I>::last(const float* x, const float* y, int c) const {
    f32 product{};
    for (int i = 0; c + i < job.record.key.channels && i < I::W; ++i) product[i] = x[c + i] * y[c + i];
    return product;
}

template <class I> inline void Piece<I>::packed_scores(const uint8_t* record, int first_row, int rows) {
    const Side& k = job.record.key;
    const int tokens = job.record.tokens;
    if (shorts)
        short_scores(first_row, rows);
    else if (float_path())
        float_scores(record, first_row, rows);
    else if (k.per == Per::token)
        scores_per_token(first_row, rows);
    else
        scores_per_channel(first_row, rows);
    if (k.outliers) sparse_scores(record, first_row, rows);
    if (job.key_mean && job.steps) mean_scores(first_row, rows);
    for (int r = 0; r < rows; ++r) {
        const float constant = s.mean[first_row + r];
        if (constant == 0) continue;
        float* score = s.score + int64_t(r) * s.tokens;
        for (int t = 0; t < tokens; ++t) score[t] += constant;
    }
}

template <class I> KVBITS_STAGE void Piece<I>::scores_per_token(int first_row, int rows) {
    const Side& k = job.record.key;
    const int tokens = job.record.tokens, tiles = padded(tokens) / 16, width = Scratch::halves_width(k);
    over_rows(rows, [&](auto n, int first) {
        constexpr int N = decltype(n)::value;
        for (int g = 0; g < k.groups; ++g) {
            const ChannelGroup here = channels_of(k, g);
            const uint8_t *high[N], *low[N];
            float* out[N];
            for (int i = 0; i < N; ++i) {
                const int64_t at = int64_t(first_row + first + i) * width + int64_t(g) * padded(k.length + 8, 64);
                high[i] = s.query_high + at;
                low[i] = s.query_low + at;
                out[i] = s.dots + int64_t(i) * s.tokens;
            }
            integer_dots<I, N>(keys, 0, tiles, here.first, here.last, high, low, key_levels, out);
            const float *scale = s.scale_k + int64_t(g) * tokens, *zero = s.zero_k + int64_t(g) * tokens;
            for (int i = 0; i < N; ++i) {
                const Halves& x = s.halves[(first_row + first + i) * k.groups + g];
                const f32 factor = splat<f32>(key_levels.scale(x)), offset = splat<f32>(key_levels.offset(x));
                float* score = s.score + int64_t(first + i) * s.tokens;
                for (int t = 0; t < tokens; t += I::W) {
                    f32 value = I::fma(load<f32>(out[i] + t), factor, offset);
                    if (k.zero) value = I::fma(load<f32>(zero + t), splat<f32>(-x.total), value);
                    value *= load<f32>(scale + t);
                    store(score + t, g ? load<f32>(score + t) + value : value);
                }
            }
        }
    });
}

template <class I> KVBITS_STAGE void Piece<I>::scores_per_channel(int first_row, int rows) {
    const Side& k = job.record.key;
    const int tokens = job.record.tokens;
    const int length = k.fixed ? padded(tokens) : k.length, count = k.fixed ? 1 : k.groups;
    const int width = Scratch::halves_width(k);
    over_rows(rows, [&](auto n, int first) {
        constexpr int N = decltype(n)::value;
        for (int g = 0; g < count; ++g) {
            const uint8_t *high[N], *low[N];
            float *out[N], constant[N];
            Halves made[N];
            for (int i = 0; i < N; ++i) {
                const int row = first_row + first + i;
                constant[i] = 0;
                out[i] = s.score + int64_t(first + i) * s.tokens + g * length;
                if (k.fixed) {
                    made[i] = s.halves[row];
                    high[i] = s.query_high + int64_t(row) * width;
                    low[i] = s.query_low + int64_t(row) * width;
                    continue;
                }
                const float *scale = s.scale_k + int64_t(g) * k.channels, *zero = s.zero_k + int64_t(g) * k.channels;
                const float* query = packed + int64_t(row) * s.key_width;
                f32 sum_of_zeros{};
                for (int c = 0; c < s.key_width; c += I::W) {
                    const f32 x = c + I::W <= k.channels ? load<f32>(query + c) * load<f32>(scale + c) : last(query, scale, c);
                    store(s.weights + c, x);
                    if (k.zero) sum_of_zeros += c + I::W <= k.channels ? x * load<f32>(zero + c) : last(s.weights, zero, c);
                }
                constant[i] = -sum(sum_of_zeros);
                uint8_t *to_high = s.high + i * (s.key_width + 64), *to_low = s.low + i * (s.key_width + 64);
                made[i] = halve<I>(s.weights, s.key_width, to_high, to_low);
                high[i] = to_high;
                low[i] = to_low;
            }
            integer_dots<I, N>(keys, g * (length / 16), length / 16, 0, k.channels / 4, high, low, key_levels, out);
            for (int i = 0; i < N; ++i) {
                const f32 factor = splat<f32>(key_levels.scale(made[i]));
                const f32 offset = splat<f32>(key_levels.offset(made[i]) + constant[i]);
                for (int t = 0; t < length; t += I::W) store(out[i] + t, I::fma(load<f32>(out[i] + t), factor, offset));
            }
        }
    });
}

template <class I> inline void Piece<I>::float_scores(const uint8_t* record, int first_row, int rows) {
    const Side& k = job.record.key;
    const int tokens = job.record.tokens;
    const float* query = job.unroped ? s.unroped : packed;
    const bool apply = job.unroped || k.per == Per::channel;
    for (int t = 0; t < tokens; t += 16) {
        const int here = tokens - t < 16 ? tokens - t : 16;
        if (k.levels == Levels::e4m3 && !apply) {
            over_tile(query, first_row, rows, t, [&](auto n, const float* const* q, float* const* out) {
                e4m3_dots<I, decltype(n)::value>(keys, t / 16, k.channels, q, out);
            });
            continue;
        }
        if (k.levels == Levels::exact)
            exact_keys(record + k.codes + int64_t(t) * k.channels * size_of(k.type), k.channels * size_of(k.type), here);
        else
            float_keys<I>(k, keys, t / 16, tokens, apply, s.scale_k, s.zero_k, s.keys);
        if (job.unroped) rope_keys<I>(s.keys, *job.steps, t / 16);
        dot_float_keys(query, first_row, rows, t);
    }
    if (apply || k.levels == Levels::exact) return;
    for (int r = 0; r < rows; ++r)
        for (int t = 0; t < tokens; ++t) s.score[int64_t(r) * s.tokens + t] *= s.scale_k[k.per == Per::token ? t : 0];
}

}  // namespace
}  // namespace kvbits
