// A random call of attention: record, pool, exact tokens, transforms, mask, and the memory that all of them lie in.
#pragma once
#include <algorithm>
#include <memory>

#include "numbers.hpp"

namespace kvbits {

inline Side side_of(int tokens, int channels, int64_t& offset) {
    Side side;
    side.channels = channels;
    const auto place = [&](int64_t bytes) {
        const int64_t at = offset;
        offset = (offset + bytes + 63) / 64 * 64;
        return at;
    };
    const int kind = any(0, 9);
    if (kind == 0) {
        side.levels = Levels::exact;
        side.type = one_of({Type::f32, Type::bf16, Type::f16});
        side.codes = place(int64_t(tokens) * channels * size_of(side.type));
        return side;
    }
    side.levels = kind == 1 ? Levels::e4m3 : kind < 5 ? Levels::table : Levels::uniform;
    side.bits = kind == 1 ? 8 : side.levels == Levels::table ? any(2, 4) : one_of({2, 3, 4, 8});
    for (int i = 0; i < side.levels_count(); ++i) side.table[i] = side.levels == Levels::table ? normal() : float(i);
    side.codes = place(int64_t(tokens) * channels * side.bits / 8);
    side.per = kind == 1 ? one_of({Per::token, Per::layer}) : one_of({Per::token, Per::channel});
    side.zero = kind != 1 && chance(80);
    if (side.per == Per::token) {
        const int group = kind == 1 ? channels : one_of({16, 32, 64, 128});
        const int count = (channels + group - 1) / group;
        side.length = (channels + count - 1) / count;
        side.groups = (channels + side.length - 1) / side.length;
    } else {
        side.fixed = side.per == Per::layer || tokens % 16 || chance(30);
        side.length = side.fixed ? tokens : 16;
        for (const int length : {32, 64, 128})
            if (!side.fixed && tokens % length == 0 && chance(60)) side.length = length;
        side.groups = tokens / side.length;
    }
    if (!side.fixed) {
        const int64_t count = int64_t(side.groups) * (side.per == Per::token ? tokens : channels);
        side.scale = place(2 * count);
        if (side.zero) side.zeros = place(2 * count);
    }
    if (chance(25) && tokens * channels <= 65536) {
        side.outliers = any(1, tokens * channels / 50 + 1);
        side.outlier_index = place(2 * side.outliers);
        side.outlier_value = place(2 * side.outliers);
    }
    return side;
}

inline void fill(const Side& side, int tokens, uint8_t* record) {
    const auto put_half = [&](int64_t at, uint16_t half) { std::memcpy(record + at, &half, 2); };
    if (side.levels == Levels::exact) {
        for (int64_t n = 0; n < int64_t(tokens) * side.channels; ++n) {
            const float x = normal();
            if (side.type == Type::f32) std::memcpy(record + side.codes + 4 * n, &x, 4);
            else put_half(side.codes + 2 * n, side.type == Type::bf16 ? bf16(x) : f16(x));
        }
        return;
    }
    for (int64_t n = 0; n < int64_t(tokens) * side.channels * side.bits / 8; ++n) {
        uint8_t byte = uint8_t(any(0, 255));
        if (side.levels == Levels::e4m3 && (byte & 127) == 127) byte ^= 1;
        record[side.codes + n] = byte;
    }
    const float step = 1.0f / float(side.levels == Levels::e4m3 ? 100 : side.levels == Levels::table ? 1 : side.levels_count());
    if (!side.fixed)
        for (int64_t n = 0; n < int64_t(side.groups) * (side.per == Per::token ? tokens : side.channels); ++n) {
            put_half(side.scale + 2 * n, bf16(normal() * step));
            if (side.zero) put_half(side.zeros + 2 * n, f16(normal() * float(side.levels == Levels::table ? 1 : side.levels_count())));
        }
    std::vector<int> index(size_t(side.outliers));
    for (auto& i : index) i = any(0, tokens * side.channels - 1);
    std::sort(index.begin(), index.end());
    for (int e = 0; e < side.outliers; ++e) {
        put_half(side.outlier_index + 2 * e, uint16_t(index[size_t(e)]));
        put_half(side.outlier_value + 2 * e, bf16(normal() * 3));
    }
}

class RandomJob {
public:
    Job job;
    Type type;  // of exact tokens
    int blocks; // of the longest row
    std::vector<int64_t> table;
    std::unique_ptr<Steps> steps;

    RandomJob() {
        shape();
        memory();
        transforms();
        visibility();
    }

    int query_heads() const { return job.heads * job.group; }

private:
    std::vector<uint8_t> pool;
    Tensor keys, values, query, mask;
    std::vector<float> statics[4], means[2], balance, rotations[2], bases[2], sinks;
    int exact;  // tokens of the longest row

    float* floats(std::vector<float>& all, int64_t count, float scale) {
        all.resize(size_t(count));
        for (auto& x : all) x = normal() * scale;
        return all.data();
    }

