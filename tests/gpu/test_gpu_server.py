"""On a machine with a CUDA GPU: our classes really run there, inside CUDA graphs, and give plain SGLang's tokens.

bf16, as SGLang's CUDA kernels have no fp32. Requests that are compared go one at a time: then both servers run the
same kernels on the same shapes, and equal tokens are a fair demand even at bf16's precision.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.exact import Reference, assert_exact, top_gaps
from tests.harness.models import VOCAB_SIZE
from tests.harness.server import NEO, PLAIN, Server, ServerPool, ServerSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = [
    [random.Random(i).randrange(3, VOCAB_SIZE) for _ in range(random.Random(i).randrange(5, 90))] for i in range(12)
]
FLAGS = ("--skip-tokenizer-init", "--grammar-backend", "none", "--max-total-tokens", "20000")
CUDA_FLAGS = (
    *FLAGS,
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--disable-prefill-cuda-graph", "--cuda-graph-max-bs", "16", "--mem-fraction-static", "0.5"),
)


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    """head_dim 64: the smallest that all attention backends have."""
    return tiny("llama", dtype="bfloat16", head_dim=64)


@pytest.fixture
def pool(tmp_path: Path) -> Any:
    pool = ServerPool(tmp_path)
    yield pool
    pool.close()


def answers(server: Server) -> dict[str, Reference]:
    found = {}
    for i, prompt in enumerate(PROMPTS):
        result = server.generate(
            input_ids=prompt, max_new_tokens=32, ignore_eos=True, return_logprob=True, top_logprobs_num=2
        )
        tops = result["meta_info"]["output_top_logprobs"]
        found[str(i)] = Reference(result["output_ids"], top_gaps([entry[0] for entry in top] for top in tops))
    return found


def check_same_tokens_in_graphs(pool: ServerPool, model: Path, *extra: str) -> dict[str, Any]:
    """Plain's tokens against ours; returns the ``neo`` block."""
    flags = (*CUDA_FLAGS, *extra)
    reference = answers(pool.shared(ServerSpec(model, flags, PLAIN)))
    server = pool.shared(ServerSpec(model, flags, NEO))
    assert_exact(reference, {name: answer.tokens for name, answer in answers(server).items()})
    batch = server.generate(input_ids=PROMPTS, max_new_tokens=64, ignore_eos=True)
    assert [len(item["output_ids"]) for item in batch] == [64] * len(PROMPTS)
    assert "cuda graph: True" in server.log(), f"decode did not run in CUDA graphs\n{server.log_tail()}"
    neo: dict[str, Any] = server.info()["neo"]
    assert neo["device"] == "cuda"
    assert all(name.startswith("sglang_neo.") for name in neo["classes"].values()), neo["classes"]
    return neo


@pytest.mark.parametrize("page_size", [1, 64])
def test_tokens_equal_plain_sglang_with_cuda_graphs(pool: ServerPool, model: Path, page_size: int) -> None:
    neo = check_same_tokens_in_graphs(pool, model, "--page-size", str(page_size))
    assert neo["device_kv"]["page_size"] == page_size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel(pool: ServerPool, model: Path) -> None:
    check_same_tokens_in_graphs(pool, model, "--tp-size", "2")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel(pool: ServerPool, model: Path) -> None:
    assert check_same_tokens_in_graphs(pool, model, "--dp-size", "2")["dp_ranks"] == 2


def test_cpu_device_on_a_gpu_machine(pool: ServerPool, model: Path) -> None:
    """--device cpu hides the GPU from SGLang and serves from the CPU reference device."""
    server = pool.shared(ServerSpec(model, (*FLAGS, "--dtype", "float32", "--device", "cpu"), NEO))
    assert server.info()["neo"]["device"] == "cpu"
    assert len(server.generate(input_ids=PROMPTS[0], max_new_tokens=4, ignore_eos=True)["output_ids"]) == 4
