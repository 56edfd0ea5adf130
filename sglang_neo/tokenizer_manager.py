"""Tokenizer managers that put the workers' ``neo`` block at the top level of ``/server_info``.

A block in the scheduler's init info would do for one scheduler, but the data-parallel controller forwards only the
fields it knows, and only once; the internal states arrive from every rank, and live.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import PortArgs

#: What adds up over data-parallel ranks: numbers, and the numbers in these dictionaries but for those in _SAME.
_ADDED = (
    *("device_kv", "host_kv", "host_kv_used_tokens", "host_cache", "host_prefill", "host_running_reqs"),
    *("migrations", "host_tokens_total", "steps_total", "cpu_seconds", "awaited", "handoffs"),
)
_SAME = ("page_size", "staging_tokens", "staging_bytes")


def merge_blocks(blocks: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One block for all data-parallel ranks: the first rank's, with the number of ranks and what adds up, added up.

    None if any rank has no block, so that a rank running plain SGLang cannot hide behind the others.
    """
    known = [block for block in blocks if block is not None]
    if not known or len(known) < len(blocks):
        return None
    first = known[0]
    added = {name: _sum([block[name] for block in known]) for name in _ADDED if name in first}
    return {**first, "dp_ranks": len(known), **added}


def _sum(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, dict):
        return sum(values)
    return {name: first[name] if name in _SAME else sum(value[name] for value in values) for name in first}


class _NeoServerInfo:
    """The two overrides, for the single tokenizer manager and for the workers of --tokenizer-worker-num."""

    _neo_block: dict[str, Any] | None = None

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        states: list[dict[Any, Any]] = await super().get_internal_state()  # type: ignore[misc]
        self._neo_block = merge_blocks([state.get("neo") for state in states])
        return states

    def resolved_config_dict(self, base: dict[str, Any]) -> dict[str, Any]:
        resolved: dict[str, Any] = super().resolved_config_dict(base)  # type: ignore[misc]
        return {**resolved, "neo": self._neo_block}


class NeoTokenizerManager(_NeoServerInfo, TokenizerManager):
    pass


class NeoTokenizerWorker(_NeoServerInfo, TokenizerWorker):
    pass


def init_neo_tokenizer_manager(server_args: Any, port_args: PortArgs) -> Any:
    """Drop-in for SGLang's ``init_tokenizer_manager`` in ``launch_server``."""
    return init_tokenizer_manager(server_args, port_args, TokenizerManagerClass=NeoTokenizerManager)
