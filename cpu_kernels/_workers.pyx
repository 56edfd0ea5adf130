# cython: language_level=3
"""Worker pool, hand-off service and fake device: thin, validated calls into C++. `cpu_kernels.workers` is the API."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "worker_pool.hpp" namespace "cpu_kernels" nogil:
    cdef struct ItemCost:
        int64_t bytes
        int64_t tokens

    cdef cppclass NextItem:
        pass

    ctypedef void (*RunItem)(void*, int, int, NextItem*)
    ctypedef void (*CostItem)(void*, int, ItemCost*)

    cdef cppclass CJob "cpu_kernels::Job":
        int items
        int workers
        RunItem run
        void* context
        CostItem cost
        cbool streaming_stores

    cdef enum class JobResult:
        kDone
        kFailed
        kCancelled

    cdef struct CCounters "cpu_kernels::WorkerCounters":
        int core
        int64_t age_ns, busy_ns, wait_ns, sleeps, items, bytes, tokens

    cdef struct CWorkerSpan "cpu_kernels::WorkerSpan":
        int worker, items
        uint64_t sequence
        int64_t begin_ns, end_ns

    cdef cppclass PoolOptions:
        int threads
        vector[int] cores
        int64_t spin_ns

    cdef cppclass CPool "cpu_kernels::WorkerPool":
        CPool(const PoolOptions&) except +
        int threads()
        int worker_slots()
        JobResult run(const CJob&, cbool, string*) except +
        CCounters counters(int) except +
        int sleeping()
        string refusal()
        void start_trace(int64_t) except +
        vector[CWorkerSpan] stop_trace() except +
        cbool close(int64_t) except +


cdef extern from "handoff.hpp" namespace "cpu_kernels" nogil:
    cdef cppclass HandoffJob:
        CJob job
        uint32_t* ready
        uint32_t* done
        const uint32_t* header
        int layer
        int lane

    cdef cppclass StepDescriptor:
        uint64_t epoch
        uint32_t number
        int overlap
        cbool deferred
        vector[HandoffJob] jobs

    cdef enum class PoisonReason:
        kNone
        kTimeoutDevice
        kTimeoutWorkers
        kStepMismatch
        kBadFlag
        kJobFailed
        kClosed

    cdef cppclass PoisonReport:
        PoisonReason reason
        uint64_t epoch
        uint32_t number
        int index, layer, lane
        string message

    cdef enum class StepOutcome:
        kUnknown
        kPending
        kComplete
        kPoisoned

    cdef cppclass CStatus "cpu_kernels::HandoffStatus":
        cbool closed, poisoned, device_through
        PoisonReport report
        uint64_t submitted_epoch, completed_epoch
        int steps, in_flight, lag
        int64_t submitted_steps, complete_steps, poisoned_steps, handoffs, answer_ns, max_answer_ns, device_wait_ns
        int64_t step_wait_ns
        int64_t awaited, awaited_ns, tail_ns, held_up

    cdef struct CHandoffSpan "cpu_kernels::HandoffSpan":
        uint64_t epoch, sequence
        int layer, lane
        int64_t seen_ns, done_ns

    cdef cppclass CService "cpu_kernels::HandoffService":
        CService(CPool*, int64_t) except +
        void submit(StepDescriptor) except +
        int lag() except +
        uint64_t completed_epoch() except +
        cbool wait_epoch(uint64_t, int64_t) except +
        StepOutcome outcome(uint64_t) except +
        CStatus status() except +
        void start_trace(int64_t) except +
        vector[CHandoffSpan] stop_trace() except +
        cbool reset(int64_t) except +
        cbool close(int64_t) except +


cdef extern from "fake_device.hpp" namespace "cpu_kernels" nogil:
    cdef cppclass CMemory "cpu_kernels::HandoffMemory":
        CMemory(int, int64_t, int64_t) except +
        int handoffs()
        int64_t outbox_bytes()
        int64_t inbox_bytes()
        uint32_t* ready(int)
        uint32_t* done(int)
        uint32_t* header(int)
        char* outbox(int)
        char* inbox(int)

    void c_device_write "cpu_kernels::device_write"(uint32_t*, uint32_t)
    cbool c_device_wait "cpu_kernels::device_wait"(const uint32_t*, uint32_t, int64_t)

    cdef enum class DeviceOrder:
        kSync
        kPipelined
        kDeferred

    cdef enum class FakeFault:
        kNone
        kNoReady
        kWrongStep
        kBadFlag
        kThrow
        kExit
        kStuck

    cdef cppclass FakeDeviceOptions:
        DeviceOrder order
        int layers, words, items
        uint64_t seed
        int64_t max_delay_ns

    cdef cppclass CFakeDevice "cpu_kernels::FakeDevice":
        CFakeDevice(const FakeDeviceOptions&) except +
        int handoffs()
        vector[HandoffJob] jobs()
        void launch()
        cbool synchronize(int64_t)
        void fault(FakeFault, uint32_t, int)
        void release_stuck()
        void restart()
        uint32_t steps()
        int64_t checked()
        int64_t wrong()

    CJob spinning_job(int items, int64_t ns)
    vector[int64_t] c_measure "cpu_kernels::measure_round_trips"(
        CService*, uint64_t, int, const vector[CJob]&) except +


class JobFailed(RuntimeError):
    """A job threw, or a worker ended inside it; the message is the first failure's."""


