#include "worker_pool.hpp"

#include <cxxabi.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpu_kernels {
namespace {

constexpr int kMessage = 256;

std::atomic<unsigned> g_forks{0};

struct ForkCounter {
  ForkCounter() {
    pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1, std::memory_order_relaxed); });
  }
} g_fork_counter;

// Orders this thread's non-temporal stores before whatever it releases next.
void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  asm volatile("dmb ish" ::: "memory");
#endif
}

void copy_message(char* out, const char* text) { std::snprintf(out, kMessage, "%s", text ? text : ""); }

// A ticket holds the low half of the job's number and, above kNone, how many of its items nobody has taken. Taking one
// is a single subtraction, which cannot fail and be repeated as a compare-and-swap can when all workers want an item at
// the same moment; so the count also goes below kNone, by one for every worker that came too late.
constexpr uint32_t kNone = uint32_t{1} << 31;
uint64_t make_ticket(uint64_t sequence, int left) { return (sequence << 32) | (kNone + static_cast<uint32_t>(left)); }
int left_of(uint64_t ticket) { return static_cast<int>(static_cast<int64_t>(ticket & 0xffffffffu) - kNone); }

// Written by one thread, read by any: a sequence lock whose fields are atomics, so that no reader sees half an update.
struct alignas(64) Account {
  std::atomic<uint32_t> version{0};
  std::atomic<int64_t> started{0}, since{0}, busy{0}, wait{0}, sleeps{0}, items{0}, bytes{0}, tokens{0};
  std::atomic<int> running{0};

  template <typename Update>
  void write(Update update) {
    uint32_t v = version.load(std::memory_order_relaxed);
    version.store(v + 1, std::memory_order_relaxed);
    update();
    version.store(v + 2, std::memory_order_release);
  }
  // A release store keeps the odd version before it; only the owner adds, so no read-modify-write is needed.
  static void set(std::atomic<int64_t>* field, int64_t value) { field->store(value, std::memory_order_release); }
  static void add(std::atomic<int64_t>* field, int64_t value) {
    field->store(field->load(std::memory_order_relaxed) + value, std::memory_order_release);
  }

  void begin(int64_t now) {
    write([&] {
      set(&started, now);
      set(&since, now);
    });
  }
  // Of a thread that is not the pool's: the time between its visits is nobody's waiting.
  void visit(int64_t now) {
    write([&] {
      if (started.load(std::memory_order_relaxed) == 0) set(&started, now);
      set(&since, now);
    });
  }
  void item_begins(int64_t now) {
    write([&] {
      add(&wait, now - since.load(std::memory_order_relaxed));
      set(&since, now);
      running.store(1, std::memory_order_release);
    });
  }
  void item_ends(int64_t now, const ItemCost& cost) {
    write([&] {
      add(&busy, now - since.load(std::memory_order_relaxed));
      set(&since, now);
      running.store(0, std::memory_order_release);
      add(&items, 1);
      add(&bytes, cost.bytes);
      add(&tokens, cost.tokens);
    });
  }
  void sleeps_once() {
    write([&] { add(&sleeps, 1); });
  }

  WorkerCounters read(bool is_caller) const {
    WorkerCounters c;
    for (int spins = 0;; relax(&spins)) {
      uint32_t before = version.load(std::memory_order_acquire);
      if (before & 1) continue;
      int64_t begun = started.load(std::memory_order_acquire);
      int64_t last = since.load(std::memory_order_acquire);
      bool active = running.load(std::memory_order_acquire) != 0;
      c.busy_ns = busy.load(std::memory_order_acquire);
      c.wait_ns = wait.load(std::memory_order_acquire);
      c.sleeps = sleeps.load(std::memory_order_acquire);
      c.items = items.load(std::memory_order_acquire);
      c.bytes = bytes.load(std::memory_order_acquire);
      c.tokens = tokens.load(std::memory_order_acquire);
      if (version.load(std::memory_order_relaxed) != before) continue;
      if (begun == 0) return c;
      int64_t open = std::max<int64_t>(0, now_ns() - last);
      if (active) {
        c.busy_ns += open;
      } else if (!is_caller) {
        c.wait_ns += open;
      }
      c.age_ns = c.busy_ns + c.wait_ns;
      return c;
    }
  }
};

