#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

namespace {
constexpr int SPINS = 2000;     // looks at the word before the thread yields its core: some 20 to 50 µs
constexpr int OFFERS = 200;     // yields before the thread sleeps: 100 µs if no other thread wants the core
}  // namespace

Pool::Pool(int num_threads) : used_(num_threads) {
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    wait();
    stop_ = true;
    {
        std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

// The operator's fields are written before the word that offers its chunks. There is one writer at a time: the thread that ended
// the last operator, or at the start the caller.
void Pool::present(int op) {
    Job* job = job_.load(std::memory_order_relaxed);
    const int chunks = job->begin(op);
    op_.store(op, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    word_.store(word(++sequence_, chunks), std::memory_order_seq_cst);
}

bool Pool::claim_one(int thread) {
    if (!has_chunk(word_.load(std::memory_order_acquire))) return false;
    // Another operator may have begun between the load and the claim. Then the claimed chunk is that operator's.
    const uint64_t w = word_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_chunk(w)) return false;
    Job* job = job_.load(std::memory_order_relaxed);
    const int op = op_.load(std::memory_order_relaxed), chunks = (int)(w >> 16 & 0xffff);
    job->run(op, (int)(w & 0xffff), thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) {
        job->ended(op);
        if (op + 1 < job->num_ops()) present(op + 1);
        else end();
    }
    return true;
}

void Pool::end() {
    const auto took = std::chrono::steady_clock::now() - began_;
    last_ns_.store(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count(), std::memory_order_relaxed);
    running_.store(false, std::memory_order_release);
}

void Pool::use(int num_threads) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        used_.store(num_threads, std::memory_order_relaxed);
    }
    wake_.notify_all();
}

void Pool::begin(Job& job) {
    wait();
    if (job.num_ops() == 0) return;
    began_ = std::chrono::steady_clock::now();
    job_.store(&job, std::memory_order_relaxed);
    running_.store(true, std::memory_order_seq_cst);
    present(0);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
    }
}

void Pool::wait() {
    int idle = 0;
    while (running_.load(std::memory_order_acquire)) {
        if (claim_one(0)) idle = 0;
        else if (++idle < SPINS) RELAX();
        else std::this_thread::yield();
    }
}

void Pool::work(int thread) {
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        if (thread >= used_.load(std::memory_order_relaxed)) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [this, thread] { return stop_.load() || thread < used_.load(std::memory_order_relaxed); });
            idle = 0;
        } else if (claim_one(thread)) {
            idle = 0;
        } else if (++idle < SPINS) {
            RELAX();
        } else if (idle < SPINS + OFFERS || running_.load(std::memory_order_relaxed)) {
            std::this_thread::yield();
        } else {
            std::unique_lock<std::mutex> lock(mutex_);
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [this] { return stop_.load() || running_.load(std::memory_order_seq_cst); });
            asleep_.fetch_sub(1, std::memory_order_relaxed);
            idle = 0;
        }
    }
}
