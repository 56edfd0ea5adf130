// Plans on the worker pool and through the hand-off service, for the thread sanitizer above all.
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../append.hpp"
#include "../fake_device.hpp"
#include "../handoff.hpp"
#include "../plan_job.hpp"
#include "check.hpp"
#include "kernels_here.hpp"

using namespace cpu_kernels;

namespace {

constexpr int64_t kLong = 60'000'000'000;
constexpr int kDim = 16, kHeads = 2, kKvHeads = 2, kPage = 16;

// Rows of random fp32 tokens in pages of their own, and what must come out. The first `shared` tokens are in the same
// pages for all rows.
struct Batch {
  std::vector<int32_t> lengths, table, members;
  std::vector<int64_t> begin = {0};
  std::vector<uint8_t> memory;
  std::vector<float> q, want;
  KvPool pool;
  PrefixGroup group;
  const KernelTable* kernels = kernels_here().at(0);

  explicit Batch(std::vector<int32_t> of, int shared = 0, int layers = 1) : lengths(std::move(of)) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    int used = shared / kPage;
    for (size_t row = 0; row < lengths.size(); ++row) {
      for (int i = 0; i < (lengths[row] + kPage - 1) / kPage; ++i) table.push_back(i < shared / kPage ? i : used++);
      begin.push_back(static_cast<int64_t>(table.size()));
      members.push_back(static_cast<int32_t>(row));
    }
    group = {0, shared, 0, static_cast<int>(lengths.size())};
    pool.layout = {Type::f32, kPage, kDim};
    pool.layers = layers;
    pool.pages = used;
    pool.kv_heads = kKvHeads;
    memory.assign(layers * used * kKvHeads * pool.layout.page_bytes(), 0);
    pool.base = memory.data();
    std::vector<float> k(static_cast<size_t>(used) * kPage * kKvHeads * kDim), v(k.size());
    for (float& x : k) x = normal(random);
    for (float& x : v) x = normal(random);
    std::vector<int64_t> places(static_cast<size_t>(used) * kPage);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int64_t>(i);
    const int64_t head = kDim * 4, token = head * kKvHeads;
    for (int layer = 0; layer < layers; ++layer)
      write_tokens(*kernels, pool, layer, places.data(), static_cast<int64_t>(places.size()), Type::f32,
                   {reinterpret_cast<uint8_t*>(k.data()), token, head},
                   {reinterpret_cast<uint8_t*>(v.data()), token, head});
    q.resize(lengths.size() * kKvHeads * kHeads * kDim);
    for (float& x : q) x = normal(random);
    want.assign(q.size(), 0.f);
    for (size_t row = 0; row < lengths.size(); ++row)
      for (int h = 0; h < kKvHeads * kHeads; ++h) {
        const size_t at = (row * kKvHeads * kHeads + h) * kDim;
        double total = 0;
        std::vector<double> sum(kDim);
        for (int t = 0; t < lengths[row]; ++t) {
          const size_t place = static_cast<size_t>(table[begin[row] + t / kPage]) * kPage + t % kPage;
          const size_t from = (place * kKvHeads + h / kHeads) * kDim;
          double score = 0;
          for (int d = 0; d < kDim; ++d) score += static_cast<double>(q[at + d]) * k[from + d];
          const double p = std::exp(score * 0.25);
          total += p;
          for (int d = 0; d < kDim; ++d) sum[d] += p * v[from + d];
        }
        for (int d = 0; d < kDim && total > 0; ++d) want[at + d] = static_cast<float>(sum[d] / total);
      }
  }

  PlanInput input(int threads) const {
    PlanInput in;
    in.pool = &pool;
    in.rows = static_cast<int>(lengths.size());
    in.lengths = lengths.data();
    in.table = table.data();
    in.table_begin = begin.data();
    in.q_heads = kKvHeads * kHeads;
    in.scale = 0.25f;
    in.threads = threads;
    in.groups = &group;
    in.group_count = group.end > 0;
    in.group_rows = members.data();
    in.kernels = kernels;
    in.tuning.min_split_tokens = 64;
    in.tuning.min_thread_tokens = 1;
    in.tuning.last_round_tokens = 4;
    return in;
  }

  PlanRun run(Plan* plan, std::vector<float>* out, int layer = 0) const {
    out->assign(q.size(), NAN);
    PlanRun run;
    run.plan = plan;
    run.io.layer = layer;
    run.io.q = reinterpret_cast<const uint8_t*>(q.data());
    run.io.out = reinterpret_cast<uint8_t*>(out->data());
    run.io.q_row_bytes = run.io.out_row_bytes = kKvHeads * kHeads * kDim * 4;
    return run;
  }

  void check(const std::vector<float>& out) const {
    for (size_t i = 0; i < want.size(); ++i) CHECK(std::fabs(out[i] - want[i]) < 1e-5f);
  }
};

PoolOptions with_threads(int threads) {
  PoolOptions options;
  options.threads = threads;
  options.spin_ns = 20'000;
  return options;
}

