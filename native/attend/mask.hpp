// What a query row may see of a stretch of tokens.
#pragma once

#include "../job.hpp"
#include "../unpack.hpp"

namespace kvbits {
namespace {

// Tokens beside each other in memory. Their own numbers go on from `first`, with `gap` more from number `gap_from` on.
struct Stretch {
    int count, first, gap_from = 1 << 30, gap = 0;

    int token(int i) const { return first + i + (first + i >= gap_from ? gap : 0); }
    bool broken() const { return first < gap_from && first + count > gap_from; }
};

// Whether a query token certainly sees all of them; asked before any mask is read.
inline bool sees_all(const Job& job, int query, const Stretch& tokens) {
    const int64_t last = tokens.token(tokens.count - 1), own_column = job.first_query_column + query;
    return !job.mask.data && !job.column_of && tokens.first >= job.offset && last <= own_column &&
           (job.window <= 0 || tokens.first > own_column - job.window);
}

// What the mask adds to the scores of `count` tokens from number `first` on, whole vectors at once; false where its
// columns do not lie like that.
template <class I> inline bool copy_bias(const Job& job, const uint8_t* mask_row, int64_t first, int count, float* bias) {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    if (first < job.offset || first - job.offset + count > job.mask_columns) return false;
    const uint8_t* at = mask_row + (first - job.offset) * job.mask.stride[3];
    if (job.mask.type != Type::boolean) {
        if (job.mask.stride[3] != size_of(job.mask.type)) return false;
        to_float<I>(job.mask.type, at, count, bias);
        return true;
    }
    if (job.mask.stride[3] != 1) return false;
    const f32 hidden = splat<f32>(-__builtin_inff());
    int t = 0;
    for (; t + I::W <= count; t += I::W) {
        const i32 seen = __builtin_convertvector(load<typename I::u8>(at + t), i32);
        store(bias + t, seen == 0 ? hidden : f32{});
    }
    for (; t < count; ++t) bias[t] = at[t] ? 0 : -__builtin_inff();
    return true;
}

// The same of one column.
template <class I> inline float bias_of(const Job& job, const uint8_t* mask_row, int64_t column, int64_t own_column) {
    float bias = 0;
    if (column < job.offset) bias = -__builtin_inff();
    if (!job.mask.data && column > own_column) bias = -__builtin_inff();
    if (job.window > 0 && column <= own_column - job.window) bias = -__builtin_inff();
    if (job.mask.data && bias == 0) {
        const uint8_t* at = mask_row + (column - job.offset) * job.mask.stride[3];
        if (column - job.offset >= job.mask_columns) bias = -__builtin_inff();
        else if (job.mask.type == Type::boolean) bias = *at ? 0 : -__builtin_inff();
        else to_float<I>(job.mask.type, at, 1, &bias);
    }
    return bias;
}

// What is added to the scores of query row `row` (of row `batch` of the batch and KV head `head`): -inf hides.
template <class I>
KVBITS_STAGE void make_bias(const Job& job, int batch, int head, int row, const Stretch& tokens, float* bias) {
    const int query = row % job.queries, q_head = head * job.group + row / job.queries;
    const int64_t own_column = job.first_query_column + query;
    const uint8_t* mask_row = job.mask.data ? job.mask.at(job.mask_batch > 1 ? batch : 0, job.mask_heads > 1 ? q_head : 0, query) : nullptr;
    // Without padding, neighbouring tokens are neighbouring columns of the mask.
    const bool neighbours = mask_row && !tokens.broken() && !job.column_of && job.window <= 0;
    if (!neighbours || !copy_bias<I>(job, mask_row, tokens.token(0), tokens.count, bias))
        for (int t = 0; t < tokens.count; ++t) {
            int64_t column = tokens.token(t);
            if (job.column_of) column = column < job.columns_known ? job.column_of[batch * job.columns_known + column] : -1;
            bias[t] = bias_of<I>(job, mask_row, column, own_column);
        }
    for (int t = tokens.count; t < padded(tokens.count); ++t) bias[t] = 0;
}

}  // namespace
}  // namespace kvbits
