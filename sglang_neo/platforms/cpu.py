"""The CPU reference device as an SGLang platform: plain PyTorch on the host, no ``sgl_kernel``, no CUDA package."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

logger = logging.getLogger(__name__)

#: KV pool of the CPU device unless --max-total-tokens says otherwise. SGLang's default fills the machine's memory,
#: which on a host shared with everything else is never what one wants.
DEFAULT_MAX_TOTAL_TOKENS = 16384


def spread_cores(cores: list[int], ranks: int) -> list[list[int]]:
    """Split ``cores`` into ``ranks`` consecutive shares of equal size (sharing cores if there are too few).

    >>> spread_cores([0, 1, 2, 3], 2)
    [[0, 1], [2, 3]]
    >>> spread_cores([5], 2)
    [[5], [5]]
    """
    share = len(cores) // ranks
    if share == 0:
        return [[cores[rank % len(cores)]] for rank in range(ranks)]
    return [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]


class NeoCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Chosen by ``sglang_neo.platforms.activate``. Serves plain SGLang too: that is the reference of our tests."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Runs in the launching process, before any worker is spawned, so workers inherit the environment."""
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = "torch_native"  # SGLang's CPU default needs sgl_kernel's CPU build
        server_args.sampling_backend = server_args.sampling_backend or "pytorch"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
            logger.info("CPU device: KV pool of %d tokens (--max-total-tokens)", DEFAULT_MAX_TOTAL_TOKENS)
        if server_args.mem_fraction_static is None:
            # SGLang would set aside what a GPU's activations need, 1.5 MB per token of a prefill chunk: more than a
            # small machine has, and then it refuses to start. The pool's size is given above anyway.
            server_args.mem_fraction_static = 0.9
        # An idle scheduler would poll on a core that the model, or another rank, could use.
        server_args.sleep_on_idle = True
        cores = sorted(os.sched_getaffinity(0))
        shares = spread_cores(cores, server_args.tp_size)
        # One core is left to the HTTP server and the detokenizer: two busy OpenMP threads on two cores are slower and
        # far less steady than one.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(shares[0]) - 1)))
        if server_args.tp_size > 1:
            # SGLang asserts one NUMA node per rank unless it is told the cores (utils/numa_utils.py).
            binding = "|".join(",".join(map(str, share)) for share in shares)
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)

    def get_device(self, local_rank: int | None = None) -> str:
        return "cpu"  # ServerArgs splits the name where no --device is given: it must be a string

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        return _make_allocator  # only ever called with the arguments of an allocator class

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"  # Inductor would compile C++ at start for kernels that are not worth it here

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        import torch

        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        from sglang_neo.platforms import cpu_bridges

        cpu_bridges.install()


def _make_allocator(
    size: int, page_size: int, dtype: Any, device: str, kvcache: Any, need_sort: bool
) -> BaseTokenToKVPoolAllocator:
    """SGLang's own choice between its two allocators (mem_cache/kv_cache_configurator.py, in-tree branch)."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)
    return PagedTokenToKVPoolAllocator(
        size, page_size=page_size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort
    )
