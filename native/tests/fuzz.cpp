// Random calls against attention in double precision, for every instruction set, and random blocks through every
// encoder, which must agree to the bit. Meant to run under sanitizers: each
// array is allocated to the byte, so a read beyond it is found.
//
//   fuzz [seconds [seed]]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "../run.hpp"

using namespace kvbits;

namespace {

std::mt19937_64 generator;

int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
float normal() { return std::normal_distribution<float>()(generator); }
bool chance(int percent) { return any(1, 100) <= percent; }
template <class T> T one_of(std::initializer_list<T> all) { return *(all.begin() + any(0, int(all.size()) - 1)); }

uint32_t word_of(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    return word;
}

uint16_t bf16(float x) {
    const uint32_t word = word_of(x);
    return uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t x) {
    const uint32_t word = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &word, 4);
    return f;
}

uint16_t f16(float x) {  // of magnitude 2^-14 .. 65504 or 0, truncated
    const uint32_t word = word_of(x), sign = word >> 16 & 0x8000, exponent = word >> 23 & 255;
    if (exponent < 113) return uint16_t(sign);
    return uint16_t(sign | (exponent - 112) << 10 | (word >> 13 & 1023));
}

void put(std::vector<uint8_t>& memory, int64_t at, Type type, float x) {
    if (type == Type::f32) std::memcpy(&memory[size_t(at)], &x, 4);
    else {
        const uint16_t half = type == Type::bf16 ? bf16(x) : f16(x);
        std::memcpy(&memory[size_t(at)], &half, 2);
    }
}

float get(const uint8_t* at, Type type) {
    float x;
    uint16_t half;
    if (type == Type::f32) {
        std::memcpy(&x, at, 4);
        return x;
    }
    std::memcpy(&half, at, 2);
    if (type == Type::bf16) return from_bf16(half);
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    x = exponent ? std::ldexp(float(1024 + mantissa), exponent - 25) : std::ldexp(float(mantissa), -24);
    return half & 0x8000 ? -x : x;
}

struct Tensor {
    std::vector<uint8_t> memory;
    Array array;

    void make(Type type, std::initializer_list<int64_t> shape, bool random = true) {
        array.type = type;
        array.dims = int(shape.size());
        int i = 0;
        for (const int64_t size : shape) array.shape[i++] = size;
        int64_t stride = size_of(type), count = 1;
        for (i = array.dims - 1; i >= 0; --i) {
            array.stride[i] = stride;
            stride *= array.shape[i];
            count *= array.shape[i];
        }
        memory.assign(size_t(stride), 0);
        for (int64_t n = 0; random && n < count; ++n) put(memory, n * size_of(type), type, normal());
        memory.shrink_to_fit();
        array.data = memory.data();
    }
};

