"""Prompts on their way to host memory, layer by layer: the right bytes in the right place, in any order of queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo.host_kv import layout
from sglang_neo.host_kv.device_pool import DeviceKV
from sglang_neo.host_kv.pool import HostKVGeometry, HostKVPool
from sglang_neo.host_kv.transfer import KVTransfer
from sglang_neo.hybrid.prefill import HostPrefill
from sglang_neo.token_manager import HostRow, PromptPart
from tests.harness.queues import ShuffledDevice

LAYERS, HEADS, DIM, TOKENS = 3, 2, 32, 16
SLOTS, PAGES, PAGE_SIZE = 100, 20, 4


class Setup:
    """A device pool, a host pool and a staging region; attention is left out, its keys and values are random."""

    def __init__(self, device: Any = None, dtype: str = "bfloat16"):
        geometry = HostKVGeometry(LAYERS, HEADS, DIM, dtype, TOKENS)
        self.pool = HostKVPool(geometry, PAGES, torch.zeros(PAGES * geometry.bytes_per_page, dtype=torch.uint8))
        self.k = [torch.randn(SLOTS, HEADS, DIM).bfloat16() for _ in range(LAYERS)]
        self.v = [torch.randn(SLOTS, HEADS, DIM).bfloat16() for _ in range(LAYERS)]
        staging = 3 * 8 * HEADS * geometry.page_bytes
        transfer = KVTransfer(self.pool, self.k, self.v, device, staging_bytes=staging, buffers=3)
        kv = DeviceKV(self.k, self.v, torch.bfloat16, torch.device("cpu"))
        self.sglang = SimpleNamespace(k_buffer=self.k, v_buffer=self.v, size=SLOTS - PAGE_SIZE)
        self.prefill = HostPrefill(self.sglang, kv, transfer, 160, PAGE_SIZE)
        self.device = transfer.device
        self.req_to_token = torch.zeros(4, 200, dtype=torch.int32)
        self.seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # what attention found, and what it should have

    def run(self, rows: list[HostRow], prompts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One step. ``prompts``: each one's whole k and v, [layers, tokens, heads, dim]."""
        lines = list(range(1, 1 + len(rows)))
        with self.prefill.running(rows, lines, self.req_to_token):
            assert self.prefill.current is not None and self.sglang.k_buffer[1] is self.prefill.k
            for layer in range(LAYERS):
                self.prefill.current.bring(layer)
                for line, row, (k, v) in zip(lines, rows, prompts, strict=True):
                    part = row.part
                    assert part is not None
                    slots = self.req_to_token[line, : part.end].long().clone()
                    self.device.current().run(self.attention(layer, slots, part, k, v))
                self.prefill.current.take(layer)
        assert self.sglang.k_buffer is self.k and not self.req_to_token.any()

    def attention(self, layer: int, slots: torch.Tensor, part: PromptPart, k: torch.Tensor, v: torch.Tensor) -> Any:
        def work() -> None:
            for name, region, tokens in (("k", self.prefill.k, k), ("v", self.prefill.v, v)):
                region[slots[part.prefix :]] = tokens[layer, part.prefix : part.end]
                self.seen.append((f"{name} of layer {layer}", region[slots], tokens[layer, : part.end]))

        return work

    def wrong(self, row: HostRow, k: torch.Tensor, v: torch.Tensor) -> list[str]:
        """The layers whose host pages do not hold the first ``row.tokens`` tokens."""
        found = []
        for layer in range(LAYERS):
            pages = self.pool.pages_tensor[layer, row.pages]
            got = layout.unpack_pages(pages, row.tokens, "bfloat16", TOKENS, DIM)
            if not all(torch.equal(x, y[layer, : row.tokens]) for x, y in zip(got, (k, v), strict=True)):
                found.append(f"layer {layer}")
        return found


def prompt(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(LAYERS, tokens, HEADS, DIM).bfloat16() for _ in range(2))
    return k, v


