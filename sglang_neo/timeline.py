"""What happens when in a step: the CPU's side of a profile, beside the GPU's that SGLang's profiler takes.

SGLang's ``/start_profile`` and ``/stop_profile`` write a trace of GPU kernels, copies and Python per rank. While one is
taken, the hand-offs and what each CPU worker did are kept too, and written beside it. This merges the two:

    python -m sglang_neo.timeline DIRECTORY [--profile-id ID] [--out FILE.json.gz] [--picture FILE.png] [--step N]

Open the result in Perfetto (https://ui.perfetto.dev). The picture shows one step with host rows.

Exit codes: 0; 2 if there is no such profile.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cpu_kernels.workers import HandoffSpan, WorkerSpan

logger = logging.getLogger(__name__)

#: In a trace, the CPU's side is a process of this number: above any real one of Linux.
HOST_PID = 1 << 23
_SUFFIX = ".host.json.gz"


def host_trace(handoffs: Iterable[HandoffSpan], spans: Iterable[WorkerSpan], unix_minus_monotonic_ns: int) -> Any:
    """The CPU's side as a trace in Chrome's JSON format, times in microseconds since 1970.

    Args:
        handoffs, spans: of the same time.
        unix_minus_monotonic_ns: what to add to ``time.monotonic_ns`` for ``time.time_ns``.
    """

    def event(track: int, name: str, begin_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
        at = (begin_ns + unix_minus_monotonic_ns) / 1e3
        return {
            "ph": "X", "cat": "host_rows", "pid": HOST_PID, "tid": track, "name": name,
            "ts": at, "dur": (end_ns - begin_ns) / 1e3, "args": args,
        }  # fmt: skip

    def named(kind: str, name: str, track: int = 0) -> dict[str, Any]:
        return {"ph": "M", "pid": HOST_PID, "tid": track, "name": kind, "args": {"name": name}}

    handoffs, spans = list(handoffs), list(spans)
    jobs = {handoff.job: handoff for handoff in handoffs}
    events = [named("process_name", "CPU attention (sglang_neo)"), named("thread_name", "hand-offs")]
    events += [
        event(0, f"layer {h.layer}", h.seen_ns, h.done_ns, step=h.epoch, layer=h.layer, lane=h.lane) for h in handoffs
    ]
    for worker in sorted({span.worker for span in spans}):
        events.append(named("thread_name", f"worker {worker}", 1 + worker))
    for span in spans:
        handoff = jobs.get(span.job)
        name, args = (f"layer {handoff.layer}", {"step": handoff.epoch}) if handoff else ("job", {})
        events.append(event(1 + span.worker, name, span.begin_ns, span.end_ns, items=span.items, **args))
    return {"traceEvents": events, "baseTimeNanoseconds": 0}


def merge(traces: Sequence[Any]) -> Any:
    """Several traces as one, on the clock of the first. Their times count from ``baseTimeNanoseconds`` after 1970."""
    merged = dict(traces[0])
    base = int(merged.get("baseTimeNanoseconds", 0))
    events = list(merged["traceEvents"])
    for trace in traces[1:]:
        shift = (int(trace.get("baseTimeNanoseconds", 0)) - base) / 1e3
        events += [{**e, "ts": e["ts"] + shift} if "ts" in e else e for e in trace["traceEvents"]]
    return {**merged, "traceEvents": events}


def write(path: Path, trace: Any) -> None:
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


def read(path: Path) -> Any:
    with gzip.open(path, "rt") as file:
        return json.load(file)


class HostTrace:
    """Taken while SGLang's profiler runs.

    Args:
        attention: ``sglang_neo.hybrid.host_attention.HostAttention``.
    """

    #: Hand-offs kept, and spans of each worker: minutes of serving.
    ROOM = 1 << 20

    def __init__(self, attention: Any):
        self._attention = attention

    def start(self) -> None:
        self._attention.workers.start_trace(self.ROOM)
        self._attention.service.start_trace(self.ROOM)

    def stop(self, path: Path) -> None:
        """Writes what happened since ``start``."""
        offset = time.time_ns() - time.monotonic_ns()
        write(path, host_trace(self._attention.service.stop_trace(), self._attention.workers.stop_trace(), offset))


def extend_profiler(manager: Any, attention: Any) -> None:
    """Makes SGLang's ``SchedulerProfilerManager`` take the CPU's side too, in place."""
    import torch
    from sglang.srt.managers.io_struct import ProfileReqOutput

    trace = HostTrace(attention)
    own = type(manager)

    def _start_profile(self: Any, stage: Any = None) -> Any:
        answer = own._start_profile(self, stage)
        if answer is not None and answer.success:
            trace.start()
        return answer

    def _stop_profile(self: Any, stage: Any = None) -> Any:
        try:
            return _stop_and_write(self, stage)
        except (OSError, RuntimeError) as error:  # a full disk, say: no reason to end a server
            logger.error(f"The profile could not be written to {self.torch_profiler_output_dir}: {error}")
            was_in_progress, self.profile_in_progress, self.torch_profiler = self.profile_in_progress, False, None
            if was_in_progress:
                torch.distributed.barrier(self.dp_tp_cpu_group)  # where SGLang's other ranks wait for this one's file
            return ProfileReqOutput(success=False, message=f"the profile could not be written: {error}")

    def _stop_and_write(self: Any, stage: Any) -> Any:
        answer = own._stop_profile(self, stage)
        if answer is not None and answer.success:
            # Named like SGLang's own file of this rank.
            parts = [self.profile_id, f"TP-{self.ps.tp_rank}"]
            if self.ps.dp_size > 1:
                parts.append(f"DP-{self.ps.dp_rank}")
            prefix = f"{self.profile_prefix}-" if self.profile_prefix else ""
            suffix = f"-{stage.name}" if stage else ""
            trace.stop(Path(self.torch_profiler_output_dir) / f"{prefix}{'-'.join(parts)}{suffix}{_SUFFIX}")
        return answer

    members = {"__module__": __name__, "_start_profile": _start_profile, "_stop_profile": _stop_profile}
    manager.__class__ = type("NeoSchedulerProfilerManager", (own,), members)


def picture(trace: Any, path: Path, step: int | None = None) -> None:
    """One step with host rows as an image: the GPU's kernels, hand-offs, and every worker.

    Args:
        trace: merged.
        step: the number of the step, see the hand-offs' ``args``; default: the one in the middle.

    Raises ValueError if there is no such step or matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    host = [e for e in spans if e["pid"] == HOST_PID]
    steps = sorted({e["args"]["step"] for e in host if e["tid"] == 0})
    if not steps or (step is not None and step not in steps):
        raise ValueError(f"the trace has no step {step if step is not None else 'with host rows'}")
    step = steps[len(steps) // 2] if step is None else step
    inside = [e for e in host if e["args"].get("step") == step]
    begin, end = min(e["ts"] for e in inside), max(e["ts"] + e["dur"] for e in inside)
    margin = 0.05 * (end - begin)
    begin, end = begin - margin, end + margin
    kernels = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    tracks = [("GPU", kernels), ("hand-offs", [e for e in host if e["tid"] == 0])]
    tracks += [
        (f"worker {tid - 1}", [e for e in host if e["tid"] == tid]) for tid in sorted({e["tid"] for e in host} - {0})
    ]
    figure, axes = pyplot.subplots(figsize=(12, 0.35 * len(tracks) + 1.2))
    colors = pyplot.get_cmap("tab20").colors
    for row, (_, events) in enumerate(tracks):
        shown = [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin]
        bars = [(e["ts"] - begin, max(e["dur"], (end - begin) / 4000)) for e in shown]
        layers = [int(e["name"].split()[1]) if e["name"].startswith("layer ") else None for e in shown]
        faces = ["0.45" if layer is None else colors[layer % len(colors)] for layer in layers]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=faces)
    axes.set_yticks(range(len(tracks)), [name for name, _ in tracks])
    axes.invert_yaxis()
    axes.set_xlim(0, end - begin)
    axes.set_xlabel(f"microseconds of step {step}; colours are layers")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_neo.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where SGLang wrote its traces")
    parser.add_argument("--profile-id", help="default: the newest")
    parser.add_argument("--out", type=Path, default=Path("timeline.json.gz"))
    parser.add_argument("--picture", type=Path, help="also draw one step (PNG, SVG, ...)")
    parser.add_argument("--step", type=int, help="which; default: one in the middle")
    args = parser.parse_args(argv)
    found = sorted(args.directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    found = [path for path in found if args.profile_id is None or args.profile_id in path.name]
    if not found:
        print(f"error: {args.directory} has no profile of CPU attention (*{_SUFFIX}); take one with /start_profile",
              file=sys.stderr)  # fmt: skip
        return 2
    host = found[-1]
    own = host.with_name(host.name.removesuffix(_SUFFIX) + ".trace.json.gz")
    traces = [read(path) for path in (own, host) if path.exists()]
    if len(traces) == 1:
        print(f"{own.name} is missing: the timeline has the CPU's side only", file=sys.stderr)
    merged = merge(traces)
    write(args.out, merged)
    print(f"{args.out}: {len(merged['traceEvents'])} events; open it in https://ui.perfetto.dev")
    if args.picture is not None:
        try:
            picture(merged, args.picture, args.step)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"{args.picture}: one step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
