// Attention of a random call in double precision, over elements as all instruction sets decode them.
#pragma once
#include "random_job.hpp"

namespace kvbits {

// Packed tokens of one row and KV head: keys [tokens, channels] without their mean, the mean of each, and values.
struct Decoded {
    int tokens;
    std::vector<float> keys, means, values;
    bool alike = true;  // every instruction set decodes to the same bits
};

class Truth {
public:
    std::vector<double> outputs, log_sums;  // [batch, query heads, queries, channels], [batch, query heads, queries]
    bool decoded_alike = true;

    explicit Truth(const RandomJob& random) : random(random), job(random.job), k(job.record.key), v(job.record.value) {
        for (int b = 0; b < job.batch; ++b)
            for (int h = 0; h < job.heads; ++h) {
                const Decoded packed = decode(b, h);
                decoded_alike = decoded_alike && packed.alike;
                for (int g = 0; g < job.group; ++g)
                    for (int q = 0; q < job.queries; ++q) attend(packed, b, h, h * job.group + g, q);
            }
    }

private:
    const RandomJob& random;
    const Job& job;
    const Side &k, &v;

    Decoded decode(int b, int h) const {
        const int block = job.record.tokens;
        Decoded out;
        out.tokens = job.counts[size_t(b)] * block;
        out.keys.resize(size_t(out.tokens * k.channels));
        out.means.resize(out.keys.size());
        out.values.resize(size_t(out.tokens * v.channels));
        for (int n = 0; n < job.counts[size_t(b)]; ++n) {
            const int64_t place = random.table[size_t(b * random.blocks + n)] * job.heads + h;
            const uint8_t* record = job.pool + place * job.record.bytes;
            float* keys = out.keys.data() + n * block * k.channels;
            float* values = out.values.data() + n * block * v.channels;
            out.alike = decode(k, record, h, job.key_scale, job.key_zero, keys) && out.alike;
            out.alike = decode(v, record, h, job.value_scale, job.value_zero, values) && out.alike;
            // Means stay apart: only they are multiplied with the query itself where packed keys are rotated.
            for (int t = 0; t < block; ++t) {
                float *key = keys + t * k.channels, *mean = out.means.data() + (n * block + t) * k.channels;
                for (int c = 0; c < k.channels && job.key_mean; ++c) mean[c] = job.key_mean[h * k.channels + c];
                rope(mean, b, n, t);
                if (job.unroped) rope(key, b, n, t);
            }
        }
        return out;
    }

    // One side of one record with every instruction set; false where two of them differ.
    bool decode(const Side& side, const uint8_t* record, int h, const float* scale, const float* zero, float* rows) const {
        const int tokens = job.record.tokens;
        const int64_t head = side.per == Per::layer ? 0 : int64_t(h) * side.channels;
        bool alike = true;
        for (const Kernels* kernels : all_kernels()) {
            std::vector<uint8_t> scratch(size_t(kernels->decode_scratch_bytes(side, tokens)));
            std::vector<float> again(size_t(tokens * side.channels));
            kernels->decode(side, tokens, record, scale ? scale + head : nullptr, zero ? zero + head : nullptr, Type::f32,
                            reinterpret_cast<uint8_t*>(again.data()), 4 * side.channels, scratch.data());
            if (kernels != all_kernels().front() && std::memcmp(again.data(), rows, again.size() * 4)) alike = false;
            std::copy(again.begin(), again.end(), rows);
        }
        return alike;
    }

    // The rotary embedding of token t of block n, onto the channels of one key.
    void rope(float* channels, int b, int n, int t) const {
        for (int p = 0; p < job.pairs(); ++p) {
            const size_t within = size_t(t / 16 * job.pairs() + p);
            const int64_t base = job.base_batch * b + job.base_block * n + p;
            const float c0 = job.base_cos[base], s0 = job.base_sin[base];
            const float c1 = random.steps->cos[within].at[t % 16], s1 = random.steps->sin[within].at[t % 16];
            const float cos = c0 * c1 - s0 * s1, sin = s0 * c1 + c0 * s1;
            float &x = channels[random.steps->interleaved ? 2 * p : p];
            float &y = channels[random.steps->interleaved ? 2 * p + 1 : p + job.pairs()];
            const float before = x;
            x = before * cos - y * sin;
            y = y * cos + before * sin;
        }
    }

