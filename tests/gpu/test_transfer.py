"""Copies between a CUDA device and pinned host memory: what the CPU device does, and how fast.

The CPU path is the reference: tests/host_kv compares it with the CPU kernels byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_neo.host_kv import layout
from sglang_neo.host_kv.memory import HUGE_PAGE, HostMemory
from sglang_neo.host_kv.packing import TorchPacking
from sglang_neo.host_kv.pool import HostKVGeometry, HostKVPool
from sglang_neo.host_kv.streams import CudaDevice
from sglang_neo.host_kv.transfer import KVTransfer

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float16", "bfloat16", "int8")
DEVICE = "cuda"
LAYERS, HEADS, DIM, TOKENS = 5, 4, 128, 64
SLOTS, PAGES = 1500, 40


class Setup:
    """The same random keys and values on the GPU and on the CPU, each with a host pool and a KVTransfer.

    The GPU's host memory is pinned in pieces of 4 MiB, so that copies are cut at their ends.
    """

    def __init__(self, dtype: str, pin: bool = True, **options: Any):
        self.geometry = HostKVGeometry(LAYERS, HEADS, DIM, dtype, TOKENS)
        size = PAGES * self.geometry.bytes_per_page
        self.memory = HostMemory(size, pin=pin, threads=4, pin_chunk=2 * HUGE_PAGE)
        self.pool = HostKVPool(self.geometry, PAGES, self.memory)
        kind = torch.bfloat16 if dtype == "int8" else layout.element_dtype(dtype)
        random = torch.Generator().manual_seed(1)
        k, v = ([torch.randn(SLOTS, HEADS, DIM, generator=random).to(kind) for _ in range(LAYERS)] for _ in range(2))
        self.cpu_pool = HostKVPool(self.geometry, PAGES, torch.zeros(size, dtype=torch.uint8))
        self.cpu = KVTransfer(self.cpu_pool, k, v)
        self.cpu_k, self.cpu_v = k, v
        self.k, self.v = ([x.to(DEVICE) for x in buffers] for buffers in (k, v))
        self.transfer = KVTransfer(self.pool, self.k, self.v, **options)

    def close(self) -> None:
        self.transfer.synchronize()
        torch.cuda.synchronize()
        self.memory.close()

    def assert_pages_equal(self, pages: list[int]) -> None:
        assert torch.equal(self.pool.pages_tensor[:, pages], self.cpu_pool.pages_tensor[:, pages])

    def assert_slots_equal(self) -> None:
        for ours, theirs in ((self.k, self.cpu_k), (self.v, self.cpu_v)):
            for layer in range(LAYERS):
                assert torch.equal(ours[layer].cpu(), theirs[layer]), f"layer {layer}"


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    options = dict(getattr(request, "param", {"dtype": "bfloat16"}))
    made = Setup(**options)
    yield made
    made.close()


def some_slots(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:count]


def some_pages(count: int, seed: int) -> list[int]:
    pages = count // TOKENS + (count % TOKENS > 0)
    if seed % 2:
        return list(range(seed % 5, seed % 5 + pages))
    return torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))[:pages].tolist()


def spin(milliseconds: int = 1000) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@pytest.mark.parametrize("setup", [{"dtype": x, "packing": TorchPacking} for x in DTYPES], indirect=True, ids=DTYPES)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_packing_by_torch(setup: Setup, count: int) -> None:
    """What buffers of unlike strides get; all other tests here have the triton kernels."""
    test_both_ways_as_on_the_cpu(setup, count, background=False)


def test_packing_is_one_launch(setup: Setup) -> None:
    assert type(setup.transfer._packing).__name__ == "TritonPacking"


@pytest.mark.parametrize("setup", [{"dtype": dtype} for dtype in DTYPES], indirect=True, ids=DTYPES)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_both_ways_as_on_the_cpu(setup: Setup, count: int, background: bool) -> None:
    for seed in range(2):
        slots, to, pages = some_slots(count, seed), some_slots(count, seed + 10), some_pages(count, seed)
        assert setup.cpu.to_host(slots, pages).done()
        setup.transfer.to_host(slots.to(DEVICE), pages, background=background).synchronize()
        setup.assert_pages_equal(pages)
        setup.cpu.to_device(pages, to)
        transfer = setup.transfer.to_device(pages, to.to(DEVICE), background=background)
        transfer.wait()
        setup.assert_slots_equal()
        assert transfer.done()


UNIT = HEADS * layout.page_bytes("bfloat16", TOKENS, DIM)


@pytest.mark.parametrize(
    "setup",
    [
        {"dtype": "bfloat16", "max_pitch": 0},
        {"dtype": "bfloat16", "staging_bytes": 2 * 3 * UNIT, "buffers": 2},
        {"dtype": "int8", "staging_bytes": 4 * 2 * 3 * UNIT, "buffers": 2},
        {"dtype": "bfloat16", "pin": False},
    ],
    indirect=True,
    ids=["row by row", "small staging", "small staging int8", "not pinned"],
)
def test_other_settings(setup: Setup) -> None:
    slots, to, pages = some_slots(1000), some_slots(1000, 1), some_pages(1000, 1)
    setup.cpu.to_host(slots, pages)
    setup.transfer.to_host(slots.to(DEVICE), pages).synchronize()
    setup.assert_pages_equal(pages)
    setup.cpu.to_device(pages, to)
    setup.transfer.to_device(pages, to.to(DEVICE))
    setup.assert_slots_equal()


def test_without_the_runtime_library(setup: Setup) -> None:
    """torch's own copies, where libcudart cannot be found. The pool is one piece there."""
    device = CudaDevice(torch.device(DEVICE, 0))
    assert device.runtime is not None, "libcudart was not found"
    device.runtime = None
    setup.transfer = KVTransfer(setup.pool, setup.k, setup.v, device)
    slots, pages = some_slots(1000), some_pages(1000, 0)
    setup.cpu.to_host(slots, pages)
    setup.transfer.to_host(slots.to(DEVICE), pages).synchronize()
    setup.assert_pages_equal(pages)


