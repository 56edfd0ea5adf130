"""Attention of host rows: per step a plan for the CPU workers, per layer a hand-off to them.

One ``HostAttention`` per model runner. A step goes

    epoch = host_attention.launch(rows, index)          # plan made, workers told, control loaded
    with host_attention.emitting(len(rows)) as layers:  # or: replay of a graph captured under emitting(capacity)
        for every layer:
            layers.send(layer, q, k, v)                 # outbox, ready flag
            ... the device rows' attention ...
            layers.receive(layer, out)                  # done flag, inbox
    ...
    host_attention.failure(epoch)                       # before anything of the step is published

What a layer emits names only memory that stays where it is (``exchange.py``), so it is the same in every step and can
be captured. Here the wait comes in the same layer (mode sync of docs/architecture.md); nothing else depends on when.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cpu_kernels.attention import Plan
from cpu_kernels.cores import NotEnoughCores
from cpu_kernels.workers import Handoffs, HandoffService, Step, WorkerPool
from sglang_neo.hybrid.exchange import NO_ROW, exchange_for
from sglang_neo.hybrid.geometry import AttentionGeometry
from sglang_neo.hybrid.streams import FlagStream, flag_stream
from sglang_neo.planning.cascade import shared_runs
from sglang_neo.tensors import pinned
from sglang_neo.token_manager import HostRow

logger = logging.getLogger(__name__)

#: uint32 words in a cache line: flags that share one would bounce between the device's and the CPU's writes.
_LINE = 16
_READY, _DONE, _HEADER = range(3)

#: For which a worker may be busy with a layer of a step that the device has left.
_LAST_JOB_S = 1.0

#: How much later than its timeout the service's watchdog may come on a busy machine. Only if it is gone altogether do
#: the waits on this side end by themselves.
_LATE_WATCHDOG_S = 10.0


class StepRefused(RuntimeError):
    """The workers take no step, since one before it failed. ``launch`` has done everything else."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the start."""

    busy: float  # of all workers together
    wait: float  # while steps ran and no hand-off was there
    between: float = 0.0  # of that, until the first hand-off of a step
    awaited: float = 0.0  # that deferred steps may have waited for answers, at most
    awaited_handoffs: int = 0  # which so many answers were (``cpu_kernels.workers.HandoffStatus``)
    handoffs: int = 0  # answered
    answers: float = 0.0  # from given to answered, summed over these
    tails: float = 0.0  # of that, from the first worker's end to the last one's
    held_up: int = 0  # hand-offs of which that was more than half


class Boxes:
    """What hand-offs go through, one after the other; all of it stays where it is.

    Args:
        max_rows: the most host rows of a hand-off.
        device: "cpu" or "cuda[:n]".
    """

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype, max_rows: int, device: str):
        g, pin = geometry, device.startswith("cuda")
        # Per layer: ready, done, header, each on a line of its own.
        self.flags = torch.zeros((g.layers, 3, _LINE), dtype=torch.int32, pin_memory=pin)
        # All layers use the same boxes: a layer's answer has been taken out before the next one's questions are put in.
        self.outbox, self.inbox = (
            torch.zeros((max_rows, heads * g.head_dim), dtype=dtype, pin_memory=pin)
            for heads in (g.q_heads + 2 * g.kv_heads, g.q_heads)
        )
        self.control = torch.full((1 + max_rows,), NO_ROW, dtype=torch.int32, device=device)
        self._controlled = 0  # entries of control that the last step set

    def flag(self, layer: int, which: int) -> int:
        """Address of a layer's ready (0), done (1) or header (2) word."""
        return int(self.flags[layer, which].data_ptr())

    def flag_addresses(self, layer: int) -> tuple[int, int, int]:
        """Of ready, done and header."""
        return self.flag(layer, _READY), self.flag(layer, _DONE), self.flag(layer, _HEADER)

    def load_control(self, number: int, index: Sequence[int]) -> None:
        """For the step that is launched next, behind the one before in stream order, whose kernels read it."""
        unset = [NO_ROW] * (self._controlled - len(index))
        control = pinned([number, *index, *unset], self.control.device, torch.int32)
        self.control[: len(control)].copy_(control, non_blocking=True)
        self._controlled = len(index)


