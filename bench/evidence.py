"""What was measured and what was published, beside what the model of bench/machines.py and the simulator say of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.machines import GB, MACHINES, MODELS, Machine, device_tokens, host_tokens, tables
from bench.simulate import Request, Server, backlog, limits_of, poisson, trace
from sglang_neo.planning.costs import Costs, Mode, Rows
from sglang_neo.planning.planner import Limits
from sglang_neo.planning.tables import Tables

# -- measured on one H200 with 16 Xeon cores ---------------------------------------------------------------------------

#: Steps of SGLang 0.5.17 with CUDA graphs: model, rows, tokens per row, milliseconds.
SERVED = (("Llama-3.1-8B", 64, 576, 7.06), ("Llama-3.1-70B", 12, 1000, 38.0))

#: Steps of 80 layers of the 70B shape without a head, one captured graph each, 12 device rows and the host rows of
#: 1,000 tokens each: mode, host rows beside the device rows, host rows in lane B or slots, milliseconds.
STACK: tuple[tuple[Mode, int, int, float], ...] = (
    ("gpu_only", 0, 0, 35.7),
    ("pipelined", 0, 8, 70.7),
    ("pipelined", 0, 16, 87.6),
    ("pipelined", 0, 32, 137.0),
    ("pipelined", 8, 8, 73.0),
    ("pipelined", 12, 12, 77.5),
    ("pipelined", 16, 16, 97.1),
    ("deferred", 0, 1, 36.7),
    ("deferred", 0, 2, 35.2),
    ("deferred", 0, 4, 35.8),
    ("deferred", 0, 8, 37.6),
    ("deferred", 0, 12, 37.9),
)

#: Attention of one layer on 14 threads (bench/results/h200-xeon-kernels.json): rows, tokens per row, milliseconds.
KERNELS = ((1, 1000, 0.063), (24, 1000, 0.870), (64, 1024, 2.466), (64, 4096, 8.455))

#: Measured after the constants had been fitted, on a machine of the same kind: 20 layers of the 70B shape, 13,600
#: tokens of KV (bench/results/h200-serving-70b-20-*.json). Its memory was not equally fast at all times: the GB/s are
#: about what hand-offs read of it meanwhile. Steps of 12 device rows: mode, host rows beside them, in lane B or slots,
#: GB/s, milliseconds.
LATER_STEPS: tuple[tuple[Mode, int, int, float, float], ...] = (
    ("gpu_only", 0, 0, 75, 9.9),
    ("deferred", 0, 8, 75, 10.5),
    ("pipelined", 12, 12, 75, 26.3),
    ("pipelined", 12, 12, 125, 20.3),
)

#: Backlogs of 900 + 200 tokens there, in a fixed mode that is not asked whether it pays, prompts to the host not
#: metered: mode, requests, how many run at once, GB/s, output tokens per second.
LATER_BACKLOGS: tuple[tuple[Mode, int, int, float, float], ...] = (
    ("gpu_only", 400, 400, 75, 921.7),
    ("deferred", 400, 190, 75, 1247.5),
    ("pipelined", 400, 36, 75, 1009.7),
    ("gpu_only", 240, 240, 125, 934.1),
    ("pipelined", 240, 36, 125, 1182.5),
)

#: 64 requests of 900 + 200 tokens on the 70B model with 13,600 tokens of KV: output tokens per second.
SUSTAINED = 220.7


def calibration() -> dict[str, Any]:
    """Predicted against measured, on the machine that the constants of the model were fitted to."""
    machine = MACHINES["H200"]
    lines: list[dict[str, Any]] = []

    def line(what: str, measured: float, predicted: float, unit: str = "ms") -> None:
        error = round(predicted / measured - 1, 4)
        lines.append(
            {"what": what, "unit": unit, "measured": measured, "predicted": round(predicted, 3), "error": error}
        )

    for name, rows, tokens, measured in SERVED:
        costs = Costs(tables(machine, MODELS[name]), machine.threads)
        seconds = costs.gpu_only(Rows(rows, rows * tokens)).seconds
        line(f"SGLang, {name}, {rows} rows x {tokens}", measured, 1e3 * seconds)

    stack = replace(MODELS["Llama-3.1-70B"], vocabulary=0)
    costs = Costs(replace(tables(machine, stack), step_overhead=0.0, lane_overhead=0.0), machine.threads)
    device = Rows(12, 12_000)
    for mode, a, b, measured in STACK:
        lane_a, lane_b = Rows(a, 1000 * a), Rows(b, 1000 * b)
        if mode == "gpu_only":
            cost = costs.gpu_only(device)
        elif mode == "pipelined":
            cost = costs.pipelined(device, lane_a, lane_b)
        else:
            cost = costs.deferred(device, b, lane_b)
        line(f"70B stack, {mode}, host rows {a} + {b}", measured, 1e3 * cost.seconds)

    costs = Costs(tables(machine, MODELS["Llama-3.1-70B"]), machine.threads)
    for rows, tokens, measured in KERNELS:
        line(f"CPU attention, {rows} x {tokens}", measured, 1e3 * costs.cpu_layer(Rows(rows, rows * tokens)))

    model = MODELS["Llama-3.1-70B"]
    limits = Limits(threads=machine.threads, modes=("gpu_only",), prefill_tokens=2048)
    outcome = Server(backlog(64, 900, 200), tables(machine, model), limits, 13_600, 0).run()
    line("SGLang, 70B, 64 x 900+200, sustained", SUSTAINED, outcome.throughput, "tokens/s")
    return {"calibration": lines, "mean_absolute_error": round(statistics.fmean(abs(x["error"]) for x in lines), 4)}


def held_out() -> dict[str, Any]:
    """Predicted against measured, of what the constants were not fitted to: steps, tokens per second of backlogs, and
    their gains over gpu_only of the same backlog."""
    model, device = MODELS["Llama-3.1-70B, 20 layers"], Rows(12, 12_000)
    lines: list[dict[str, Any]] = []

    def line(kind: str, mode: Mode, bandwidth: float, measured: float, predicted: float) -> None:
        error = round(predicted / measured - 1, 4)
        what = f"{mode}, host memory at {bandwidth:g} GB/s"
        found = {"kind": kind, "what": what, "measured": measured, "predicted": round(predicted, 3), "error": error}
        lines.append(found)

    def at(bandwidth: float) -> Tables:
        return tables(replace(MACHINES["H200"], host_bandwidth=bandwidth * GB), model)

    for mode, a, b, bandwidth, measured in LATER_STEPS:
        costs, lane_b = Costs(at(bandwidth), MACHINES["H200"].threads), Rows(b, 1000 * b)
        if mode == "deferred":
            cost = costs.deferred(device, b, lane_b)
        else:
            cost = costs.pipelined(device, Rows(a, 1000 * a), lane_b) if b else costs.gpu_only(device)
        line("step, ms", mode, bandwidth, measured, 1e3 * cost.seconds)

    alone: dict[float, tuple[float, float]] = {}
    for mode, count, most, bandwidth, measured in LATER_BACKLOGS:
        modes: tuple[Mode, ...] = ("gpu_only",) if mode == "gpu_only" else ("gpu_only", mode)
        limits = Limits(
            MACHINES["H200"].threads, modes, max_host_tpot=None, max_slots=8, max_lane_rows=24, max_slowdown=math.inf,
            tpot_price=0.0, margin=0.0,
        )  # fmt: skip
        load = backlog(count, 900, 200)
        found = Server(load, at(bandwidth), limits, 13_600, 250_000, most_rows=most).run().throughput
        line("tokens/s", mode, bandwidth, measured, found)
        if mode == "gpu_only":
            alone[bandwidth] = measured, found
        else:
            line("gain", mode, bandwidth, round(measured / alone[bandwidth][0], 3), found / alone[bandwidth][1])
    return {"held_out": lines}


# -- published ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A claim of throughput over the same system on the GPU alone, and the conditions as far as they are known.

    Attributes:
        low, high: of the published ratio; equal if one number was given.
        prompts_outputs: tokens; each pair is simulated.
        device_pool: tokens; None: what fits beside the weights in 90 % of the memory.
        unknown: conditions that were not published or not known to us, and assumed.
    """

    paper: str
    case: str
    low: float
    high: float
    machine: Machine
    model: str
    modes: tuple[Mode, ...]
    prompts_outputs: tuple[tuple[int, int], ...] = ()
    trace: str | None = None
    device_pool: int | None = None
    unknown: str = ""


