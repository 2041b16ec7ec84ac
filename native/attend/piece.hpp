// One piece of a call's work: a row of the batch, one KV head, and a range of blocks or of exact tokens. Here is what
// the stages of that work share; the stages are in the files that the comments name.
#pragma once

#include "mask.hpp"
#include "rope.hpp"
#include "scratch.hpp"

namespace kvbits {
namespace {

template <class I> struct Piece {
    using f32 = typename I::f32;

    const Job& job;
    Scratch s{};
    const IntegerLevels key_levels, value_levels;
    const ShortLevels short_levels;
    const bool shorts;              // whether keys are roped as numbers of sixteen bits
    int batch = 0, head = 0;
    const float* packed = nullptr;  // the query as packed keys need it
    Tiles keys{}, values{};         // of the current block
    float peak_weight[batch_rows];  // of each row of the last weigh()

    Piece(const Job& j, uint8_t* scratch)
        : job(j), key_levels(j.record.key), value_levels(j.record.value), short_levels(j.record.key),
          shorts(j.unroped && ShortLevels::fit(j.record.key, *j.steps)) {
        uintptr_t memory = (reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64;
        Scratch::lay(job, memory, [&](const Scratch& made) { s = made; });
    }

    bool floats(const Side& side) const { return side.levels == Levels::exact || side.levels == Levels::e4m3; }
    bool float_path() const { return floats(job.record.key) || job.unroped; }

    // prepare.hpp: the query
    KVBITS_STAGE void begin(int b, int h, bool is_packed, const float* packed_query);
    KVBITS_STAGE void unrope_query(int block);
    void dot_mean(int r);
    void lay_side_by_side(const float* rows);
    void prepare_per_token();
    void prepare_fixed();

    // packed_block.hpp: a block, from its bytes to weighted values
    void attend_block(Partial& partial, int block);
    const float* fixed(const float* all, const Side& side) const;

    // exact_tokens.hpp: the same for exact tokens, and what blocks that are decoded to floats share with them
    void attend_exact(Partial& partial, int first, int last);
    KVBITS_STAGE void exact_keys(const uint8_t* rows, ptrdiff_t stride, int count, Type type = Type::none);
    void dot_float_keys(const float* query, int first_row, int rows, int t);
    void add_float_values(Partial& partial, int first_row, int rows, int t, int count);
    template <class F> void over_tile(const float* query, int first_row, int rows, int t, F&& f);

    // packed_keys.hpp: scores
    void packed_scores(const uint8_t* record, int first_row, int rows);
    KVBITS_STAGE void scores_per_token(int first_row, int rows);
    KVBITS_STAGE void scores_per_channel(int first_row, int rows);
    void float_scores(const uint8_t* record, int first_row, int rows);
    f32 last(const float* x, const float* y, int c) const;

    // unroped_keys.hpp: scores of unroped keys and means
    void short_scores(int first_row, int rows);
    KVBITS_STAGE void shorten_rows(int first_row, int rows);
    ShortFactors factors() const;
    void mean_scores(int first_row, int rows);

    // softmax.hpp: scores to weights
    KVBITS_STAGE void weigh(Partial& partial, int first_row, int rows, const Stretch& tokens);
    void weigh_row(Partial& partial, int first_row, int r, int tokens);

    // packed_values.hpp: weights times values
    void packed_values(const uint8_t* record, Partial& partial, int first_row, int rows);
    void float_values(const uint8_t* record, Partial& partial, int first_row, int rows);
    void e4m3_values(Partial& partial, int first_row, int rows);
    template <int N> KVBITS_STAGE void values_per_token(Partial& partial, int first_row, int first);
    template <int N> KVBITS_STAGE void values_per_channel(Partial& partial, int first_row, int first);

    // sparse.hpp: outliers
    void sparse_scores(const uint8_t* record, int first_row, int rows);
    void sparse_values(const uint8_t* record, int rows, Partial& partial, int first_row);
    template <class four> four factor_of(const float* query, int token, int c) const;
};

}  // namespace
}  // namespace kvbits