def test_memory_is_pinned(setup: Setup) -> None:
    assert setup.memory.pinned
    assert len(setup.memory.piece_ends) > 1
    assert setup.pool.pages_tensor.is_pinned()


def test_slots_can_be_reused_at_once(setup: Setup) -> None:
    slots, pages = some_slots(1000), some_pages(1000, 1)
    setup.cpu.to_host(slots, pages)
    on_device = slots.to(DEVICE)
    # Kernels are loaded, which may wait for the device: those of the copy, and that of the loop below.
    setup.transfer.to_host(on_device, pages).synchronize()
    setup.k[0].clone().index_fill_(0, on_device, 7.0)
    setup.pool.pages_tensor.zero_()
    spin()
    transfer = setup.transfer.to_host(on_device, pages)
    for x in (*setup.k, *setup.v):
        x.index_fill_(0, on_device, 7.0)  # x[on_device] = 7.0 would wait for the stream: it copies the 7.0
    assert not transfer.done(), "the call waited for the stream"
    transfer.synchronize()
    setup.assert_pages_equal(pages)


def test_many_at_once(setup: Setup) -> None:
    """Requests leave and come back through few and small staging buffers, their slots reused at once."""
    setup.transfer = KVTransfer(setup.pool, setup.k, setup.v, staging_bytes=3 * 7 * UNIT, buffers=3)
    for seed in range(60):
        count = int(torch.randint(1, 700, (1,), generator=torch.Generator().manual_seed(seed)))
        slots, pages = some_slots(count, seed), some_pages(count, seed)
        on_device = slots.to(DEVICE, non_blocking=True)
        if seed % 3 != 2:
            setup.cpu.to_host(slots, pages)
            setup.transfer.to_host(on_device, pages)
            for x in (*setup.k, *setup.v):
                x[on_device] = seed / 64
            for x in (*setup.cpu_k, *setup.cpu_v):
                x[slots] = seed / 64
        else:
            setup.cpu.to_device(pages, slots)
            setup.transfer.to_device(pages, on_device)
    setup.transfer.synchronize()
    setup.assert_slots_equal()
    setup.assert_pages_equal(list(range(PAGES)))


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged: requests of 1,000 tokens of a model of 80 layers, 8 heads, head_dim 128, bf16."""
    layers, heads, tokens, requests = 80, 8, 1000, 4
    k, v = ([torch.randn(requests * tokens, heads, 128, device=DEVICE).bfloat16() for _ in range(layers)] for _ in "kv")
    lines = []
    for dtype in ("bfloat16", "int8"):
        geometry = HostKVGeometry(layers, heads, 128, dtype)
        pages = requests * geometry.pages_for_tokens(tokens)
        begin = time.perf_counter()
        memory = HostMemory(pages * geometry.bytes_per_page, pin=True, threads=8)
        lines.append(f"{dtype}: {memory.bytes / 1e9:.2f} GB pinned in {time.perf_counter() - begin:.2f} s")
        pool = HostKVPool(geometry, pages, memory)
        per_request = geometry.pages_for_tokens(tokens)
        orders = {"runs": list(range(pages)), "single pages": torch.randperm(pages).tolist()}
        for staging in (64, 256) if dtype == "bfloat16" else (128,):
            transfer = KVTransfer(pool, k, v, staging_bytes=staging << 20)
            for background in (False, True):
                for name, order in orders.items():
                    split = [order[i * per_request : (i + 1) * per_request] for i in range(requests)]
                    for way in ("to host", "to device"):
                        lines.append(
                            f"{dtype}, staging {staging} MiB, {'copy' if background else 'current'} stream, {name}, "
                            f"{way}: {measure(transfer, split, tokens, way, background)}"
                        )
            transfer.synchronize()
        del pool
        memory.close()
    with capsys.disabled():
        print("", *lines, sep="\n")


def measure(transfer: KVTransfer, split: list[list[int]], tokens: int, way: str, background: bool) -> str:
    slots = [torch.arange(i * tokens, (i + 1) * tokens, device=DEVICE) for i in range(len(split))]
    rates, calls, stalls = [], [], []
    for _ in range(3):
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in "ba")
        begin = time.perf_counter()
        before.record()
        done = [
            transfer.to_host(slot, pages, background=background)
            if way == "to host"
            else transfer.to_device(pages, slot, background=background)
            for slot, pages in zip(slots, split, strict=True)
        ]
        after.record()
        called = time.perf_counter() - begin
        for one in done:
            one.synchronize()
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        rates.append(sum(one.bytes for one in done) / seconds / 1e9)
        calls.append(called / len(done) * 1e3)
        stalls.append(before.elapsed_time(after) / len(done))
    return f"{max(rates):.1f} GB/s, call {min(calls):.2f} ms, current stream busy {min(stalls):.2f} ms per request"
