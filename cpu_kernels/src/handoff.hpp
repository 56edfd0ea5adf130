// The hand-off service: layer by layer, takes over from a device what it left in pinned memory, has a worker pool work
// on it, and tells the device when that is done. It knows nothing of attention: a step is a list of jobs with flags.
//
// The protocol, per layer and step (one *hand-off*), on two 32-bit flags that are only ever 0 or 1, because a captured
// graph writes and waits for constants:
//
//   device, sync and pipelined:  write outbox and header; ready=1;  ...  wait done=1; done=0; read inbox
//   device, deferred:            wait done=1; done=0; read inbox (of one deferred step ago); write outbox; ready=1
//   workers:                     see ready=1 (acquire); ready=0; check header; run the job; done=1 (release)
//
// The header holds the step's number, from a counter that the device bumps once per step; the service stops when it is
// not the number in the descriptor. In deferred order the flags of the first deferred step have to be raised
// (done=1) by whoever starts the mode.
//
// Use: submit the descriptor of a step, then launch the step on the device; if submit refuses, do not launch. After
// that no call is needed: workers look at the flags themselves and never sleep while a submitted step is incomplete.
// Hand-offs are taken in the order of the descriptor, and steps in the order of their submission.
//
// When something goes wrong (a wait longer than the timeout on either side, a wrong step number, a job that fails) the
// service *poisons* every step that is not complete: jobs not begun are dropped, and from then on every hand-off of
// these steps is answered at once, and all their done flags are kept raised if the device seems stuck even so, so that
// it runs through. What such a step computed must not be published. The service refuses steps until reset().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker_pool.hpp"

namespace cpu_kernels {

struct HandoffJob {
  Job job;  // may have no items: the hand-off is then answered at once
  uint32_t* ready = nullptr;
  uint32_t* done = nullptr;
  const uint32_t* header = nullptr;  // null: the step's number is not checked
  int layer = 0;                     // for reports only
  int lane = 0;
};

// Copied by submit and never changed. Memory that jobs and flags point to must stay until completed_epoch() has reached
// the epoch; flags, headers and boxes also until the device is past the step, and after a poisoned step until reset().
struct StepDescriptor {
  uint64_t epoch = 0;   // greater than the one before; names the resources of the step
  uint32_t number = 0;  // what the device writes into the outbox headers
  // How many hand-offs of this step may be in the workers' hands at once: hand-off i begins only when i - overlap has
  // ended, so jobs i and i + overlap may share a workspace. 1: one after the other.
  int overlap = 2;
  // Deferred order: the device takes this step's answers in its next deferred step, before it gives the same hand-offs
  // there. Only for counting what it may have waited for.
  bool deferred = false;
  std::vector<HandoffJob> jobs;
};

enum class PoisonReason { kNone, kTimeoutDevice, kTimeoutWorkers, kStepMismatch, kBadFlag, kJobFailed, kClosed };

struct PoisonReport {
  PoisonReason reason = PoisonReason::kNone;
  uint64_t epoch = 0;
  uint32_t number = 0;
  int index = -1;  // of the hand-off in the step
  int layer = -1;
  int lane = -1;
  std::string message;
};

enum class StepOutcome { kUnknown, kPending, kComplete, kPoisoned };

struct HandoffStatus {
  bool closed = false;
  bool poisoned = false;
  PoisonReport report;  // of the first fault since the last reset
  uint64_t submitted_epoch = 0;
  uint64_t completed_epoch = 0;
  int steps = 0;      // submitted and not complete
  int in_flight = 0;  // hand-offs taken and not answered
  int lag = 0;
  bool device_through = true;  // poisoned: the device is known to have raised the last ready flag of the last step
  // Counters since the service began.
  int64_t submitted_steps = 0;
  int64_t complete_steps = 0;
  int64_t poisoned_steps = 0;
  int64_t handoffs = 0;   // answered by a job that succeeded
  int64_t answer_ns = 0;  // from ready seen to done written, summed over these, and the longest
  int64_t max_answer_ns = 0;
  // Of that, what passed between the first worker's running out of work and the last one's being done, and how often it
  // was more than half: a worker was held up, by another process as a rule. Workers may have gone on to other
  // hand-offs.
  int64_t tail_ns = 0;
  int64_t held_up = 0;
  int64_t device_wait_ns = 0;  // workers had nothing in hand and the next flag was not raised, while steps ran
  int64_t step_wait_ns = 0;    // of that, for the first hand-off of a step
  // Deferred order: answers that came when the device had given the hand-off before the one in which it takes them. So
  // it was at that layer, and waited for the answer or was about to; since when is known as well as a worker without
  // other work has looked. So both are the most that it can have waited.
  int64_t awaited = 0;
  int64_t awaited_ns = 0;
};

// One hand-off, kept while a trace is taken.
struct HandoffSpan {
  uint64_t epoch = 0;
  uint64_t sequence = 0;  // number of its job in the pool, see WorkerSpan
  int layer = 0;
  int lane = 0;
  int64_t seen_ns = 0;  // ready, of the monotonic clock
  int64_t done_ns = 0;
};

class HandoffService {
 public:
  // `pool` must outlive the service and can have one service at a time (std::runtime_error). timeout_ns bounds every
  // wait: it must be longer than anything the device may do between a submit and the first hand-off.
  HandoffService(WorkerPool* pool, int64_t timeout_ns);
  ~HandoffService();
  HandoffService(const HandoffService&) = delete;
  HandoffService& operator=(const HandoffService&) = delete;

  // Throws std::invalid_argument for a malformed descriptor, std::runtime_error if the service is poisoned, closed, or
  // in a forked child, or the pool cannot work.
  void submit(StepDescriptor step);

  // Hand-offs that the device has given and the workers have not answered.
  int lag();
  // Every step up to this epoch is over, completed or poisoned: no worker reads or writes what it names any more.
  uint64_t completed_epoch();
  // Whether that epoch was reached in time.
  bool wait_epoch(uint64_t epoch, int64_t timeout_ns);
  // Ask this before publishing anything of a step.
  StepOutcome outcome(uint64_t epoch);
  HandoffStatus status();

  // Keeps the hand-offs that are answered from now on, up to so many. A trace that was not stopped is dropped.
  void start_trace(int64_t handoffs);
  std::vector<HandoffSpan> stop_trace();

  // After a fault, once the device is idle: lowers the flags of the poisoned steps and takes steps again. False: a job
  // is still running after `timeout_ns`. Does nothing on a healthy service.
  bool reset(int64_t timeout_ns);

  // At any moment. Steps that are not complete are poisoned and the device is let through for up to `grace_ns`, or
  // until it has raised its last flag. False: a job is still running; it keeps what it needs, the service is closed.
  bool close(int64_t grace_ns);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace cpu_kernels
