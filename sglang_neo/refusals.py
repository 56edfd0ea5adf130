"""What sglang_neo does not serve yet. Each refusal says what to do instead; nothing is silently served without us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_neo.errors import UsageError

_USE_PLAIN = "use plain SGLang (python -m sglang.launch_server)"


@dataclass(frozen=True)
class Refusal:
    applies: Callable[[Any], bool]  # given the resolved server arguments
    message: str


def _is_mambaish(args: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(args.get_model_config()) is not None


def _is_mla(args: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return bool(args.get_model_config().attention_arch == AttentionArch.MLA)


def _has_sliding_window(args: Any) -> bool:
    config = args.get_model_config()
    used = getattr(config.hf_text_config, "use_sliding_window", True)  # Qwen2 names a window that it does not use
    return bool(config.sliding_window_size) and used


def _has_another_prefix_cache(args: Any) -> bool:
    """Than RadixCache, of which ours is a subclass, or none at all (sglang/srt/mem_cache/registry.py)."""
    from sglang.srt.environ import envs

    other_tree = envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.get() or envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()
    return args.radix_cache_backend is not None or (bool(other_tree) and not args.disable_radix_cache)


#: Features that replace what we extend: the scheduling loop, the model worker, the pools or the entry point.
FLAG_REFUSALS = (
    Refusal(lambda a: a.nnodes > 1, "a server on several machines (--nnodes) is not supported"),
    Refusal(lambda a: a.pp_size > 1, "pipeline parallelism (--pp-size) is not supported"),
    Refusal(lambda a: a.enable_dp_attention, "data-parallel attention (--enable-dp-attention) is not supported"),
    Refusal(lambda a: a.speculative_algorithm is not None, "speculative decoding is not supported"),
    Refusal(lambda a: a.disaggregation_mode != "null", "prefill-decode disaggregation is not supported"),
    Refusal(lambda a: a.enable_hierarchical_cache, "HiCache (--enable-hierarchical-cache) is not supported"),
    Refusal(lambda a: a.enable_lmcache, "LMCache (--enable-lmcache) is not supported"),
    Refusal(lambda a: a.enable_flexkv, "FlexKV (--enable-flexkv) is not supported"),
    Refusal(lambda a: a.enable_hisparse, "HiSparse (--enable-hisparse) is not supported"),
    Refusal(lambda a: a.enable_two_batch_overlap, "two-batch overlap is not supported"),
    Refusal(lambda a: a.enable_single_batch_overlap, "single-batch overlap is not supported"),
    Refusal(lambda a: a.enable_pdmux, "PD multiplexing (--enable-pdmux) is not supported"),
    Refusal(lambda a: a.dllm_algorithm is not None, "diffusion language models are not supported"),
    Refusal(lambda a: a.attn_cp_size > 1 or a.dcp_size > 1, "context parallelism is not supported"),
    Refusal(lambda a: a.enable_unified_memory, "the unified memory pool is not supported"),
    Refusal(lambda a: a.encoder_only, "--encoder-only is not supported"),
    Refusal(lambda a: a.use_ray, "--use-ray is not supported"),
    Refusal(lambda a: a.smg_grpc_mode or a.grpc_mode, "the gRPC server mode is not supported"),
)

#: What SGLang itself has on GPUs alone, and ends with a traceback of its own on the CPU device.
CPU_DEVICE_REFUSALS = (
    Refusal(lambda a: a.enable_lora or a.lora_paths, "LoRA (--enable-lora, --lora-paths)"),
    Refusal(lambda a: a.enable_torch_compile, "--enable-torch-compile"),
    Refusal(lambda a: a.kv_canary != "none", "--kv-canary"),
    Refusal(lambda a: a.enable_return_routed_experts, "--enable-return-routed-experts"),
)

#: Models whose KV does not lie in one pool of plain token slots.
MODEL_REFUSALS = (
    Refusal(
        lambda a: getattr(a.get_model_config(), "is_hybrid_swa", False),
        "models with a separate KV pool for sliding-window layers are not supported",
    ),
    Refusal(_is_mambaish, "models with mamba or linear-attention state are not supported"),
)

#: Served by our classes, but only ever in mode gpu-only, and said so.
GPU_ONLY_REASONS = (
    Refusal(_is_mla, "multi-head latent attention (MLA) has no CPU attention"),
    Refusal(
        lambda a: a.kv_cache_dtype not in ("auto", "bf16", "bfloat16"),
        "the KV cache's data type has no CPU attention",
    ),
    Refusal(
        lambda a: a.enable_mixed_chunk, "decoding in one batch with prefill (--enable-mixed-chunk) has no host rows"
    ),
    Refusal(
        lambda a: a.enable_return_routed_experts,
        "experts are reported by a token's slot on the GPU (--enable-return-routed-experts)",
    ),
    Refusal(lambda a: a.kv_canary != "none", "--kv-canary watches the slots of the GPU's KV"),
    Refusal(
        _has_another_prefix_cache,
        "prefix caches other than SGLang's default (--radix-cache-backend, SGLANG_ENABLE_UNIFIED_RADIX_TREE, "
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE) have no host rows",
    ),
    Refusal(_has_sliding_window, "sliding-window attention has no CPU attention"),
    Refusal(lambda a: not a.get_model_config().is_generation, "the model does not generate"),
)


def refuse_flags(args: Any) -> None:
    """Raises UsageError for the first flag that is not supported. ``args`` may be resolved or not."""
    for refusal in FLAG_REFUSALS:
        if refusal.applies(args):
            raise UsageError(f"{refusal.message} by sglang_neo; drop the flag, or {_USE_PLAIN}")


def refuse_on_cpu_device(args: Any) -> None:
    """Raises UsageError for the first flag of the resolved ``args`` that needs a GPU where there is none."""
    for refusal in CPU_DEVICE_REFUSALS:
        if args.device == "cpu" and refusal.applies(args):
            raise UsageError(f"{refusal.message} needs a GPU: SGLang does not have it on the CPU device; drop the flag")


def refuse_model(args: Any) -> None:
    """Raises UsageError if the model of the resolved ``args`` is not supported."""
    for refusal in MODEL_REFUSALS:
        if refusal.applies(args):
            raise UsageError(f"{refusal.message} by sglang_neo; {_USE_PLAIN}")


def gpu_only_reasons(args: Any) -> list[str]:
    """Why this server will stay in mode gpu-only whatever --neo-mode says; empty if nothing stands in the way."""
    return [reason.message for reason in GPU_ONLY_REASONS if reason.applies(args)]
