// Encoding one block [tokens, channels], bit for bit as the codecs' `encode` does: the same float32 operations in the
// same order on every element that is stored. HQQ's zeros are the exception (see half_quadratic.hpp).
//
// A block is read from memory once. Groups of channels are met W at a time, so that their parameters are computed in
// the lanes of one vector; groups of tokens have channels in the lanes. Their elements are read twice, the second time
// from the nearest cache. Codes are gathered as bytes, and packed along tokens when the block is done.
#pragma once

#include "elements.hpp"
#include "encoder.hpp"
#include "half_quadratic.hpp"
#include "outliers.hpp"

namespace kvbits {
namespace {

template <class I, Type type, Levels levels> class BlockEncoder {
    using E = Elements<I, type>;
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    using u32 = typename I::u32;
    static constexpr int W = I::W;
    static constexpr int chains = 16;  // sums of doubles beside each other

    struct Group {  // one in each lane
        f32 scale, zero;
        Divisor<I> divisor;
        bool easy;
    };

    const Encoder& told_;
    const uint8_t* data_;
    int64_t stride_;       // bytes from token to token
    int64_t read_step_;    // elements from group to group of channels, where they are read
    const bool padded_;
    const Statics statics_;
    const Encoded out_;
    uint8_t* codes_;
    int64_t code_stride_;
    float* floats_;
    const int top_;
    float edges_[32];  // as told, and room for a look-up that begins further on
    const Divisor<I> span_;
    i32 sound_;
    f32 largest_{};

public:
    // Elements of the shortest group along a vector.
    static int64_t shortest(const Encoder& told) {
        if (told.per == Per::channel) return told.channels;
        return told.channels - (told.groups - 1) * told.length;
    }
    static bool padded(const Encoder& told) { return shortest(told) < E::count; }
    static int64_t width(const Encoder& told) { return (told.length + E::count - 1) / E::count * E::count; }
    static int64_t row_bytes(const Encoder& told) {
        return told.per == Per::channel ? E::count * E::size : told.groups * width(told) * E::size;
    }
    static int64_t code_stride(const Encoder& told) { return told.channels + (padded(told) ? width(told) + E::count : 0); }
    static int64_t floats(const Encoder& told) {
        return told.choice == Choice::half_quadratic ? 2 * W * told.length : told.choice == Choice::norm ? told.channels + chains : 0;
    }
    static int64_t scratch_bytes(const Encoder& told) {
        return told.tokens * code_stride(told) + (padded(told) ? told.tokens * row_bytes(told) : 0) +
               4 * floats(told) + 4 * 64;
    }

    BlockEncoder(const Encoder& told, const uint8_t* data, int64_t stride, const Statics& statics, const Encoded& out, uint8_t* scratch)
        : told_(told), data_(data), stride_(stride), read_step_(told.length), padded_(padded(told)), statics_(statics), out_(out),
          code_stride_(code_stride(told)), top_((1 << told.bits) - 1), span_(splat<f32>(told.span)), sound_(~i32{}) {
        for (int i = 0; i < 32; ++i) edges_[i] = told.edges[i < 15 ? i : 15];
        auto take = [&](int64_t bytes) {
            uint8_t* here = scratch;
            scratch += (bytes + 63) / 64 * 64;
            return here;
        };
        scratch = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
        // Whole bytes go where they belong, unless vectors reach beyond the last of them.
        const bool in_place = told.bits == 8 && !padded_;
        codes_ = in_place ? out.codes : take(told.tokens * code_stride_);
        uint8_t* rows = padded_ ? take(told.tokens * row_bytes(told)) : nullptr;
        floats_ = reinterpret_cast<float*>(take(4 * floats(told)));
        if (padded_) pad(rows);
    }

    // Scales, zeros and codes; what is left to be done then is pack().
    Seen run() {
        if (told_.per == Per::channel && told_.choice == Choice::fixed) {
            static_channels();
        } else if (told_.choice == Choice::norm) {
            for (int64_t t = 0; t < told_.tokens; ++t) normed_row(t);
        } else if (told_.per == Per::channel) {
            int64_t n = 0;
            for (int64_t first = 0; first < told_.tokens; first += told_.length, ++n) channel_groups(n, first);
        } else {
            const int64_t count = told_.tokens * told_.groups;
            for (int64_t first = 0; first < count; first += W) token_groups(first, count - first < W ? int(count - first) : W);
        }
        return {all(sound_), told_.choice == Choice::fixed ? largest(largest_) : 0};
    }

    // Where the code of each element is until it is packed.
    uint8_t* code_at(int64_t token, int64_t channel) const { return codes_ + token * code_stride_ + channel; }

    KVBITS_STAGE void pack() const {
        if (told_.bits == 8) {
            for (int64_t t = 0; t < told_.tokens && codes_ != out_.codes; ++t)
                std::memcpy(out_.codes + t * told_.channels, codes_ + t * code_stride_, size_t(told_.channels));
        } else if (told_.bits == 4) {
            plane<4, 0>(out_.codes);
        } else {
            uint8_t* rest = plane<2, 0>(out_.codes);
            if (told_.bits == 3) plane<1, 2>(rest);
        }
    }

private:
    // -- where elements are ----------------------------------------------------------------------------------------

    // Groups shorter than two vectors are first widened, by their own last element.
    KVBITS_STAGE void pad(uint8_t* rows) {
        const bool whole = told_.per == Per::channel;  // a row is then one group
        const int64_t groups = whole ? 1 : told_.groups, length = whole ? told_.channels : told_.length;
        const int64_t wide = whole ? int64_t(E::count) : width(told_), bytes = row_bytes(told_);
        for (int64_t t = 0; t < told_.tokens; ++t)
            for (int64_t g = 0; g < groups; ++g) {
                const uint8_t* from = data_ + t * stride_ + g * length * E::size;
                uint8_t* to = rows + t * bytes + g * wide * E::size;
                const int64_t rest = told_.channels - g * length, here = rest < length ? rest : length;
                std::memcpy(to, from, size_t(here * E::size));
                for (int64_t i = here; i < wide; ++i) std::memcpy(to + i * E::size, from + (here - 1) * E::size, E::size);
            }
        data_ = rows;
        stride_ = bytes;
        read_step_ = wide;
    }

    int64_t length_of(int64_t group) const {
        const int64_t rest = told_.channels - group * told_.length;
        return rest < told_.length ? rest : told_.length;
    }

    // Call f(offset) for vectors that cover `length` elements; the last may overlap the one before.
    template <class F> static void cover(int64_t length, F f) {
        const int64_t last = length - E::count;
        if (last == E::count) {  // what most groups are, without a loop
            f(0);
            return f(last);
        }
        for (int64_t i = 0; i < last; i += E::count) f(i);
        f(last);
    }

    // -- parameters ------------------------------------------------------------------------------------------------

    static f32 to_bf16(f32 x) {  // nearest, ties to even, as a float
        u32 word = bits<u32>(x);
        word += 0x7FFF + ((word >> 16) & 1);
        return bits<f32>(word & 0xFFFF0000u);
    }

    static f32 up_to_bf16(f32 x) {  // x >= 0
        const f32 nearest = to_bf16(x);
        return nearest < x ? bits<f32>(bits<u32>(nearest) + 0x10000u) : nearest;
    }

    template <bool Easy> Group chosen(f32 low, f32 high) const {
        const i32 constant = (low == high) & splat<i32>(told_.choice == Choice::open_range ? 0 : -1);
        f32 step, whole;
        if constexpr (levels == Levels::e4m3) {
            whole = maximum(high, -low) + 0.0f;
            step = divide<Easy>(whole, span_);
        } else {
            whole = low;
            step = maximum(divide<Easy>(high, span_) - divide<Easy>(low, span_), maximum(high, -low) * 0x1p-10f);
        }
        const f32 scale = (constant ? to_bf16(whole) : up_to_bf16(step)) + 0.0f;
        const Divisor<I> divisor(scale == 0.0f ? splat<f32>(1.0f) : scale);
        f32 zero{};
        if constexpr (levels != Levels::e4m3)
            zero = through_half<I>((constant ? splat<f32>(1.0f) : splat<f32>(told_.bottom)) - divide<Easy>(low, divisor));
        return {scale, zero, divisor, Easy};
    }

    // From the keys of their extremes.
    Group choose(i32 low_key, i32 high_key) {
        const int32_t limit = E::key_of_limit(told_.limit);
        sound_ &= (high_key <= limit) & (low_key >= -1 - limit);
        const f32 low = E::value(low_key), high = E::value(high_key);
        if (told_.choice == Choice::fixed) {
            largest_ = maximum(largest_, maximum(high, -low));
            const f32 scale = splat<f32>(told_.scale);
            return {scale, f32{}, Divisor<I>(scale, scale, scale), false};
        }
        if constexpr (I::fused)
            if (__builtin_expect(all(easy<I>(low) & easy<I>(high)), 1)) return chosen<true>(low, high);
        return chosen<false>(low, high);
    }

    u32 scale_bits(const Group& group) const { return bits<u32>(group.scale) >> 16; }

    u32 zero_bits(const Group& group) const {
        uint16_t half[W];
        I::store_f16(half, group.zero);
        return __builtin_convertvector(load<typename I::u16>(half), u32);
    }

    // -- codes -----------------------------------------------------------------------------------------------------

    static u32 search(f32 x, const float* edges) {  // how many edges are below x; what a table lacks is infinite
        u32 i = x > edges[7] ? splat<u32>(8u) : u32{};
        i = x > I::lookup(i, edges + 3) ? i + 4 : i;
        i = x > I::lookup(i, edges + 1) ? i + 2 : i;
        return x > I::lookup(i, edges) ? i + 1 : i;
    }

    template <bool Easy> static i32 code(f32 x, const Divisor<I>& divisor, f32 zero, const float* edges) {
        if constexpr (levels == Levels::uniform) return I::round(divide<Easy>(x, divisor) + zero);
        if constexpr (levels == Levels::table) return bits<i32>(search(divide<Easy>(x, divisor) + zero, edges));
        const u32 word = bits<u32>(x);
        const f32 y = minimum(divide<Easy>(bits<f32>(word & 0x7FFFFFFF), divisor), splat<f32>(448.0f));
        const i32 place = bits<i32>(y);
        const i32 normal = ((place + 0x7FFFF + (place >> 20 & 1)) >> 20) - 960;  // 8 * (127 - 7): the exponents' biases
        const i32 small = I::round(y * 512.0f);
        return (y < 0x1p-6f ? small : normal) | bits<i32>(word >> 24 & 0x80);
    }

    // -- groups of channels ----------------------------------------------------------------------------------------

    template <class V, class F> static V across(V* v, F f) {  // fold each of W vectors; lane i is vector i's
        for (int n = W / 2; n > 0; n /= 2)
            for (int i = 0; i < n; ++i) v[i] = f(even_lanes(v[2 * i], v[2 * i + 1]), odd_lanes(v[2 * i], v[2 * i + 1]));
        return v[0];
    }

    // Groups first .. first + count - 1, counted token by token.
    void token_groups(int64_t first, int count) {
        const uint8_t* at[W];
        int64_t length[W];
        i32 low[W], high[W];
        const int64_t groups = told_.groups, step = told_.length, read_bytes = read_step_ * E::size;
        const int64_t short_one = padded_ ? read_step_ : length_of(groups - 1), whole = padded_ ? read_step_ : step;
        int64_t token = first / groups, group = first % groups;
        const uint8_t* read = data_ + token * stride_ + group * read_bytes;
        uint8_t* write_at = codes_ + token * code_stride_ + group * step;
        uint8_t* code[W];
        for (int j = 0; j < count; ++j) {
            at[j] = read;
            code[j] = write_at;
            length[j] = group == groups - 1 ? short_one : whole;
            typename E::Extremes seen;
            cover(length[j], [&](int64_t i) { seen.meet(at[j] + i * E::size); });
            i32 keys[2];
            E::split(seen.low, keys);
            low[j] = minimum(keys[0], keys[1]);
            E::split(seen.high, keys);
            high[j] = maximum(keys[0], keys[1]);
            read += read_bytes;
            write_at += step;
            if (++group == groups) {
                group = 0;
                read += stride_ - groups * read_bytes;
                write_at += code_stride_ - groups * step;
            }
        }
        for (int j = count; j < W; ++j) {
            low[j] = low[0];
            high[j] = high[0];
        }
        Group made = choose(across(low, [](i32 a, i32 b) { return minimum(a, b); }),
                            across(high, [](i32 a, i32 b) { return maximum(a, b); }));
        if (told_.choice == Choice::half_quadratic) made.zero = solved(made, first, count, at, E::value(high[0]) == E::value(low[0]));
        if (out_.scale) {
            uint16_t halves[W];
            store(halves, __builtin_convertvector(scale_bits(made), typename I::u16));
            std::memcpy(out_.scale + first, halves, size_t(count) * 2);
        }
        if (out_.zero) {
            uint16_t halves[W];
            I::store_f16(halves, made.zero);
            std::memcpy(out_.zero + first, halves, size_t(count) * 2);
        }
        if (made.easy) write<true>(made, count, at, length, code);
        else write<false>(made, count, at, length, code);
    }

    template <bool Easy> void write(const Group& made, int count, const uint8_t* const* at, const int64_t* length, uint8_t* const* code_at) {
        float whole[W], first[W], rest[W], zero[W];
        store(whole, made.divisor.whole);
        store(first, made.divisor.first);
        store(rest, made.divisor.rest);
        store(zero, made.zero);
        float edges[32];  // no store to bytes can change these
        std::memcpy(edges, edges_, sizeof edges);
        for (int j = 0; j < count; ++j) {
            const Divisor<I> divisor(splat<f32>(whole[j]), splat<f32>(first[j]), splat<f32>(rest[j]));
            const f32 from = splat<f32>(zero[j]);
            cover(length[j], [&](int64_t i) {
                f32 x[2];
                E::load(at[j] + i * E::size, x);
                const i32 codes[2] = {code<Easy>(x[0], divisor, from, edges), code<Easy>(x[1], divisor, from, edges)};
                E::store_codes(code_at[j] + i, codes, top_);
            });
        }
    }

    KVBITS_STAGE f32 solved(const Group& made, int64_t first, int count, const uint8_t* const* at, i32 constant) {
        i32 lengths = splat<i32>(1);
        std::memset(floats_, 0, size_t(4 * W * told_.length));
        for (int j = 0; j < count; ++j) {
            lengths[j] = int32_t(length_of((first + j) % told_.groups));
            for (int i = 0; i < lengths[j]; ++i) floats_[i * W + j] = E::one(at[j] + i * E::size);
        }
        for (int64_t i = 0; i < told_.length; ++i) store(floats_ + i * W, load<f32>(floats_ + i * W) / made.divisor.whole);
        return constant ? made.zero : half_quadratic_zero<I>(floats_, told_.length, lengths, made.zero, top_);
    }

    // -- rows with a norm ------------------------------------------------------------------------------------------

    // A row is divided by its root mean square, and its scale is what then fits the levels best: see
    // codecs/lloyd_max.py. Sums are double, so that their order is not seen once they are rounded.
    KVBITS_STAGE void normed_row(int64_t token) {
        const int64_t channels = told_.channels, whole = (channels + chains - 1) / chains * chains;
        float* unit = floats_;
        to_float<I>(type, data_ + token * stride_, channels, unit);
        for (int64_t i = channels; i < whole; ++i) unit[i] = 0;
        f32 peak{};
        for (int64_t i = 0; i < whole; i += W) {
            const f32 x = load<f32>(unit + i), magnitude = maximum<f32>(x, -x);
            sound_ &= magnitude <= told_.limit;  // nor is NaN
            peak = maximum<f32>(peak, magnitude);
        }
        const float found = kvbits::largest(peak), largest = found == 0 ? 1.0f : found;
        for (int64_t i = 0; i < whole; i += W) store(unit + i, load<f32>(unit + i) / largest);
        const double square = doubles(whole, [&](int64_t i) { return double(unit[i]) * double(unit[i]); });
        const float mean = float(std::sqrt(square / double(channels))), divisor = mean == 0 ? 1.0f : mean;
        const double product = levels_of_row(unit, divisor, whole, code_at(token, 0));
        const float scale = float(square > 0 ? square / product : 0) * largest;
        out_.scale[token] = float_to_bf16(scale);
    }

    template <class F> static double doubles(int64_t count, F f) {  // `count` is a multiple of `chains`
        double sums[chains] = {}, all = 0;
        for (int64_t i = 0; i < count; i += chains)
            for (int j = 0; j < chains; ++j) sums[j] += f(i + j);
        for (const double sum : sums) all += sum;
        return all;
    }

    // Codes of a row, and its product with their levels.
    double levels_of_row(const float* unit, float divisor, int64_t whole, uint8_t* code) const {
        float edges[32], met[chains];
        std::memcpy(edges, edges_, sizeof edges);
        double sums[chains] = {}, all = 0;
        for (int64_t i = 0; i < whole; i += chains) {
            uint8_t codes[chains];
            for (int j = 0; j < chains; j += W) {
                const u32 found = search(load<f32>(unit + i + j) / divisor, edges);
                store(codes + j, __builtin_convertvector(found, typename I::u8));
                store(met + j, I::lookup(found, told_.table));
            }
            for (int j = 0; j < chains; ++j) sums[j] += double(unit[i + j]) * double(met[j]);
            std::memcpy(code + i, codes, size_t(told_.channels - i < chains ? told_.channels - i : chains));
        }
        for (const double sum : sums) all += sum;
        return all;
    }

    // -- groups of tokens ------------------------------------------------------------------------------------------

    // Group n, of tokens first .. first + length - 1.
    void channel_groups(int64_t n, int64_t first) {
        const uint8_t* rows = data_ + first * stride_;
        const int64_t width = padded_ ? int64_t(E::count) : told_.channels, last = width - E::count;
        int64_t c = 0;
        for (; c + 4 * E::count <= width; c += 4 * E::count) channels<4>(n, first, rows, c);
        for (; c < width; c += E::count) channels<1>(n, first, rows, c < last ? c : last);
    }

    template <int Units> void channels(int64_t n, int64_t first, const uint8_t* rows, int64_t c) {
        typename E::Extremes seen[Units];
        for (int64_t t = 0; t < told_.length; ++t)
            for (int u = 0; u < Units; ++u) seen[u].meet(rows + t * stride_ + (c + u * E::count) * E::size);
        for (int u = 0; u < Units; ++u) {
            const int64_t channel = c + u * E::count;
            const uint8_t* at = rows + channel * E::size;
            i32 low[2], high[2];
            E::split(seen[u].low, low);
            E::split(seen[u].high, high);
            Group made[2] = {choose(low[0], high[0]), choose(low[1], high[1])};
            if (told_.choice == Choice::half_quadratic) solve_channels(made, at, low, high);
            const u32 scale[2] = {scale_bits(made[0]), scale_bits(made[1])}, zero[2] = {zero_bits(made[0]), zero_bits(made[1])};
            uint16_t halves[2][E::count];
            E::store_halves(halves[0], scale);
            E::store_halves(halves[1], zero);
            const size_t bytes = 2 * size_t(padded_ ? told_.channels : int64_t(E::count));
            std::memcpy(out_.scale + n * told_.channels + channel, halves[0], bytes);
            std::memcpy(out_.zero + n * told_.channels + channel, halves[1], bytes);
            uint8_t* code_at = codes_ + first * code_stride_ + channel;
            if (made[0].easy && made[1].easy) write_channels<true>(made, at, code_at);
            else write_channels<false>(made, at, code_at);
        }
    }

    template <bool Easy> void write_channels(const Group* made, const uint8_t* at, uint8_t* code_at) {
        float edges[32];
        std::memcpy(edges, edges_, sizeof edges);
        const Divisor<I> a = made[0].divisor, b = made[1].divisor;
        const f32 zero[2] = {made[0].zero, made[1].zero};
        for (int64_t t = 0; t < told_.length; ++t) {
            f32 x[2];
            E::load(at + t * stride_, x);
            const i32 codes[2] = {code<Easy>(x[0], a, zero[0], edges), code<Easy>(x[1], b, zero[1], edges)};
            E::store_codes(code_at + t * code_stride_, codes, top_);
        }
    }

    // Scale and zero of each channel are given. Any scale is: quotients are true ones, and may be far outside.
    KVBITS_STAGE void static_channels() {
        const int64_t width = padded_ ? int64_t(E::count) : told_.channels, last = width - E::count;
        typename E::Extremes seen;
        for (int64_t c = 0; c < width; c += E::count) {
            const int64_t channel = c < last ? c : last;
            f32 scale[2], zero[2];
            channel_parameters(statics_.scale, channel, scale);
            channel_parameters(statics_.zero, channel, zero);
            for (f32& s : scale) s = s == 0.0f ? splat<f32>(1.0f) : s;
            float edges[32];
            std::memcpy(edges, edges_, sizeof edges);
            for (int64_t t = 0; t < told_.tokens; ++t) {
                const uint8_t* at = data_ + t * stride_ + channel * E::size;
                seen.meet(at);
                f32 x[2];
                i32 codes[2];
                E::load(at, x);
                for (int v = 0; v < 2; ++v) {
                    const f32 level = x[v] / scale[v] + zero[v];
                    if constexpr (levels == Levels::table) codes[v] = bits<i32>(search(level, edges));
                    else codes[v] = I::round(minimum(maximum(level, f32{}), splat<f32>(float(top_))));
                }
                E::store_codes(code_at(t, channel), codes, top_);
            }
        }
        i32 low[2], high[2];
        E::split(seen.low, low);
        E::split(seen.high, high);
        const int32_t limit = E::key_of_limit(told_.limit);
        for (int v = 0; v < 2; ++v) sound_ &= (high[v] <= limit) & (low[v] >= -1 - limit);
    }

    // Those from `channel` on, in the order of elements; the last again where there are fewer.
    void channel_parameters(const float* all, int64_t channel, f32* out) const {
        if (!padded_) return E::arrange(all + channel, out);
        float wide[E::count];
        for (int64_t i = 0; i < E::count; ++i) wide[i] = all[i < told_.channels ? i : told_.channels - 1];
        E::arrange(wide, out);
    }

    KVBITS_STAGE void solve_channels(Group* made, const uint8_t* at, const i32* low, const i32* high) {
        for (int64_t t = 0; t < told_.length; ++t) {
            f32 x[2];
            E::load(at + t * stride_, x);
            for (int v = 0; v < 2; ++v) store(floats_ + (v * told_.length + t) * W, x[v] / made[v].divisor.whole);
        }
        for (int v = 0; v < 2; ++v) {
            const f32 solved = half_quadratic_zero<I>(floats_ + v * told_.length * W, told_.length, splat<i32>(int32_t(told_.length)),
                                                      made[v].zero, top_);
            made[v].zero = E::value(low[v]) == E::value(high[v]) ? made[v].zero : solved;
        }
    }

    // -- packing ---------------------------------------------------------------------------------------------------

    // One plane: bits `Low` .. `Low` + `Bits` - 1 of every code, in tokens * Bits / 8 rows. See numerics/bitpack.py.
    // Codes are small, so shifts of whole words move no bit into the byte beside.
    template <int Bits, int Low, class V> V slices(const uint8_t* from, int64_t next) const {
        V byte{};
        for (int s = 0; s < 8 / Bits; ++s) {
            V code = load<V>(from + s * next);
            if (told_.bits == 3) code = code >> Low & V(V{} + ((1 << Bits) - 1) * 0x01010101u);
            byte |= code << (s * Bits);
        }
        return byte;
    }

    template <int Bits, int Low> uint8_t* plane(uint8_t* out) const {
        constexpr int64_t width = 4 * W;
        const int64_t rows = told_.tokens * Bits / 8, channels = told_.channels, next = rows * code_stride_;
        for (int64_t r = 0; r < rows; ++r, out += channels) {
            const uint8_t* from = codes_ + r * code_stride_;
            if (channels < width) {
                for (int64_t c = 0; c < channels; ++c) {
                    int byte = 0;
                    for (int s = 0; s < 8 / Bits; ++s) byte |= (from[s * next + c] >> Low & ((1 << Bits) - 1)) << (s * Bits);
                    out[c] = uint8_t(byte);
                }
                continue;
            }
            for (int64_t c = 0; c < channels; c += width) {
                const int64_t at = c < channels - width ? c : channels - width;
                store(out + at, slices<Bits, Low, u32>(from + at, next));
            }
        }
        return out;
    }
};

// The sparse part of one block, and the dense part around it: bits as those of codecs/grouped.py.
template <class I, Type type, Levels levels> class SparseEncoder {
    using E = Elements<I, type>;
    using Dense = BlockEncoder<I, type, levels>;

    const Encoder& told_;
    const uint8_t* data_;
    const int64_t stride_, size_;
    const Statics statics_;
    const Encoded out_;
    float *x_, *far_, *work_;   // the block; how far its elements are out; for largest_places()
    uint8_t *inliers_, *rest_;  // the block with outliers replaced; scratch of the dense encoder

public:
    static int64_t scratch_bytes(const Encoder& told) {
        const int64_t size = told.tokens * told.channels;
        return 4 * (4 * size + 64) + size * E::size + 64 + Dense::scratch_bytes(told) + 64;
    }

    SparseEncoder(const Encoder& told, const uint8_t* data, int64_t stride, const Statics& statics, const Encoded& out, uint8_t* scratch)
        : told_(told), data_(data), stride_(stride), size_(told.tokens * told.channels), statics_(statics), out_(out) {
        auto take = [&](int64_t bytes) {
            scratch = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
            uint8_t* here = scratch;
            scratch += bytes;
            return here;
        };
        x_ = reinterpret_cast<float*>(take(4 * size_));
        far_ = reinterpret_cast<float*>(take(4 * size_));
        work_ = reinterpret_cast<float*>(take(8 * size_));
        inliers_ = take(size_ * E::size);
        rest_ = take(0);
    }

    Seen run() {
        for (int64_t t = 0; t < told_.tokens; ++t) to_float<I>(type, data_ + t * stride_, told_.channels, x_ + t * told_.channels);
        if (told_.choice == Choice::fixed) {  // what decodes worst
            Dense dense(told_, data_, stride_, statics_, out_, rest_);
            const Seen seen = dense.run();
            dense.pack();
            if (!seen.sound) return seen;
            miss(dense);
            largest_places(far_, size_, told_.outliers, work_, out_.outlier_index);
            write_values(dense);
            return seen;
        }
        bool sound = true;
        for (int64_t i = 0; i < size_; ++i) sound &= std::fabs(x_[i]) <= told_.limit;  // nor is NaN
        if (!sound) return {false, 0};
        measure();
        largest_places(far_, size_, told_.outliers, work_, out_.outlier_index);
        replace();
        Dense dense(told_, inliers_, told_.channels * E::size, statics_, out_, rest_);
        const Seen seen = dense.run();
        for (int e = 0; e < told_.outliers; ++e) recode(dense, out_.outlier_index[e]);
        dense.pack();
        write_values(dense);
        return seen;
    }

private:
    // How much the dense part misses of each element, under static scales.
    KVBITS_STAGE void miss(const Dense& dense) {
        const int64_t channels = told_.channels;
        for (int64_t t = 0; t < told_.tokens; ++t) {
            const uint8_t* code = dense.code_at(t, 0);
            const float* x = x_ + t * channels;
            float* far = far_ + t * channels;
            for (int64_t c = 0; c < channels; ++c) {
                const float level = levels == Levels::table ? told_.table[code[c]] : float(code[c]);
                far[c] = std::fabs(x[c] - (level - statics_.zero[c]) * statics_.scale[c]);
            }
        }
    }

    KVBITS_STAGE void measure() {
        const int64_t channels = told_.channels, length = told_.length;
        if (told_.per == Per::channel)
            for (int64_t t = 0; t < told_.tokens; t += length) channel_distances(x_ + t * channels, length, channels, far_ + t * channels);
        else
            for (int64_t t = 0; t < told_.tokens; ++t)
                for (int64_t c = 0; c < channels; c += length)
                    distances(x_ + t * channels + c, channels - c < length ? channels - c : length, far_ + t * channels + c);
    }

    // Outliers give way to another element of their group, so that the others alone choose its range; to 0 where a
    // group has no others.
    KVBITS_STAGE void replace() {
        const int64_t channels = told_.channels;
        for (int64_t t = 0; t < told_.tokens; ++t) std::memcpy(inliers_ + t * channels * E::size, data_ + t * stride_, size_t(channels * E::size));
        for (int64_t i = 0; i < size_; ++i) work_[i] = 0;
        for (int e = 0; e < told_.outliers; ++e) work_[out_.outlier_index[e]] = 1;
        for (int e = 0; e < told_.outliers; ++e) {
            const int64_t i = out_.outlier_index[e], token = i / channels, channel = i % channels;
            const bool per_channel = told_.per == Per::channel;
            const int64_t step = per_channel ? channels : 1;
            const int64_t first = per_channel ? token / told_.length * told_.length * channels + channel : i - channel % told_.length;
            const int64_t row_end = channels - channel / told_.length * told_.length;
            const int64_t count = per_channel || row_end > told_.length ? told_.length : row_end;
            int64_t other = 0;
            while (other < count && work_[first + other * step] != 0) ++other;
            if (other < count) std::memcpy(inliers_ + i * E::size, inliers_ + (first + other * step) * E::size, E::size);
            else std::memset(inliers_ + i * E::size, 0, E::size);
        }
    }

    // The group of element i, in the arrays of scales and zeros.
    int64_t group_of(int64_t i) const {
        const int64_t token = i / told_.channels, channel = i % told_.channels;
        return told_.per == Per::channel ? token / told_.length * told_.channels + channel : token * told_.groups + channel / told_.length;
    }

    float scale(int64_t i) const {
        return told_.choice == Choice::fixed ? statics_.scale[i % told_.channels] : bf16_to_float(out_.scale[group_of(i)]);
    }

    float zero(int64_t i) const {
        return told_.choice == Choice::fixed ? statics_.zero[i % told_.channels] : half_to_float(out_.zero[group_of(i)]);
    }

    void recode(const Dense& dense, int64_t i) const {
        const float s = scale(i), level = x_[i] / (s == 0 ? 1.0f : s) + zero(i);
        const int top = (1 << told_.bits) - 1;
        int code = 0;
        if (levels == Levels::table) while (code < top && level > told_.edges[code]) ++code;
        else code = level > float(top) ? top : level > 0 ? int(__builtin_rintf(level)) : 0;
        *dense.code_at(i / told_.channels, i % told_.channels) = uint8_t(code);
    }

    float decoded(const Dense& dense, int64_t i) const {
        const uint8_t code = *dense.code_at(i / told_.channels, i % told_.channels);
        return ((levels == Levels::table ? told_.table[code] : float(code)) - zero(i)) * scale(i);
    }

    void write_values(const Dense& dense) const {
        for (int e = 0; e < told_.outliers; ++e) {
            const int64_t i = out_.outlier_index[e];
            out_.outlier_value[e] = float_to_bf16(x_[i] - decoded(dense, i));
        }
    }
};

template <class T> struct Tag {
    using type = T;
};

// f(tags of the encoders of this type and these levels, without outliers and with them).
template <class I, Type type, class F> inline auto with_levels(const Encoder& told, F f) {
    const auto with = [&](auto levels) {
        constexpr Levels L = decltype(levels)::value;
        return f(Tag<BlockEncoder<I, type, L>>{}, Tag<SparseEncoder<I, type, L>>{});
    };
    switch (told.levels) {
        case Levels::table: return with(std::integral_constant<Levels, Levels::table>{});
        case Levels::e4m3: return with(std::integral_constant<Levels, Levels::e4m3>{});
        default: return with(std::integral_constant<Levels, Levels::uniform>{});
    }
}

template <class I, class F> inline auto with_encoder(const Encoder& told, Type type, F f) {
    switch (type) {
        case Type::f32: return with_levels<I, Type::f32>(told, f);
        case Type::f16: return with_levels<I, Type::f16>(told, f);
        default: return with_levels<I, Type::bf16>(told, f);
    }
}

template <class I>
inline Seen encode_block(const Encoder& told, Type type, const uint8_t* data, int64_t stride, const Statics& statics, const Encoded& out,
                         uint8_t* scratch) {
    return with_encoder<I>(told, type, [&](auto dense, auto sparse) {
        if (told.outliers) return typename decltype(sparse)::type(told, data, stride, statics, out, scratch).run();
        typename decltype(dense)::type encoder(told, data, stride, statics, out, scratch);
        const Seen seen = encoder.run();
        encoder.pack();
        return seen;
    });
}

template <class I> inline int64_t encode_scratch(const Encoder& told, Type type) {
    return with_encoder<I>(told, type, [&](auto dense, auto sparse) {
        return told.outliers ? decltype(sparse)::type::scratch_bytes(told) : decltype(dense)::type::scratch_bytes(told);
    });
}

}  // namespace
}  // namespace kvbits
