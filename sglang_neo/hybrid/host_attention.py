"""Attention of host rows: per step a plan for the CPU workers, per layer a hand-off to them.

One ``HostAttention`` per model runner. A step goes

    with host_attention.step(rows, index) as step:      # plan made, workers told
        for every layer:
            step.send(layer, q, k, v)                   # outbox, ready flag
            ... the device rows' attention ...
            step.receive(layer, out)                    # done flag, inbox

Here the wait comes in the same layer (mode sync of docs/architecture.md); nothing else in it depends on when it comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpu_kernels.attention import Plan
from cpu_kernels.workers import Handoffs, HandoffService, Step, WorkerPool
from sglang_neo.hybrid.geometry import AttentionGeometry
from sglang_neo.hybrid.streams import flag_stream
from sglang_neo.token_manager import HostRow

#: uint32 words in a cache line: flags that share one would bounce between the device's and the CPU's writes.
_LINE = 16


class PoisonedStep(RuntimeError):
    """The CPU side of a step failed: nothing that the step computed for host rows may be used."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds that the workers have spent since the start."""

    busy: float
    wait: float  # while steps ran and no hand-off was there


class HostAttention:
    """Owns the workers, the flags and boxes, and the plans.

    Args:
        geometry: of one attention layer.
        pool: ``sglang_neo.host_kv.pool.HostKVPool``.
        workers: closed by ``close``.
        device: "cpu" or "cuda[:n]".
        dtype: of the model.
        timeout_s: longest wait on either side.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        pool: Any,
        workers: WorkerPool,
        device: str,
        dtype: torch.dtype,
        timeout_s: float = 30.0,
    ):
        self.geometry, self.pool, self.workers = geometry, pool, workers
        self.device, self.dtype = device, dtype
        self._timeout_s = timeout_s
        self._pin = device.startswith("cuda")
        self._stream = flag_stream(device, 2 * timeout_s)
        self._service = HandoffService(workers, timeout_s)
        # Per layer: ready, done, header, each on a line of its own.
        self._flags = torch.zeros((geometry.layers, 3, _LINE), dtype=torch.int32, pin_memory=self._pin)
        self._handoffs = Handoffs()
        for layer in range(geometry.layers):
            ready, done, header = (self.flag(layer, which) for which in range(3))
            self._handoffs.add(None, ready, done, header, layer=layer)
        self._outbox = self._inbox = torch.empty((0, 0), dtype=dtype)
        self._epoch = 0
        self.current: HostStep | None = None

    # -- lifetime ---------------------------------------------------------------------------------------------

    @property
    def launched_epoch(self) -> int:
        """The last step given to the workers; what it names must stay until ``completed_epoch`` reaches it."""
        return self._epoch

    @property
    def completed_epoch(self) -> int:
        return self._service.completed_epoch()

    def wait_launched(self) -> None:
        self._service.wait_epoch(self._epoch, 2 * self._timeout_s)

    def cpu_times(self) -> CpuTimes:
        status = self._service.status()
        busy = sum(counters.busy_ns for counters in self.workers.counters())
        return CpuTimes(busy=busy / 1e9, wait=status.device_wait_ns / 1e9)

    def close(self) -> None:
        """Ends the workers; harmless to repeat."""
        self._service.close()
        self.workers.close()

    # -- a step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, rows: Sequence[HostRow], index: torch.Tensor) -> Iterator[HostStep]:
        """One forward with host rows; only one at a time.

        Args:
            rows: their KV; ``tokens`` includes the new one, whose k and v this step appends.
            index: int64 [rows] on the device, where in the batch they are.

        Raises:
            PoisonedStep: on leaving, if the workers failed. Host pages then hold part of the new token.
            RuntimeError: the workers take no more steps.
        """
        assert self.current is None, "a step with host rows is running"
        for row in rows:
            if row.arrival is not None:
                row.arrival.wait()
                row.arrival = None
        self._epoch += 1
        step = HostStep(self, rows, index, number=self._epoch & 0xFFFFFFFF)
        self._service.submit(step.descriptor(self._epoch))
        self.current = step
        try:
            yield step
        finally:
            self.current = None

    def check(self, epoch: int) -> None:
        """Waits until the workers are through with a step; call it before publishing anything of it.

        Raises PoisonedStep.
        """
        self._service.wait_epoch(epoch, 2 * self._timeout_s)
        outcome = self._service.outcome(epoch)
        if outcome not in ("complete", "unknown"):
            fault = self._service.status().fault
            raise PoisonedStep(fault.message if fault is not None else f"the CPU work of step {epoch} is {outcome}")

    def boxes(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The outbox ``[rows, (q_heads + 2 kv_heads) head_dim]`` and the inbox ``[rows, q_heads head_dim]``.

        All layers use the same: here a layer's answer has been taken out before the next one's questions are put in.
        """
        if rows > len(self._outbox):
            room = max(8, 1 << (rows - 1).bit_length())
            g = self.geometry
            widths = (g.q_heads + 2 * g.kv_heads) * g.head_dim, g.q_heads * g.head_dim
            self._outbox, self._inbox = (
                torch.empty((room, width), dtype=self.dtype, pin_memory=self._pin) for width in widths
            )
        return self._outbox[:rows], self._inbox[:rows]

    @property
    def handoffs(self) -> Handoffs:
        """Of one step, in the order of layers, with nothing to do."""
        return self._handoffs

    def flag(self, layer: int, which: int) -> int:
        """Address of a layer's ready (0), done (1) or header (2) word."""
        return int(self._flags[layer, which].data_ptr())

    @property
    def flags(self) -> torch.Tensor:
        return self._flags

    @property
    def stream(self) -> Any:
        return self._stream


