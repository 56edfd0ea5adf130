"""Before a server runs deferred steps: a few tokens both ways, as device rows and through the slots.

What is tried is the shape of the model's layers, that is whether residuals and positions really change places where
``sglang_neo.hybrid.deferred.hook_layers`` reaches for them. A model that comes out differently is not served in
deferred mode. Nobody owns KV yet; what the trial leaves in slots and pages is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from sglang_neo.errors import UsageError
from sglang_neo.hybrid.deferred import DeferredAttention, DeferredStep
from sglang_neo.hybrid.host_attention import StepRefused
from sglang_neo.planning.cohorts import Cohorts
from sglang_neo.ranks import least_of_all_ranks
from sglang_neo.token_manager import HostRow

#: Mean difference of logits between the two ways, in standard deviations of the logits, that rounding explains. Where
#: residuals are mixed up it is about 1.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1
#: Rows, in cohorts of their own, and tokens of each.
_ROWS, _TOKENS = 2, 2
_ATTEMPTS, _RESET_TIMEOUT_S = 3, 60.0


def check_parity(runner: Any, attention: DeferredAttention) -> None:
    """Raises UsageError if deferred steps of this model runner compute something else than plain decode steps.

    Args:
        runner: SGLang's model runner, with its attention backend made hybrid; no request has been served.
    """
    vocabulary = runner.model_config.vocab_size
    prompts = [[(37 * (row * _TOKENS + i) + 11) % vocabulary for i in range(_TOKENS)] for row in range(_ROWS)]
    with torch.inference_mode():
        plain = [_on_device(runner, prompt) for prompt in prompts]
        for _ in range(_ATTEMPTS):  # on a busy machine the CPU may be late
            failure = None
            try:
                deferred = _through_slots(runner, attention, prompts)
            except StepRefused as refused:
                failure = str(refused)
            failure = failure or attention.failure(attention.launched_epoch)
            if least_of_all_ranks(runner, int(failure is None)):
                break
            if str(runner.device).startswith("cuda"):
                torch.cuda.synchronize()
            attention.reset(_RESET_TIMEOUT_S)
        else:
            raise UsageError(f"the CPU's attention does not work: {failure or 'on another rank'}")
    attention.clear()
    worst = 0.0
    for expected, got in zip(chain(*plain), chain(*deferred), strict=True):
        difference = float((expected - got).abs().mean() / expected.std().clamp(min=1e-9))
        worst = max(worst, difference if difference == difference else float("inf"))
    fine = worst <= _TOLERANCE.get(runner.dtype, _TOLERANCE_16_BIT)
    if not least_of_all_ranks(runner, int(fine)):
        raise UsageError(
            f"{type(runner.model).__name__} does not come out the same in deferred mode: its logits are off by "
            f"{worst:.2g} standard deviations; --neo-deferred-slots 0 does without it"
        )


def _batch(runner: Any, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Any:
    """A decode batch of rows in request slots 1, 2, ...; ``slots``: where each row's new k and v go."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    def on_device(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=runner.device)

    lengths = [position + 1 for position in positions]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(tokens),
        input_ids=on_device(tokens),
        req_pool_indices=on_device(range(1, 1 + len(tokens))),
        seq_lens=on_device(lengths),
        out_cache_loc=on_device(slots),
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        positions=on_device(positions),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _logits(runner: Any, batch: Any) -> torch.Tensor:
    """float32 [rows, vocabulary]"""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        runner.attn_backend.init_forward_metadata(batch)
        output = runner.model.forward(batch.input_ids, batch.positions, batch)
    logits: torch.Tensor = output.next_token_logits.float().clone()
    return logits


def _on_device(runner: Any, prompt: Sequence[int]) -> list[torch.Tensor]:
    """Logits after each token of the prompt, which is decoded token by token."""
    line = runner.req_to_token_pool.req_to_token[1]
    first = runner.page_size  # of the first page that can be owned
    line[: len(prompt)] = torch.arange(first, first + len(prompt), dtype=line.dtype, device=line.device)
    try:
        return [_logits(runner, _batch(runner, [token], [i], [first + i]))[0] for i, token in enumerate(prompt)]
    finally:
        line.zero_()


def _through_slots(
    runner: Any, attention: DeferredAttention, prompts: Sequence[Sequence[int]]
) -> list[list[torch.Tensor]]:
    """The same in deferred steps, each prompt in slot 0 of a cohort of its own."""
    cohorts: Cohorts[int] = Cohorts(attention.geometry.layers, attention.slots)
    rows = [HostRow([page], 0) for page in range(len(prompts))]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    tokens = torch.tensor(list(chain(*prompts)), dtype=torch.int64, device=runner.device)
    nobody = _batch(runner, [], [], [])
    waiting = list(range(len(prompts)))
    while any(len(logits) < _TOKENS for logits in found):
        entering = [row for row in cohorts.boundary() if len(found[row]) < _TOKENS]
        if not entering and waiting:
            entering = [waiting.pop(0)]
        for row in entering:
            rows[row].tokens += 1
        cohorts.enter([(row, rows[row].tokens - 1) for row in entering])
        seats = [seat for seat in cohorts.seats(cohorts.entering) if seat is not None]
        step = DeferredStep(
            changed={cohorts.entering: [rows[row] for row in entering]},
            arriving=[cohorts.arriving(layer) for layer in range(cohorts.layers)],
            entering=[row * _TOKENS + len(found[row]) for row in entering],
            positions=[seat.position for seat in seats],
            tickets=[seat.ticket for seat in seats],
            device_rows=[],
            leaving=[],
            tokens=tokens,
        )
        attention.launch_step(step)
        whole, _ = attention.with_slots(nobody, step)
        with attention.emitting(attention.slots):
            logits = _logits(runner, whole)
        for seat in cohorts.seats(cohorts.leaving):
            if seat is not None:
                found[seat.row].append(logits[0])
        cohorts.advance()
    return found
