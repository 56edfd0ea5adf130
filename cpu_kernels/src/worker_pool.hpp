// A pool of persistent threads, pinned to cores, that run the items of jobs.
//
// It knows nothing of attention. A job is a number of items and a function; workers take items by an atomic counter and
// go on to the next job as soon as no item is left, without waiting for each other. There is no barrier: whoever
// finishes the last item of a job calls its completion, while the others may be at work on the jobs behind it.
//
// Threads spin while there is work or an attached source says that work may come at any moment, and for a short time
// after; then they sleep until a submit wakes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "next_item.hpp"

namespace cpu_kernels {

// What one item read and handled; added to the counters of the worker that ran it.
struct ItemCost {
  int64_t bytes = 0;
  int64_t tokens = 0;
};

enum class JobResult { kDone, kFailed, kCancelled };

// `next` may be asked, and need not.
using RunItem = void (*)(void* context, int item, int worker, NextItem* next);
using CostItem = void (*)(void* context, int item, ItemCost* out);

// `run(context, item, worker, next)` is called once for every item in [0, items), in any order and at the same time on
// several threads. `worker` is in [0, WorkerPool::worker_slots()) and no two calls that run at the same time have the
// same one, so it can index scratch memory. It should not throw; if it does, or ends its thread, the job is reported as
// failed.
struct Job {
  int items = 0;
  // How many values of `worker` run() knows, 0 for any: a pool with more threads refuses the job, and a caller of run()
  // whose number would be too high does not take part.
  int workers = 0;
  RunItem run = nullptr;
  void* context = nullptr;
  // Optional: what the item cost, asked after it ran.
  CostItem cost = nullptr;
  // Optional: begin() is called by the submitting thread before any item can run, and may throw, which refuses the job.
  // end() is called by the thread that ends the job, when no item runs any more and before anybody is told. What is
  // between the two has the context to itself.
  void (*begin)(void* context) = nullptr;
  void (*end)(void* context, JobResult result) = nullptr;
  // run() uses non-temporal stores: every worker then issues a store fence before its items count as finished, because
  // such stores are not ordered by the release that announces the end of the job.
  bool streaming_stores = false;
};

// Called once, by the thread that finished the last item, with the message of the first failure (or ""), and the moment
// from which on a worker that had run items of the job found none left (0: none did). Must not throw, block or call
// back into the pool.
using JobFinished = void (*)(void* context, JobResult result, const char* message, int64_t idle_since_ns);

// One worker's account since the pool began. busy_ns + wait_ns is the age of the worker at the time of reading. Items,
// bytes and tokens of a job are all counted before the job is announced as finished.
struct WorkerCounters {
  int core = -1;  // -1: not pinned
  int64_t age_ns = 0;
  int64_t busy_ns = 0;
  int64_t wait_ns = 0;
  int64_t sleeps = 0;
  int64_t items = 0;
  int64_t bytes = 0;
  int64_t tokens = 0;
};

// What one worker did for one job, kept while a trace is taken.
struct WorkerSpan {
  int worker = 0;
  int items = 0;
  uint64_t sequence = 0;  // the job's number
  int64_t begin_ns = 0;   // of the monotonic clock
  int64_t end_ns = 0;
};

// A source of jobs that no submit announces, such as flags that a device raises: idle workers ask it, one at a time.
// poll() returns true if it may have submitted a job. It must not block.
struct Poller {
  bool (*poll)(void* context) = nullptr;
  void* context = nullptr;
};

struct PoolOptions {
  int threads = 1;
  std::vector<int> cores;     // one per thread, or empty: not pinned
  int64_t spin_ns = 200'000;  // how long an idle worker spins before it sleeps
};

class WorkerPool {
 public:
  static constexpr int kMaxThreads = 1024;
  static constexpr int kRing = 64;  // jobs submitted and not finished

  // Throws std::invalid_argument for bad options, std::runtime_error if a thread cannot be made or pinned.
  explicit WorkerPool(const PoolOptions& options);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int threads() const;
  // Values that `worker` can take: one per thread, and one for a caller of run() that takes part.
  int worker_slots() const { return threads() + 1; }

  // Runs a job and returns when all of it is finished. With `participate` the calling thread runs items too (if another
  // caller is not doing so already); a job of one item then wakes nobody. *message gets the text of the first failure.
  // Throws what submit throws, and std::runtime_error if the caller is itself inside a job.
  JobResult run(const Job& job, bool participate, std::string* message = nullptr);

  // Submits a job of at least one item and returns at once. False: kRing jobs are unfinished, try again. The job's
  // number, for cancel(), is stored in *sequence before any worker can see the job. Throws std::invalid_argument for a
  // malformed job or one for fewer workers, std::runtime_error after close(), in a child process that was forked from
  // the owner, and after a worker ended inside a job; and whatever the job's begin() throws.
  bool submit(const Job& job, JobFinished finished, void* finished_context, uint64_t* sequence);

  // Takes back the items of a job that no worker has begun. If that leaves none unfinished, the completion is called
  // from here, else by the worker that is last. Harmless for a finished job.
  void cancel(uint64_t sequence);

  // One poller at a time: false if there is one. detach() returns when no worker is inside poll() any more.
  bool attach(const Poller& poller);
  void detach();
  // While true, no worker sleeps and idle ones poll. Becoming true wakes all of them.
  void keep_polling(bool on);

  WorkerCounters counters(int worker) const;
  int sleeping() const;

  // Keeps what the workers do from now on, up to so many spans of each. A trace that was not stopped is dropped.
  void start_trace(int64_t spans_per_worker);
  // The spans since then, worker by worker, each in order of time.
  std::vector<WorkerSpan> stop_trace();

  // Why jobs are refused, or "" if they are not.
  std::string refusal() const;

  // Lets the jobs that run finish, cancels the rest and ends the threads. False: a worker did not come back within
  // `timeout_ns`; it is abandoned (its memory stays) rather than waited for. In a forked child: lets go of everything
  // without touching a thread or lock, true. Throws std::runtime_error while a poller is attached.
  bool close(int64_t timeout_ns);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

// Nanoseconds of the monotonic clock.
int64_t now_ns();
// A pause between two looks at a flag; every so often gives the core to whoever else wants it, because a machine with
// fewer free cores than spinning threads would otherwise stand still for a scheduler tick at a time.
void relax(int* spins);
// Counts the forks that lie between this process and the one that loaded the library. Objects with threads remember it.
unsigned fork_generation();
// Keeps an object for the rest of the process: one that a thread which nobody can stop may still use, or whose threads
// and locks are those of the parent process.
void abandon(std::shared_ptr<void> object);

}  // namespace cpu_kernels
