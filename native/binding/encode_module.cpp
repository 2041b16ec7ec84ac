// The encoders' part of the Python module: checks what it is given, and encodes block by block without the GIL.

#include <algorithm>
#include <atomic>
#include <vector>

#include "binding.hpp"

namespace kvbits {
namespace {

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

// How many levels of the codec's table, and the edges between them; none for other levels.
void take_levels(Encoder& how, const std::vector<float>& edges, const std::vector<float>& table) {
    const bool given = how.levels == Levels::table;
    how.bottom = given ? -1.0f : 0.0f;
    how.span = given ? 2.0f : how.levels == Levels::e4m3 ? 448.0f : float((1 << how.bits) - 1);
    std::fill(std::begin(how.edges), std::end(how.edges), __builtin_inff());
    if (!given) return;
    const size_t count = size_t(1) << how.bits;
    require(edges.size() == count - 1, "edges must be " + std::to_string(count - 1) + " numbers");
    require(table.size() == count, "the table must be " + std::to_string(count) + " numbers");
    std::copy(edges.begin(), edges.end(), how.edges);
    std::copy(table.begin(), table.end(), how.table);
}

bool is_range(const Encoder& how) { return how.choice == Choice::range || how.choice == Choice::open_range; }
bool has_scale(const Encoder& how) { return how.choice != Choice::fixed; }
bool has_zero(const Encoder& how) { return is_range(how) || how.choice == Choice::half_quadratic; }
bool has_statics(const Encoder& how) { return how.choice == Choice::fixed && how.per == Per::channel; }

// What the encoders have arithmetic for, beyond what the enums can say; and the number of groups.
void take_groups(Encoder& how, int64_t length) {
    const bool range = is_range(how), quadratic = how.choice == Choice::half_quadratic, fixed = how.choice == Choice::fixed;
    const bool norm = how.choice == Choice::norm, statics = has_statics(how);
    require(range || quadratic || fixed || norm || how.choice == Choice::magnitude, "an unknown choice of scales");
    const bool fits = how.levels == Levels::uniform ? range || quadratic || statics
                      : how.levels == Levels::table ? (range || norm || statics) && how.bits <= 4
                                                    : how.levels == Levels::e4m3 && how.bits == 8 && (how.choice == Choice::magnitude || fixed);
    require(fits, "levels do not fit the bits or the choice of scales");
    require(how.per == Per::token || (how.per == Per::channel && (range || quadratic || (fixed && how.levels != Levels::e4m3))),
            "groups run along tokens or channels");
    const int64_t along = how.per == Per::token ? how.channels : how.tokens;
    require(length > 0 && length <= along, "groups are longer than the block, or empty");
    require(how.per == Per::token || along % length == 0, "groups of tokens must divide the block");
    how.length = length;
    how.groups = (along + length - 1) / length;
    require(how.groups == 1 || !(fixed || norm), "what has one scale has one group");
}

// The memory of all parts of a packed tensor, and where those of one block are.
struct Parts {
    Encoded all;
    int64_t codes, scales, outliers;  // numbers of a block

    Parts(Encoder& how, const Blocks& x, const nb::dict& packed) {
        const int64_t rows = x.tokens * how.bits / 8, across = how.per == Per::token ? x.tokens : how.groups;
        const int64_t columns = how.per == Per::token ? how.groups : x.channels;
        const nb::handle scale = entry(packed, "scale"), zero = entry(packed, "zero");
        all.codes = part_of(entry(packed, "codes"), "codes", Type::u8, x, rows, x.channels);
        require(has_scale(how) != scale.is_none() && has_zero(how) != zero.is_none(), "scale or zero is missing, or given where there is none");
        if (has_scale(how)) all.scale = reinterpret_cast<uint16_t*>(part_of(scale, "scale", Type::bf16, x, across, columns));
        if (has_zero(how)) all.zero = reinterpret_cast<uint16_t*>(part_of(zero, "zero", Type::f16, x, across, columns));
        take_outliers(how, x, entry(packed, "outlier_index"), entry(packed, "outlier_value"));
        codes = rows * x.channels;
        scales = across * columns;
        outliers = how.outliers;
    }

