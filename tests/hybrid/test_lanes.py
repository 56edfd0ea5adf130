"""The output of a step in two lanes."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_neo.hybrid.pipelined import joined_output


@pytest.mark.parametrize("of", ["one buffer", "its rows in another order", "a gap between them", "two buffers"])
def test_logits_of_both_lanes_are_joined_without_a_copy_where_they_lie_side_by_side(of: str) -> None:
    buffer = torch.arange(60.0).view(10, 6)
    a, b = {
        "one buffer": (buffer[1:5], buffer[5:8]),
        "its rows in another order": (buffer[4:8], buffer[0:4]),
        "a gap between them": (buffer[0:4], buffer[5:8]),
        "two buffers": (buffer[0:4], buffer.clone()[4:8]),
    }[of]
    joined = joined_output([LogitsProcessorOutput(next_token_logits=x) for x in (a, b)]).next_token_logits
    assert torch.equal(joined, torch.cat([a, b]))
    shared = joined.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert shared == (of == "one buffer")
