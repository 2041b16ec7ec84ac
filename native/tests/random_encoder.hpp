// Random blocks through every encoder and every rotation, which must agree to the bit.
#pragma once
#include <algorithm>
#include <cstdio>

#include "numbers.hpp"

namespace kvbits {

// How a random encoder encodes.
inline Encoder any_encoder(Type type) {
    Encoder encoder;
    encoder.choice = one_of({Choice::range, Choice::range, Choice::open_range, Choice::half_quadratic, Choice::magnitude, Choice::fixed, Choice::fixed, Choice::norm});
    const bool range = encoder.choice == Choice::range || encoder.choice == Choice::open_range, fixed = encoder.choice == Choice::fixed, grouped = range || encoder.choice == Choice::half_quadratic;
    encoder.levels = encoder.choice == Choice::magnitude ? Levels::e4m3 : encoder.choice == Choice::norm ? Levels::table
                : range ? one_of({Levels::uniform, Levels::table}) : fixed ? one_of({Levels::uniform, Levels::table, Levels::e4m3}) : Levels::uniform;
    encoder.bits = encoder.levels == Levels::e4m3 ? 8 : encoder.levels == Levels::table ? any(2, 4) : one_of({2, 3, 4, 8});
    encoder.tokens = 8 * any(1, 20);
    encoder.channels = any(1, 160);
    encoder.per = grouped ? one_of({Per::token, Per::channel}) : fixed && encoder.levels != Levels::e4m3 ? Per::channel : Per::token;
    const int64_t along = encoder.per == Per::token ? encoder.channels : encoder.tokens;
    encoder.length = encoder.per == Per::channel ? (grouped && chance(60) ? 8 : along) : grouped ? any(1, int(along)) : along;
    encoder.groups = (along + encoder.length - 1) / encoder.length;
    encoder.bottom = encoder.levels == Levels::table ? -1.0f : 0.0f;
    encoder.span = encoder.levels == Levels::table ? 2.0f : encoder.levels == Levels::e4m3 ? 448.0f : float((1 << encoder.bits) - 1);
    encoder.scale = 0.01f;
    encoder.limit = type == Type::f16 ? 65504.0f : 0x1p120f;
    for (float& edge : encoder.edges) edge = INFINITY;
    if (encoder.levels == Levels::table) {
        const int count = 1 << encoder.bits;
        for (int i = 0; i < count; ++i) encoder.table[i] = normal();
        std::sort(encoder.table, encoder.table + count);
        for (int i = 0; i + 1 < count; ++i) encoder.edges[i] = (encoder.table[i] + encoder.table[i + 1]) / 2;
    }
    if ((range || encoder.per == Per::channel) && encoder.choice != Choice::half_quadratic && chance(50))
        encoder.outliers = any(1, int(encoder.tokens * encoder.channels));
    return encoder;
}

// One random block through every encoder and rotation; whether all write the same bits.
inline bool encoded_alike() {
    const Type type = one_of({Type::f32, Type::bf16, Type::f16});
    const Encoder encoder = any_encoder(type);
    Tensor x;
    x.make(type, {encoder.tokens, encoder.channels + (chance(30) ? 3 : 0)});
    std::vector<float> scale(size_t(encoder.channels)), zero(size_t(encoder.channels)), signs(size_t(encoder.channels));
    for (float& s : scale) s = chance(5) ? 0 : std::fabs(normal());
    for (float& z : zero) z = normal() * 5;
    for (float& s : signs) s = chance(50) ? 1.0f : -1.0f;
    const bool scales = encoder.choice != Choice::fixed, zeros = encoder.choice == Choice::range || encoder.choice == Choice::open_range || encoder.choice == Choice::half_quadratic;
    const int64_t count = encoder.groups * (encoder.per == Per::token ? encoder.tokens : encoder.channels);
    std::vector<uint8_t> first;
    for (const Kernels* kernels : all_kernels()) {
        std::vector<uint8_t> codes(size_t(encoder.tokens * encoder.channels * encoder.bits / 8));
        std::vector<uint16_t> parts[4];
        const int64_t sizes[4] = {scales ? count : 0, zeros ? count : 0, encoder.outliers, encoder.outliers};
        for (int i = 0; i < 4; ++i) parts[i].resize(size_t(sizes[i]));
        Encoded out;
        out.codes = codes.data();
        out.scale = scales ? parts[0].data() : nullptr;
        out.zero = zeros ? parts[1].data() : nullptr;
        out.outlier_index = parts[2].data();
        out.outlier_value = parts[3].data();
        std::vector<uint8_t> scratch(size_t(kernels->encode_scratch_bytes(encoder, type)));
        if (!kernels->encode(encoder, type, x.array.data, x.array.stride[0], {scale.data(), zero.data()}, out, scratch.data())) return false;
        std::vector<float> rotated(size_t(encoder.tokens * encoder.channels));
        scratch.assign(size_t(kernels->hadamard_scratch_bytes(encoder.channels)), 0);
        scratch.shrink_to_fit();
        kernels->hadamard(type, x.array.data, x.array.stride[0], encoder.tokens, encoder.channels, signs.data(), rotated.data(), scratch.data());
        std::vector<uint8_t> all;
        const auto add = [&](const void* from, size_t bytes) {
            all.insert(all.end(), static_cast<const uint8_t*>(from), static_cast<const uint8_t*>(from) + bytes);
        };
        add(rotated.data(), 4 * rotated.size());
        if (encoder.choice != Choice::half_quadratic) {  // its powers differ in their last bits
            add(codes.data(), codes.size());
            for (const auto& part : parts) add(part.data(), 2 * part.size());
        }
        if (first.empty()) first = all;
        if (first != all) {
            std::printf("%s: choice %d, levels %d, per %d, %d bits, [%d, %d], groups of %d, %d outliers\n", kernels->name, int(encoder.choice),
                        int(encoder.levels), int(encoder.per), encoder.bits, int(encoder.tokens), int(encoder.channels), int(encoder.length), encoder.outliers);
            return false;
        }
    }
    return true;
}

}  // namespace kvbits
