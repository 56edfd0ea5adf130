"""NeoScheduler: SGLang's scheduler, which will own which request lives where. Today every request is a device row."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler

from cpu_kernels import choose_isa
from sglang_neo import __version__, seams
from sglang_neo.model_runner import NeoTpModelWorker


class NeoScheduler(Scheduler):
    """Overrides only what seams.py names; policy belongs in modules of its own."""

    def init_tp_model_worker(self) -> None:
        self.tp_worker = NeoTpModelWorker(
            server_args=self.server_args, gpu_id=self.ps.gpu_id, ps=self.ps, nccl_port=self.nccl_port
        )

    def neo_state(self) -> dict[str, Any]:
        """The ``neo`` block of ``/server_info``: what runs here, as plain JSON values."""
        return {
            "version": __version__,
            "sglang_version": seams.sglang_version(),
            "neo_mode": self.server_args.neo_mode,
            "active_mode": "gpu-only",  # the only mode there is so far
            "device": str(self.device),
            "attention_backend": self.server_args.attention_backend,
            "cpu_kernel_isa": choose_isa().name,
            "classes": seams.running_classes(self),
            "device_kv": dataclasses.asdict(self.token_to_kv_pool_allocator.token_manager.device_usage()),
        }

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        output.internal_state["neo"] = self.neo_state()
        return output
