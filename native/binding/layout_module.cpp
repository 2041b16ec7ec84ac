// What the Python module knows of a layer: how its blocks lie in memory, and angles within a block. Checked once.

#include <cmath>

#include "binding.hpp"

namespace kvbits {
namespace {

template <class T> T field(const nb::dict& from, const char* name) {
    if (!from.contains(name)) throw nb::value_error((std::string("the layout lacks ") + name).c_str());
    return cast<T>(from[name], name);
}

int64_t part(int64_t offset, int64_t bytes, int64_t record, const char* what) {
    require(offset >= 0 && offset % 2 == 0 && bytes >= 0 && bytes <= record && offset <= record - bytes,
            std::string(what) + " does not lie inside the record");
    return offset;
}

// What the kernels have arithmetic for, beyond what the enums can say.
void check_format(const Side& side, int tokens) {
    require(side.bits == 2 || side.bits == 3 || side.bits == 4 || side.bits == 8, "codes have 2, 3, 4 or 8 bits");
    require(side.levels == Levels::uniform || (side.levels == Levels::table && side.bits <= 4) ||
                (side.levels == Levels::e4m3 && side.bits == 8), "levels do not fit the bits");
    require(side.per == Per::token || side.per == Per::channel || side.per == Per::layer, "unknown direction of groups");
    require(side.length > 0 && side.groups > 0, "groups are missing");
    const int across = side.per == Per::token ? side.channels : tokens;
    require(int64_t(side.length) * side.groups >= across && int64_t(side.length) * (side.groups - 1) < across, "groups do not cover the block");
    if (side.levels == Levels::e4m3)
        require(!side.zero && side.per != Per::channel && side.groups == 1, "e4m3 has one scale per token or per layer, and no zero");
    else
        require(side.per != Per::layer, "only e4m3 has one scale per layer");
    require(side.fixed ? side.per != Per::token && side.groups == 1 : side.per != Per::layer, "static scales are per layer or per channel");
    if (side.per == Per::channel && !side.fixed)
        require(side.length % 16 == 0 && tokens % side.length == 0, "groups of tokens must be multiples of 16 that divide the block");
}

Side side_of(const nb::dict& from, int tokens, int64_t record) {
    Side side;
    side.bits = field<int>(from, "bits");
    side.levels = Levels(field<int>(from, "levels"));
    side.per = Per(field<int>(from, "per"));
    side.type = Type(field<int>(from, "type"));
    side.channels = field<int>(from, "channels");
    side.length = field<int>(from, "length");
    side.groups = field<int>(from, "groups");
    side.zero = field<bool>(from, "zero");
    side.fixed = field<bool>(from, "fixed");
    side.outliers = field<int>(from, "outliers");
    require(side.channels > 0 && side.channels % 8 == 0 && side.channels <= most_channels, "channels must be a multiple of 8 up to 512");
    int64_t code_bytes;
    if (side.levels == Levels::exact) {
        require(side.type == Type::f32 || side.type == Type::bf16 || side.type == Type::f16, "exact elements of an unknown type");
        require(side.bits == 0, "exact elements have no codes");
        code_bytes = int64_t(tokens) * side.channels * size_of(side.type);
    } else {
        check_format(side, tokens);
        code_bytes = int64_t(tokens) * side.channels * side.bits / 8;
        if (!side.fixed) {
            const int64_t count = int64_t(side.groups) * (side.per == Per::token ? tokens : side.channels);
            side.scale = part(field<int64_t>(from, "scale"), 2 * count, record, "scale");
            if (side.zero) side.zeros = part(field<int64_t>(from, "zeros"), 2 * count, record, "zero");
        }
        const auto table = field<std::vector<float>>(from, "table");
        require(side.levels != Levels::table || int(table.size()) == side.levels_count(), "the table has the wrong length");
        for (int i = 0; i < side.levels_count(); ++i) {
            side.table[i] = side.levels == Levels::table ? table[size_t(i)] : float(i);
            require(std::fabs(side.table[i]) <= 1e38f, "the table has levels that are not finite");  // nor is their range
        }
    }
    side.codes = part(field<int64_t>(from, "codes"), code_bytes, record, "codes");
    require(side.outliers >= 0, "a negative number of outliers");
    if (side.outliers) {
        require(int64_t(tokens) * side.channels <= 65536, "outliers index at most 65536 elements");
        require(side.levels != Levels::exact, "exact elements have no outliers");
        side.outlier_index = part(field<int64_t>(from, "outlier_index"), 2 * int64_t(side.outliers), record, "outlier_index");
        side.outlier_value = part(field<int64_t>(from, "outlier_value"), 2 * int64_t(side.outliers), record, "outlier_value");
    }
    return side;
}

Record record_of(int tokens, int64_t bytes, const nb::dict& key, const nb::dict& value) {
    require(tokens > 0 && tokens % 8 == 0 && tokens <= 4096, "a block must be a multiple of 8 tokens up to 4096");
    require(bytes > 0 && bytes % 64 == 0, "a record must be a multiple of 64 bytes");
    Record record;
    record.tokens = tokens;
    record.bytes = bytes;
    record.key = side_of(key, tokens, bytes);
    record.value = side_of(value, tokens, bytes);
    return record;
}

Steps steps_of(nb::handle cos, nb::handle sin, bool interleaved) {
    const Array row = array_of(cos, "step cos", 2, {Type::f32});
    require(row.shape[0] > 0 && row.shape[0] <= 4096 && row.shape[1] > 0 && row.shape[1] <= 256, "steps of no or too many tokens or pairs");
    const float *c = floats_of(cos, "step cos", {row.shape[0], row.shape[1]}), *s = floats_of(sin, "step sin", {row.shape[0], row.shape[1]});
    require(s, "step sin is missing");
    return Steps(c, s, int(row.shape[0]), int(row.shape[1]), interleaved);
}

}  // namespace

void bind_layouts(nb::module_& m) {
    nb::class_<Record>(m, "Layout", "What a block looks like to the kernels.")
        .def("__init__", [](Record* self, int tokens, int64_t bytes, const nb::dict& key, const nb::dict& value) {
            new (self) Record(record_of(tokens, bytes, key, value));
        }, nb::arg("tokens"), nb::arg("bytes"), nb::arg("key"), nb::arg("value"));
    nb::class_<Steps>(m, "Steps", "Rotary angles of the tokens of a block, beyond those of its first.")
        .def("__init__", [](Steps* self, nb::handle cos, nb::handle sin, bool interleaved) {
            new (self) Steps(steps_of(cos, sin, interleaved));
        }, nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("interleaved"));
}

}  // namespace kvbits
