"""Machines and models for the simulator: tables computed from public figures where nothing was measured.

The tables of a machine are a roofline with a few constants (``FIT``), fitted to what was measured on one H200 with 16
Xeon cores (bench/results, docs/planner.md). For every other machine they are an assumption: what is public is the size
of the memory, its bandwidth, the arithmetic and the bus; that the same fractions of these are reached is not.

Sources. GPUs: NVIDIA's data sheets (memory, bandwidth, dense FP16/BF16 with tensor cores). Hosts: the CPU and its
memory channels as the vendors of the boxes name them; what a socket's memory gives in practice from Microway,
"Performance characteristics of common transports and buses" (DDR4-3200, 8 channels: 171.5 GB/s; DDR4-2933, 6 channels:
98 GB/s; PCIe x16: gen 3 12.1 GB/s, gen 4 26.2 GB/s); DDR5 is taken at 80 % of the bus, PCIe gen 5 as measured on the
H200. A part of a box is given the same part of its host's bandwidth as of its cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_neo.planning.tables import CpuAttention, Curve, Surface, Tables

GB = 1e9


@dataclass(frozen=True)
class Model:
    """A decoder of the Llama kind in 16 bits."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Parameters of one layer's linear maps."""
        attention = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weights(self) -> int:
        """Parameters that a pass reads: all layers and the head."""
        return self.layers * self.layer_weights + self.hidden * self.vocabulary

    @property
    def bytes(self) -> int:
        """With the embedding, which a pass does not read."""
        return 2 * (self.weights + self.hidden * self.vocabulary)

    @property
    def token_bytes(self) -> int:
        """KV of one token, all layers."""
        return 2 * 2 * self.kv_heads * self.head_dim * self.layers


MODELS = {
    "Llama-2-7B": Model(32, 4096, 11008, 32, 32, 128, 32000),
    "Llama-3.1-8B": Model(32, 4096, 14336, 32, 8, 128, 128256),
    "Llama-3.1-70B": Model(80, 8192, 28672, 64, 8, 128, 128256),
    "Llama-3.1-70B, 20 layers": Model(20, 8192, 28672, 64, 8, 128, 128256),
}


@dataclass(frozen=True)
class Machine:
    """One GPU and the part of a host that goes with it. Bytes, bytes per second, operations per second."""

    gpu: str
    gpu_memory: float
    gpu_bandwidth: float
    gpu_flops: float
    bus: float  # copies between GPU and pinned host memory, in practice
    host: str
    threads: int  # for attention: the cores but two
    host_bandwidth: float  # that all threads read
    host_memory: float
    core_flops: float = 40e9  # attention per core: two FMA units of 8 floats at 2.5 GHz reach about half their peak


def _share(socket: float, cores: int, of: int) -> float:
    """The bandwidth of some of a socket's cores."""
    return socket * cores / of


