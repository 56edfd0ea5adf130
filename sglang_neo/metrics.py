"""What the host side of a server has done: counters for ``/server_info``, Prometheus and the log, in SGLang's style."""

from __future__ import annotations

import contextlib
import logging
import time
from bisect import bisect_left
from collections import Counter as Multiset
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_neo.hybrid.host_attention import CpuTimes
from sglang_neo.planner_bridge import PlannerBridge
from sglang_neo.recovery import LaunchedHostRows, Recovery
from sglang_neo.token_manager import NeoTokenManager, host_row

logger = logging.getLogger(__name__)

#: Upper bounds of the histogram of times between tokens: SGLang's (observability/metrics_collector.py), and more for
#: deferred rows, whose token takes as many steps as the model has layers.
_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100),
    *(0.200, 0.400, 0.600, 0.800, 1.000, 2.000, 4.000, 6.000, 8.000, 16.000, 32.000),
)


#: Of decode steps. pipelined_prefill: host rows alone, in the second lane of a prefill.
STEP_MODES = ("gpu_only", "sync", "pipelined", "pipelined_prefill", "deferred")


@dataclass
class StepCounters:
    """Since the start."""

    host_tokens: int = 0  # output tokens of host rows
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEP_MODES, 0))
    #: Decode steps that did not run from a CUDA graph, by reason.
    eager: dict[str, int] = field(default_factory=dict)


class NeoMetrics:
    """Counts decode steps; publishes if SGLang publishes its own metrics in this process.

    Args:
        manager: of this scheduler.
        cpu_times: asks for the workers' account; None without host rows.
        labels: of SGLang's metrics in this process, None to publish nothing.
        log_interval: decode steps between log lines; 0: none.
        recovery: counts steps that failed; None: nobody does.
        planner: None where the mode is fixed.
    """

    def __init__(
        self,
        manager: NeoTokenManager,
        cpu_times: Any | None,
        labels: Mapping[str, str] | None,
        log_interval: int,
        recovery: Recovery | None = None,
        planner: PlannerBridge | None = None,
    ):
        self._recovery, self._planner = recovery, planner
        self.counters = StepCounters()
        self._manager, self._cpu_times = manager, cpu_times
        self._log_interval = log_interval
        self._published = _Published(labels) if labels is not None and manager.has_host else None
        self._steps_since_log = self._tokens_since_log = 0
        self._logged_at = time.perf_counter()

    @contextlib.contextmanager
    def timing_tokens(self, batch: Any) -> Iterator[None]:
        """Around the processing of a step's result: how long after the one before each request's token came, by where
        its KV is. A request's first token has none before it, nor has the first after it was prefilled again."""
        if self._published is None:
            yield
            return
        before = [(len(req.output_ids), "device" if host_row(req) is None else "host") for req in batch.reqs]
        yield
        decode, now = batch.forward_mode.is_decode(), time.perf_counter()
        # Rows that decode together have had their last token at one moment: few different intervals for many rows.
        intervals: Multiset[tuple[str, float]] = Multiset()
        for req, (known, kind) in zip(batch.reqs, before, strict=True):
            if len(req.output_ids) == known:
                continue
            last = getattr(req, "neo_token_at", None)
            if decode and last is not None:
                intervals[kind, now - last] += 1
            req.neo_token_at = now
        for (kind, seconds), count in intervals.items():
            self._published.observe_interval(kind, seconds, count)

    def count_decode(self, launched: LaunchedHostRows | None, eager: str | None = None) -> None:
        """One decode step whose result is being processed.

        Args:
            launched: what it had to do with the CPU, None if nothing.
            eager: why it did not run from a CUDA graph, None if it did.
        """
        if eager is not None:
            if eager not in self.counters.eager and eager != "no graphs":  # which SGLang has told at start
                logger.info(f"sglang_neo: decode steps run without CUDA graphs: {eager}")
            self.counters.eager[eager] = self.counters.eager.get(eager, 0) + 1
        host = len(launched.reqs) if launched is not None else 0
        self.counters.host_tokens += host
        self.counters.steps[launched.mode if launched is not None else "gpu_only"] += 1
        if not self._manager.has_host:
            return
        self._steps_since_log += 1
        self._tokens_since_log += host
        if self._published is not None:
            self._published.update(self.counters, self._manager, self.cpu_times() if launched else None, self._recovery)
            if self._planner is not None:
                self._published.update_planner(self._planner)
        if self._log_interval and self._steps_since_log >= self._log_interval:
            self._log(len(self._manager.host_rows()))

    def cpu_times(self) -> CpuTimes:
        """Zero without host rows."""
        times: CpuTimes = self._cpu_times() if self._cpu_times is not None else CpuTimes(0.0, 0.0)
        return times

    def _log(self, host: int) -> None:
        now = time.perf_counter()
        if self._tokens_since_log:
            usage, moved = self._manager.host_usage(), self._manager.migrations
            used = usage.total_tokens - self._manager.host_available()
            logger.info(
                f"Host rows, #host-req: {host}, #host-token: {self._manager.host_tokens()}, "
                f"host token usage: {used / max(1, usage.total_tokens):.2f}, "
                f"host cache: {self._manager.host_cached()} tokens, "
                f"migrations: {moved.to_host} to host, {moved.to_device} to device, "
                f"host gen throughput (token/s): {self._tokens_since_log / (now - self._logged_at):.2f}"
            )
        self._logged_at, self._steps_since_log, self._tokens_since_log = now, 0, 0


