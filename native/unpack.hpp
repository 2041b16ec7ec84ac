// From the bytes of a record to what the inner loops read: tiles of codes, and rows of float scales and zeros.
//
// A key tile is 16 tokens: word [d][t] of `uint32_t[channels / 4][16]` holds the codes of channels 4 d .. 4 d + 3 of
// token t, so that lanes are tokens and a dot product needs no sum over lanes. A value tile is 4 tokens: word [c] of
// `uint32_t[channels]` holds the codes of the four tokens, so that lanes are channels.
#pragma once

#include "format.hpp"
#include "vec.hpp"

namespace kvbits {
namespace {

// Codes of `bits` bits lie in planes (3 = 2 + 1). In a plane of w bits, byte row r holds tokens r, r + n, r + 2 n, ...
// from the low bits up, with n = tokens * w / 8 rows.
struct Plane {
    int width, rows;
    int64_t offset;  // bytes from the start of the codes
};

inline int planes_of(const Side& side, int tokens, Plane* planes) {
    const auto channels = int64_t(side.channels);
    switch (side.bits) {
        case 3:
            planes[0] = {2, tokens / 4, 0};
            planes[1] = {1, tokens / 8, tokens / 4 * channels};
            return 2;
        default:
            planes[0] = {side.bits, tokens * side.bits / 8, 0};
            return 1;
    }
}

// The code of one element, for blocks whose planes do not fall on whole tiles.
inline uint8_t code_at(const uint8_t* codes, const Plane* planes, int count, int channels, int token, int channel) {
    int code = 0, low = 0;
    for (int p = 0; p < count; ++p) {
        const int row = token % planes[p].rows, slice = token / planes[p].rows, width = planes[p].width;
        code |= (codes[planes[p].offset + int64_t(row) * channels + channel] >> slice * width & ((1 << width) - 1)) << low;
        low += width;
    }
    return uint8_t(code);
}

// Where the codes of one tile are: a word of the tile is `at[i] >> shift & mask`, with the last bit of three-bit codes
// at `at_top[i] >> shift_top & mask_top`, to be moved up by two.
struct Tile {
    const uint32_t *at = nullptr, *at_top = nullptr;
    int shift = 0, shift_top = 0;
};

// The packed bytes of a block, rearranged into tiles of TOKENS (16 or 4) rows of `words` words. Slices of a byte stay
// together: one rearrangement serves all the tokens that share bytes, and the reader shifts.
struct Tiles {
    int planes = 0;  // 0: whole bytes
    int words = 0, tiles = 0, chunks[2] = {1, 1}, width[2] = {8, 0};
    uint32_t mask = ~0u;
    const uint32_t *low = nullptr, *top = nullptr;
    const uint8_t* next = nullptr;  // memory of the next block, fetched while this one is computed
    int64_t next_bytes = 0;

