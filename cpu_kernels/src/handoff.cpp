#include "handoff.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace cpu_kernels {
namespace {

constexpr int kMaxInFlight = WorkerPool::kRing / 2;  // leaves room for blocking calls on the same pool
constexpr int kTakenPerPoll = 4;

// The device writes and reads flags by itself; to the compiler they are shared like a thread's.
uint32_t load_flag(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
void store_flag(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

struct Pending;

struct Run {
  HandoffService::State* state = nullptr;
  Pending* step = nullptr;
  int index = 0;
  uint64_t sequence = 0;
  int64_t seen_ns = 0;
  bool submitted = false;
  // Whoever sets it raises done, a worker or the watchdog: raised twice, it would let the device run ahead by a step.
  std::atomic<bool> raised{false};
  std::atomic<bool> answered{false};
  // Deferred order, once the next step is there: the last flag that the device raises before it takes this answer, and
  // when that was seen to have come; not before that step was submitted.
  std::atomic<const uint32_t*> before{nullptr};
  int64_t linked_ns = 0;
  std::atomic<int64_t> awaited_since_ns{0};
};

// A submitted step. Owned by the queue; a worker's last touch is to count a hand-off in `answered`.
struct Pending {
  explicit Pending(StepDescriptor d) : descriptor(std::move(d)), runs(descriptor.jobs.size()) {}
  const StepDescriptor descriptor;
  std::vector<Run> runs;
  int taken = 0;  // hand-offs whose ready flag was seen
  std::atomic<int> answered{0};
  std::atomic<bool> tainted{false};  // a fault names it
  int size() const { return static_cast<int>(descriptor.jobs.size()); }
};

std::string seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", ns * 1e-9);
  return text;
}

}  // namespace

struct HandoffService::State {
  WorkerPool* pool = nullptr;
  int64_t timeout_ns = 0;
  const unsigned born = fork_generation();

  // Guards the queue and everything up to the next comment. Pollers only try it, so it is held briefly everywhere.
  std::mutex mutex;
  std::deque<std::unique_ptr<Pending>> steps;
  size_t cursor = 0;  // index in `steps` of the first with hand-offs that are not taken
  uint64_t submitted_epoch = 0;
  uint64_t completed_epoch = 0;
  std::vector<std::pair<uint64_t, uint64_t>> poisoned_epochs;  // inclusive ranges, one per fault
  std::condition_variable epoch_cv;
  bool closed = false;
  int64_t looked_ns = 0;  // when a worker last looked whether the device waits
  int64_t began_ns = 0;   // when `steps` last became non-empty
  int64_t submitted_steps = 0, complete_steps = 0, poisoned_steps = 0, device_wait_ns = 0, step_wait_ns = 0;
  // Flags of a poisoned step and those behind it, in the order in which the device goes through them.
  bool haunting = false;
  std::vector<std::pair<uint32_t*, uint32_t*>> ghosts;
  size_t ghost_cursor = 0;
  int64_t ghost_moved_ns = 0;
  bool raise_all = false;
  bool sealed = false;  // after close(): flags may be gone

  std::atomic<bool> poisoned{false};
  std::mutex report_mutex;  // guards report; may be taken with `mutex` held, not the other way round
  PoisonReport report;

  std::atomic<int> in_flight{0};      // taken, and a worker may still touch the step
  std::atomic<int> unanswered{0};     // taken, and done not raised yet; never above the truth
  std::atomic<uint64_t> progress{0};  // changes whenever something moves; the watchdog looks for it
  std::atomic<int64_t> handoffs{0}, answer_ns{0}, max_answer_ns{0}, last_answer_ns{0}, awaited{0}, awaited_ns{0};
  std::atomic<int64_t> tail_ns{0}, held_up{0};

  std::atomic<bool> tracing{false};
  std::mutex trace_mutex;
  size_t trace_room = 0;
  std::vector<HandoffSpan> trace;

  std::thread watchdog;
  std::mutex watch_mutex;
  std::condition_variable watch_cv;
  bool watch_kicked = false, watch_stop = false;

  bool forked() const { return fork_generation() != born; }
  void refuse_in_child() const {
    if (forked())
      throw std::runtime_error("this process was forked after the hand-off service was made; make a new one");
  }

