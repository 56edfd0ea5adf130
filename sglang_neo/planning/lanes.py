"""Which host rows of a pipelined step ride in its second lane, and which pairs of lanes are worth a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def second_lane(tokens: Sequence[int], rows: int, buckets: Sequence[tuple[int, int]] = ()) -> int:
    """How many host rows go to lane B: so many of the last that both lanes give the CPU about the same to do.

    Then the CPU works while either lane's linears run, and neither lane waits longer than the other. One host row alone
    gains nothing from a second pass through the weights.

    Args:
        tokens: of each host row, in the order of the batch.
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
