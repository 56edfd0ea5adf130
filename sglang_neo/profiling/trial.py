"""Steps that nobody asked for, on the real model runner, to see what they take.

Nobody may own KV yet: lines of ``req_to_token`` are written and zeroed again, and what lies in slots and pages
afterwards is never read. Where ranks share a model they all run the same trials, and what counts is the slowest of
them, so that all decide alike.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from cpu_kernels.workers import device_wait, device_write
from sglang_neo.hybrid.deferred import DeferredStep
from sglang_neo.ranks import least_of_all_ranks
from sglang_neo.token_manager import HostRow

#: A measurement goes on for about so long, after its first run, and for so many runs at most. A first run of less than
#: ``_REPEATED`` seconds is followed by another one at least.
_SECONDS, _MOST, _REPEATED = 0.04, 9, 1.0
#: Longest wait for the workers' answer to a hand-off, seconds.
_TIMEOUT_S = 30.0


class TrialError(RuntimeError):
    """A trial did not work: the machine cannot be measured now."""


def _copied(batch: Any) -> Any:
    """SGLang's ForwardBatch with tensors of its own, copied where they are. One made of lists would not do for a step
    that is launched ahead: what goes to the device from pageable memory waits for all steps before."""
    copied = copy.copy(batch)
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            setattr(copied, name, value.clone())
    return copied


class Trials:
    """Runs trials on a model runner with a host side.

    Args:
        runner: ``sglang_neo.model_runner.NeoModelRunner``, its attention backends and graphs made.
    """

    def __init__(self, runner: Any):
        self.runner, self.host = runner, runner.neo_host
        self.attention = runner.neo_host.attention
        self.page = int(runner.page_size)
        self.device_tokens = int(runner.token_to_kv_pool_allocator.size)
        self.most_rows = int(min(runner.req_to_token_pool.req_to_token.shape[0] - 1, runner.max_running_requests))
        self.context = int(runner.model_config.context_len)
        self.host_page = self.host.pool.geometry.page_tokens
        self.host_pages = int(self.host.pages.count)
        #: Of deferred steps; 0: there are none.
        self.slots = self.host.deferred.slots if self.host.deferred is not None else 0
        #: What the last run of ``seconds`` took, and all runs so far, what compiled or was disturbed not counted.
        self.last = self.spent = 0.0
        self._cuda = str(runner.device).startswith("cuda")
        self._launches_ahead = self._cuda and not runner.server_args.disable_overlap_schedule

    # -- time --------------------------------------------------------------------------------------------------

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of one run, from its call until the device has finished it."""
        return self._least(lambda: self._once(run))

    def interval(self, launch: Callable[[], int | None]) -> float:
        """Of one step, if steps follow each other: with overlap scheduling the next one is launched while it runs, so
        what launching takes is hidden.

        Args:
            launch: a step; returns the number of its hand-offs, None if it has none.
        """
        if not self._launches_ahead:
            return self.seconds(lambda: self._judge(launch()))

        def three() -> float:
            ends: list[torch.cuda.Event] = []
            epochs: list[int | None] = []
            for _ in range(3):
                epochs.append(launch())
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
                if len(ends) > 1:
                    ends[-2].synchronize()
                    self._judge(epochs[-2])
            self.synchronize()
            self._judge(epochs[-1])
            return self.slowest(ends[1].elapsed_time(ends[2]) / 1e3)

        return self._least(three, runs=3)

    def _judge(self, epoch: int | None) -> None:
        if epoch is not None and (failure := self.attention.failure(epoch)):
            raise TrialError(failure)

    def _least(self, measure: Callable[[], float], runs: int = 1) -> float:
        """The least of some measurements of ``runs`` runs each: whatever disturbs a run makes it longer."""
        best, more = measure(), 0
        # How many follow is decided by the best so far: the first one may have compiled something, or been disturbed.
        while more < min(max(int(_SECONDS / max(runs * best, 1e-9)), int(self._cuda or best < _REPEATED)), _MOST):
            best, more = min(best, measure()), more + 1
        self.last = best
        self.spent += runs * (1 + more) * best
        return best

    def _once(self, run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        self.synchronize()
        return self.slowest(time.perf_counter() - begin)

    def slowest(self, seconds: float) -> float:
        return -least_of_all_ranks(self.runner, -int(seconds * 1e9)) / 1e9

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    # -- the device --------------------------------------------------------------------------------------------

    def decode(self, rows: int, tokens_each: int) -> float:
        """Seconds of a decode step of device rows that have so many tokens each, the new one included."""
        with self._on_device([tokens_each] * rows) as slots:
            last = [line[tokens_each - 1] for line in slots]
            batch = self._decode_batch([tokens_each] * rows, torch.stack(last))

            def step() -> None:
                self.runner.forward(batch)

            return self.interval(step)

    def extend(self, lengths: Sequence[int], prefix: int = 0) -> float:
        """Seconds of a prefill of so many new tokens per prompt, each behind ``prefix`` tokens of its own."""
        ends = [prefix + length for length in lengths]
        with self._on_device(ends) as slots:
            new = torch.cat([line[prefix:] for line in slots])
            batch = self._extend_batch(lengths, prefix, new)
            return self.seconds(lambda: self.runner.forward(batch))

    @contextlib.contextmanager
    def _on_device(self, lengths: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Slots of request slots 1, 2, ... for so many tokens, int64; distinct as far as there are enough."""
        table, pages = self.runner.req_to_token_pool.req_to_token, self.device_tokens // self.page
        lines = []
        for row, length in enumerate(lengths):
            needed = -(-length // self.page)
            starts = max(1, pages // needed)
            first = (1 + (row % starts) * needed) * self.page
            lines.append(torch.arange(first, first + length, device=table.device))
            table[1 + row, :length] = lines[-1].to(table.dtype)
        try:
            yield lines
        finally:
            table[1 : 1 + len(lengths)].zero_()

    def _on(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.runner.device)

    def _common(self, rows: int, lengths: Sequence[int]) -> dict[str, Any]:
        return {
            "batch_size": rows,
            "req_pool_indices": self._on(range(1, 1 + rows)),
            "seq_lens": self._on(lengths),
            "seq_lens_sum": sum(lengths),
            "seq_lens_cpu": torch.tensor(lengths, dtype=torch.int64),
            "capture_hidden_mode": CaptureHiddenMode.NULL,
            "lora_ids": [None] * rows,
        }

    def _positions(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        along = {"mrope_positions": positions.repeat(3, 1)} if self.runner.model_config.model_is_mrope else {}
        return {"positions": positions, **along}

    def _decode_batch(self, lengths: Sequence[int], slots: torch.Tensor) -> Any:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=self._on([3] * len(lengths)),
            out_cache_loc=slots,
            **self._positions(self._on([length - 1 for length in lengths])),
            **self._common(len(lengths), lengths),
        )

    def _extend_batch(self, lengths: Sequence[int], prefix: int, slots: torch.Tensor) -> Any:
        rows, ends = len(lengths), [prefix + length for length in lengths]
        starts = [0, *accumulate(lengths)][:-1]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=self._on([3] * sum(lengths)),
            out_cache_loc=slots,
            **self._positions(torch.cat([torch.arange(prefix, end, device=self.runner.device) for end in ends])),
            extend_num_tokens=sum(lengths),
            extend_seq_lens=self._on(lengths, torch.int32),
            extend_prefix_lens=self._on([prefix] * rows, torch.int32),
            extend_start_loc=self._on(starts, torch.int32),
            extend_seq_lens_cpu=list(lengths),
            extend_prefix_lens_cpu=[prefix] * rows,
            extend_logprob_start_lens_cpu=list(lengths),
            is_extend_in_batch=True,
            **self._common(rows, ends),
        )

    # -- the CPU -----------------------------------------------------------------------------------------------

    def host_rows(self, rows: int, tokens: int, shared: int = 0) -> list[HostRow]:
        """Rows of ``tokens`` tokens in all besides ``shared`` ones that are the same for all; at least one each."""
        common = list(range(shared // self.host_page))
        found, page = [], len(common)
        for _ in range(rows):
            own = max(1, tokens // rows)
            needed = -(-own // self.host_page)
            room = max(1, self.host_pages - len(common))
            pages = [len(common) + (page - len(common) + i) % room for i in range(needed)]
            page += needed
            found.append(HostRow([*common, *pages], len(common) * self.host_page + own, cached_pages=len(common)))
        return found

    def handoffs(self, rows: Sequence[HostRow]) -> float:
        """Seconds per layer from ready to done, with this thread as the device; sync order. The launch is not counted:
        it is a part of the step's."""
        attention = self.attention
        layers = range(attention.geometry.layers)

        def layer_by_layer() -> float:
            epoch = attention.launch(rows, range(len(rows)))
            begin = time.perf_counter()
            for layer in layers:
                ready, done, header = attention.flag_addresses(layer)
                device_write(header, epoch & 0x7FFFFFFF)
                device_write(ready, 1)
                if not device_wait(done, 1, _TIMEOUT_S):
                    raise TrialError("the CPU workers do not answer")
                device_write(done, 0)
            seconds = time.perf_counter() - begin
            self._judge(epoch)
            return self.slowest(seconds)

        self.synchronize()
        return self._least(layer_by_layer) / len(layers)

    def hybrid(self, device_rows: int, host_rows: Sequence[HostRow], in_lanes: bool) -> float:
        """Seconds of a decode step of device rows with one token each and these host rows."""
        from sglang_neo.model_runner import HostBatchRows
        from sglang_neo.pipelining import lanes_of

        runner, count = self.runner, device_rows + len(host_rows)
        reqs = [SimpleNamespace(neo_host_row=row) for row in host_rows]
        rows = HostBatchRows(reqs, range(device_rows, count))
        batch_of_rows = SimpleNamespace(reqs=[SimpleNamespace(neo_host_row=None)] * device_rows + reqs)
        lanes = lanes_of(batch_of_rows, runner.neo_lane_buckets) if in_lanes else None
        with self._on_device([1] * device_rows) as slots:
            places = torch.cat([*slots, self._on([0] * len(host_rows))])
            made = self._decode_batch([1] * device_rows + [row.tokens for row in host_rows], places)

            def step() -> int:
                batch = _copied(made)  # the step changes it
                runner.neo_rows, runner.neo_lanes = rows, lanes
                runner.forward(batch)
                return self._taken()

            return self.interval(step)

    def _taken(self) -> int:
        """The number that the workers know the last forward by. Raises TrialError if they refused it."""
        launched, self.runner.neo_launched = self.runner.neo_launched, None
        if launched.refused:
            raise TrialError(launched.refused)
        return int(launched.epoch)

    def deferred(self, device_rows: int) -> float:
        """Seconds of a deferred step of device rows with one token each. Nobody is in its slots, so the CPU answers at
        once."""
        runner, attention = self.runner, self.host.deferred
        nobody = DeferredStep(
            changed={},
            arriving=[0] * attention.geometry.layers,
            entering=[],
            positions=[],
            tickets=[],
            device_rows=range(device_rows),
            leaving=[],
            tokens=self._on([0]),
        )
        with self._on_device([1] * device_rows) as slots:
            made = self._decode_batch([1] * device_rows, torch.cat(slots))

            def step() -> int:
                runner.neo_step = nobody
                runner.forward(_copied(made))
                return self._taken()

            seconds = self.interval(step)
        attention.clear()
        return seconds

    # -- copies ------------------------------------------------------------------------------------------------

    def to_host(self, tokens: int) -> float:
        slots, pages = self._slots(tokens), list(range(-(-tokens // self.host_page)))
        return self.seconds(lambda: self.host.transfer.to_host(slots, pages).synchronize())

    def to_device(self, tokens: int) -> float:
        slots, pages = self._slots(tokens), list(range(-(-tokens // self.host_page)))
        return self.seconds(lambda: self.host.transfer.to_device(pages, slots).synchronize())

    def copy_once(self, tokens: int) -> None:
        """To the device, from pages at the end of the pool: for copies beside something that is timed."""
        pages = -(-tokens // self.host_page)
        last = range(self.host_pages - pages, self.host_pages)
        self.host.transfer.to_device(list(last), self._slots(tokens)).synchronize()

    def _slots(self, tokens: int) -> torch.Tensor:
        return torch.arange(self.page, self.page + tokens, device=self.runner.device)

    def sample(self, rows: int) -> float:
        """Seconds to choose tokens greedily and have them on the host."""
        logits = torch.zeros((rows, self.runner.model_config.vocab_size), device=self.runner.device)
        return self.seconds(lambda: logits.argmax(dim=-1).cpu())
