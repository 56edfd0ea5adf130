// The worker pool and the hand-off service, for the sanitizers: run without arguments, or with part of a test's name.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../fake_device.hpp"
#include "../handoff.hpp"
#include "../worker_pool.hpp"
#include "check.hpp"

using namespace cpu_kernels;

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kLong = 60'000 * kMs;  // a wait that only a hang reaches

PoolOptions with_threads(int threads, int64_t spin_ns = 20'000) {
  PoolOptions options;
  options.threads = threads;
  options.spin_ns = spin_ns;
  return options;
}

// Every item once, no worker number twice at a time.
struct Tally {
  explicit Tally(int items, int workers) : runs(items), inside(workers) {}
  std::vector<std::atomic<int>> runs, inside;
  std::vector<int> plain = std::vector<int>(runs.size());  // written without atomics: the end of run() must order it
  static void run(void* context, int item, int worker, NextItem*) {
    Tally* t = static_cast<Tally*>(context);
    CHECK(t->inside[worker].fetch_add(1) == 0);
    t->runs[item].fetch_add(1);
    t->plain[item] += item + 1;
    t->inside[worker].fetch_sub(1);
  }
  static void cost(void*, int item, ItemCost* out) {
    out->bytes = 10;
    out->tokens = item;
  }
  Job job() {
    Job j;
    j.items = static_cast<int>(runs.size());
    j.run = run;
    j.cost = cost;
    j.context = this;
    return j;
  }
};

void pool_runs_every_item_once() {
  for (int threads : {1, 2, 5}) {
    WorkerPool pool(with_threads(threads));
    int64_t items = 0, tokens = 0;
    for (int round = 0; round < 300; ++round) {
      int n = 1 + round % 37;
      Tally tally(n, pool.worker_slots());
      CHECK(pool.run(tally.job(), round % 2 == 0) == JobResult::kDone);
      for (int i = 0; i < n; ++i) {
        CHECK(tally.runs[i] == 1);
        CHECK(tally.plain[i] == i + 1);
        tokens += i;
      }
      items += n;
    }
    WorkerCounters sum;
    for (int w = 0; w < pool.worker_slots(); ++w) {
      WorkerCounters c = pool.counters(w);
      CHECK(c.busy_ns + c.wait_ns == c.age_ns);
      sum.items += c.items;
      sum.bytes += c.bytes;
      sum.tokens += c.tokens;
    }
    CHECK(sum.items == items && sum.bytes == 10 * items && sum.tokens == tokens);
    CHECK(pool.close(kLong));
  }
}

void pool_takes_several_callers() {
  WorkerPool pool(with_threads(2));
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&pool, c] {
      for (int round = 0; round < 200; ++round) {
        Tally tally(1 + (round * 7 + c) % 20, pool.worker_slots());
        // Worker numbers are unique over all jobs of the pool, so they are within one job.
        CHECK(pool.run(tally.job(), c % 2 == 0) == JobResult::kDone);
        for (auto& runs : tally.runs) CHECK(runs == 1);
      }
    });
  }
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      for (int w = 0; w < pool.worker_slots(); ++w) {
        WorkerCounters c = pool.counters(w);
        CHECK(c.bytes == 10 * c.items);
        CHECK(c.busy_ns + c.wait_ns == c.age_ns);
      }
      std::this_thread::yield();
    }
  });
  for (auto& caller : callers) caller.join();
  stop = true;
  reader.join();
}

void pool_sleeps_and_wakes() {
  WorkerPool pool(with_threads(3, 0));
  for (int round = 0; round < 50; ++round) {
    while (pool.sleeping() < 3) std::this_thread::yield();
    Tally tally(5, pool.worker_slots());
    CHECK(pool.run(tally.job(), false) == JobResult::kDone);
  }
  while (pool.sleeping() < 3) std::this_thread::yield();
  // One item and a caller who takes part: nobody is woken.
  int64_t before = pool.counters(3).items;
  Tally one(1, pool.worker_slots());
  CHECK(pool.run(one.job(), true) == JobResult::kDone);
  CHECK(pool.counters(3).items == before + 1);
}

