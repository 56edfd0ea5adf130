"""The attention backend becomes hybrid and stays what it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo.hybrid.backend import hide_host_rows, make_hybrid


class Backend:
    flag = True

    def __init__(self) -> None:
        self.state = 5

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, fb: Any, save_kv_cache: bool = True) -> list[Any]:
        return ["own", self.state, save_kv_cache]

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, fb: Any, save_kv_cache: bool = True) -> list[Any]:
        return ["extended", self.state, save_kv_cache]

    def other(self) -> int:
        return self.state


class Step:
    has_device_rows = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def send(self, layer: int, q: Any, k: Any, v: Any) -> None:
        self.calls.append(("send", layer))

    def handed_over(self) -> None:
        self.calls.append("handed over")

    def receive(self, layer: int, out: list[Any]) -> None:
        self.calls.append(("receive", layer))
        out.append("answer")


def test_hands_over_before_and_waits_after_the_own_attention() -> None:
    backend, host, prefill = Backend(), SimpleNamespace(current=None), SimpleNamespace(current=None)
    make_hybrid(backend, host, prefill, first_layer=2)  # type: ignore[arg-type]
    assert isinstance(backend, Backend) and backend.flag and backend.other() == 5
    layer = SimpleNamespace(layer_id=4)
    assert backend.forward_decode(1, 2, 3, layer, None, save_kv_cache=False) == ["own", 5, False]
    host.current = Step()
    assert backend.forward_decode(1, 2, 3, layer, None) == ["own", 5, True, "answer"]
    assert host.current.calls == [("send", 2), "handed over", ("receive", 2)]
    host.current = Step()
    host.current.has_device_rows = False
    q, layer = torch.ones(3, 8), SimpleNamespace(layer_id=4, tp_q_head_num=2, v_head_dim=4)
    host.current.receive = lambda layer, out: out.add_(1)
    answer = backend.forward_decode(q, 2, 3, layer, None)
    assert torch.equal(answer, torch.ones(3, 8)), "nothing for the own attention to do"
    with pytest.raises(ValueError, match="hybrid already"):
        make_hybrid(backend, host, prefill, first_layer=0)  # type: ignore[arg-type]
    assert Backend().forward_decode(1, 2, 3, layer, None) == ["own", 5, True], "other backends are left alone"


def test_prompts_move_in_before_and_out_after_the_own_attention() -> None:
    calls: list[Any] = []
    backend, prefill = Backend(), SimpleNamespace(current=None)
    make_hybrid(backend, SimpleNamespace(current=None), prefill, first_layer=2)  # type: ignore[arg-type]
    layer = SimpleNamespace(layer_id=3)
    assert backend.forward_extend(1, 2, 3, layer, None, save_kv_cache=False) == ["extended", 5, False]
    prefill.current = SimpleNamespace(
        bring=lambda index: calls.append(("bring", index)), take=lambda index: calls.append(("take", index))
    )
    assert backend.forward_extend(1, 2, 3, layer, None) == ["extended", 5, True]
    assert calls == [("bring", 1), ("take", 1)]


def test_host_rows_look_like_padding() -> None:
    lengths = torch.tensor([7, 100, 9])
    batch = SimpleNamespace(seq_lens=lengths, seq_lens_cpu=lengths.clone(), seq_lens_sum=116)
    index = torch.tensor([1])
    hide_host_rows(batch, index, index)
    assert batch.seq_lens.tolist() == [7, 1, 9] == batch.seq_lens_cpu.tolist() and batch.seq_lens_sum == 17
    assert lengths.tolist() == [7, 100, 9], "the scheduler's own tensor must keep the true lengths"