struct alignas(64) Slot {
  std::atomic<uint64_t> ticket{make_ticket(0, 0)};
  alignas(64) std::atomic<int> unfinished{0};
  std::atomic<int> failed{0};  // 1: `message` is being or was written
  std::atomic<int> cancelled{0};
  std::atomic<int64_t> idle_since_ns{0};  // see JobFinished
  std::atomic<uint64_t> free_for{0};      // number of the next job that may use the slot
  // Written by submit while the slot is free, read by those who hold an unfinished item.
  Job job;
  JobFinished finished = nullptr;
  void* finished_context = nullptr;
  char message[kMessage] = "";

  void fail(const char* text) {
    if (failed.exchange(1, std::memory_order_acq_rel) == 0) copy_message(message, text);
  }
};

// Only its worker writes, and only while a trace is taken, so the lock is all but free.
struct alignas(64) TraceLane {
  std::mutex mutex;
  size_t room = 0;
  std::vector<WorkerSpan> spans;
};

thread_local const void* t_inside = nullptr;  // the pool whose item this thread is running

// Why a job cannot run on so many threads, or "".
std::string misfit(const Job& job, int threads) {
  if (job.workers > 0 && job.workers < threads)
    return "the job is made for " + std::to_string(job.workers) + " workers, the pool has " + std::to_string(threads);
  return "";
}

}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

unsigned fork_generation() { return g_forks.load(std::memory_order_relaxed); }

void abandon(std::shared_ptr<void> object) {
  // Not destroyed at exit either. A list without a lock: in a forked child a lock might be held for ever.
  struct Node {
    std::shared_ptr<void> object;
    Node* next;
  };
  static std::atomic<Node*> list{nullptr};
  Node* node = new Node{std::move(object), list.load()};
  while (!list.compare_exchange_weak(node->next, node)) continue;
}