def _g5(cores: int) -> Machine:
    """A10G instances of AWS; the part of the host grows with their size."""
    return replace(
        MACHINES["A10G"],
        host=f"{cores} of 48 cores of an EPYC 7R32",
        threads=cores - 1,
        host_bandwidth=171.5 * GB * cores / 48,
        host_memory=7 * GB * cores,
    )


NEO: tuple[Mode, ...] = ("gpu_only", "pipelined")
APEX: tuple[Mode, ...] = ("gpu_only", "pipelined", "deferred")
OUTPUTS = tuple((1000, output) for output in (50, 100, 200, 300, 400))

PUBLISHED = (
    *(
        Published("NEO", f"A10G, g5.{size}xlarge", ratio, ratio, _g5(cores), "Llama-3.1-8B", NEO, OUTPUTS)
        for size, cores, ratio in ((2, 4, 1.12), (4, 8, 1.13), (8, 16, 1.30), (16, 32, 1.79))
    ),
    Published(
        "NEO", "T4, 8 cores, summaries", 7.5, 7.5, MACHINES["T4"], "Llama-2-7B", NEO,
        trace="openai_summaries", device_pool=864, unknown="which of its loads gave the 7.5",
    ),
    Published(
        "APEX", "T4", 1.84, 1.96, MACHINES["T4"], "Llama-2-7B", APEX, ((128, 256), (128, 512), (256, 512)),
        unknown="host, KV budget, lengths (short prompts and long outputs assumed)",
    ),
    Published(
        "APEX", "A10", 1.11, 1.89, _g5(16), "Llama-3.1-8B", APEX, ((256, 512), (1000, 400), (256, 1024)),
        unknown="host, KV budget, lengths (short prompts and long outputs assumed)",
    ),
)  # fmt: skip