  // ---- faults

  void poison(PoisonReason reason, Pending* step, int index, const std::string& what) {
    step->tainted.store(true, std::memory_order_release);
    {
      std::lock_guard<std::mutex> lock(report_mutex);
      if (poisoned.load(std::memory_order_relaxed)) return;
      report.reason = reason;
      report.epoch = step->descriptor.epoch;
      report.number = step->descriptor.number;
      report.index = index;
      std::string where = "step " + std::to_string(report.number) + " (epoch " + std::to_string(report.epoch) + ")";
      if (index >= 0 && index < step->size()) {
        const HandoffJob& job = step->descriptor.jobs[index];
        report.layer = job.layer;
        report.lane = job.lane;
        where += ", layer " + std::to_string(job.layer) + ", lane " + std::to_string(job.lane);
      }
      report.message = where + ": " + what;
      // Before any flag is raised: a device that gets through because of it belongs to a step known to be poisoned.
      poisoned.store(true, std::memory_order_seq_cst);
    }
    kick_watchdog();
  }

  void kick_watchdog() {
    {
      std::lock_guard<std::mutex> lock(watch_mutex);
      watch_kicked = true;
    }
    watch_cv.notify_one();
  }

  // Lets the device through poisoned steps, again and again until reset: every hand-off that it gives is answered at
  // once. A device that gives nothing for too long may wait for an answer to what it never gave, or gave out of order;
  // then all done flags are kept raised, and how far it has come is no longer known. Caller holds `mutex`.
  void haunt() {
    if (!haunting) {
      retire();
      haunting = true;
      pool->keep_polling(false);
      ghosts.clear();
      ghost_cursor = 0;
      if (!steps.empty()) poisoned_epochs.emplace_back(steps.front()->descriptor.epoch, submitted_epoch);
      for (auto& step : steps) {
        for (const HandoffJob& job : step->descriptor.jobs) ghosts.emplace_back(job.ready, job.done);
        ghost_cursor += step->taken;
        for (int i = 0; i < step->taken; ++i) {
          Run& run = step->runs[i];
          if (run.answered.load(std::memory_order_acquire)) continue;
          if (!run.raised.exchange(true)) store_flag(step->descriptor.jobs[i].done, 1);  // a stuck worker never would
          if (run.submitted) {
            pool->cancel(run.sequence);
          } else {
            unanswered.fetch_sub(1);
            in_flight.fetch_sub(1, std::memory_order_release);  // taken, and no room in the pool since
          }
        }
      }
      {
        std::lock_guard<std::mutex> lock(report_mutex);
        raise_all = report.reason == PoisonReason::kTimeoutDevice;
      }
      ghost_moved_ns = now_ns();
    }
    if (!sealed) let_through();
    if (!steps.empty() && in_flight.load(std::memory_order_acquire) == 0) {
      poisoned_steps += static_cast<int64_t>(steps.size());
      steps.clear();
      cursor = 0;
      completed_epoch = submitted_epoch;
      epoch_cv.notify_all();
    }
  }

  void let_through() {
    size_t before = ghost_cursor;
    while (ghost_cursor < ghosts.size() && load_flag(ghosts[ghost_cursor].first) != 0) {
      store_flag(ghosts[ghost_cursor].first, 0);
      store_flag(ghosts[ghost_cursor].second, 1);
      ++ghost_cursor;
    }
    if (ghost_cursor != before) ghost_moved_ns = now_ns();
    if (!through() && now_ns() - ghost_moved_ns > timeout_ns) raise_all = true;
    for (auto& ghost : ghosts) {
      if (raise_all && load_flag(ghost.second) == 0) store_flag(ghost.second, 1);
    }
  }

  bool through() const { return ghost_cursor >= ghosts.size(); }

  // ---- the ordinary way; callers hold `mutex`

  void retire() {
    bool any = false;
    while (!steps.empty()) {
      Pending& step = *steps.front();
      if (step.answered.load(std::memory_order_acquire) != step.size()) break;
      if (step.tainted.load(std::memory_order_acquire)) break;
      completed_epoch = step.descriptor.epoch;
      ++complete_steps;
      steps.pop_front();
      if (cursor > 0) --cursor;
      any = true;
    }
    if (any) epoch_cv.notify_all();
  }

