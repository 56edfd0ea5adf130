"""SGLang's own KV pools: which of them the host pool can serve, and how their buffers are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_neo.host_kv.device_pool import device_kv
from sglang_neo.host_kv.pool import HostKVGeometry, UnsupportedKV


def make(**given: Any) -> MHATokenToKVPool:
    usual = dict(
        size=32, page_size=1, dtype=torch.bfloat16, head_num=2, head_dim=64, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKVPool(**{**usual, **given})


def test_a_plain_pool() -> None:
    pool = make()
    kv = device_kv(pool)
    assert [x.data_ptr() for x in kv.k] == [x.data_ptr() for x in pool.k_buffer]
    assert [x.data_ptr() for x in kv.v] == [x.data_ptr() for x in pool.v_buffer]
    assert kv.geometry() == HostKVGeometry(3, 2, 64, "bfloat16", 64, v_head_dim=64)
    assert kv.geometry("int8", 128).dtype == "int8"
    assert kv.bytes == sum(pool.get_kv_size_bytes())


@pytest.mark.parametrize(
    ("given", "message"),
    [(dict(dtype=torch.float8_e5m2), "float8_e5m2"), (dict(kv_cache_layout="page_major"), "page_major")],
)
def test_other_layouts_and_types_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedKV, match=message):
        device_kv(make(**given))


def test_other_attention_is_refused() -> None:
    with pytest.raises(UnsupportedKV, match="object"):
        device_kv(object())


def test_unequal_heads_are_refused() -> None:
    with pytest.raises(UnsupportedKV, match="head_dim 32 beside keys of 64"):
        device_kv(make(v_head_dim=32)).geometry()
