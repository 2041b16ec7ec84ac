// The encoders' part of the Python module: checks what it is given, and encodes block by block without the GIL.

#include <algorithm>
#include <atomic>
#include <vector>

#include "binding.hpp"
#include "../pool.hpp"

namespace kvbits {
namespace {

const std::initializer_list<Type> element_types = {Type::f32, Type::bf16, Type::f16};

// Blocks [..., tokens, channels] with any number of leading dimensions, of any strides but the last.
struct Blocks {
    uint8_t* data = nullptr;
    Type type = Type::none;
    int64_t count = 1, tokens = 0, channels = 0, stride = 0;  // of a token, in bytes
    std::vector<int64_t> shape, strides;                      // leading

    uint8_t* operator[](int64_t index) const {
        int64_t offset = 0;
        for (size_t i = shape.size(); i-- > 0; index /= shape[i]) offset += index % shape[i] * strides[i];
        return data + offset;
    }
};

Blocks blocks_of(nb::handle tensor, const char* what, std::initializer_list<Type> types) {
    require(!tensor.is_none(), std::string(what) + " is missing");
    Blocks blocks;
    blocks.data = memory_of(tensor, what, types, blocks.type);
    const nb::tuple shape = nb::cast<nb::tuple>(tensor.attr("shape"));
    const nb::tuple stride = nb::cast<nb::tuple>(tensor.attr("stride")());
    require(shape.size() >= 2, std::string(what) + " has " + std::to_string(shape.size()) + " dimensions; it must be [..., tokens, channels]");
    const size_t leading = shape.size() - 2;
    const int64_t size = size_of(blocks.type);
    for (size_t i = 0; i < leading; ++i) {
        blocks.shape.push_back(nb::cast<int64_t>(shape[i]));
        blocks.strides.push_back(nb::cast<int64_t>(stride[i]) * size);
        blocks.count *= blocks.shape.back();
    }
    blocks.tokens = nb::cast<int64_t>(shape[leading]);
    blocks.channels = nb::cast<int64_t>(shape[leading + 1]);
    blocks.stride = nb::cast<int64_t>(stride[leading]) * size;
    const int64_t step = nb::cast<int64_t>(stride[leading + 1]);
    require(step == 1 || blocks.channels == 1, std::string(what) + ": its last dimension has stride " + std::to_string(step) + " instead of 1");
    return blocks;
}

// Memory for one part of every block of `x`: contiguous [..., rows, columns].
uint8_t* part_of(nb::handle tensor, const char* what, Type type, const Blocks& x, int64_t rows, int64_t columns) {
    const Blocks part = blocks_of(tensor, what, {type});
    require(part.shape == x.shape && part.tokens == rows && part.channels == columns,
            std::string(what) + " must be [..., " + std::to_string(rows) + ", " + std::to_string(columns) + "] with the leading dimensions of x");
    int64_t expected = columns * size_of(type);
    bool contiguous = rows == 1 || part.stride == expected;
    expected *= rows;
    for (size_t i = part.shape.size(); i-- > 0; expected *= part.shape[i]) contiguous = contiguous && (part.shape[i] == 1 || part.strides[i] == expected);
    require(contiguous || part.count == 0, std::string(what) + " is not contiguous");
    return part.data;
}

// The same for a list of `count` entries: contiguous [..., count].
uint8_t* list_of(nb::handle tensor, const char* what, Type type, const Blocks& x, int64_t count) {
    require(!tensor.is_none(), std::string(what) + " is missing");
    Type found = Type::none;
    uint8_t* data = memory_of(tensor, what, {type}, found);
    const nb::tuple shape = nb::cast<nb::tuple>(tensor.attr("shape"));
    bool fits = shape.size() == x.shape.size() + 1 && nb::cast<int64_t>(shape[shape.size() - 1]) == count;
    for (size_t i = 0; fits && i < x.shape.size(); ++i) fits = nb::cast<int64_t>(shape[i]) == x.shape[i];
    require(fits, std::string(what) + " must be [..., " + std::to_string(count) + "] with the leading dimensions of x");
    require(nb::cast<bool>(tensor.attr("is_contiguous")()), std::string(what) + " is not contiguous");
    return data;
}

template <class Word> int64_t unsound_in(const uint8_t* row, int64_t count, Word limit) {  // NaN is above infinity, as an integer
    constexpr auto magnitude = Word(Word(~Word(0)) >> 1);
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        Word word;
        std::memcpy(&word, row + i * int64_t(sizeof word), sizeof word);
        found += Word(word & magnitude) > limit;
    }
    return found;
}

// Elements that are NaN or greater than the limit in magnitude.
int64_t unsound(const Blocks& x, float limit, int threads) {
    std::atomic<int64_t> found{0};
    uint32_t word;
    std::memcpy(&word, &limit, sizeof word);
    // The limit is an element's own, so its bits are exact in any of the types.
    const int exponent = int(word >> 23) - 112;
    const uint16_t half = uint16_t(x.type == Type::bf16 ? word >> 16 : uint32_t(exponent) << 10 | (word >> 13 & 0x3FF));
    parallel(x.count, threads, [&](int64_t index) {
        int64_t here = 0;
        for (int64_t t = 0; t < x.tokens; ++t) {
            const uint8_t* row = x[index] + t * x.stride;
            here += x.type == Type::f32 ? unsound_in<uint32_t>(row, x.channels, word) : unsound_in<uint16_t>(row, x.channels, half);
        }
        found += here;
    });
    return found;
}

void require_limit(float limit, Type type) {
    require(limit >= 1 && limit <= (type == Type::f16 ? 65504.0f : 3.4028235e38f), "the limit is not an element's");
}

int64_t count_unsound(int threads, nb::handle tensor, float limit) {
    const Blocks x = blocks_of(tensor, "x", element_types);
    require_limit(limit, x.type);
    const nb::gil_scoped_release released;
    return unsound(x, limit, threads);
}

// A list of floats that is to hold `count` of them, or none.
std::vector<float> floats_in(nb::handle list, const char* what, size_t count) {
    std::vector<float> all;
    require(nb::try_cast(list, all) && all.size() == count, std::string(what) + " must be " + std::to_string(count) + " numbers");
    return all;
}

// How to encode blocks of x, checked; without what is given for its scales, and without outliers.
Encoder encoder_of(const Blocks& x, Choice choice, Levels levels, Per per, int bits, int64_t length, float limit) {
    require(x.tokens > 0 && x.channels > 0 && x.tokens < (1 << 30) && x.channels < (1 << 20), "an empty or enormous block");
    require(x.tokens % 8 == 0, "a block must be a multiple of 8 tokens");
    require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "codes have 2, 3, 4 or 8 bits");
    require_limit(limit, x.type);
    const bool quadratic = choice == Choice::half_quadratic, range = choice == Choice::range || choice == Choice::open_range;
    const bool given = choice == Choice::fixed, norm = choice == Choice::norm, per_channel = per == Per::channel;
    require(range || quadratic || given || norm || choice == Choice::magnitude, "an unknown choice of scales");
    const bool fits = levels == Levels::uniform ? range || quadratic || (given && per_channel)
                      : levels == Levels::table ? (range || norm || (given && per_channel)) && bits <= 4
                                                : levels == Levels::e4m3 && bits == 8 && (choice == Choice::magnitude || given);
    require(fits, "levels do not fit the bits or the choice of scales");
    require(per == Per::token || (per_channel && (range || quadratic || (given && levels != Levels::e4m3))), "groups run along tokens or channels");
    const int64_t along = per == Per::token ? x.channels : x.tokens;
    require(length > 0 && length <= along, "groups are longer than the block, or empty");
    require(per == Per::token || along % length == 0, "groups of tokens must divide the block");
    Encoder encoder;
    encoder.choice = choice;
    encoder.levels = levels;
    encoder.per = per;
    encoder.bits = bits;
    encoder.tokens = x.tokens;
    encoder.channels = x.channels;
    encoder.length = length;
    encoder.groups = (along + length - 1) / length;
    encoder.limit = limit;
    encoder.bottom = levels == Levels::table ? -1.0f : 0.0f;
    encoder.span = levels == Levels::table ? 2.0f : levels == Levels::e4m3 ? 448.0f : float((1 << bits) - 1);
    require(encoder.groups == 1 || !(given || norm), "what has one scale has one group");
    return encoder;
}

