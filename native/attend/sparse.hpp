// Outliers: sparse sums beside the dense ones, four query rows at a time.
#pragma once

#include "piece.hpp"

namespace kvbits {
namespace {

// The outliers of one side of a record, ascending: those of a token lie beside each other.
struct Entries {
    const uint16_t* index;
    const uint16_t* value;
    uint64_t inverse;
    int token(int e) const { return int(index[e] * inverse >> 32); }
};

inline Entries entries(const Side& side, const uint8_t* record) {
    return {reinterpret_cast<const uint16_t*>(record + side.outlier_index),
            reinterpret_cast<const uint16_t*>(record + side.outlier_value),
            ((uint64_t(1) << 32) + uint64_t(side.channels) - 1) / uint64_t(side.channels)};
}

template <class I> inline void Piece<I>::sparse_scores(const uint8_t* record, int first_row, int rows) {
    using four = Lanes<4>::f32;
    const Side& k = job.record.key;
    const Entries all = entries(k, record);
    for (int first = 0; first < rows; first += 4) {
        const int here = rows - first < 4 ? rows - first : 4;
        const float* query = s.side_by_side + int64_t((first_row + first) / 4) * 4 * s.key_width;
        for (int e = 0; e < k.outliers;) {
            const int token = all.token(e);
            if (token >= job.record.tokens) break;
            four total{};
            for (; e < k.outliers && all.token(e) == token; ++e)
                total += factor_of<four>(query, token, all.index[e] - token * k.channels) * bf16_to_float(all.value[e]);
            for (int i = 0; i < here; ++i) s.score[int64_t(first + i) * s.tokens + token] += total[i];
        }
    }
}

// What four rows of the query have for channel `c` of a token of the block.
template <class I>
template <class four>
inline four Piece<I>::factor_of(const float* query, int token, int c) const {
    const four own = load<four>(query + 4 * c);
    if (!job.unroped || c >= 2 * job.pairs()) return own;
    const int pairs = job.pairs();
    const bool interleaved = job.steps->interleaved, second = interleaved ? c % 2 : c >= pairs;
    const int pair = interleaved ? c / 2 : second ? c - pairs : c, other = interleaved ? c ^ 1 : second ? c - pairs : c + pairs;
    const size_t at = size_t(token / 16) * size_t(pairs) + size_t(pair);
    const float cos = job.steps->cos[at].at[token % 16], sin = job.steps->sin[at].at[token % 16];
    return own * cos + load<four>(query + 4 * other) * (second ? -sin : sin);
}

template <class I> inline void Piece<I>::sparse_values(const uint8_t* record, int rows, Partial& partial, int first_row) {
    using four = Lanes<4>::f32;
    const Side& v = job.record.value;
    const Entries all = entries(v, record);
    for (int first = 0; first < rows; first += 4) {
        const int here = rows - first < 4 ? rows - first : 4;
        std::memset(s.sparse, 0, sizeof(float) * 4 * size_t(s.value_width));
        for (int e = 0; e < v.outliers;) {
            const int token = all.token(e);
            if (token >= job.record.tokens) break;
            four p{};
            for (int i = 0; i < here; ++i) p[i] = s.score[int64_t(first + i) * s.tokens + token];
            for (; e < v.outliers && all.token(e) == token; ++e) {
                float* at = s.sparse + 4 * (all.index[e] - token * v.channels);
                store(at, load<four>(at) + p * bf16_to_float(all.value[e]));
            }
        }
        float* total[4];
        for (int i = 0; i < here; ++i) total[i] = partial.total(first_row + first + i);
        for (int c = 0; c < s.value_width; c += I::W) {  // four side by side, one vector for each row
            const float* at = s.sparse + 4 * c;
            const f32 a = load<f32>(at), b = load<f32>(at + I::W), d = load<f32>(at + 2 * I::W), e = load<f32>(at + 3 * I::W);
            const f32 even = even_lanes(a, b), odd = odd_lanes(a, b), even_on = even_lanes(d, e), odd_on = odd_lanes(d, e);
            const f32 row[4] = {even_lanes(even, even_on), even_lanes(odd, odd_on), odd_lanes(even, even_on), odd_lanes(odd, odd_on)};
            for (int i = 0; i < here; ++i) store(total[i] + c, load<f32>(total[i] + c) + row[i]);
        }
    }
}

}  // namespace
}  // namespace kvbits
