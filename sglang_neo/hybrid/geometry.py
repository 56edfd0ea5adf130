"""What a model's attention looks like to the CPU kernels, and whether they can compute it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

#: head_dim that cpu_kernels takes: multiples of 16 up to this.
_MAX_HEAD_DIM = 256
_MAX_QUERIES_PER_KV_HEAD = 16
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class NoCpuAttention(Exception):
    """The CPU kernels cannot compute this model's attention; the message says what stands in the way."""


@dataclass(frozen=True)
class AttentionGeometry:
    """One attention layer of one tensor-parallel rank; the same in all layers."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float  # 0: none
    dtype: str  # of queries, keys, values and outputs, in cpu_kernels' terms


def attention_layers(model: Any) -> list[Any]:
    """SGLang's attention layers (``RadixAttention``) of a model, by layer id."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return sorted(layers, key=lambda layer: layer.layer_id)


def attention_geometry(layers: Iterable[Any], dtype: torch.dtype) -> AttentionGeometry:
    """The common geometry of a model's attention layers.

    Args:
        layers: objects with the attributes of SGLang's ``RadixAttention``, by layer id.
        dtype: of queries, keys and values.

    Raises:
        NoCpuAttention: the layers differ from one another or need what the CPU kernels lack.
    """
    from sglang.srt.layers.radix_attention import AttentionType

    layers = list(layers)
    if not layers:
        raise NoCpuAttention("the model has no attention layer that SGLang's KV pool serves")
    if dtype not in _DTYPES:
        raise NoCpuAttention(f"attention in {dtype} has no CPU kernel")
    first = layers[0]
    for expected, layer in enumerate(layers, first.layer_id):
        if layer.layer_id != expected:
            raise NoCpuAttention("several attention layers share a layer id, or some layers have no attention")
        if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
            raise NoCpuAttention("the model has attention other than a decoder's self-attention")
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            raise NoCpuAttention("sliding-window attention has no CPU attention yet")
        if getattr(layer, "xai_temperature_len", -1) > 0:
            raise NoCpuAttention("attention with a temperature by position has no CPU kernel")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            raise NoCpuAttention(f"logit capping by {layer.logit_capping_method} has no CPU kernel")
        if layer.qk_head_dim != layer.v_head_dim:
            raise NoCpuAttention("keys and values of different sizes have no CPU kernel")
        if _shape(layer) != _shape(first):
            raise NoCpuAttention("attention that differs from layer to layer has no CPU attention")
    q_heads, kv_heads, head_dim, scale, soft_cap = _shape(first)
    if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
        raise NoCpuAttention(f"head_dim {head_dim} has no CPU kernel: multiples of 16 up to {_MAX_HEAD_DIM} have")
    if q_heads % kv_heads or q_heads // kv_heads > _MAX_QUERIES_PER_KV_HEAD:
        raise NoCpuAttention(f"{q_heads} query heads over {kv_heads} KV heads have no CPU kernel: 1 to 16 per KV head")
    return AttentionGeometry(len(layers), q_heads, kv_heads, head_dim, scale, soft_cap, _DTYPES[dtype])


def _shape(layer: Any) -> tuple[int, int, int, float, float]:
    return (
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        float(layer.scaling),
        float(layer.logit_cap or 0.0),
    )
