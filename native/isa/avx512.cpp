// AVX-512 with VNNI and VBMI: Ice Lake and Zen 4 on.
#include <immintrin.h>

#include "../vec.hpp"

namespace kvbits {
namespace {

// Made by the compiler: code that runs when the library is loaded must not need these instructions.
struct E4m3Tables {
    alignas(64) uint8_t low[128], high[128], first[64], second[64];

    constexpr E4m3Tables() : low(), high(), first(), second() {
        for (int code = 0; code < 128; ++code) {  // the bfloat16 of each value
            int exponent = code >> 3, mantissa = code & 7;
            if (exponent == 0 && mantissa) {
                for (exponent = 1; mantissa < 8; mantissa *= 2) --exponent;
                mantissa &= 7;
            }
            const int word = code ? (exponent + 120) << 7 | mantissa << 4 : 0;
            low[code] = uint8_t(word & 255);
            high[code] = uint8_t(word >> 8);
        }
        for (int lane = 0; lane < 16; ++lane)  // the bytes of two bfloat16 in each lane, from low and high alternately
            for (int i = 0; i < 4; ++i) {
                first[4 * lane + i] = uint8_t(4 * lane + i / 2 + (i % 2 ? 64 : 0));
                second[4 * lane + i] = uint8_t(4 * lane + 2 + i / 2 + (i % 2 ? 64 : 0));
            }
    }
};
constexpr E4m3Tables e4m3_tables;

struct Avx512 : Lanes<16> {
    static constexpr int W = 16;
    static constexpr const char* name = "avx512";
    static constexpr bool fused = true;

    static bool supported() {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    }

    static f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
    static i32 round(f32 x) { return (i32)_mm512_cvtps_epi32(x); }

    template <bool Full> static i32 dot(i32 acc, i32 codes, i32 weights) {
        return (i32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)weights);
    }

    static i32 dot(i32 acc, wide_i16 a, wide_i16 b) { return (i32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
    static wide_i16 scaled(wide_i16 a, wide_i16 b) { return (wide_i16)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b); }

    static u32 lookup(u32 codes, const uint8_t* table) {
        const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
        return (u32)_mm512_shuffle_epi8(entries, (__m512i)codes);
    }

    static f32 lookup(u32 index, const float* table) {
        return _mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
    }

    static f32 from_f16(u16 half) { return _mm512_cvtph_ps((__m256i)half); }
    static void store_f16(uint16_t* at, f32 x) {
        _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    // Through the bits of a half, whose exponent is 8 further down: sign and seven bits move up, and 2^8 makes it good.
    static f32 e4m3(u32 byte) {
        const __m512i word = (__m512i)byte;
        const __m512i half = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(word, _mm512_set1_epi32(0x7F)), 7),
                                             _mm512_slli_epi32(_mm512_and_si512(word, _mm512_set1_epi32(0x80)), 8));
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)) * 256.0f;
    }

    // The four bytes of each lane, as four vectors. A bfloat16 holds every e4m3 value: both its bytes come out of
    // tables of 128 entries, and its place in a float32 is the upper half.
    static void e4m3(u32 bytes, f32* out) {
        const __m512i code = (__m512i)bytes;
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_tables.low), code, _mm512_load_si512(e4m3_tables.low + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_tables.high), code, _mm512_load_si512(e4m3_tables.high + 64));
        high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(char(0x80)), 0xF8);  // high | (code & sign)
        const __m512i first = _mm512_permutex2var_epi8(low, _mm512_load_si512(e4m3_tables.first), high);
        const __m512i second = _mm512_permutex2var_epi8(low, _mm512_load_si512(e4m3_tables.second), high);
        const __m512i upper = _mm512_set1_epi32(int(0xFFFF0000));
        out[0] = (f32)_mm512_slli_epi32(first, 16);
        out[1] = (f32)_mm512_and_si512(first, upper);
        out[2] = (f32)_mm512_slli_epi32(second, 16);
        out[3] = (f32)_mm512_and_si512(second, upper);
    }

    static void transpose(const uint8_t* rows, ptrdiff_t stride, int words, uint32_t* out) {
        for (int d = 0; d < words; d += 16) {
            const int here = words - d < 16 ? words - d : 16;
            const __mmask16 mask = __mmask16((1u << here) - 1);
            __m512i a[16], b[16];
            for (int t = 0; t < 16; ++t) a[t] = _mm512_maskz_loadu_epi32(mask, rows + t * stride + 4 * d);
            for (int t = 0; t < 16; t += 2) {
                b[t] = _mm512_unpacklo_epi32(a[t], a[t + 1]);
                b[t + 1] = _mm512_unpackhi_epi32(a[t], a[t + 1]);
            }
            for (int t = 0; t < 16; t += 4) {
                a[t] = _mm512_unpacklo_epi64(b[t], b[t + 2]);
                a[t + 1] = _mm512_unpackhi_epi64(b[t], b[t + 2]);
                a[t + 2] = _mm512_unpacklo_epi64(b[t + 1], b[t + 3]);
                a[t + 3] = _mm512_unpackhi_epi64(b[t + 1], b[t + 3]);
            }
            // Now lane L of a[4 i + k] holds word 4 L + k of rows 4 i .. 4 i + 3: transpose the lanes.
            for (int k = 0; k < 4; ++k) {
                const __m512i low01 = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x44), high01 = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xEE);
                const __m512i low23 = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x44), high23 = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xEE);
                b[k] = _mm512_shuffle_i32x4(low01, low23, 0x88);
                b[4 + k] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
                b[8 + k] = _mm512_shuffle_i32x4(high01, high23, 0x88);
                b[12 + k] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
            }
            for (int t = 0; t < here; ++t) _mm512_storeu_si512(out + 16 * (d + t), b[t]);
        }
    }

    static void interleave(const uint8_t* rows, ptrdiff_t stride, int channels, uint32_t* out) {
        alignas(64) static constexpr uint8_t order[64] = {
            0, 16, 32, 48, 1, 17, 33, 49, 2, 18, 34, 50, 3, 19, 35, 51, 4, 20, 36, 52, 5, 21, 37, 53,
            6, 22, 38, 54, 7, 23, 39, 55, 8, 24, 40, 56, 9, 25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59,
            12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
        const __m512i index = _mm512_load_si512(order);
        int c = 0;
        for (; c + 16 <= channels; c += 16) {
            __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(rows + c)));
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i*)(rows + stride + c)), 1);
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i*)(rows + 2 * stride + c)), 2);
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i*)(rows + 3 * stride + c)), 3);
            _mm512_storeu_si512(out + c, _mm512_permutexvar_epi8(index, four));
        }
        for (; c < channels; ++c) {
            const uint8_t four[4] = {rows[c], rows[stride + c], rows[2 * stride + c], rows[3 * stride + c]};
            std::memcpy(out + c, four, 4);
        }
    }
};

using Isa = Avx512;

}  // namespace
}  // namespace kvbits

#define KVBITS_EXPORT avx512_kernels
#include "../kernels.inl"
