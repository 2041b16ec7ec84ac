// The attention's part of the Python module: checks the tensors of a call, and attends or decodes without the GIL.

#include <nanobind/stl/optional.h>

#include "binding.hpp"

namespace kvbits {
namespace {

constexpr int64_t most_tokens = 1 << 30;  // own tokens and columns are counted in 32 bits

// -- one call: each function fills in a part of the job ------------------------------------------------------------

void take_exact_tokens(Job& job, nb::handle output, nb::handle query, nb::handle keys, nb::handle values) {
    const Side &k = job.record.key, &v = job.record.value;
    job.keys = array_of(keys, "keys", 4, element_types);
    job.values = array_of(values, "values", 4, element_types);
    job.query = array_of(query, "query", 4, element_types);
    job.output = array_of(output, "output", 4, element_types);
    const int64_t batch = job.keys.shape[0], heads = job.keys.shape[1], q_heads = job.query.shape[1], queries = job.query.shape[2];
    require(batch > 0 && heads > 0 && queries > 0 && batch * heads < (1 << 24) && q_heads < (1 << 24) &&
                queries < (1 << 24) && q_heads * queries < (1 << 24), "an empty or enormous call");
    require(job.keys.shape[3] == k.channels && job.values.shape[3] == v.channels, "keys or values do not have the layout's channels");
    require(job.values.shape[0] == batch && job.values.shape[1] == heads && job.values.shape[2] == job.keys.shape[2],
            "keys and values differ in rows, heads or tokens");
    require(job.query.shape[0] == batch && job.query.shape[3] == k.channels && q_heads % heads == 0 && q_heads > 0, "query does not fit the keys");
    require(job.output.shape[0] == batch && job.output.shape[1] == q_heads && job.output.shape[2] == queries && job.output.shape[3] == v.channels,
            "output does not fit query and values");
    job.batch = int(batch);
    job.heads = int(heads);
    job.group = int(q_heads / heads);
    job.queries = int(queries);
}

std::vector<int> counts_of(nb::handle counts, int batch, int64_t most, const char* what) {
    auto all = cast<std::vector<int>>(counts, what);
    require(int(all.size()) == batch, std::string(what) + " must have one number for each row");
    for (const int count : all) require(count >= 0 && count <= most, std::string(what) + " is out of range");
    return all;
}

// The pool of packed blocks, of `heads` KV heads.
Array pool_of(nb::handle pool, const Record& record, int64_t heads) {
    const Array blocks = array_of(pool, "pool", 3, {Type::u8});
    require(blocks.shape[0] == 0 || (blocks.shape[1] == heads && blocks.shape[2] == record.bytes && blocks.stride[1] == record.bytes &&
                                     blocks.stride[0] == record.bytes * heads), "pool does not fit the layout");
    require(reinterpret_cast<uintptr_t>(blocks.data) % 2 == 0, "pool is not aligned");
    return blocks;
}

// That blocks first .. last - 1 of a row of the table are in the pool.
void check_row(const int64_t* row, int64_t first, int64_t last, const Array& pool) {
    for (int64_t n = first; n < last; ++n)
        require(row[n] >= 0 && row[n] < pool.shape[0], "table names a block that the pool does not have");
}

// Returns how many blocks the longest row has.
int take_blocks(Job& job, nb::handle pool, nb::handle table, nb::handle counts) {
    const Array blocks = pool_of(pool, job.record, job.heads), rows = array_of(table, "table", 2, {Type::i64});
    require(rows.shape[0] == job.batch, "table must have one row for each row of the batch");
    job.pool = blocks.data;
    job.table = reinterpret_cast<const int64_t*>(rows.data);
    job.table_stride = rows.stride[0] / 8;
    job.counts = counts_of(counts, job.batch, rows.shape[1], "counts");
    int most = 0;
    for (int b = 0; b < job.batch; ++b) {
        most = job.counts[size_t(b)] > most ? job.counts[size_t(b)] : most;
        check_row(job.table + b * job.table_stride, 0, job.counts[size_t(b)], blocks);
    }
    return most;
}

void take_token_numbers(Job& job, int sinks, int dropped, int most_blocks) {
    require(sinks >= 0 && dropped >= 0, "negative token numbers");
    const int64_t packed = int64_t(most_blocks) * job.record.tokens;
    require(int64_t(sinks) + dropped + packed < most_tokens && job.keys.shape[2] + packed + dropped < most_tokens,
            "more tokens than can be numbered");
    job.sinks = sinks;
    job.dropped = dropped;
}

// A scale or zero of the whole layer; nullptr where the layout wants none.
const float* static_of(nb::handle tensor, const char* what, const Side& side, int64_t heads, bool wanted) {
    if (!wanted) return nullptr;
    const float* found = side.per == Per::layer ? floats_of(tensor, what, {1}) : floats_of(tensor, what, {heads, side.channels});
    require(found, std::string(what) + " is missing");
    return found;
}

void take_statics(Job& job, nb::handle key_scale, nb::handle key_zero, nb::handle value_scale, nb::handle value_zero) {
    const Side &k = job.record.key, &v = job.record.value;
    job.key_scale = static_of(key_scale, "key scale", k, job.heads, k.fixed);
    job.key_zero = static_of(key_zero, "key zero", k, job.heads, k.fixed && k.zero);
    job.value_scale = static_of(value_scale, "value scale", v, job.heads, v.fixed);
    job.value_zero = static_of(value_zero, "value zero", v, job.heads, v.fixed && v.zero);
}

void take_rope(Job& job, const nb::dict& transforms, int most_blocks) {
    const nb::handle steps = entry(transforms, "steps");
    if (steps.is_none()) return;
    require(nb::isinstance<Steps>(steps), "steps are not Steps");
    job.steps = nb::cast<const Steps*>(steps);
    require(job.steps->tokens == job.record.tokens && 2 * job.steps->pairs <= job.record.key.channels, "steps do not fit the keys");
    const Array cos = array_of(entry(transforms, "base_cos"), "base cos", 3, {Type::f32});
    const Array sin = array_of(entry(transforms, "base_sin"), "base sin", 3, {Type::f32});
    for (int i = 0; i < 3; ++i) require(cos.shape[i] == sin.shape[i] && cos.stride[i] == sin.stride[i], "base cos and sin differ");
    require((cos.shape[0] == 1 || cos.shape[0] == job.batch) && cos.shape[2] == job.steps->pairs, "base cos does not fit the keys");
    require(cos.shape[1] >= most_blocks, "base cos has too few rows for the blocks");
    job.base_cos = reinterpret_cast<const float*>(cos.data);
    job.base_sin = reinterpret_cast<const float*>(sin.data);
    job.base_batch = cos.shape[0] == 1 ? 0 : cos.stride[0] / 4;
    job.base_block = cos.stride[1] / 4;
    job.unroped = cast<bool>(entry(transforms, "unroped"), "unroped");
    require(!job.unroped || !job.changes_query(), "rotated keys cannot be stored before the rotary embedding");
}

void take_transforms(Job& job, const nb::dict& transforms, int most_blocks) {
    if (transforms.size() == 0) return;
    static const char* names[] = {"key_mean", "key_balance", "key_rotation", "value_mean", "value_unrotation", "steps", "base_cos", "base_sin", "unroped"};
    size_t known = 0;
    for (const char* name : names) known += PyDict_GetItemString(transforms.ptr(), name) != nullptr;
    require(known == transforms.size(), "transforms are key_mean, key_balance, key_rotation, value_mean, value_unrotation, steps, "
                                        "base_cos, base_sin, unroped");
    const int64_t k = job.record.key.channels, v = job.record.value.channels;
    job.key_mean = floats_of(entry(transforms, "key_mean"), "key mean", {job.heads, k});
    job.key_balance = floats_of(entry(transforms, "key_balance"), "key balance", {job.heads, k});
    job.key_rotation = floats_of(entry(transforms, "key_rotation"), "key rotation", {k, k});
    job.value_mean = floats_of(entry(transforms, "value_mean"), "value mean", {job.heads, v});
    job.value_unrotation = floats_of(entry(transforms, "value_unrotation"), "value unrotation", {v, v});
    take_rope(job, transforms, most_blocks);
}

void take_mask(Job& job, nb::handle mask, nb::handle column_of) {
    job.mask = array_of(mask, "mask", 4, {Type::boolean, Type::f32, Type::bf16, Type::f16}, true);
    if (job.mask.type != Type::none) {
        const int64_t* shape = job.mask.shape;
        require(shape[3] > 0 && (shape[0] == 1 || shape[0] == job.batch) && (shape[1] == 1 || shape[1] == job.query.shape[1]) &&
                    shape[2] == job.queries, "mask does not fit the query");
        job.mask_batch = int(shape[0]);
        job.mask_heads = int(shape[1]);
        job.mask_columns = shape[3];
        if (shape[3] == 1) job.mask.stride[3] = size_of(job.mask.type);
    }
    const Array columns = array_of(column_of, "column_of", 2, {Type::i64}, true);
    if (!columns.data) return;
    require(columns.shape[0] == job.batch && columns.stride[0] == 8 * columns.shape[1],
            "column_of must be contiguous, one row for each row of the batch");
    job.column_of = reinterpret_cast<const int64_t*>(columns.data);
    job.columns_known = columns.shape[1];
}

void attend_tensors(const Record& layout, int isa, int threads, nb::handle output, nb::handle query, nb::handle keys, nb::handle values,
                    nb::handle exact_counts, nb::handle pool, nb::handle table, nb::handle counts, int sinks, int dropped,
                    nb::handle key_scale, nb::handle key_zero, nb::handle value_scale, nb::handle value_zero, const nb::dict& transforms,
                    nb::handle mask, nb::handle column_of, int64_t offset, int64_t first_query_column, std::optional<int64_t> window,
                    float scaling, std::optional<float> softcap, nb::handle sink_logits, nb::handle log_sums) {
    Job job;
    job.record = layout;
    take_exact_tokens(job, output, query, keys, values);
    job.exact_counts = counts_of(exact_counts, job.batch, job.keys.shape[2], "exact_counts");
    const int most_blocks = take_blocks(job, pool, table, counts);
    take_token_numbers(job, sinks, dropped, most_blocks);
    take_statics(job, key_scale, key_zero, value_scale, value_zero);
    take_transforms(job, transforms, most_blocks);
    take_mask(job, mask, column_of);
    job.offset = offset;
    job.first_query_column = first_query_column;
    job.window = window.value_or(0);
    require(offset >= 0 && offset < most_tokens && job.window >= 0 && first_query_column >= 0 && first_query_column < most_tokens,
            "offset, window or column of the first query is out of range");
    job.scaling = scaling;
    job.softcap = softcap.value_or(0);
    require(job.softcap >= 0, "a negative softcap");
    job.sink_logits = floats_of(sink_logits, "sink_logits", {job.query.shape[1]});
    job.log_sums = const_cast<float*>(floats_of(log_sums, "log_sums", {job.batch, job.query.shape[1], job.queries}));
    const Kernels& kernels = kernels_at(isa);
    const nb::gil_scoped_release released;
    attend(job, kernels, threads_of(threads));
}

// -- decoding ------------------------------------------------------------------------------------------------------

// Decode the first blocks of each row of one side into output [B, H, blocks * tokens, D].
void decode_tensors(const Record& layout, bool value_side, int isa, int threads, nb::handle output, nb::handle pool, nb::handle table,
                    nb::handle scale, nb::handle zero) {
    const Side& side = value_side ? layout.value : layout.key;
    const Array out = array_of(output, "output", 4, element_types), rows = array_of(table, "table", 2, {Type::i64});
    const int64_t batch = out.shape[0], heads = out.shape[1], count = out.shape[2] / layout.tokens;
    const Array blocks = pool_of(pool, layout, heads);
    require(out.shape[2] % layout.tokens == 0 && out.shape[3] == side.channels, "output does not fit the layout");
    require(rows.shape[0] == batch && count <= rows.shape[1], "table does not have these blocks");
    const auto* at = reinterpret_cast<const int64_t*>(rows.data);
    const int64_t stride = rows.stride[0] / 8;
    for (int64_t b = 0; b < batch; ++b) check_row(at + b * stride, 0, count, blocks);
    const float* scales = static_of(scale, "scale", side, heads, side.fixed);
    const float* zeros = static_of(zero, "zero", side, heads, side.fixed && side.zero);
    const Kernels& kernels = kernels_at(isa);
    const nb::gil_scoped_release released;
    parallel(batch * heads * count, threads_of(threads), [&](int64_t index) {
        const int64_t n = index / (batch * heads), b = index / heads % batch, h = index % heads;
        const uint8_t* block = blocks.data + (at[b * stride + n] * heads + h) * layout.bytes;
        const int64_t head = side.per == Per::layer ? 0 : h * side.channels;
        kernels.decode(side, layout.tokens, block, scales ? scales + head : nullptr, zeros ? zeros + head : nullptr, out.type,
                       out.at(b, h, n * layout.tokens), out.stride[2], scratch_of_thread(kernels.decode_scratch_bytes(side, layout.tokens)));
    });
}

}  // namespace

void bind_attend(nb::module_& m) {
    const nb::none none;
    m.def("attend", &attend_tensors, nb::kw_only(), nb::arg("layout"), nb::arg("isa"), nb::arg("threads"), nb::arg("output").none(),
          nb::arg("query").none(), nb::arg("keys").none(), nb::arg("values").none(), nb::arg("exact_counts").none(), nb::arg("pool").none(),
          nb::arg("table").none(), nb::arg("counts").none(), nb::arg("sinks"), nb::arg("dropped"), nb::arg("key_scale") = none,
          nb::arg("key_zero") = none, nb::arg("value_scale") = none, nb::arg("value_zero") = none, nb::arg("transforms"),
          nb::arg("mask") = none, nb::arg("column_of") = none, nb::arg("offset"), nb::arg("first_query_column"), nb::arg("window").none(),
          nb::arg("scaling"), nb::arg("softcap").none(), nb::arg("sink_logits") = none, nb::arg("log_sums") = none);
    m.def("decode", &decode_tensors, nb::kw_only(), nb::arg("layout"), nb::arg("value_side"), nb::arg("isa"), nb::arg("threads"),
          nb::arg("output").none(), nb::arg("pool").none(), nb::arg("table").none(), nb::arg("scale") = none, nb::arg("zero") = none);
}

}  // namespace kvbits