def _ratio(claim: Published, load: Sequence[Request]) -> float:
    model = MODELS[claim.model]
    pool = claim.device_pool or device_tokens(claim.machine, model)
    throughput = []
    for modes in (claim.modes[:1], claim.modes):
        # As the papers' systems: nobody is protected from prefills, from slower steps or from a host row's latency.
        known, host = tables(claim.machine, model), host_tokens(claim.machine, model)
        limits = limits_of(
            known, claim.machine.threads, host, modes, max_host_tpot=None, max_slowdown=math.inf, tpot_price=0.0
        )
        requests = [replace(request) for request in load]
        throughput.append(Server(requests, known, limits, pool, host).run().throughput)
    return throughput[1] / throughput[0]


def _overload(claim: Published, requests: int, prompt: int, output: int) -> list[Request]:
    """Twice what the GPU alone sustains: more comes than goes, but not all at once, which would keep rows in step."""
    model = MODELS[claim.model]
    limits = Limits(threads=claim.machine.threads, modes=("gpu_only",))
    pool = claim.device_pool or device_tokens(claim.machine, model)
    alone = Server(backlog(requests // 2, prompt, output), tables(claim.machine, model), limits, pool, 0).run()
    return poisson(requests, 2 * alone.throughput / output, prompt, output, seed=0)


def published(requests: int = 300) -> dict[str, Any]:
    """Published gains and simulated ones, on a machine that is as its tables say."""
    lines = []
    for claim in PUBLISHED:
        if claim.trace:
            ratios = {claim.trace: _ratio(claim, trace(claim.trace, requests // 2))}
        else:
            ratios = {f"{p}+{o}": _ratio(claim, _overload(claim, requests, p, o)) for p, o in claim.prompts_outputs}
        lines.append(
            {
                "paper": claim.paper,
                "case": claim.case,
                "published": [claim.low, claim.high],
                "simulated": {name: round(ratio, 3) for name, ratio in ratios.items()},
                "best_simulated": round(max(ratios.values()), 3),
                "error_of_best": round(max(ratios.values()) / claim.high - 1, 3),
                "host": claim.machine.host,
                "assumed": claim.unknown,
            }
        )
    return {"published": lines}