void relax(int* spins) {
  if ((++*spins & 63) == 0) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

struct WorkerPool::State {
  explicit State(const PoolOptions& o) : options(o), slots(kRing), accounts(o.threads + 1), trace(o.threads + 1) {
    for (int i = 0; i < kRing; ++i) slots[i].free_for.store(i, std::memory_order_relaxed);
  }

  PoolOptions options;
  const unsigned born = fork_generation();
  std::vector<Slot> slots;
  std::vector<Account> accounts;  // the last one is the participating caller's
  std::vector<pthread_t> threads;
  std::vector<TraceLane> trace;  // likewise
  std::atomic<bool> tracing{false};

  alignas(64) std::atomic<uint64_t> published{0};  // jobs submitted so far
  alignas(64) std::atomic<bool> polling{false};
  std::atomic<bool> stopping{false};
  std::atomic<int> dead_worker{-1};

  // Only the thread that holds the role asks the poller, so the others wait on lines that nobody writes.
  alignas(64) std::atomic<int> poll_role{0};
  Poller poller;  // guarded by the role
  std::atomic<bool> attached{false};

  alignas(64) std::atomic<uint64_t> wake_count{0};
  std::atomic<int> sleepers{0};
  std::mutex sleep_mutex;
  std::condition_variable sleep_cv;

  std::mutex submit_mutex;
  std::mutex caller_mutex;  // held by the caller that takes part

  std::atomic<int> waiters{0};
  std::mutex wait_mutex;
  std::condition_variable wait_cv;

  std::mutex exit_mutex;
  std::condition_variable exit_cv;
  int alive = 0;

  bool forked() const { return fork_generation() != born; }

  std::string refusal() const {
    if (forked()) {
      return "this process was forked after the worker pool was made and has none of its threads; make a new pool here";
    }
    if (stopping.load(std::memory_order_acquire)) return "the worker pool is closed";
    int dead = dead_worker.load(std::memory_order_acquire);
    if (dead >= 0) return "worker " + std::to_string(dead) + " ended inside a job; close this pool and make a new one";
    return "";
  }

  // ---- jobs

  // `helpers`: how many sleeping workers are worth waking.
  bool submit(const Job& job, JobFinished finished, void* finished_context, uint64_t* sequence, int helpers) {
    if (std::string why = misfit(job, options.threads); !why.empty()) throw std::invalid_argument(why);
    {
      std::lock_guard<std::mutex> lock(submit_mutex);
      std::string why = refusal();
      if (!why.empty()) throw std::runtime_error(why);
      uint64_t next = published.load(std::memory_order_relaxed);
      Slot& slot = slots[next % kRing];
      if (slot.free_for.load(std::memory_order_acquire) != next) return false;
      if (job.begin) job.begin(job.context);
      slot.job = job;
      slot.finished = finished;
      slot.finished_context = finished_context;
      slot.message[0] = 0;
      slot.failed.store(0, std::memory_order_relaxed);
      slot.cancelled.store(0, std::memory_order_relaxed);
      slot.idle_since_ns.store(0, std::memory_order_relaxed);
      slot.unfinished.store(job.items, std::memory_order_relaxed);
      *sequence = next;
      slot.ticket.store(make_ticket(next, job.items), std::memory_order_release);
      published.store(next + 1, std::memory_order_seq_cst);
    }
    if (helpers > 0) wake(helpers);
    return true;
  }

  // Takes an item of job *sequence and returns its index; -1: none is left. A worker that was asleep may find a newer
  // job in the slot: it then has an item of that one, and *sequence says so. Whoever holds an unfinished item of a job
  // knows that its slot stays.
  int take(uint64_t* sequence) {
    Slot& slot = slots[*sequence % kRing];
    // Acquire: pairs with the release in submit, so the job's fields are visible to whoever holds an item.
    const uint64_t seen = slot.ticket.fetch_sub(1, std::memory_order_acq_rel);
    const int left = left_of(seen);
    if (left <= 0) return -1;
    *sequence += static_cast<uint64_t>(static_cast<int64_t>(
        static_cast<int32_t>(static_cast<uint32_t>(seen >> 32) - static_cast<uint32_t>(*sequence))));
    return slot.job.items - left;
  }

  void finish(uint64_t sequence, int count) {
    Slot& slot = slots[sequence % kRing];
    if (slot.unfinished.fetch_sub(count, std::memory_order_acq_rel) != count) return;
    JobResult result = slot.failed.load(std::memory_order_relaxed)      ? JobResult::kFailed
                       : slot.cancelled.load(std::memory_order_relaxed) ? JobResult::kCancelled
                                                                        : JobResult::kDone;
    if (slot.job.end) slot.job.end(slot.job.context, result);
    slot.finished(slot.finished_context, result, slot.message, slot.idle_since_ns.load(std::memory_order_relaxed));
    slot.free_for.store(sequence + kRing, std::memory_order_release);
  }

  void cancel(uint64_t sequence) {
    Slot& slot = slots[sequence % kRing];
    uint64_t seen = slot.ticket.load(std::memory_order_acquire);
    do {
      if (static_cast<uint32_t>(seen >> 32) != static_cast<uint32_t>(sequence) || left_of(seen) <= 0) return;
    } while (!slot.ticket.compare_exchange_weak(seen, make_ticket(sequence, 0), std::memory_order_acq_rel,
                                                std::memory_order_acquire));
    slot.cancelled.store(1, std::memory_order_relaxed);
    finish(sequence, left_of(seen));
  }

  void cancel_all() {
    uint64_t end = published.load(std::memory_order_acquire);
    for (uint64_t s = end > kRing ? end - kRing : 0; s < end; ++s) cancel(s);
  }

  // Items of one job that a worker has taken. They count as finished when it is destroyed, whatever way run() was left:
  // by return, by an exception, or because the thread ends.
  struct Hold {
    State* state;
    uint64_t sequence;
    int worker;
    int count = 0;
    bool inside = false;
    ItemCost cost = {};
    ~Hold() {
      if (inside) {
        char text[kMessage];
        std::snprintf(text, sizeof text, "worker %d ended inside the job", worker);
        state->slots[sequence % kRing].fail(text);
        {
          std::lock_guard<std::mutex> lock(state->submit_mutex);
          state->dead_worker.store(worker, std::memory_order_release);
        }
        // Nobody may be left to take them.
        state->cancel_all();
        t_inside = nullptr;
        state->accounts[worker].item_ends(now_ns(), cost);
      }
      state->finish(sequence, count);
    }
  };

  // Of the job that `context`, a Hold, is about.
  static int take_next(void* context) {
    Hold& hold = *static_cast<Hold*>(context);
    const int item = hold.state->take(&hold.sequence);
    hold.count += item >= 0;
    return item;
  }

  // Runs items of job `sequence` until none is left; whether there was one.
  bool run_items(uint64_t sequence, int worker) {
    int item = take(&sequence);
    if (item < 0) return false;
    Hold hold{this, sequence, worker, 1};
    Slot& slot = slots[sequence % kRing];
    const Job& job = slot.job;
    Account& account = accounts[worker];
    const int64_t begin = now_ns();
    int64_t now = begin;
    while (item >= 0) {
      NextItem next(take_next, &hold);
      account.item_begins(now);
      hold.cost = {};
      hold.inside = true;
      t_inside = this;
      try {
        // After a failure the rest of the job is skipped: nothing of it will be used.
        if (!slot.failed.load(std::memory_order_relaxed)) {
          job.run(job.context, item, worker, &next);
          if (job.cost) job.cost(job.context, item, &hold.cost);
        }
      } catch (const std::exception& error) {
        slot.fail(error.what());
      } catch (...) {
        // Without a C++ type it is the unwinding of a thread that is being ended, which may not be stopped.
        if (!abi::__cxa_current_exception_type()) throw;
        slot.fail("an exception that is not a std::exception");
      }
      t_inside = nullptr;
      hold.inside = false;
      account.item_ends(now = now_ns(), hold.cost);
      item = next.get();
    }
    int64_t nobody = 0;
    if (slot.idle_since_ns.load(std::memory_order_relaxed) == 0)
      slot.idle_since_ns.compare_exchange_strong(nobody, now, std::memory_order_relaxed);
    if (job.streaming_stores) store_fence();
    if (tracing.load(std::memory_order_relaxed)) note({worker, hold.count, sequence, begin, now});
    return true;
  }

  void note(const WorkerSpan& span) {
    TraceLane& lane = trace[span.worker];
    std::lock_guard<std::mutex> lock(lane.mutex);
    if (lane.spans.size() < lane.room) lane.spans.push_back(span);
  }

  // ---- sleeping and waking

  void wake(int wanted) {
    wake_count.fetch_add(1, std::memory_order_seq_cst);
    int asleep = sleepers.load(std::memory_order_seq_cst);
    if (asleep == 0) return;
    {
      std::lock_guard<std::mutex> lock(sleep_mutex);
    }  // whoever counted itself asleep now waits or has seen the count
    if (wanted >= asleep) {
      sleep_cv.notify_all();
    } else {
      for (int i = 0; i < wanted; ++i) sleep_cv.notify_one();
    }
  }

  void wake_waiters() {
    if (waiters.load(std::memory_order_seq_cst) == 0) return;
    {
      std::lock_guard<std::mutex> lock(wait_mutex);
    }
    wait_cv.notify_all();
  }

  bool try_role() {
    int free = 0;
    return poll_role.load(std::memory_order_relaxed) == 0 &&
           poll_role.compare_exchange_strong(free, 1, std::memory_order_acquire, std::memory_order_relaxed);
  }
  void release_role() { poll_role.store(0, std::memory_order_release); }

  void work(int worker) {
    Account& account = accounts[worker];
    account.begin(now_ns());
    uint64_t cursor = 0;  // jobs before it have no items left
    int spins = 0;
    int64_t idle_since = now_ns();
    for (;;) {
      uint64_t end = published.load(std::memory_order_acquire);
      if (end - cursor > kRing) cursor = end - kRing;
      bool any = false;
      for (; cursor < end; ++cursor) any |= run_items(cursor, worker);
      if (dead_worker.load(std::memory_order_relaxed) == worker) return;
      if (any) {
        idle_since = now_ns();
        continue;
      }
      if (stopping.load(std::memory_order_acquire)) return;
      if (polling.load(std::memory_order_acquire)) {
        if (try_role()) {
          while (published.load(std::memory_order_acquire) == cursor && polling.load(std::memory_order_acquire) &&
                 !stopping.load(std::memory_order_acquire) && poller.poll && !poller.poll(poller.context)) {
            relax(&spins);
          }
          release_role();
        }
        relax(&spins);
        idle_since = 0;  // looked up again once polling ends
        continue;
      }
      if (idle_since == 0) idle_since = now_ns();
      relax(&spins);
      if ((spins & 63) != 0 || now_ns() - idle_since < options.spin_ns) continue;
      sleep(cursor, &account);
      idle_since = now_ns();
    }
  }

  void sleep(uint64_t cursor, Account* account) {
    // Every change that gives work is made first and counted second; so if the count is still the same under the lock,
    // what was looked at in between is still true.
    uint64_t before = wake_count.load(std::memory_order_seq_cst);
    if (published.load(std::memory_order_seq_cst) != cursor || polling.load(std::memory_order_seq_cst) ||
        stopping.load(std::memory_order_seq_cst)) {
      return;
    }
    std::unique_lock<std::mutex> lock(sleep_mutex);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (wake_count.load(std::memory_order_seq_cst) == before) {
      account->sleeps_once();
      while (wake_count.load(std::memory_order_seq_cst) == before) sleep_cv.wait(lock);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

namespace {

struct ThreadStart {
  std::shared_ptr<WorkerPool::State> state;
  int worker;
};

struct Alive {
  std::shared_ptr<WorkerPool::State> state;
  ~Alive() {
    {
      std::lock_guard<std::mutex> lock(state->exit_mutex);
      --state->alive;
    }
    state->exit_cv.notify_all();
  }
};

void* thread_main(void* argument) {
  std::unique_ptr<ThreadStart> start(static_cast<ThreadStart*>(argument));
  Alive alive{start->state};
  alive.state->work(start->worker);
  return nullptr;
}

struct Waiting {
  std::atomic<int> done{0};
  JobResult result = JobResult::kDone;
  char message[kMessage] = "";
  WorkerPool::State* state = nullptr;
};

void wake_waiting(void* context, JobResult result, const char* message, int64_t) {
  Waiting* waiting = static_cast<Waiting*>(context);
  WorkerPool::State* state = waiting->state;
  waiting->result = result;
  copy_message(waiting->message, message);
  // The waiter may return and its frame be gone from here on.
  waiting->done.store(1, std::memory_order_seq_cst);
  state->wake_waiters();
}

int start_thread(WorkerPool::State* state, const std::shared_ptr<WorkerPool::State>& shared, int worker) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  int error = 0;
  if (!state->options.cores.empty()) {
    int core = state->options.cores[worker];
    cpu_set_t* set = CPU_ALLOC(core + 1);
    size_t size = CPU_ALLOC_SIZE(core + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(core, size, set);
    error = pthread_attr_setaffinity_np(&attributes, size, set);
    CPU_FREE(set);
  }
  pthread_t thread;
  if (error == 0) {
    ThreadStart* start = new ThreadStart{shared, worker};
    {
      std::lock_guard<std::mutex> lock(state->exit_mutex);
      ++state->alive;
    }
    error = pthread_create(&thread, &attributes, thread_main, start);
    if (error != 0) {
      delete start;
      std::lock_guard<std::mutex> lock(state->exit_mutex);
      --state->alive;
    }
  }
  pthread_attr_destroy(&attributes);
  if (error == 0) {
    pthread_setname_np(thread, ("cpu_kernels/" + std::to_string(worker % 1000)).c_str());
    state->threads.push_back(thread);
  }
  return error;
}

}  // namespace

WorkerPool::WorkerPool(const PoolOptions& options) {
  if (options.threads < 1 || options.threads > kMaxThreads) {
    throw std::invalid_argument("threads must be in 1.." + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(options.threads));
  }
  if (!options.cores.empty() && static_cast<int>(options.cores.size()) != options.threads) {
    throw std::invalid_argument(std::to_string(options.threads) + " threads but " +
                                std::to_string(options.cores.size()) + " cores");
  }
  for (int core : options.cores) {
    if (core < 0 || core >= (1 << 16)) throw std::invalid_argument("no such core: " + std::to_string(core));
  }
  if (options.spin_ns < 0) throw std::invalid_argument("spin_ns must not be negative");
  state_ = std::make_shared<State>(options);
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0, worker = 0;
  for (; worker < options.threads && error == 0; ++worker) error = start_thread(state_.get(), state_, worker);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    close(1'000'000'000);
    std::string where = options.cores.empty() ? "" : " on core " + std::to_string(options.cores[worker - 1]);
    throw std::runtime_error("cannot start worker " + std::to_string(worker - 1) + where + ": " + std::strerror(error));
  }
}

WorkerPool::~WorkerPool() {
  if (!state_) return;
  if (!state_->forked()) detach();
  close(1'000'000'000);
}

int WorkerPool::threads() const { return state_->options.threads; }

JobResult WorkerPool::run(const Job& job, bool participate, std::string* message) {
  if (message) message->clear();
  State* state = state_.get();
  std::string why = state->refusal();
  if (!why.empty()) throw std::runtime_error(why);
  if (t_inside == state) throw std::runtime_error("a job cannot run a job on the pool that runs it");
  if (job.items <= 0) return JobResult::kDone;

  Waiting waiting;
  waiting.state = state;
  std::unique_lock<std::mutex> caller(state->caller_mutex, std::defer_lock);
  bool takes_part = participate && (job.workers == 0 || job.workers > threads()) && caller.try_lock();
  uint64_t sequence = 0;
  for (int spins = 0; !state->submit(job, wake_waiting, &waiting, &sequence, job.items - takes_part);) relax(&spins);
  if (takes_part) {
    int worker = threads();
    state->accounts[worker].visit(now_ns());
    state->run_items(sequence, worker);
    caller.unlock();
  }
  int64_t begin = now_ns();
  for (int spins = 0; waiting.done.load(std::memory_order_acquire) == 0;) {
    relax(&spins);
    if ((spins & 63) != 0 || now_ns() - begin < state->options.spin_ns) continue;
    std::unique_lock<std::mutex> lock(state->wait_mutex);
    state->waiters.fetch_add(1, std::memory_order_seq_cst);
    while (waiting.done.load(std::memory_order_seq_cst) == 0) state->wait_cv.wait(lock);
    state->waiters.fetch_sub(1, std::memory_order_seq_cst);
  }
  if (message) *message = waiting.message;
  return waiting.result;
}

bool WorkerPool::submit(const Job& job, JobFinished finished, void* finished_context, uint64_t* sequence) {
  if (job.items <= 0 || !job.run || !finished) throw std::invalid_argument("a submitted job needs items and functions");
  return state_->submit(job, finished, finished_context, sequence, job.items);
}

void WorkerPool::cancel(uint64_t sequence) { state_->cancel(sequence); }

bool WorkerPool::attach(const Poller& poller) {
  std::string why = state_->refusal();
  if (!why.empty()) throw std::runtime_error(why);
  if (state_->attached.exchange(true)) return false;
  for (int spins = 0; !state_->try_role();) relax(&spins);
  state_->poller = poller;
  state_->release_role();
  return true;
}

void WorkerPool::detach() {
  if (state_->forked()) return;
  state_->polling.store(false, std::memory_order_seq_cst);
  for (int spins = 0; !state_->try_role();) relax(&spins);
  state_->poller = Poller();
  state_->release_role();
  state_->attached.store(false);
}

void WorkerPool::keep_polling(bool on) {
  if (state_->polling.exchange(on, std::memory_order_seq_cst) == on || !on) return;
  state_->wake(threads());
}

WorkerCounters WorkerPool::counters(int worker) const {
  if (worker < 0 || worker >= worker_slots()) throw std::invalid_argument("no such worker: " + std::to_string(worker));
  bool is_caller = worker == threads();
  WorkerCounters counters = state_->accounts[worker].read(is_caller);
  if (!is_caller && !state_->options.cores.empty()) counters.core = state_->options.cores[worker];
  return counters;
}

int WorkerPool::sleeping() const { return state_->sleepers.load(std::memory_order_seq_cst); }

void WorkerPool::start_trace(int64_t spans_per_worker) {
  if (spans_per_worker < 0) throw std::invalid_argument("spans_per_worker must not be negative");
  for (TraceLane& lane : state_->trace) {
    std::lock_guard<std::mutex> lock(lane.mutex);
    lane.room = static_cast<size_t>(spans_per_worker);
    lane.spans.clear();
    lane.spans.reserve(std::min<size_t>(lane.room, 1 << 16));
  }
  state_->tracing.store(true);
}

std::vector<WorkerSpan> WorkerPool::stop_trace() {
  state_->tracing.store(false);
  std::vector<WorkerSpan> all;
  for (TraceLane& lane : state_->trace) {
    std::lock_guard<std::mutex> lock(lane.mutex);
    all.insert(all.end(), lane.spans.begin(), lane.spans.end());
    lane.room = 0;  // a worker that still thinks that there is a trace
    lane.spans = {};
  }
  return all;
}

std::string WorkerPool::refusal() const { return state_->refusal(); }

bool WorkerPool::close(int64_t timeout_ns) {
  State* state = state_.get();
  if (state->forked()) {
    // The threads exist in the parent only, and a lock may be held by one of them for ever: touch nothing, free
    // nothing.
    abandon(state_);
    return true;
  }
  if (state->attached.load()) throw std::runtime_error("a hand-off service still uses this pool; close it first");
  {
    std::lock_guard<std::mutex> lock(state->submit_mutex);
    state->stopping.store(true, std::memory_order_seq_cst);
  }
  state->cancel_all();
  state->wake(threads());
  std::vector<pthread_t> threads;
  bool all;
  {
    std::unique_lock<std::mutex> lock(state->exit_mutex);
    auto ended = [&] { return state->alive == 0; };
    // The system clock, because it is what every thread sanitizer knows how to follow; being wrong by a clock step
    // costs a late or early "did not come back".
    auto deadline = std::chrono::system_clock::now() + std::chrono::nanoseconds(timeout_ns);
    all = state->exit_cv.wait_until(lock, deadline, ended);
    threads.swap(state->threads);
  }
  for (pthread_t thread : threads) {
    if (all) {
      pthread_join(thread, nullptr);
    } else {
      pthread_detach(thread);  // its memory is held by the thread's own reference
    }
  }
  return all;
}

}  // namespace cpu_kernels