void set_table(Encoder& encoder, nb::handle edges, nb::handle table) {
    for (float& edge : encoder.edges) edge = __builtin_inff();
    if (encoder.levels != Levels::table) return;
    const size_t count = size_t(1) << encoder.bits;
    const auto between = floats_in(edges, "edges", count - 1), all = floats_in(table, "the table", count);
    std::copy(between.begin(), between.end(), encoder.edges);
    std::copy(all.begin(), all.end(), encoder.table);
}

// Blocks, and where the parts of each go: the parts of all blocks lie next to each other.
struct Encoding {
    const Blocks& x;
    Encoder encoder;
    Encoded parts = {};             // of the first block
    int64_t codes = 0, scales = 0;  // bytes of codes and number of scales of a block
    Statics statics = {};           // of the first head
    int64_t heads = 1, blocks = 1;  // blocks of a head, next to each other in the leading dimensions

    void set_scale(float fixed) {
        if (encoder.choice != Choice::fixed || encoder.per == Per::channel) return;
        require(fixed == fixed && fixed != 0, "the scale is 0 or NaN");
        encoder.scale = fixed;
    }

    void set_statics(nb::handle scale, nb::handle zero) {
        if (encoder.choice != Choice::fixed || encoder.per != Per::channel) return;
        require(x.shape.size() >= 2, "static scales are for blocks [..., heads, blocks, tokens, channels]");
        heads = x.shape[x.shape.size() - 2];
        blocks = x.shape.back();
        statics = {floats_of(scale, "static scale", {heads, x.channels}), floats_of(zero, "static zero", {heads, x.channels})};
        require(statics.scale && statics.zero, "static scale or zero is missing");
    }

