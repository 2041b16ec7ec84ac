#include "run.hpp"

#include <atomic>
#include <memory>

namespace kvbits {

uint8_t* scratch_of_thread(int64_t bytes) {
    thread_local std::unique_ptr<uint8_t[]> memory;
    thread_local int64_t capacity = 0;
    if (bytes > capacity) {
        memory.reset(new uint8_t[size_t(bytes)]());
        capacity = bytes;
    }
    return memory.get();
}

namespace {

struct Plan {
    std::vector<Span> spans;
    std::vector<int> first_partial, packed, exact;  // of each row of the batch
    int partials = 0;
};

Plan plan_of(const Job& job, int threads) {
    Plan plan;
    int64_t blocks = 0;
    for (const int count : job.counts) blocks += count;
    const int64_t pieces = blocks * job.heads;
    // A few spans per thread even the load out; a span of many query rows has much to leave, and is kept long.
    int64_t chunk = (pieces + threads * 6 - 1) / (threads * 6);
    const int64_t least = job.rows() > 64 ? 8 : 1;
    chunk = chunk < least ? least : chunk;
    const int exact_chunk = job.rows() > 64 ? 1 << 30 : 512;
    for (int b = 0; b < job.batch; ++b) {
        const int packed = int((job.counts[size_t(b)] + chunk - 1) / chunk);
        const int exact = int((int64_t(job.exact_counts[size_t(b)]) + exact_chunk - 1) / exact_chunk);
        plan.first_partial.push_back(plan.partials);
        plan.packed.push_back(packed);
        plan.exact.push_back(exact);
        plan.partials += job.heads * (packed + exact);
        for (int c = 0; c < packed; ++c) {
            const int first = int(c * chunk), last = int(first + chunk < job.counts[size_t(b)] ? first + chunk : job.counts[size_t(b)]);
            for (int h = 0; h < job.heads; ++h) plan.spans.push_back({b, h, true, first, last, c});
        }
        for (int c = 0; c < exact; ++c) {
            const int first = c * exact_chunk, rest = job.exact_counts[size_t(b)] - first;
            const int last = first + (rest < exact_chunk ? rest : exact_chunk);
            for (int h = 0; h < job.heads; ++h) plan.spans.push_back({b, h, false, first, last, packed + c});
        }
    }
    return plan;
}

constexpr int few_rows = 64;  // are done before a second thread wakes

// The queries of all rows and heads as they are multiplied with packed keys: once, not for every span.
const float* packed_queries(const Job& job, const Kernels& kernels, int threads, int64_t each) {
    thread_local std::unique_ptr<float[]> memory;
    thread_local int64_t capacity = 0;
    const int64_t count = int64_t(job.batch) * job.heads;
    if (each * count > capacity) {
        capacity = each * count;
        memory.reset(new float[size_t(capacity)]);
    }
    float* out = memory.get();
    parallel(count, job.rows() * count > few_rows ? threads : 1, [&](int64_t index) {
        kernels.packed_query(job, int(index / job.heads), int(index % job.heads), out + index * each);
    });
    return out;
}

}  // namespace

void attend(const Job& job, const Kernels& kernels, int threads) {
    const Plan plan = plan_of(job, threads);
    const int64_t query_each = int64_t(job.rows()) * padded(job.record.key.channels);
    const float* packed_query = job.changes_query() ? packed_queries(job, kernels, threads, query_each) : nullptr;
    const int width = kernels.value_width(job), rows = job.rows();
    const int64_t each = Partial::floats(rows, width);
    thread_local std::unique_ptr<float[]> memory;
    thread_local int64_t capacity = 0;
    if (each * plan.partials > capacity) {
        capacity = each * plan.partials;
        memory.reset(new float[size_t(capacity)]);
    }
    std::vector<Partial> partials;
    partials.reserve(size_t(plan.partials));
    for (int p = 0; p < plan.partials; ++p) partials.push_back({memory.get() + p * each, rows, width});
    std::vector<std::atomic<int>> missing(size_t(job.batch) * size_t(job.heads));
    for (int b = 0; b < job.batch; ++b)
        for (int h = 0; h < job.heads; ++h) missing[size_t(b * job.heads + h)] = plan.packed[size_t(b)] + plan.exact[size_t(b)];
    const int64_t scratch_bytes = kernels.scratch_bytes(job) + 8 * int64_t(width);
    for (int b = 0; b < job.batch; ++b)  // a row without a token
        for (int h = 0; h < job.heads && plan.packed[size_t(b)] + plan.exact[size_t(b)] == 0; ++h)
            kernels.merge(job, b, h, nullptr, 0, 0, scratch_of_thread(scratch_bytes));
    parallel(int64_t(plan.spans.size()), threads, [&](int64_t index) {
        const Span& span = plan.spans[size_t(index)];
        const int packed = plan.packed[size_t(span.batch)], count = packed + plan.exact[size_t(span.batch)];
        uint8_t* scratch = scratch_of_thread(scratch_bytes);
        Partial* all = &partials[size_t(plan.first_partial[size_t(span.batch)] + span.head * count)];
        const int64_t own = (int64_t(span.batch) * job.heads + span.head) * query_each;
        kernels.attend(job, span, packed_query ? packed_query + own : nullptr, all[span.slot], scratch);
        if (missing[size_t(span.batch * job.heads + span.head)].fetch_sub(1) == 1)
            kernels.merge(job, span.batch, span.head, all, count, packed, scratch);
    });
}

}  // namespace kvbits
