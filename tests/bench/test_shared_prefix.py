"""The tool that measures what sharing a prefix gains."""

from __future__ import annotations

import json

import pytest

from bench import shared_prefix


def test_one_line_for_each_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rows", "9", "--tokens", "256", "--shape", "16,2,32", "--seconds", "0.05"]
    assert shared_prefix.main([*small, "--threads", "1", "2", "--variants", "prefix_piece_kib=8,held_tiles=1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["threads"] for line in lines] == [1, 2]
    for line in lines:
        assert list(line["ways"]) == ["copies", "shared", "shared, prefix_piece_kib=8,held_tiles=1"]
        assert line["ways"]["copies"]["times_as_fast"] == 1
        assert all(0 < way["least_ms"] <= way["median_ms"] and way["runs"] > 0 for way in line["ways"].values())
    assert lines[0]["ways"]["shared"]["partials"] == 9 * 2, "one for each row and KV head"
    for wrong in ("held_tiles", "held_tiles=9", "prefetch_hint=1", "accurate_int8=0", "nothing=1"):
        assert shared_prefix.main([*small, "--variants", wrong]) == 2, wrong
        assert "error" in capsys.readouterr().err