cdef int64_t _ns(double seconds) except -1:
    if not seconds >= 0:
        raise ValueError(f"a time must not be negative, got {seconds}")
    # A bit more than a year: for ever, and no overflow when it is added to a clock.
    return <int64_t>(min(seconds, 4e7) * 1e9)


cdef class Job:
    """``run(context, item, worker)`` for every item in ``range(items)``; see Job in ``src/worker_pool.hpp``.

    ``run`` and ``cost`` are the addresses of C functions ``void(void*, int, int)`` and ``void(void*, int, ItemCost*)``
    (two int64: bytes, tokens), ``context`` is any address. ``workers``: how many worker numbers ``run`` knows, 0 for
    any. ``keepalive`` is kept as long as the job may run.
    """

    cdef CJob job
    cdef readonly object keepalive

    def __init__(self, items, run, context=0, *, cost=0, workers=0, streaming_stores=False, keepalive=None):
        if items < 0 or items > 0x7fffffff:
            raise ValueError(f"items must be in 0..2147483647, got {items}")
        if items > 0 and not run:
            raise ValueError("a job with items needs a function")
        self.job.items = items
        self.job.workers = workers
        self.job.run = <RunItem><uintptr_t>run
        self.job.context = <void*><uintptr_t>context
        self.job.cost = <CostItem><uintptr_t>cost
        self.job.streaming_stores = streaming_stores
        self.keepalive = keepalive

    @staticmethod
    def spinning(items, microseconds):
        """A job each of whose items keeps its worker busy for so long, to put a known time in a measurement."""
        cdef Job made = Job(0, 0)
        if not 0 < items <= 0x7fffffff:
            raise ValueError(f"items must be in 1..2147483647, got {items}")
        made.job = spinning_job(items, _ns(microseconds * 1e-6))
        return made

    @property
    def items(self):
        return self.job.items

    @property
    def address(self):
        """Of the ``cpu_kernels::Job``."""
        return <uintptr_t>&self.job


cdef const CJob* _job(job) except NULL:
    """The native job of this or another module's object: whatever has the ``address`` of one."""
    cdef uintptr_t address = job.address
    if address == 0 or address % sizeof(void*) != 0:
        raise ValueError(f"not the address of a job: {address:#x}")
    return <const CJob*>address


