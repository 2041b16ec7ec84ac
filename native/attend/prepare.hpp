// The query of a piece, prepared: once for every packed block, and for each block where keys, or their mean, are yet to be roped.
#pragma once

#include "piece.hpp"
#include "query.hpp"

namespace kvbits {
namespace {

// Begin with row b of the batch and KV head h. `packed_query`: its rows as packed keys need them, or nothing.
template <class I> KVBITS_STAGE void Piece<I>::begin(int b, int h, bool is_packed, const float* packed_query) {
    batch = b;
    head = h;
    const Side& k = job.record.key;
    read_query<I>(job, batch, head, s.query);
    if (!is_packed) return;
    packed = packed_query ? packed_query : s.query;
    for (int r = 0; r < job.rows(); ++r) dot_mean(r);
    if (!job.unroped) lay_side_by_side(packed);
    if (float_path()) return;
    if (k.per == Per::token) prepare_per_token();
    if (k.per == Per::channel && k.fixed) prepare_fixed();
}

// The product of a row with the mean of the packed keys; where that is roped, two numbers for each pair.
template <class I> inline void Piece<I>::dot_mean(int r) {
    s.mean[r] = 0;
    if (!job.key_mean) return;
    const float *query = s.query + int64_t(r) * s.key_width, *mean = job.key_mean + int64_t(head) * job.record.key.channels;
    const int pairs = job.pairs();
    for (int c = 2 * pairs; c < job.record.key.channels; ++c) s.mean[r] += query[c] * mean[c];
    float* mean_pairs = s.mean_pairs + int64_t(r) * 2 * pairs;
    for (int i = 0; i < pairs; ++i) {
        const int a = job.steps->interleaved ? 2 * i : i, b = job.steps->interleaved ? 2 * i + 1 : i + pairs;
        mean_pairs[i] = query[a] * mean[a] + query[b] * mean[b];
        mean_pairs[pairs + i] = query[b] * mean[a] - query[a] * mean[b];
    }
}

template <class I> inline void Piece<I>::lay_side_by_side(const float* rows) {
    const Side& k = job.record.key;
    for (int r = 0; r < padded(job.rows(), 4) && k.outliers; ++r)
        for (int c = 0; c < k.channels; ++c)
            s.side_by_side[int64_t(r / 4) * 4 * s.key_width + 4 * c + r % 4] = r < job.rows() ? rows[int64_t(r) * s.key_width + c] : 0;
}

// Unrope by the angles of the first token of block `block`: the query, and its products with the mean.
template <class I> KVBITS_STAGE void Piece<I>::unrope_query(int block) {
    const int pairs = job.pairs();
    const int64_t at = job.base_batch * batch + job.base_block * block;
    const float *cos = job.base_cos + at, *sin = job.base_sin + at;
    for (int r = 0; r < job.rows() && job.key_mean; ++r) {
        const float* __restrict from = s.mean_pairs + int64_t(r) * 2 * pairs;
        float* __restrict to = s.unroped_mean + int64_t(r) * 2 * pairs;
        unrope(from, cos, sin, pairs, false, to);
    }
    if (!job.unroped) return;
    for (int r = 0; r < job.rows(); ++r) {
        const float* row = packed + int64_t(r) * s.key_width;
        float* unroped = s.unroped + int64_t(r) * s.key_width;
        unrope(row, cos, sin, pairs, job.steps->interleaved, unroped);
        for (int c = 2 * pairs; c < s.key_width; ++c) unroped[c] = row[c];
    }
    lay_side_by_side(s.unroped);
}

template <class I> inline void Piece<I>::prepare_per_token() {
    const Side& k = job.record.key;
    const int width = Scratch::halves_width(k);
    for (int r = 0; r < job.rows(); ++r) {
        int64_t at = int64_t(r) * width;
        for (int g = 0; g < k.groups; ++g) {
            const ChannelGroup here = channels_of(k, g);
            const int count = 4 * (here.last - here.first);
            float* x = s.weights;  // the group's channels, zeros around
            for (int i = 0; i < padded(count, 64); ++i) x[i] = 0;
            for (int c = here.begin; c < here.end; ++c) x[c - 4 * here.first] = packed[int64_t(r) * s.key_width + c];
            s.halves[r * k.groups + g] = halve<I>(x, padded(count, I::W), s.query_high + at, s.query_low + at);
            at += padded(k.length + 8, 64);
        }
    }
}

// One scale per channel for good: folded into the query once.
template <class I> inline void Piece<I>::prepare_fixed() {
    const Side& k = job.record.key;
    const int width = Scratch::halves_width(k);
    const float* scale = job.key_scale + int64_t(head) * k.channels;
    for (int r = 0; r < job.rows(); ++r) {
        for (int c = 0; c < s.key_width; ++c)
            s.weights[c] = c < k.channels ? packed[int64_t(r) * s.key_width + c] * scale[c] : 0;
        s.halves[r] = halve<I>(s.weights, s.key_width, s.query_high + int64_t(r) * width, s.query_low + int64_t(r) * width);
        if (!k.zero) continue;
        float constant = 0;
        for (int c = 0; c < k.channels; ++c) constant += s.weights[c] * job.key_zero[int64_t(head) * k.channels + c];
        s.mean[r] -= constant;
    }
}

}  // namespace
}  // namespace kvbits
