#include "pool.hpp"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <unistd.h>
#endif

namespace kvbits {
namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Parallel openmp() {
#if defined(__unix__)
    static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
#else
    return nullptr;
#endif
}

// One job at a time: a caller that finds the pool busy (another Python thread) does its work alone.
class Pool {
public:
    void run(int threads, void (*work)(void*), void* context) {
        std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
        if (!alone || threads <= 1) return work(context);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < threads - 1) workers_.emplace_back([this, index = int(workers_.size())] { serve(index); });
            work_ = work;
            context_ = context;
            wanted_ = threads - 1;
            running_ = threads - 1;
            ++round_;
        }
        start_.notify_all();
        work(context);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return running_ == 0; });
    }

    // After a fork the child has none of the threads: it gets a pool of its own, and the parent's is never destroyed.
    static Pool& mine() {
        static std::mutex guard;
        static Pool* pool = nullptr;
#if defined(__unix__) || defined(__APPLE__)
        static pid_t owner = 0;
        std::lock_guard<std::mutex> lock(guard);
        if (!pool || owner != getpid()) {
            pool = new Pool;
            owner = getpid();
        }
#else
        std::lock_guard<std::mutex> lock(guard);
        if (!pool) pool = new Pool;
#endif
        return *pool;
    }

private:
    void serve(int index) {
        uint64_t seen = 0;
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            start_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index >= wanted_) continue;
            auto* work = work_;
            auto* context = context_;
            lock.unlock();
            work(context);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_, mutex_;
    std::condition_variable start_, done_;
    std::vector<std::thread> workers_;
    void (*work_)(void*) = nullptr;
    void* context_ = nullptr;
    int wanted_ = 0, running_ = 0;
    uint64_t round_ = 0;
};

}  // namespace

void on_threads(int threads, void (*work)(void*), void* context) {
    if (const Parallel parallel = openmp())
        parallel(work, context, unsigned(threads), 0);
    else
        Pool::mine().run(threads, work, context);
}

const char* pool_name() { return openmp() ? "openmp" : "own"; }

}  // namespace kvbits