Side side_of(int tokens, int channels, int64_t& offset) {
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

void fill(const Side& side, int tokens, uint8_t* record) {
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

// One random call; returns the worst error over all instruction sets, relative to the largest output.
double once(bool& decoded_alike) {
    Job job;
    const int tokens = one_of({8, 16, 24, 32, 64, 128, 128, 128, 256}), blocks = any(0, 5);
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
    const int q_heads = job.heads * job.group, pool_blocks = job.batch * blocks + 1, held = any(0, 150) + (blocks == 0);
    job.sinks = held ? any(0, held < 4 ? held : 4) : 0;
    job.dropped = chance(20) ? any(0, 50) : 0;
    job.first_token = job.sinks + job.dropped;
    const Side &k = job.record.key, &v = job.record.value;

    std::vector<uint8_t> pool(size_t(pool_blocks * job.heads * offset));
    for (int n = 0; n < pool_blocks * job.heads; ++n) {
        fill(k, tokens, pool.data() + n * offset);
        fill(v, tokens, pool.data() + n * offset);
    }
    std::vector<int64_t> table(size_t(job.batch * blocks));
    for (auto& entry : table) entry = any(0, pool_blocks - 1);
    job.pool = pool.data();
    job.table = table.data();
    job.table_stride = blocks;
    Tensor keys, values, query, out, mask;
    const Type type = one_of({Type::f32, Type::bf16, Type::f16});
    keys.make(type, {job.batch, job.heads, held, key_channels});
    values.make(type, {job.batch, job.heads, held, value_channels});
    query.make(one_of({Type::f32, type}), {job.batch, q_heads, job.queries, key_channels});
    job.keys = keys.array;
    job.values = values.array;
    job.query = query.array;
    for (int b = 0; b < job.batch; ++b) {
        job.counts.push_back(b ? any(0, blocks) : blocks);
        job.held.push_back(b ? any(0, held) : held);
    }
    std::vector<float> statics[4], mean[2], balance, rotation[2], base[2], sinks;
    std::unique_ptr<Steps> steps;
    const auto floats = [&](std::vector<float>& all, int64_t count, float scale) {
        all.resize(size_t(count));
        for (auto& x : all) x = normal() * scale;
        return all.data();
    };
    const auto step = [](const Side& side) { return 1.0f / float(side.levels == Levels::e4m3 ? 100 : side.levels_count()); };
    if (k.fixed) job.key_scale = floats(statics[0], k.per == Per::layer ? 1 : job.heads * k.channels, step(k));
    if (k.fixed && k.zero) job.key_zero = floats(statics[1], job.heads * k.channels, 1);
    if (v.fixed) job.value_scale = floats(statics[2], v.per == Per::layer ? 1 : job.heads * v.channels, step(v));
    if (v.fixed && v.zero) job.value_zero = floats(statics[3], job.heads * v.channels, 1);
    if (chance(15)) job.key_mean = floats(mean[0], job.heads * k.channels, 1);
    if (chance(15)) job.value_mean = floats(mean[1], job.heads * v.channels, 1);
    if (chance(15)) job.value_rotation_back = floats(rotation[1], int64_t(v.channels) * v.channels, 0.1f);
    if (chance(40)) {
        const int pairs = chance(50) ? k.channels / 2 : any(1, k.channels / 2);
        const int64_t rows = chance(50) ? job.batch : 1, each = blocks * pairs;
        std::vector<float> step[2];
        for (int which = 0; which < 2; ++which) {
            floats(base[which], rows * each + 1, 0);  // never null
            floats(step[which], int64_t(tokens) * pairs, 0);
        }
        const auto angles = [](std::vector<float>* cos_sin) {
            for (size_t i = 0; i < cos_sin[0].size(); ++i) {
                const float angle = normal() * 3;
                cos_sin[0][i] = std::cos(angle);
                cos_sin[1][i] = std::sin(angle);
            }
            for (int which = 0; which < 2; ++which) cos_sin[which].shrink_to_fit();
        };
        angles(base);
        angles(step);
        steps = std::make_unique<Steps>(step[0].data(), step[1].data(), tokens, pairs, chance(50));
        job.steps = steps.get();
        job.base_cos = base[0].data();
        job.base_sin = base[1].data();
        job.base_batch = rows > 1 ? each : 0;
        job.base_block = pairs;
        job.turned = chance(60);
    }
    if (!job.turned && chance(30)) job.key_rotation = floats(rotation[0], int64_t(k.channels) * k.channels, 0.1f);
    if (!job.turned && chance(30)) job.key_balance = floats(balance, job.heads * k.channels, 1);
    const int64_t columns = job.dropped + int64_t(blocks) * tokens + held;
    job.offset = chance(20) ? any(0, int(columns / 2)) : 0;
    job.first_query_column = columns - job.queries;
    job.window = chance(20) ? any(1, int(columns)) : 0;
    if (chance(30)) {
        const Type kind = one_of({Type::boolean, Type::f32, Type::bf16, Type::f16});
        mask.make(kind, {chance(50) ? job.batch : 1, chance(30) ? q_heads : 1, job.queries, columns - job.offset}, kind != Type::boolean);
        if (kind == Type::boolean)
            for (auto& byte : mask.memory) byte = chance(80);
        job.mask = mask.array;
        job.mask_batch = int(mask.array.shape[0]);
        job.mask_heads = int(mask.array.shape[1]);
        job.mask_columns = mask.array.shape[3];
    }
    const bool plain = !job.mask.data && !job.window && !job.offset;
    job.packed_visible = plain && job.first_token + blocks * tokens <= job.first_query_column + 1;
    job.exact_visible = plain && job.queries == 1 && job.held == std::vector<int>(size_t(job.batch), held) &&
                        job.counts == std::vector<int>(size_t(job.batch), blocks);
    job.scaling = 1.0f / std::sqrt(float(key_channels));
    job.softcap = chance(20) ? 5.0f : 0.0f;
    if (chance(20)) job.sink_logits = floats(sinks, q_heads, 1);

    // Attention in double precision over what the versions decode, all to the same bits.
    std::vector<double> truth(size_t(job.batch * q_heads * job.queries * v.channels)), true_sums(size_t(job.batch * q_heads * job.queries));
    for (int b = 0; b < job.batch; ++b)
        for (int h = 0; h < job.heads; ++h) {
            const int packed = job.counts[size_t(b)] * tokens, all = packed + job.held[size_t(b)];
            std::vector<float> key(size_t(packed * k.channels)), center(key.size()), value(size_t(packed * v.channels));
            for (int n = 0; n < job.counts[size_t(b)]; ++n) {
                const uint8_t* record = job.pool + (table[size_t(b * blocks + n)] * job.heads + h) * offset;
                for (int which = 0; which < 2; ++which) {
                    const Side& side = which ? v : k;
                    float* rows = which ? value.data() + n * tokens * v.channels : key.data() + n * tokens * k.channels;
                    const float *scale = which ? job.value_scale : job.key_scale, *zero = which ? job.value_zero : job.key_zero;
                    const int64_t move = side.per == Per::layer ? 0 : int64_t(h) * side.channels;
                    for (const Kernels* kernels : all_kernels()) {
                        std::vector<uint8_t> scratch(size_t(kernels->decode_scratch_bytes(side, tokens)));
                        std::vector<float> again(size_t(tokens * side.channels));
                        kernels->decode(side, tokens, record, scale ? scale + move : nullptr, zero ? zero + move : nullptr, Type::f32,
                                        reinterpret_cast<uint8_t*>(again.data()), 4 * side.channels, scratch.data());
                        if (kernels != all_kernels().front() && std::memcmp(again.data(), rows, again.size() * 4)) decoded_alike = false;
                        std::copy(again.begin(), again.end(), rows);
                    }
                }
                // Means stay apart: only they see the query itself where packed keys are rotated.
                for (int t = 0; t < tokens; ++t) {
                    float *row = key.data() + (n * tokens + t) * k.channels, *own = center.data() + (n * tokens + t) * k.channels;
                    for (int c = 0; c < k.channels && job.key_mean; ++c) own[c] = job.key_mean[h * k.channels + c];
                    for (int p = 0; p < job.pairs(); ++p) {
                        const size_t at = size_t(t / 16 * job.pairs() + p);
                        const int64_t from = job.base_batch * b + job.base_block * n + p;
                        const float a = job.base_cos[from], c = job.base_sin[from], d = steps->cos[at].at[t % 16], e = steps->sin[at].at[t % 16];
                        const float cos = a * d - c * e, sin = c * d + a * e;
                        const auto turn = [&](float* all) {
                            float &x = all[steps->interleaved ? 2 * p : p], &y = all[steps->interleaved ? 2 * p + 1 : p + job.pairs()];
                            const float before = x;
                            x = before * cos - y * sin;
                            y = y * cos + before * sin;
                        };
                        turn(own);
                        if (job.turned) turn(row);
                    }
                }
            }
            for (int g = 0; g < job.group; ++g)
                for (int q = 0; q < job.queries; ++q) {
                    const int q_head = h * job.group + g;
                    std::vector<double> own_query(size_t(k.channels)), packed_query(size_t(k.channels));
                    for (int c = 0; c < k.channels; ++c) own_query[size_t(c)] = get(job.query.at(b, q_head, q) + c * size_of(job.query.type), job.query.type);
                    for (int i = 0; i < k.channels; ++i) {
                        const double x = own_query[size_t(i)] * (job.key_balance ? job.key_balance[h * k.channels + i] : 1);
                        if (!job.key_rotation) packed_query[size_t(i)] = x;
                        for (int c = 0; c < k.channels && job.key_rotation; ++c) packed_query[size_t(c)] += x * job.key_rotation[i * k.channels + c];
                    }
                    std::vector<double> score(size_t(all) + 1, -INFINITY);
                    for (int t = 0; t < all; ++t) {
                        const bool is_packed = t < packed;
                        const int slot = t - packed;
                        double dot = 0;
                        const std::vector<double>& from = is_packed ? packed_query : own_query;
                        for (int c = 0; c < k.channels; ++c) {
                            const double x = is_packed ? key[size_t(t * k.channels + c)] : get(job.keys.at(b, h, slot) + c * size_of(type), type);
                            dot += x * from[size_t(c)];
                        }
                        for (int c = 0; c < k.channels && is_packed; ++c)
                            dot += double(center[size_t(t * k.channels + c)]) * own_query[size_t(c)];
                        dot *= job.scaling;
                        if (job.softcap > 0) dot = job.softcap * std::tanh(dot / job.softcap);
                        const int64_t column = is_packed ? job.first_token + t : slot < job.sinks ? slot : slot + packed + job.dropped;
                        const int64_t own = job.first_query_column + q;
                        if (column < job.offset || (!job.mask.data && column > own) || (job.window && column <= own - job.window)) continue;
                        if (job.mask.data) {
                            if (column - job.offset >= job.mask_columns) continue;
                            const uint8_t* at = job.mask.at(job.mask_batch > 1 ? b : 0, job.mask_heads > 1 ? q_head : 0, q) +
                                                (column - job.offset) * size_of(job.mask.type);
                            if (job.mask.type == Type::boolean) {
                                if (!*at) continue;
                            } else {
                                dot += get(at, job.mask.type);
                            }
                        }
                        score[size_t(t)] = dot;
                    }
                    if (job.sink_logits) score[size_t(all)] = job.sink_logits[q_head];
                    double top = -INFINITY, weight = 0;
                    for (const double x : score) top = x > top ? x : top;
                    std::vector<double> sum(size_t(v.channels)), sum_packed(size_t(v.channels));
                    for (int t = 0; t <= all && top > -INFINITY; ++t) {
                        const double p = std::exp(score[size_t(t)] - top);
                        weight += p;
                        if (t == all || p == 0) continue;
                        for (int c = 0; c < v.channels; ++c)
                            (t < packed ? sum_packed : sum)[size_t(c)] +=
                                p * (t < packed ? double(value[size_t(t * v.channels + c)]) : double(get(job.values.at(b, h, t - packed) + c * size_of(type), type)));
                        if (t < packed && job.value_mean)
                            for (int c = 0; c < v.channels; ++c) sum[size_t(c)] += p * job.value_mean[h * v.channels + c];
                    }
                    true_sums[size_t((b * q_heads + q_head) * job.queries + q)] = top > -INFINITY ? top + std::log(weight) : -INFINITY;
                    double* to = &truth[size_t(((b * q_heads + q_head) * job.queries + q) * v.channels)];
                    for (int c = 0; c < v.channels; ++c) {
                        double x = job.value_rotation_back ? 0 : sum_packed[size_t(c)];
                        for (int i = 0; job.value_rotation_back && i < v.channels; ++i) x += sum_packed[size_t(i)] * job.value_rotation_back[i * v.channels + c];
                        to[c] = weight > 0 ? (sum[size_t(c)] + x) / weight : 0;
                    }
                }
        }
    double largest = 1e-3, worst = 0;
    for (const double x : truth) largest = std::fabs(x) > largest ? std::fabs(x) : largest;
    for (const Kernels* kernels : all_kernels()) {
        out.make(Type::f32, {job.batch, q_heads, job.queries, value_channels}, false);
        job.output = out.array;
        std::vector<float> log_sums(true_sums.size(), NAN);
        job.log_sums = log_sums.data();
        attend(job, *kernels, any(1, 3));
        job.log_sums = nullptr;
        double here = 0;
        for (size_t n = 0; n < true_sums.size(); ++n) {
            if (std::isinf(true_sums[n]) && std::isinf(log_sums[n])) continue;
            const double error = std::fabs(log_sums[n] - true_sums[n]) / std::fmax(1, std::fabs(true_sums[n]));
            here = std::isnan(error) || error > 1e-3 ? INFINITY : here;
        }
        for (size_t n = 0; n < truth.size(); ++n) {
            const double error = std::fabs(get(out.memory.data() + 4 * n, Type::f32) - truth[n]);
            here = error >= here ? error : here;
            if (std::isnan(error)) here = INFINITY;
        }
        if (here / largest > 1e-3)
            std::printf("%s: error %.2e; %d tokens, keys %d bits, levels %d, per %d, D %d; values %d bits, levels %d, per %d, D %d; rows %d\n",
                        kernels->name, here / largest, tokens, k.bits, int(k.levels), int(k.per), k.channels, v.bits, int(v.levels), int(v.per),
                        v.channels, job.rows());
        worst = here / largest > worst ? here / largest : worst;
    }
    return worst;
}

// What an encoder is told, at random.
Encoder any_encoder(Type type) {
    Encoder told;
    told.choice = one_of({Choice::range, Choice::range, Choice::open_range, Choice::half_quadratic, Choice::magnitude, Choice::fixed, Choice::fixed, Choice::norm});
    const bool range = told.choice == Choice::range || told.choice == Choice::open_range, fixed = told.choice == Choice::fixed, grouped = range || told.choice == Choice::half_quadratic;
    told.levels = told.choice == Choice::magnitude ? Levels::e4m3 : told.choice == Choice::norm ? Levels::table
                : range ? one_of({Levels::uniform, Levels::table}) : fixed ? one_of({Levels::uniform, Levels::table, Levels::e4m3}) : Levels::uniform;
    told.bits = told.levels == Levels::e4m3 ? 8 : told.levels == Levels::table ? any(2, 4) : one_of({2, 3, 4, 8});
    told.tokens = 8 * any(1, 20);
    told.channels = any(1, 160);
    told.per = grouped ? one_of({Per::token, Per::channel}) : fixed && told.levels != Levels::e4m3 ? Per::channel : Per::token;
    const int64_t along = told.per == Per::token ? told.channels : told.tokens;
    told.length = told.per == Per::channel ? (grouped && chance(60) ? 8 : along) : grouped ? any(1, int(along)) : along;
    told.groups = (along + told.length - 1) / told.length;
    told.bottom = told.levels == Levels::table ? -1.0f : 0.0f;
    told.span = told.levels == Levels::table ? 2.0f : told.levels == Levels::e4m3 ? 448.0f : float((1 << told.bits) - 1);
    told.scale = 0.01f;
    told.limit = type == Type::f16 ? 65504.0f : 0x1p120f;
    for (float& edge : told.edges) edge = INFINITY;
    if (told.levels == Levels::table) {
        const int count = 1 << told.bits;
        for (int i = 0; i < count; ++i) told.table[i] = normal();
        std::sort(told.table, told.table + count);
        for (int i = 0; i + 1 < count; ++i) told.edges[i] = (told.table[i] + told.table[i + 1]) / 2;
    }
    if ((range || told.per == Per::channel) && told.choice != Choice::half_quadratic && chance(50))
        told.outliers = any(1, int(told.tokens * told.channels));
    return told;
}

// One random block through every encoder and rotation; whether all write the same bits.
bool encoded_alike() {
    const Type type = one_of({Type::f32, Type::bf16, Type::f16});
    const Encoder told = any_encoder(type);
    Tensor x;
    x.make(type, {told.tokens, told.channels + (chance(30) ? 3 : 0)});
    std::vector<float> scale(size_t(told.channels)), zero(size_t(told.channels)), signs(size_t(told.channels));
    for (float& s : scale) s = chance(5) ? 0 : std::fabs(normal());
    for (float& z : zero) z = normal() * 5;
    for (float& s : signs) s = chance(50) ? 1.0f : -1.0f;
    const bool scales = told.choice != Choice::fixed, zeros = told.choice == Choice::range || told.choice == Choice::open_range || told.choice == Choice::half_quadratic;
    const int64_t count = told.groups * (told.per == Per::token ? told.tokens : told.channels);
    std::vector<uint8_t> first;
    for (const Kernels* kernels : all_kernels()) {
        std::vector<uint8_t> codes(size_t(told.tokens * told.channels * told.bits / 8));
        std::vector<uint16_t> parts[4];
        const int64_t sizes[4] = {scales ? count : 0, zeros ? count : 0, told.outliers, told.outliers};
        for (int i = 0; i < 4; ++i) parts[i].resize(size_t(sizes[i]));
        Encoded out;
        out.codes = codes.data();
        out.scale = scales ? parts[0].data() : nullptr;
        out.zero = zeros ? parts[1].data() : nullptr;
        out.outlier_index = parts[2].data();
        out.outlier_value = parts[3].data();
        std::vector<uint8_t> scratch(size_t(kernels->encode_scratch_bytes(told, type)));
        if (!kernels->encode(told, type, x.array.data, x.array.stride[0], {scale.data(), zero.data()}, out, scratch.data()).sound) return false;
        std::vector<float> rotated(size_t(told.tokens * told.channels));
        scratch.assign(size_t(kernels->hadamard_scratch_bytes(told.channels)), 0);
        scratch.shrink_to_fit();
        kernels->hadamard(type, x.array.data, x.array.stride[0], told.tokens, told.channels, signs.data(), rotated.data(), scratch.data());
        std::vector<uint8_t> all;
        const auto add = [&](const void* from, size_t bytes) {
            all.insert(all.end(), static_cast<const uint8_t*>(from), static_cast<const uint8_t*>(from) + bytes);
        };
        add(rotated.data(), 4 * rotated.size());
        if (told.choice != Choice::half_quadratic) {  // its powers differ in their last bits
            add(codes.data(), codes.size());
            for (const auto& part : parts) add(part.data(), 2 * part.size());
        }
        if (first.empty()) first = all;
        if (first != all) {
            std::printf("%s: choice %d, levels %d, per %d, %d bits, [%d, %d], groups of %d, %d outliers\n", kernels->name, int(told.choice),
                        int(told.levels), int(told.per), told.bits, int(told.tokens), int(told.channels), int(told.length), told.outliers);
            return false;
        }
    }
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    const double seconds = count > 1 ? std::atof(arguments[1]) : 5;
    const uint64_t first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
    const auto start = std::chrono::steady_clock::now();
    double worst = 0;
    uint64_t seed = first;
    for (; std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds; ++seed) {
        generator.seed(seed);
        bool decoded_alike = true;
        const double error = once(decoded_alike);
        worst = error > worst ? error : worst;
        bool alike = true;
        for (int i = 0; i < 5; ++i) alike = encoded_alike() && alike;
        if (error > 1e-3 || !decoded_alike || !alike) {
            std::printf("seed %llu: error %.2e%s%s\n", static_cast<unsigned long long>(seed), error, decoded_alike ? "" : ", decoded differently",
                        alike ? "" : ", encoded differently");
            return 1;
        }
    }
    std::printf("%llu calls,", static_cast<unsigned long long>(seed - first));
    for (const Kernels* kernels : all_kernels()) std::printf(" %s", kernels->name);
    std::printf(": worst error %.2e of the largest output\n", worst);
    return 0;
}
