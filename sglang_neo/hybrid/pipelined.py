"""Pipelined mode (NEO, arXiv 2411.01142): the rows of a decode step in two lanes, two forwards of the model that take
turns at each layer's attention. While the CPU attends to the host rows of one lane, the GPU does the other's linears.

    lane A    device rows and some host rows
    lane B    host rows only: no attention on the device

In stream order: A's projections and hand-off of layer l, its device attention; B's of layer l; A's answer, the rest of
its layer and the projections of layer l + 1; B's answer ... Both lanes have boxes and flags of their own, and a step is
one list of hand-offs, A and B in turn (``cpu_kernels/src/handoff.hpp``).

The two forwards run as greenlets in one thread, so no model code is edited, and any model whose attention goes through
SGLang's attention backends will do. They share one batch, split between two rows; so a CUDA graph of a decode step can
hold both.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import greenlet
import torch

from cpu_kernels.workers import Handoffs, Step
from sglang_neo.hybrid.host_attention import Boxes, Emission, HostAttention, await_arrivals
from sglang_neo.token_manager import HostRow


@dataclass(frozen=True)
class Lanes:
    """Who of a decode batch rides where: indices into SGLang's batch, in the order of the lane."""

    a: Sequence[int]
    b: Sequence[int]  # host rows


class LaneSizes(NamedTuple):
    """Rows of each lane's forward, padding included."""

    a: int
    b: int


