// The pool of threads. A job is a list of operators that run one after another. An operator is cut into chunks, and any free
// thread claims the next one. The threads share one atomic word: the current operator's number, its chunks, and the next chunk.
//
// 1. An operator ends when its chunks are done; there is no barrier. A thread that loses its core delays the chunk that it
//    claimed, and nothing if it claimed none.
// 2. A thread that comes back late reads the word as it is now and joins there.
// 3. The caller is one of the threads and never waits for another to wake. It may also begin a job and come back later; until
//    then the other threads work alone.
// 4. A thread that finds no chunk spins for some ten µs, then yields its core between looks, then sleeps until the next job.
// 5. `use` lets fewer threads claim chunks, where another program takes a core. How an operator is cut depends on `num_threads`
//    alone, so its result does not change.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Job {
public:
    virtual ~Job() = default;
    virtual int num_ops() const = 0;
    virtual int begin(int op) = 0;  // called before operator `op` runs; returns its chunks, at least 1 and below 2¹⁵
    virtual void run(int op, int chunk, int thread) = 0;
    virtual void ended(int op) = 0;
};

class Pool {
public:
    explicit Pool(int num_threads);  // the caller of `run` included
    ~Pool();
    Pool(const Pool&) = delete;
    int num_threads() const { return (int)workers_.size() + 1; }
    // One caller at a time. A job, and all that it reads and writes, must live until `wait` returns. `begin` first waits for a job
    // that still runs.
    void begin(Job& job);
    void wait();
    void run(Job& job) { begin(job), wait(); }
    void use(int num_threads);  // from now on; 1 to `num_threads()`, the caller included
    int64_t last_ns() const { return last_ns_.load(std::memory_order_relaxed); }  // from a job's `begin` to its end, once `wait` returned

private:
    // Bits 32 …: a number that changes with every operator. 16 … 31: its chunks. 0 … 15: the next chunk to claim.
    static uint64_t word(uint32_t sequence, int chunks) { return (uint64_t)sequence << 32 | (uint64_t)chunks << 16; }
    static bool has_chunk(uint64_t w) { return (w & 0xffff) < (w >> 16 & 0xffff); }
    void work(int thread);
    bool claim_one(int thread);  // claims and runs a chunk; false if there is none
    void present(int op);
    void end();

    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<Job*> job_{nullptr};
    std::atomic<int> op_{0};
    std::atomic<bool> running_{false};
    uint32_t sequence_ = 0;
    std::atomic<int> asleep_{0};
    std::atomic<int> used_;
    std::chrono::steady_clock::time_point began_;
    std::atomic<int64_t> last_ns_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
