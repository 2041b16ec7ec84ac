// Keys and values as floats: exact tokens, and what is decoded to floats on the way.
#pragma once

#include "piece.hpp"
#include "values.hpp"

namespace kvbits {
namespace {

// Exact tokens first .. last - 1 of the row that begin() named.
template <class I> inline void Piece<I>::attend_exact(Partial& partial, int first, int last) {
    Side v = job.record.value;
    v.levels = Levels::exact;
    v.type = job.values.type;
    for (int rows_first = 0; rows_first < job.rows(); rows_first += batch_rows) {
        const int rows = job.rows() - rows_first < batch_rows ? job.rows() - rows_first : batch_rows;
        for (int from = first; from < last; from += exact_tokens) {
            const int count = last - from < exact_tokens ? last - from : exact_tokens;
            for (int t = 0; t < count; t += 16) {
                const int here = count - t < 16 ? count - t : 16;
                exact_keys(job.keys.at(batch, head, from + t), job.keys.stride[2], here, job.keys.type);
                dot_float_keys(s.query, rows_first, rows, t);
            }
            const int gap = job.counts[batch] * job.record.tokens + job.dropped;
            weigh(partial, rows_first, rows, {count, from, job.sinks, gap});
            for (int t = 0; t < count; t += 16) {
                const int here = count - t < 16 ? count - t : 16;
                float_rows<I>(v, job.values.at(batch, head, from + t), job.values.stride[2], here, s.value_width, s.rows);
                add_float_values(partial, rows_first, rows, t, here);
            }
        }
    }
}

// Exact keys of up to 16 tokens, transposed.
template <class I>
KVBITS_STAGE void Piece<I>::exact_keys(const uint8_t* rows, ptrdiff_t stride, int count, Type type) {
    const int channels = job.record.key.channels;
    for (int t = 0; t < 16; ++t) {
        float* row = s.rows + int64_t(t) * s.key_width;
        if (t < count)
            to_float<I>(type == Type::none ? job.record.key.type : type, rows + t * stride, channels, row);
        else
            std::memset(row, 0, sizeof(float) * size_t(channels));
    }
    I::transpose(reinterpret_cast<const uint8_t*>(s.rows), 4 * ptrdiff_t(s.key_width), channels,
                 reinterpret_cast<uint32_t*>(s.keys));
}

template <class I> inline void Piece<I>::dot_float_keys(const float* query, int first_row, int rows, int t) {
    over_tile(query, first_row, rows, t, [&](auto n, const float* const* q, float* const* out) {
        float_dots<I, decltype(n)::value>(s.keys, job.record.key.channels, q, out);
    });
}

// f(N, query rows, where their scores of the tile at token t go).
template <class I>
template <class F>
inline void Piece<I>::over_tile(const float* query, int first_row, int rows, int t, F&& f) {
    over_rows(rows, [&](auto n, int first) {
        constexpr int N = decltype(n)::value;
        const float* q[N];
        float* out[N];
        for (int i = 0; i < N; ++i) {
            q[i] = query + int64_t(first_row + first + i) * s.key_width;
            out[i] = s.score + int64_t(first + i) * s.tokens + t;
        }
        f(n, q, out);
    });
}

template <class I> inline void Piece<I>::add_float_values(Partial& partial, int first_row, int rows, int t, int count) {
    over_rows(rows, [&](auto n, int first) {
        constexpr int N = decltype(n)::value;
        const float* weight[N];
        float* total[N];
        for (int i = 0; i < N; ++i) {
            weight[i] = s.score + int64_t(first + i) * s.tokens + t;
            total[i] = partial.total(first_row + first + i);
        }
        float_sums<I, N>(s.rows, count, s.value_width, weight, total);
    });
}

}  // namespace
}  // namespace kvbits