void pool_reports_failures() {
  WorkerPool pool(with_threads(2));
  Job job;
  job.items = 10;
  job.run = [](void*, int item, int, NextItem*) {
    if (item == 3) throw std::runtime_error("item three");
  };
  std::string message;
  for (bool participate : {false, true}) {
    CHECK(pool.run(job, participate, &message) == JobResult::kFailed);
    CHECK(message == "item three");
  }
  job.run = [](void*, int, int, NextItem*) { throw 7; };
  CHECK(pool.run(job, false, &message) == JobResult::kFailed);
  Tally tally(8, pool.worker_slots());
  CHECK(pool.run(tally.job(), true, &message) == JobResult::kDone);
  CHECK(message.empty());
  // A job of the pool that runs it would wait for itself.
  struct Nested {
    WorkerPool* pool;
    bool refused;
  } nested{&pool, false};
  job.items = 1;
  job.context = &nested;
  job.run = [](void* context, int, int, NextItem*) {
    Nested* n = static_cast<Nested*>(context);
    Job inner;
    inner.items = 1;
    inner.run = [](void*, int, int, NextItem*) {};
    try {
      n->pool->run(inner, true);
    } catch (const std::runtime_error&) {
      n->refused = true;
    }
  };
  CHECK(pool.run(job, false) == JobResult::kDone);
  CHECK(nested.refused);
}

// begin and end bracket every job, whatever becomes of it; begin can refuse it.
void pool_brackets_jobs() {
  WorkerPool pool(with_threads(2));
  struct Owned {
    std::atomic<bool> owned{false}, refuse{false};
    std::atomic<int> done{0}, failed{0}, fail_at{-1};
  } context;
  Job job;
  job.items = 20;
  job.context = &context;
  job.begin = [](void* c) {
    Owned* o = static_cast<Owned*>(c);
    if (o->refuse) throw std::runtime_error("not now");
    CHECK(!o->owned.exchange(true));
  };
  job.run = [](void* c, int item, int, NextItem*) {
    Owned* o = static_cast<Owned*>(c);
    CHECK(o->owned);
    if (item == o->fail_at) throw std::runtime_error("no");
  };
  job.end = [](void* c, JobResult result) {
    Owned* o = static_cast<Owned*>(c);
    CHECK(o->owned.exchange(false));
    ++(result == JobResult::kDone ? o->done : o->failed);
  };
  for (int round = 0; round < 100; ++round) {
    context.fail_at = round % 3 == 0 ? round % 20 : -1;
    CHECK(pool.run(job, round % 2 == 0) == (round % 3 == 0 ? JobResult::kFailed : JobResult::kDone));
    CHECK(!context.owned);
  }
  CHECK(context.done == 66 && context.failed == 34);
  context.refuse = true;
  CHECK_THROWS(std::runtime_error, "not now", pool.run(job, true));
  context.refuse = false;
  context.fail_at = -1;
  CHECK(pool.run(job, true) == JobResult::kDone);
}

void pool_respects_the_number_of_workers() {
  WorkerPool pool(with_threads(2));
  Tally tally(50, 2);
  Job job = tally.job();
  job.workers = 2;  // the caller's number, 2, is too high
  CHECK(pool.run(job, true) == JobResult::kDone);
  CHECK(pool.counters(2).items == 0);
  for (auto& runs : tally.runs) CHECK(runs == 1);
  job.workers = 1;
  CHECK_THROWS(std::invalid_argument, "made for 1 workers, the pool has 2", pool.run(job, true));
}