    void shape() {
        const int tokens = one_of({8, 16, 24, 32, 64, 128, 128, 128, 256});
        blocks = any(0, 5);
        const int key_channels = 8 * any(1, 20), value_channels = chance(70) ? key_channels : 8 * any(1, 20);
        int64_t offset = 0;
        job.record.tokens = tokens;
        job.record.key = side_of(tokens, key_channels, offset);
        job.record.value = side_of(tokens, value_channels, offset);
        job.record.bytes = offset;
        job.batch = any(1, 2);
        job.heads = any(1, 3);
        job.group = any(1, 6);
        job.queries = chance(70) ? 1 : any(2, 20);
        exact = any(0, 150) + (blocks == 0);
        job.sinks = exact ? any(0, exact < 4 ? exact : 4) : 0;
        job.dropped = chance(20) ? any(0, 50) : 0;
    }

    void memory() {
        const int pool_blocks = job.batch * blocks + 1;
        pool.resize(size_t(pool_blocks * job.heads * job.record.bytes));
        for (int n = 0; n < pool_blocks * job.heads; ++n)
            for (const Side* side : {&job.record.key, &job.record.value})
                fill(*side, job.record.tokens, pool.data() + n * job.record.bytes);
        table.resize(size_t(job.batch * blocks));
        for (auto& entry : table) entry = any(0, pool_blocks - 1);
        job.pool = pool.data();
        job.table = table.data();
        job.table_stride = blocks;
        type = one_of({Type::f32, Type::bf16, Type::f16});
        keys.make(type, {job.batch, job.heads, exact, job.record.key.channels});
        values.make(type, {job.batch, job.heads, exact, job.record.value.channels});
        query.make(one_of({Type::f32, type}), {job.batch, query_heads(), job.queries, job.record.key.channels});
        job.keys = keys.array;
        job.values = values.array;
        job.query = query.array;
        for (int b = 0; b < job.batch; ++b) {
            job.counts.push_back(b ? any(0, blocks) : blocks);
            job.exact_counts.push_back(b ? any(0, exact) : exact);
        }
    }

    void transforms() {
        const Side &k = job.record.key, &v = job.record.value;
        const auto step = [](const Side& side) { return 1.0f / float(side.levels == Levels::e4m3 ? 100 : side.levels_count()); };
        if (k.fixed) job.key_scale = floats(statics[0], k.per == Per::layer ? 1 : job.heads * k.channels, step(k));
        if (k.fixed && k.zero) job.key_zero = floats(statics[1], job.heads * k.channels, 1);
        if (v.fixed) job.value_scale = floats(statics[2], v.per == Per::layer ? 1 : job.heads * v.channels, step(v));
        if (v.fixed && v.zero) job.value_zero = floats(statics[3], job.heads * v.channels, 1);
        if (chance(15)) job.key_mean = floats(means[0], job.heads * k.channels, 1);
        if (chance(15)) job.value_mean = floats(means[1], job.heads * v.channels, 1);
        if (chance(15)) job.value_unrotation = floats(rotations[1], int64_t(v.channels) * v.channels, 0.1f);
        if (chance(40)) rope();
        if (!job.unroped && chance(30)) job.key_rotation = floats(rotations[0], int64_t(k.channels) * k.channels, 0.1f);
        if (!job.unroped && chance(30)) job.key_balance = floats(balance, job.heads * k.channels, 1);
    }

    void rope() {
        const int channels = job.record.key.channels, pairs = chance(50) ? channels / 2 : any(1, channels / 2);
        const int64_t rows = chance(50) ? job.batch : 1, each = blocks * pairs;
        std::vector<float> within[2];
        for (int which = 0; which < 2; ++which) {
            floats(bases[which], rows * each + 1, 0);  // never null
            floats(within[which], int64_t(job.record.tokens) * pairs, 0);
        }
        for (std::vector<float>* cos_sin : {bases, within}) {
            for (size_t i = 0; i < cos_sin[0].size(); ++i) {
                const float angle = normal() * 3;
                cos_sin[0][i] = std::cos(angle);
                cos_sin[1][i] = std::sin(angle);
            }
            for (int which = 0; which < 2; ++which) cos_sin[which].shrink_to_fit();
        }
        steps = std::make_unique<Steps>(within[0].data(), within[1].data(), job.record.tokens, pairs, chance(50));
        job.steps = steps.get();
        job.base_cos = bases[0].data();
        job.base_sin = bases[1].data();
        job.base_batch = rows > 1 ? each : 0;
        job.base_block = pairs;
        job.unroped = chance(60);
    }

    void visibility() {
        const int64_t columns = job.dropped + int64_t(blocks) * job.record.tokens + exact;
        job.offset = chance(20) ? any(0, int(columns / 2)) : 0;
        job.first_query_column = columns - job.queries;
        job.window = chance(20) ? any(1, int(columns)) : 0;
        if (chance(30)) random_mask(columns - job.offset);
        job.scaling = 1.0f / std::sqrt(float(job.record.key.channels));
        job.softcap = chance(20) ? 5.0f : 0.0f;
        if (chance(20)) job.sink_logits = floats(sinks, query_heads(), 1);
    }

    void random_mask(int64_t columns) {
        const Type kind = one_of({Type::boolean, Type::f32, Type::bf16, Type::f16});
        mask.make(kind, {chance(50) ? job.batch : 1, chance(30) ? query_heads() : 1, job.queries, columns}, kind != Type::boolean);
        if (kind == Type::boolean)
            for (auto& byte : mask.memory) byte = chance(80);
        job.mask = mask.array;
        job.mask_batch = int(mask.array.shape[0]);
        job.mask_heads = int(mask.array.shape[1]);
        job.mask_columns = mask.array.shape[3];
    }
};

}  // namespace kvbits
