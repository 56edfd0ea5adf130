"""What sglang_neo does not serve is refused by name, with what to do instead; nothing is refused without need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo import refusals
from sglang_neo.args import NeoServerArgs, mode_lines, prepare_server_args
from sglang_neo.errors import UsageError

Tiny = Callable[..., Path]

on_the_cpu_device = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on the CPU device: set CUDA_VISIBLE_DEVICES=''"
)

#: Command line -> part of the refusal. At least one line for each of FLAG_REFUSALS.
REFUSED = {
    "--nnodes 2 --dist-init-addr 127.0.0.1:5000": "--nnodes",
    "--pp-size 2": "--pp-size",
    "--tp-size 2 --dp-size 2 --enable-dp-attention": "--enable-dp-attention",
    "--speculative-algorithm NGRAM": "speculative decoding",
    "--disaggregation-mode prefill": "disaggregation",
    "--enable-hierarchical-cache": "--enable-hierarchical-cache",
    "--enable-lmcache": "--enable-lmcache",
    "--enable-flexkv": "--enable-flexkv",
    "--enable-hisparse": "--enable-hisparse",
    "--enable-two-batch-overlap": "two-batch overlap",
    "--enable-single-batch-overlap": "single-batch overlap",
    "--enable-pdmux": "--enable-pdmux",
    "--dllm-algorithm LowConfidence": "diffusion",
    "--attn-cp-size 2": "context parallelism",
    "--dcp-size 2": "context parallelism",
    "--enable-unified-memory": "unified memory",
    "--encoder-only": "--encoder-only",
    "--use-ray": "--use-ray",
    "--smg-grpc-mode": "gRPC",
    "--grpc-mode": "gRPC",
}


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a command line sets logging up anew, which would take pytest's handlers away."""
    monkeypatch.setattr("logging.basicConfig", lambda **kwargs: None)


@pytest.mark.parametrize("line", REFUSED)
def test_each_flag_is_refused(tiny: Tiny, line: str) -> None:
    with pytest.raises(UsageError) as refusal:
        prepare_server_args(["--model-path", str(tiny("llama")), "--skip-tokenizer-init", *line.split()])
    message = str(refusal.value)
    assert REFUSED[line] in message
    assert "by sglang_neo; drop the flag, or use plain SGLang" in message
    assert "\n" not in message


def plain_values(**changed: Any) -> SimpleNamespace:
    values = {
        "nnodes": 1,
        "pp_size": 1,
        "enable_dp_attention": False,
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_hisparse": False,
        "enable_two_batch_overlap": False,
        "enable_single_batch_overlap": False,
        "enable_pdmux": False,
        "dllm_algorithm": None,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "enable_unified_memory": False,
        "encoder_only": False,
        "use_ray": False,
        "smg_grpc_mode": False,
        "grpc_mode": False,
    }
    return SimpleNamespace(**{**values, **changed})


#: Each of CPU_DEVICE_REFUSALS.
NEEDS_A_GPU = {
    "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj": "LoRA",
    "--lora-paths a=/nowhere": "LoRA",
    "--enable-torch-compile": "--enable-torch-compile",
    "--kv-canary log": "--kv-canary",
    "--enable-return-routed-experts": "--enable-return-routed-experts",
}


@on_the_cpu_device
@pytest.mark.parametrize("line", NEEDS_A_GPU)
def test_what_sglang_has_on_gpus_alone_is_refused_on_the_cpu_device(tiny: Tiny, line: str) -> None:
    """Each would end the scheduler with a traceback."""
    assert len(set(NEEDS_A_GPU.values())) == len(refusals.CPU_DEVICE_REFUSALS)
    flags = ["--device", "cpu", "--skip-tokenizer-init", *line.split()]
    with pytest.raises(UsageError, match=f"{NEEDS_A_GPU[line]}.* needs a GPU: .*; drop the flag"):
        prepare_server_args(["--model-path", str(tiny("llama")), *flags])


NOTHING_IN_THE_WAY: dict[str, Any] = {
    "enable_mixed_chunk": False,
    "enable_return_routed_experts": False,
    "kv_canary": "none",
    "radix_cache_backend": None,
    "disable_radix_cache": False,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"enable_return_routed_experts": True}, "experts"),
        ({"kv_canary": "log"}, "--kv-canary"),
        ({"radix_cache_backend": "mine"}, "--radix-cache-backend"),
    ],
)
def test_flags_that_leave_no_host_rows(changed: dict[str, Any], reason: str) -> None:
    config = SimpleNamespace(
        attention_arch=None, hf_text_config=SimpleNamespace(), sliding_window_size=None, is_generation=True
    )
    flags = {**NOTHING_IN_THE_WAY, **changed}
    args = SimpleNamespace(kv_cache_dtype="auto", **flags, get_model_config=lambda: config)
    [found] = refusals.gpu_only_reasons(args)
    assert reason in found


