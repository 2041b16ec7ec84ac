// How the Triton encoder divides (src/kvbits/encode/triton/kernel/numbers.py, `quotient`): products with a reciprocal,
// mended by what they leave over. Always the quotient that division rounds to?
//
// Exponents only move all numbers alike where nothing is too small for float32, so mantissas are what is tried: for
// divisors of bfloat16's 8 bits all of them, for float32 divisors random ones and those next to powers of two. Then
// random exponents within the bounds that are kept there: what is too small may be off, but no share of a level.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

namespace {

float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float mantissa(uint32_t bits) { return from_bits(0x3F800000u | (bits & 0x7FFFFFu)); }

float mended(float found, float x, float y, float inverse) { return std::fma(std::fma(-found, y, x), inverse, found); }

int64_t wrong_short(int64_t* unmended) {
    int64_t wrong = 0;
    for (uint32_t m = 0; m < 128; ++m) {
        const float y = mantissa(m << 16), inverse = 1.0f / y;
        for (uint32_t i = 0; i < 1u << 23; ++i) {
            const float x = mantissa(i), right = x / y, found = x * inverse;
            *unmended += found != right;
            wrong += mended(found, x, y, inverse) != right;
        }
    }
    return wrong;
}

int64_t wrong_long(int64_t count) {
    std::mt19937 draw(1);
    int64_t wrong = 0;
    for (int64_t n = 0; n < count; ++n) {
        uint32_t a = draw(), b = draw();
        if (n % 4 == 0) b = n % 8 ? b % 64 : ~(b % 64);  // next to powers of two, where reciprocals are worst
        const float x = mantissa(a), y = mantissa(b), inverse = 1.0f / y;
        wrong += mended(mended(x * inverse, x, y, inverse), x, y, inverse) != x / y;
    }
    return wrong;
}

float of_size(std::mt19937& draw, uint32_t bits, int least, int most) {
    return std::ldexp(mantissa(bits), least + static_cast<int>(draw() % (most - least)));
}

int64_t wrong_bounds(int64_t count, int64_t* small) {
    std::mt19937 draw(2);
    int64_t wrong = 0;
    for (int64_t n = 0; n < count; ++n) {
        const float x = of_size(draw, draw(), -149, 40), y = of_size(draw, draw() << 16, -60, 60);
        const float right = x / y, inverse = 1.0f / y;
        const bool off = mended(x * inverse, x, y, inverse) != right;
        *small += off;
        wrong += off && (x >= 0x1p-40f || right >= 0x1p-56f);
    }
    return wrong;
}

}  // namespace

int main() {
    int64_t unmended = 0, small = 0;
    const int64_t one = wrong_short(&unmended), two = wrong_long(100'000'000);
    const int64_t three = wrong_bounds(20'000'000, &small);
    std::printf("bfloat16 divisors: %lld of 2^30 wrong (%lld before mending); float32 divisors: %lld of 10^8 wrong\n",
                static_cast<long long>(one), static_cast<long long>(unmended), static_cast<long long>(two));
    std::printf("any exponents: %lld of 2 * 10^7 wrong (%lld off that are too small to tell)\n",
                static_cast<long long>(three), static_cast<long long>(small));
    return one != 0 || two != 0 || three != 0 || unmended == 0 || small == 0;
}
