// Codes packed along tokens: see numerics/bitpack.py.
#pragma once

#include "../encoder.hpp"
#include "../vec.hpp"

namespace kvbits {
namespace {

// The codes of a block, a byte each, in rows `stride` bytes apart.
struct Codes {
    const uint8_t* at;
    int64_t stride, tokens, channels;
    int bits;
};

// Codes `next` bytes apart, slices of a word's bytes. They are small, so shifts of whole words move no bit into the
// byte beside.
template <class V, int Bits, int Low> inline V slices(const Codes& codes, const uint8_t* from, int64_t next) {
    V byte{};
    for (int s = 0; s < 8 / Bits; ++s) {
        V code = load<V>(from + s * next);
        if (codes.bits == 3) code = code >> Low & V(V{} + ((1 << Bits) - 1) * 0x01010101u);
        byte |= code << (s * Bits);
    }
    return byte;
}

// One plane: bits `Low` .. `Low` + `Bits` - 1 of every code, in tokens * Bits / 8 rows. Returns where the next begins.
template <class I, int Bits, int Low> inline uint8_t* plane(const Codes& codes, uint8_t* out) {
    constexpr int64_t width = 4 * I::W;
    const int64_t rows = codes.tokens * Bits / 8, channels = codes.channels, next = rows * codes.stride;
    for (int64_t r = 0; r < rows; ++r, out += channels) {
        const uint8_t* from = codes.at + r * codes.stride;
        if (channels < width) {
            for (int64_t c = 0; c < channels; ++c) {
                int byte = 0;
                for (int s = 0; s < 8 / Bits; ++s) byte |= (from[s * next + c] >> Low & ((1 << Bits) - 1)) << (s * Bits);
                out[c] = uint8_t(byte);
            }
            continue;
        }
        for (int64_t c = 0; c < channels; c += width) {
            const int64_t at = c < channels - width ? c : channels - width;
            store(out + at, slices<typename I::u32, Bits, Low>(codes, from + at, next));
        }
    }
    return out;
}

template <class I> KVBITS_STAGE void pack(const Codes& codes, uint8_t* out) {
    if (codes.bits == 8) {
        for (int64_t t = 0; t < codes.tokens && codes.at != out; ++t)
            std::memcpy(out + t * codes.channels, codes.at + t * codes.stride, size_t(codes.channels));
    } else if (codes.bits == 4) {
        plane<I, 4, 0>(codes, out);
    } else {
        uint8_t* rest = plane<I, 2, 0>(codes, out);
        if (codes.bits == 3) plane<I, 1, 2>(codes, rest);
    }
}

}  // namespace
}  // namespace kvbits