void plans_run_on_pools() {
  for (int shared : {0, 64}) {
    const Batch batch({300, 64, 700, 100, 1000}, shared);
    for (int threads : {1, 2, 4}) {
      WorkerPool pool(with_threads(threads));
      Plan plan(batch.input(pool.worker_slots()));
      CHECK(plan.partials() > 0);
      std::vector<float> out;
      for (int round = 0; round < 20; ++round) {
        PlanRun run = batch.run(&plan, &out);
        run.make_job();
        CHECK(pool.run(run.job, round % 2 == 0) == JobResult::kDone);
        batch.check(out);
      }
      plan.run(batch.run(&plan, &out).io, threads);
      batch.check(out);
    }
  }
}

// A run of which some items never ran, as after a failure or a cancelled job, leaves nothing behind.
void a_run_cut_short_leaves_nothing() {
  const Batch batch({1000, 500});
  Plan plan(batch.input(3));
  CHECK(plan.items() > 4 && plan.partials() > 0);
  std::vector<float> out;
  for (int items = 0; items < plan.items(); ++items) {
    PlanRun cut = batch.run(&plan, &out);
    plan.begin();
    NextItem none;
    for (int i = 0; i < items; ++i) plan.run_item(cut.io, plan.items() - 1 - i, i % 3, &none);
    CHECK_THROWS(std::runtime_error, "the plan is running", plan.begin());
    plan.end(false);
    plan.run(cut.io, 2);
    batch.check(out);
  }
}

// All layers of a step are in the workers' hands one after the other; the next step's plan is another one.
void plans_through_the_handoff() {
  constexpr int kLayers = 4;
  WorkerPool pool(with_threads(3));
  HandoffService service(&pool, kLong);
  HandoffMemory flags(kLayers, 0, 0);
  for (uint64_t step = 1; step <= 20; ++step) {
    const Batch batch({static_cast<int32_t>(200 + step), 90, 0, 130}, 0, kLayers);
    Plan plan(batch.input(pool.threads()));
    std::vector<std::vector<float>> outs(kLayers);
    std::vector<PlanRun> runs(kLayers);
    StepDescriptor descriptor;
    descriptor.epoch = step;
    descriptor.number = static_cast<uint32_t>(step);
    for (int layer = 0; layer < kLayers; ++layer) {
      runs[layer] = batch.run(&plan, &outs[layer], layer);
      runs[layer].make_job();
      HandoffJob handoff;
      handoff.job = runs[layer].job;
      handoff.ready = flags.ready(layer);
      handoff.done = flags.done(layer);
      handoff.header = flags.header(layer);
      handoff.layer = layer;
      descriptor.jobs.push_back(handoff);
    }
    service.submit(descriptor);
    for (int layer = 0; layer < kLayers; ++layer) {
      __atomic_store_n(flags.header(layer), descriptor.number, __ATOMIC_RELAXED);
      device_write(flags.ready(layer), 1);
      CHECK(device_wait(flags.done(layer), 1, kLong));
      device_write(flags.done(layer), 0);
      batch.check(outs[layer]);
    }
    CHECK(service.wait_epoch(step, kLong) && service.outcome(step) == StepOutcome::kComplete);
  }
}

// The second job of the plan begins while the first runs: refused, and the step is poisoned rather than wrong.
void two_runs_at_a_time_are_refused() {
  WorkerPool pool(with_threads(2));
  HandoffService service(&pool, kLong);
  HandoffMemory flags(2, 0, 0);
  const Batch batch({4000});
  PlanInput in = batch.input(2);
  in.tuning.min_split_tokens = 1 << 20;
  in.tuning.min_thread_tokens = 1 << 20;
  Plan plan(in);
  std::vector<float> outs[2];
  PlanRun runs[2];
  StepDescriptor step;
  step.epoch = 1;
  for (int i = 0; i < 2; ++i) {
    runs[i] = batch.run(&plan, &outs[i]);
    runs[i].make_job();
    HandoffJob handoff;
    handoff.job = runs[i].job;
    handoff.ready = flags.ready(i);
    handoff.done = flags.done(i);
    step.jobs.push_back(handoff);
  }
  for (int round = 0; service.status().report.reason == PoisonReason::kNone; ++round) {
    CHECK(round < 1000);  // each time the second flag may be seen too late
    service.submit(step);
    for (int i = 0; i < 2; ++i) device_write(flags.ready(i), 1);
    CHECK(service.wait_epoch(step.epoch, kLong));
    for (int i = 0; i < 2; ++i) device_write(flags.done(i), 0);
    ++step.epoch;
  }
  CHECK(service.status().report.message.find("the plan is running") != std::string::npos);
  CHECK(service.reset(kLong));
  step.overlap = 1;
  service.submit(step);
  for (int i = 0; i < 2; ++i) device_write(flags.ready(i), 1);
  CHECK(service.wait_epoch(step.epoch, kLong) && service.outcome(step.epoch) == StepOutcome::kComplete);
  for (const auto& out : outs) batch.check(out);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {
                       {"plans_run_on_pools", plans_run_on_pools},
                       {"a_run_cut_short_leaves_nothing", a_run_cut_short_leaves_nothing},
                       {"plans_through_the_handoff", plans_through_the_handoff},
                       {"two_runs_at_a_time_are_refused", two_runs_at_a_time_are_refused},
                   });
}