void pool_survives_a_dying_worker() {
  for (int threads : {1, 3}) {
    WorkerPool pool(with_threads(threads));
    Job job;
    job.items = 6;
    job.run = [](void*, int item, int, NextItem*) {
      if (item == 2) pthread_exit(nullptr);
    };
    std::string message;
    CHECK(pool.run(job, false, &message) == JobResult::kFailed);
    CHECK(message.find("ended inside the job") != std::string::npos);
    CHECK_THROWS(std::runtime_error, "make a new one", pool.run(job, false));
    CHECK(pool.close(kLong));
  }
}

// Whoever asks for its next item gets it, and nobody else does; also if the present one fails after that.
void pool_tells_the_next_item() {
  struct Asked {
    std::vector<std::atomic<int>> runs = std::vector<std::atomic<int>>(40);
    std::atomic<int> promised[8]{};  // by worker: the item it is to run next, + 1
    int bad = -1;
  };
  for (int threads : {1, 3})
    for (int bad : {-1, 7}) {
      WorkerPool pool(with_threads(threads));
      Asked asked;
      asked.bad = bad;
      Job job;
      job.items = static_cast<int>(asked.runs.size());
      job.context = &asked;
      job.run = [](void* context, int item, int worker, NextItem* next) {
        Asked& a = *static_cast<Asked*>(context);
        a.runs[item]++;
        const int promised = a.promised[worker].exchange(0);
        CHECK(promised == 0 || promised == item + 1);
        if (item % 3 == 0) return;  // does not ask
        CHECK(next->get() == next->get());
        a.promised[worker] = next->get() + 1;
        if (item == a.bad) throw std::runtime_error("seven");
      };
      std::string message;
      CHECK(pool.run(job, false, &message) == (bad < 0 ? JobResult::kDone : JobResult::kFailed));
      CHECK(message == (bad < 0 ? "" : "seven"));
      for (auto& runs : asked.runs) CHECK(bad < 0 ? runs == 1 : runs <= 1);
    }
  // A worker that ends with an item in hand that it has not begun.
  WorkerPool pool(with_threads(1));
  Job job;
  job.items = 5;
  job.run = [](void*, int item, int, NextItem* next) {
    if (item == 2 && next->get() == 3) pthread_exit(nullptr);
  };
  CHECK(pool.run(job, false) == JobResult::kFailed);
  CHECK(pool.close(kLong));
}

void pool_abandons_a_stuck_worker() {
  struct Stuck {
    std::atomic<bool> inside{false}, release{false}, left{false};
  } stuck;
  {
    WorkerPool pool(with_threads(2));
    Job job;
    job.items = 1;
    job.context = &stuck;
    job.run = [](void* context, int, int, NextItem*) {
      Stuck* s = static_cast<Stuck*>(context);
      s->inside = true;
      while (!s->release) std::this_thread::yield();
    };
    uint64_t sequence;
    CHECK(pool.submit(
        job, [](void* context, JobResult, const char*, int64_t) { static_cast<Stuck*>(context)->left = true; }, &stuck,
        &sequence));
    while (!stuck.inside) std::this_thread::yield();
    CHECK(!pool.close(10 * kMs));
    CHECK_THROWS(std::runtime_error, "closed", pool.run(job, false));
  }
  stuck.release = true;
  while (!stuck.left) std::this_thread::yield();
}

