// The portable version: no intrinsics at all. Slow, and what the C++ tests hold the others against.
#include "../vec.hpp"

namespace kvbits {
namespace {

struct Scalar : Lanes<4> {
    static constexpr int W = 4;
    static constexpr const char* name = "scalar";
    static constexpr bool fused = false;  // whether fma() rounds once
    static bool supported() { return true; }

    static f32 fma(f32 a, f32 b, f32 c) { return a * b + c; }

    static i32 round(f32 x) {
        i32 n;
        for (int i = 0; i < W; ++i) n[i] = int32_t(__builtin_rintf(x[i]));
        return n;
    }

    // acc + the sum of four products of unsigned and signed bytes in each lane; Full: codes above 15 occur.
    template <bool Full> static i32 dot(i32 acc, i32 codes, i32 weights) {
        for (int j = 0; j < 32; j += 8) acc += (codes >> j & 255) * (weights << (24 - j) >> 24);
        return acc;
    }

    // acc + the sum of two products of 16-bit numbers in each lane.
    static i32 dot(i32 acc, wide_i16 a, wide_i16 b) {
        for (int i = 0; i < W; ++i) acc[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
        return acc;
    }

    // a * b / 2^15, rounded.
    static wide_i16 scaled(wide_i16 a, wide_i16 b) {
        for (int i = 0; i < 2 * W; ++i) a[i] = int16_t((a[i] * b[i] + (1 << 14)) >> 15);
        return a;
    }

    // table[code] for each byte of codes below 16.
    static u32 lookup(u32 codes, const uint8_t* table) {
        uint8_t byte[4 * W];
        std::memcpy(byte, &codes, sizeof byte);
        for (auto& b : byte) b = table[b];
        return load<u32>(byte);
    }

    // table[index] for indices below 16.
    static f32 lookup(u32 index, const float* table) {
        f32 x;
        for (int i = 0; i < W; ++i) x[i] = table[index[i]];
        return x;
    }

    static f32 from_f16(u16 half) {
        f32 x;
        for (int i = 0; i < W; ++i) x[i] = half_to_float(half[i]);
        return x;
    }

    static void store_f16(uint16_t* at, f32 x) {
        for (int i = 0; i < W; ++i) at[i] = float_to_half(x[i]);
    }

    // e4m3 bytes in the low byte of each lane.
    static f32 e4m3(u32 byte) {
        f32 x;
        for (int i = 0; i < W; ++i) x[i] = e4m3_to_float(uint8_t(byte[i]));
        return x;
    }

    // out[16 * d + t] = the d-th word of row t, for 16 rows of `words` words that lie `stride` bytes apart.
    // The four bytes of each lane, e4m3, as four vectors.
    static void e4m3(u32 bytes, f32* out) {
        for (int j = 0; j < 4; ++j) out[j] = e4m3(bytes >> (8 * j) & 255);
    }

    static void transpose(const uint8_t* rows, ptrdiff_t stride, int words, uint32_t* out) {
        for (int t = 0; t < 16; ++t)
            for (int d = 0; d < words; ++d) std::memcpy(out + 16 * d + t, rows + t * stride + 4 * d, 4);
    }

    // Word c of out holds byte c of the four rows; `channels` is a multiple of 8.
    static void interleave(const uint8_t* rows, ptrdiff_t stride, int channels, uint32_t* out) {
        for (int c = 0; c < channels; ++c) {
            const uint8_t four[4] = {rows[c], rows[stride + c], rows[2 * stride + c], rows[3 * stride + c]};
            std::memcpy(out + c, four, 4);
        }
    }
};

using Isa = Scalar;

}  // namespace
}  // namespace kvbits

#define KVBITS_EXPORT scalar_kernels
#include "../kernels.inl"