    Encoded operator[](int64_t index) const {
        const auto here = [&](uint16_t* part, int64_t size) { return part ? part + index * size : nullptr; };
        return {all.codes + index * codes, here(all.scale, scales), here(all.zero, scales), here(all.outlier_index, outliers),
                here(all.outlier_value, outliers)};
    }

private:
    void take_outliers(Encoder& how, const Blocks& x, nb::handle index, nb::handle value) {
        if (index.is_none()) return;
        require(is_range(how) || has_statics(how), "outliers beside scales that are chosen otherwise");
        require(x.tokens * x.channels <= 65536, "outliers index at most 65536 elements");
        how.outliers = nb::cast<int>(nb::getattr(index, "shape", nb::make_tuple(0))[nb::int_(-1)]);
        require(how.outliers > 0 && how.outliers <= x.tokens * x.channels, "more outliers than elements, or none");
        all.outlier_index = reinterpret_cast<uint16_t*>(list_of(index, "outlier_index", Type::u16, x, how.outliers));
        all.outlier_value = reinterpret_cast<uint16_t*>(list_of(value, "outlier_value", Type::bf16, x, how.outliers));
    }
};

// Static scales and zeros of all heads [H, D], and those of one block's head.
struct LayerStatics {
    Statics all;
    int64_t heads = 1, blocks = 1, channels = 0;  // blocks of a head lie next to each other in the leading dimensions

    LayerStatics(const Encoder& how, const Blocks& x, nb::handle scale, nb::handle zero) {
        if (!has_statics(how)) return;
        require(x.shape.size() >= 2, "static scales are for blocks [..., heads, blocks, tokens, channels]");
        heads = x.shape[x.shape.size() - 2];
        blocks = x.shape.back();
        channels = x.channels;
        all = {floats_of(scale, "static scale", {heads, x.channels}), floats_of(zero, "static zero", {heads, x.channels})};
        require(all.scale && all.zero, "static scale or zero is missing");
    }

    Statics operator[](int64_t index) const {
        const int64_t head = index / blocks % heads * channels;
        return all.scale ? Statics{all.scale + head, all.zero + head} : Statics{};
    }
};

// Encode every block of x into the parts of `packed`. Returns how many elements are unsound; then the parts are worthless.
int64_t encode(int isa, int threads, nb::handle tensor, int choice, int levels, int per, int bits, int64_t length,
               const std::vector<float>& edges, const std::vector<float>& table, float layer_scale, nb::handle static_scale,
               nb::handle static_zero, float limit, const nb::dict& packed) {
    const Blocks x = blocks_of(tensor, "x", element_types);
    require(x.tokens > 0 && x.channels > 0 && x.tokens < (1 << 30) && x.channels < (1 << 20), "an empty or enormous block");
    require(x.tokens % 8 == 0, "a block must be a multiple of 8 tokens");
    require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "codes have 2, 3, 4 or 8 bits");
    require_limit(limit, x.type);
    Encoder how;
    how.choice = Choice(choice);
    how.levels = Levels(levels);
    how.per = Per(per);
    how.bits = bits;
    how.tokens = x.tokens;
    how.channels = x.channels;
    how.limit = limit;
    how.scale = layer_scale;
    take_groups(how, length);
    take_levels(how, edges, table);
    require(how.choice != Choice::fixed || has_statics(how) || (layer_scale == layer_scale && layer_scale != 0), "the scale is 0 or NaN");
    const LayerStatics statics(how, x, static_scale, static_zero);
    const Parts parts(how, x, packed);
    const Kernels& kernels = kernels_at(isa);
    const nb::gil_scoped_release released;
    const int64_t bytes = kernels.encode_scratch_bytes(how, x.type);
    std::atomic<bool> sound{true};
    parallel(x.count, threads_of(threads), [&](int64_t index) {
        if (!kernels.encode(how, x.type, x[index], x.stride, statics[index], parts[index], scratch_of_thread(bytes))) sound = false;
    });
    return sound ? 0 : unsound(x, limit, threads_of(threads));
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
    parallel(x.count, threads_of(threads), [&](int64_t index) {
        kernels.hadamard(x.type, x[index], x.stride, x.tokens, x.channels, sign, out + index * x.tokens * x.channels, scratch_of_thread(bytes));
    });
}

}  // namespace

void bind_encode(nb::module_& m) {
    const nb::none none;
    m.def("encode", &encode, nb::kw_only(), nb::arg("isa"), nb::arg("threads"), nb::arg("x").none(), nb::arg("choice"), nb::arg("levels"),
          nb::arg("per"), nb::arg("bits"), nb::arg("length"), nb::arg("edges"), nb::arg("table"), nb::arg("layer_scale") = 1.0f,
          nb::arg("static_scale") = none, nb::arg("static_zero") = none, nb::arg("limit"), nb::arg("packed"));
    m.def("hadamard", &hadamard, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none());
    m.def("count_unsound", &count_unsound, nb::arg(), nb::arg().none(), nb::arg());
}

}  // namespace kvbits
