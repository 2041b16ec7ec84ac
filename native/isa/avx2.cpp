// AVX2 with FMA and F16C: Haswell and Zen on.
#include <immintrin.h>

#include "../vec.hpp"

namespace kvbits {
namespace {

struct Avx2 : Lanes<8> {
    static constexpr int W = 8;
    static constexpr const char* name = "avx2";
    static constexpr bool fused = true;

    static bool supported() {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // all that have both have F16C
    }

    static f32 fma(f32 a, f32 b, f32 c) { return _mm256_fmadd_ps(a, b, c); }
    static i32 round(f32 x) { return (i32)_mm256_cvtps_epi32(x); }

    // The sum of two products of bytes saturates at 16 bits, which codes above 15 times 128 can reach: those go
    // through 16-bit products instead.
    template <bool Full> static i32 dot(i32 acc, i32 codes, i32 weights) {
        const __m256i c = (__m256i)codes, w = (__m256i)weights;
        if constexpr (!Full) {
            const __m256i pairs = _mm256_maddubs_epi16(c, w);
            return acc + (i32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        } else {
            const __m256i even = _mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)),
                                                   _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
            const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(c, 8), _mm256_srai_epi16(w, 8));
            return acc + (i32)_mm256_add_epi32(even, odd);
        }
    }

    static i32 dot(i32 acc, wide_i16 a, wide_i16 b) { return acc + (i32)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
    static wide_i16 scaled(wide_i16 a, wide_i16 b) { return (wide_i16)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b); }

    static u32 lookup(u32 codes, const uint8_t* table) {
        const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        return (u32)_mm256_shuffle_epi8(entries, (__m256i)codes);
    }

    static f32 lookup(u32 index, const float* table) {
        const __m256i i = (__m256i)index;
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), i);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }

    static f32 from_f16(u16 half) { return _mm256_cvtph_ps((__m128i)half); }
    static void store_f16(uint16_t* at, f32 x) {
        _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    static f32 e4m3(u32 byte) {  // through the bits of a half
        const u32 half = (byte & 0x7F) << 7 | (byte & 0x80) << 8;
        const __m256i words = (__m256i)half;
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        return _mm256_cvtph_ps(packed) * 256.0f;
    }

    // The four bytes of each lane, e4m3, as four vectors.
    static void e4m3(u32 bytes, f32* out) {
        for (int j = 0; j < 4; ++j) out[j] = e4m3(bytes >> (8 * j) & 255);
    }

    static void transpose(const uint8_t* rows, ptrdiff_t stride, int words, uint32_t* out) {
        for (int half = 0; half < 16; half += 8)
            for (int d = 0; d < words; d += 8) {
                const int here = words - d < 8 ? words - d : 8;
                const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(here), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
                __m256i a[8], b[8];
                for (int t = 0; t < 8; ++t)
                    a[t] = _mm256_maskload_epi32((const int*)(rows + (half + t) * stride + 4 * d), mask);
                for (int t = 0; t < 8; t += 2) {
                    b[t] = _mm256_unpacklo_epi32(a[t], a[t + 1]);
                    b[t + 1] = _mm256_unpackhi_epi32(a[t], a[t + 1]);
                }
                for (int t = 0; t < 8; t += 4) {
                    a[t] = _mm256_unpacklo_epi64(b[t], b[t + 2]);
                    a[t + 1] = _mm256_unpackhi_epi64(b[t], b[t + 2]);
                    a[t + 2] = _mm256_unpacklo_epi64(b[t + 1], b[t + 3]);
                    a[t + 3] = _mm256_unpackhi_epi64(b[t + 1], b[t + 3]);
                }
                for (int k = 0; k < 4; ++k) {
                    b[k] = _mm256_permute2x128_si256(a[k], a[4 + k], 0x20);
                    b[4 + k] = _mm256_permute2x128_si256(a[k], a[4 + k], 0x31);
                }
                for (int t = 0; t < here; ++t) _mm256_storeu_si256((__m256i*)(out + 16 * (d + t) + half), b[t]);
            }
    }

    static void interleave(const uint8_t* rows, ptrdiff_t stride, int channels, uint32_t* out) {
        for (int c = 0; c < channels; c += 8) {
            auto row = [&](int t) { return _mm_loadl_epi64((const __m128i*)(rows + t * stride + c)); };
            const __m128i low = _mm_unpacklo_epi8(row(0), row(1)), high = _mm_unpacklo_epi8(row(2), row(3));
            _mm_storeu_si128((__m128i*)(out + c), _mm_unpacklo_epi16(low, high));
            _mm_storeu_si128((__m128i*)(out + c + 4), _mm_unpackhi_epi16(low, high));
        }
    }
};

using Isa = Avx2;

}  // namespace
}  // namespace kvbits

#define KVBITS_EXPORT avx2_kernels
#include "../kernels.inl"