def steps(s: Setup) -> list[str]:
    """Three prompts in two steps: one in two chunks that part within a page, one with a prefix on the device, and one
    that shares pages with the first; returns what went wrong."""
    first, second, third = prompt(70), prompt(40), prompt(50)
    device_slots = torch.arange(10, 30)
    for layer in range(LAYERS):
        s.k[layer][device_slots], s.v[layer][device_slots] = second[0][layer, :20], second[1][layer, :20]
    a = HostRow([0, 1, 2], 37, part=PromptPart(4, 0, 37, None))
    b = HostRow([3, 4, 5], 40, part=PromptPart(44, 20, 40, device_slots))
    s.run([a, b], [first, second])
    a.pages += [7, 6]
    a.tokens, a.part = 70, PromptPart(64, 37, 70, None)
    for x in third:
        x[:, :32] = first[0 if x is third[0] else 1][:, :32]
    c = HostRow([0, 1, 9, 8], 50, cached_pages=2, part=PromptPart(4, 32, 50, None))
    s.run([a, c], [first, third])
    for row in (a, b, c):
        row.arrival.synchronize()
    while isinstance(s.device, ShuffledDevice) and s.device.step():
        pass
    found = [f"page of {name}: {s.wrong(row, *kv)}" for name, row, kv in
             (("a", a, first), ("b", b, second), ("c", c, third)) if s.wrong(row, *kv)]  # fmt: skip
    return found + [what for what, got, want in s.seen if not torch.equal(got, want)]


def test_chunks_prefixes_and_shared_pages() -> None:
    torch.manual_seed(0)
    assert steps(Setup()) == []


def test_any_order_that_the_marks_allow_gives_the_same() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        assert steps(Setup(ShuffledDevice(seed))) == [], f"seed {seed}"


def test_without_the_marks_it_goes_wrong() -> None:
    wrong = 0
    for seed in range(10):
        torch.manual_seed(seed)
        wrong += bool(steps(Setup(ShuffledDevice(seed, heeds_waits=False))))
    assert wrong >= 8


def test_int8_prefixes_come_back_dequantised() -> None:
    torch.manual_seed(1)
    s, (k, v) = Setup(dtype="int8"), prompt(60)
    row = HostRow([2, 3], 32, part=PromptPart(4, 0, 32, None))
    s.run([row], [(k, v)])
    row.pages, row.tokens, row.part = [2, 3, 5, 4], 60, PromptPart(8, 32, 60, None)
    s.run([row], [(k, v)])
    for what, got, want in s.seen:
        step = want.float().abs().amax(-1, keepdim=True) / 127
        assert ((got.float() - want.float()).abs() <= 0.6 * step + 0.01).all(), what


def test_the_region_is_taken_out_of_the_device_pools_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    from sglang_neo import model_runner

    monkeypatch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda self, before: 4 << 30)
    monkeypatch.setattr(model_runner, "gpu_only_reasons", lambda args: [])

    def budget(context: int = 131072, **flags: Any) -> int:
        """Of a 70B shape's rank."""
        configurator = object.__new__(model_runner.NeoKVCacheConfigurator)
        given = {
            "neo_mode": "auto", "neo_host_kv_dtype": "auto", "neo_host_kv_size": None, "neo_host_kv_ratio": None,
            "neo_host_prompt_tokens": None, "tp_size": 1, "dp_size": 1, **flags,
        }  # fmt: skip
        values = {
            "device": "cpu",
            "server_args": SimpleNamespace(**given),
            "model_config": SimpleNamespace(
                get_num_kv_heads=lambda tp: 8 // tp, head_dim=128, num_hidden_layers=80, context_len=context
            ),
            "ps": SimpleNamespace(tp_size=1),
            "kv_cache_dtype": torch.bfloat16,
        }
        for name, value in values.items():
            setattr(configurator, name, value)
        monkeypatch.setattr(model_runner.NeoKVCacheConfigurator, "page_size", 1, raising=False)
        return (4 << 30) - configurator._profile_available_bytes(1)

    token = 2 * 8 * 128 * 2  # bytes of a layer
    assert budget() == (8 * (4 << 30) // (80 * token) + 2) * token, "as many tokens as eight such pools hold"
    assert budget(context=8192) == (8192 + 2) * token
    assert budget(neo_host_prompt_tokens=5000) == (5000 + 2) * token
    assert budget(neo_host_kv_size=1.0) == (10**9 // (80 * token) + 2) * token
    assert budget(neo_mode="gpu-only") == 0


def test_a_layer_whose_attention_did_not_come_by_is_an_error() -> None:
    s = Setup()
    row = HostRow([0], 10, part=PromptPart(4, 0, 10, None))
    with pytest.raises(RuntimeError, match="2 of 3 layers"), s.prefill.running([row], [1], s.req_to_token):
        assert s.prefill.current is not None
        for layer in range(2):
            s.prefill.current.take(layer)