class Launches:
    """The steps given to the workers, one numbering for all ways in which a model runner's steps hand over."""

    def __init__(self, workers: WorkerPool, timeout_s: float):
        self._timeout_s = timeout_s
        self.workers = workers
        self.service = HandoffService(workers, timeout_s)
        self.epoch = self.taken = 0  # the last step, and the last that the workers took
        #: What the attention backend hands layers to while a step or a capture is under way.
        self.current: Emission | None = None
        self.parts: list[HostAttention] = []
        self.spent = CpuTimes(0.0, 0.0)  # by workers and services that are no more

    def renew(self, workers: WorkerPool, spent: CpuTimes) -> None:
        """Another service takes the steps to come, and other workers maybe; those that are over have spent so much."""
        self.spent = spent
        self.workers, self.service, self.taken = workers, HandoffService(workers, self._timeout_s), 0


class Lane(NamedTuple):
    """Host rows that are handed over together, layer by layer."""

    boxes: Boxes
    rows: Sequence[HostRow]  # ``tokens`` includes the new one, whose k and v this step appends
    places: Sequence[int]  # in the batch that the forward of this lane is of


def worker_pool(threads: int, cpus: Sequence[int] | None = None) -> WorkerPool:
    """Threads on cores of their own; on cores shared with others where none are free, which is said.

    Args:
        cpus: cores to choose from, if not all that this process may use.
    """
    try:
        return WorkerPool.on_claimed_cores(threads, reserve=0, cpus=cpus)
    except (NotEnoughCores, RuntimeError) as error:
        logger.warning(f"CPU attention runs on {threads} thread(s) that share cores with others: {error}")
        return WorkerPool(threads)