  // Brings the queue up to date; whether the service is poisoned. What is complete and what is poisoned never changes
  // after a caller was told, because the first haunt decides it.
  bool settle() {
    bool bad = poisoned.load(std::memory_order_acquire);
    if (bad) {
      haunt();
    } else {
      retire();
    }
    return bad;
  }

  static bool poll_entry(void* context) { return static_cast<State*>(context)->poll(); }

  bool poll() {
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    if (poisoned.load(std::memory_order_acquire)) return false;  // the watchdog has it
    retire();
    if (steps.empty()) {
      pool->keep_polling(false);
      return false;
    }
    note_wait();
    bool any = false;
    for (int i = 0; i < kTakenPerPoll && take_next(&any); ++i) continue;
    return any;
  }

  // Deferred order: notes the moment from which the device may be waiting. It takes answers in their order, so it can
  // wait for the first that is not there.
  void note_wait() {
    Pending& step = *steps.front();
    for (int i = std::max(0, step.taken - step.descriptor.overlap); i < step.size(); ++i) {
      Run& run = step.runs[i];
      if (run.answered.load(std::memory_order_acquire)) continue;
      const uint32_t* before = run.before.load(std::memory_order_relaxed);
      if (before && load_flag(before) != 0) see_wait(&run);
      break;
    }
    looked_ns = now_ns();
  }

  // It came after the last look, or that would have seen it.
  void see_wait(Run* run) {
    int64_t never = 0;
    run->awaited_since_ns.compare_exchange_strong(never, std::max(run->linked_ns, looked_ns),
                                                  std::memory_order_relaxed);
  }

  // The step before the last one is answered in the last one.
  void link_answers() {
    if (steps.size() < 2) return;
    Pending& step = **(steps.end() - 2);
    const Pending& next = *steps.back();
    if (!step.descriptor.deferred || !next.descriptor.deferred || step.size() != next.size()) return;
    int64_t now = now_ns();
    for (int i = 0; i < step.size(); ++i) {
      const HandoffJob& before = i > 0 ? next.descriptor.jobs[i - 1] : step.descriptor.jobs.back();
      step.runs[i].linked_ns = now;
      step.runs[i].before.store(before.ready, std::memory_order_release);
    }
  }

  // Takes the next hand-off if its flag is up and it may begin; false if not. *work: a job went to the pool.
  bool take_next(bool* work) {
    while (cursor < steps.size() && steps[cursor]->taken == steps[cursor]->size() &&
           (steps[cursor]->taken == 0 || is_with_pool(steps[cursor]->runs.back()))) {
      ++cursor;
    }
    if (cursor == steps.size()) return false;
    Pending& step = *steps[cursor];
    int index = step.taken;
    if (index > 0 && !is_with_pool(step.runs[index - 1])) {
      return give_to_pool(&step, index - 1, work);  // the pool was full when this one was taken
    }
    int before = index - step.descriptor.overlap;
    if (before >= 0 && !step.runs[before].answered.load(std::memory_order_acquire)) return false;
    if (in_flight.load(std::memory_order_acquire) >= kMaxInFlight) return false;
    const HandoffJob& job = step.descriptor.jobs[index];
    uint32_t ready = load_flag(job.ready);
    if (ready == 0) return false;
    if (ready != 1) {
      poison(PoisonReason::kBadFlag, &step, index, "the ready flag is " + std::to_string(ready) + ", not 0 or 1");
      return false;
    }
    store_flag(job.ready, 0);
    Run& run = step.runs[index];
    run.seen_ns = now_ns();
    unanswered.fetch_add(1, std::memory_order_relaxed);
    if (in_flight.fetch_add(1, std::memory_order_acq_rel) == 0) {
      int64_t waited =
          std::max<int64_t>(0, run.seen_ns - std::max(began_ns, last_answer_ns.load(std::memory_order_relaxed)));
      device_wait_ns += waited;
      if (index == 0) step_wait_ns += waited;
    }
    ++step.taken;
    progress.fetch_add(1, std::memory_order_relaxed);
    // Its flag is down again, so whoever is awaited behind it could not be told by that.
    if (cursor > 0 && index + 1 < steps[cursor - 1]->size()) {
      Run& behind = steps[cursor - 1]->runs[index + 1];
      if (behind.before.load(std::memory_order_relaxed) == job.ready) see_wait(&behind);
    }
    if (job.header) {
      uint32_t number = __atomic_load_n(job.header, __ATOMIC_RELAXED);
      if (number != step.descriptor.number) {
        poison(PoisonReason::kStepMismatch, &step, index,
               "the outbox header says step " + std::to_string(number) + ", the descriptor " +
                   std::to_string(step.descriptor.number));
        return false;
      }
    }
    return give_to_pool(&step, index, work);
  }

