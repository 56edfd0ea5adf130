"""Deferred mode (APEX, arXiv 2506.03296) on the device: slot rows that hand over now and go on in the next such step.

Bookkeeping of who is where stands in ``sglang_neo.planning.cohorts``. The layers of a deferred step emit, in stream
order (``DeferredEmission``):

    ahead of it             of layer after layer: wait done = 1; done = 0; inbox -> incoming
    attention of layer l    incoming -> slot rows, slot rows -> outgoing; residuals of the slot rows and the parked ones
                            change places
    beside what follows     outgoing -> outbox; ready = 1

So the CPU has from one deferred step to the next for a layer's rows, and between the kernels of a layer stands one that
touches the device's memory only: a flag or a word of the host's memory stops a stream for microseconds, a stream's end
in host memory for more. Boxes, flags and parking places are one per layer, all flags ``done`` are raised before the
first step, and everything a layer names stays where it is.

The residual is reached by hooks on the model's decoder layers, which must be of the shape that ``hook_layers`` expects:
``DEFERRABLE`` lists the models whose layers are, and ``sglang_neo.hybrid.parity`` tries at start.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpu_kernels.workers import Step, WorkerPool
from sglang_neo.errors import UsageError
from sglang_neo.hybrid.exchange import NO_ROW
from sglang_neo.hybrid.geometry import AttentionGeometry
from sglang_neo.hybrid.host_attention import (
    _DONE,
    _HEADER,
    _READY,
    Emission,
    HostAttention,
    StepRefused,
    await_arrivals,
)
from sglang_neo.hybrid.parking import RECORDED_STEPS, Parked, parking_for
from sglang_neo.tensors import pinned, to_device
from sglang_neo.token_manager import HostRow

#: Models whose decoder layers are ``layer(positions, hidden_states, forward_batch, residual)``, the residual being what
#: a module ``input_layernorm`` returns beside its output, or at the first layer takes, until it goes to a module
#: ``post_attention_layernorm`` together with the attention's output.
DEFERRABLE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def not_deferrable(model: Any, server_args: Any) -> str | None:
    """Why this server cannot run deferred steps; None if nothing is known to stand in the way."""
    name = type(model).__name__
    if name not in DEFERRABLE:
        return f"the layers of {name} are not known to be of a shape that rows can be parked in"
    if server_args.enable_lora:
        return "rows of different adapters (--enable-lora) would meet in one slot"
    if server_args.enable_flashinfer_allreduce_fusion or server_args.enable_aiter_allreduce_fusion:
        return "a fused all-reduce takes the place of the norm where residuals are exchanged"
    return None


@dataclass(frozen=True)
class DeferredStep:
    """What the model runner must know of a deferred step. Lists *by slot* may be shorter than there are slots."""

    #: Cohorts whose rows have changed since the step before, the one that enters among them: by slot the KV of the row,
    #: None where it was discarded.
    changed: Mapping[int, Sequence[HostRow | None]]
    arriving: Sequence[int]  # by layer, the cohort
    entering: Sequence[int]  # by slot, the request slot, by which SGLang relays the token
    positions: Sequence[int]  # by slot, of the entering tokens
    tickets: Sequence[int]  # by slot
    device_rows: Sequence[int]  # where in SGLang's batch
    leaving: Sequence[tuple[int, int]]  # where in SGLang's batch, and the slot
    tokens: torch.Tensor  # int64 [request slots] on the device: the newest token of every request
    reqs: Sequence[Any] = ()  # that leave
    others: Callable[[], Iterable[Any]] = tuple  # asked if the step fails: requests that lose their work with it


class DeferredAttention(HostAttention):
    """Host rows' attention in deferred steps. Arguments beyond ``HostAttention``'s:

    slots: rows of a deferred step's batch that host rows pass through.
    hidden_size: of the model.
    spare_page: of the host pool, nobody's: rows discarded in mid-token get their k and v appended there.
    record: whether the device records who arrived and resumed where.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        pool: Any,
        workers: WorkerPool,
        device: str,
        dtype: torch.dtype,
        timeout_s: float,
        *,
        slots: int,
        hidden_size: int,
        spare_page: int,
        record: bool = False,
        beside: HostAttention | None = None,
    ):
        super().__init__(geometry, pool, workers, device, dtype, slots, timeout_s, beside)
        self.slots = slots
        self._spare_page = spare_page
        layers, pin = geometry.layers, device.startswith("cuda")
        self.outbox, self.inbox = (
            torch.zeros((layers, *box.shape), dtype=dtype, pin_memory=pin) for box in (self.outbox, self.inbox)
        )
        self.control = torch.full((1 + 2 * slots,), NO_ROW, dtype=torch.int32, device=device)
        self.parking = parking_for(device)
        self._tickets = torch.zeros(slots, dtype=torch.int32, device=device)
        outgoing, incoming = (torch.zeros(box.shape, dtype=dtype, device=device) for box in (self.outbox, self.inbox))
        residuals = torch.zeros((layers, slots, hidden_size), dtype=dtype, device=device)
        positions = torch.zeros((layers, slots), dtype=torch.int64, device=device)
        tickets = torch.zeros((layers, slots), dtype=torch.int32, device=device)
        self._parked_memory = outgoing, residuals, positions, tickets
        #: int32 [layers, RECORDED_STEPS, 2, slots, 2], see ``Parked.record``.
        self.record = (
            torch.zeros((layers, RECORDED_STEPS, 2, slots, 2), dtype=torch.int32, pin_memory=pin) if record else None
        )
        self.parked = [
            Parked(
                self.outbox[i],
                self.inbox[i],
                self.flags[i, _HEADER],
                outgoing[i],
                incoming[i],
                residuals[i],
                positions[i],
                tickets[i],
                self.record[i] if self.record is not None else None,
            )
            for i in range(layers)
        ]
        #: By cohort, its plan's jobs for all layers; None: it has no rows.
        self._jobs: list[Any] = [None] * (layers + 1)
        self._constants: dict[Any, torch.Tensor] = {}
        #: The step whose hand-offs are the newest that the last one's results rest on: the one before it. 0: none does.
        self.rests_on = 0
        self._answering = 0
        self._raise_done()

    def _raise_done(self) -> None:
        self.flags[:, _DONE, 0] = 1

    def _begin_anew(self) -> None:
        """Everybody who was parked is lost."""
        self.clear()
        self._answering = 0
        self._raise_done()

    @property
    def last_step(self) -> int:
        """The number of the last deferred step; 0: there was none since the start, or since a failure."""
        return self._answering

    def clear(self) -> None:
        """Forgets everybody who is parked, in stream order; graphs may be captured then."""
        self.control.fill_(NO_ROW)
        for memory in (*self._parked_memory, self._tickets):
            memory.zero_()
        self._jobs = [None] * len(self._jobs)

    @property
    def least_rows(self) -> int:
        return self.slots

    def behind(self) -> bool:
        """Whether the CPU has more hand-offs in hand than it should have when a deferred step begins: half of a step's,
        which leaves it the time until the device comes to the later half."""
        return self.service.lag() > max(1, self.geometry.layers // 2)

    # -- a step -----------------------------------------------------------------------------------------------

    def launch_step(self, step: DeferredStep) -> int:
        """As ``launch``: tells the workers of a deferred step that is launched next. Raises StepRefused likewise."""
        await_arrivals(row for rows in step.changed.values() for row in rows if row is not None)
        self.rests_on = self._answering
        epoch = self._epoch + 1
        number = epoch & 0x7FFFFFFF
        first, free = len(step.device_rows), [0] * (self.slots - len(step.tickets))
        places = range(first, first + self.slots)
        control = pinned([number, *places, *step.tickets, *free], self.control.device, torch.int32)
        self.control.copy_(control, non_blocking=True)
        for cohort, rows in step.changed.items():
            self._jobs[cohort] = self._cohort_jobs(rows)
        jobs = [self._jobs[cohort] for cohort in step.arriving]
        of_layers = [of_cohort[layer] if of_cohort is not None else None for layer, of_cohort in enumerate(jobs)]
        kept = (self.outbox, self.inbox, self.flags)
        try:
            handoffs = self._handoffs.with_jobs(of_layers)
            # Each job is another cohort's, with a workspace of its own: a late worker holds up one job only.
            overlap = self.geometry.layers
            self.service.submit(Step(epoch, number, handoffs, overlap=overlap, keepalive=kept, deferred=True))
        except RuntimeError as refused:
            raise StepRefused(str(refused)) from refused
        self._epoch = self._taken = self._answering = epoch
        return epoch

    def _cohort_jobs(self, rows: Sequence[HostRow | None]) -> Any:
        """The attention of a cohort's rows in all layers; None if there are none."""
        if all(row is None for row in rows):
            return None
        # Every row needs a place for its k and v. Of discarded ones each has a token of the spare page to itself.
        there = [HostRow([self._spare_page], 1 + slot) if row is None else row for slot, row in enumerate(rows)]
        plan = self.plan(there)
        g, n = self.geometry, len(rows)
        out = self.inbox[:, :n].view(g.layers, n, g.q_heads, g.head_dim)
        packed = self.outbox[:, :n].view(g.layers, n, g.q_heads + 2 * g.kv_heads, g.head_dim)
        q, k, v = packed.split((g.q_heads, g.kv_heads, g.kv_heads), dim=2)
        return plan.jobs(range(g.layers), q, out, k=k, v=v)

    def _emission(self, capacity: int, flags: bool) -> Emission:
        return DeferredEmission(self, flags)  # whatever the capacity: there are always ``slots`` rows

    # -- SGLang's batch, with slot rows ------------------------------------------------------------------------

    def with_slots(self, batch: Any, step: DeferredStep) -> tuple[Any, torch.Tensor]:
        """The batch that the model runs: the device rows, then the slot rows, which hold the entering tokens.

        Args:
            batch: SGLang's ForwardBatch of the device rows and the rows that leave.

        Returns:
            A ForwardBatch, and int64 [rows of ``batch``]: which row of it has the logits of each row of ``batch``.
        """
        slots, kept, entering = self.slots, len(step.device_rows), len(step.entering)
        sources = [0] * batch.batch_size
        for place, row in enumerate(step.device_rows):
            sources[row] = place
        for row, slot in step.leaving:
            sources[row] = kept + slot
        ints = to_device([*step.device_rows, *step.entering, *step.positions, *sources], batch.input_ids.device)
        device_rows, requests, positions, rows = ints.split((kept, entering, entering, len(sources)))
        in_front = list(step.device_rows) == list(range(kept))

        def joined(of_batch: torch.Tensor, of_slots: torch.Tensor | None, fill: int) -> torch.Tensor:
            # One launch where possible: these stand between two steps.
            of_device = of_batch[:kept] if in_front else of_batch.index_select(0, device_rows)
            if of_slots is None:
                return torch.cat([of_device, self._filled(fill, of_batch)])
            return torch.cat([of_device, of_slots.to(of_batch.dtype), self._filled(fill, of_batch)[entering:]])

        lengths = batch.seq_lens_cpu
        if lengths is not None:
            lengths = torch.cat([lengths[list(step.device_rows)], lengths.new_ones(slots)])
        # To the attention backend a slot row is padding: request slot 0, KV slot 0, length 1.
        size = kept + slots
        whole = dataclasses.replace(
            batch,
            batch_size=size,
            input_ids=joined(batch.input_ids, step.tokens.index_select(0, requests), 0),
            positions=joined(batch.positions, positions, 0),
            req_pool_indices=joined(batch.req_pool_indices, None, 0),
            out_cache_loc=joined(batch.out_cache_loc, None, 0),
            seq_lens=joined(batch.seq_lens, None, 1),
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()) if lengths is not None else None,
            orig_seq_lens=joined(batch.orig_seq_lens, None, 1) if batch.orig_seq_lens is not None else None,
            lora_ids=[None] * size,
            rids=None,
            num_token_non_padded_cpu=size,
        )
        if whole.num_token_non_padded is not None:
            whole.num_token_non_padded = torch.full_like(whole.num_token_non_padded, size)
        return whole, rows

    def _filled(self, value: int, like: torch.Tensor) -> torch.Tensor:
        """[slots] of one value, never written to."""
        key = value, like.dtype, like.device
        if key not in self._constants:
            self._constants[key] = torch.full((self.slots,), value, dtype=like.dtype, device=like.device)
        return self._constants[key]


