// Random numbers, half precision, and arrays that are allocated to the byte, so that a read beyond them is found.
#pragma once
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../run.hpp"

namespace kvbits {

inline std::mt19937_64 generator;

inline int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
inline float normal() { return std::normal_distribution<float>()(generator); }
inline bool chance(int percent) { return any(1, 100) <= percent; }
template <class T> T one_of(std::initializer_list<T> all) { return *(all.begin() + any(0, int(all.size()) - 1)); }

inline uint32_t word_of(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    return word;
}

inline uint16_t bf16(float x) {
    const uint32_t word = word_of(x);
    return uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
    const uint32_t word = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &word, 4);
    return f;
}

inline uint16_t f16(float x) {  // of magnitude 2^-14 .. 65504 or 0, truncated
    const uint32_t word = word_of(x), sign = word >> 16 & 0x8000, exponent = word >> 23 & 255;
    if (exponent < 113) return uint16_t(sign);
    return uint16_t(sign | (exponent - 112) << 10 | (word >> 13 & 1023));
}

inline void put(std::vector<uint8_t>& memory, int64_t at, Type type, float x) {
    if (type == Type::f32) std::memcpy(&memory[size_t(at)], &x, 4);
    else {
        const uint16_t half = type == Type::bf16 ? bf16(x) : f16(x);
        std::memcpy(&memory[size_t(at)], &half, 2);
    }
}

inline float get(const uint8_t* at, Type type) {
    float x;
    uint16_t half;
    if (type == Type::f32) {
        std::memcpy(&x, at, 4);
        return x;
    }
    std::memcpy(&half, at, 2);
    if (type == Type::bf16) return from_bf16(half);
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    x = exponent ? std::ldexp(float(1024 + mantissa), exponent - 25) : std::ldexp(float(mantissa), -24);
    return half & 0x8000 ? -x : x;
}

struct Tensor {
    std::vector<uint8_t> memory;
    Array array;

    void make(Type type, std::initializer_list<int64_t> shape, bool random = true) {
        array.type = type;
        array.dims = int(shape.size());
        int i = 0;
        for (const int64_t size : shape) array.shape[i++] = size;
        int64_t stride = size_of(type), count = 1;
        for (i = array.dims - 1; i >= 0; --i) {
            array.stride[i] = stride;
            stride *= array.shape[i];
            count *= array.shape[i];
        }
        memory.assign(size_t(stride), 0);
        for (int64_t n = 0; random && n < count; ++n) put(memory, n * size_of(type), type, normal());
        memory.shrink_to_fit();
        array.data = memory.data();
    }
};

}  // namespace kvbits
