"""Boxes of a hand-off: both implementations move the same rows. The triton kernels run in triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from sglang_neo.hybrid.exchange import NO_ROW, Exchange, TorchExchange, exchange_for

#: Rows of the batch, query heads, KV heads, head_dim; widths below, at and above what one program moves.
SHAPES = [(6, 4, 2, 16), (3, 8, 8, 64), (9, 28, 4, 80)]


def check_exchange(exchange: Exchange, batch: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    heads = q_heads, kv_heads, kv_heads
    packed = torch.randn(batch, sum(heads) * head_dim, generator=generator)
    q, k, v = packed.split([n * head_dim for n in heads], dim=1)  # as models do: rows of one wider tensor
    k = k.contiguous().view(batch, kv_heads, head_dim)
    rows, capacity = [batch - 1, 0], 5
    control = torch.tensor([41, *rows, *[NO_ROW] * (capacity - len(rows)), 1], dtype=torch.int32)
    outbox, header = torch.zeros(capacity + 1, packed.shape[1]), torch.zeros(16, dtype=torch.int32)
    exchange.pack(q, k, v, control, outbox, header, capacity)
    assert torch.equal(outbox[: len(rows)], packed[rows]) and header.tolist() == [41] + [0] * 15
    assert not outbox[capacity].any(), "beyond the capacity"

    inbox = torch.randn(capacity, q_heads * head_dim, generator=generator)
    out = torch.randn(batch, q_heads, head_dim, generator=generator)
    expected = out.clone()
    expected[rows] = inbox[: len(rows)].view(-1, q_heads, head_dim)
    exchange.unpack(inbox, control, out, capacity)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_torch(shape: tuple[int, int, int, int]) -> None:
    check_exchange(TorchExchange(), *shape)
    assert isinstance(exchange_for("cpu"), TorchExchange)


def test_triton_kernels() -> None:
    """In a process of its own: triton decides at import whether it interprets."""
    script = """
        from sglang_neo.hybrid.triton_exchange import TritonExchange
        from tests.hybrid.test_exchange import SHAPES, check_exchange
        for shape in SHAPES:
            check_exchange(TritonExchange(), *shape)
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, timeout=300)