cdef class WorkerPool:
    cdef CPool* pool
    cdef readonly tuple cores
    cdef readonly object claim

    # __cinit__, here and below: it runs exactly once, so no method meets a null pointer.
    def __cinit__(self, threads, cores=(), spin_us=200.0, claim=None):
        cdef PoolOptions options
        self.cores = tuple(cores)
        self.claim = claim
        options.threads = threads
        options.cores = self.cores
        options.spin_ns = _ns(spin_us * 1e-6)
        with nogil:
            self.pool = new CPool(options)

    def __dealloc__(self):
        with nogil:
            del self.pool

    @property
    def threads(self):
        return self.pool.threads()

    @property
    def worker_slots(self):
        return self.pool.worker_slots()

    @property
    def sleeping(self):
        return self.pool.sleeping()

    @property
    def refusal(self):
        return self.pool.refusal().decode()

    def run(self, job, participate=True):
        """Runs a job (an object with the ``address`` of a ``cpu_kernels::Job``) and returns when all of it is done.

        Args:
            participate: the calling thread runs items too, unless the job is made for fewer workers.

        Raises:
            JobFailed: the job threw, or the pool was closed meanwhile.
            ValueError: the job is made for fewer workers than the pool has.
            RuntimeError: the pool is closed or lost a worker, or the job cannot begin: a plan that runs already.
        """
        cdef const CJob* native = _job(job)
        cdef string message
        cdef JobResult result
        cdef cbool takes_part = participate
        with nogil:
            result = self.pool.run(native[0], takes_part, &message)
        if result != JobResult.kDone:
            raise JobFailed(message.decode(errors="replace") or "the pool was closed before the job was finished")

    def counters_of(self, worker):
        cdef CCounters c = self.pool.counters(worker)
        return c.core, c.age_ns, c.busy_ns, c.wait_ns, c.sleeps, c.items, c.bytes, c.tokens

    def start_trace(self, spans_per_worker):
        self.pool.start_trace(spans_per_worker)

    def spans(self):
        """Ends the trace: tuples of worker, items, number of the job, begin and end (ns, monotonic clock)."""
        return [(s.worker, s.items, s.sequence, s.begin_ns, s.end_ns) for s in self.pool.stop_trace()]

    def close(self, timeout_s=1.0):
        cdef int64_t timeout_ns = _ns(timeout_s)
        cdef cbool clean
        with nogil:
            clean = self.pool.close(timeout_ns)
        return clean


cdef class Handoffs:
    """The hand-offs of a step, in the order in which the device gives them. Submitting a step copies them."""

    cdef vector[HandoffJob] jobs
    cdef readonly list keepalive

    def __init__(self):
        self.keepalive = []

    def __len__(self):
        return self.jobs.size()

    def add(self, job, ready, done, header=0, *, layer=0, lane=0):
        """One more.

        Args:
            job: an object with the ``address`` of a ``cpu_kernels::Job``, or None: nothing to do, answered at once.
            ready, done, header: addresses of uint32; header 0: the step number is not checked.
        """
        cdef HandoffJob h
        if job is not None:
            h.job = _job(job)[0]
        h.ready = <uint32_t*><uintptr_t>ready
        h.done = <uint32_t*><uintptr_t>done
        h.header = <const uint32_t*><uintptr_t>header
        h.layer = layer
        h.lane = lane
        self.keepalive.append(job)
        self.jobs.push_back(h)

    def with_jobs(self, jobs):
        """A copy on the same flags with other jobs: the next step.

        Args:
            jobs: one per hand-off, as ``add`` takes them, such as ``Plan.jobs(...)``.

        Raises:
            ValueError: not one job per hand-off.
        """
        cdef Handoffs out = Handoffs()
        cdef HandoffJob nothing
        cdef size_t i, count = self.jobs.size()
        if <size_t>len(jobs) != count:
            raise ValueError(f"{len(jobs)} jobs for {count} hand-offs")
        out.jobs = self.jobs
        for i in range(count):
            job = jobs[i]
            if job is None:
                out.jobs[i].job = nothing.job
            else:
                out.jobs[i].job = _job(job)[0]
            out.keepalive.append(job)
        return out


cdef tuple _REASONS = ("none", "device_timeout", "workers_timeout", "step_mismatch", "bad_flag", "job_failed", "closed")
cdef tuple _OUTCOMES = ("unknown", "pending", "complete", "poisoned")


