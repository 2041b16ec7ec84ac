// One packed block, from its bytes to weighted values.
#pragma once

#include "piece.hpp"

namespace kvbits {
namespace {

// Block `block` of the row that begin() named, for all its query rows.
template <class I> inline void Piece<I>::attend_block(Partial& partial, int block) {
    const Record& record = job.record;
    const uint8_t* at = job.pool + (job.table[batch * job.table_stride + block] * job.heads + head) * record.bytes;
    const Stretch tokens = {record.tokens, job.first_token() + block * record.tokens};
    const uint8_t* next = block + 1 < job.counts[batch]
        ? job.pool + (job.table[batch * job.table_stride + block + 1] * job.heads + head) * record.bytes : nullptr;
    const Side &k = record.key, &v = record.value;
    if (k.levels != Levels::exact) {
        keys = key_tiles<I>(k, at + k.codes, record.tokens, s.key_words, s.work);
        keys.next = next ? next + k.codes : nullptr;
        keys.next_bytes = next ? v.codes - k.codes : 0;
        scales_and_zeros<I>(k, at, record.tokens, fixed(job.key_scale, k), fixed(job.key_zero, k), s.scale_k, s.zero_k, s.float_work);
    }
    if (v.levels != Levels::exact) {
        values = value_tiles<I>(v, at + v.codes, record.tokens, s.value_words, s.work);
        values.next = next ? next + v.codes : nullptr;
        values.next_bytes = next ? record.bytes - v.codes : 0;
        scales_and_zeros<I>(v, at, record.tokens, fixed(job.value_scale, v), fixed(job.value_zero, v), s.scale_v, s.zero_v, s.float_work);
    }
    if (shorts) short_factors<I>(k, short_levels, *job.steps, s.scale_k, s.zero_k, factors());
    if (job.steps) unrope_query(block);
    for (int first = 0; first < job.rows(); first += batch_rows) {
        const int rows = job.rows() - first < batch_rows ? job.rows() - first : batch_rows;
        packed_scores(at, first, rows);
        weigh(partial, first, rows, tokens);
        packed_values(at, partial, first, rows);
    }
}

// Of static scales or zeros `all`, those of this head; nothing where the side has none.
template <class I> inline const float* Piece<I>::fixed(const float* all, const Side& side) const {
    if (!side.fixed || !all) return nullptr;
    return side.per == Per::layer ? all : all + int64_t(head) * side.channels;
}

}  // namespace
}  // namespace kvbits
