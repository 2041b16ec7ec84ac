// Weights times the packed values of a block.
#pragma once

#include "piece.hpp"
#include "values.hpp"

namespace kvbits {
namespace {

template <class I> inline void Piece<I>::packed_values(const uint8_t* record, Partial& partial, int first_row, int rows) {
    const Side& v = job.record.value;
    if (v.outliers) sparse_values(record, rows, partial, first_row);
    if (v.levels == Levels::e4m3) return e4m3_values(partial, first_row, rows);
    if (v.levels == Levels::exact) return float_values(record, partial, first_row, rows);
    over_rows(rows, [&](auto n, int first) {
        if (v.per == Per::token)
            values_per_token<decltype(n)::value>(partial, first_row, first);
        else
            values_per_channel<decltype(n)::value>(partial, first_row, first);
    });
}

template <class I> inline void Piece<I>::e4m3_values(Partial& partial, int first_row, int rows) {
    const bool per_token = job.record.value.per == Per::token;
    const int tokens = job.record.tokens;
    for (int r = 0; r < rows; ++r) {
        float* weight = s.score + int64_t(r) * s.tokens;
        for (int t = 0; t < tokens; ++t) weight[t] *= s.scale_v[per_token ? t : 0];
        for (int t = tokens; t < padded(tokens); ++t) weight[t] = 0;
    }
    over_rows(rows, [&](auto n, int first) {
        constexpr int N = decltype(n)::value;
        const float* weight[N];
        float* total[N];
        for (int i = 0; i < N; ++i) {
            weight[i] = s.score + int64_t(first + i) * s.tokens;
            total[i] = partial.total(first_row + first + i);
        }
        e4m3_sums<I, N>(values, weight, total);
    });
}

template <class I> inline void Piece<I>::float_values(const uint8_t* record, Partial& partial, int first_row, int rows) {
    const Side& v = job.record.value;
    const ptrdiff_t stride = ptrdiff_t(v.channels) * size_of(v.type);
    for (int t = 0; t < job.record.tokens; t += 16) {
        const int here = job.record.tokens - t < 16 ? job.record.tokens - t : 16;
        float_rows<I>(v, record + v.codes + t * stride, stride, here, s.value_width, s.rows);
        add_float_values(partial, first_row, rows, t, here);
    }
}

// x with zeros from token `tokens` on; its own first is token t.
template <class f32> inline f32 live(f32 x, int t, int tokens) {
    constexpr int W = int(sizeof(f32) / sizeof(float));
    for (int j = tokens - t < 0 ? 0 : tokens - t; j < W; ++j) x[j] = 0;
    return x;
}

template <class I>
template <int N>
KVBITS_STAGE void Piece<I>::values_per_token(Partial& partial, int first_row, int first) {
    const Side& v = job.record.value;
    const int tokens = job.record.tokens, whole = padded(tokens);
    for (int g = 0; g < v.groups; ++g) {
        const ChannelGroup here = channels_of(v, g);
        const float *scale = s.scale_v + int64_t(g) * tokens, *zero = s.zero_v + int64_t(g) * tokens;
        f32 peak{};
        for (int t = 0; t < tokens; t += I::W) {
            const f32 x = live(load<f32>(scale + t), t, tokens);
            peak = maximum<f32>(peak, maximum<f32>(x, -x));
        }
        const float largest_scale = largest(peak);
        const uint8_t *high[N], *low[N];
        f32 factor[N], offset[N];
        float* total[N];
        for (int i = 0; i < N; ++i) {
            const float* p = s.score + int64_t(first + i) * s.tokens;
            uint8_t *to_high = s.high + i * (whole + 64), *to_low = s.low + i * (whole + 64);
            Halver<I> halver(peak_weight[first + i] * largest_scale);
            f32 zeros{};
            for (int t = 0; t < whole; t += I::W) {
                const f32 w = live(load<f32>(p + t) * load<f32>(scale + t), t, tokens);
                if (v.zero) zeros = I::fma(w, live(load<f32>(zero + t), t, tokens), zeros);
                halver.put(w, to_high + t, to_low + t);
            }
            const Halves made = halver.made();
            high[i] = to_high;
            low[i] = to_low;
            factor[i] = splat<f32>(value_levels.scale(made));
            offset[i] = splat<f32>(value_levels.offset(made) - sum(zeros));
            total[i] = partial.total(first_row + first + i);
        }
        integer_sums<I, N>(values, 0, values.tiles, here.begin, here.end, high, low, value_levels, [&](int c, int n, f32 dots) {
                               f32 more = I::fma(dots, factor[n], offset[n]);
                               if (c < here.begin || c + I::W > here.end)
                                   for (int j = 0; j < I::W; ++j)
                                       if (c + j < here.begin || c + j >= here.end) more[j] = 0;
                               store(total[n] + c, load<f32>(total[n] + c) + more);
                           });
    }
}

template <class I>
template <int N>
KVBITS_STAGE void Piece<I>::values_per_channel(Partial& partial, int first_row, int first) {
    const Side& v = job.record.value;
    const int tokens = job.record.tokens, whole = padded(tokens);
    const int length = v.fixed ? whole : v.length, count = v.fixed ? 1 : v.groups;
    for (int g = 0; g < count; ++g) {
        const float *scale = s.scale_v + int64_t(g) * v.channels, *zero = s.zero_v + int64_t(g) * v.channels;
        const uint8_t *high[N], *low[N];
        float factor[N], offset[N], weight[N];
        float* total[N];
        for (int i = 0; i < N; ++i) {
            const float* p = s.score + int64_t(first + i) * s.tokens + g * length;
            uint8_t *to_high = s.high + i * (whole + 64), *to_low = s.low + i * (whole + 64);
            const Halves made = halve<I>(p, length, to_high, to_low);
            high[i] = to_high;
            low[i] = to_low;
            factor[i] = value_levels.scale(made);
            offset[i] = value_levels.offset(made);
            weight[i] = made.total;
            total[i] = partial.total(first_row + first + i);
        }
        integer_sums<I, N>(values, g * (length / 4), v.fixed ? values.tiles : (g + 1) * (length / 4), 0, v.channels, high, low,
                           value_levels, [&](int c, int n, f32 dots) {
                               f32 level = I::fma(dots, splat<f32>(factor[n]), splat<f32>(offset[n]));
                               if (v.zero) level = I::fma(load<f32>(zero + c), splat<f32>(-weight[n]), level);
                               f32 more = level * load<f32>(scale + c);
                               if (c + I::W > v.channels)
                                   for (int j = 0; j < I::W; ++j)
                                       if (c + j >= v.channels) more[j] = 0;
                               store(total[n] + c, load<f32>(total[n] + c) + more);
                           });
    }
}

}  // namespace
}  // namespace kvbits