cdef class Service:
    """The C++ service; ``cpu_kernels.workers.HandoffService`` adds what keeps the memory of steps alive."""

    cdef CService* service
    cdef readonly WorkerPool pool

    def __cinit__(self, WorkerPool pool not None, timeout_s):
        cdef int64_t timeout_ns = _ns(timeout_s)
        self.pool = pool
        with nogil:
            self.service = new CService(pool.pool, timeout_ns)

    def __dealloc__(self):
        with nogil:
            del self.service

    def submit(self, epoch, number, Handoffs handoffs not None, overlap, deferred):
        cdef StepDescriptor step
        step.epoch = epoch
        step.number = number
        step.overlap = overlap
        step.deferred = deferred
        step.jobs = handoffs.jobs
        with nogil:
            self.service.submit(step)

    def lag(self):
        return self.service.lag()

    def completed_epoch(self):
        return self.service.completed_epoch()

    def wait_epoch(self, epoch, timeout_s):
        cdef uint64_t wanted = epoch
        cdef int64_t timeout_ns = _ns(timeout_s)
        cdef cbool reached
        with nogil:
            reached = self.service.wait_epoch(wanted, timeout_ns)
        return reached

    def outcome(self, epoch):
        return _OUTCOMES[<int>self.service.outcome(epoch)]

    def status(self):
        cdef CStatus s = self.service.status()
        fault = None
        if s.poisoned:
            fault = dict(reason=_REASONS[<int>s.report.reason], epoch=s.report.epoch, number=s.report.number,
                         index=s.report.index, layer=s.report.layer, lane=s.report.lane,
                         message=s.report.message.decode(errors="replace"))
        return dict(closed=s.closed, fault=fault, submitted_epoch=s.submitted_epoch, completed_epoch=s.completed_epoch,
                    steps=s.steps, in_flight=s.in_flight, lag=s.lag, device_through=s.device_through,
                    submitted_steps=s.submitted_steps, complete_steps=s.complete_steps,
                    poisoned_steps=s.poisoned_steps, handoffs=s.handoffs, answer_ns=s.answer_ns,
                    max_answer_ns=s.max_answer_ns, device_wait_ns=s.device_wait_ns,
                    step_wait_ns=s.step_wait_ns, awaited=s.awaited,
                    awaited_ns=s.awaited_ns, tail_ns=s.tail_ns, held_up=s.held_up)

    def start_trace(self, handoffs):
        self.service.start_trace(handoffs)

    def spans(self):
        """Ends the trace: tuples of epoch, number of the job, layer, lane, ready seen, answered (ns, monotonic)."""
        return [(s.epoch, s.sequence, s.layer, s.lane, s.seen_ns, s.done_ns) for s in self.service.stop_trace()]

    def reset(self, timeout_s):
        cdef int64_t timeout_ns = _ns(timeout_s)
        cdef cbool done
        with nogil:
            done = self.service.reset(timeout_ns)
        return done

    def close(self, grace_s):
        cdef int64_t grace_ns = _ns(grace_s)
        cdef cbool clean
        with nogil:
            clean = self.service.close(grace_ns)
        return clean

    def measure_round_trips(self, first_epoch, steps, jobs):
        cdef uint64_t epoch = first_epoch
        cdef int n = steps
        cdef vector[CJob] native
        cdef vector[int64_t] times
        for job in jobs:
            if isinstance(job, int):
                native.push_back(spinning_job(job, 0))
            else:
                native.push_back(_job(job)[0])
        if n < 1 or native.empty():
            raise ValueError("at least one step and one job are needed")
        with nogil:
            times = c_measure(self.service, epoch, n, native)
        return list(times)


cdef class _Box:
    """The buffer of one box; keeps its memory alive."""

    cdef HandoffMemory owner
    cdef char* data
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 0, flags)


