// The memory that a thread needs beside its piece: one allocation, laid out anew for every job.
#pragma once

#include "../job.hpp"
#include "rope.hpp"
#include "scores.hpp"

namespace kvbits {
namespace {

constexpr int batch_rows = 64;    // query rows that share an unpacked block
constexpr int exact_tokens = 128; // exact tokens at a time

template <class T> inline T* take(uintptr_t& memory, int64_t count) {
    T* here = reinterpret_cast<T*>(memory);
    memory += uintptr_t((count * int64_t(sizeof(T)) + 63) / 64 * 64 + 64);  // vectors may touch one vector more
    return here;
}

// Everything a thread needs beside its piece; sizes depend on the job alone.
struct Scratch {
    int tokens;        // of a block or of exact tokens, padded to 16
    int key_width, value_width;
    uint32_t *key_words, *value_words;
    uint8_t* work;
    float *scale_k, *zero_k, *scale_v, *zero_v, *float_work;
    float *query;      // [rows][key_width], scaled
    float *packed;     // the same rows as the packed keys need them
    float *score;      // [batch_rows][tokens]
    float *bias;       // [tokens]
    float *keys;       // [key_width][16]
    float *rows;       // [16][max width]
    float *dots;       // [most_rows][tokens]
    float *weights;    // [most_rows][max(tokens, key_width)]
    float *sparse;     // [value_width][4]
    float *side_by_side;  // [rows / 4][key_width][4]: the packed rows, four side by side, where keys have outliers
    float *mean;       // [rows]: query . mean, of channels without a pair
    float *mean_pairs;    // [rows][2][pairs]: products with a mean that is unroped, as mean_dots() takes them
    float *unroped_mean;  // [rows][2][pairs]: the same, unroped by the angles of the block's first token
    float *unroped;    // [rows][key_width]: the packed rows, unroped by the angles of the block's first token
    int16_t *factor_k, *offset_k, *short_keys, *short_query;  // of unroped keys: see rope.hpp
    float *unit_k, *step_k;
    uint8_t *high, *low;            // halves of the current rows
    uint8_t *query_high, *query_low;  // of all rows, where the packed keys are scaled per token
    Halves* halves;                 // [rows][groups]

    static int halves_width(const Side& side) {  // bytes of one row of prepared halves, all groups
        int total = 0;
        for (int g = 0; g < side.groups; ++g) total += padded(side.length + 8, 64);
        return side.per == Per::token ? total : padded(side.channels + 8, 64);
    }

    template <class Visit> static void lay(const Job& job, uintptr_t& memory, Visit&& made) {
        Scratch s;
        const Side &k = job.record.key, &v = job.record.value;
        s.tokens = padded(job.record.tokens > exact_tokens ? job.record.tokens : exact_tokens);
        s.key_width = padded(k.channels);
        s.value_width = padded(v.channels);
        const int width = s.key_width > s.value_width ? s.key_width : s.value_width;
        const int longest = width > s.tokens ? width : s.tokens;
        const int groups_k = k.groups > 0 ? k.groups : 1, groups_v = v.groups > 0 ? v.groups : 1;
        const int rows = job.rows();
        s.key_words = take<uint32_t>(memory, int64_t(s.tokens) / 16 * s.key_width * 4);
        s.value_words = take<uint32_t>(memory, int64_t(s.tokens) / 4 * s.value_width);
        s.work = take<uint8_t>(memory, int64_t(width) * 16);
        s.scale_k = take<float>(memory, int64_t(groups_k) * longest + 16);
        s.zero_k = take<float>(memory, int64_t(groups_k) * longest + 16);
        s.scale_v = take<float>(memory, int64_t(groups_v) * longest + 16);
        s.zero_v = take<float>(memory, int64_t(groups_v) * longest + 16);
        s.float_work = take<float>(memory, int64_t(groups_k > groups_v ? groups_k : groups_v) * longest + 16);
        s.query = take<float>(memory, int64_t(rows) * s.key_width);
        s.score = take<float>(memory, int64_t(batch_rows) * s.tokens);
        s.bias = take<float>(memory, s.tokens);
        s.keys = take<float>(memory, int64_t(s.key_width) * 16);
        s.rows = take<float>(memory, int64_t(width) * 16);
        s.dots = take<float>(memory, int64_t(most_rows) * s.tokens);
        s.weights = take<float>(memory, int64_t(most_rows) * longest);
        s.sparse = take<float>(memory, int64_t(s.value_width) * 4);
        s.side_by_side = take<float>(memory, k.outliers ? int64_t(padded(rows, 4)) * s.key_width : 0);
        s.mean = take<float>(memory, rows);
        s.mean_pairs = take<float>(memory, job.key_mean ? int64_t(rows) * 2 * job.pairs() : 0);
        s.unroped_mean = take<float>(memory, job.key_mean ? int64_t(rows) * 2 * job.pairs() : 0);
        const int64_t if_unroped = job.unroped ? 1 : 0;
        s.unroped = take<float>(memory, if_unroped * rows * s.key_width);
        s.factor_k = take<int16_t>(memory, if_unroped * groups_k * 2 * longest);
        s.offset_k = take<int16_t>(memory, if_unroped * groups_k * 2 * longest);
        s.unit_k = take<float>(memory, if_unroped * longest);
        s.short_keys = take<int16_t>(memory, if_unroped * 16 * s.key_width);
        s.short_query = take<int16_t>(memory, if_unroped * batch_rows * s.key_width);
        s.step_k = take<float>(memory, if_unroped * batch_rows * (s.key_width / chunk + 1));
        s.high = take<uint8_t>(memory, int64_t(most_rows) * (longest + 64));
        s.low = take<uint8_t>(memory, int64_t(most_rows) * (longest + 64));
        s.query_high = take<uint8_t>(memory, int64_t(rows) * halves_width(k));
        s.query_low = take<uint8_t>(memory, int64_t(rows) * halves_width(k));
        s.halves = take<Halves>(memory, int64_t(rows) * groups_k);
        made(s);
    }

    static int64_t bytes(const Job& job) {
        uintptr_t memory = 0;
        lay(job, memory, [](const Scratch&) {});
        return int64_t(memory) + 64;
    }
};

}  // namespace
}  // namespace kvbits
