"""The comparison that the other suites trust: what passes, what fails, and that it can fail."""

from __future__ import annotations

import math

import pytest

from tests.harness.exact import (
    NEAR_TIE_GAP,
    Reference,
    allowed_near_ties,
    assert_exact,
    first_difference,
    top_gaps,
)


def wide(*tokens: int) -> Reference:
    return Reference(tokens, [1.0] * len(tokens))


def many(count: int, gap: float = 1.0) -> dict[str, Reference]:
    return {f"r{i}": Reference([1, 2, 3], [1.0, gap, 1.0]) for i in range(count)}


def test_equal_tokens_pass_and_are_counted() -> None:
    comparison = assert_exact({"a": wide(1, 2, 3), "b": wide(4)}, {"a": [1, 2, 3], "b": [4]})
    assert (comparison.requests, comparison.tokens, comparison.near_ties) == (2, 4, ())


def test_a_difference_where_the_reference_was_decided_fails_and_is_shown() -> None:
    with pytest.raises(AssertionError) as failure:
        wrong = [*range(10), 77, *range(11, 20)]
        assert_exact({"a": wide(1, 2, 3), "b": wide(*range(20))}, {"a": [1, 2, 3], "b": wrong})
    report = str(failure.value)
    assert "1 of 2 requests" in report
    assert "request b: differs at token 10" in report
    assert "1.00e+00" in report
    assert ">10<" in report and ">77<" in report
    assert "request a" not in report


@pytest.mark.parametrize("got", [[1, 2], [1, 2, 3, 4], []])
def test_an_early_or_late_end_fails_even_beside_a_near_tie(got: list[int]) -> None:
    reference = Reference([1, 2, 3], [0.0, 0.0, 0.0])
    with pytest.raises(AssertionError, match="one ends here"):
        assert_exact({"a": reference}, {"a": got})


def test_only_the_first_difference_counts() -> None:
    # The near-tie comes after the request has already gone wrong.
    reference = Reference([1, 2, 3], [1.0, 0.0, 1.0])
    difference = first_difference("a", reference, [9, 9, 9])
    assert difference is not None and difference.position == 0 and not difference.is_near_tie
    # Behind a near-tie everything may differ.
    difference = first_difference("a", reference, [1, 9, 9])
    assert difference is not None and difference.position == 1 and difference.is_near_tie


@pytest.mark.parametrize(("requests", "allowed"), [(1, 0), (199, 0), (200, 1), (399, 1), (400, 2), (1000, 5)])
def test_the_allowance_is_half_a_percent_rounded_down(requests: int, allowed: int) -> None:
    assert allowed_near_ties(requests) == allowed


def test_near_ties_are_capped() -> None:
    references = many(400, gap=NEAR_TIE_GAP / 2)
    got = {name: [1, 2, 3] for name in references}
    got["r0"], got["r1"] = [1, 9, 3], [1, 9, 9]
    assert len(assert_exact(references, got).near_ties) == 2
    got["r2"] = [1, 9, 3]
    with pytest.raises(AssertionError, match=r"3 at a near-tie \(allowed: 2\)"):
        assert_exact(references, got)


@pytest.mark.parametrize("gap", [NEAR_TIE_GAP, math.nan, math.inf])
def test_a_gap_at_the_limit_or_unknown_is_no_near_tie(gap: float) -> None:
    references = many(200, gap=gap)
    got = {name: [1, 2, 3] for name in references}
    got["r7"] = [1, 9, 3]
    with pytest.raises(AssertionError, match="1 of 200 requests differ"):
        assert_exact(references, got)


def test_small_comparisons_allow_no_near_tie() -> None:
    with pytest.raises(AssertionError, match=r"\[near-tie\]"):
        assert_exact(many(1, gap=0.0), {"r0": [1, 9, 3]})


def test_missing_and_surplus_requests_fail() -> None:
    for got in ({}, {"a": [1], "b": [1]}, {"b": [1]}):
        with pytest.raises(AssertionError, match="requests differ"):
            assert_exact({"a": wide(1)}, got)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_exact({}, {})
    with pytest.raises(ValueError, match="1 tokens but 0 gaps"):
        Reference([1], [])
    with pytest.raises(ValueError, match="two values"):
        top_gaps([[-0.5]])


def test_top_gaps_take_the_best_two_in_any_order() -> None:
    assert top_gaps([[-3.0, -1.0, -1.5], [-1.0, -1.0]]) == [0.5, 0.0]
