// A step as a list of operators, run by the pool without coming back to the caller in between.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "slipstream_cpu.h"

struct Engine {
    Engine(int num_threads, const Kernels* kernels) : kernels(kernels), pool(num_threads) {}
    const Kernels* kernels;
    Pool pool;
};

// A program keeps its engine alive: whoever holds both may let go of them in any order.
inline std::shared_ptr<Engine>& shared(ss_engine* engine) { return *(std::shared_ptr<Engine>*)engine; }

class Program;

// Which experts the tokens of a step go to, in the layer at hand: `ss_add_route` finds it, the operators after it read it.
struct Routing {
    int64_t num_experts = 0, each = 0;  // how many there are, how many a token has
    std::vector<int32_t> chosen;        // [tokens, each]
    std::vector<float> weights;         // the same
    std::vector<int32_t> begin;         // [experts + 1]: where an expert's rows begin, in the order of experts
    std::vector<int32_t> token;         // [tokens · each]: whose row that is
    std::vector<int32_t> place;         // [tokens, each]: its row
};

struct Op {
    virtual ~Op() = default;
    virtual int64_t scratch_floats(Program&) { return 0; }  // that each thread needs
    virtual int chunks(Program&) = 0;                       // just before the operator runs
    virtual void run(Program&, int chunk, int thread) = 0;
};

class Program final : public Job {
public:
    explicit Program(std::shared_ptr<Engine> engine);
    int32_t add_buffer(int64_t row_bytes, int64_t rows_a_token);
    void bind(int32_t buffer, void* data, int64_t row_bytes);
    ~Program() override { wait(); }
    void begin_step(const ss_step& step, Program* then);  // returns at once; `then` follows over the same tokens
    void wait() { engine_->pool.wait(); }
    int32_t profile(int32_t clock, int64_t* ns, int32_t capacity);

    const ss_step& step() const { return step_; }
    const Kernels& kernels() const { return *engine_->kernels; }
    int threads() const { return engine_->pool.num_threads(); }
    uint8_t* row(int32_t buffer, int64_t t) const { return buffers_[buffer].data + t * buffers_[buffer].stride; }
    int64_t stride(int32_t buffer) const { return buffers_[buffer].stride; }
    float* scratch(int thread) { return (float*)scratch_[thread].get(); }

    // As a job: its operators, and those of the program that follows.
    int num_ops() const override { return (int)ops.size() + (then_ ? (int)then_->ops.size() : 0); }
    int begin(int op) override { return own(op) ? ops[op]->chunks(*this) : then_->begin(op - (int)ops.size()); }
    void run(int op, int chunk, int thread) override {
        own(op) ? ops[op]->run(*this, chunk, thread) : then_->run(op - (int)ops.size(), chunk, thread);
    }
    void ended(int op) override;

    std::vector<std::unique_ptr<Op>> ops;
    Routing routing;

private:
    struct Free {
        void operator()(uint8_t* p) const { std::free(p); }
    };
    struct Buffer {
        uint8_t* data = nullptr;
        int64_t stride = 0, rows_a_token = 1;
        bool bound = false;
        std::unique_ptr<uint8_t, Free> own;
    };
    bool own(int op) const { return op < (int)ops.size(); }
    void prepare(const ss_step& step);

    std::shared_ptr<Engine> engine_;
    Program* then_ = nullptr;  // in the step at hand
    ss_step step_{};
    std::vector<Buffer> buffers_;
    int64_t capacity_ = 0;  // tokens that the program's own buffers have room for
    std::vector<std::unique_ptr<uint8_t, Free>> scratch_;  // one a thread
    int64_t scratch_floats_ = 0;
    int32_t profile_ = 0;  // which clock: see ss_profile
    int64_t started_ = 0;
    std::vector<int64_t> ns_;
};
