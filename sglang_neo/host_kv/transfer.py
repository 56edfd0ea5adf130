"""Copies of requests' keys and values between the device pool and the host pool.

To the host, per group of layers::

    current stream   gather the tokens and pack them into pages, in a staging buffer on the device
    copy stream      copy the pages

and the other way round to the device. There are several staging buffers, so gathering and copying overlap, and a buffer
is filled again only after what was in it has been copied. Groups are as large as a buffer: of a request of 1,000 tokens
of a large model some ten layers go together, in one two-dimensional copy per run of consecutive pages.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_neo.host_kv import layout
from sglang_neo.host_kv.packing import Packing, packing_for
from sglang_neo.host_kv.pool import HostKVGeometry, HostKVPool
from sglang_neo.host_kv.streams import Device, Mark, Queue, device_for

#: Device memory for staging, all buffers together.
STAGING_BYTES = 128 << 20
STAGING_BUFFERS = 4
#: CUDA's limit for the distance of rows in a two-dimensional copy; beyond it rows are copied one by one.
MAX_PITCH = 2**31 - 1


class Transfer:
    """A copy under way. Keeps what it needs alive; may be dropped.

    Attributes:
        bytes: of host pages that are copied.
    """

    def __init__(self, bytes: int, mark: Mark, keep: Any = None) -> None:
        self.bytes = bytes
        self._mark = mark
        self._keep = keep

    def wait(self, stream: Any = None) -> None:
        """Makes a torch stream (default: the current one) wait for the end of the copy. Does not block the caller."""
        self._mark.wait(stream)

    def done(self) -> bool:
        """Whether it is over. Does not wait."""
        return self._mark.done()

    def synchronize(self) -> None:
        """Blocks until it is over."""
        self._mark.synchronize()


class Run(NamedTuple):
    """Consecutive host pages."""

    offset: int  # of the first one among the pages of the transfer
    page: int  # the first one
    pages: int


class Rows(NamedTuple):
    """One copy: ``rows`` pieces of ``width`` bytes, from or to these bytes of staging buffer and host pool."""

    stage: int
    host: int
    width: int
    rows: int


class Chunk(NamedTuple):
    """What one staging buffer holds: some layers of some of the pages."""

    first_layer: int
    end_layer: int
    first_page: int  # as an index into the transfer's pages
    end_page: int


def page_runs(pages: Sequence[int]) -> list[Run]:
    """``pages`` as runs of consecutive ones."""
    runs: list[Run] = []
    for offset, page in enumerate(pages):
        if runs and page == runs[-1].page + runs[-1].pages:
            runs[-1] = runs[-1]._replace(pages=runs[-1].pages + 1)
        else:
            runs.append(Run(offset, page, 1))
    return runs


def chunks(layers: range, pages: int, capacity: int) -> Iterator[Chunk]:
    """Layers times pages, cut into pieces of at most ``capacity`` pages: several layers, or a part of one."""
    if pages <= capacity:
        step = capacity // pages
        for layer in range(layers.start, layers.stop, step):
            yield Chunk(layer, min(layer + step, layers.stop), 0, pages)
        return
    for layer in layers:
        for page in range(0, pages, capacity):
            yield Chunk(layer, layer + 1, page, min(page + capacity, pages))


def copies_of_run(
    run: Run, layers: range, unit: int, stage_pitch: int, host_pitch: int, piece_ends: Sequence[int], max_pitch: int
) -> Iterator[Rows]:
    """The copies of a run in some layers: as few as there can be if none may reach across a piece's end.

    Args:
        run: offset counted from the staging buffer's first page.
        layers: the first stands at the staging buffer's beginning.
        unit: bytes of a page of all heads of a layer.
        stage_pitch, host_pitch: bytes from one layer to the next.
        piece_ends: see HostMemory.piece_ends.
        max_pitch: with a larger host_pitch, every copy has one row.
    """
    width = run.pages * unit
    row = 0
    while row < len(layers):
        stage = row * stage_pitch + run.offset * unit
        host = (layers.start + row) * host_pitch + run.page * unit
        room = piece_ends[bisect.bisect_right(piece_ends, host)] - host
        if width > room:  # a page run across the end of a piece
            begin = 0
            while begin < width:
                room = piece_ends[bisect.bisect_right(piece_ends, host + begin)] - host - begin
                part = min(room, width - begin)
                yield Rows(stage + begin, host + begin, part, 1)
                begin += part
            row += 1
            continue
        count = min((room - width) // host_pitch + 1, len(layers) - row) if host_pitch <= max_pitch else 1
        yield Rows(stage, host, width, count)
        row += count


@dataclass
class _Stage:
    buffer: torch.Tensor  # uint8 [bytes] on the device
    free: Mark | None = None  # what was in it has been used


class _Pending(NamedTuple):
    pages: frozenset[int]
    layers: range
    to_host: bool
    transfer: Transfer


class KVTransfer:
    """Copies tokens between one device pool and one host pool. For one thread.

    Args:
        pool: the host pool.
        k, v: per layer [slots, kv_heads, head_dim] on the device, SGLang's buffers (device_pool.device_kv).
        device: default: that of k.
        staging_bytes: device memory to use, in ``buffers`` buffers of equal size; more of it lets the current stream
            run further ahead of the bus.
        max_pitch: host pages of a layer further apart than this are copied layer by layer.
        packing: makes what packs and unpacks pages on the device.

    Raises:
        ValueError: the buffers do not fit the pool, or a staging buffer would not hold a page of a layer.
    """

    def __init__(
        self,
        pool: HostKVPool,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        device: Device | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
        buffers: int = STAGING_BUFFERS,
        max_pitch: int = MAX_PITCH,
        packing: Callable[[HostKVGeometry, Sequence[torch.Tensor], Sequence[torch.Tensor]], Packing] = packing_for,
    ) -> None:
        self.pool, geometry = pool, pool.geometry
        want = (geometry.kv_heads, geometry.head_dim)
        if len(k) != geometry.layers or len(v) != geometry.layers:
            raise ValueError(
                f"the host pool has {geometry.layers} layers, the device pool {len(k)} of K, {len(v)} of V"
            )
        for x in (*k, *v):
            if tuple(x.shape[1:]) != want or x.dtype != k[0].dtype or not x.is_floating_point() or x.itemsize < 2:
                raise ValueError(
                    f"a layer of the device pool must be [slots, {want[0]}, {want[1]}] of one float type, "
                    f"got {list(x.shape)} of {x.dtype}"
                )
        self.device: Device = device if device is not None else device_for(k[0].device)
        self._packing, self._make_packing = packing(geometry, k, v), packing
        self._unit = geometry.kv_heads * geometry.page_bytes
        factor = self._packing.memory_factor  # smaller groups, to bound that memory
        self._capacity = staging_bytes // max(buffers, 1) // factor // self._unit
        if buffers < 1 or self._capacity < 1:
            least = self._unit * max(buffers, 1) * factor
            raise ValueError(f"staging needs {least} bytes at least, in one buffer or more; got {staging_bytes}")
        self._buffer = k[0]  # what all of them are like
        self._host = pool.pages_tensor.view(-1)
        self._piece_ends = pool.piece_ends
        self._max_pitch = max_pitch
        self._stages = [
            _Stage(torch.empty(self._capacity * self._unit, dtype=torch.uint8, device=k[0].device))
            for _ in range(buffers)
        ]
        self._next_stage = 0
        self._out, self._in = self.device.queue(), self.device.queue()
        self._pending: list[_Pending] = []

    def over(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> KVTransfer:
        """Copies between the same host pool and other device buffers, one per layer (layers may share one).

        It uses this one's staging buffers and copy streams, and the two know of each other's copies under way.

        Raises:
            ValueError: the buffers are not such as this one's.
        """
        for x in (*k, *v):
            like = self._buffer
            if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype or x.device != like.device:
                raise ValueError(f"buffers must be like {list(like.shape)} of {like.dtype}, got {list(x.shape)}")
        layers = self.pool.geometry.layers
        if len(k) != layers or len(v) != layers:
            raise ValueError(f"buffers of {layers} layers are needed, got {len(k)} of K, {len(v)} of V")
        other = copy.copy(self)
        other._packing = self._make_packing(self.pool.geometry, k, v)
        return other

    @property
    def exact(self) -> bool:
        """Whether what comes back is bit for bit what went out."""
        return layout.element_dtype(self.pool.geometry.dtype) == self._buffer.dtype

    def to_host(
        self, slots: torch.Tensor, pages: Sequence[int], *, layers: range | None = None, background: bool = False
    ) -> Transfer:
        """Copies the tokens in ``slots``, in order, into host pages: token i to page ``pages[i // page_tokens]``.

        The rest of the last page is zeroed. Copies the other way of the same pages that are under way come first;
        that no worker thread uses them is up to the caller.

        Args:
            slots: [tokens] int64, on the device.
            pages: as many different ones as the tokens fill.
            layers: which; default: all.
            background: False: the tokens are gathered in the current stream, whose later work may overwrite the slots.
                True: in the copy stream, so that the current stream never waits for the bus, but the slots must stay
                as they are until the transfer is done.

        Raises:
            ValueError: the numbers of tokens and pages do not fit, or a page is named twice. IndexError: a page outside
                the pool.
        """
        count, layers = self._check(slots, pages, layers)
        if len(set(pages)) != len(pages):
            raise ValueError(f"a host page is named twice: {list(pages)}")
        current = self.device.current()
        if not count:
            return Transfer(0, current.record())
        tokens = self.pool.geometry.page_tokens
        whole = slots.contiguous()
        if len(pages) * tokens != count:
            whole = slots.new_zeros(len(pages) * tokens)
            whole[:count] = slots
        producer = current
        if background:
            producer = self._out
            producer.wait(current.record())
        for mark in self._conflicts(pages, layers, to_host=True):
            self._out.wait(mark)
        for chunk in chunks(layers, len(pages), self._capacity):
            stage = self._acquire(producer)
            producer.run(self._gather(chunk, stage, whole[chunk.first_page * tokens : chunk.end_page * tokens], count))
            if producer is not self._out:
                self._out.wait(producer.record())
            self._out.run(self._copy(chunk, stage, pages, to_host=True))
            stage.free = self._out.record()
        return self._started(pages, layers, self._out.record(), whole, to_host=True)

    def to_device(
        self, pages: Sequence[int], slots: torch.Tensor, *, layers: range | None = None, background: bool = False
    ) -> Transfer:
        """Copies the first ``len(slots)`` tokens of host pages into device slots; int8 is dequantised.

        Copies into these pages that are under way come first; that no worker thread writes to them any more is up to
        the caller.

        Args:
            background: False: the current stream waits for the bus and writes the slots, so its later work sees them.
                True: the copy stream writes them; whoever reads them must wait for the transfer (``Transfer.wait``).

        See ``to_host`` for the rest.
        """
        count, layers = self._check(slots, pages, layers)
        current = self.device.current()
        if not count:
            return Transfer(0, current.record())
        tokens = self.pool.geometry.page_tokens
        consumer = self._in if background else current
        if background:
            consumer.wait(current.record())
        for mark in self._conflicts(pages, layers, to_host=False):
            self._in.wait(mark)
        for chunk in chunks(layers, len(pages), self._capacity):
            stage = self._acquire(self._in)
            self._in.run(self._copy(chunk, stage, pages, to_host=False))
            if consumer is not self._in:
                consumer.wait(self._in.record())
            consumer.run(self._scatter(chunk, stage, slots[chunk.first_page * tokens : chunk.end_page * tokens]))
            stage.free = consumer.record()
        return self._started(pages, layers, consumer.record(), slots, to_host=False)

    def settle(self) -> None:
        """Makes the current stream wait for every copy to the host that was started. Before a step in which workers
        write: a page that was given back while it was copied to may be another row's by then."""
        self.device.current().wait(self._out.record())

    def synchronize(self) -> None:
        """Blocks until every transfer is over; to be called before the host memory is closed."""
        for pending in self._pending:
            pending.transfer.synchronize()
        self._pending.clear()

    def _check(self, slots: torch.Tensor, pages: Sequence[int], layers: range | None) -> tuple[int, range]:
        geometry = self.pool.geometry
        if slots.dim() != 1 or slots.dtype != torch.int64:
            raise ValueError(f"slots must be int64 [tokens], got {slots.dtype} {list(slots.shape)}")
        count = len(slots)
        if geometry.pages_for_tokens(count) != len(pages):
            raise ValueError(f"{count} tokens fill {geometry.pages_for_tokens(count)} host pages, got {len(pages)}")
        if pages and not 0 <= min(pages) <= max(pages) < self.pool.pages:
            raise IndexError(f"host pages {min(pages)}..{max(pages)} are not all among the {self.pool.pages}")
        everything = range(geometry.layers)
        if layers is None:
            return count, everything
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > geometry.layers:
            raise IndexError(f"layers {layers} are not among the {geometry.layers}")
        return count, layers

    def _conflicts(self, pages: Sequence[int], layers: range, to_host: bool) -> list[Mark]:
        """Transfers of these pages under way in the other direction; those of one direction are in order."""
        self._pending[:] = [entry for entry in self._pending if not entry.transfer.done()]
        return [
            entry.transfer._mark
            for entry in self._pending
            if entry.to_host != to_host
            and entry.layers.start < layers.stop
            and layers.start < entry.layers.stop
            and not entry.pages.isdisjoint(pages)
        ]

    def _started(self, pages: Sequence[int], layers: range, mark: Mark, keep: Any, to_host: bool) -> Transfer:
        transfer = Transfer(len(pages) * len(layers) * self._unit, mark, keep)
        self._pending.append(_Pending(frozenset(pages), layers, to_host, transfer))
        return transfer

    def _acquire(self, queue: Queue) -> _Stage:
        """The next buffer; the queue waits until it is free."""
        stage = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % len(self._stages)
        if stage.free is not None and not stage.free.done():
            queue.wait(stage.free)
        return stage

    def _copy(self, chunk: Chunk, stage: _Stage, pages: Sequence[int], to_host: bool) -> Callable[[], None]:
        stage_pitch = (chunk.end_page - chunk.first_page) * self._unit
        host_pitch = self.pool.pages * self._unit
        layers = range(chunk.first_layer, chunk.end_layer)
        copies = [
            rows
            for run in page_runs(pages[chunk.first_page : chunk.end_page])
            for rows in copies_of_run(
                run, layers, self._unit, stage_pitch, host_pitch, self._piece_ends, self._max_pitch
            )
        ]

        def work() -> None:
            for at, host, width, count in copies:
                if to_host:
                    self.device.copy_rows(self._host, host, host_pitch, stage.buffer, at, stage_pitch, width, count)
                else:
                    self.device.copy_rows(stage.buffer, at, stage_pitch, self._host, host, host_pitch, width, count)

        return work

    def _staged(self, chunk: Chunk, stage: _Stage) -> torch.Tensor:
        """The chunk's part of the buffer as pages, [layers, pages, kv_heads, page_bytes]."""
        layers, pages = chunk.end_layer - chunk.first_layer, chunk.end_page - chunk.first_page
        used = stage.buffer[: layers * pages * self._unit]
        return used.view(layers, pages, self.pool.geometry.kv_heads, self.pool.geometry.page_bytes)

    def _gather(self, chunk: Chunk, stage: _Stage, slots: torch.Tensor, tokens: int) -> Callable[[], None]:
        """Device slots to staged pages. ``slots``: of whole pages; ``tokens``: of the whole transfer."""
        layers = range(chunk.first_layer, chunk.end_layer)
        valid = min(tokens - chunk.first_page * self.pool.geometry.page_tokens, len(slots))
        return lambda: self._packing.gather(layers, slots, valid, self._staged(chunk, stage))

    def _scatter(self, chunk: Chunk, stage: _Stage, slots: torch.Tensor) -> Callable[[], None]:
        """Staged pages to device slots."""
        layers = range(chunk.first_layer, chunk.end_layer)
        return lambda: self._packing.scatter(layers, self._staged(chunk, stage), slots)
