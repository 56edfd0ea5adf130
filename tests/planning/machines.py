"""Tables of imaginary machines for the tests of planning."""

from __future__ import annotations

from dataclasses import replace

from sglang_neo.planning.tables import CpuAttention, Curve, Surface, Tables


def proportional(per_y: float, per_x: float = 0.0) -> Surface:
    """``per_x * x + per_y * y`` exactly, everywhere."""
    axis = (0.0, 1.0)
    return Surface(axis, axis, ((0.0, per_y), (per_x, per_x + per_y)))


def ideal(
    layers: int = 32,
    linear: float = 10e-3,
    device_per_token: float = 1e-7,
    cpu_per_token: float = 1e-7,
) -> Tables:
    """A machine that meets the assumptions of the inequalities: a pass takes the same time whatever its rows, attention
    is proportional to KV, nothing else takes time but prefill. ``cpu_per_token``: seconds per layer."""
    nothing = Curve((0.0,), (0.0,))
    return Tables(
        layers=layers,
        linear=Curve((0.0, 256.0, 8192.0), (linear, linear, linear * 32)),
        prefill_attention=proportional(0.0),
        device_attention=proportional(device_per_token),
        cpu_attention=CpuAttention((8,), (proportional(cpu_per_token),), (proportional(cpu_per_token),)),
        handoff=nothing,
        slot_handoff=nothing,
        to_host=Curve((0.0, 1000.0), (0.0, 1e-3)),
        to_device=Curve((0.0, 1000.0), (0.0, 1e-3)),
        step_overhead=0.0,
        eager_overhead=0.0,
        lane_overhead=0.0,
        host_bandwidth=100e9,
        host_bandwidth_copying=100e9,
        host_token_bytes=131072.0,
    )


def real(**changes: object) -> Tables:
    """Something like an 8B model on a large GPU and 16 cores."""
    tables = ideal(linear=5e-3, device_per_token=3e-8, cpu_per_token=4e-8)
    tables = replace(
        tables,
        handoff=Curve((0.0, 64.0), (6e-6, 10e-6)),
        slot_handoff=Curve((0.0, 64.0), (3e-6, 5e-6)),
        prefill_attention=proportional(1e-8, 2e-7),
        step_overhead=1e-3,
        eager_overhead=5e-3,
        lane_overhead=0.5e-3,
        host_bandwidth_copying=80e9,
    )
    return replace(tables, **changes)  # type: ignore[arg-type]