    void set_dense(nb::handle code, nb::handle scale, nb::handle zero) {
        const bool per_token = encoder.per == Per::token;
        const int64_t rows = x.tokens * encoder.bits / 8, across = per_token ? x.tokens : encoder.groups;
        const int64_t columns = per_token ? encoder.groups : x.channels;
        const bool has_scale = encoder.choice != Choice::fixed;
        const bool has_zero = has_scale && encoder.choice != Choice::norm && encoder.choice != Choice::magnitude;
        codes = rows * x.channels;
        scales = across * columns;
        parts.codes = part_of(code, "codes", Type::u8, x, rows, x.channels);
        require(has_scale != scale.is_none() && has_zero != zero.is_none(), "scale or zero is missing, or given where there is none");
        if (has_scale) parts.scale = reinterpret_cast<uint16_t*>(part_of(scale, "scale", Type::bf16, x, across, columns));
        if (has_zero) parts.zero = reinterpret_cast<uint16_t*>(part_of(zero, "zero", Type::f16, x, across, columns));
    }

    void set_outliers(nb::handle index, nb::handle value) {
        if (index.is_none()) return;
        const bool range = encoder.choice == Choice::range || encoder.choice == Choice::open_range;
        require(range || statics.scale, "outliers beside scales that are chosen otherwise");
        require(x.tokens * x.channels <= 65536, "outliers index at most 65536 elements");
        const nb::object count = nb::getattr(index, "shape", nb::make_tuple(0))[nb::int_(-1)];
        encoder.outliers = nb::cast<int>(count);
        require(encoder.outliers > 0 && encoder.outliers <= x.tokens * x.channels, "more outliers than elements, or none");
        parts.outlier_index = reinterpret_cast<uint16_t*>(list_of(index, "outlier_index", Type::u16, x, encoder.outliers));
        parts.outlier_value = reinterpret_cast<uint16_t*>(list_of(value, "outlier_value", Type::bf16, x, encoder.outliers));
    }

    Encoded parts_at(int64_t index) const {
        const auto at = [index](auto* all, int64_t size) { return all ? all + index * size : nullptr; };
        return {at(parts.codes, codes), at(parts.scale, scales), at(parts.zero, scales), at(parts.outlier_index, encoder.outliers),
                at(parts.outlier_value, encoder.outliers)};
    }

