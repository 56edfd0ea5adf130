"""Other people's decode attention on the same numbers: PyTorch's SDPA in both call styles, and ggml's of llama.cpp.

They read one contiguous run of tokens per row and KV head, [rows, kv_heads, tokens, head_dim] for K and for V, which is
the layout that suits them best.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.cases import Data, WrongAnswer, decode

SDPA = ("torch-sdpa-grouped", "torch-sdpa-enable-gqa")
GGML = "llama.cpp-flash-attention"


@dataclass(frozen=True)
class Anchor:
    """``run(layer)`` computes one layer; ``output()`` is what the last run gave, [rows, q_heads, head_dim] float64."""

    name: str
    layers: int
    run: Callable[[int], None]
    output: Callable[[], NDArray[np.float64]]
    k: NDArray[np.generic]  # [layers, rows, kv_heads, tokens, head_dim], the element type's bits
    v: NDArray[np.generic]


class Missing(Exception):
    """The library is not installed, or cannot do it; the message says which."""


def _kv(data: Data, rows: int, tokens: int) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """K and V as views of the memory: all its 16-bit and fp32 elements are valid numbers, whatever the layout."""
    s = data.shape
    kind = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}[data.dtype]
    one = rows * s.kv_heads * tokens * s.head_dim
    all_ = np.frombuffer(data.memory.view(0, data.bytes), kind)
    layers = len(all_) // (2 * one)
    if layers < 1:
        raise Missing("not enough memory was set aside")
    k, v = (all_[i * layers * one : (i + 1) * layers * one] for i in range(2))
    return tuple(x.reshape(layers, rows, s.kv_heads, tokens, s.head_dim) for x in (k, v))  # type: ignore[return-value]


def check(anchor: Anchor, data: Data, q: NDArray[np.generic], bound: float, rows: int = 4) -> tuple[float, float]:
    """Runs it once.

    Returns:
        The largest error of some rows as a fraction of the largest value, and the seconds that the run took.

    Raises:
        WrongAnswer: the error is above the bound.
    """
    begin = time.perf_counter()
    anchor.run(0)
    took = time.perf_counter() - begin
    got = anchor.output()
    worst, top = 0.0, 0.0
    s = data.shape
    for row in sorted({int(r) for r in np.linspace(0, len(got) - 1, rows)}):
        k, v = (decode(x[0, row], data.dtype) for x in (anchor.k, anchor.v))
        queries = decode(q[row], data.dtype).reshape(s.kv_heads, -1, s.head_dim)
        scores = np.einsum("hgd,htd->hgt", queries, k) * s.head_dim**-0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("hgt,htd->hgd", p / p.sum(-1, keepdims=True), v).reshape(s.q_heads, s.head_dim)
        worst = max(worst, float(np.abs(got[row] - want).max()))
        top = max(top, float(np.abs(want).max()))
    error = worst / top
    if not error <= bound:
        raise WrongAnswer(f"{anchor.name}: error {error:.2g} of the largest value, the bound is {bound:.2g}")
    return error, took


def sdpa(style: str, data: Data, q: NDArray[np.generic], tokens: int, threads: int) -> Anchor:
    """PyTorch's scaled_dot_product_attention.

    Args:
        style: "torch-sdpa-grouped": the query heads of a KV head as that many query positions, so that K and V are read
            once for all; "torch-sdpa-enable-gqa": one position, ``enable_gqa=True``.
        q: [rows, q_heads, head_dim].
    """
    if importlib.util.find_spec("torch") is None:
        raise Missing("torch is not installed")
    import torch

    torch.set_num_threads(threads)
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[data.dtype]
    s, rows = data.shape, len(q)
    k, v = _kv(data, rows, tokens)

    def tensor(x: NDArray[np.generic]) -> Any:
        return torch.from_numpy(x.view(np.int16) if x.dtype == np.uint16 else x).view(kind)

    keys, values, queries = tensor(k), tensor(v), tensor(np.ascontiguousarray(q))
    last: list[Any] = [None]
    attend = torch.nn.functional.scaled_dot_product_attention
    if style == SDPA[0]:
        grouped = queries.view(rows, s.kv_heads, s.q_heads // s.kv_heads, s.head_dim)

        def run(layer: int) -> None:
            last[0] = attend(grouped, keys[layer], values[layer])
    else:
        single = queries.view(rows, s.q_heads, 1, s.head_dim)

        def run(layer: int) -> None:
            last[0] = attend(single, keys[layer], values[layer], enable_gqa=True)

    def output() -> NDArray[np.float64]:
        result: NDArray[np.float64] = last[0].reshape(rows, s.q_heads, s.head_dim).double().numpy()
        return result

    return Anchor(style, len(k), run, output, k, v)


class _Params(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def ggml(data: Data, q: NDArray[np.generic], tokens: int, threads: int) -> Anchor:
    """ggml's flash attention on its CPU backend, as llama-cpp-python ships it; f16 K and V, f32 queries and outputs."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise Missing("llama_cpp is not installed")
    if data.dtype != "float16":
        raise Missing("measured with fp16 K and V only")
    folder = Path(spec.origin).parent / "lib"
    try:
        base, cpu = (ctypes.CDLL(str(folder / f"lib{n}.so"), ctypes.RTLD_GLOBAL) for n in ("ggml-base", "ggml-cpu"))
        for name in ("ggml_init", "ggml_new_tensor_4d", "ggml_flash_attn_ext", "ggml_new_graph"):
            getattr(base, name).restype = ctypes.c_void_p
        base.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p
        cpu.ggml_backend_cpu_init.restype = ctypes.c_void_p
        base.ggml_backend_graph_compute.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise Missing(f"llama_cpp's ggml cannot be used: {error}") from None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    s, rows = data.shape, len(q)
    k, v = _kv(data, rows, tokens)
    queries = np.ascontiguousarray(decode(q, data.dtype).astype(np.float32))
    out = np.zeros((rows, s.q_heads, s.head_dim), np.float32)
    context = pointer(base.ggml_init(_Params(16 << 20, None, True)))
    backend = pointer(cpu.ggml_backend_cpu_init())
    cpu.ggml_backend_cpu_set_n_threads(backend, ctypes.c_int(threads))

    def place(tensor: ctypes.c_void_p, address: int, size: int) -> None:
        # The address must be a multiple of 32; numpy's are of 16 at least, and rows here of 64 and more.
        buffer = pointer(base.ggml_backend_cpu_buffer_from_ptr(pointer(address), ctypes.c_size_t(size)))
        base.ggml_backend_tensor_alloc(buffer, tensor, pointer(address))

    def new(kind: int, *dims: int) -> ctypes.c_void_p:
        return pointer(base.ggml_new_tensor_4d(context, ctypes.c_int(kind), *map(number, dims)))

    def aligned(like: NDArray[np.float32]) -> NDArray[np.float32]:
        raw = np.zeros(like.size + 16, np.float32)
        skip = -raw.ctypes.data % 64 // 4
        placed = raw[skip : skip + like.size].reshape(like.shape)
        placed[...] = like
        return placed

    queries, out = aligned(queries), aligned(out)
    f32, f16 = 0, 1
    query = new(f32, s.head_dim, 1, s.q_heads, rows)
    place(query, queries.ctypes.data, queries.nbytes)
    graphs = []
    for layer in range(len(k)):
        keys, values = (new(f16, s.head_dim, tokens, s.kv_heads, rows) for _ in range(2))
        place(keys, k[layer].ctypes.data, k[layer].nbytes)
        place(values, v[layer].ctypes.data, v[layer].nbytes)
        scale = ctypes.c_float(s.head_dim**-0.5)
        zero = ctypes.c_float(0)
        result = pointer(base.ggml_flash_attn_ext(context, query, keys, values, None, scale, zero, zero))
        place(result, out.ctypes.data, out.nbytes)
        graph = pointer(base.ggml_new_graph(context))
        base.ggml_build_forward_expand(graph, result)
        graphs.append(graph)
        if len(graphs) == 16:  # a graph takes room in the context
            break

    def run(layer: int) -> None:
        if base.ggml_backend_graph_compute(backend, graphs[layer]) != 0:
            raise Missing("ggml refused the graph")

    keep = (queries, out)
    return Anchor(GGML, len(graphs), run, lambda: keep[1].astype(np.float64), k, v)
