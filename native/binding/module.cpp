// The Python module: checks what it is given, cuts the work into spans, and runs them without the GIL.

#include <cmath>

#include "binding.hpp"

namespace kvbits {
namespace {

const std::initializer_list<Type> element_types = {Type::f32, Type::bf16, Type::f16};
constexpr int64_t most_tokens = 1 << 30;  // own tokens and columns are counted in 32 bits
constexpr int most_threads = 1024;

// -- layouts -----------------------------------------------------------------------------------------------------

template <class T> T cast(nb::handle from, const char* what) {
    T to;
    if (!nb::try_cast(from, to)) throw nb::type_error((std::string(what) + " cannot be " + nb::repr(from).c_str()).c_str());
    return to;
}

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

// -- attention ---------------------------------------------------------------------------------------------------

std::vector<int> counts_of(nb::handle counts, int batch, int64_t most, const char* what) {
    auto all = cast<std::vector<int>>(counts, what);
    require(int(all.size()) == batch, std::string(what) + " must have one number for each row");
    for (const int count : all) require(count >= 0 && count <= most, std::string(what) + " is out of range");
    return all;
}

void set_tensors(Job& job, nb::handle keys, nb::handle values, nb::handle query, nb::handle output) {
    const int key_channels = job.record.key.channels, value_channels = job.record.value.channels;
    job.keys = array_of(keys, "keys", 4, element_types);
    job.values = array_of(values, "values", 4, element_types);
    job.query = array_of(query, "query", 4, element_types);
    job.output = array_of(output, "output", 4, element_types);
    const int64_t *k = job.keys.shape, *v = job.values.shape, *q = job.query.shape, *o = job.output.shape;
    const int64_t batch = k[0], heads = k[1], q_heads = q[1], queries = q[2], most = 1 << 24;
    require(batch > 0 && heads > 0 && queries > 0 && batch * heads < most && q_heads < most && queries < most && q_heads * queries < most,
            "an empty or enormous call");
    require(k[3] == key_channels && v[3] == value_channels, "keys or values do not have the layout's channels");
    require(v[0] == batch && v[1] == heads && v[2] == k[2], "keys and values differ in rows, heads or tokens");
    require(q[0] == batch && q[3] == key_channels && q_heads % heads == 0 && q_heads > 0, "query does not fit the keys");
    require(o[0] == batch && o[1] == q_heads && o[2] == queries && o[3] == value_channels, "output does not fit query and values");
    job.batch = int(batch);
    job.heads = int(heads);
    job.group = int(q_heads / heads);
    job.queries = int(queries);
}

// Returns how many blocks the longest row has.
int set_blocks(Job& job, nb::handle pool, nb::handle table, nb::handle counts) {
    const Array blocks = array_of(pool, "pool", 3, {Type::u8}), rows = array_of(table, "table", 2, {Type::i64});
    const int64_t bytes = job.record.bytes;
    require(blocks.shape[0] == 0 || (blocks.shape[1] == job.heads && blocks.shape[2] == bytes && blocks.stride[1] == bytes &&
                                     blocks.stride[0] == bytes * job.heads), "pool does not fit the layout");
    require(reinterpret_cast<uintptr_t>(blocks.data) % 2 == 0, "pool is not aligned");
    require(rows.shape[0] == job.batch, "table must have one row for each row of the batch");
    job.pool = blocks.data;
    job.table = reinterpret_cast<const int64_t*>(rows.data);
    job.table_stride = rows.stride[0] / 8;
    job.counts = counts_of(counts, job.batch, rows.shape[1], "counts");
    int most = 0;
    for (int b = 0; b < job.batch; ++b) {
        const int count = job.counts[size_t(b)];
        most = count > most ? count : most;
        for (int n = 0; n < count; ++n) {
            const int64_t block = job.table[b * job.table_stride + n];
            require(block >= 0 && block < blocks.shape[0], "table names a block that the pool does not have");
        }
    }
    return most;
}

void set_numbers(Job& job, int most_blocks, nb::handle held, int first_token, int sinks, int dropped, int64_t offset,
                 int64_t first_query_column, int64_t window) {
    const int64_t packed = int64_t(most_blocks) * job.record.tokens;
    job.held = counts_of(held, job.batch, job.keys.shape[2], "held");
    require(first_token >= 0 && sinks >= 0 && dropped >= 0, "negative token numbers");
    require(first_token + packed < most_tokens && job.keys.shape[2] + packed + dropped < most_tokens, "more tokens than can be numbered");
    require(offset >= 0 && offset < most_tokens && window >= 0 && first_query_column >= 0 && first_query_column < most_tokens,
            "offset, window or column of the first query is out of range");
    job.first_token = first_token;
    job.sinks = sinks;
    job.dropped = dropped;
    job.offset = offset;
    job.first_query_column = first_query_column;
    job.window = window;
}

void set_statics(Job& job, nb::handle statics) {
    const auto all = cast<nb::tuple>(statics, "statics");
    require(all.size() == 4, "statics are key scale, key zero, value scale, value zero");
    const auto parameter = [&](size_t i, const Side& side, const char* what, bool wanted) -> const float* {
        if (!wanted) return nullptr;
        const float* found = side.per == Per::layer ? floats_of(all[i], what, {1}) : floats_of(all[i], what, {job.heads, side.channels});
        require(found, std::string(what) + " is missing");
        return found;
    };
    const Side &k = job.record.key, &v = job.record.value;
    job.key_scale = parameter(0, k, "key scale", k.fixed);
    job.key_zero = parameter(1, k, "key zero", k.fixed && k.zero);
    job.value_scale = parameter(2, v, "value scale", v.fixed);
    job.value_zero = parameter(3, v, "value zero", v.fixed && v.zero);
}

void set_rope(Job& job, int most_blocks, nb::handle steps, nb::handle base_cos, nb::handle base_sin, nb::handle whole) {
    if (steps.is_none()) return;
    require(nb::isinstance<Steps>(steps), "steps are not Steps");
    job.steps = nb::cast<const Steps*>(steps);
    require(job.steps->tokens == job.record.tokens && 2 * job.steps->pairs <= job.record.key.channels, "steps do not fit the keys");
    const Array cos = array_of(base_cos, "base cos", 3, {Type::f32}), sin = array_of(base_sin, "base sin", 3, {Type::f32});
    for (int i = 0; i < 3; ++i) require(cos.shape[i] == sin.shape[i] && cos.stride[i] == sin.stride[i], "base cos and sin differ");
    require((cos.shape[0] == 1 || cos.shape[0] == job.batch) && cos.shape[2] == job.steps->pairs, "base cos does not fit the keys");
    require(cos.shape[1] >= most_blocks, "base cos has too few rows for the blocks");
    job.base_cos = reinterpret_cast<const float*>(cos.data);
    job.base_sin = reinterpret_cast<const float*>(sin.data);
    job.base_batch = cos.shape[0] == 1 ? 0 : cos.stride[0] / 4;
    job.base_block = cos.stride[1] / 4;
    job.turned = cast<bool>(whole, "whole");
    require(!job.turned || !job.turns_query(), "rotated keys cannot be stored before the rotary embedding");
}

void set_transforms(Job& job, int most_blocks, nb::handle transforms) {
    if (transforms.is_none()) return;
    const auto all = cast<nb::tuple>(transforms, "transforms");
    require(all.size() == 9, "transforms are key mean, key balance, key rotation, value mean, value rotation back, steps, "
                             "base cos, base sin, whole");
    const int64_t heads = job.heads, key_channels = job.record.key.channels, value_channels = job.record.value.channels;
    job.key_mean = floats_of(all[0], "key mean", {heads, key_channels});
    job.key_balance = floats_of(all[1], "key balance", {heads, key_channels});
    job.key_rotation = floats_of(all[2], "key rotation", {key_channels, key_channels});
    job.value_mean = floats_of(all[3], "value mean", {heads, value_channels});
    job.value_rotation_back = floats_of(all[4], "value rotation back", {value_channels, value_channels});
    set_rope(job, most_blocks, all[5], all[6], all[7], all[8]);
}

void set_mask(Job& job, nb::handle mask, nb::handle column_of, bool packed_visible, bool exact_visible) {
    job.mask = array_of(mask, "mask", 4, {Type::boolean, Type::f32, Type::bf16, Type::f16}, true);
    if (job.mask.type != Type::none) {
        const int64_t *shape = job.mask.shape, q_heads = job.query.shape[1];
        require(shape[3] > 0 && (shape[0] == 1 || shape[0] == job.batch) && (shape[1] == 1 || shape[1] == q_heads) && shape[2] == job.queries,
                "mask does not fit the query");
        job.mask_batch = int(shape[0]);
        job.mask_heads = int(shape[1]);
        job.mask_columns = shape[3];
        if (shape[3] == 1) job.mask.stride[3] = size_of(job.mask.type);
    }
    const Array columns = array_of(column_of, "column_of", 2, {Type::i64}, true);
    if (columns.data) {
        require(columns.shape[0] == job.batch && columns.stride[0] == 8 * columns.shape[1],
                "column_of must be contiguous, one row for each row of the batch");
        job.column_of = reinterpret_cast<const int64_t*>(columns.data);
        job.columns_known = columns.shape[1];
    }
    job.packed_visible = packed_visible && !job.mask.data;
    job.exact_visible = exact_visible && !job.mask.data;
}

void attend_tensors(const Record& layout, int isa, int threads, nb::handle output, nb::handle query, nb::handle pool, nb::handle table,
                    nb::handle counts, int first_token, nb::handle keys, nb::handle values, nb::handle held, int sinks, int dropped,
                    nb::handle statics, nb::handle transforms, nb::handle mask, nb::handle column_of, int64_t offset,
                    int64_t first_query_column, int64_t window, bool packed_visible, bool exact_visible, float scaling, float softcap,
                    nb::handle sink_logits, nb::handle log_sums) {
    Job job;
    job.record = layout;
    set_tensors(job, keys, values, query, output);
    const int most_blocks = set_blocks(job, pool, table, counts);
    set_numbers(job, most_blocks, held, first_token, sinks, dropped, offset, first_query_column, window);
    set_statics(job, statics);
    set_transforms(job, most_blocks, transforms);
    set_mask(job, mask, column_of, packed_visible, exact_visible);
    require(softcap >= 0, "a negative softcap");
    job.scaling = scaling;
    job.softcap = softcap;
    const int64_t batch = job.batch, q_heads = job.query.shape[1], queries = job.queries;
    job.sink_logits = floats_of(sink_logits, "sink_logits", {q_heads});
    job.log_sums = const_cast<float*>(floats_of(log_sums, "log_sums", {batch, q_heads, queries}));
    const Kernels& kernels = kernels_at(isa);
    const nb::gil_scoped_release released;
    attend(job, kernels, threads < 1 ? 1 : threads > most_threads ? most_threads : threads);
}

// Decode blocks first .. last - 1 of each row of one side into out [B, H, (last - first) * tokens, D].
void decode_tensors(const Record& record, bool value_side, int isa, int threads, nb::handle output, nb::handle pool, nb::handle table, int first,
            nb::handle scale, nb::handle zero) {
    const Side& side = value_side ? record.value : record.key;
    const Array out = array_of(output, "output", 4, element_types), blocks = array_of(pool, "pool", 3, {Type::u8});
    const Array rows = array_of(table, "table", 2, {Type::i64});
    const int64_t batch = out.shape[0], heads = out.shape[1], count = out.shape[2] / record.tokens;
    require(out.shape[2] % record.tokens == 0 && out.shape[3] == side.channels, "output does not fit the layout");
    require(blocks.shape[1] == heads && blocks.shape[2] == record.bytes && (blocks.shape[0] == 0 || (blocks.stride[1] == record.bytes &&
            blocks.stride[0] == record.bytes * heads)), "pool does not fit the layout");
    require(reinterpret_cast<uintptr_t>(blocks.data) % 2 == 0, "pool is not aligned");
    require(rows.shape[0] == batch && first >= 0 && count <= rows.shape[1] - first, "table does not have these blocks");
    const auto* at = reinterpret_cast<const int64_t*>(rows.data);
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t n = first; n < first + count; ++n) {
            const int64_t block = at[b * rows.stride[0] / 8 + n];
            require(block >= 0 && block < blocks.shape[0], "table names a block that the pool does not have");
        }
    const bool layer = side.per == Per::layer;
    const float *scales = nullptr, *zeros = nullptr;
    if (side.fixed) {
        scales = layer ? floats_of(scale, "scale", {1}) : floats_of(scale, "scale", {heads, side.channels});
        require(scales, "scale is missing");
        if (side.zero) zeros = floats_of(zero, "zero", {heads, side.channels});
        require(!side.zero || zeros, "zero is missing");
    }
    const Kernels& kernels = kernels_at(isa);
    const nb::gil_scoped_release released;
    parallel(batch * heads * count, threads > most_threads ? most_threads : threads, [&](int64_t index) {
        const int64_t n = index / (batch * heads), b = index / heads % batch, h = index % heads;
        const uint8_t* block = blocks.data + (at[b * rows.stride[0] / 8 + first + n] * heads + h) * record.bytes;
        const int64_t move = layer ? 0 : h * side.channels;
        kernels.decode(side, record.tokens, block, scales ? scales + move : nullptr, zeros ? zeros + move : nullptr, out.type,
                       out.at(b, h, n * record.tokens), out.stride[2],
                       scratch_of_thread(kernels.decode_scratch_bytes(side, record.tokens)));
    });
}

}  // namespace
}  // namespace kvbits

