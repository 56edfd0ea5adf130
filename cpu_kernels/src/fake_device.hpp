// The device's side of the hand-off protocol on plain memory: what tests and machines without a GPU use in its place.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "handoff.hpp"

namespace cpu_kernels {

// Flags, headers, outboxes and inboxes of `handoffs` hand-offs; every flag and header has a cache line of its own,
// every box starts on one. All zero at first.
class HandoffMemory {
 public:
  HandoffMemory(int handoffs, int64_t outbox_bytes, int64_t inbox_bytes);
  int handoffs() const { return handoffs_; }
  int64_t outbox_bytes() const { return outbox_bytes_; }
  int64_t inbox_bytes() const { return inbox_bytes_; }
  uint32_t* ready(int i) const { return reinterpret_cast<uint32_t*>(block(i)); }
  uint32_t* done(int i) const { return reinterpret_cast<uint32_t*>(block(i) + 64); }
  uint32_t* header(int i) const { return reinterpret_cast<uint32_t*>(block(i) + 128); }
  char* outbox(int i) const { return block(i) + 192; }
  char* inbox(int i) const { return block(i) + 192 + outbox_padded_; }

 private:
  char* block(int i) const { return base_ + static_cast<int64_t>(i) * stride_; }
  int handoffs_;
  int64_t outbox_bytes_, inbox_bytes_, outbox_padded_, stride_;
  std::unique_ptr<char[]> memory_;
  char* base_;
};

// A stream's write-value and wait-value. The wait ends with false after `timeout_ns` or when *stop becomes true.
void device_write(uint32_t* flag, uint32_t value);
bool device_wait(const uint32_t* flag, uint32_t value, int64_t timeout_ns, const std::atomic<bool>* stop = nullptr);

enum class DeviceOrder { kSync, kPipelined, kDeferred };

enum class FakeFault {
  kNone,       // nothing goes wrong, but the device leaves the boxes alone from that step on (see below)
  kNoReady,    // the device does not raise that ready flag
  kWrongStep,  // the header is one too high
  kBadFlag,    // the ready flag is raised to 7
  kThrow,      // the job throws
  kExit,       // the job ends its thread
  kStuck,      // the job does not return until released
};

struct FakeDeviceOptions {
  DeviceOrder order = DeviceOrder::kSync;
  int layers = 2;
  int words = 64;  // of 4 bytes, in each box
  int items = 4;   // of each job
  uint64_t seed = 1;
  int64_t max_delay_ns = 0;  // random pauses of the device and of the jobs
};

// A thread that goes through steps as a GPU stream does, and jobs for the workers that turn an outbox into an inbox by
// a function that the device checks: a box read too early, too late or from the wrong step is noticed. Hand-off i
// belongs to layer i / lanes and lane i % lanes; there are two lanes in pipelined order, else one.
class FakeDevice {
 public:
  explicit FakeDevice(const FakeDeviceOptions& options);
  ~FakeDevice();  // stops in the middle of a step if need be
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  const HandoffMemory& memory() const { return memory_; }
  int handoffs() const { return memory_.handoffs(); }
  std::vector<HandoffJob> jobs();

  // Puts one more step on the stream; its number is one more than that of the one before, beginning with 1.
  void launch();
  // Whether all launched steps are over.
  bool synchronize(int64_t timeout_ns);
  // One fault at a time. From its step on until restart() the boxes are neither written nor checked: a poisoned step's
  // boxes are nobody's, and reading them while a worker still writes would be a race by design.
  void fault(FakeFault kind, uint32_t step, int handoff);
  void release_stuck();
  // After the service was reset: flags as at the beginning, no fault.
  void restart();

  uint32_t steps() const { return finished_.load(std::memory_order_acquire); }
  int64_t checked() const { return checked_.load(std::memory_order_acquire); }
  int64_t wrong() const { return wrong_.load(std::memory_order_acquire); }

 private:
  struct Echo {
    FakeDevice* device;
    int handoff;
  };
  static void run_echo(void* context, int item, int worker, NextItem* next);
  static void cost_echo(void* context, int item, ItemCost* out);
  void main();
  void step(uint32_t number);
  void give(uint32_t number, int handoff);
  bool take(uint32_t number, int handoff);
  void pause(uint64_t number, uint64_t a, uint64_t b) const;
  bool touches(uint32_t number) const { return number < fault_step_.load(std::memory_order_acquire); }
  bool fault_here(FakeFault kind, uint32_t number, int handoff) const;
  void first_flags();

  const FakeDeviceOptions options_;
  const int lanes_;
  const unsigned born_ = fork_generation();
  HandoffMemory memory_;
  std::vector<Echo> echoes_;
  std::vector<uint32_t> sent_;  // number of the step whose outbox was written last, or 0; the device thread's
  std::atomic<FakeFault> fault_kind_{FakeFault::kNone};
  std::atomic<uint32_t> fault_step_{UINT32_MAX};
  std::atomic<int> fault_handoff_{-1};
  std::atomic<bool> released_{false};
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> launched_{0}, finished_{0};
  std::atomic<int64_t> checked_{0}, wrong_{0};
  std::mutex mutex_;
  std::condition_variable cv_;
  std::thread thread_;
};

// A job each of whose items keeps its worker busy for so long.
Job spinning_job(int items, int64_t ns);

// Times, in nanoseconds, from raising ready to seeing done=1, with this thread as the device. Submits steps with one
// hand-off per job (a job without items is answered by the thread that sees the flag) and overlap 1; on an error the
// service is closed and std::runtime_error thrown.
std::vector<int64_t> measure_round_trips(HandoffService* service, uint64_t first_epoch, int steps,
                                         const std::vector<Job>& jobs);

}  // namespace cpu_kernels
