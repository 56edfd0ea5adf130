#include "fake_device.hpp"

#include <pthread.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

namespace cpu_kernels {
namespace {

constexpr int64_t kForever = INT64_MAX;

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

uint32_t sent_word(uint32_t step, int handoff, int word) {
  return static_cast<uint32_t>(mix((uint64_t{step} << 32) ^ (uint64_t(handoff) << 16) ^ uint64_t(word)));
}

uint32_t answer_word(uint32_t sent) { return static_cast<uint32_t>(mix(sent)); }

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

HandoffMemory::HandoffMemory(int handoffs, int64_t outbox_bytes, int64_t inbox_bytes)
    : handoffs_(handoffs),
      outbox_bytes_(outbox_bytes),
      inbox_bytes_(inbox_bytes),
      outbox_padded_(padded(outbox_bytes)),
      stride_(192 + outbox_padded_ + padded(inbox_bytes)) {
  if (handoffs < 1 || outbox_bytes < 0 || inbox_bytes < 0) {
    throw std::invalid_argument("hand-off memory needs at least one hand-off and sizes of at least 0");
  }
  memory_.reset(new char[handoffs * stride_ + 64]());
  base_ = reinterpret_cast<char*>(padded(reinterpret_cast<int64_t>(memory_.get())));
}

void device_write(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

bool device_wait(const uint32_t* flag, uint32_t value, int64_t timeout_ns, const std::atomic<bool>* stop) {
  int64_t begin = 0;
  for (int spins = 0; __atomic_load_n(flag, __ATOMIC_ACQUIRE) != value;) {
    relax(&spins);
    if ((spins & 63) != 0) continue;
    if (stop && stop->load(std::memory_order_acquire)) return false;
    int64_t now = now_ns();
    if (begin == 0) begin = now;
    if (now - begin > timeout_ns) return false;
  }
  return true;
}

FakeDevice::FakeDevice(const FakeDeviceOptions& options)
    : options_(options),
      lanes_(options.order == DeviceOrder::kPipelined ? 2 : 1),
      memory_(options.layers * lanes_, options.words * int64_t{4}, options.words * int64_t{4}),
      sent_(memory_.handoffs(), 0) {
  if (options.items < 0 || options.words < 0) throw std::invalid_argument("items and words must not be negative");
  for (int i = 0; i < handoffs(); ++i) echoes_.push_back(Echo{this, i});
  first_flags();
  thread_ = std::thread([this] { main(); });
}

FakeDevice::~FakeDevice() {
  if (fork_generation() != born_) {
    thread_.detach();  // of the parent; a thread object may not be destroyed while it names one
    return;
  }
  stop_.store(true);
  released_.store(true);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cv_.notify_all();
  }
  thread_.join();
}

void FakeDevice::first_flags() {
  for (int i = 0; i < handoffs(); ++i) {
    device_write(memory_.ready(i), 0);
    device_write(memory_.done(i), options_.order == DeviceOrder::kDeferred ? 1 : 0);
  }
}

std::vector<HandoffJob> FakeDevice::jobs() {
  std::vector<HandoffJob> out(handoffs());
  for (int i = 0; i < handoffs(); ++i) {
    out[i].job.items = options_.items;
    out[i].job.run = run_echo;
    out[i].job.cost = cost_echo;
    out[i].job.context = &echoes_[i];
    out[i].job.streaming_stores = (i & 1) != 0;
    out[i].ready = memory_.ready(i);
    out[i].done = memory_.done(i);
    out[i].header = memory_.header(i);
    out[i].layer = i / lanes_;
    out[i].lane = i % lanes_;
  }
  return out;
}

void FakeDevice::launch() {
  std::lock_guard<std::mutex> lock(mutex_);
  launched_.fetch_add(1, std::memory_order_release);
  cv_.notify_all();
}

bool FakeDevice::synchronize(int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  return cv_.wait_until(lock, deadline, [&] { return finished_.load() == launched_.load(); });
}

void FakeDevice::fault(FakeFault kind, uint32_t step, int handoff) {
  released_.store(false);
  fault_kind_.store(kind);
  fault_handoff_.store(handoff);
  fault_step_.store(step, std::memory_order_release);
}

void FakeDevice::release_stuck() { released_.store(true, std::memory_order_release); }

void FakeDevice::restart() {
  std::lock_guard<std::mutex> lock(mutex_);
  fault_step_.store(UINT32_MAX, std::memory_order_release);
  fault_kind_.store(FakeFault::kNone);
  sent_.assign(sent_.size(), 0);
  first_flags();
}

bool FakeDevice::fault_here(FakeFault kind, uint32_t number, int handoff) const {
  return number == fault_step_.load(std::memory_order_acquire) && handoff == fault_handoff_.load() &&
         kind == fault_kind_.load();
}

void FakeDevice::pause(uint64_t number, uint64_t a, uint64_t b) const {
  if (options_.max_delay_ns == 0) return;
  uint64_t r = mix(options_.seed ^ mix(number * 1000003 + a * 1009 + b));
  if ((r & 3) != 0) return;
  int64_t until = now_ns() + static_cast<int64_t>((r >> 2) % options_.max_delay_ns);
  for (int spins = 0; now_ns() < until;) relax(&spins);
}

void FakeDevice::run_echo(void* context, int item, int, NextItem*) {
  Echo* echo = static_cast<Echo*>(context);
  FakeDevice* device = echo->device;
  int h = echo->handoff;
  uint32_t number = __atomic_load_n(device->memory_.header(h), __ATOMIC_RELAXED);
  device->pause(number, h, 100 + item);
  if (item == 0) {
    if (device->fault_here(FakeFault::kThrow, number, h)) throw std::runtime_error("fault on purpose");
    if (device->fault_here(FakeFault::kExit, number, h)) pthread_exit(nullptr);
    if (device->fault_here(FakeFault::kStuck, number, h)) {
      for (int spins = 0; !device->released_.load(std::memory_order_acquire);) relax(&spins);
    }
  }
  const uint32_t* in = reinterpret_cast<const uint32_t*>(device->memory_.outbox(h));
  uint32_t* out = reinterpret_cast<uint32_t*>(device->memory_.inbox(h));
  int64_t words = device->options_.words, items = device->options_.items;
  for (int64_t w = words * item / items; w < words * (item + 1) / items; ++w) out[w] = answer_word(in[w]);
}

void FakeDevice::cost_echo(void* context, int item, ItemCost* out) {
  const FakeDeviceOptions& o = static_cast<Echo*>(context)->device->options_;
  int64_t words = o.words, items = o.items;
  out->bytes = 8 * (words * (item + 1) / items - words * item / items);
  out->tokens = 1;
}

void FakeDevice::give(uint32_t number, int handoff) {
  pause(number, handoff, 1);
  if (touches(number)) {
    uint32_t* out = reinterpret_cast<uint32_t*>(memory_.outbox(handoff));
    for (int w = 0; w < options_.words; ++w) out[w] = sent_word(number, handoff, w);
    sent_[handoff] = number;
  } else {
    sent_[handoff] = 0;
  }
  bool wrong = fault_here(FakeFault::kWrongStep, number, handoff);
  __atomic_store_n(memory_.header(handoff), number + wrong, __ATOMIC_RELAXED);
  if (fault_here(FakeFault::kNoReady, number, handoff)) return;
  device_write(memory_.ready(handoff), fault_here(FakeFault::kBadFlag, number, handoff) ? 7 : 1);
}

bool FakeDevice::take(uint32_t number, int handoff) {
  if (!device_wait(memory_.done(handoff), 1, kForever, &stop_)) return false;
  device_write(memory_.done(handoff), 0);
  pause(number, handoff, 2);
  if (!touches(number) || sent_[handoff] == 0) return true;
  const uint32_t* in = reinterpret_cast<const uint32_t*>(memory_.inbox(handoff));
  int wrong = 0;
  for (int w = 0; w < options_.words; ++w) wrong += in[w] != answer_word(sent_word(sent_[handoff], handoff, w));
  checked_.fetch_add(1, std::memory_order_acq_rel);
  if (wrong != 0 && options_.items > 0) wrong_.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

void FakeDevice::step(uint32_t number) {
  int layers = options_.layers;
  switch (options_.order) {
    case DeviceOrder::kSync:
      for (int l = 0; l < layers; ++l) {
        give(number, l);
        if (!take(number, l)) return;
      }
      return;
    case DeviceOrder::kPipelined:
      give(number, 0);
      give(number, 1);
      for (int l = 0; l < layers; ++l) {
        for (int lane = 0; lane < 2; ++lane) {
          if (!take(number, 2 * l + lane)) return;
          if (l + 1 < layers) give(number, 2 * (l + 1) + lane);
        }
      }
      return;
    case DeviceOrder::kDeferred:
      for (int l = 0; l < layers; ++l) {
        if (!take(number, l)) return;
        give(number, l);
      }
      return;
  }
}

void FakeDevice::main() {
  for (;;) {
    uint32_t number;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      cv_.wait(lock, [&] { return stop_.load() || launched_.load() != finished_.load(); });
      if (stop_.load()) return;
      number = finished_.load() + 1;
    }
    step(number);
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.fetch_add(1, std::memory_order_release);
    cv_.notify_all();
  }
}

namespace {

void fill_round_trips(HandoffService* service, const HandoffMemory& memory, uint64_t first_epoch, int steps,
                      const std::vector<Job>& jobs, std::vector<int64_t>* times) {
  const int handoffs = memory.handoffs();
  times->reserve(static_cast<size_t>(steps) * handoffs);
  for (int s = 0; s < steps; ++s) {
    StepDescriptor step;
    step.epoch = first_epoch + s;
    step.number = static_cast<uint32_t>(s);
    step.overlap = 1;
    for (int i = 0; i < handoffs; ++i) {
      HandoffJob job;
      job.job = jobs[i];
      job.ready = memory.ready(i);
      job.done = memory.done(i);
      job.header = memory.header(i);
      job.layer = i;
      step.jobs.push_back(job);
    }
    service->submit(step);
    for (int i = 0; i < handoffs; ++i) {
      __atomic_store_n(memory.header(i), static_cast<uint32_t>(s), __ATOMIC_RELAXED);
      int64_t begin = now_ns();
      device_write(memory.ready(i), 1);
      if (!device_wait(memory.done(i), 1, 10'000'000'000)) throw std::runtime_error("no answer within 10 s");
      times->push_back(now_ns() - begin);
      device_write(memory.done(i), 0);
    }
    if (service->outcome(step.epoch) == StepOutcome::kPoisoned) throw std::runtime_error("the service is poisoned");
  }
  if (!service->wait_epoch(first_epoch + steps - 1, 10'000'000'000)) throw std::runtime_error("steps not complete");
}

}  // namespace

Job spinning_job(int items, int64_t ns) {
  Job job;
  job.items = items;
  job.context = reinterpret_cast<void*>(static_cast<uintptr_t>(ns));
  job.run = [](void* context, int, int, NextItem*) {
    const int64_t wanted = static_cast<int64_t>(reinterpret_cast<uintptr_t>(context));
    if (wanted == 0) return;
    const int64_t begin = now_ns();
    while (now_ns() - begin < wanted) {
    }
  };
  return job;
}

std::vector<int64_t> measure_round_trips(HandoffService* service, uint64_t first_epoch, int steps,
                                         const std::vector<Job>& jobs) {
  HandoffMemory memory(static_cast<int>(jobs.size()), 0, 0);
  std::vector<int64_t> times;
  try {
    fill_round_trips(service, memory, first_epoch, steps, jobs, &times);
  } catch (...) {
    service->close(0);  // it may name the flags of `memory` until then
    throw;
  }
  return times;
}

}  // namespace cpu_kernels