  static bool is_with_pool(const Run& run) { return run.submitted; }

  bool give_to_pool(Pending* step, int index, bool* work) {
    Run& run = step->runs[index];
    run.state = this;
    run.step = step;
    run.index = index;
    const Job& job = step->descriptor.jobs[index].job;
    if (job.items == 0) {
      run.submitted = true;
      finished(&run, JobResult::kDone, "", 0);
      return true;
    }
    run.submitted = true;  // first: a worker may finish the job before submit returns
    try {
      if (pool->submit(job, finished, &run, &run.sequence)) {
        *work = true;
        return true;
      }
    } catch (const std::exception& error) {
      run.submitted = false;
      poison(PoisonReason::kJobFailed, step, index, error.what());
      return false;
    }
    run.submitted = false;
    return false;
  }

  // Called by the worker that finished the last item.
  static void finished(void* context, JobResult result, const char* message, int64_t idle_since_ns) {
    Run* run = static_cast<Run*>(context);
    State* state = run->state;
    Pending* step = run->step;
    const HandoffJob& job = step->descriptor.jobs[run->index];
    int64_t now = now_ns();
    if (result == JobResult::kFailed) {
      state->poison(PoisonReason::kJobFailed, step, run->index, std::string("the job failed: ") + message);
    } else if (result == JobResult::kCancelled) {
      // By a fault that was reported already, or because a worker ended inside another job of the pool.
      state->poison(PoisonReason::kJobFailed, step, run->index, "the job was cancelled because a worker ended");
    }
    if (state->tracing.load(std::memory_order_relaxed)) {
      std::lock_guard<std::mutex> lock(state->trace_mutex);
      if (state->trace.size() < state->trace_room) {
        state->trace.push_back({step->descriptor.epoch, run->sequence, job.layer, job.lane, run->seen_ns, now});
      }
    }
    if (result == JobResult::kDone) state->count_wait(*run, now);
    state->unanswered.fetch_sub(1, std::memory_order_relaxed);  // before done: see lag()
    if (!run->raised.exchange(true, std::memory_order_acq_rel)) store_flag(job.done, 1);
    if (result == JobResult::kDone) {
      int64_t took = now - run->seen_ns;
      state->handoffs.fetch_add(1, std::memory_order_relaxed);
      state->answer_ns.fetch_add(took, std::memory_order_relaxed);
      const int64_t tail = idle_since_ns > 0 ? std::max<int64_t>(0, now - idle_since_ns) : 0;
      state->tail_ns.fetch_add(tail, std::memory_order_relaxed);
      if (tail > took - tail) state->held_up.fetch_add(1, std::memory_order_relaxed);
      int64_t most = state->max_answer_ns.load(std::memory_order_relaxed);
      while (took > most && !state->max_answer_ns.compare_exchange_weak(most, took, std::memory_order_relaxed))
        continue;
    }
    state->last_answer_ns.store(now, std::memory_order_relaxed);
    state->progress.fetch_add(1, std::memory_order_relaxed);
    run->answered.store(true, std::memory_order_release);
    step->answered.fetch_add(1, std::memory_order_acq_rel);    // `step` may be gone from here on
    state->in_flight.fetch_sub(1, std::memory_order_acq_rel);  // and `state` from here on
  }

  void count_wait(const Run& run, int64_t now) {
    int64_t since = run.awaited_since_ns.load(std::memory_order_relaxed);
    if (since == 0) {
      const uint32_t* before = run.before.load(std::memory_order_acquire);
      if (!before || load_flag(before) == 0) return;
      since = std::max(run.linked_ns, last_answer_ns.load(std::memory_order_relaxed));
    }
    awaited.fetch_add(1, std::memory_order_relaxed);
    awaited_ns.fetch_add(std::max<int64_t>(0, now - since), std::memory_order_relaxed);
  }

