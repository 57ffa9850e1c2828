// The one pool of threads. A job is a list of operators that run one after another; an operator is cut into chunks that any free
// thread claims. All that is shared is one word: which operator is at hand, how many chunks it has, which is next.
//
// What follows from that:
//  - an operator ends when its chunks are done, not when all threads have met: a thread that lost its core to a neighbour holds
//    back the one chunk it claimed, and nothing if it had none;
//  - a thread that comes back late finds the word as it is now and joins there;
//  - the caller is one of the threads and never waits for another to wake. It may also begin a job and come back for it: until then
//    the others work alone.
// Threads that find nothing spin for some ten µs, then give their core away between looks, then sleep until the next job.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Job {
public:
    virtual ~Job() = default;
    virtual int num_ops() const = 0;
    virtual int begin(int op) = 0;  // operator `op` comes next: how many chunks, at least 1 and below 2¹⁵
    virtual void run(int op, int chunk, int thread) = 0;
    virtual void ended(int op) = 0;
};

class Pool {
public:
    explicit Pool(int num_threads);  // the caller of `run` included
    ~Pool();
    Pool(const Pool&) = delete;
    int num_threads() const { return (int)workers_.size() + 1; }
    // By one caller at a time. A job that was begun, and all that it reads and writes, must live until it was waited for; one that is
    // begun while another runs waits for that first.
    void begin(Job& job);
    void wait();
    void run(Job& job) { begin(job), wait(); }

private:
    // bits 32 …: a number that changes with every operator; 16 … 31: its chunks; 0 … 15: the next to claim
    static uint64_t word(uint32_t sequence, int chunks) { return (uint64_t)sequence << 32 | (uint64_t)chunks << 16; }
    static bool has_chunk(uint64_t w) { return (w & 0xffff) < (w >> 16 & 0xffff); }
    void work(int thread);
    bool claim_one(int thread);  // claims and does a chunk, if there is one
    void present(int op);

    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<Job*> job_{nullptr};
    std::atomic<int> op_{0};
    std::atomic<bool> running_{false};
    uint32_t sequence_ = 0;
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
