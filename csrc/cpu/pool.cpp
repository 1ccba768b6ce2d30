#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "octavo_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// How long a worker looks for the next job before it sleeps: longer than the gap between two kernels of a step, far
// shorter than anything a person would see as CPU use.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kSpinsPerClockRead = 32;
constexpr int kSpinsBeforeYield = 4096;

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The state word: epoch in the upper bits, one bit that says that workers may still join, and how many have joined.
// A worker joins by compare-and-swap on the whole word, so it can never join a job that has been closed.
constexpr uint64_t kActiveMask = 0x7fff;
constexpr uint64_t kOpen = 0x8000;
constexpr uint64_t kEpochUnit = 0x10000;
inline uint64_t epoch_of(uint64_t state) { return state / kEpochUnit; }

class Pool {
  public:
    void run(int64_t count, int64_t grain, RangeTask task, void* context) {
        if (count <= grain || workers_.empty() || busy_.test_and_set(std::memory_order_acquire)) {
            if (count > 0) task(context, 0, count);
            return;
        }
        count_ = count;
        grain_ = std::max<int64_t>(grain, 1);
        task_ = task;
        context_ = context;
        next_.store(0, std::memory_order_relaxed);
        state_.store((epoch_of(state_.load()) + 1) * kEpochUnit | kOpen);
        if (sleepers_.load() > 0) wake_all();
        work();
        close_and_wait();
        busy_.clear(std::memory_order_release);
    }

    void set_threads(int threads, bool pin) {
        while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
        stopping_.store(true);
        wake_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stopping_.store(false);
        threads_ = std::min<int>(std::max(threads, 1), kActiveMask);
        for (int i = 1; i < threads_; i++) workers_.emplace_back([this] { worker_loop(); });
        if (pin) pin_threads();
        busy_.clear(std::memory_order_release);
    }

    int threads() const { return threads_; }

  private:
    void work() {
        for (;;) {
            int64_t begin = next_.load(std::memory_order_relaxed), size = 0;
            do {
                if (begin >= count_) return;
                size = std::max(grain_, (count_ - begin) / (2 * threads_));
            } while (!next_.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed));
            task_(context_, begin, std::min(begin + size, count_));
        }
    }

    void close_and_wait() {
        uint64_t state = state_.fetch_and(~kOpen) & ~kOpen;
        for (int spins = 0; (state & kActiveMask) != 0; spins++) {
            if (spins < kSpinsBeforeYield)
                pause_cpu();
            else
                std::this_thread::yield();  // the worker may need this very core
            state = state_.load(std::memory_order_acquire);
        }
    }

    void worker_loop() {
        uint64_t seen = 0;
        while (!stopping_.load()) {
            uint64_t state = state_.load(std::memory_order_acquire);
            if (epoch_of(state) == seen) {
                if (!spin_for_job(seen)) sleep_for_job(seen);
                continue;
            }
            if (!(state & kOpen)) {
                seen = epoch_of(state);
            } else if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
                work();
                state_.fetch_sub(1, std::memory_order_release);
                seen = epoch_of(state);
            }
        }
    }

    bool news(uint64_t seen) const { return epoch_of(state_.load()) != seen || stopping_.load(); }

    bool spin_for_job(uint64_t seen) const {
        const auto deadline = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < kSpinsPerClockRead; i++) {
                if (news(seen)) return true;
                pause_cpu();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        return false;
    }

    void sleep_for_job(uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);  // before the check: the caller publishes first and looks for sleepers after
        wake_.wait(lock, [&] { return news(seen); });
        sleepers_.fetch_sub(1);
    }

    void wake_all() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }  // a worker between its check and its wait would miss the call
        wake_.notify_all();
    }

    void pin_threads() {
#if defined(__linux__)
        cpu_set_t allowed;
        CPU_ZERO(&allowed);
        if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
        std::vector<int> cpus;
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
        for (size_t i = 0; i <= workers_.size() && i < cpus.size(); i++) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpus[i], &one);
            const pthread_t thread = i == 0 ? pthread_self() : workers_[i - 1].native_handle();
            pthread_setaffinity_np(thread, sizeof one, &one);
        }
#endif
    }

    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) int64_t count_ = 0;
    int64_t grain_ = 1;
    RangeTask task_ = nullptr;
    void* context_ = nullptr;
    int threads_ = 1;
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

// Never destroyed: at exit workers may still be waiting, and the process ends them. A forked child has no workers and
// gets a new pool of one.
Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return new Pool;
}();

}  // namespace

void run_parallel(int64_t count, int64_t grain, RangeTask task, void* context) {
    pool->run(count, grain, task, context);
}

}  // namespace octavo

extern "C" void oct_set_threads(int threads, int pin) { octavo::pool->set_threads(threads, pin != 0); }
extern "C" int oct_threads() { return octavo::pool->threads(); }
