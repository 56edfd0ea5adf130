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

from bench.servers import NEO, PLAIN, Server, ServerPool, ServerSpec
from tests.harness.crowd import CROWD, SMALL_POOL, Comings, ask_crowd, check_used_the_host
from tests.harness.exact import Reference, assert_exact, top_gaps
from tests.harness.inprocess import Result
from tests.harness.models import VOCAB_SIZE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = [
    [random.Random(i).randrange(3, VOCAB_SIZE) for _ in range(random.Random(i).randrange(5, 90))] for i in range(12)
]
FLAGS = ("--skip-tokenizer-init", "--grammar-backend", "none", "--max-total-tokens", "20000")
CUDA_FLAGS = (
    *FLAGS,
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--disable-prefill-cuda-graph", "--cuda-graph-max-bs", "16", "--mem-fraction-static", "0.4"),
)


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    """head_dim 64: the smallest that all attention backends have."""
    return tiny("llama", dtype="bfloat16", head_dim=64)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir()
    return tmp_path


def answers(server: Server) -> dict[str, Reference]:
    found = {}
    for i, prompt in enumerate(PROMPTS):
        result = server.generate(
            input_ids=prompt, max_new_tokens=32, ignore_eos=True, return_logprob=True, top_logprobs_num=2
        )
        tops = result["meta_info"]["output_top_logprobs"]
        found[str(i)] = Reference(result["output_ids"], top_gaps([entry[0] for entry in top] for top in tops))
    return found


def check_same_tokens_in_graphs(directory: Path, model: Path, *extra: str) -> dict[str, Any]:
    """Plain's tokens against ours, the two servers up at the same time; returns the ``neo`` block."""
    flags = (*CUDA_FLAGS, *extra)
    with (
        ServerPool(directory).starting(ServerSpec(model, flags, NEO)) as server,
        ServerPool(directory / "plain").starting(ServerSpec(model, flags, PLAIN)) as plain,
    ):
        reference = answers(plain.wait_ready())
        got = answers(server.wait_ready())
        batch = server.generate(input_ids=PROMPTS, max_new_tokens=64, ignore_eos=True)
        log, neo = server.log(), server.info()["neo"]
    assert_exact(reference, {name: answer.tokens for name, answer in got.items()})
    assert [len(item["output_ids"]) for item in batch] == [64] * len(PROMPTS)
    assert "cuda graph: True" in log, "decode did not run in CUDA graphs"
    assert neo["device"] == "cuda"
    assert all(name.startswith("sglang_neo.") for name in neo["classes"].values()), neo["classes"]
    return dict(neo)


@pytest.mark.parametrize("page_size", [1, 64])
def test_tokens_equal_plain_sglang_with_cuda_graphs(directory: Path, model: Path, page_size: int) -> None:
    neo = check_same_tokens_in_graphs(directory, model, "--page-size", str(page_size))
    assert neo["device_kv"]["page_size"] == page_size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel(directory: Path, model: Path) -> None:
    check_same_tokens_in_graphs(directory, model, "--tp-size", "2")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["pipelined", "deferred", "sync"])
def test_tensor_parallel_with_host_rows(directory: Path, model: Path, mode: str) -> None:
    """A crowd answers as with plain SGLang; then 1,000 requests, half of which are aborted or left."""
    small, flags = [*CUDA_FLAGS, "--tp-size", "2"], ("--neo-mode", mode, "--neo-host-kv-size", "1")
    small[small.index("--max-total-tokens") + 1] = SMALL_POOL[1]
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
    with (
        ServerPool(directory).starting(ServerSpec(model, (*small, *flags), NEO)) as server,
        ServerPool(directory / "plain").starting(ServerSpec(model, tuple(small), PLAIN)) as plain,
    ):
        expected = as_results(ask_crowd(plain.wait_ready(), 1, **asked))
        got = as_results(ask_crowd(server.wait_ready(), CROWD, **asked))
        check_used_the_host(server)
        comings = Comings(server, seed=11)
        comings.run(1000)
        comings.check_all_is_free()
    from tests.gpu.test_captured import assert_alike  # which wants a GPU at import

    assert_alike(expected, got)


def as_results(answers: list[dict[str, Any]]) -> dict[str, Result]:
    """Answers of /generate in their order, with log-probabilities and the two best at each token."""
    results = {}
    for i, answer in enumerate(answers):
        meta = answer["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        top = [[entry[0] for entry in best] for best in meta["output_top_logprobs"]]
        results[str(i)] = Result(answer["output_ids"], logprobs, top, meta["finish_reason"]["type"], 0, 0, [])
    return results


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel(directory: Path, model: Path) -> None:
    assert check_same_tokens_in_graphs(directory, model, "--dp-size", "2")["dp_ranks"] == 2


def test_cpu_device_on_a_gpu_machine(directory: Path, model: Path) -> None:
    """--device cpu hides the GPU from SGLang and serves from the CPU reference device."""
    spec = ServerSpec(model, (*FLAGS, "--dtype", "float32", "--device", "cpu"), NEO)
    with ServerPool(directory).starting(spec) as server:
        assert server.wait_ready().info()["neo"]["device"] == "cpu"
        answer = server.generate(input_ids=PROMPTS[0], max_new_tokens=4, ignore_eos=True)
    assert len(answer["output_ids"]) == 4
