// Attention of query rows over a part of the context: an online softmax over packed blocks and exact tokens.
//
// The work is cut into pieces: one row of the batch, one KV head and a range of blocks, or of exact tokens. Every piece
// leaves its largest score, its sum of weights and its weighted values; `merge` joins them (log-sum-exp).
#pragma once

#include "job.hpp"
#include "query.hpp"
#include "rope.hpp"
#include "values.hpp"

namespace kvbits {
namespace {

constexpr int batch_rows = 64;    // query rows that meet an unpacked block together
constexpr int exact_tokens = 128; // exact tokens that are met together

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
    float *mean;       // [rows]: query . mean, as far as that does not turn
    float *swing;      // [rows][2][pairs]: products with a mean that turns, as mean_dots() takes them, not turned
    float *swung;      // [rows][2][pairs]: the same, turned to the block's first token
    float *back;       // [rows][key_width]: the packed rows, turned back by the angles of the block
    int16_t *factor_k, *offset_k, *short_keys, *short_query;  // of keys that turn: see rope.hpp
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
        s.swing = take<float>(memory, job.key_mean ? int64_t(rows) * 2 * job.pairs() : 0);
        s.swung = take<float>(memory, job.key_mean ? int64_t(rows) * 2 * job.pairs() : 0);
        const int64_t turned = job.turned ? 1 : 0;
        s.back = take<float>(memory, turned * rows * s.key_width);
        s.factor_k = take<int16_t>(memory, turned * groups_k * 2 * longest);
        s.offset_k = take<int16_t>(memory, turned * groups_k * 2 * longest);
        s.unit_k = take<float>(memory, turned * longest);
        s.short_keys = take<int16_t>(memory, turned * 16 * s.key_width);
        s.short_query = take<int16_t>(memory, turned * batch_rows * s.key_width);
        s.step_k = take<float>(memory, turned * batch_rows * (s.key_width / chunk + 1));
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

template <class I> struct Piece {
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    using u32 = typename I::u32;

    const Job& job;
    Scratch s{};
    const IntegerLevels key_levels, value_levels;
    const ShortLevels short_levels;
    const bool shorts;             // whether keys turn as numbers of sixteen bits
    int batch = 0, head = 0;
    const float* packed = nullptr; // the query as it meets packed keys
    Tiles keys{}, values{};        // of the current block

    Piece(const Job& j, uint8_t* scratch)
        : job(j), key_levels(j.record.key), value_levels(j.record.value), short_levels(j.record.key),
          shorts(j.turned && ShortLevels::fit(j.record.key, *j.steps)) {
        uintptr_t memory = (reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64;
        Scratch::lay(job, memory, [&](const Scratch& made) { s = made; });
    }

    bool floats(const Side& side) const { return side.levels == Levels::exact || side.levels == Levels::e4m3; }
    bool float_path() const { return floats(job.record.key) || job.turned; }

    // -- the query -----------------------------------------------------------------------------------------------

    // Begin with row b of the batch and KV head h. `turned`: its query rows as packed keys need them, or nothing.
    KVBITS_STAGE void begin(int b, int h, bool is_packed, const float* turned) {
        batch = b;
        head = h;
        const Side& k = job.record.key;
        read_query<I>(job, batch, head, s.query);
        if (!is_packed) return;
        packed = turned ? turned : s.query;
        for (int r = 0; r < job.rows(); ++r) meet_mean(r);
        if (!job.turned) lay_side_by_side(packed);
        if (float_path()) return;
        if (k.per == Per::token) prepare_per_token();
        if (k.per == Per::channel && k.fixed) prepare_fixed();
    }

    // The product of a row with the mean of the packed keys, and what it needs to turn with the tokens.
    void meet_mean(int r) {
        s.mean[r] = 0;
        if (!job.key_mean) return;
        const float *query = s.query + int64_t(r) * s.key_width, *mean = job.key_mean + int64_t(head) * job.record.key.channels;
        const int pairs = job.pairs();
        for (int c = 2 * pairs; c < job.record.key.channels; ++c) s.mean[r] += query[c] * mean[c];
        float* swing = s.swing + int64_t(r) * 2 * pairs;
        for (int i = 0; i < pairs; ++i) {
            const int a = job.steps->interleaved ? 2 * i : i, b = job.steps->interleaved ? 2 * i + 1 : i + pairs;
            swing[i] = query[a] * mean[a] + query[b] * mean[b];
            swing[pairs + i] = query[b] * mean[a] - query[a] * mean[b];
        }
    }

    void lay_side_by_side(const float* rows) {
        const Side& k = job.record.key;
        for (int r = 0; r < padded(job.rows(), 4) && k.outliers; ++r)
            for (int c = 0; c < k.channels; ++c)
                s.side_by_side[int64_t(r / 4) * 4 * s.key_width + 4 * c + r % 4] = r < job.rows() ? rows[int64_t(r) * s.key_width + c] : 0;
    }

    // Turn what meets the keys of block `block` to its first token.
    KVBITS_STAGE void turn_to(int block) {
        const int pairs = job.pairs();
        const int64_t at = job.base_batch * batch + job.base_block * block;
        const float *cos = job.base_cos + at, *sin = job.base_sin + at;
        for (int r = 0; r < job.rows() && job.key_mean; ++r) {
            const float* __restrict from = s.swing + int64_t(r) * 2 * pairs;
            float* __restrict to = s.swung + int64_t(r) * 2 * pairs;
            turn_back(from, cos, sin, pairs, false, to);
        }
        if (!job.turned) return;
        for (int r = 0; r < job.rows(); ++r) {
            const float* row = packed + int64_t(r) * s.key_width;
            float* back = s.back + int64_t(r) * s.key_width;
            turn_back(row, cos, sin, pairs, job.steps->interleaved, back);
            for (int c = 2 * pairs; c < s.key_width; ++c) back[c] = row[c];
        }
        lay_side_by_side(s.back);
    }

    // Channels of group g, and the words of a key tile that hold them.
    struct Group { int begin, end, first, last; };
    static Group group_of(const Side& side, int g) {
        const int begin = g * side.length, end = begin + side.length < side.channels ? begin + side.length : side.channels;
        return {begin, end, begin / 4, (end + 3) / 4};
    }

    void prepare_per_token() {
        const Side& k = job.record.key;
        const int width = Scratch::halves_width(k);
        for (int r = 0; r < job.rows(); ++r) {
            int64_t at = int64_t(r) * width;
            for (int g = 0; g < k.groups; ++g) {
                const Group here = group_of(k, g);
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
    void prepare_fixed() {
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

    // -- scores --------------------------------------------------------------------------------------------------

    void packed_scores(const uint8_t* record, int first_row, int rows) {
        const Side& k = job.record.key;
        const int tokens = job.record.tokens;
        if (shorts)
            short_scores(first_row, rows);
        else if (float_path())
            float_scores(record, first_row, rows);
        else if (k.per == Per::token)
            scores_per_token(first_row, rows);
        else
            scores_per_channel(first_row, rows);
        if (k.outliers) sparse_scores(record, first_row, rows);
        if (job.key_mean && job.steps) mean_scores(first_row, rows);
        for (int r = 0; r < rows; ++r) {
            const float constant = s.mean[first_row + r];
            if (constant == 0) continue;
            float* score = s.score + int64_t(r) * s.tokens;
            for (int t = 0; t < tokens; ++t) score[t] += constant;
        }
    }

    KVBITS_STAGE void scores_per_token(int first_row, int rows) {
        const Side& k = job.record.key;
        const int tokens = job.record.tokens, tiles = padded(tokens) / 16, width = Scratch::halves_width(k);
        over_rows(rows, [&](auto n, int first) {
            constexpr int N = decltype(n)::value;
            for (int g = 0; g < k.groups; ++g) {
                const Group here = group_of(k, g);
                const uint8_t *high[N], *low[N];
                float* out[N];
                for (int i = 0; i < N; ++i) {
                    const int64_t at = int64_t(first_row + first + i) * width + int64_t(g) * padded(k.length + 8, 64);
                    high[i] = s.query_high + at;
                    low[i] = s.query_low + at;
                    out[i] = s.dots + int64_t(i) * s.tokens;
                }
                integer_dots<I, N>(keys, 0, tiles, here.first, here.last, high, low, key_levels, out);
                const float *scale = s.scale_k + int64_t(g) * tokens, *zero = s.zero_k + int64_t(g) * tokens;
                for (int i = 0; i < N; ++i) {
                    const Halves& x = s.halves[(first_row + first + i) * k.groups + g];
                    const f32 factor = splat<f32>(key_levels.scale(x)), offset = splat<f32>(key_levels.offset(x));
                    float* score = s.score + int64_t(first + i) * s.tokens;
                    for (int t = 0; t < tokens; t += I::W) {
                        f32 value = I::fma(load<f32>(out[i] + t), factor, offset);
                        if (k.zero) value = I::fma(load<f32>(zero + t), splat<f32>(-x.total), value);
                        value *= load<f32>(scale + t);
                        store(score + t, g ? load<f32>(score + t) + value : value);
                    }
                }
            }
        });
    }

    KVBITS_STAGE void scores_per_channel(int first_row, int rows) {
        const Side& k = job.record.key;
        const int tokens = job.record.tokens;
        const int length = k.fixed ? padded(tokens) : k.length, count = k.fixed ? 1 : k.groups;
        const int width = Scratch::halves_width(k);
        over_rows(rows, [&](auto n, int first) {
            constexpr int N = decltype(n)::value;
            for (int g = 0; g < count; ++g) {
                const uint8_t *high[N], *low[N];
                float *out[N], constant[N];
                Halves made[N];
                for (int i = 0; i < N; ++i) {
                    const int row = first_row + first + i;
                    constant[i] = 0;
                    out[i] = s.score + int64_t(first + i) * s.tokens + g * length;
                    if (k.fixed) {
                        made[i] = s.halves[row];
                        high[i] = s.query_high + int64_t(row) * width;
                        low[i] = s.query_low + int64_t(row) * width;
                        continue;
                    }
                    const float *scale = s.scale_k + int64_t(g) * k.channels, *zero = s.zero_k + int64_t(g) * k.channels;
                    const float* query = packed + int64_t(row) * s.key_width;
                    f32 sum_of_zeros{};
                    for (int c = 0; c < s.key_width; c += I::W) {
                        const f32 x = c + I::W <= k.channels ? load<f32>(query + c) * load<f32>(scale + c) : last(query, scale, c);
                        store(s.weights + c, x);
                        if (k.zero) sum_of_zeros += c + I::W <= k.channels ? x * load<f32>(zero + c) : last(s.weights, zero, c);
                    }
                    constant[i] = -sum(sum_of_zeros);
                    uint8_t *to_high = s.high + i * (s.key_width + 64), *to_low = s.low + i * (s.key_width + 64);
                    made[i] = halve<I>(s.weights, s.key_width, to_high, to_low);
                    high[i] = to_high;
                    low[i] = to_low;
                }
                integer_dots<I, N>(keys, g * (length / 16), length / 16, 0, k.channels / 4, high, low, key_levels, out);
                for (int i = 0; i < N; ++i) {
                    const f32 factor = splat<f32>(key_levels.scale(made[i]));
                    const f32 offset = splat<f32>(key_levels.offset(made[i]) + constant[i]);
                    for (int t = 0; t < length; t += I::W) store(out[i] + t, I::fma(load<f32>(out[i] + t), factor, offset));
                }
            }
        });
    }

    // The product of the last, incomplete vectors.
    f32 last(const float* x, const float* y, int c) const {
        f32 product{};
        for (int i = 0; c + i < job.record.key.channels && i < I::W; ++i) product[i] = x[c + i] * y[c + i];
        return product;
    }

    void float_scores(const uint8_t* record, int first_row, int rows) {
        const Side& k = job.record.key;
        const int tokens = job.record.tokens;
        const float* query = job.turned ? s.back : packed;
        const bool apply = job.turned || k.per == Per::channel;
        for (int t = 0; t < tokens; t += 16) {
            const int here = tokens - t < 16 ? tokens - t : 16;
            if (k.levels == Levels::e4m3 && !apply) {
                over_tile(query, first_row, rows, t, [&](auto n, const float* const* q, float* const* out) {
                    e4m3_dots<I, decltype(n)::value>(keys, t / 16, k.channels, q, out);
                });
                continue;
            }
            if (k.levels == Levels::exact)
                exact_keys(record + k.codes + int64_t(t) * k.channels * size_of(k.type), k.channels * size_of(k.type), here);
            else
                float_keys<I>(k, keys, t / 16, tokens, apply, s.scale_k, s.zero_k, s.keys);
            if (job.turned) turn_keys<I>(s.keys, *job.steps, t / 16);
            meet_keys(query, first_row, rows, t);
        }
        if (apply || k.levels == Levels::exact) return;
        for (int r = 0; r < rows; ++r)
            for (int t = 0; t < tokens; ++t) s.score[int64_t(r) * s.tokens + t] *= s.scale_k[k.per == Per::token ? t : 0];
    }

    ShortFactors factors() const {
        const Side& k = job.record.key;
        return {s.factor_k, s.offset_k, s.unit_k, k.per == Per::token ? 2 * job.record.tokens : s.key_width};
    }

    void short_scores(int first_row, int rows) {
        const Side& k = job.record.key;
        const bool per_token = k.per == Per::token;
        shorten_rows(first_row, rows);
        const auto turned = k.levels == Levels::e4m3 ? turned_tile<I, Levels::e4m3, false, false>
                          : k.levels == Levels::table ? turned_tile_of<Levels::table>() : turned_tile_of<Levels::uniform>();
        for (int tile = 0; tile < job.record.tokens / 16; ++tile) {
            turned(k, short_levels, keys, tile, *job.steps, factors(), s.short_keys);
            over_rows(rows, [&](auto n, int first) {
                constexpr int N = decltype(n)::value;
                const int16_t* query[N];
                const float* steps[N];
                float* out[N];
                for (int i = 0; i < N; ++i) {
                    query[i] = s.short_query + int64_t(first + i) * s.key_width;
                    steps[i] = s.step_k + int64_t(first + i) * (s.key_width / chunk + 1);
                    out[i] = s.score + int64_t(first + i) * s.tokens + 16 * tile;
                }
                short_dots<I, N>(s.short_keys, k.channels, query, steps, out);
            });
        }
        for (int r = 0; r < rows && per_token; ++r) {
            float* score = s.score + int64_t(r) * s.tokens;
            for (int t = 0; t < job.record.tokens; t += I::W) store(score + t, load<f32>(score + t) * load<f32>(s.unit_k + t));
        }
    }

    template <Levels LEVELS> auto turned_tile_of() const {
        const bool top = keys.planes == 2;
        if (job.record.key.per == Per::token) return top ? turned_tile<I, LEVELS, true, true> : turned_tile<I, LEVELS, false, true>;
        return top ? turned_tile<I, LEVELS, true, false> : turned_tile<I, LEVELS, false, false>;
    }

    KVBITS_STAGE void shorten_rows(int first_row, int rows) {
        const bool per_token = job.record.key.per == Per::token;
        const int turning = 2 * job.pairs();
        for (int r = 0; r < rows; ++r) {
            const float* row = s.back + int64_t(first_row + r) * s.key_width;
            for (int c = 0; c < s.key_width; ++c) {
                const float unit = per_token || c >= job.record.key.channels ? 1.0f : s.unit_k[c];
                s.weights[c] = row[c] * unit * (c < turning ? job.steps->norm : 1.0f);
            }
            shorten<I>(s.weights, s.key_width, s.short_query + int64_t(r) * s.key_width, s.step_k + int64_t(r) * (s.key_width / chunk + 1));
        }
    }

    void mean_scores(int first_row, int rows) {
        const int pairs = job.pairs();
        over_rows(rows, [&](auto n, int first) {
            constexpr int N = decltype(n)::value;
            const float *a[N], *b[N];
            for (int i = 0; i < N; ++i) {
                a[i] = s.swung + int64_t(first_row + first + i) * 2 * pairs;
                b[i] = a[i] + pairs;
            }
            for (int t = 0; t < job.record.tokens; t += 16) {
                float* out[N];
                for (int i = 0; i < N; ++i) out[i] = s.score + int64_t(first + i) * s.tokens + t;
                mean_dots<I, N>(*job.steps, t / 16, a, b, out);
            }
        });
    }

    void meet_keys(const float* query, int first_row, int rows, int t) {
        over_tile(query, first_row, rows, t, [&](auto n, const float* const* q, float* const* out) {
            float_dots<I, decltype(n)::value>(s.keys, job.record.key.channels, q, out);
        });
    }

    // f(N, query rows, where their scores of the tile at token t go).
    template <class F> void over_tile(const float* query, int first_row, int rows, int t, F&& f) {
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

    // Exact keys of up to 16 tokens, transposed.
    KVBITS_STAGE void exact_keys(const uint8_t* rows, ptrdiff_t stride, int count, Type type = Type::none) {
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

    // -- outliers ------------------------------------------------------------------------------------------------

    struct Entries {
        const uint16_t* index;
        const uint16_t* value;
        uint64_t inverse;
        int token(int e) const { return int(index[e] * inverse >> 32); }
    };

    Entries entries(const Side& side, const uint8_t* record) const {
        return {reinterpret_cast<const uint16_t*>(record + side.outlier_index),
                reinterpret_cast<const uint16_t*>(record + side.outlier_value),
                ((uint64_t(1) << 32) + uint64_t(side.channels) - 1) / uint64_t(side.channels)};
    }

    void sparse_scores(const uint8_t* record, int first_row, int rows) {
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
    template <class four> four factor_of(const float* query, int token, int c) const {
        const four own = load<four>(query + 4 * c);
        if (!job.turned || c >= 2 * job.pairs()) return own;
        const int pairs = job.pairs();
        const bool interleaved = job.steps->interleaved, second = interleaved ? c % 2 : c >= pairs;
        const int pair = interleaved ? c / 2 : second ? c - pairs : c, other = interleaved ? c ^ 1 : second ? c - pairs : c + pairs;
        const size_t at = size_t(token / 16) * size_t(pairs) + size_t(pair);
        const float cos = job.steps->cos[at].at[token % 16], sin = job.steps->sin[at].at[token % 16];
        return own * cos + load<four>(query + 4 * other) * (second ? -sin : sin);
    }

    void sparse_values(const uint8_t* record, int rows, Partial& partial, int first_row) {
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

    // -- softmax -------------------------------------------------------------------------------------------------

    float peak_weight[batch_rows];  // of each row of the last weigh()

    // Turn the scores of `rows` rows over `tokens` tokens into weights against the running maximum.
    KVBITS_STAGE void weigh(Partial& partial, int first_row, int rows, int tokens, bool visible, int first_token, int gap_from, int gap) {
        int biased = -1;
        for (int r = 0; r < rows; ++r) {
            const int row = first_row + r;
            float* score = s.score + int64_t(r) * s.tokens;
            if (job.softcap > 0) cap(score, tokens);
            if (!visible && !sees_all(row % job.queries, tokens, first_token, gap_from, gap)) {
                const int which = job.mask_heads > 1 ? row : row % job.queries;
                if (biased != which) make_bias(row, tokens, first_token, gap_from, gap);
                biased = which;
                for (int t = 0; t < tokens; t += I::W) {
                    const f32 bias = load<f32>(s.bias + t);  // what is hidden stays hidden, also where it is NaN
                    store(score + t, bias == -__builtin_inff() ? bias : load<f32>(score + t) + bias);
                }
            }
            const int whole = padded(tokens);
            for (int t = tokens; t < whole; ++t) score[t] = -__builtin_inff();
            f32 peak = splat<f32>(-__builtin_inff());
            for (int t = 0; t < whole; t += I::W) peak = maximum<f32>(load<f32>(score + t), peak);
            const float top = largest(peak), old = partial.top(row);
            // A NaN among the scores loses every comparison; it still reaches the sums below.
            const float now = top > old ? top : old;
            peak_weight[r] = now == -__builtin_inff() ? 0.0f : __builtin_expf(top - now);
            if (now == -__builtin_inff()) {  // nothing seen, or nothing but NaN
                f32 all{};
                for (int t = 0; t < whole; t += I::W) all += load<f32>(score + t);
                const float total = sum(all);
                if (total != total) partial.weight(row) = total;
                std::memset(score, 0, sizeof(float) * size_t(whole));
                continue;
            }
            if (now > old) {
                const float factor = old == -__builtin_inff() ? 0.0f : __builtin_expf(old - now);
                partial.top(row) = now;
                partial.weight(row) *= factor;
                float* total = partial.total(row);
                for (int c = 0; c < s.value_width; c += I::W) store(total + c, load<f32>(total + c) * factor);
            }
            f32 sum_of_weights{};
            for (int t = 0; t < whole; t += I::W) {
                const f32 w = exponential<I>(load<f32>(score + t) - now);
                store(score + t, w);
                sum_of_weights += w;
            }
            partial.weight(row) += sum(sum_of_weights);
        }
    }

    void cap(float* score, int tokens) const {  // softcap * tanh(score / softcap)
        for (int t = 0; t < tokens; t += I::W) {
            const f32 x = load<f32>(score + t) * (1.0f / job.softcap);
            const f32 magnitude = maximum<f32>(x, -x), e = exponential<I>(magnitude * -2.0f);
            const f32 y = (1.0f - e) / (1.0f + e);
            store(score + t, (x < 0.0f ? -y : y) * job.softcap);
        }
    }

    // Whether a query certainly sees own tokens first_token .. , as make_bias counts them; asked before any mask is read.
    bool sees_all(int query, int tokens, int first_token, int gap_from, int gap) const {
        const int64_t last = first_token + tokens - 1 + (first_token + tokens - 1 >= gap_from ? gap : 0);
        const int64_t own_column = job.first_query_column + query;
        return !job.mask.data && !job.column_of && first_token >= job.offset && last <= own_column &&
               (job.window <= 0 || first_token > own_column - job.window);
    }

    // The same without padding, where neighbouring tokens are neighbouring columns of the mask: whole vectors.
    bool make_bias_of_row(const uint8_t* mask_row, int64_t first, int tokens) {
        if (first < job.offset || first - job.offset + tokens > job.mask_columns) return false;
        const uint8_t* at = mask_row + (first - job.offset) * job.mask.stride[3];
        if (job.mask.type != Type::boolean) {
            if (job.mask.stride[3] != size_of(job.mask.type)) return false;
            to_float<I>(job.mask.type, at, tokens, s.bias);
            return true;
        }
        if (job.mask.stride[3] != 1) return false;
        const f32 hidden = splat<f32>(-__builtin_inff());
        int t = 0;
        for (; t + I::W <= tokens; t += I::W) {
            const i32 seen = __builtin_convertvector(load<typename I::u8>(at + t), i32);
            store(s.bias + t, seen == 0 ? hidden : f32{});
        }
        for (; t < tokens; ++t) s.bias[t] = at[t] ? 0 : -__builtin_inff();
        return true;
    }

    // What row `row` may see: own tokens first_token .. , with `gap` more added from slot `gap_from` on.
    KVBITS_STAGE void make_bias(int row, int tokens, int first_token, int gap_from, int gap) {
        const int query = row % job.queries, q_head = head * job.group + row / job.queries;
        const int64_t own_column = job.first_query_column + query;
        const bool in_row = first_token + tokens <= gap_from || first_token >= gap_from;
        const uint8_t* mask_row = job.mask.data ? job.mask.at(job.mask_batch > 1 ? batch : 0, job.mask_heads > 1 ? q_head : 0, query) : nullptr;
        if (mask_row && in_row && !job.column_of && job.window <= 0 &&
            make_bias_of_row(mask_row, first_token + (first_token >= gap_from ? gap : 0), tokens)) {
            for (int t = tokens; t < padded(tokens); ++t) s.bias[t] = 0;
            return;
        }
        for (int t = 0; t < tokens; ++t) {
            const int64_t token = first_token + t + (first_token + t >= gap_from ? gap : 0);
            int64_t column = token;
            if (job.column_of) column = token < job.columns_known ? job.column_of[batch * job.columns_known + token] : -1;
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
            s.bias[t] = bias;
        }
        for (int t = tokens; t < padded(tokens); ++t) s.bias[t] = 0;
    }

    // -- values --------------------------------------------------------------------------------------------------

    void packed_values(const uint8_t* record, Partial& partial, int first_row, int rows) {
        const Side& v = job.record.value;
        const int tokens = job.record.tokens;
        if (v.outliers) sparse_values(record, rows, partial, first_row);
        if (floats(v)) {
            if (v.levels == Levels::e4m3)
                for (int r = 0; r < rows; ++r)
                    for (int t = 0; t < tokens; ++t)
                        s.score[int64_t(r) * s.tokens + t] *= v.per == Per::token ? s.scale_v[t] : s.scale_v[0];
            if (v.levels == Levels::e4m3) {
                for (int r = 0; r < rows; ++r)
                    for (int t = tokens; t < padded(tokens); ++t) s.score[int64_t(r) * s.tokens + t] = 0;
                over_rows(rows, [&](auto n, int first) {
                    constexpr int N = decltype(n)::value;
                    const float* weight[N];
                    float* total[N];
                    for (int i = 0; i < N; ++i) {
                        weight[i] = s.score + int64_t(first + i) * s.tokens;
                        total[i] = partial.total(first_row + first + i);
                    }
                    e4m3_sums<I, N>(values, weight, total);
                });
                return;
            }
            const ptrdiff_t stride = ptrdiff_t(v.channels) * size_of(v.type);
            for (int t = 0; t < tokens; t += 16) {
                const int here = tokens - t < 16 ? tokens - t : 16;
                float_rows<I>(v, record + v.codes + t * stride, stride, here, s.value_width, s.rows);
                meet_values(partial, first_row, rows, t, here);
            }
            return;
        }
        over_rows(rows, [&](auto n, int first) {
            if (v.per == Per::token)
                values_per_token<decltype(n)::value>(partial, first_row, first);
            else
                values_per_channel<decltype(n)::value>(partial, first_row, first);
        });
    }

    void meet_values(Partial& partial, int first_row, int rows, int t, int count) {
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

    template <int N> KVBITS_STAGE void values_per_token(Partial& partial, int first_row, int first) {
        const Side& v = job.record.value;
        const int tokens = job.record.tokens, whole = padded(tokens);
        for (int g = 0; g < v.groups; ++g) {
            const Group here = group_of(v, g);
            const float *scale = s.scale_v + int64_t(g) * tokens, *zero = s.zero_v + int64_t(g) * tokens;
            f32 peak{};
            for (int t = 0; t < tokens; t += I::W) {
                const f32 x = live(load<f32>(scale + t), t, tokens);
                peak = maximum<f32>(peak, maximum<f32>(x, -x));
            }
            const float largest_scale = largest(peak);
            const uint8_t *high[N], *low[N];
            f32 factor[N], offset[N];
            float* total[N];
            for (int i = 0; i < N; ++i) {
                const float* p = s.score + int64_t(first + i) * s.tokens;
                uint8_t *to_high = s.high + i * (whole + 64), *to_low = s.low + i * (whole + 64);
                Halver<I> halver(peak_weight[first + i] * largest_scale);
                f32 zeros{};
                for (int t = 0; t < whole; t += I::W) {
                    const f32 w = live(load<f32>(p + t) * load<f32>(scale + t), t, tokens);
                    if (v.zero) zeros = I::fma(w, live(load<f32>(zero + t), t, tokens), zeros);
                    halver.put(w, to_high + t, to_low + t);
                }
                const Halves made = halver.made();
                high[i] = to_high;
                low[i] = to_low;
                factor[i] = splat<f32>(value_levels.scale(made));
                offset[i] = splat<f32>(value_levels.offset(made) - sum(zeros));
                total[i] = partial.total(first_row + first + i);
            }
            integer_sums<I, N>(values, 0, values.tiles, here.begin, here.end, high, low, value_levels, [&](int c, int n, f32 dots) {
                                   f32 more = I::fma(dots, factor[n], offset[n]);
                                   if (c < here.begin || c + I::W > here.end)
                                       for (int j = 0; j < I::W; ++j)
                                           if (c + j < here.begin || c + j >= here.end) more[j] = 0;
                                   store(total[n] + c, load<f32>(total[n] + c) + more);
                               });
        }
    }

    template <int N> KVBITS_STAGE void values_per_channel(Partial& partial, int first_row, int first) {
        const Side& v = job.record.value;
        const int tokens = job.record.tokens, whole = padded(tokens);
        const int length = v.fixed ? whole : v.length, count = v.fixed ? 1 : v.groups;
        for (int g = 0; g < count; ++g) {
            const float *scale = s.scale_v + int64_t(g) * v.channels, *zero = s.zero_v + int64_t(g) * v.channels;
            const uint8_t *high[N], *low[N];
            float factor[N], offset[N], weight[N];
            float* total[N];
            for (int i = 0; i < N; ++i) {
                const float* p = s.score + int64_t(first + i) * s.tokens + g * length;
                uint8_t *to_high = s.high + i * (whole + 64), *to_low = s.low + i * (whole + 64);
                const Halves made = halve<I>(p, length, to_high, to_low);
                high[i] = to_high;
                low[i] = to_low;
                factor[i] = value_levels.scale(made);
                offset[i] = value_levels.offset(made);
                weight[i] = made.total;
                total[i] = partial.total(first_row + first + i);
            }
            integer_sums<I, N>(values, g * (length / 4), v.fixed ? values.tiles : (g + 1) * (length / 4), 0, v.channels, high, low,
                               value_levels, [&](int c, int n, f32 dots) {
                                   f32 level = I::fma(dots, splat<f32>(factor[n]), splat<f32>(offset[n]));
                                   if (v.zero) level = I::fma(load<f32>(zero + c), splat<f32>(-weight[n]), level);
                                   f32 more = level * load<f32>(scale + c);
                                   if (c + I::W > v.channels)
                                       for (int j = 0; j < I::W; ++j)
                                           if (c + j >= v.channels) more[j] = 0;
                                   store(total[n] + c, load<f32>(total[n] + c) + more);
                               });
        }
    }

    // x with zeros from token `tokens` on.
    static f32 live(f32 x, int t, int tokens) {
        for (int j = tokens - t < 0 ? 0 : tokens - t; j < I::W; ++j) x[j] = 0;
        return x;
    }

    // -- pieces --------------------------------------------------------------------------------------------------

    // Block `block` of the row that begin() named, for all its query rows.
    void meet_block(Partial& partial, int block) {
        const Record& record = job.record;
        const uint8_t* at = job.pool + (job.table[batch * job.table_stride + block] * job.heads + head) * record.bytes;
        const int first_token = job.first_token + block * record.tokens;
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
        if (job.steps) turn_to(block);
        for (int first = 0; first < job.rows(); first += batch_rows) {
            const int rows = job.rows() - first < batch_rows ? job.rows() - first : batch_rows;
            packed_scores(at, first, rows);
            weigh(partial, first, rows, record.tokens, job.packed_visible, first_token, 1 << 30, 0);
            packed_values(at, partial, first, rows);
        }
    }

    const float* fixed(const float* all, const Side& side) const {
        if (!side.fixed || !all) return nullptr;
        return side.per == Per::layer ? all : all + int64_t(head) * side.channels;
    }

    // Exact tokens first .. last - 1 of the row that begin() named.
    void meet_exact(Partial& partial, int first, int last) {
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
                    meet_keys(s.query, rows_first, rows, t);
                }
                const int gap = job.counts[batch] * job.record.tokens + job.dropped;
                weigh(partial, rows_first, rows, count, job.exact_visible, from, job.sinks, gap);
                for (int t = 0; t < count; t += 16) {
                    const int here = count - t < 16 ? count - t : 16;
                    float_rows<I>(v, job.values.at(batch, head, from + t), job.values.stride[2], here, s.value_width, s.rows);
                    meet_values(partial, rows_first, rows, t, here);
                }
            }
        }
    }
};

}  // namespace
}  // namespace kvbits