    // Fetch the shares of steps index .. index + steps - 1 of `count`.
    void fetch(int index, int steps, int count) const {
        const int64_t share = (next_bytes / count + 127) / 64 * 64, first = share * index;
        for (int64_t i = first; i < first + share * steps && i < next_bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
    }

    Tile operator[](int tile) const {
        Tile here;
        here.at = low + int64_t(tile % chunks[0]) * words;
        here.shift = tile / chunks[0] * width[0];
        if (planes == 2) {
            here.at_top = top + int64_t(tile % chunks[1]) * words;
            here.shift_top = tile / chunks[1];
        }
        return here;
    }
};

template <class I, int PLANES>
inline typename I::u32 codes_of(const Tile& tile, int word, uint32_t mask) {
    using u32 = typename I::u32;
    const u32 low = load<u32>(tile.at + word);
    if constexpr (PLANES == 0) return low;
    u32 code = low >> uint32_t(tile.shift) & mask;
    if constexpr (PLANES == 2) code |= (load<u32>(tile.at_top + word) >> uint32_t(tile.shift_top) & 0x01010101u) << 2;
    return code;
}

// Read(rows, stride, out) rearranges TOKENS rows of bytes into one tile.
template <int TOKENS, class Read>
inline Tiles tiles_of(const Side& side, const uint8_t* codes, int tokens, int words, uint32_t* out, uint8_t* work, Read read) {
    Plane planes[2];
    const int count = planes_of(side, tokens, planes), channels = side.channels;
    Tiles made;
    made.words = words;
    made.tiles = (tokens + TOKENS - 1) / TOKENS;
    made.low = out;
    bool whole = tokens % TOKENS == 0;
    for (int p = 0; p < count; ++p) whole = whole && planes[p].rows % TOKENS == 0;
    if (!whole) {  // to whole bytes, padded with zeros
        for (int first = 0; first < tokens; first += TOKENS) {
            std::memset(work, 0, size_t(TOKENS) * channels);
            for (int t = first; t < first + TOKENS && t < tokens; ++t)
                for (int c = 0; c < channels; ++c) work[(t - first) * channels + c] = code_at(codes, planes, count, channels, t, c);
            read(work, channels, out + int64_t(first / TOKENS) * words);
        }
        made.chunks[0] = made.tiles;
        return made;
    }
    made.planes = side.bits == 8 ? 0 : count;
    made.mask = ((1u << planes[0].width) - 1) * 0x01010101u;
    for (int p = 0; p < count; ++p) {
        made.chunks[p] = planes[p].rows / TOKENS;
        made.width[p] = planes[p].width;
        if (p) made.top = out;
        for (int row = 0; row < planes[p].rows; row += TOKENS, out += words)
            read(codes + planes[p].offset + ptrdiff_t(row) * channels, channels, out);
    }
    return made;
}

template <class I> inline int words_of_value_tile(const Side& side) { return (side.channels + I::W - 1) / I::W * I::W; }

// `out` has room for ceil(tokens / 16) tiles, `work` for 16 rows of bytes.
template <class I> KVBITS_STAGE Tiles key_tiles(const Side& side, const uint8_t* codes, int tokens, uint32_t* out, uint8_t* work) {
    return tiles_of<16>(side, codes, tokens, side.channels / 4 * 16, out, work, [&](const uint8_t* rows, ptrdiff_t stride, uint32_t* to) {
        I::transpose(rows, stride, side.channels / 4, to);
    });
}

template <class I> KVBITS_STAGE Tiles value_tiles(const Side& side, const uint8_t* codes, int tokens, uint32_t* out, uint8_t* work) {
    return tiles_of<4>(side, codes, tokens, words_of_value_tile<I>(side), out, work, [&](const uint8_t* rows, ptrdiff_t stride, uint32_t* to) {
        I::interleave(rows, stride, side.channels, to);
    });
}

// `count` elements of a type as float32; reads and writes whole elements only.
template <class I> inline void to_float(Type type, const uint8_t* from, int64_t count, float* out) {
    const auto* half = reinterpret_cast<const uint16_t*>(from);
    int64_t i = 0;
    if (type == Type::f32) {
        std::memcpy(out, from, size_t(count) * 4);
    } else if (type == Type::bf16) {
        for (; i + I::W <= count; i += I::W) store(out + i, load_bf16<I>(half + i));
        for (; i < count; ++i) out[i] = bf16_to_float(half[i]);
    } else {
        for (; i + I::W <= count; i += I::W) store(out + i, I::from_f16(load<typename I::u16>(half + i)));
        for (; i < count; ++i) out[i] = half_to_float(half[i]);
    }
}

template <class I> inline void from_float(Type type, const float* from, int64_t count, uint8_t* out) {
    auto* half = reinterpret_cast<uint16_t*>(out);
    int64_t i = 0;
    if (type == Type::f32) {
        std::memcpy(out, from, size_t(count) * 4);
    } else if (type == Type::bf16) {
        for (; i + I::W <= count; i += I::W) store_bf16<I>(half + i, load<typename I::f32>(from + i));
        for (; i < count; ++i) half[i] = float_to_bf16(from[i]);
    } else {
        // Saturating: a rounding error above 65,504 must not become infinity. NaN stays NaN.
        using f32 = typename I::f32;
        const f32 top = splat<f32>(65504.0f);
        for (; i + I::W <= count; i += I::W) {
            f32 x = load<f32>(from + i);
            x = x > top ? top : x;
            I::store_f16(half + i, x < -top ? -top : x);
        }
        for (; i < count; ++i) half[i] = float_to_half(from[i] > 65504.0f ? 65504.0f : from[i] < -65504.0f ? -65504.0f : from[i]);
    }
}

// [token][group] of two bytes each to float [group][token], for 2 or 4 groups.
template <class I> inline void turn_pairs(Type type, const uint8_t* from, int tokens, int groups, float* out) {
    using u32 = typename I::u32;
    for (int t = 0; t < tokens; t += I::W) {
        u32 pairs[2];
        if (groups == 2) {
            pairs[0] = load<u32>(from + 4 * t);
        } else {
            const u32 a = load<u32>(from + 8 * t), b = load<u32>(from + 8 * t + 4 * I::W);
            pairs[0] = even_lanes(a, b);
            pairs[1] = odd_lanes(a, b);
        }
        for (int g = 0; g < groups; ++g) {
            const u32 half = g % 2 ? pairs[g / 2] >> 16 : pairs[g / 2] & 0xFFFF;
            float* to = out + int64_t(g) * tokens + t;
            if (type == Type::bf16)
                store(to, bits<typename I::f32>(half << 16));
            else
                store(to, I::from_f16(__builtin_convertvector(half, typename I::u16)));
        }
    }
}

// Channels of group g, and the words of a key tile that hold them.
struct ChannelGroup { int begin, end, first, last; };

inline ChannelGroup channels_of(const Side& side, int g) {
    const int begin = g * side.length, end = begin + side.length < side.channels ? begin + side.length : side.channels;
    return {begin, end, begin / 4, (end + 3) / 4};
}

// Scales and zeros of one block: [group][channel] per channel, [group][token] per token.
template <class I>
KVBITS_STAGE void scales_and_zeros(const Side& side, const uint8_t* record, int tokens, const float* fixed_scale,
                             const float* fixed_zero, float* scale, float* zero, float* work) {
    const int across = side.per == Per::token ? tokens : side.channels;
    const int64_t count = int64_t(side.groups) * across;
    if (side.fixed) {
        if (side.per == Per::layer) {
            for (int64_t i = 0; i < count; ++i) scale[i] = fixed_scale[0];
        } else {
            std::memcpy(scale, fixed_scale, size_t(count) * 4);
            if (side.zero) std::memcpy(zero, fixed_zero, size_t(count) * 4);
        }
        return;
    }
    const bool transposed = side.per == Per::token && side.groups > 1;
    for (int which = 0; which < (side.zero ? 2 : 1); ++which) {
        float* out = which ? zero : scale;
        const Type type = which ? Type::f16 : Type::bf16;
        const uint8_t* from = record + (which ? side.zeros : side.scale);
        if (transposed && side.groups % 2 == 0 && side.groups <= 4 && tokens % I::W == 0) {
            turn_pairs<I>(type, from, tokens, side.groups, out);
            continue;
        }
        to_float<I>(type, from, count, transposed ? work : out);
        if (!transposed) continue;
        for (int g = 0; g < side.groups; ++g)
            for (int t = 0; t < tokens; ++t) out[g * tokens + t] = work[t * side.groups + g];
    }
}

}  // namespace
}  // namespace kvbits
