// The dense part of one block: what its ways of encoding share. They are in the files that the comments name.
#pragma once

#include "group.hpp"
#include "layout.hpp"
#include "planes.hpp"

namespace kvbits {
namespace {

template <class I, Type type, Levels levels> class BlockEncoder {
    using E = Elements<I, type>;
    using Room = Layout<I, type>;
    using f32 = typename I::f32;
    using i32 = typename I::i32;
    using u32 = typename I::u32;
    static constexpr int W = I::W;

    const Encoder& how_;
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
    float edges_[32];  // as how, and room for a look-up that begins further on
    Chooser<I, type, levels> chooser_;

public:
    static int64_t scratch_bytes(const Encoder& how) { return Room::scratch_bytes(how); }

    BlockEncoder(const Encoder& how, const uint8_t* data, int64_t stride, const Statics& statics, const Encoded& out, uint8_t* scratch)
        : how_(how), data_(data), stride_(stride), read_step_(how.length), padded_(Room::padded(how)), statics_(statics), out_(out),
          code_stride_(Room::code_stride(how)), top_((1 << how.bits) - 1), chooser_(how) {
        for (int i = 0; i < 32; ++i) edges_[i] = how.edges[i < 15 ? i : 15];
        auto take = [&](int64_t bytes) {
            uint8_t* here = scratch;
            scratch += (bytes + 63) / 64 * 64;
            return here;
        };
        scratch = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
        // Whole bytes go where they belong, unless vectors reach beyond the last of them.
        const bool in_place = how.bits == 8 && !padded_;
        codes_ = in_place ? out.codes : take(how.tokens * code_stride_);
        uint8_t* rows = padded_ ? take(how.tokens * Room::row_bytes(how)) : nullptr;
        floats_ = reinterpret_cast<float*>(take(4 * Room::floats(how)));
        if (padded_) pad(rows);
    }

    // Scales, zeros and codes; what is left to be done then is pack().
    bool run() {
        if (how_.per == Per::channel && how_.choice == Choice::fixed) {
            static_channels();
        } else if (how_.choice == Choice::norm) {
            for (int64_t t = 0; t < how_.tokens; ++t) normed_row(t);
        } else if (how_.per == Per::channel) {
            int64_t n = 0;
            for (int64_t first = 0; first < how_.tokens; first += how_.length, ++n) channel_groups(n, first);
        } else {
            const int64_t count = how_.tokens * how_.groups;
            for (int64_t first = 0; first < count; first += W) token_groups(first, count - first < W ? int(count - first) : W);
        }
        return chooser_.all_sound();
    }

    // Where the code of each element is until it is packed.
    uint8_t* code_at(int64_t token, int64_t channel) const { return codes_ + token * code_stride_ + channel; }

    void pack() const { kvbits::pack<I>({codes_, code_stride_, how_.tokens, how_.channels, how_.bits}, out_.codes); }

private:
    // Widen groups that are too short.
    KVBITS_STAGE void pad(uint8_t* rows) {
        const bool whole = how_.per == Per::channel;  // a row is then one group
        const int64_t groups = whole ? 1 : how_.groups, length = whole ? how_.channels : how_.length;
        const int64_t wide = whole ? int64_t(E::count) : Room::width(how_), bytes = Room::row_bytes(how_);
        for (int64_t t = 0; t < how_.tokens; ++t)
            for (int64_t g = 0; g < groups; ++g) {
                const uint8_t* from = data_ + t * stride_ + g * length * E::size;
                uint8_t* to = rows + t * bytes + g * wide * E::size;
                const int64_t rest = how_.channels - g * length, here = rest < length ? rest : length;
                std::memcpy(to, from, size_t(here * E::size));
                for (int64_t i = here; i < wide; ++i) std::memcpy(to + i * E::size, from + (here - 1) * E::size, E::size);
            }
        data_ = rows;
        stride_ = bytes;
        read_step_ = wide;
    }

    int64_t length_of(int64_t group) const {
        const int64_t rest = how_.channels - group * how_.length;
        return rest < how_.length ? rest : how_.length;
    }

    // per_token.hpp: groups of channels
    void token_groups(int64_t first, int count);
    template <bool Easy>
    void write(const Group<I>& made, int count, const uint8_t* const* at, const int64_t* length, uint8_t* const* code_at);
    KVBITS_STAGE f32 solved(const Group<I>& made, int64_t first, int count, const uint8_t* const* at, i32 constant);

    // per_channel.hpp: groups of tokens
    void channel_groups(int64_t n, int64_t first);
    template <int Units> void channels(int64_t n, int64_t first, const uint8_t* rows, int64_t c);
    template <bool Easy> void write_channels(const Group<I>* made, const uint8_t* at, uint8_t* code_at);
    KVBITS_STAGE void solve_channels(Group<I>* made, const uint8_t* at, const i32* low, const i32* high);

    // static_channels.hpp
    KVBITS_STAGE void static_channels();
    void channel_parameters(const float* all, int64_t channel, f32* out) const;

    // norm.hpp: rows with a norm
    KVBITS_STAGE void normed_row(int64_t token);
    double levels_of_row(const float* unit, float divisor, int64_t whole, uint8_t* code) const;
};

}  // namespace
}  // namespace kvbits