class HostAttention(Boxes):
    """Owns the workers, the flags and boxes, and the plans.

    Args:
        geometry: of one attention layer.
        pool: ``sglang_neo.host_kv.pool.HostKVPool``.
        workers: closed by ``close``.
        device: "cpu" or "cuda[:n]".
        dtype: of the model.
        max_rows: the most host rows that a step can have.
        timeout_s: longest wait on either side.
        beside: one that steps of other kinds go through, for the same rows and workers; None: there is no other.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        pool: Any,
        workers: WorkerPool,
        device: str,
        dtype: torch.dtype,
        max_rows: int,
        timeout_s: float = 30.0,
        beside: HostAttention | None = None,
    ):
        super().__init__(geometry, dtype, max_rows, device)
        self.geometry, self.pool = geometry, pool
        self._timeout_s = timeout_s
        self.stream: FlagStream = (
            beside.stream if beside is not None else flag_stream(device, timeout_s + _LATE_WATCHDOG_S)
        )
        self.exchange = exchange_for(device)
        self._launches: Launches = beside._launches if beside is not None else Launches(workers, timeout_s)
        self._launches.parts.append(self)
        self._handoffs = Handoffs()
        for layer in range(geometry.layers):
            self._handoffs.add(None, *self.flag_addresses(layer), layer=layer)

    # -- what is one for all that hand over beside each other -------------------------------------------------

    @property
    def workers(self) -> WorkerPool:
        return self._launches.workers

    @property
    def service(self) -> HandoffService:
        return self._launches.service

    @property
    def current(self) -> Emission | None:
        """What the attention backend hands layers to while a step or a capture is under way."""
        return self._launches.current

    @current.setter
    def current(self, emission: Emission | None) -> None:
        self._launches.current = emission

    @property
    def _epoch(self) -> int:
        return self._launches.epoch

    @_epoch.setter
    def _epoch(self, epoch: int) -> None:
        self._launches.epoch = epoch

    @property
    def _taken(self) -> int:
        return self._launches.taken

    @_taken.setter
    def _taken(self, epoch: int) -> None:
        self._launches.taken = epoch

    # -- lifetime ---------------------------------------------------------------------------------------------

    @property
    def launched_epoch(self) -> int:
        """The last step given to the workers; what it names must stay until it is over."""
        return self._epoch

    @property
    def least_rows(self) -> int:
        """Of a batch whose layers hand over."""
        return 1

    def wait_launched(self) -> None:
        self.service.wait_epoch(self._taken, self._timeout_s + _LATE_WATCHDOG_S)

    def cpu_times(self) -> CpuTimes:
        status, spent = self.service.status(), self._launches.spent
        busy = sum(counters.busy_ns for counters in self.workers.counters())
        return CpuTimes(
            spent.busy + busy / 1e9,
            spent.wait + status.device_wait_ns / 1e9,
            spent.between + status.step_wait_ns / 1e9,
            spent.awaited + status.awaited_ns / 1e9,
            spent.awaited_handoffs + status.awaited,
            spent.handoffs + status.handoffs,
            spent.answers + status.answer_ns / 1e9,
            spent.tails + status.tail_ns / 1e9,
            spent.held_up + status.held_up,
        )

    def close(self) -> None:
        """Ends the workers; harmless to repeat."""
        self.service.close()
        self.workers.close()

    # -- a step -----------------------------------------------------------------------------------------------

    def launch(self, rows: Sequence[HostRow], index: Sequence[int]) -> int:
        """Tells the workers of a step that is launched next, with the stream current that it will run on.

        Args:
            rows: their KV; ``tokens`` includes the new one, whose k and v this step appends.
            index: where in the batch they are.

        Returns:
            The step's number, ascending.

        Raises:
            StepRefused: launch the step without hand-offs, and call its host rows failed.
        """
        return self._launch([Lane(self, rows, index)], self._handoffs)

    def _launch(self, lanes: Sequence[Lane], handoffs: Handoffs) -> int:
        """``launch`` of a step in lanes.

        Args:
            handoffs: of the step: of each layer those of the lanes, in their order.
        """
        await_arrivals(row for lane in lanes for row in lane.rows)
        self._epoch += 1
        number = self._epoch & 0x7FFFFFFF
        for lane in lanes:
            lane.boxes.load_control(number, lane.places)
        try:
            self.service.submit(self._descriptor(lanes, handoffs, number))
        except RuntimeError as refused:
            raise StepRefused(str(refused)) from refused
        self._taken = self._epoch
        return self._epoch

    def host_row_index(self) -> torch.Tensor:
        """int64 on the device: where in its batch the step that was launched last has its host rows."""
        return self.control[1 : 1 + self._controlled].long()

    @contextlib.contextmanager
    def emitting(self, capacity: int, flags: bool = True) -> Iterator[Emission]:
        """While the layers of a forward run, or are captured, whose batch has up to ``capacity`` host rows.

        Args:
            flags: False while a graph is warmed up: nobody answers then.
        """
        outer, emission = self.current, self._emission(capacity, flags)
        self.current = emission
        try:
            yield emission
            emission.end()
        finally:
            self.current = outer

    def _emission(self, capacity: int, flags: bool) -> Emission:
        return Emission(self, capacity, flags)

    def for_device(self, batch: Any) -> Any:
        """The part of SGLang's ForwardBatch that the user's attention backend has to prepare itself for."""
        return batch

    def failure(self, epoch: int) -> str | None:
        """Waits until the workers are through with a step; why it failed, or None. Ask before publishing anything."""
        self.service.wait_epoch(epoch, self._timeout_s + _LATE_WATCHDOG_S)
        outcome = self.service.outcome(epoch)
        if outcome in ("complete", "unknown"):
            return None
        fault = self.service.status().fault
        return fault.message if fault is not None else f"the CPU work of step {epoch} is {outcome}"

    def reset(self, timeout_s: float, abandoned: bool = False) -> bool:
        """After a failure, with the device idle: takes steps again. False if a worker is still busy with the old.

        Args:
            abandoned: the device has not come to all hand-offs of the last step, and never will.
        """
        if self.workers.refusal:
            if not self._renew_workers(timeout_s):
                return False
        elif abandoned:
            if not self._renew_service():
                return False
        # Where another rank failed, or a step was refused, workers may be busy with the last step: the device is ahead.
        elif not self.service.wait_epoch(self._taken, timeout_s):
            return False
        try:
            self.service.reset(timeout_s)
        except TimeoutError:
            return False
        for part in self._launches.parts:
            part._begin_anew()
        return True

    def _begin_anew(self) -> None:
        """The service has been reset, and all flags are lowered."""

    def _renew_workers(self, timeout_s: float) -> bool:
        """A thread has ended that should not have: all of them go, and others come."""
        logger.error(f"sglang_neo: {self.workers.refusal}. Starting {self.workers.threads} new CPU attention threads")
        spent = self.cpu_times()
        if not self.service.close(timeout_s) or not self.workers.close(timeout_s):
            return False
        # The cores of those before: the calling thread may have to keep off them.
        self._launches.renew(worker_pool(self.workers.threads, self.workers.cores or None), spent)
        self._lower_flags()
        return True

    def _renew_service(self) -> bool:
        """The workers stay, and forget what they were told."""
        times, busy_before = self.cpu_times(), self._launches.spent.busy
        if not self.service.close(_LAST_JOB_S):
            return False
        self._launches.renew(self.workers, replace(times, busy=busy_before))
        self._lower_flags()
        return True

    def _lower_flags(self) -> None:
        for part in self._launches.parts:
            for boxes in part._all_boxes:
                boxes.flags[:, (_READY, _DONE), 0] = 0

    @property
    def _all_boxes(self) -> Sequence[Boxes]:
        return (self,)

    def plan(self, rows: Sequence[HostRow]) -> Plan:
        """The attention of these rows, for any layer. What they share of the host's radix cache is read once."""
        g, page = self.geometry, self.pool.geometry.page_tokens
        shared = shared_runs([row.pages[: row.cached_pages] for row in rows])
        return Plan(
            self.pool.kernel_pool,
            [row.tokens for row in rows],
            [row.pages for row in rows],
            g.q_heads,
            scale=g.scale,
            soft_cap=g.soft_cap,
            threads=self.workers.threads,
            q_dtype=g.dtype,
            prefix_groups=[(run.rows, run.begin * page, run.end * page) for run in shared],
        )

    def _descriptor(self, lanes: Sequence[Lane], handoffs: Handoffs, number: int) -> Step:
        jobs, kept = [], []
        for lane in lanes:
            of_lane, plan = self._jobs_of(lane.rows, lane.boxes) if lane.rows else ([None] * self.geometry.layers, None)
            jobs.append(of_lane)
            kept += [plan, lane.boxes]
        in_turn = [job for layer in zip(*jobs, strict=True) for job in layer]
        # The jobs of a lane share its plan's workspace: of each lane, one hand-off at a time.
        return Step(self._epoch, number, handoffs.with_jobs(in_turn), overlap=len(lanes), keepalive=kept)

    def _jobs_of(self, rows: Sequence[HostRow], boxes: Boxes) -> tuple[Any, Plan]:
        """By layer, the attention of these rows from and to ``boxes``; and what has to be kept meanwhile."""
        g, n = self.geometry, len(rows)
        plan = self.plan(rows)
        out = boxes.inbox[:n].view(n, g.q_heads, g.head_dim)
        packed = boxes.outbox[:n].view(n, g.q_heads + 2 * g.kv_heads, g.head_dim)
        q, k, v = packed.split((g.q_heads, g.kv_heads, g.kv_heads), dim=1)
        q, k, v, out = (x.expand(g.layers, *x.shape) for x in (q, k, v, out))
        return plan.jobs(range(g.layers), q, out, k=k, v=v), plan


