// Rotary angles within a block: how much further each of its tokens is roped than the first. Made once for a layer,
// laid out for tiles of 16 tokens, and the same for every block, so that they stay in the nearest caches.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace kvbits {

// One number for each token of a tile.
struct alignas(64) TileFloats {
    float at[16];
};

// Two numbers of sixteen bits for each token of a tile, in the lanes of one word.
struct alignas(64) TileShorts {
    int16_t at[32];
};

struct Steps {
    int tokens = 0, pairs = 0;
    bool interleaved = false;        // channels 2 i and 2 i + 1 make pair i; else i and i + pairs
    std::vector<TileFloats> cos, sin;  // [tile][pair]
    // The same times 32767 / norm, as [tile][pairs / 2][cos, sin] for two pairs at a time: those of channels 4 w and
    // 4 w + 2, then of 4 w + 1 and 4 w + 3; interleaved, those of word w. Only where pairs fill whole words of channels.
    std::vector<TileShorts> shorts;
    float norm = 1;                  // largest length of (cos, sin)

    // From rows [tokens][pairs].
    Steps(const float* row_cos, const float* row_sin, int t, int p, bool i) : tokens(t), pairs(p), interleaved(i) {
        const int tiles = (tokens + 15) / 16;
        cos.resize(size_t(tiles) * size_t(pairs));
        sin.resize(cos.size());
        float square = 0;
        for (int token = 0; token < tokens; ++token)
            for (int pair = 0; pair < pairs; ++pair) {
                const float c = row_cos[int64_t(token) * pairs + pair], s = row_sin[int64_t(token) * pairs + pair];
                const size_t tile = size_t(token / 16) * size_t(pairs) + size_t(pair);
                cos[tile].at[token % 16] = c;
                sin[tile].at[token % 16] = s;
                square = c * c + s * s > square ? c * c + s * s : square;
            }
        norm = std::sqrt(square);
        if (tokens % 16 || pairs % (interleaved ? 2 : 4) || !(norm > 1e-15f && norm < 1e15f)) return;
        shorts.resize(cos.size());
        for (int tile = 0; tile < tiles; ++tile)
            for (int two = 0; two < pairs / 2; ++two) {
                const int first = interleaved ? 2 * two : two / 2 * 4 + two % 2, second = first + (interleaved ? 1 : 2);
                for (int which = 0; which < 2; ++which)
                    for (int half = 0; half < 2; ++half) {
                        const size_t from = size_t(tile) * size_t(pairs) + size_t(half ? second : first);
                        const TileFloats& x = which ? sin[from] : cos[from];
                        TileShorts& to = shorts[size_t(tile) * size_t(pairs) + size_t(2 * two + which)];
                        for (int i = 0; i < 16; ++i) to.at[2 * i + half] = int16_t(std::lrintf(x.at[i] / norm * 32767.0f));
                    }
            }
    }
};

}  // namespace kvbits
