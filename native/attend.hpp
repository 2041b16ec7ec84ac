// Attention of query rows over a part of the context: an online softmax over packed blocks and exact tokens.
//
// The work is cut into pieces: one row of the batch, one KV head and a range of blocks, or of exact tokens. Every piece
// leaves its largest score, its sum of weights and its weighted values; `merge` joins them.
#pragma once

#include "attend/exact_tokens.hpp"
#include "attend/merge.hpp"
#include "attend/packed_block.hpp"
#include "attend/packed_keys.hpp"
#include "attend/packed_values.hpp"
#include "attend/prepare.hpp"
#include "attend/softmax.hpp"
#include "attend/sparse.hpp"
#include "attend/unroped_keys.hpp"
#include "kernels.hpp"

namespace kvbits {
namespace {

template <class I> void attend(const Job& job, const Span& span, const float* packed_query, Partial& partial, uint8_t* scratch) {
    Piece<I> piece(job, scratch);
    partial.clear();
    piece.begin(span.batch, span.head, span.packed, packed_query);
    if (span.packed)
        for (int n = span.first; n < span.last; ++n) piece.attend_block(partial, n);
    else
        piece.attend_exact(partial, span.first, span.last);
}

}  // namespace
}  // namespace kvbits
