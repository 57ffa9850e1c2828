// A step as a list of operators. The pool runs them all without returning to the caller in between.
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

// A program keeps its engine alive, so both may be destroyed in any order.
inline std::shared_ptr<Engine>& shared(ss_engine* engine) { return *(std::shared_ptr<Engine>*)engine; }

class Program;

// The experts of a step's tokens in the current layer. The operator of `ss_add_route` writes it, the ones behind it read it.
struct Routing {
    int64_t num_experts = 0, each = 0;  // experts of the layer that are here, experts of a token
    int64_t first = 0;                  // of all the layer's experts, the first that is here
    std::vector<int32_t> chosen;        // [tokens, each]
    std::vector<float> weights;         // [tokens, each]
    std::vector<int32_t> begin;         // [experts + 2]: an expert's first row, in the order of experts; then the others', and the end
    std::vector<int32_t> token;         // [tokens · each]: the token of a row
    std::vector<int32_t> place;         // [tokens, each]: the row of a token–expert pair
    std::vector<float> scale;           // [tokens · each]: the factor of a row, if rows are scaled
};

struct Op {
    virtual ~Op() = default;
    virtual int64_t scratch_floats(Program&) { return 0; }  // for each thread
    virtual int chunks(Program&) = 0;                       // called just before the operator runs
    virtual void run(Program&, int chunk, int thread) = 0;
};

class Program final : public Job {
public:
    explicit Program(std::shared_ptr<Engine> engine);
    int32_t add_buffer(int64_t row_bytes, int64_t rows_a_token);
    void bind(int32_t buffer, void* data, int64_t row_bytes);
    ~Program() override { wait(); }
    void begin_step(const ss_step& step, Program* then);  // returns at once; `then` runs next, over the same tokens
    void wait() { engine_->pool.wait(); }
    int32_t profile(int32_t clock, int64_t* ns, int32_t capacity);

    const ss_step& step() const { return step_; }
    const Kernels& kernels() const { return *engine_->kernels; }
    int threads() const { return engine_->pool.num_threads(); }
    uint8_t* row(int32_t buffer, int64_t t) const { return buffers_[buffer].data + t * buffers_[buffer].stride; }
    int64_t stride(int32_t buffer) const { return buffers_[buffer].stride; }
    float* scratch(int thread) { return (float*)scratch_[thread].get(); }

    // The job: this program's operators, then those of `then_`.
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
    Program* then_ = nullptr;  // of the current step
    ss_step step_{};
    std::vector<Buffer> buffers_;
    int64_t capacity_ = 0;  // tokens that fit into the program's own buffers
    std::vector<std::unique_ptr<uint8_t, Free>> scratch_;  // one a thread
    int64_t scratch_floats_ = 0;
    int32_t profile_ = 0;  // the clock of ss_profile
    int64_t started_ = 0;
    std::vector<int64_t> ns_;
};
