"""The budget of prompts that are computed to the host while others decode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.planning.metering import Meter


def test_what_is_overdrawn_is_waited_for() -> None:
    meter = Meter(16)
    assert meter.open(device_rows=3)
    meter.computed(40)
    for _ in range(2):
        meter.decoded()
        assert not meter.open(device_rows=3)
    meter.decoded()
    assert meter.open(device_rows=3)
    meter.computed(10**6)
    assert meter.open(device_rows=0), "nobody to hold up"
    assert (meter.step_tokens, Meter(1).step_tokens) == (512, 256)
    assert meter.open(device_rows=3)
    with pytest.raises(ValueError, match="greater than 0"):
        Meter(0)


@given(st.lists(st.integers(1, 500), min_size=1), st.integers(1, 64))
def test_tokens_per_step_stay_below_the_budget(chunks: list[int], per_step: int) -> None:
    meter, steps, computed = Meter(per_step), 0, 0
    for chunk in chunks:
        while not meter.open(device_rows=1):
            meter.decoded()
            steps += 1
        assert computed <= (steps + 1) * per_step
        meter.computed(chunk)
        computed += chunk
