"""What *exact* means here, in one place, for every suite that compares tokens.

Two runs of the same model on the same prompt, greedy, are exact if their tokens are equal, or if they first differ
where the reference itself was undecided: its two best tokens lay less than NEAR_TIE_GAP apart (fp32 logits or
log-probabilities; the difference is the same). There, plain SGLang differs from itself from one batch size to the
next. What follows such a near-tie cannot be compared. Near-ties are counted and may make up NEAR_TIE_SHARE of the
requests of one comparison, **rounded down**: below 200 requests, none is allowed. A test with fewer requests that
meets one should take other prompts, not a wider rule; a fault that shows itself only in near-ties would otherwise
pass in every small test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Below this gap between its two best tokens, the reference's choice is a matter of rounding.
NEAR_TIE_GAP = 1e-3
#: Share of the requests of one comparison that may diverge at a near-tie.
NEAR_TIE_SHARE = 0.005

_CONTEXT = 4  # tokens shown on each side of a difference


@dataclass(frozen=True)
class Reference:
    """One request as the reference answered it."""

    tokens: Sequence[int]
    gaps: Sequence[float]  # per token: best minus second-best logit (or logprob) where it was chosen

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.gaps):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.gaps)} gaps")


@dataclass(frozen=True)
class Difference:
    """The first place where a request's tokens are not the reference's."""

    request: str
    position: int
    reference: Reference
    got: Sequence[int]

    @property
    def gap(self) -> float | None:
        """The reference's gap at this place; None if one of the two ended here."""
        if self.position < min(len(self.reference.tokens), len(self.got)):
            return self.reference.gaps[self.position]
        return None

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE_GAP  # a NaN is no near-tie

    def __str__(self) -> str:
        def excerpt(tokens: Sequence[int]) -> str:
            start, end = max(0, self.position - _CONTEXT), self.position + _CONTEXT + 1
            shown = [f">{t}<" if i == self.position else str(t) for i, t in enumerate(tokens[start:end], start)]
            if len(tokens) <= self.position:
                shown.append(">end<")
            return ("... " if start else "") + " ".join(shown) + (" ..." if end < len(tokens) else "")

        gap = "one ends here" if self.gap is None else f"the reference's top-2 gap is {self.gap:.2e}"
        return (
            f"request {self.request}: differs at token {self.position} "
            f"(of {len(self.reference.tokens)} expected, {len(self.got)} got); {gap}\n"
            f"    expected {excerpt(self.reference.tokens)}\n"
            f"    got      {excerpt(self.got)}"
        )


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison that passed."""

    requests: int
    tokens: int  # of the reference
    near_ties: tuple[Difference, ...]


def first_difference(request: str, reference: Reference, got: Sequence[int]) -> Difference | None:
    """Where ``got`` leaves the reference's tokens, an early or late end included; None if nowhere."""
    for position, (expected, token) in enumerate(zip(reference.tokens, got, strict=False)):
        if expected != token:
            return Difference(request, position, reference, got)
    if len(reference.tokens) != len(got):
        return Difference(request, min(len(reference.tokens), len(got)), reference, got)
    return None


def allowed_near_ties(requests: int) -> int:
    """How many of so many requests may diverge at a near-tie."""
    return math.floor(requests * NEAR_TIE_SHARE)


def assert_exact(references: Mapping[str, Reference], got: Mapping[str, Sequence[int]]) -> Comparison:
    """Raises AssertionError, with a report of every difference, unless ``got`` is exact (see the module's text).

    Args:
        references: by request name.
        got: tokens by the same names. A request that was cut short on purpose must be cut in both.
    """
    if not references:
        raise ValueError("nothing to compare")
    if references.keys() != got.keys():
        raise AssertionError(f"requests differ: expected {sorted(references)}, got {sorted(got)}")
    found = [first_difference(name, reference, got[name]) for name, reference in references.items()]
    differences = [difference for difference in found if difference is not None]
    near_ties = tuple(difference for difference in differences if difference.is_near_tie)
    wrong = [difference for difference in differences if not difference.is_near_tie]
    allowed = allowed_near_ties(len(references))
    if wrong or len(near_ties) > allowed:
        summary = (
            f"not exact: {len(wrong)} of {len(references)} requests differ where the reference was decided, "
            f"{len(near_ties)} at a near-tie (allowed: {allowed})"
        )
        raise AssertionError("\n".join([summary, *map(str, wrong), *(f"[near-tie] {d}" for d in near_ties)]))
    return Comparison(len(references), sum(len(r.tokens) for r in references.values()), near_ties)


def top_gaps(top_values: Iterable[Sequence[float]]) -> list[float]:
    """Gaps for Reference from the two (or more) best logits or logprobs of each token, in any order."""
    gaps = []
    for values in top_values:
        if len(values) < 2:
            raise ValueError("two values per token are needed: ask the reference for top_logprobs_num=2")
        best, second = sorted(values, reverse=True)[:2]
        gaps.append(best - second)
    return gaps
