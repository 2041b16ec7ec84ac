// How to encode: plain numbers, checked by binding/encode_module.cpp.
#pragma once

#include "format.hpp"

namespace kvbits {

// How scale and zero of a group come about. A method is not a format: `range` and `half_quadratic` write the same.
enum class Choice : int {
    range,           // smallest and largest element become the lowest and the highest level
    half_quadratic,  // the same scale, and the zero that HQQ finds
    magnitude,       // the largest magnitude becomes the largest level; no zero
    fixed,           // given: one for all, or one for each channel, with a zero
    norm,            // of a row: see codecs/lloyd_max.py; no zero
    open_range,      // as range; constant groups have one too, where no level may be 1 (codecs/non_uniform.py)
};

struct Encoder {
    Choice choice = Choice::range;
    Levels levels = Levels::uniform;
    Per per = Per::token;
    int bits = 0;
    int64_t tokens = 0, channels = 0;
    int64_t length = 0, groups = 0;  // as in Side
    float bottom = 0, span = 1;      // the lowest level, and how far above it the highest is
    float edges[16] = {};            // between neighbouring levels of a table, ascending; +inf beyond the last
    float table[16] = {};            // what its codes decode to
    float scale = 1;                 // where one is fixed for all
    int outliers = 0;                // entries of the sparse part
    float limit = 0;                 // largest magnitude that is sound; an element's own type holds it
};

// Scales and zeros of each channel that are given: float32 [D] of the block's head.
struct Statics {
    const float *scale = nullptr, *zero = nullptr;
};

// Where the parts of one block go: bytes, and bfloat16, float16 or indices, contiguous.
struct Encoded {
    uint8_t* codes = nullptr;
    uint16_t *scale = nullptr, *zero = nullptr, *outlier_index = nullptr, *outlier_value = nullptr;
};

}  // namespace kvbits