@on_the_cpu_device
@pytest.mark.parametrize("tree", ["SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"])
def test_another_prefix_cache_of_sglangs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    monkeypatch.setenv(tree, "1")
    [found] = refusals.gpu_only_reasons(resolved(str(tiny("llama"))))
    assert tree in found
    assert refusals.gpu_only_reasons(resolved(str(tiny("llama")), disable_radix_cache=True)) == []


def test_every_refusal_has_a_case() -> None:
    refusals.refuse_flags(plain_values())
    for refusal in refusals.FLAG_REFUSALS:
        assert any(part in refusal.message for part in REFUSED.values()), refusal.message


def test_a_feature_that_sglang_switches_on_itself_is_refused_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are looked at again after SGLang has resolved them."""
    from sglang.srt.server_args import ServerArgs

    def resolve(self: Any) -> None:
        self.enable_two_batch_overlap = True

    monkeypatch.setattr(ServerArgs, "__post_init__", resolve)
    with pytest.raises(UsageError, match="two-batch overlap"):
        NeoServerArgs(model_path=str(tiny("llama")))


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}

MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def config_folder(directory: Path, model_type: str, architecture: str, **settings: Any) -> str:
    """A model folder without weights: ``load_format="dummy"`` needs none."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return str(directory)


def resolved(path: str, **arguments: Any) -> NeoServerArgs:
    return NeoServerArgs(
        **{"model_path": path, "load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True, **arguments}
    )


@on_the_cpu_device
@pytest.mark.parametrize(
    ("model_type", "architecture", "settings"),
    [
        ("llama", "LlamaForCausalLM", {}),
        ("qwen2", "Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}),
        ("qwen3", "Qwen3ForCausalLM", {}),
        ("mistral", "MistralForCausalLM", {"sliding_window": None}),
        ("mixtral", "MixtralForCausalLM", {"sliding_window": None}),
    ],
)
def test_models_with_nothing_in_the_way(
    tmp_path: Path, model_type: str, architecture: str, settings: dict[str, Any]
) -> None:
    args = resolved(config_folder(tmp_path, model_type, architecture, **settings))
    assert refusals.gpu_only_reasons(args) == []
    assert mode_lines(args) == []


@on_the_cpu_device
@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "reason"),
    [
        ("deepseek_v2", "DeepseekV2ForCausalLM", MLA, "(MLA)"),
        ("mistral", "MistralForCausalLM", {"sliding_window": 64}, "sliding-window"),
        ("qwen2", "Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, "sliding-window"),
        ("gemma2", "Gemma2ForCausalLM", {}, "sliding-window"),
        ("llama", "LlamaForSequenceClassification", {}, "does not generate"),
    ],
)
def test_models_that_stay_gpu_only(
    tmp_path: Path, model_type: str, architecture: str, settings: dict[str, Any], reason: str
) -> None:
    args = resolved(config_folder(tmp_path, model_type, architecture, **settings))
    [found] = refusals.gpu_only_reasons(args)
    assert reason in found
    assert mode_lines(args) == [f"--neo-mode auto runs gpu-only: {found}"]


@pytest.mark.parametrize(("dtype", "served"), [("auto", True), ("bfloat16", True), ("fp8_e5m2", False)])
def test_kv_cache_types(dtype: str, served: bool) -> None:
    config = SimpleNamespace(
        attention_arch=None, hf_text_config=SimpleNamespace(), sliding_window_size=None, is_generation=True
    )
    args = SimpleNamespace(kv_cache_dtype=dtype, **NOTHING_IN_THE_WAY, get_model_config=lambda: config)
    assert (refusals.gpu_only_reasons(args) == []) is served


@on_the_cpu_device
def test_a_model_with_state_beside_kv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mamba or linear-attention state are not supported by sglang_neo; use plain"):
        resolved(config_folder(tmp_path, "lfm2", "Lfm2ForCausalLM"))


def test_a_model_with_two_kv_pools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(is_hybrid_swa=True)
    with pytest.raises(UsageError, match="separate KV pool for sliding-window layers"):
        refusals.refuse_model(SimpleNamespace(get_model_config=lambda: config))
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda config: None)
    config.is_hybrid_swa = False
    refusals.refuse_model(SimpleNamespace(get_model_config=lambda: config))


@on_the_cpu_device
def test_sglang_names_that_mark_two_kv_pools(tmp_path: Path) -> None:
    """The attribute that the refusal reads is the one that SGLang's model config sets."""
    from sglang.srt.configs.model_config import ModelConfig

    path = config_folder(tmp_path, "gpt_oss", "GptOssForCausalLM", num_local_experts=4)
    assert ModelConfig(path).is_hybrid_swa is True
    assert ModelConfig(config_folder(tmp_path / "llama", "llama", "LlamaForCausalLM")).is_hybrid_swa is False
