// Encoding one block [tokens, channels], bit for bit as the codecs' `encode` does: the same float32 operations in the
// same order on every element that is stored. HQQ's zeros are the exception (see encode/half_quadratic.hpp).
//
// A block is read from memory once. Groups of channels are read W at a time, so that their parameters are computed in
// the lanes of one vector; groups of tokens have channels in the lanes. Their elements are read twice, the second time
// from the nearest cache. Codes are gathered as bytes, and packed along tokens when the block is done.
#pragma once

#include "encode/block.hpp"
#include "encode/norm.hpp"
#include "encode/per_channel.hpp"
#include "encode/per_token.hpp"
#include "encode/sparse.hpp"
#include "encode/static_channels.hpp"

namespace kvbits {
namespace {

template <class T> struct Tag {
    using type = T;
};

// f(tags of the encoders of this type and these levels, without outliers and with them).
template <class I, Type type, class F> inline auto with_levels(const Encoder& how, F f) {
    const auto with = [&](auto levels) {
        constexpr Levels L = decltype(levels)::value;
        return f(Tag<BlockEncoder<I, type, L>>{}, Tag<SparseEncoder<I, type, L>>{});
    };
    switch (how.levels) {
        case Levels::table: return with(std::integral_constant<Levels, Levels::table>{});
        case Levels::e4m3: return with(std::integral_constant<Levels, Levels::e4m3>{});
        default: return with(std::integral_constant<Levels, Levels::uniform>{});
    }
}

template <class I, class F> inline auto with_encoder(const Encoder& how, Type type, F f) {
    switch (type) {
        case Type::f32: return with_levels<I, Type::f32>(how, f);
        case Type::f16: return with_levels<I, Type::f16>(how, f);
        default: return with_levels<I, Type::bf16>(how, f);
    }
}

// False where an element is NaN, infinite or beyond the limit: then the block is worthless.
template <class I>
inline bool encode_block(const Encoder& how, Type type, const uint8_t* data, int64_t stride, const Statics& statics, const Encoded& out,
                         uint8_t* scratch) {
    return with_encoder<I>(how, type, [&](auto dense, auto sparse) {
        if (how.outliers) return typename decltype(sparse)::type(how, data, stride, statics, out, scratch).run();
        typename decltype(dense)::type encoder(how, data, stride, statics, out, scratch);
        const bool sound = encoder.run();
        encoder.pack();
        return sound;
    });
}

template <class I> inline int64_t encode_scratch(const Encoder& how, Type type) {
    return with_encoder<I>(how, type, [&](auto dense, auto sparse) {
        return how.outliers ? decltype(sparse)::type::scratch_bytes(how) : decltype(dense)::type::scratch_bytes(how);
    });
}

}  // namespace
}  // namespace kvbits
