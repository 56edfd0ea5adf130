"""Pipelined mode (NEO, arXiv 2411.01142): the rows of a decode step in two lanes, two forwards of the model that take
turns at each layer's attention. While the CPU attends to the host rows of one lane, the GPU does the other's linears.

    lane A    device rows and some host rows, or a prefill
    lane B    host rows only: no attention on the device

In stream order: A's projections and hand-off of layer l, its device attention; B's of layer l; A's answer, the rest of
its layer and the projections of layer l + 1; B's answer ... Both lanes have boxes and flags of their own, and a step is
one list of hand-offs, A and B in turn (``cpu_kernels/src/handoff.hpp``).

The two forwards run as greenlets in one thread, so no model code is edited, and any model whose attention goes through
SGLang's attention backends will do. In a decode step they share one batch, split between two rows; so a CUDA graph of
it can hold both. Beside a prefill, lane B is a decode batch of its own.
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

from cpu_kernels.workers import Handoffs
from sglang_neo.hybrid.host_attention import Boxes, Emission, HostAttention, Lane
from sglang_neo.tensors import to_device
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
        self._lane_handoffs, self._second_handoffs = Handoffs(), Handoffs()
        for layer in range(self.geometry.layers):
            for lane, boxes in enumerate(self._lane_boxes):
                self._lane_handoffs.add(None, *boxes.flag_addresses(layer), layer=layer, lane=lane)
            self._second_handoffs.add(None, *self._second.flag_addresses(layer), layer=layer, lane=1)
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
        lanes = [Lane(*of_lane) for of_lane in zip(self._lane_boxes, rows, index, strict=True)]
        return self._launch(lanes, self._lane_handoffs)

    def launch_beside(self, rows: Sequence[HostRow]) -> int:
        """As ``launch``, for the host rows that are lane B of a prefill, in their order."""
        return self._launch([Lane(self._second, rows, range(len(rows)))], self._second_handoffs)

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
            return joined_output(self._take_turns(forwards, emissions))

        return forward_in_lanes

    def beside(self, forward: Callable[..., Any], decode: Any, outputs: list[Any], flags: bool) -> Callable[..., Any]:
        """In place of an SGLang model's ``forward`` of a prefill: the same, with a decode batch in lane B.

        Args:
            decode: SGLang's ForwardBatch of the host rows that were launched.
            outputs: gets what the model returns of it.
            flags: False if the workers take no step: what it returns is meaningless then.
        """

        def forward_beside(input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, **kwargs: Any) -> Any:
            forwards = [
                lambda: forward(input_ids, positions, batch, **kwargs),
                lambda: forward(decode.input_ids, decode.positions, decode),
            ]
            emissions = [
                PrefillLane(self, self, 0, flags, has_device_rows=True),
                LaneEmission(self, self._second, decode.batch_size, flags, has_device_rows=False),
            ]
            of_prefill, of_decode = self._take_turns(forwards, emissions)
            outputs.append(of_decode)
            return of_prefill

        return forward_beside

    def _take_turns(self, forwards: Sequence[Callable[[], Any]], emissions: Sequence[LaneEmission]) -> list[Any]:
        """What the forwards return, each of which gives way to the other at the attention of each layer."""
        with torch.no_grad():  # models enter and leave it not last in, first out
            outputs = self._in_turn(forwards, emissions)
        done = [emission.received for emission in emissions]
        if any(layers != self.geometry.layers for layers in done):
            raise RuntimeError(f"lanes went through the attention of {done} of {self.geometry.layers} layers")
        emissions[-1].end()
        return outputs

    def _in_turn(self, forwards: Sequence[Callable[[], Any]], emissions: Sequence[LaneEmission]) -> list[Any]:
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


class PrefillLane(LaneEmission):
    """A prefill in lane A: it hands nothing over. ``received``: layers whose attention is on the stream."""

    def handed_over(self) -> None:
        self.received += 1
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
    both = to_device([*order, *places], device)
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
        next_token_logits=_joined([output.next_token_logits for output in outputs]),
        hidden_states=_joined(hidden) if hidden[0] is not None else None,
    )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts. Where these lie one behind the other, as slices of the logits buffer that SGLang's graphs
    share, it is a view: a copy would be memory of its own in every graph, a vocabulary for each of its rows."""
    whole = parts[0]
    for part in parts[1:]:
        behind = whole.storage_offset() + whole.shape[0] * whole.stride(0)
        if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or (
            part.storage_offset() != behind or part.stride() != whole.stride()
        ):
            return torch.cat(list(parts))
        rows = whole.shape[0] + part.shape[0]
        whole = whole.as_strided((rows, *whole.shape[1:]), whole.stride(), whole.storage_offset())
    return whole
