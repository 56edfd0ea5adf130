"""Captured decode steps on the CPU device: a stand-in for CUDA graphs that runs the captured function again.

Like a graph, a replay sees nothing but the memory that it was captured with: SGLang's static buffers and our fixed
ones. What it cannot show is whether CUDA can capture what a step does. SGLang's runner and ours are the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest


class RepeatingBackend:
    """In place of SGLang's FullCudaGraphBackend."""

    def __init__(self) -> None:
        self.captured: dict[Any, Callable[[], Any]] = {}
        self.replays: list[Any] = []  # keys, in order
        self.replaying = False

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def capture_one(self, key: Any, forward: Callable[[], Any], **hooks: Any) -> None:
        forward()
        self.captured[key] = forward

    def can_run(self, forward_batch: Any, key: Any) -> bool:
        return key in self.captured

    def replay(self, key: Any, forward_batch: Any) -> Any:
        self.replays.append(key)
        self.replaying = True
        try:
            return self.captured[key]()
        finally:
            self.replaying = False


def capture_decode_steps(runner: Any, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> RepeatingBackend:
    """Gives a model runner on the CPU device captured decode steps of these batch sizes, with and without host rows."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    from sglang_neo.hybrid import graphs

    backend = RepeatingBackend()
    monkeypatch.setattr(graphs, "FullCudaGraphBackend", RepeatingBackend)
    monkeypatch.setattr(graphs.NeoDecodeCudaGraphRunner, "_flags_live", lambda self: backend.replaying)
    monkeypatch.setattr(module, "resolve_decode_backend", lambda graph_runner: backend)
    monkeypatch.setattr(module, "graph_capture", lambda **kw: contextlib.nullcontext(SimpleNamespace(stream=None)))
    monkeypatch.setattr(module, "get_batch_sizes_to_capture", lambda *args: (list(sizes), []))
    monkeypatch.setattr(BaseRunner, "warmup", lambda self: None)
    # SGLang's backend for the CPU has no state for graphs, and needs none: it reads the batch itself.
    monkeypatch.setattr(TorchNativeAttnBackend, "init_cuda_graph_state", lambda *args: None)
    monkeypatch.setattr(TorchNativeAttnBackend, "get_cuda_graph_seq_len_fill_value", lambda self: 1)
    runner.neo_host.attention.stream.capturable = True
    runner.graph_shared_output = GraphSharedOutput(device=runner.device, max_rows=max(sizes))
    runner.decode_cuda_graph_runner = graphs.NeoDecodeCudaGraphRunner(runner)
    return backend