def rows_of_output(output: Any, rows: torch.Tensor) -> Any:
    """SGLang's LogitsProcessorOutput with these rows of what it has."""
    hidden = output.hidden_states
    return dataclasses.replace(
        output,
        next_token_logits=output.next_token_logits.index_select(0, rows),
        hidden_states=hidden.index_select(0, rows) if hidden is not None else None,
    )


class DeferredEmission(Emission):
    """What the layers of one deferred forward, or of one capture, put on the stream, in their order."""

    def __init__(self, owner: DeferredAttention, flags: bool):
        super().__init__(owner, owner.slots, flags)
        self._attention = owner
        self._positions: torch.Tensor | None = None
        self._answers: Sequence[Callable[[], None]] = ()
        self._given: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._residual: torch.Tensor | None = None
        #: Layers whose residual was exchanged and came to the norm after attention.
        self.checked = 0

    def begin(self, positions: torch.Tensor) -> None:
        """Before the first layer. ``positions``: int64 [batch], which the layers read and this changes."""
        a = self._attention
        self._positions = positions

        def fetch(layer: int) -> None:
            if self._flags:
                a.stream.take_flag(a.flag(layer, _DONE))
            a.parking.fetch(a.parked[layer])

        self._answers = a.stream.ahead([functools.partial(fetch, layer) for layer in range(a.geometry.layers)])

    def send(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        # The outbox is free only when the last step's rows of this layer have been answered: see receive.
        assert layer == self.sent, f"layer {layer} follows {self.sent} layers"
        self._given = q, k, v
        self.sent += 1

    def receive(self, layer: int, out: torch.Tensor) -> None:
        a, parked = self._attention, self._attention.parked[layer]
        assert self._given is not None and self._positions is not None and layer == self.received
        assert self._residual is not None, f"the input norm of layer {layer} has not met a residual"
        self._answers[layer]()
        a.parking.hand_over(
            *self._given, out, self._residual, self._positions, a._tickets, a.control, parked, layer == 0
        )

        def send() -> None:
            a.parking.send(parked, a.control)
            if self._flags:
                a.stream.raise_flag(a.flag(layer, _READY))

        a.stream.beside(send)
        self._given = None
        self.received += 1

    def residual_begins(self, residual: torch.Tensor) -> None:
        """Of the layer whose attention comes next: [batch, hidden size]."""
        self._residual = residual

    def residual_ends(self, layer: int, residual: torch.Tensor) -> None:
        """Counts it if it is the one that was exchanged: in all layers, if they are as ``DEFERRABLE`` says."""
        assert layer == self.received - 1
        if self._residual is not None and residual.data_ptr() == self._residual.data_ptr():
            self.checked += 1
        self._residual = None

    def end(self) -> None:
        if self._positions is None:
            return  # a graph was replayed, whose layers were checked when it was captured
        self._attention.stream.join()
        layers = self._attention.geometry.layers
        if not self.received == self.checked == layers:
            raise UsageError(
                f"of the model's {layers} layers {self.received} let rows change places, {self.checked} residuals"
            )


def hook_layers(model: Any, attention: DeferredAttention) -> None:
    """Lets deferred forwards of an SGLang model (one of DEFERRABLE) reach positions and residuals. For good."""
    layers = model.model.layers
    assert len(layers) == attention.geometry.layers

    def begin(module: Any, args: tuple[Any, ...]) -> None:
        if isinstance(attention.current, DeferredEmission):
            attention.current.begin(args[0])

    def residual_begins(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(attention.current, DeferredEmission):
            attention.current.residual_begins(output[1] if isinstance(output, tuple) else args[0])

    layers[0].register_forward_pre_hook(begin)
    for i, layer in enumerate(layers):

        def residual_ends(module: Any, args: tuple[Any, ...], i: int = i) -> None:
            if isinstance(attention.current, DeferredEmission):
                attention.current.residual_ends(i, args[1])

        layer.input_layernorm.register_forward_hook(residual_begins)
        layer.post_attention_layernorm.register_forward_pre_hook(residual_ends)