class PipelinedAttention(HostAttention):
    """HostAttention for steps in two lanes; steps in one, as in mode sync, run as before. Arguments are the same."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._second = Boxes(self.geometry, self.inbox.dtype, len(self.inbox), str(self.control.device))
        self._lane_handoffs = Handoffs()
        for layer in range(self.geometry.layers):
            for lane, boxes in enumerate(self._lane_boxes):
                self._lane_handoffs.add(None, *boxes.flag_addresses(layer), layer=layer, lane=lane)
        #: While a forward in two lanes is prepared, run or captured: where its batch is split.
        self.sizes: LaneSizes | None = None

    @property
    def _lane_boxes(self) -> tuple[Boxes, Boxes]:
        return self, self._second

    @property
    def _all_boxes(self) -> Sequence[Boxes]:
        return self._lane_boxes

    # -- a step -----------------------------------------------------------------------------------------------

    def launch_lanes(self, rows: Sequence[Sequence[HostRow]], index: Sequence[Sequence[int]]) -> int:
        """As ``launch``, for a step in two lanes: by lane, its host rows and where in the lane they are."""
        await_arrivals(row for lane in rows for row in lane)
        self._epoch += 1
        number = self._epoch & 0x7FFFFFFF
        for boxes, lane_index in zip(self._lane_boxes, index, strict=True):
            boxes.load_control(number, lane_index)
        return self._submit(lambda: self._lane_descriptor(rows, number))

    def _lane_descriptor(self, rows: Sequence[Sequence[HostRow]], number: int) -> Step:
        nothing = [None] * self.geometry.layers
        jobs, kept = [], []
        for boxes, of_lane in zip(self._lane_boxes, rows, strict=True):
            lane_jobs, plan = self._jobs_of(of_lane, boxes) if of_lane else (nothing, None)
            jobs.append(lane_jobs)
            kept += [plan, boxes]
        in_turn = [job for layer in zip(*jobs, strict=True) for job in layer]
        # Lanes have workspaces of their own, so two hand-offs may be in hand at once.
        return Step(self._epoch, number, self._lane_handoffs.with_jobs(in_turn), overlap=2, keepalive=kept)

    # -- the model's side -------------------------------------------------------------------------------------

    def in_lanes(
        self, forward: Callable[..., Any], sizes: LaneSizes, flags: Callable[[], bool] = lambda: True
    ) -> Callable[..., Any]:
        """In place of an SGLang model's ``forward(input_ids, positions, forward_batch, ...)``: the same in two lanes.

        Args:
            sizes: of which the batch is made up.
            flags: asked at each call; False while a graph is warmed up, when nobody answers.
        """

        def forward_in_lanes(input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, **kwargs: Any) -> Any:
            views = [rows_of_batch(batch, 0, sizes.a), rows_of_batch(batch, sizes.a, sizes.a + sizes.b)]
            live = flags()
            emissions = [
                LaneEmission(self, boxes, view.batch_size, live, has_device_rows=boxes is self)
                for boxes, view in zip(self._lane_boxes, views, strict=True)
            ]
            forwards = [lambda view=view: forward(view.input_ids, view.positions, view, **kwargs) for view in views]
            with torch.no_grad():  # models enter and leave it not last in, first out
                outputs = self._take_turns(forwards, emissions)
            layers = self.geometry.layers
            if any(emission.received != layers for emission in emissions):
                raise RuntimeError(f"lanes handed over {[e.received for e in emissions]} of {layers} layers")
            emissions[0].end()
            return joined_output(outputs)

        return forward_in_lanes

    def _take_turns(self, forwards: Sequence[Callable[[], Any]], emissions: Sequence[LaneEmission]) -> list[Any]:
        outputs: dict[int, Any] = {}
        scheduler, outer = greenlet.getcurrent(), self.current

        def run(lane: int) -> None:
            outputs[lane] = forwards[lane]()

        lanes = []
        for emission in emissions:
            lane = greenlet.greenlet(run)
            lane.gr_context = contextvars.copy_context()
            emission.give_way = scheduler.switch
            lanes.append(lane)
        try:
            while len(outputs) < len(lanes):
                for i, lane in enumerate(lanes):
                    if not lane.dead:
                        self.current = emissions[i]
                        lane.switch(i)
        finally:
            self.current = outer
            for lane in lanes:
                if lane:  # suspended in the middle
                    lane.throw()  # the other one failed
        return [outputs[i] for i in range(len(lanes))]

    def for_device(self, batch: Any) -> Any:
        return batch if self.sizes is None else rows_of_batch(batch, 0, self.sizes.a)


class LaneEmission(Emission):
    """What the layers of one lane put on the stream."""

    def __init__(self, owner: PipelinedAttention, boxes: Boxes, capacity: int, flags: bool, has_device_rows: bool):
        super().__init__(owner, capacity, flags, boxes)
        self.has_device_rows = has_device_rows
        self.give_way: Callable[[], Any] = lambda: None

    def handed_over(self) -> None:
        self.give_way()


#: Of SGLang's ForwardBatch: what has a row, or an entry, per request of a decode batch.
_PER_ROW = (
    "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "orig_seq_lens", "seq_lens_cpu", "positions",
    "next_token_logits_buffer", "lora_ids", "rids", "rids_int", "bootstrap_room_ids_int",
)  # fmt: skip


def rows_of_batch(batch: Any, begin: int, end: int) -> Any:
    """Some rows of a decode batch (SGLang's ForwardBatch, or what its graphs have for one), as views of its tensors."""
    rows = copy.copy(batch)  # SGLang puts attributes on it that no field stands for
    rows.batch_size = end - begin
    for name in _PER_ROW:
        if (value := getattr(batch, name, None)) is not None:
            setattr(rows, name, value[begin:end])
    if getattr(batch, "mrope_positions", None) is not None:
        rows.mrope_positions = batch.mrope_positions[:, begin:end]
    if rows.seq_lens_cpu is not None:
        rows.seq_lens_sum = int(rows.seq_lens_cpu.sum())
    return rows


#: In a row of padding: the value of each, as in SGLang's own padding of graphs.
_PADDING = {"seq_lens": 1, "orig_seq_lens": 1, "seq_lens_cpu": 1}


def lay_out(batch: Any, lanes: Lanes, sizes: LaneSizes) -> tuple[Any, torch.Tensor | None]:
    """Rows in the order of the lanes, each lane padded to its size.

    Returns:
        A ForwardBatch, and int64 [rows of ``batch``]: which row of it has the logits of each row of ``batch``; None if
        every row is where it was.
    """
    order = [*lanes.a, *[-1] * (sizes.a - len(lanes.a)), *lanes.b, *[-1] * (sizes.b - len(lanes.b))]
    if order == list(range(batch.batch_size)):
        return batch, None
    places = [0] * batch.batch_size
    for place, row in enumerate(order):
        if row >= 0:
            places[row] = place
    device = batch.input_ids.device
    both = torch.tensor([*order, *places], dtype=torch.int64).to(device, non_blocking=True)
    at, rows = both.split((len(order), len(places)))
    at_cpu = torch.tensor(order)
    changed: dict[str, Any] = {}
    for name in _PER_ROW:
        value = getattr(batch, name)
        if value is None or name == "next_token_logits_buffer":
            continue
        if isinstance(value, list):
            changed[name] = [value[i] if i >= 0 else None for i in order]
        else:
            source = at_cpu if name == "seq_lens_cpu" else at
            taken = value.index_select(0, source.clamp(min=0))
            changed[name] = taken.masked_fill(source < 0, _PADDING.get(name, 0))
    if batch.mrope_positions is not None:
        changed["mrope_positions"] = batch.mrope_positions.index_select(1, at.clamp(min=0)).masked_fill(at < 0, 0)
    if "seq_lens_cpu" in changed:
        changed["seq_lens_sum"] = int(changed["seq_lens_cpu"].sum())
    whole = dataclasses.replace(batch, batch_size=len(order), num_token_non_padded_cpu=len(order), **changed)
    if whole.num_token_non_padded is not None:
        whole.num_token_non_padded = torch.full_like(whole.num_token_non_padded, len(order))
    return whole, rows


def joined_output(outputs: Sequence[Any]) -> Any:
    """SGLang's LogitsProcessorOutput of a whole batch from those of its parts, in order."""
    hidden = [output.hidden_states for output in outputs]
    return dataclasses.replace(
        outputs[0],
        next_token_logits=torch.cat([output.next_token_logits for output in outputs]),
        hidden_states=torch.cat(hidden) if hidden[0] is not None else None,
    )
