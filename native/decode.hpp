// Decoding one block to rows of elements, bit for bit what the codecs' `decode` gives: (level - zero) * scale.
#pragma once

#include "unpack.hpp"

namespace kvbits {
namespace {

template <class I> inline int64_t decode_scratch(const Side& side, int tokens) {
    const int64_t across = tokens > padded(side.channels) ? tokens : padded(side.channels);
    return 4 * (3 * (int64_t(side.groups > 0 ? side.groups : 1) * across + 64) + 2 * padded(side.channels) + 64) + 64;
}

template <class I>
inline void decode_block(const Side& side, int tokens, const uint8_t* record, const float* fixed_scale,
                         const float* fixed_zero, Type type, uint8_t* out, int64_t stride, uint8_t* scratch) {
    using f32 = typename I::f32;
    using u32 = typename I::u32;
    const int64_t across = tokens > padded(side.channels) ? tokens : padded(side.channels);
    const int64_t room = int64_t(side.groups > 0 ? side.groups : 1) * across + 64;
    float *scale = reinterpret_cast<float*>(scratch), *zero = scale + room, *work = zero + room, *row = work + room;
    const uint8_t* codes = record + side.codes;
    if (side.levels == Levels::exact) {
        for (int t = 0; t < tokens; ++t) {
            to_float<I>(side.type, codes + int64_t(t) * side.channels * size_of(side.type), side.channels, row);
            from_float<I>(type, row, side.channels, out + t * stride);
        }
        return;
    }
    scales_and_zeros<I>(side, record, tokens, fixed_scale, fixed_zero, scale, zero, work);
    Plane planes[2];
    const int count = planes_of(side, tokens, planes);
    const int channels = side.channels, whole = channels / I::W * I::W;
    for (int t = 0; t < tokens; ++t) {
        const uint8_t* low = codes + int64_t(t % planes[0].rows) * channels;
        const int low_shift = t / planes[0].rows * planes[0].width;
        const uint8_t* high = count > 1 ? codes + planes[1].offset + int64_t(t % planes[1].rows) * channels : nullptr;
        const int high_shift = count > 1 ? t / planes[1].rows : 0;
        const uint32_t mask = (1u << planes[0].width) - 1;
        const bool per_token = side.per == Per::token;
        const int64_t at = per_token ? 0 : int64_t(side.fixed ? 0 : t / side.length) * channels;
        for (int c = 0; c < whole; c += I::W) {
            u32 code = __builtin_convertvector(load<typename I::u8>(low + c), u32) >> low_shift & mask;
            if (high) code |= (__builtin_convertvector(load<typename I::u8>(high + c), u32) >> high_shift & 1) << 2;
            f32 x;
            if (side.levels == Levels::e4m3) x = I::e4m3(code);
            else if (side.levels == Levels::table) x = I::lookup(code, side.table);
            else x = __builtin_convertvector(code, f32);
            if (!per_token) {
                if (side.zero) x -= load<f32>(zero + at + c);
                x *= load<f32>(scale + at + c);
            } else if (c / side.length == (c + I::W - 1) / side.length) {
                const int64_t group = int64_t(c / side.length) * tokens + t;
                if (side.zero) x -= zero[group];
                x *= scale[group];
            } else {
                for (int i = 0; i < I::W; ++i) {
                    const int64_t group = int64_t((c + i) / side.length) * tokens + t;
                    if (side.zero) x[i] -= zero[group];
                    x[i] *= scale[group];
                }
            }
            store(row + c, x);
        }
        for (int c = whole; c < channels; ++c) {
            const int code = (low[c] >> low_shift & int(mask)) | (high ? (high[c] >> high_shift & 1) << 2 : 0);
            float x = side.levels == Levels::e4m3 ? e4m3_to_float(uint8_t(code)) : side.table[code];
            const int64_t group = per_token ? int64_t(c / side.length) * tokens + t : at + c;
            if (side.zero) x -= zero[group];
            row[c] = x * scale[group];
        }
        if (side.outliers) {
            const auto* index = reinterpret_cast<const uint16_t*>(record + side.outlier_index);
            const auto* value = reinterpret_cast<const uint16_t*>(record + side.outlier_value);
            for (int e = 0; e < side.outliers; ++e)
                if (index[e] / channels == t) row[index[e] % channels] += bf16_to_float(value[e]);
        }
        from_float<I>(type, row, channels, out + t * stride);
    }
}

}  // namespace
}  // namespace kvbits