  int lag() {
    // Raised and not seen: the device goes through the flags in order, so the first that is down ends the count, and so
    // does the return of the first flag, which a later step names again.
    int raised = 0;
    const uint32_t* first = nullptr;
    for (size_t s = cursor; s < steps.size() && !sealed; ++s) {
      const auto& jobs = steps[s]->descriptor.jobs;
      size_t i = steps[s]->taken;
      while (i < jobs.size() && jobs[i].ready != first && load_flag(jobs[i].ready) != 0) {
        if (!first) first = jobs[i].ready;
        ++raised;
        ++i;
      }
      if (i < jobs.size()) break;
    }
    // Second: a flag that is up again because its last hand-off was answered must not find that one counted too.
    return raised + unanswered.load(std::memory_order_acquire);
  }

  // ---- watchdog

  void watch() {
    int64_t stale = 0, last = now_ns();
    uint64_t seen = progress.load();
    // Counted in ticks that really passed, each at most twice its length, so that a process that was stopped for a
    // while does not come back to an expired wait.
    const int64_t tick = std::min<int64_t>(std::max<int64_t>(timeout_ns / 16, 500'000), 100'000'000);
    for (;;) {
      int64_t pause = poisoned.load() ? 100'000 : tick;
      {
        std::unique_lock<std::mutex> lock(watch_mutex);
        watch_cv.wait_for(lock, std::chrono::nanoseconds(pause), [&] { return watch_kicked || watch_stop; });
        watch_kicked = false;
        if (watch_stop) return;
      }
      int64_t now = now_ns();
      int64_t passed = std::min(now - last, 2 * tick);
      last = now;
      std::lock_guard<std::mutex> lock(mutex);
      if (poisoned.load(std::memory_order_acquire)) {
        haunt();
        stale = 0;
        continue;
      }
      uint64_t current = progress.load(std::memory_order_relaxed);
      stale = current != seen || steps.empty() ? 0 : stale + passed;
      seen = current;
      if (stale > timeout_ns) expire();
      if (poisoned.load(std::memory_order_acquire)) haunt();
    }
  }

  void expire() {
    retire();
    for (auto& step : steps) {
      for (int i = 0; i < step->taken; ++i) {
        if (step->runs[i].answered.load(std::memory_order_acquire)) continue;
        poison(PoisonReason::kTimeoutWorkers, step.get(), i,
               "the workers did not finish the job within " + seconds(timeout_ns));
        return;
      }
      if (step->taken == step->size()) continue;
      if (load_flag(step->descriptor.jobs[step->taken].ready) != 0) {
        poison(PoisonReason::kTimeoutWorkers, step.get(), step->taken,
               "no worker took what the device has given within " + seconds(timeout_ns));
      } else {
        poison(PoisonReason::kTimeoutDevice, step.get(), step->taken,
               "the device did not raise ready within " + seconds(timeout_ns));
      }
      return;
    }
  }

  bool wait_drained(std::unique_lock<std::mutex>* lock, bool device_too, int64_t timeout_ns_) {
    int64_t deadline = now_ns() + timeout_ns_;
    auto drained = [&] {
      bool workers = steps.empty() && in_flight.load(std::memory_order_acquire) == 0;
      return workers && (!poisoned.load() || (haunting && (!device_too || through())));
    };
    while (!drained()) {
      if (now_ns() >= deadline) return false;
      epoch_cv.wait_for(*lock, std::chrono::microseconds(200));
    }
    return true;
  }
};

HandoffService::HandoffService(WorkerPool* pool, int64_t timeout_ns) : state_(std::make_shared<State>()) {
  if (timeout_ns <= 0) throw std::invalid_argument("the timeout must be positive");
  state_->pool = pool;
  state_->timeout_ns = timeout_ns;
  if (!pool->attach(Poller{State::poll_entry, state_.get()})) {
    state_.reset();
    throw std::runtime_error("the worker pool already has a hand-off service; close that one or make another pool");
  }
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    state_->watchdog = std::thread([state = state_.get()] { state->watch(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pool->detach();
    state_.reset();
    throw;
  }
  pthread_setname_np(state_->watchdog.native_handle(), "cpu_kernels/dog");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

HandoffService::~HandoffService() {
  if (state_) close(1'000'000'000);
}

void HandoffService::submit(StepDescriptor step) {
  State* state = state_.get();
  state->refuse_in_child();
  if (step.overlap < 1) throw std::invalid_argument("overlap must be at least 1");
  std::vector<const uint32_t*> flags;
  flags.reserve(2 * step.jobs.size());
  for (const HandoffJob& job : step.jobs) {
    if (job.job.items < 0 || (job.job.items > 0 && !job.job.run)) {
      throw std::invalid_argument("a job needs items >= 0 and, if there are any, a function");
    }
    if (job.job.workers > 0 && job.job.workers < state->pool->threads()) {
      throw std::invalid_argument("a job is made for " + std::to_string(job.job.workers) + " workers, the pool has " +
                                  std::to_string(state->pool->threads()));
    }
    for (const uint32_t* flag : {static_cast<const uint32_t*>(job.ready), static_cast<const uint32_t*>(job.done)}) {
      if (!flag || reinterpret_cast<uintptr_t>(flag) % 4 != 0) {
        throw std::invalid_argument("ready and done must be addresses that are multiples of 4");
      }
      flags.push_back(flag);
    }
    if (reinterpret_cast<uintptr_t>(job.header) % 4 != 0) throw std::invalid_argument("the header is misaligned");
  }
  std::sort(flags.begin(), flags.end());
  if (std::adjacent_find(flags.begin(), flags.end()) != flags.end()) {
    throw std::invalid_argument("two hand-offs of one step name the same flag");
  }
  auto pending = std::make_unique<Pending>(std::move(step));

  std::lock_guard<std::mutex> lock(state->mutex);
  if (state->closed) throw std::runtime_error("the hand-off service is closed");
  if (state->poisoned.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> report_lock(state->report_mutex);
    throw std::runtime_error("the hand-off service is poisoned and needs a reset: " + state->report.message);
  }
  std::string why = state->pool->refusal();
  if (!why.empty()) throw std::runtime_error(why);
  if (pending->descriptor.epoch <= state->submitted_epoch) {
    throw std::invalid_argument("epoch " + std::to_string(pending->descriptor.epoch) + " is not above the last one, " +
                                std::to_string(state->submitted_epoch));
  }
  state->retire();
  state->submitted_epoch = pending->descriptor.epoch;
  ++state->submitted_steps;
  if (state->steps.empty()) {
    state->began_ns = now_ns();
    state->progress.fetch_add(1, std::memory_order_relaxed);
  }
  state->steps.push_back(std::move(pending));
  state->link_answers();
  state->pool->keep_polling(true);
}

int HandoffService::lag() {
  state_->refuse_in_child();
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lag();
}

uint64_t HandoffService::completed_epoch() {
  state_->refuse_in_child();
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->settle();
  return state_->completed_epoch;
}

bool HandoffService::wait_epoch(uint64_t epoch, int64_t timeout_ns) {
  state_->refuse_in_child();
  int64_t deadline = now_ns() + timeout_ns;
  std::unique_lock<std::mutex> lock(state_->mutex);
  for (;;) {
    state_->settle();
    if (state_->completed_epoch >= epoch) return true;
    int64_t left = deadline - now_ns();
    if (left <= 0) return false;
    // In slices: workers that are busy elsewhere notify nobody.
    state_->epoch_cv.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left, 5'000'000)));
  }
}

StepOutcome HandoffService::outcome(uint64_t epoch) {
  state_->refuse_in_child();
  std::lock_guard<std::mutex> lock(state_->mutex);
  bool poisoned = state_->settle();
  if (epoch == 0 || epoch > state_->submitted_epoch) return StepOutcome::kUnknown;
  for (const auto& range : state_->poisoned_epochs) {
    if (epoch >= range.first && epoch <= range.second) return StepOutcome::kPoisoned;
  }
  if (epoch <= state_->completed_epoch) return StepOutcome::kComplete;
  return poisoned ? StepOutcome::kPoisoned : StepOutcome::kPending;
}

HandoffStatus HandoffService::status() {
  state_->refuse_in_child();
  HandoffStatus out;
  std::lock_guard<std::mutex> lock(state_->mutex);
  out.poisoned = state_->settle();
  out.closed = state_->closed;
  if (out.poisoned) {
    std::lock_guard<std::mutex> report_lock(state_->report_mutex);
    out.report = state_->report;
  }
  out.submitted_epoch = state_->submitted_epoch;
  out.completed_epoch = state_->completed_epoch;
  out.steps = static_cast<int>(state_->steps.size());
  out.in_flight = state_->in_flight.load(std::memory_order_acquire);
  out.lag = state_->lag();
  out.device_through = !out.poisoned || (state_->haunting && state_->through());
  out.submitted_steps = state_->submitted_steps;
  out.complete_steps = state_->complete_steps;
  out.poisoned_steps = state_->poisoned_steps;
  out.handoffs = state_->handoffs.load(std::memory_order_relaxed);
  out.answer_ns = state_->answer_ns.load(std::memory_order_relaxed);
  out.max_answer_ns = state_->max_answer_ns.load(std::memory_order_relaxed);
  out.device_wait_ns = state_->device_wait_ns;
  out.step_wait_ns = state_->step_wait_ns;
  out.awaited = state_->awaited.load(std::memory_order_relaxed);
  out.awaited_ns = state_->awaited_ns.load(std::memory_order_relaxed);
  out.tail_ns = state_->tail_ns.load(std::memory_order_relaxed);
  out.held_up = state_->held_up.load(std::memory_order_relaxed);
  return out;
}

void HandoffService::start_trace(int64_t handoffs) {
  if (handoffs < 0) throw std::invalid_argument("handoffs must not be negative");
  std::lock_guard<std::mutex> lock(state_->trace_mutex);
  state_->trace_room = static_cast<size_t>(handoffs);
  state_->trace.clear();
  state_->trace.reserve(std::min<size_t>(state_->trace_room, 1 << 16));
  state_->tracing.store(true);
}

std::vector<HandoffSpan> HandoffService::stop_trace() {
  state_->tracing.store(false);
  std::lock_guard<std::mutex> lock(state_->trace_mutex);
  state_->trace_room = 0;
  std::vector<HandoffSpan> all;
  all.swap(state_->trace);
  return all;
}

bool HandoffService::reset(int64_t timeout_ns) {
  State* state = state_.get();
  state->refuse_in_child();
  std::unique_lock<std::mutex> lock(state->mutex);
  if (state->closed) throw std::runtime_error("the hand-off service is closed");
  if (!state->poisoned.load(std::memory_order_acquire)) return true;
  if (!state->wait_drained(&lock, false, timeout_ns)) return false;
  for (auto& ghost : state->ghosts) {
    store_flag(ghost.first, 0);
    store_flag(ghost.second, 0);
  }
  state->ghosts.clear();
  state->ghost_cursor = 0;
  state->haunting = false;
  std::lock_guard<std::mutex> report_lock(state->report_mutex);
  state->report = PoisonReport();
  state->poisoned.store(false, std::memory_order_release);
  return true;
}

bool HandoffService::close(int64_t grace_ns) {
  State* state = state_.get();
  if (state->forked()) {
    // The watchdog exists in the parent only and a lock may be held for ever: touch nothing, free nothing.
    abandon(state_);
    return true;
  }
  bool clean;
  {
    std::unique_lock<std::mutex> lock(state->mutex);
    if (state->closed) return state->in_flight.load(std::memory_order_acquire) == 0;
    state->closed = true;
    state->retire();
    if (!state->steps.empty()) {
      Pending& step = *state->steps.front();
      state->poison(PoisonReason::kClosed, &step, std::min(step.taken, step.size() - 1),
                    "the service was closed before the step was complete");
    }
    state->wait_drained(&lock, true, grace_ns);
    clean = state->in_flight.load(std::memory_order_acquire) == 0;
    state->sealed = true;
  }
  {
    std::lock_guard<std::mutex> lock(state->watch_mutex);
    state->watch_stop = true;
  }
  state->watch_cv.notify_one();
  state->watchdog.join();
  state->pool->detach();
  if (!clean) abandon(state_);  // a worker is still inside a job and will report here
  return clean;
}

}  // namespace cpu_kernels