def await_arrivals(rows: Iterable[HostRow]) -> None:
    """Before the workers are told of rows: their KV has come to host memory."""
    for row in rows:
        if row.arrival is not None:
            row.arrival.wait()
            row.arrival = None


class Emission:
    """What the layers of one forward, or of one capture, put on the stream for their host rows, in their order."""

    #: Whether the batch has rows for the device's own attention.
    has_device_rows = True

    def __init__(self, owner: HostAttention, capacity: int, flags: bool, boxes: Boxes | None = None):
        self._owner, self._capacity, self._flags = owner, capacity, flags
        self._boxes = boxes or owner
        self.sent = self.received = 0

    def send(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Hands over the host rows' part of a layer's ``q, k, v`` (``[batch, ...]``, any head layout)."""
        owner, boxes = self._owner, self._boxes
        assert layer == self.sent, f"attention of layer {layer} follows that of layer {self.sent - 1}"
        owner.exchange.pack(q, k, v, boxes.control, boxes.outbox, boxes.flags[layer, _HEADER], self._capacity)
        if self._flags:
            owner.stream.raise_flag(boxes.flag(layer, _READY))
        self.sent += 1

    def handed_over(self) -> None:
        """The device's own attention of the layer has been put on the stream too: the moment for other work."""

    def receive(self, layer: int, out: torch.Tensor) -> None:
        """Puts a layer's attention of the host rows where it belongs in ``out`` (``[batch, ...]``)."""
        owner, boxes = self._owner, self._boxes
        assert layer == self.received
        if self._flags:
            owner.stream.take_flag(boxes.flag(layer, _DONE))
        owner.exchange.unpack(boxes.inbox, boxes.control, out, self._capacity)
        self.received += 1

    def end(self) -> None:
        """After the last layer, in the same capture as the layers."""
        if self._flags and self.sent:
            self._owner.stream.join()