    Statics statics_at(int64_t index) const {
        if (!statics.scale) return {};
        const int64_t from = index / blocks % heads * x.channels;
        return {statics.scale + from, statics.zero + from};
    }

    // What was seen in all blocks together.
    Seen run(const Kernels& kernels, int threads) const {
        const int64_t bytes = kernels.encode_scratch_bytes(encoder, x.type);
        std::vector<Seen> seen(size_t(x.count));
        parallel(x.count, threads, [&](int64_t index) {
            seen[size_t(index)] =
                kernels.encode(encoder, x.type, x[index], x.stride, statics_at(index), parts_at(index), scratch_of_thread(bytes));
        });
        Seen all;
        for (const Seen& block : seen) {
            all.sound = all.sound && block.sound;
            all.largest = block.largest > all.largest ? block.largest : all.largest;
        }
        return all;
    }
};

// Encode every block of x. Returns how many elements are unsound (then the parts are worthless), and, where one scale
// is fixed for all, the largest magnitude.
nb::tuple encode(int isa, int threads, nb::handle tensor, int choice, int levels, int per, int bits, int64_t length, nb::handle codes,
                 nb::handle scale, nb::handle zero, nb::handle outlier_index, nb::handle outlier_value, nb::handle edges, nb::handle table,
                 float fixed, nb::handle static_scale, nb::handle static_zero, float limit) {
    const Blocks x = blocks_of(tensor, "x", element_types);
    Encoding encoding{x, encoder_of(x, Choice(choice), Levels(levels), Per(per), bits, length, limit)};
    set_table(encoding.encoder, edges, table);
    encoding.set_scale(fixed);
    encoding.set_statics(static_scale, static_zero);
    encoding.set_dense(codes, scale, zero);
    encoding.set_outliers(outlier_index, outlier_value);
    const Kernels& kernels = kernels_at(isa);
    threads = threads < 1 ? 1 : threads;
    Seen seen;
    int64_t bad = 0;
    {
        const nb::gil_scoped_release released;
        seen = encoding.run(kernels, threads);
        if (!seen.sound) bad = unsound(x, limit, threads);
    }
    return nb::make_tuple(bad, seen.largest);
}

// Rotate every block of x [..., tokens, channels] into `output`, float32 and contiguous.
void hadamard(int isa, int threads, nb::handle tensor, nb::handle signs, nb::handle output) {
    const Blocks x = blocks_of(tensor, "x", element_types);
    require(x.tokens > 0 && x.channels > 0 && x.tokens < (1 << 30) && x.channels <= (1 << 16), "an empty or enormous block");
    const float* sign = floats_of(signs, "signs", {x.channels});
    require(sign, "signs are missing");
    auto* out = reinterpret_cast<float*>(part_of(output, "output", Type::f32, x, x.tokens, x.channels));
    const Kernels& kernels = kernels_at(isa);
    const nb::gil_scoped_release released;
    const int64_t bytes = kernels.hadamard_scratch_bytes(x.channels);
    parallel(x.count, threads < 1 ? 1 : threads, [&](int64_t index) {
        kernels.hadamard(x.type, x[index], x.stride, x.tokens, x.channels, sign, out + index * x.tokens * x.channels, scratch_of_thread(bytes));
    });
}

}  // namespace

void bind_encode(nb::module_& m) {
    m.def("encode", &encode, nb::kw_only(), nb::arg("isa"), nb::arg("threads"), nb::arg("x").none(), nb::arg("choice"),
          nb::arg("levels"), nb::arg("per"), nb::arg("bits"), nb::arg("length"), nb::arg("codes").none(),
          nb::arg("scale").none(), nb::arg("zero").none(), nb::arg("outlier_index").none(),
          nb::arg("outlier_value").none(), nb::arg("edges").none(), nb::arg("table").none(), nb::arg("fixed"),
          nb::arg("static_scale").none(), nb::arg("static_zero").none(), nb::arg("limit"));
    m.def("hadamard", &hadamard, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none());
    m.def("count_unsound", &count_unsound, nb::arg(), nb::arg().none(), nb::arg());
}

}  // namespace kvbits