    // One query over all tokens of its row.
    void attend(const Decoded& packed, int b, int h, int q_head, int q) {
        const int all = packed.tokens + job.exact_counts[size_t(b)];
        std::vector<double> weights = scores(packed, b, h, q_head, q);
        double top = -INFINITY, sum = 0;
        for (const double x : weights) top = x > top ? x : top;
        for (double& x : weights) sum += x = top > -INFINITY ? std::exp(x - top) : 0;
        std::vector<double> exact(size_t(v.channels)), stored(size_t(v.channels));
        for (int t = 0; t < all; ++t)
            for (int c = 0; c < v.channels; ++c) {
                const double weight = weights[size_t(t)];
                if (t >= packed.tokens) exact[size_t(c)] += weight * element(job.values, b, h, t - packed.tokens, c);
                else {
                    stored[size_t(c)] += weight * double(packed.values[size_t(t * v.channels + c)]);
                    if (job.value_mean) exact[size_t(c)] += weight * job.value_mean[h * v.channels + c];
                }
            }
        for (int c = 0; c < v.channels; ++c) {
            double x = job.value_unrotation ? 0 : stored[size_t(c)];
            for (int i = 0; job.value_unrotation && i < v.channels; ++i)
                x += stored[size_t(i)] * job.value_unrotation[i * v.channels + c];
            outputs.push_back(sum > 0 ? (exact[size_t(c)] + x) / sum : 0);
        }
        log_sums.push_back(top > -INFINITY ? top + std::log(sum) : -INFINITY);
    }

    // Of all tokens of a row, packed ones first, and of the sink logit behind them; -inf is not seen.
    std::vector<double> scores(const Decoded& packed, int b, int h, int q_head, int q) const {
        std::vector<double> query(size_t(k.channels)), rotated(size_t(k.channels));
        for (int c = 0; c < k.channels; ++c) query[size_t(c)] = element(job.query, b, q_head, q, c);
        for (int i = 0; i < k.channels; ++i) {
            const double x = query[size_t(i)] * (job.key_balance ? job.key_balance[h * k.channels + i] : 1);
            if (!job.key_rotation) rotated[size_t(i)] = x;
            for (int c = 0; c < k.channels && job.key_rotation; ++c) rotated[size_t(c)] += x * job.key_rotation[i * k.channels + c];
        }
        const int all = packed.tokens + job.exact_counts[size_t(b)];
        std::vector<double> found(size_t(all) + 1, -INFINITY);
        for (int t = 0; t < all; ++t) {
            const int slot = t - packed.tokens;
            double dot = 0;
            for (int c = 0; c < k.channels; ++c) {
                const size_t at = size_t(t * k.channels + c);
                if (slot >= 0) dot += element(job.keys, b, h, slot, c) * query[size_t(c)];
                else dot += double(packed.keys[at]) * rotated[size_t(c)] + double(packed.means[at]) * query[size_t(c)];
            }
            dot *= job.scaling;
            if (job.softcap > 0) dot = job.softcap * std::tanh(dot / job.softcap);
            const int64_t column = slot < 0 ? job.first_token() + t : slot < job.sinks ? slot : slot + packed.tokens + job.dropped;
            found[size_t(t)] = dot + masked(b, q_head, q, column);
        }
        if (job.sink_logits) found[size_t(all)] = job.sink_logits[q_head];
        return found;
    }

    // What a column's mask adds to a score; -inf where the query does not see it.
    double masked(int b, int q_head, int q, int64_t column) const {
        const int64_t own = job.first_query_column + q, place = column - job.offset;
        if (place < 0 || (!job.mask.data && column > own) || (job.window && column <= own - job.window)) return -INFINITY;
        if (!job.mask.data) return 0;
        if (place >= job.mask_columns) return -INFINITY;
        const uint8_t* at = job.mask.at(job.mask_batch > 1 ? b : 0, job.mask_heads > 1 ? q_head : 0, q) + place * size_of(job.mask.type);
        return job.mask.type != Type::boolean ? get(at, job.mask.type) : *at ? 0 : -INFINITY;
    }

    static double element(const Array& array, int b, int h, int t, int c) {
        return get(array.at(b, h, t) + c * size_of(array.type), array.type);
    }
};

}  // namespace kvbits