void pool_refuses_bad_options() {
  CHECK_THROWS(std::invalid_argument, "threads", WorkerPool(with_threads(0)));
  PoolOptions options = with_threads(2);
  options.cores = {0};
  CHECK_THROWS(std::invalid_argument, "2 threads but 1 cores", WorkerPool pool(options));
  options.cores = {0, 60'000};
  CHECK_THROWS(std::runtime_error, "core 60000", WorkerPool pool(options));
}

void pool_cancels() {
  WorkerPool pool(with_threads(1));
  struct Gate {
    std::atomic<bool> open{false};
    std::atomic<int> ran{0}, finished{0}, cancelled{0};
  } gate;
  auto finished = [](void* context, JobResult result, const char*, int64_t) {
    Gate* g = static_cast<Gate*>(context);
    if (result == JobResult::kCancelled) g->cancelled++;
    g->finished++;
  };
  Job block, rest;
  block.items = 1;
  rest.items = 100;
  block.context = rest.context = &gate;
  block.run = [](void* context, int, int, NextItem*) {
    while (!static_cast<Gate*>(context)->open) std::this_thread::yield();
  };
  rest.run = [](void* context, int, int, NextItem*) { static_cast<Gate*>(context)->ran++; };
  uint64_t first, sequence;
  CHECK(pool.submit(block, finished, &gate, &first));
  for (int i = 1; i < WorkerPool::kRing; ++i) CHECK(pool.submit(rest, finished, &gate, &sequence));
  uint64_t none;
  CHECK(!pool.submit(rest, finished, &gate, &none));  // the ring is full
  pool.cancel(sequence);
  pool.cancel(sequence);
  CHECK(gate.cancelled == 1);
  gate.open = true;
  while (gate.finished < WorkerPool::kRing) std::this_thread::yield();
  CHECK(gate.ran == 100 * (WorkerPool::kRing - 2));
  pool.cancel(first);  // of long ago
}

// ---- hand-off

StepDescriptor descriptor(FakeDevice* device, uint64_t epoch, uint32_t number, int overlap = 2) {
  StepDescriptor step;
  step.epoch = epoch;
  step.number = number;
  step.overlap = overlap;
  step.jobs = device->jobs();
  return step;
}

void stress(DeviceOrder order, int steps, int threads, int ahead) {
  WorkerPool pool(with_threads(threads));
  FakeDeviceOptions options;
  options.order = order;
  options.layers = 3;
  options.words = 48;
  options.items = 3;
  options.max_delay_ns = 5'000;
  FakeDevice device(options);
  HandoffService service(&pool, kLong);
  for (int s = 1; s <= steps; ++s) {
    service.submit(descriptor(&device, s, s, 1 + s % 3));
    device.launch();
    CHECK(service.lag() <= device.handoffs());
    // Up to `ahead` steps on the stream, as an engine that launches before it has the results.
    if (s > ahead) CHECK(service.wait_epoch(s - ahead, kLong));
    CHECK(service.completed_epoch() + ahead >= static_cast<uint64_t>(s));
  }
  CHECK(device.synchronize(kLong));
  CHECK(service.wait_epoch(steps, kLong));
  CHECK(device.wrong() == 0);
  int per_step = device.handoffs();
  CHECK(device.checked() == int64_t{per_step} * (steps - (order == DeviceOrder::kDeferred)));
  HandoffStatus status = service.status();
  CHECK(!status.poisoned && status.steps == 0 && status.in_flight == 0 && status.lag == 0);
  CHECK(status.handoffs == int64_t{per_step} * steps && status.complete_steps == steps);
  CHECK(service.outcome(steps) == StepOutcome::kComplete);
  CHECK(service.outcome(steps + 1) == StepOutcome::kUnknown);
  WorkerCounters sum;
  for (int w = 0; w < pool.worker_slots(); ++w) {
    sum.items += pool.counters(w).items;
    sum.bytes += pool.counters(w).bytes;
    sum.tokens += pool.counters(w).tokens;
  }
  CHECK(sum.items == status.handoffs * options.items && sum.tokens == sum.items);
  CHECK(sum.bytes == status.handoffs * 8 * options.words);
  CHECK(service.close(kLong));
}

constexpr int kStress = CPU_KERNELS_TSAN ? 600 : 2000;
void handoff_stress_sync() { stress(DeviceOrder::kSync, kStress, 2, 1); }
void handoff_stress_pipelined() { stress(DeviceOrder::kPipelined, kStress, 3, 3); }
void handoff_stress_deferred() { stress(DeviceOrder::kDeferred, kStress, 2, 2); }

// Faults in turn on one service, each followed by a reset and healthy steps; steps behind a fault are on the stream
// already and must come through.
void handoff_faults() {
  struct Case {
    FakeFault fault;
    PoisonReason reason;
    const char* text;
  };
  const Case cases[] = {
      {FakeFault::kNoReady, PoisonReason::kTimeoutDevice, "did not raise ready"},
      {FakeFault::kWrongStep, PoisonReason::kStepMismatch, "header says step"},
      {FakeFault::kBadFlag, PoisonReason::kBadFlag, "flag is 7"},
      {FakeFault::kThrow, PoisonReason::kJobFailed, "fault on purpose"},
      {FakeFault::kStuck, PoisonReason::kTimeoutWorkers, "did not finish"},
  };
  for (DeviceOrder order : {DeviceOrder::kSync, DeviceOrder::kPipelined, DeviceOrder::kDeferred}) {
    WorkerPool pool(with_threads(2));
    FakeDeviceOptions options;
    options.order = order;
    options.layers = 4;
    options.max_delay_ns = 2'000;
    FakeDevice device(options);
    HandoffService service(&pool, 300 * kMs);
    uint32_t n = 0;
    for (const Case& c : cases) {
      for (int i = 0; i < 3; ++i) {
        ++n;
        service.submit(descriptor(&device, n, n));
        device.launch();
      }
      CHECK(device.synchronize(kLong) && service.wait_epoch(n, kLong));
      if (service.outcome(n) != StepOutcome::kComplete)
        std::fprintf(stderr, "%s\n", service.status().report.message.c_str());
      CHECK(service.outcome(n) == StepOutcome::kComplete);
      uint32_t bad = n + 2;
      device.fault(c.fault, bad, 2);
      for (int i = 0; i < 4; ++i) {
        ++n;
        try {
          service.submit(descriptor(&device, n, n));
        } catch (const std::runtime_error&) {  // poisoned already: do not launch
          --n;
          break;
        }
        device.launch();
      }
      CHECK(n >= bad);
      CHECK(device.synchronize(kLong));
      HandoffStatus status = service.status();
      CHECK(status.poisoned && status.report.reason == c.reason);
      CHECK(status.report.number == bad && status.report.epoch == bad);
      CHECK(status.report.index == 2);
      if (status.report.message.find(c.text) == std::string::npos) std::puts(status.report.message.c_str());
      CHECK(status.report.message.find(c.text) != std::string::npos);
      CHECK(service.outcome(bad) == StepOutcome::kPoisoned && service.outcome(n) == StepOutcome::kPoisoned);
      CHECK_THROWS(std::runtime_error, "needs a reset", service.submit(descriptor(&device, n + 1, n + 1)));
      if (c.fault == FakeFault::kStuck) {
        CHECK(service.completed_epoch() < bad);  // a worker may still write what the step names
        CHECK(!service.reset(5 * kMs));
        device.release_stuck();
      }
      CHECK(service.reset(kLong));
      CHECK(service.completed_epoch() == n);
      CHECK(service.outcome(bad) == StepOutcome::kPoisoned && service.outcome(bad - 2) == StepOutcome::kComplete);
      device.restart();
    }
    ++n;
    service.submit(descriptor(&device, n, n));
    device.launch();
    CHECK(service.wait_epoch(n, kLong) && device.synchronize(kLong));
    CHECK(device.wrong() == 0 && service.outcome(n) == StepOutcome::kComplete);
  }
}

void handoff_dying_worker() {
  WorkerPool pool(with_threads(2));
  FakeDeviceOptions options;
  options.layers = 5;
  FakeDevice device(options);
  HandoffService service(&pool, kLong);
  device.fault(FakeFault::kExit, 2, 1);
  for (uint32_t n = 1; n <= 3; ++n) {
    try {
      service.submit(descriptor(&device, n, n));
    } catch (const std::runtime_error&) {
      break;
    }
    device.launch();
  }
  CHECK(device.synchronize(kLong));
  HandoffStatus status = service.status();
  CHECK(status.poisoned && status.report.reason == PoisonReason::kJobFailed && status.report.number == 2);
  CHECK(service.reset(kLong));
  CHECK_THROWS(std::runtime_error, "make a new one", service.submit(descriptor(&device, 9, 9)));
}

void handoff_close_at_any_moment() {
  for (int round = 0; round < (CPU_KERNELS_TSAN ? 30 : 100); ++round) {
    WorkerPool pool(with_threads(1 + round % 3));
    FakeDeviceOptions options;
    options.order = static_cast<DeviceOrder>(round % 3);
    options.layers = 3;
    options.max_delay_ns = 20'000;
    options.seed = round;
    FakeDevice device(options);
    device.fault(FakeFault::kNone, 1, -1);  // the boxes of a step cut short are nobody's
    HandoffService service(&pool, kLong);
    for (uint32_t n = 1; n <= 3; ++n) {
      service.submit(descriptor(&device, n, n));
      device.launch();
    }
    int64_t until = now_ns() + (round * 37 % 100) * 1'000;
    while (now_ns() < until) std::this_thread::yield();
    CHECK(service.close(kLong));
    HandoffStatus status = service.status();
    CHECK(status.device_through && status.steps == 0 && status.completed_epoch == 3);
    CHECK(device.synchronize(kLong));  // it was let through
    CHECK_THROWS(std::runtime_error, "closed", service.submit(descriptor(&device, 9, 9)));
  }
}

void handoff_close_with_stuck_job() {
  FakeDeviceOptions options;
  FakeDevice device(options);
  {
    WorkerPool pool(with_threads(2));
    HandoffService service(&pool, kLong);
    device.fault(FakeFault::kStuck, 1, 0);
    service.submit(descriptor(&device, 1, 1));
    device.launch();
    while (service.status().in_flight == 0) std::this_thread::yield();
    CHECK(!service.close(10 * kMs));
    CHECK(pool.attach(Poller()));  // the pool is free again
    pool.detach();
    device.release_stuck();
    CHECK(pool.close(kLong));
  }
}

void handoff_one_service_per_pool() {
  WorkerPool pool(with_threads(1));
  {
    HandoffService service(&pool, kLong);
    CHECK_THROWS(std::runtime_error, "already has a hand-off service", HandoffService other(&pool, kLong));
    CHECK_THROWS(std::runtime_error, "close it first", pool.close(kLong));
  }
  HandoffService again(&pool, kLong);
}

void handoff_with_blocking_calls() {
  WorkerPool pool(with_threads(2));
  FakeDeviceOptions options;
  options.order = DeviceOrder::kDeferred;
  FakeDevice device(options);
  HandoffService service(&pool, kLong);
  for (uint32_t n = 1; n <= 200; ++n) {
    service.submit(descriptor(&device, n, n));
    device.launch();
    Tally tally(7, pool.worker_slots());
    CHECK(pool.run(tally.job(), n % 2 == 0) == JobResult::kDone);
  }
  CHECK(service.wait_epoch(200, kLong) && device.synchronize(kLong));
  CHECK(device.wrong() == 0);
}

void handoff_refuses_bad_descriptors() {
  WorkerPool pool(with_threads(1));
  FakeDeviceOptions options;
  FakeDevice device(options);
  HandoffService service(&pool, kLong);
  StepDescriptor good = descriptor(&device, 1, 1), bad = good;
  bad.overlap = 0;
  CHECK_THROWS(std::invalid_argument, "overlap", service.submit(bad));
  bad = good;
  bad.jobs[0].ready = nullptr;
  CHECK_THROWS(std::invalid_argument, "multiples of 4", service.submit(bad));
  bad = good;
  bad.jobs[1].done = bad.jobs[0].done;
  CHECK_THROWS(std::invalid_argument, "same flag", service.submit(bad));
  bad = good;
  bad.jobs[0].job.run = nullptr;
  CHECK_THROWS(std::invalid_argument, "function", service.submit(bad));
  bad = good;
  bad.epoch = 0;
  CHECK_THROWS(std::invalid_argument, "epoch", service.submit(bad));
  StepDescriptor empty;
  empty.epoch = 5;
  service.submit(empty);  // a step without hand-offs is over at once
  CHECK(service.completed_epoch() == 5);
  CHECK_THROWS(std::runtime_error, "", HandoffService(&pool, kLong));
}

void handoff_round_trips() {
  WorkerPool pool(with_threads(1));
  HandoffService service(&pool, kLong);
  for (int items : {1, 0})
    CHECK(measure_round_trips(&service, 6 - 5 * items, 5, std::vector<Job>(10, spinning_job(items, 0))).size() == 50);
}

void fork_is_noticed() {
#if !CPU_KERNELS_TSAN  // which gives up on a process with threads that forks and makes new ones
  WorkerPool* pool = new WorkerPool(with_threads(2));
  HandoffService* service = new HandoffService(pool, kLong);
  FakeDeviceOptions options;
  FakeDevice device(options);
  // One whole step and a moment first: a sanitizer's allocator is not fork-safe, and a thread that starts allocates.
  service->submit(descriptor(&device, 1, 1));
  device.launch();
  CHECK(service->wait_epoch(1, kLong) && device.synchronize(kLong));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  service->submit(descriptor(&device, 2, 2));  // the threads are at work during the fork
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    Tally tally(4, 3);
    CHECK_THROWS(std::runtime_error, "forked", pool->run(tally.job(), true));
    CHECK_THROWS(std::runtime_error, "forked", service->submit(descriptor(&device, 3, 3)));
    CHECK_THROWS(std::runtime_error, "forked", service->lag());
    CHECK(service->close(kLong) && pool->close(kLong));
    delete service;
    delete pool;
    WorkerPool fresh(with_threads(2));
    CHECK(fresh.run(tally.job(), true) == JobResult::kDone);
    CHECK(fresh.close(kLong));
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  device.launch();
  CHECK(service->wait_epoch(2, kLong) && device.synchronize(kLong));
  delete service;
  delete pool;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {
                       {"pool_runs_every_item_once", pool_runs_every_item_once},
                       {"pool_takes_several_callers", pool_takes_several_callers},
                       {"pool_sleeps_and_wakes", pool_sleeps_and_wakes},
                       {"pool_reports_failures", pool_reports_failures},
                       {"pool_brackets_jobs", pool_brackets_jobs},
                       {"pool_respects_the_number_of_workers", pool_respects_the_number_of_workers},
                       {"pool_survives_a_dying_worker", pool_survives_a_dying_worker},
                       {"pool_tells_the_next_item", pool_tells_the_next_item},
                       {"pool_abandons_a_stuck_worker", pool_abandons_a_stuck_worker},
                       {"pool_refuses_bad_options", pool_refuses_bad_options},
                       {"pool_cancels", pool_cancels},
                       {"handoff_stress_sync", handoff_stress_sync},
                       {"handoff_stress_pipelined", handoff_stress_pipelined},
                       {"handoff_stress_deferred", handoff_stress_deferred},
                       {"handoff_faults", handoff_faults},
                       {"handoff_dying_worker", handoff_dying_worker},
                       {"handoff_close_at_any_moment", handoff_close_at_any_moment},
                       {"handoff_close_with_stuck_job", handoff_close_with_stuck_job},
                       {"handoff_one_service_per_pool", handoff_one_service_per_pool},
                       {"handoff_with_blocking_calls", handoff_with_blocking_calls},
                       {"handoff_refuses_bad_descriptors", handoff_refuses_bad_descriptors},
                       {"handoff_round_trips", handoff_round_trips},
                       {"fork_is_noticed", fork_is_noticed},
                   });
}
