"""Model worker, model runner and KV configurator: SGLang's, building our token manager on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_schedule

from sglang_neo import token_manager


class NeoKVCacheConfigurator(KVCacheConfigurator):
    """Sizes and builds the KV pools as SGLang does; the slot allocator is ours."""

    def _build_token_to_kv_pool_allocator(
        self, *, token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None, **kwargs: Any
    ) -> BaseTokenToKVPoolAllocator:
        built = super()._build_token_to_kv_pool_allocator(
            token_to_kv_pool_allocator=token_to_kv_pool_allocator, **kwargs
        )
        return built if token_to_kv_pool_allocator is not None else token_manager.adopt(built)


class NeoModelRunner(ModelRunner):
    """Executes steps. Today every step is SGLang's own (mode gpu-only)."""

    kv_cache_configurator: KVCacheConfigurator

    def init_kv_cache_configurator(self) -> None:
        super().init_kv_cache_configurator()
        # SGLang's call has two dozen arguments: copy what it built instead of repeating it.
        built = self.kv_cache_configurator
        arguments = {field.name: getattr(built, field.name) for field in dataclasses.fields(built) if field.init}
        self.kv_cache_configurator = NeoKVCacheConfigurator(**arguments)


class NeoTpModelWorker(TpModelWorker):
    """SGLang has no factory for the model runner, so the method that names its class is overridden."""

    def _init_model_runner(self) -> None:
        self._model_runner = NeoModelRunner(
            model_config=self.model_config,
            mem_fraction_static=get_schedule().mem_fraction_static,
            gpu_id=self.gpu_id,
            ps=self.ps,
            nccl_port=self.nccl_port,
            server_args=self.server_args,
            is_draft_worker=self.is_draft_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            memory_pool_config=self.memory_pool_config,
        )
