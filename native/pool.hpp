// Running one function on several threads.
#pragma once

#include <cstdint>

namespace kvbits {

// Call work(context) once on each of up to `threads` threads, the calling one among them, and wait for all.
//
// Where the process has GNU OpenMP loaded, as torch on Linux does, its threads run the work: a second pool would fight
// with OpenMP's own, which spin for a while after each of torch's operations. Elsewhere a small pool of ours does.
void on_threads(int threads, void (*work)(void*), void* context);

// "openmp" or "own": which of both it is.
const char* pool_name();

// Call f(index) for index = 0 .. count - 1, each once, on up to `threads` threads. Throws what f threw first.
template <class F> void parallel(int64_t count, int threads, F&& f);

}  // namespace kvbits

#include <atomic>
#include <exception>

template <class F> void kvbits::parallel(int64_t count, int threads, F&& f) {
    if (count <= 1 || threads <= 1) {
        for (int64_t i = 0; i < count; ++i) f(i);
        return;
    }
    struct Context {
        F& f;
        std::atomic<int64_t> next;
        int64_t count;
        std::atomic<bool> failed;
        std::exception_ptr error;
    } context{f, {0}, count, {false}, nullptr};
    on_threads(count < threads ? int(count) : threads, [](void* at) {
        auto& shared = *static_cast<Context*>(at);
        try {
            for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) shared.f(i);
        } catch (...) {  // out of memory: the rest of the work is given up
            if (!shared.failed.exchange(true)) shared.error = std::current_exception();
            shared.next = shared.count;
        }
    }, &context);
    if (context.failed) std::rethrow_exception(context.error);
}
