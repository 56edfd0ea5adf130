"""Which models have attention on the CPU; the others are told why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from sglang_neo.hybrid.geometry import NoCpuAttention, attention_geometry


def layer(layer_id: int, **changes: Any) -> SimpleNamespace:
    values = {
        "layer_id": layer_id,
        "attn_type": AttentionType.DECODER,
        "is_cross_attention": False,
        "sliding_window_size": -1,
        "xai_temperature_len": -1,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "tp_q_head_num": 8,
        "tp_k_head_num": 2,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "scaling": 0.125,
        **changes,
    }
    return SimpleNamespace(**values)


def test_a_plain_decoder() -> None:
    found = attention_geometry([layer(i, logit_cap=30.0) for i in range(4, 7)], torch.bfloat16)
    assert (found.layers, found.q_heads, found.kv_heads, found.head_dim) == (3, 8, 2, 64)
    assert (found.scale, found.soft_cap, found.dtype) == (0.125, 30.0, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_size": 4096}, "sliding-window"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "decoder"),
        ({"is_cross_attention": True}, "decoder"),
        ({"v_head_dim": 128}, "different sizes"),
        ({"qk_head_dim": 72, "v_head_dim": 72}, "head_dim 72"),
        ({"qk_head_dim": 512, "v_head_dim": 512}, "head_dim 512"),
        ({"tp_q_head_num": 64}, "64 query heads over 2"),
        ({"xai_temperature_len": 1024}, "temperature"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "sigmoid"),
    ],
)
def test_what_the_kernels_lack(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NoCpuAttention, match=message):
        attention_geometry([layer(i, **changes) for i in range(2)], torch.float32)


def test_layers_that_differ_or_are_missing() -> None:
    with pytest.raises(NoCpuAttention, match="from layer to layer"):
        attention_geometry([layer(0), layer(1, scaling=0.5)], torch.float32)
    with pytest.raises(NoCpuAttention, match="no attention"):
        attention_geometry([layer(0), layer(2)], torch.float32)
    with pytest.raises(NoCpuAttention, match="share a layer id"):
        attention_geometry([layer(0), layer(0)], torch.float32)
    with pytest.raises(NoCpuAttention, match="no attention layer"):
        attention_geometry([], torch.float32)
    with pytest.raises(NoCpuAttention, match="float64"):
        attention_geometry([layer(0)], torch.float64)
