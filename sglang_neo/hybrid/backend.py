"""The hybrid attention backend: the user's own one for device rows, the CPU workers for host rows.

To the user's backend a host row of a decode batch looks like the padding that SGLang itself uses in CUDA graphs: its
line of ``req_to_token`` is zero (slot 0, which nobody owns), its length is 1, and its new k and v go to slot 0. What
the backend computes for such a row is thrown away and replaced by the CPU's answer.

In a prefill whose prompts go to host memory, the backend works on a staging region (``prefill.py``), into and out of
which their tokens move around each layer's attention. Beside a prefill of either kind host rows may decode in a lane of
their own (``pipelined.py``), of which the user's backend sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_neo.hybrid.host_attention import HostAttention
from sglang_neo.hybrid.prefill import HostPrefill


def make_hybrid(backend: Any, host_attention: HostAttention, prefill: HostPrefill, first_layer: int) -> None:
    """Makes an attention backend hybrid, in place.

    Its class becomes a subclass of the one it had, so class attributes, isinstance checks and everything that the
    backend defines besides these two methods stay what they are; a wrapper object would have to forward each of them.
    """
    own = type(backend)
    if hasattr(own, "neo_host_attention"):
        raise ValueError("the backend is hybrid already")

    def forward_decode(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kw: Any,
    ) -> torch.Tensor:
        step, index = host_attention.current, layer.layer_id - first_layer
        if step is not None:
            step.send(index, q, k, v)
        if step is None or step.has_device_rows:
            out: torch.Tensor = own.forward_decode(self, q, k, v, layer, forward_batch, *args, **kw)
        else:
            out = q.new_zeros((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        if step is not None:
            step.handed_over()
            step.receive(index, out)
        return out

    def forward_extend(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kw: Any,
    ) -> torch.Tensor:
        prompts, index = prefill.current, layer.layer_id - first_layer
        if prompts is not None:
            prompts.bring(index)
        out: torch.Tensor = own.forward_extend(self, q, k, v, layer, forward_batch, *args, **kw)
        if prompts is not None:
            prompts.take(index)
        if host_attention.current is not None:  # host rows decode beside it
            host_attention.current.handed_over()
        return out

    members: dict[str, Any] = {
        "__module__": __name__,
        "forward_decode": forward_decode,
        "forward_extend": forward_extend,
        "neo_host_attention": host_attention,
    }
    for name in _METADATA:
        if hasattr(own, name):
            members[name] = _for_device(getattr(own, name), host_attention)
    backend.__class__ = type(f"Hybrid{own.__name__}", (own,), members)


#: Methods in which an attention backend prepares itself for a batch, their first argument.
_METADATA = ("init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph")


def _for_device(method: Callable[..., Any], host_attention: HostAttention) -> Callable[..., Any]:
    def prepare(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, host_attention.for_device(forward_batch), *args, **kwargs)

    return prepare


def hide_host_rows(forward_batch: Any, index: torch.Tensor, index_cpu: torch.Tensor) -> None:
    """Makes the host rows of a decode batch look like padding (see above) to the attention backend.

    Args:
        forward_batch: SGLang's ForwardBatch, positions already computed; its out_cache_loc is 0 for host rows.
        index, index_cpu: int64 [host rows], where they are, on the device and on the host.
    """
    forward_batch.seq_lens = forward_batch.seq_lens.index_fill(0, index, 1)
    if forward_batch.seq_lens_cpu is not None:
        forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu.index_fill(0, index_cpu, 1)
        forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())