cdef class HandoffMemory:
    """Flags, headers, outboxes and inboxes of ``handoffs`` hand-offs in plain memory, all zero at first.

    Flags and headers are uint32 with a cache line each; boxes begin on a cache line. Flags and headers are given as
    addresses, boxes as writable memoryviews of bytes.
    """

    cdef CMemory* memory

    def __cinit__(self, handoffs, outbox_bytes, inbox_bytes):
        self.memory = new CMemory(handoffs, outbox_bytes, inbox_bytes)

    def __dealloc__(self):
        del self.memory

    def __len__(self):
        return self.memory.handoffs()

    cdef int check(self, i) except -1:
        if not 0 <= i < self.memory.handoffs():
            raise IndexError(f"hand-off {i} of {self.memory.handoffs()}")
        return i

    def ready(self, i):
        return <uintptr_t>self.memory.ready(self.check(i))

    def done(self, i):
        return <uintptr_t>self.memory.done(self.check(i))

    def header(self, i):
        return <uintptr_t>self.memory.header(self.check(i))

    def outbox(self, i):
        cdef _Box box = _Box()
        box.owner, box.data, box.size = self, self.memory.outbox(self.check(i)), self.memory.outbox_bytes()
        return memoryview(box)

    def inbox(self, i):
        cdef _Box box = _Box()
        box.owner, box.data, box.size = self, self.memory.inbox(self.check(i)), self.memory.inbox_bytes()
        return memoryview(box)


cdef uint32_t* _flag(address) except NULL:
    cdef uintptr_t a = address
    if a == 0 or a % 4 != 0:
        raise ValueError(f"a flag's address must be a multiple of 4 and not 0, got {a:#x}")
    return <uint32_t*>a


def device_write(address, value):
    """What a stream's write-value does: everything written before is visible to whoever sees the value."""
    c_device_write(_flag(address), value)


def device_wait(address, value, timeout_s=1e9):
    """What a stream's wait-value does, without the GIL; False after ``timeout_s``."""
    cdef uint32_t* flag = _flag(address)
    cdef uint32_t wanted = value
    cdef int64_t timeout_ns = _ns(timeout_s)
    cdef cbool seen
    with nogil:
        seen = c_device_wait(flag, wanted, timeout_ns)
    return seen


cdef dict _ORDERS = {"sync": DeviceOrder.kSync, "pipelined": DeviceOrder.kPipelined, "deferred": DeviceOrder.kDeferred}
cdef dict _FAULTS = {"none": FakeFault.kNone, "no_ready": FakeFault.kNoReady, "wrong_step": FakeFault.kWrongStep,
                     "bad_flag": FakeFault.kBadFlag, "throw": FakeFault.kThrow, "exit": FakeFault.kExit,
                     "stuck": FakeFault.kStuck}


cdef class FakeDevice:
    """A thread that plays a device, with jobs whose answers it checks; see ``src/fake_device.hpp``."""

    cdef CFakeDevice* device

    def __cinit__(self, order="sync", *, layers=2, words=64, items=4, seed=1, max_delay_us=0.0):
        cdef FakeDeviceOptions options
        if order not in _ORDERS:
            raise ValueError(f"order must be one of {', '.join(_ORDERS)}, got {order!r}")
        options.order = <DeviceOrder><int>_ORDERS[order]
        options.layers = layers
        options.words = words
        options.items = items
        options.seed = seed
        options.max_delay_ns = _ns(max_delay_us * 1e-6)
        self.device = new CFakeDevice(options)

    def __dealloc__(self):
        with nogil:
            del self.device

    def handoffs(self):
        cdef Handoffs out = Handoffs()
        out.jobs = self.device.jobs()
        out.keepalive.append(self)
        return out

    def launch(self):
        self.device.launch()

    def synchronize(self, timeout_s=60.0):
        cdef int64_t timeout_ns = _ns(timeout_s)
        cdef cbool done
        with nogil:
            done = self.device.synchronize(timeout_ns)
        return done

    def fault(self, kind, step, handoff=0):
        if kind not in _FAULTS:
            raise ValueError(f"kind must be one of {', '.join(_FAULTS)}, got {kind!r}")
        self.device.fault(<FakeFault><int>_FAULTS[kind], step, handoff)

    def release_stuck(self):
        self.device.release_stuck()

    def restart(self):
        self.device.restart()

    @property
    def steps(self):
        return self.device.steps()

    @property
    def checked(self):
        return self.device.checked()

    @property
    def wrong(self):
        return self.device.wrong()