MACHINES = {
    "T4": Machine(
        "T4", 16 * GB, 320 * GB, 65e12, 12.1 * GB,
        "g4dn.4xlarge: 8 of 24 cores of a Xeon 8259CL, 6 x DDR4-2933", 7, _share(98 * GB, 8, 24), 56 * GB,
    ),
    "A10G": Machine(
        "A10G", 24 * GB, 600 * GB, 70e12, 26.2 * GB,
        "g5.4xlarge: 8 of 48 cores of an EPYC 7R32, 8 x DDR4-3200", 7, _share(171.5 * GB, 8, 48), 56 * GB,
    ),
    "L4": Machine(
        "L4", 24 * GB, 300 * GB, 121e12, 26.2 * GB,
        "g6.8xlarge: 16 of 48 cores of an EPYC 7R13, 8 x DDR4-3200", 14, _share(171.5 * GB, 16, 48), 120 * GB,
    ),
    "A100": Machine(
        "A100 80 GB", 80 * GB, 2039 * GB, 312e12, 26.2 * GB,
        "an eighth of a DGX A100: 16 of 128 cores of two EPYC 7742, 8 x DDR4-3200 each", 14,
        _share(2 * 171.5 * GB, 16, 128), 240 * GB,
    ),
    "H100": Machine(
        "H100 SXM", 80 * GB, 3350 * GB, 990e12, 55 * GB,
        "an eighth of a DGX H100: 14 of 112 cores of two Xeon 8480C, 8 x DDR5-4800 each", 12,
        _share(2 * 0.8 * 307 * GB, 14, 112), 240 * GB, 260e9,
    ),
    "H200": Machine(
        "H200", 141 * GB, 4800 * GB, 990e12, 55 * GB,
        "measured: 16 Xeon cores with AMX", 14, 112 * GB, 110 * GB, 260e9,
    ),
    "B200": Machine(
        "B200", 180 * GB, 8000 * GB, 2250e12, 55 * GB,
        "an eighth of a DGX B200: 14 of 112 cores of two Xeon 8570, 8 x DDR5-5600 each", 12,
        _share(2 * 0.8 * 358 * GB, 14, 112), 480 * GB, 260e9,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Which part of the public figures is reached, and what is not in them; fitted to the H200 (docs/planner.md)."""

    weights: float = 0.90  # of the bandwidth, reading weights (measured: 4.34 of 4.8 TB/s)
    kv: float = 0.75  # of the bandwidth, reading KV
    flops: float = 0.50  # of the arithmetic, prefilling
    attention_flops: float = 0.35
    layer: float = 40e-6  # seconds per layer and pass that no kernel's bytes explain
    step: float = 1.2e-3
    eager: float = 2e-3  # launching a prefill kernel by kernel shows only this much
    lane: float = 0.4e-3
    handoff: float = 6.4e-6  # measured per layer, without the rows' own bytes
    cpu: float = 25e-6  # from ready to done, without the KV's bytes


FIT = Fit()

TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KV = (0, 512, 2048, 8192, 32768, 131072, 524288, 2097152)


def _surface(xs: Sequence[float], ys: Sequence[float], seconds: Callable[[float, float], float]) -> Surface:
    return Surface.fit({(x, y): seconds(x, y) for x in xs for y in ys})


def tables(machine: Machine, model: Model, fit: Fit = FIT, token_bytes: float | None = None) -> Tables:
    """The tables of a model on a machine.

    Args:
        token_bytes: KV of one token in host memory, if it differs from the device's (int8).
    """
    host_token = token_bytes or model.token_bytes
    layers = model.layers

    def linear(tokens: float) -> float:
        reading = 2 * model.weights / (fit.weights * machine.gpu_bandwidth)
        computing = 2 * model.weights * tokens / (fit.flops * machine.gpu_flops)
        return max(reading, computing) + layers * fit.layer

    def prefill_attention(tokens: float, past: float) -> float:
        operations = 4 * model.q_heads * model.head_dim * layers * tokens * (past + tokens / 2)
        return operations / (fit.attention_flops * machine.gpu_flops)

    def device_attention(rows: float, kv: float) -> float:
        return kv * model.token_bytes / (fit.kv * machine.gpu_bandwidth)

    def private(rows: float, kv: float) -> float:
        operations = 4 * model.q_heads * model.head_dim * kv
        reading = kv * host_token / layers / machine.host_bandwidth
        return fit.cpu + max(reading, operations / (machine.threads * machine.core_flops))

    def shared(rows: float, prefix: float) -> float:
        operations = 4 * model.q_heads * model.head_dim * rows * prefix
        reading = prefix * host_token / layers / machine.host_bandwidth
        return max(reading, operations / (machine.threads * machine.core_flops))

    row_bytes = 2 * model.head_dim * (2 * model.q_heads + 2 * model.kv_heads)  # q, k, v and the output
    threads = machine.threads
    cpu = CpuAttention((threads,), (_surface(ROWS, KV, private),), (_surface(ROWS, KV, shared),))
    to_host = Curve((0.0, 1e6), (0.0, 1e6 * host_token / machine.bus))
    handoff = Curve((0.0, 256.0), (fit.handoff, fit.handoff + 256 * row_bytes / machine.bus))
    return Tables(
        layers=layers,
        linear=Curve.fit({tokens: linear(tokens) for tokens in TOKENS}),
        prefill_attention=_surface(TOKENS, (0, 512, 2048, 8192, 32768), prefill_attention),
        device_attention=_surface(ROWS, KV, device_attention),
        cpu_attention=cpu,
        handoff=handoff,
        slot_handoff=handoff,  # what the fit was made with
        to_host=to_host,
        to_device=to_host,
        step_overhead=fit.step,
        eager_overhead=fit.eager,
        lane_overhead=fit.lane,
        host_bandwidth=machine.host_bandwidth,
        host_bandwidth_copying=max(machine.host_bandwidth - machine.bus / 2, machine.host_bandwidth / 2),
        host_token_bytes=host_token,
    )


def device_tokens(machine: Machine, model: Model, fraction: float = 0.9) -> int:
    """Tokens of KV that fit beside the weights in ``fraction`` of the GPU's memory; 0 if the weights do not."""
    return max(0, int((fraction * machine.gpu_memory - model.bytes) / model.token_bytes))


def host_tokens(machine: Machine, model: Model, fraction: float = 0.8) -> int:
    """Tokens of KV in ``fraction`` of the host's memory, at most eight times the largest device pool."""
    return int(fraction * machine.host_memory / model.token_bytes)
