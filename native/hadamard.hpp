// Random Hadamard rotations of rows, bit for bit as numerics/hadamard.py: the same sums in the same order.
#pragma once

#include <cmath>

#include "unpack.hpp"

namespace kvbits {
namespace {

inline int64_t hadamard_width(int64_t channels) { return (channels + 15) / 16 * 16; }
inline int64_t hadamard_scratch(int64_t channels) { return 4 * (2 * 16 * hadamard_width(channels) + 16 * 16) + 64; }

// Rows [tokens][channels], `stride` bytes apart, times `signs` and the transform; 16 tokens at a time, one in each lane.
template <class I>
KVBITS_STAGE void hadamard_block(Type type, const uint8_t* data, int64_t stride, int64_t tokens, int64_t channels, const float* signs,
                                 float* out, uint8_t* scratch) {
    using f32 = typename I::f32;
    const int64_t width = hadamard_width(channels), block = channels & -channels;
    const f32 unit = splat<f32>(float(std::pow(double(block), -0.5)));
    float* rows = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
    float *lanes = rows + 16 * width, *tile = lanes + 16 * width;  // lanes [channel][token]
    std::memset(lanes, 0, size_t(64 * width));
    const auto each = [&](int64_t channel, auto f) {
        for (int part = 0; part < 16; part += I::W) f(lanes + 16 * channel + part);
    };
    for (int64_t first = 0; first < tokens; first += 16) {
        const int64_t here = tokens - first < 16 ? tokens - first : 16;
        for (int64_t t = 0; t < 16; ++t) {
            if (t < here) to_float<I>(type, data + (first + t) * stride, channels, rows + t * width);
            else std::memset(rows + t * width, 0, size_t(4 * channels));
        }
        I::transpose(reinterpret_cast<const uint8_t*>(rows), ptrdiff_t(4 * width), int(channels), reinterpret_cast<uint32_t*>(lanes));
        for (int64_t c = 0; c < channels; ++c) each(c, [&](float* at) { store(at, load<f32>(at) * signs[c]); });
        for (int64_t apart = 1; apart < block; apart *= 2)
            for (int64_t begin = 0; begin < channels; begin += 2 * apart)
                for (int64_t c = begin; c < begin + apart; ++c)
                    each(c, [&](float* at) {
                        const f32 a = load<f32>(at), b = load<f32>(at + 16 * apart);
                        store(at, a + b);
                        store(at + 16 * apart, a - b);
                    });
        for (int64_t c = 0; c < channels; ++c) each(c, [&](float* at) { store(at, load<f32>(at) * unit); });
        for (int64_t c = 0; c < channels; c += 16) {
            I::transpose(reinterpret_cast<const uint8_t*>(lanes + 16 * c), 64, 16, reinterpret_cast<uint32_t*>(tile));
            const int64_t count = channels - c < 16 ? channels - c : 16;
            for (int64_t t = 0; t < here; ++t) std::memcpy(out + (first + t) * channels + c, tile + 16 * t, size_t(4 * count));
        }
    }
}

}  // namespace
}  // namespace kvbits
