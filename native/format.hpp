// What a kernel knows of a block: plain numbers, checked once when a layer's layout is made (binding/layout_module.cpp).
#pragma once

#include <cstdint>

namespace kvbits {

enum class Type : int { none, f32, bf16, f16, u8, i64, boolean, u16, i32 };
enum class Levels : int { uniform, table, e4m3, exact };
enum class Per : int { token, channel, layer, element };

inline int size_of(Type type) {
    switch (type) {
        case Type::f32: case Type::i32: return 4;
        case Type::bf16: case Type::f16: case Type::u16: return 2;
        case Type::i64: return 8;
        default: return 1;
    }
}

constexpr int most_channels = 512;

inline int padded(int count, int to = 16) { return (count + to - 1) / to * to; }

// One side (keys or values) of a record.
struct Side {
    int bits = 0;                  // of a code; 0 where elements are exact
    Levels levels = Levels::exact;
    Per per = Per::element;
    Type type = Type::none;        // of exact elements
    int channels = 0;              // D
    int length = 0;                // channels of a group (per token) or tokens of a group (per channel)
    int groups = 0;                // groups along that direction
    bool zero = false;
    bool fixed = false;            // scale and zero are the layer's: float32 [H, D], or [1] per layer
    int64_t codes = 0, scale = 0, zeros = 0, outlier_index = 0, outlier_value = 0;  // byte offsets in the record
    int outliers = 0;
    float table[256] = {};         // levels; for uniform codes, the code itself

    int levels_count() const { return 1 << bits; }
};

struct Record {
    int tokens = 0;  // of a block
    int64_t bytes = 0;
    Side key, value;
};

}  // namespace kvbits
