"""The tool that measures what cutting a plan costs."""

from __future__ import annotations

import json

import pytest

from bench import plan_cost


def test_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rows", "3", "--tokens", "200", "--shape", "8,2,32", "--pool-mib", "4", "--rounds", "4"]
    assert plan_cost.main(small) == 0
    one, cut, ordered = json.loads(capsys.readouterr().out)["ways"].values()
    assert (one["items"], one["cuts"]) == (ordered["items"], ordered["cuts"]) == (1, 0) and one["ratio"] == 1
    assert cut["items"] > 1 and cut["cuts"] > 0
    assert all(0 < way["p25_us"] <= way["median_us"] <= way["p75_us"] for way in (one, cut, ordered))
    assert plan_cost.main(["--shape", "8"]) == 2
    assert "error" in capsys.readouterr().err
