"""One ``neo`` block in /server_info for all data-parallel ranks."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang_neo.tokenizer_manager import NeoTokenizerManager, NeoTokenizerWorker, _NeoServerInfo, merge_blocks


def block(free: int, total: int = 100) -> dict[str, Any]:
    return {"version": "1", "device_kv": {"total_tokens": total, "free_tokens": free, "page_size": 64}}


def test_one_rank_is_kept() -> None:
    assert merge_blocks([block(30)]) == {**block(30), "dp_ranks": 1}


def test_pools_add_up_and_the_rest_is_the_first_ranks() -> None:
    merged = merge_blocks([block(30), {**block(50, 200), "version": "other"}])
    assert merged == {
        "version": "1",
        "dp_ranks": 2,
        "device_kv": {"total_tokens": 300, "free_tokens": 80, "page_size": 64},
    }


def test_counters_of_host_rows_add_up() -> None:
    def rank(n: int) -> dict[str, Any]:
        counters = {"host_tokens_total": n, "host_running_reqs": 1, "steps_total": {"sync": n, "gpu_only": 2}}
        return {**block(1), "host_kv": block(n)["device_kv"], **counters}

    merged = merge_blocks([rank(3), rank(4)])
    assert merged is not None
    assert merged["host_kv"] == {"total_tokens": 200, "free_tokens": 7, "page_size": 64}
    assert (merged["host_tokens_total"], merged["host_running_reqs"]) == (7, 2)
    assert merged["steps_total"] == {"sync": 7, "gpu_only": 4}


def test_a_rank_without_a_block_hides_all() -> None:
    assert merge_blocks([block(1), None]) is None
    assert merge_blocks([None, block(1)]) is None
    assert merge_blocks([]) is None


def test_inputs_are_left_alone() -> None:
    blocks: list[dict[str, Any] | None] = [block(1), block(2)]
    merge_blocks(blocks)
    assert blocks == [block(1), block(2)]


def test_the_block_travels_from_the_workers_state_to_the_server_info() -> None:
    class Base:
        async def get_internal_state(self) -> list[dict[str, Any]]:
            return states

        def resolved_config_dict(self, base: dict[str, Any]) -> dict[str, Any]:
            return {**base, "resolved": True}

    class Manager(_NeoServerInfo, Base):
        pass

    states = [{"neo": block(3), "other": 1}]
    manager = Manager()
    assert manager.resolved_config_dict({"a": 1}) == {"a": 1, "resolved": True, "neo": None}
    assert asyncio.run(manager.get_internal_state()) == states
    assert manager.resolved_config_dict({})["neo"] == {**block(3), "dp_ranks": 1}
    states = [{"other": 1}]  # a worker that runs plain SGLang
    asyncio.run(manager.get_internal_state())
    assert manager.resolved_config_dict({})["neo"] is None


def test_both_of_sglangs_managers_are_covered() -> None:
    for manager in (NeoTokenizerManager, NeoTokenizerWorker):
        assert manager.resolved_config_dict is _NeoServerInfo.resolved_config_dict
        assert manager.get_internal_state is _NeoServerInfo.get_internal_state
