// One attention call, checked (binding/attend_module.cpp), and what its pieces leave behind.
#pragma once

#include <vector>

#include "angles.hpp"
#include "format.hpp"

namespace kvbits {

// A tensor's memory as the binding layer found it; strides in bytes.
struct Array {
    uint8_t* data = nullptr;
    Type type = Type::none;
    int dims = 0;
    int64_t shape[4] = {}, stride[4] = {};

    uint8_t* at(int64_t a, int64_t b = 0, int64_t c = 0) const { return data + a * stride[0] + b * stride[1] + c * stride[2]; }
};

struct Job {
    Record record;
    int batch = 0, heads = 0, group = 1, queries = 1;  // KV heads; query heads of each; query tokens
    Array query, output;                               // [B, Hq, q, D]
    const uint8_t* pool = nullptr;                     // [P, H, record bytes]
    const int64_t* table = nullptr;                    // [B, N], rows table_stride elements apart
    int64_t table_stride = 0;
    std::vector<int> counts;                           // blocks of each row
    Array keys, values;                                // exact tokens [B, H, L, D]
    std::vector<int> exact_counts;                     // exact tokens of each row
    int sinks = 0, dropped = 0;
    const float *key_scale = nullptr, *key_zero = nullptr, *value_scale = nullptr, *value_zero = nullptr;
    const float *key_mean = nullptr, *key_balance = nullptr, *value_mean = nullptr;  // [H, D]
    const float *key_rotation = nullptr, *value_unrotation = nullptr;  // [D, D]: packed = key @ rotation; value = packed @ unrotation
    const Steps* steps = nullptr;                      // where packed keys, or their means, are yet to be roped:
    const float *base_cos = nullptr, *base_sin = nullptr;  // of the first token of each block, [B or 1, N, pairs];
    int64_t base_batch = 0, base_block = 0;                // strides in elements
    bool unroped = false;                              // whole keys are stored before the rotary embedding
    Array mask;                                        // [B or 1, 1 or Hq, q, columns]
    int mask_batch = 1, mask_heads = 1;
    int64_t mask_columns = 0;
    const int64_t* column_of = nullptr;                // [B, columns_known]
    int64_t columns_known = 0, offset = 0, first_query_column = 0, window = 0;
    float scaling = 1, softcap = 0;
    const float* sink_logits = nullptr;                // [Hq]
    float* log_sums = nullptr;                         // [B, Hq, q], written: log of the sum of exp(score); or nothing

    int first_token() const { return sinks + dropped; }  // own token number of the first packed token
    bool changes_query() const { return key_rotation || key_balance; }
    int rows() const { return group * queries; }
    int pairs() const { return steps ? steps->pairs : 0; }
};

// What one piece of the context leaves of `rows` query rows.
struct Partial {
    float* memory;
    int rows, width;

    float& top(int row) { return memory[row]; }
    float& weight(int row) { return memory[rows + row]; }
    float* total(int row) { return memory + 2 * padded_rows(rows) + int64_t(row) * width; }

    static int64_t padded_rows(int rows) { return (rows + 15) / 16 * 16; }
    static int64_t floats(int rows, int width) { return 2 * padded_rows(rows) + int64_t(rows) * width; }

    void clear() {
        for (int r = 0; r < rows; ++r) {
            top(r) = -__builtin_inff();
            weight(r) = 0;
            for (int c = 0; c < width; ++c) total(r)[c] = 0;
        }
    }
};

}  // namespace kvbits
