"""Captured decode steps: SGLang's own graphs, and a second set with hand-offs in them for steps with host rows.

A graph of the second set serves any number of host rows, anywhere in its batch (``exchange.py``), so there is one per
size and not one per pair of sizes. Sizes are fewer than SGLang's: a graph costs memory and start-up time, and a few
rows of padding cost a decode step next to nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_lora_variant
from sglang.srt.utils import get_available_gpu_memory

from sglang_neo.args import LANE_MODES
from sglang_neo.hybrid.host_attention import HostAttention
from sglang_neo.hybrid.pipelined import LaneSizes, PipelinedAttention
from sglang_neo.planning.lanes import lane_buckets
from sglang_neo.refusals import gpu_only_reasons

logger = logging.getLogger(__name__)

#: Attributes of SGLang's attention backends that hold what belongs to one captured graph, by its batch size. FlashInfer
#: makes new wrappers at each capture, and the graph reads their memory: two graphs of one size must not share them.
_PER_GRAPH = ("decode_cuda_graph_metadata",)
#: Bytes on the device of one graph more. FlashInfer allocates 8 MiB for a graph's wrapper; with triton nine graphs of
#: 32 layers took 10 MB together (one H200).
_GRAPH_BYTES = {"flashinfer": 10 << 20}
_GRAPH_BYTES_ELSE = 2 << 20
#: A size is left out if the next smaller one is within this factor of the next larger one.
_STEP = 1.25
#: The same of each lane of steps in two lanes: there is a graph for nearly every pair of sizes.
_LANE_STEP = 1.5


def host_row_sizes(sizes: Sequence[int], step: float = _STEP) -> list[int]:
    """The batch sizes to capture for steps with host rows: a part of ``sizes``, ascending, always with the largest.

    A step is padded to at most ``step`` times its rows wherever ``sizes`` allow that.
    """
    ascending = sorted(set(sizes))
    kept: list[int] = []
    for size, following in zip(ascending, [*ascending[1:], None], strict=True):
        if following is None or not kept or following > step * kept[-1]:
            kept.append(size)
    return kept


def host_graph_bytes(args: Any) -> int:
    """What the second set of graphs will take on the device, about: kept out of the KV pool.

    Args:
        args: NeoServerArgs, resolved.
    """
    decode = args.cuda_graph_config.decode
    if args.neo_mode == "gpu-only" or decode.backend != Backend.FULL or gpu_only_reasons(args):
        return 0
    graphs = len(host_row_sizes(decode.bs))
    if args.neo_mode == "auto" and args.neo_deferred_slots != 0:  # None: so many as will do
        graphs *= 2
    if args.neo_mode in ("auto", *LANE_MODES):
        graphs += 2 * len(lane_buckets(host_row_sizes(decode.bs, _LANE_STEP), max(decode.bs)))
    return graphs * _GRAPH_BYTES.get(args.attention_backend, _GRAPH_BYTES_ELSE)


class NeoDecodeCudaGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner of captured decode steps with a second set of graphs; ``host_rows`` selects it."""

    capture_bs: list[int]
    max_bs: int
    backend: Any
    attn_backend: Any

    def __init__(self, model_runner: Any, **kwargs: Any):
        host = model_runner.neo_host
        self._attention: HostAttention | None = host.attention if host is not None else None
        #: What graphs with hand-offs are made for, by the label of the set.
        self._sets: dict[str, HostAttention] = {}
        if host is not None:
            self._sets["host-rows"] = host.attention
            if host.deferred is not None and host.deferred is not host.attention:
                self._sets["slot-rows"] = host.deferred
        self._selected: str | None = None
        self._metadata: dict[str, dict[str, dict[Any, Any]]] = {}  # of each set, by name of the attribute
        #: Empty: steps with host rows run eagerly.
        self.host_sizes: list[int] = []
        #: Rows of both lanes of the graphs in two lanes, in pipelined mode.
        self.lane_buckets: list[LaneSizes] = []
        #: What the second set takes on the device, GB as SGLang counts them (2^30 bytes).
        self.host_graph_gb = 0.0
        super().__init__(model_runner, **kwargs)

    def host_rows(self, attention: HostAttention | None = None) -> contextlib.AbstractContextManager[None]:
        """While a step with host rows runs, or is captured: it takes the graphs of the second set, those with the
        hand-offs of ``attention`` (default: the host side's own)."""
        attention = attention or self._attention
        label = next(label for label, made_for in self._sets.items() if made_for is attention)
        return self._selecting(label, self._sizes_for(self._sets[label]))

    def _sizes_for(self, attention: HostAttention) -> list[int]:
        return [size for size in self.host_sizes if size >= attention.least_rows]

    def lanes(self, sizes: LaneSizes) -> contextlib.AbstractContextManager[None]:
        """While a step in two lanes runs, or is captured: it takes the graph of these sizes."""
        return self._selecting(f"lane-b-{sizes.b}", [sizes.a + sizes.b])

    @contextlib.contextmanager
    def _selecting(self, label: str, sizes: list[int]) -> Iterator[None]:
        backend = self.attn_backend
        names = [name for name in _PER_GRAPH if isinstance(getattr(backend, name, None), dict)]
        own = {name: getattr(backend, name) for name in names}
        before = self.capture_bs, self.max_bs
        self._selected, self.capture_bs, self.max_bs = label, sizes, max(sizes)
        for name, metadata in self._metadata.setdefault(label, {name: {} for name in names}).items():
            setattr(backend, name, metadata)
        try:
            yield
        finally:
            for name, metadata in own.items():
                setattr(backend, name, metadata)
            self._selected = None
            self.capture_bs, self.max_bs = before

    def _make_graph_key(self, size: int, stream_idx: int | None = None, variant_label: str | None = None) -> Any:
        return super()._make_graph_key(size, stream_idx, self._selected or variant_label)

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        super()._capture_one_stream(stream_idx)
        if self._attention is None:
            return
        reason = self._eager_reason()
        if reason is not None:
            logger.info(f"sglang_neo: steps with host rows run without CUDA graphs: {reason}")
            return
        before = self._free_memory()
        # Every size where steps are not padded to a larger one.
        self.host_sizes = list(self.capture_bs) if self.disable_padding else host_row_sizes(self.capture_bs)
        # Where SGLang has graphs with and without LoRA kernels, those with them serve both.
        _set_capture_lora_variant("lora" if getattr(self, "record_nolora_graph", False) else None)
        try:
            for attention in self._sets.values():
                with self.host_rows(attention):
                    # The largest first, as SGLang: the others reuse its memory.
                    for size in reversed(self._sizes_for(attention)):
                        self.capture_one_shape(size, self._with_handoffs(attention, size), stream_idx)
            in_one = before - self._free_memory()
            if isinstance(self._attention, PipelinedAttention):
                self._capture_lanes(self._attention, stream_idx)
        finally:
            _set_capture_lora_variant(None)
        self.host_graph_gb = before - self._free_memory()
        logger.info(
            f"sglang_neo: captured steps with host rows, bs={self.host_sizes}, mem usage={self.host_graph_gb:.2f} GB "
            f"({in_one:.2f} without two lanes), of "
            f"{host_graph_bytes(self.model_runner.server_args) / 2**30:.2f} GB left for them"
        )

    def _capture_lanes(self, attention: PipelinedAttention, stream_idx: int | None) -> None:
        buckets = lane_buckets(host_row_sizes(self.capture_bs, _LANE_STEP), max(self.capture_bs))
        self.lane_buckets = [LaneSizes(*pair) for pair in buckets]
        for sizes in sorted(self.lane_buckets, key=sum, reverse=True):
            attention.sizes = sizes
            try:
                with self.lanes(sizes):
                    forward = attention.in_lanes(self.model_runner.model.forward, sizes, flags=self._flags_live)
                    self.capture_one_shape(sum(sizes), forward, stream_idx)
            finally:
                attention.sizes = None
        logger.info(f"sglang_neo: captured steps in two lanes, bs={[tuple(sizes) for sizes in self.lane_buckets]}")

    def _eager_reason(self) -> str | None:
        assert self._attention is not None
        if not self._attention.stream.capturable:
            return "stream memory operations are missing"
        least = max(attention.least_rows for attention in self._sets.values())
        if max(self.capture_bs) < least:
            return f"they have {least} rows at least"
        if not isinstance(self.backend, FullCudaGraphBackend):
            return f"--cuda-graph-backend-decode is not full ({type(self.backend).__name__})"
        return None

    def _with_handoffs(self, attention: HostAttention, size: int) -> Callable[..., Any]:
        """The model's forward for a batch of ``size`` rows, any of which may be host rows."""
        model = self.model_runner.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Nobody answers while SGLang warms a graph up.
            with attention.emitting(size, flags=self._flags_live()):
                return model.forward(*args, **kwargs)

        return forward

    def _flags_live(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _free_memory(self) -> float:
        runner = self.model_runner
        return float(get_available_gpu_memory(runner.device, runner.gpu_id, empty_cache=False))