NB_MODULE(_native, m) {
    using namespace kvbits;
    nb::set_leak_warnings(false);  // caches may well live until the interpreter exits
    m.doc() = "Kernels of kvbits for the CPU. Private: use kvbits.attend and kvbits.encode.";
    nb::class_<Record>(m, "Layout", "What a block looks like to the kernels.")
        .def("__init__", [](Record* self, int tokens, int64_t bytes, const nb::dict& key, const nb::dict& value) {
            new (self) Record(record_of(tokens, bytes, key, value));
        }, nb::arg("tokens"), nb::arg("bytes"), nb::arg("key"), nb::arg("value"));
    nb::class_<Steps>(m, "Steps", "Rotary angles of the tokens of a block, beyond those of its first.")
        .def("__init__", [](Steps* self, nb::handle cos, nb::handle sin, bool interleaved) {
            new (self) Steps(steps_of(cos, sin, interleaved));
        }, nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("interleaved"));
    m.def("attend", &attend_tensors, nb::kw_only(), nb::arg("layout"), nb::arg("isa"), nb::arg("threads"),
          nb::arg("output").none(), nb::arg("query"), nb::arg("pool"), nb::arg("table"), nb::arg("counts"),
          nb::arg("first_token"), nb::arg("keys"), nb::arg("values"), nb::arg("held"), nb::arg("sinks"),
          nb::arg("dropped"), nb::arg("statics"), nb::arg("transforms").none(), nb::arg("mask").none(),
          nb::arg("column_of").none(), nb::arg("offset"), nb::arg("first_query_column"), nb::arg("window"),
          nb::arg("packed_visible"), nb::arg("exact_visible"), nb::arg("scaling"), nb::arg("softcap"),
          nb::arg("sink_logits").none(), nb::arg("log_sums").none() = nb::none());
    m.def("decode", &decode_tensors, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
    bind_encode(m);
    m.def("names", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : all_kernels()) names.emplace_back(kernels->name);
        return names;
    }, "Instruction sets that this build has and this processor can run, best first.");
    m.def("pool", [] { return std::string(pool_name()); });
    m.def("set_dtypes", [](nb::list all) {
        require(all.size() <= 16, "too many dtypes");
        for (size_t i = 0; i < all.size(); ++i) {
            Py_INCREF(all[i].ptr());  // dtypes live as long as the process
            dtypes[i] = all[i].ptr();
        }
    });
}
