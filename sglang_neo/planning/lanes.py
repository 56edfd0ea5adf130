"""Which host rows ride in a step in two lanes, in which lane, and which pairs of lanes are worth a CUDA graph.

In each layer the device does lane A's linear layers for T_A, lane B's for T_B, and lane A's own attention for t. The
CPU attends to lane A's host rows (C_A) from A's hand-off on until B's linear layers have run, and to lane B's (C_B)
until A's of the next layer have. Nobody waits as long as

    C_A + C_B <= T_A + T_B + t        C_A <= T_B + t        C_B <= T_A + t

The first is a limit to how many tokens of KV ride in a step at all; ``pace.py`` measures it, a profile's tables predict
it. The other two hold with it for lanes that give the CPU the same to do, as far as T_A and T_B are the same: the
weights' bytes make them so.

    LaneLimits                               the limits, of decode steps and of prefills
    riding(tokens, limit)                    who rides, the others wait
    second_lane(tokens, rows, buckets)       how many of those are lane B
    lane_a(rows, b, buckets)                 the size of lane A's graph
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LaneLimits:
    """How many tokens of KV the CPU can attend to, in each layer, without the device waiting for it.

    Attributes:
        decode: in a decode step in two lanes, those of both together. Infinite: not known.
        per_prompt_token: in lane B of a prefill, for each token of it. 0: not known.
    """

    decode: float = math.inf
    per_prompt_token: float = 0.0

    def beside(self, prompt_tokens: int) -> float:
        """In lane B of a prefill, which reads all weights, as a lane of a decode step does, and takes longer the more
        tokens there are to multiply with them."""
        return max(self.decode / 2, self.per_prompt_token * prompt_tokens)


def riding(tokens: Sequence[int], limit: float) -> list[int]:
    """Which host rows ride in a step: those that have waited longest, as far as the CPU finishes them in time.

    The first rides whatever it takes, so nobody waits for ever; a row that is too long for what is left lets others
    pass, until it is the first.

    Args:
        tokens: of KV of each host row, in the order in which they had their last token.
        limit: of their sum.

    Returns:
        Indices, ascending.
    """
    found: list[int] = []
    total = 0
    for i, more in enumerate(tokens):
        if not found or total + more <= limit:
            found.append(i)
            total += more
    return found


def second_lane(tokens: Sequence[int], rows: int, buckets: Sequence[tuple[int, int]] = ()) -> int:
    """How many host rows go to lane B: so many of the last that both lanes give the CPU about the same to do.

    Then the CPU works while either lane's linears run, and neither lane waits longer than the other. One host row alone
    gains nothing from a second pass through the weights.

    Args:
        tokens: of each host row that rides, in the order of the batch.
        rows: of the batch, device rows included.
        buckets: where steps run from graphs, those that there are; none: any number will do.

    Returns:
        0 where one lane is better.
    """
    total, of_b, best = sum(tokens), 0, (sum(tokens), 0)
    for b in range(1, len(tokens)):
        of_b += tokens[-b]
        if not buckets or lane_a(rows, b, buckets) is not None:
            best = min(best, (abs(total - 2 * of_b), b))
    return best[1]


def lane_buckets(sizes: Sequence[int], largest: int) -> list[tuple[int, int]]:
    """Rows of lane A and lane B of the graphs to capture, ascending.

    Lane B is never padded (``second_lane`` chooses a size that there is), so for each of its sizes there is an A for
    any batch of up to ``largest`` rows. A holds device rows and about half of the host's, so it is the larger one.

    Args:
        sizes: of batches, such as SGLang captures, not too fine.
        largest: the most rows of both together.
    """
    pairs = set()
    for b in sizes:
        pairs |= {(a, b) for a in (*sizes, largest - b) if b <= a <= largest - b}
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def lane_a(rows: int, b: int, buckets: Iterable[tuple[int, int]]) -> int | None:
    """The size of lane A for a batch of ``rows`` of which ``b`` ride in lane B; None if there is none."""
    return min((a for a, of_b in buckets if of_b == b and a >= rows - b), default=None)