class HostStep:
    """The hand-offs of one step, see HostAttention."""

    def __init__(self, owner: HostAttention, rows: Sequence[HostRow], index: torch.Tensor, number: int):
        self._owner, self._index, self._number = owner, index, number
        g = owner.geometry
        self._outbox, self._inbox = owner.boxes(len(rows))
        self._plan = Plan(
            owner.pool.kernel_pool,
            [row.tokens for row in rows],
            [row.pages for row in rows],
            g.q_heads,
            scale=g.scale,
            soft_cap=g.soft_cap,
            threads=owner.workers.threads,
            q_dtype=g.dtype,
        )
        self.sent = self.received = 0

    def descriptor(self, epoch: int) -> Step:
        owner, g = self._owner, self._owner.geometry
        n = len(self._index)
        out = self._inbox.view(n, g.q_heads, g.head_dim)
        packed = self._outbox.view(n, g.q_heads + 2 * g.kv_heads, g.head_dim)
        q, k, v = packed.split((g.q_heads, g.kv_heads, g.kv_heads), dim=1)
        q, k, v, out = (x.expand(g.layers, *x.shape) for x in (q, k, v, out))
        jobs = self._plan.jobs(range(g.layers), q, out, k=k, v=v)
        # One after the other: the jobs of a plan share its workspace.
        kept = (self._plan, self._outbox, self._inbox, owner.flags)
        return Step(epoch, self._number, owner.handoffs.with_jobs(jobs), overlap=1, keepalive=kept)

    def send(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Hands over the host rows' part of a layer's ``q, k, v`` (``[batch, ...]``, any head layout)."""
        assert layer == self.sent, f"attention of layer {layer} follows that of layer {self.sent - 1}"
        rows = [x.reshape(x.shape[0], -1).index_select(0, self._index) for x in (q, k, v)]
        self._outbox.copy_(torch.cat(rows, dim=1), non_blocking=True)
        self._owner.stream.write(self._owner.flag(layer, 2), self._number)
        self._owner.stream.write(self._owner.flag(layer, 0), 1)
        self.sent += 1

    def receive(self, layer: int, out: torch.Tensor) -> None:
        """Puts a layer's attention of the host rows where it belongs in ``out`` (``[batch, ...]``)."""
        assert layer == self.received
        self._owner.stream.wait(self._owner.flag(layer, 1), 1)
        self._owner.stream.write(self._owner.flag(layer, 1), 0)
        answer = self._inbox.to(out.device, non_blocking=True)
        out.view(out.shape[0], -1).index_copy_(0, self._index, answer)
        self.received += 1
