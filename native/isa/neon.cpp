// NEON with the dot product extension (Armv8.2: Apple M1, Graviton 2, Cortex-A75 on).
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "../vec.hpp"

namespace kvbits {
namespace {

struct Neon : Lanes<4> {
    static constexpr int W = 4;
    static constexpr const char* name = "neon";
    static constexpr bool fused = true;

    static bool supported() {
#if defined(__linux__)
        return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
        return true;  // every Apple processor that runs macOS on Arm
#endif
    }

    static f32 fma(f32 a, f32 b, f32 c) { return (f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
    static i32 round(f32 x) { return (i32)vcvtnq_s32_f32((float32x4_t)x); }

    // Both factors are signed here: codes above 127 are halved, and the last bit is added apart.
    template <bool Full> static i32 dot(i32 acc, i32 codes, i32 weights) {
        const uint8x16_t c = vreinterpretq_u8_s32((int32x4_t)codes);
        const int8x16_t w = vreinterpretq_s8_s32((int32x4_t)weights);
        if constexpr (!Full) return (i32)vdotq_s32((int32x4_t)acc, vreinterpretq_s8_u8(c), w);
        const int32x4_t halves = vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(vshrq_n_u8(c, 1)), w);
        const int32x4_t last = vdotq_s32((int32x4_t)acc, vreinterpretq_s8_u8(vandq_u8(c, vdupq_n_u8(1))), w);
        return (i32)vaddq_s32(last, vshlq_n_s32(halves, 1));
    }

    static i32 dot(i32 acc, wide_i16 a, wide_i16 b) {
        const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
        return acc + (i32)vpaddq_s32(low, high);
    }
    static wide_i16 scaled(wide_i16 a, wide_i16 b) {
        return (wide_i16)vqrdmulhq_s16((int16x8_t)a, (int16x8_t)b);
    }

    static u32 lookup(u32 codes, const uint8_t* table) {
        return (u32)vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_u32((uint32x4_t)codes)));
    }

    static f32 lookup(u32 index, const float* table) {
        f32 x;
        for (int i = 0; i < W; ++i) x[i] = table[index[i]];
        return x;
    }

    static f32 from_f16(u16 half) { return (f32)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)half)); }
    static void store_f16(uint16_t* at, f32 x) {
        vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
    }

    static f32 e4m3(u32 byte) {  // through the bits of a half
        const uint32x4_t b = (uint32x4_t)byte;
        const uint32x4_t half = vorrq_u32(vshlq_n_u32(vandq_u32(b, vdupq_n_u32(0x7F)), 7),
                                          vshlq_n_u32(vandq_u32(b, vdupq_n_u32(0x80)), 8));
        return (f32)vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(half))), 256.0f);
    }

    // The four bytes of each lane, e4m3, as four vectors.
    static void e4m3(u32 bytes, f32* out) {
        for (int j = 0; j < 4; ++j) out[j] = e4m3(bytes >> (8 * j) & 255);
    }

    static void transpose(const uint8_t* rows, ptrdiff_t stride, int words, uint32_t* out) {
        for (int quarter = 0; quarter < 16; quarter += 4) {
            int d = 0;
            for (; d + 4 <= words; d += 4) {
                auto row = [&](int t) { return vreinterpretq_u32_u8(vld1q_u8(rows + (quarter + t) * stride + 4 * d)); };
                const uint32x4x2_t a = vtrnq_u32(row(0), row(1)), b = vtrnq_u32(row(2), row(3));
                auto put = [&](int k, uint32x2_t low, uint32x2_t high) {
                    vst1q_u32(out + 16 * (d + k) + quarter, vcombine_u32(low, high));
                };
                put(0, vget_low_u32(a.val[0]), vget_low_u32(b.val[0]));
                put(1, vget_low_u32(a.val[1]), vget_low_u32(b.val[1]));
                put(2, vget_high_u32(a.val[0]), vget_high_u32(b.val[0]));
                put(3, vget_high_u32(a.val[1]), vget_high_u32(b.val[1]));
            }
            for (; d < words; ++d)
                for (int t = 0; t < 4; ++t)
                    std::memcpy(out + 16 * d + quarter + t, rows + (quarter + t) * stride + 4 * d, 4);
        }
    }

    static void interleave(const uint8_t* rows, ptrdiff_t stride, int channels, uint32_t* out) {
        for (int c = 0; c < channels; c += 8) {
            const uint8x8x4_t four = {{vld1_u8(rows + c), vld1_u8(rows + stride + c), vld1_u8(rows + 2 * stride + c),
                                       vld1_u8(rows + 3 * stride + c)}};
            vst4_u8(reinterpret_cast<uint8_t*>(out + c), four);
        }
    }
};

using Isa = Neon;

}  // namespace
}  // namespace kvbits

#define KVBITS_EXPORT neon_kernels
#include "../kernels.inl"