class _Published:
    """The same in Prometheus. Counters there only grow, so differences are added."""

    def __init__(self, labels: Mapping[str, str]):
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import of prometheus_client.
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def counter(name: str, text: str, by: str = "") -> Any:
            """``by``: a label of its own, to be given with the others whenever it counts."""
            metric = Counter(f"sglang:{name}", text, labelnames=[*names, by] if by else names)
            return metric if by else metric.labels(**labels)

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"sglang:{name}", text, labelnames=names, multiprocess_mode="mostrecent").labels(**labels)

        self._tokens = counter("neo_host_tokens_total", "Output tokens of requests decoded from host memory.")
        self._prompts = counter("neo_host_prompt_tokens_total", "Tokens of prompts computed straight into host memory.")
        self._busy = counter(
            "neo_cpu_busy_seconds_total", "Time that CPU attention workers worked, summed over threads."
        )
        self._wait = counter("neo_cpu_wait_seconds_total", "Time that steps with host rows gave the CPU nothing to do.")
        self._awaited = counter(
            "neo_awaited_handoffs_total", "Answers of the CPU that deferred steps may have had to wait for."
        )
        self._stalled = counter("neo_awaited_seconds_total", "How long deferred steps have waited for them, at most.")
        self._handoffs = counter("neo_handoffs_total", "Hand-offs answered by the CPU: the host rows of one layer.")
        self._answers = counter("neo_handoff_seconds_total", "Time from a hand-off to its answer, summed.")
        self._tails = counter(
            "neo_handoff_tail_seconds_total", "Of that, from the first worker's end to the last one's."
        )
        self._held_up = counter("neo_held_up_handoffs_total", "Hand-offs of which that was more than half.")
        self._intervals = Histogram(
            "sglang:neo_inter_token_latency_seconds",
            "Histogram of the time between two tokens of a request in seconds, by where its KV is.",
            labelnames=[*names, "kind"],
            buckets=_BUCKETS,
        )
        self._steps = counter("neo_steps_total", "Decode steps, by mode.", by="mode")
        self._eager = counter("neo_eager_steps_total", "Decode steps without a CUDA graph, by reason.", by="reason")
        self._migrations = counter("neo_migrations_total", "Requests moved between the pools.", by="direction")
        self._failed = counter("neo_failed_steps_total", "Decode steps whose CPU work failed.")
        self._restarted = counter("neo_restarted_reqs_total", "Requests prefilled again because the CPU work failed.")
        self._hits = counter("neo_host_cache_hit_tokens_total", "Tokens found in the host's prefix cache and used.")
        self._evicted = counter("neo_host_cache_evicted_tokens_total", "Tokens evicted from the host's prefix cache.")
        self._used = gauge("neo_host_kv_used_tokens", "Tokens of host KV in use by requests.")
        self._cached = gauge("neo_host_cache_tokens", "Tokens in the host's prefix cache.")
        self._evictable = gauge("neo_host_cache_evictable_tokens", "Of them, those that no running request holds.")
        self._total = gauge("neo_host_kv_total_tokens", "Tokens that host KV can hold.")
        self._running = gauge("neo_host_running_reqs", "Running requests whose KV is in host memory.")
        self._changes = counter("neo_mode_changes_total", "Changes of the mode of decode steps.")
        self._pauses = counter("neo_cpu_pauses_total", "Times that the CPU was left out for a while.")
        self._closed = gauge("neo_cpu_paused", "1 while the CPU gets no work.")
        self._error = gauge("neo_step_time_error", "Mean relative error of predicted step times, of late.")
        self._correction = Gauge(
            "sglang:neo_table_correction",
            "Measured over profiled times, by table.",
            labelnames=[*names, "table"],
            multiprocess_mode="mostrecent",
        )
        self._labels = dict(labels)
        self._seen: dict[str, float] = {}

    def update(
        self, counters: StepCounters, manager: NeoTokenManager, times: CpuTimes | None, recovery: Recovery | None
    ) -> None:
        self._add("tokens", self._tokens, counters.host_tokens)
        self._add("prompts", self._prompts, manager.prefilled_tokens)
        for mode, steps in counters.steps.items():
            self._add(f"steps {mode}", self._steps.labels(**self._labels, mode=mode), steps)
        for reason, steps in counters.eager.items():
            self._add(f"eager {reason}", self._eager.labels(**self._labels, reason=reason), steps)
        moved = manager.migrations
        for direction in ("to_host", "to_device"):
            metric = self._migrations.labels(**self._labels, direction=direction)
            self._add(direction, metric, getattr(moved, direction))
        if times is not None:
            self._add("busy", self._busy, times.busy)
            self._add("wait", self._wait, times.wait)
            self._add("awaited", self._awaited, times.awaited_handoffs)
            self._add("stalled", self._stalled, times.awaited)
            self._add("handoffs", self._handoffs, times.handoffs)
            self._add("answers", self._answers, times.answers)
            self._add("tails", self._tails, times.tails)
            self._add("held up", self._held_up, times.held_up)
        if recovery is not None:
            self._add("failed", self._failed, recovery.failed_steps)
            self._add("restarted", self._restarted, recovery.restarted_reqs)
        usage = manager.host_usage()
        self._used.set(usage.total_tokens - manager.host_available())
        self._cached.set(manager.host_cached())
        self._evictable.set(manager.host_evictable())
        self._add("hits", self._hits, manager.host_cache_counters.hit_tokens)
        self._add("evicted", self._evicted, manager.host_cache_counters.evicted_tokens)
        self._total.set(usage.total_tokens)
        self._running.set(len(manager.host_rows()))

    def update_planner(self, planner: PlannerBridge) -> None:
        self._add("changes", self._changes, planner.counters.changes)
        self._add("pauses", self._pauses, planner.counters.pauses)
        self._closed.set(planner.memory.guard.closed)
        self._error.set(planner.error)
        for table, factor in asdict(planner.memory.corrections).items():
            self._correction.labels(**self._labels, table=table).set(factor)

    def observe_interval(self, kind: str, seconds: float, count: int) -> None:
        """As SGLang's ``observe_inter_token_latency``: many at once."""
        histogram = self._intervals.labels(**self._labels, kind=kind)
        histogram._sum.inc(seconds * count)
        histogram._buckets[bisect_left(histogram._upper_bounds, seconds)].inc(count)

    def _add(self, name: str, metric: Any, total: float) -> None:
        more = total - self._seen.get(name, 0)
        if more > 0:
            metric.inc(more)
            self._seen[name] = total
