"""The client: many streaming requests on one event loop, each output token's arrival noted.

That it is not the bottleneck is part of every result: how late its own timer was, and how busy its thread
(``ClientLoad``); ``python -m bench.serving --self-test`` shows how much it could take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop

from bench.serving.workloads import Workload


@dataclass
class Answer:
    """What became of one request. Times in seconds after the run's start."""

    index: int
    prompt_tokens: int
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)  # arrival of each output token
    #: Per output token whether a host row made it, as far as the server says so; 0 beyond.
    on_host: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    retractions: int = 0
    cached_tokens: int = 0
    error: str | None = None
    cut: bool = False  # the run ended before it did


@dataclass
class ClientLoad:
    lateness_ms_p99: float  # of a timer in the same event loop, every 10 ms
    lateness_ms_max: float
    cpu_share: float  # of the client's thread
    chunks_per_second: float

    def keeps_up(self) -> bool:
        """Whether the client had half its time to spare. Its timer says less where servers want every core."""
        return self.cpu_share < 0.5


@dataclass
class Run:
    answers: list[Answer]
    samples: list[dict[str, float]]  # of the server's metrics, with "time"
    seconds: float
    load: ClientLoad


#: Counters and gauges kept from /metrics, without their labels, summed over ranks.
METRIC_NAMES = (
    "num_running_reqs", "num_queue_reqs", "token_usage", "num_retracted_reqs", "num_retracted_requests_total",
    "neo_host_running_reqs", "neo_host_tokens_total", "neo_host_kv_used_tokens", "neo_migrations_total",
    "neo_cpu_busy_seconds_total", "neo_cpu_wait_seconds_total", "neo_steps_total",
)  # fmt: skip
_METRIC = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? ([-+0-9.eE]+|NaN)$", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """The metrics of METRIC_NAMES in a page of Prometheus text."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        if name in METRIC_NAMES:
            found[name] = found.get(name, 0.0) + float(value)
    return found


def run(url: str, workload: Workload, timeout_s: float, sample_every_s: float = 1.0) -> Run:
    """Sends a workload to a server and returns when all is answered, or failed, or its time is over."""
    return _on_loop(_run(url, workload, timeout_s, sample_every_s))


def _on_loop(work: Coroutine[Any, Any, Run]) -> Run:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) if hasattr(asyncio, "Runner") else _Runner() as runner:
        result: Run = runner.run(work)
        return result


class _Runner:
    """asyncio.Runner for Python 3.10."""

    def __enter__(self) -> _Runner:
        self._loop = uvloop.new_event_loop()
        return self

    def run(self, work: Coroutine[Any, Any, Run]) -> Run:
        return self._loop.run_until_complete(work)

    def __exit__(self, *exception: object) -> None:
        self._loop.close()


async def _run(url: str, workload: Workload, timeout_s: float, sample_every_s: float) -> Run:
    answers = [Answer(i, len(ask.prompt)) for i, ask in enumerate(workload.asks)]
    ended = [asyncio.Event() for _ in answers]
    gate = asyncio.Semaphore(workload.concurrency) if workload.concurrency else contextlib.nullcontext()
    lateness: list[float] = []
    samples: list[dict[str, float]] = []
    chunks = [0]
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout, read_bufsize=1 << 18) as session:
        start, cpu = time.perf_counter(), time.thread_time()

        async def ask_one(index: int) -> None:
            ask, answer = workload.asks[index], answers[index]
            try:
                prompt = list(ask.prompt)
                if ask.after is not None:
                    await ended[ask.after].wait()
                    before = answers[ask.after]
                    prompt = full_prompts[ask.after] + before.output_ids + prompt
                full_prompts[index] = prompt
                answer.prompt_tokens = len(prompt)
                if ask.at > 0:
                    await asyncio.sleep(max(0.0, start + ask.at - time.perf_counter()))
                async with gate:
                    answer.sent = time.perf_counter() - start
                    await _stream(session, url, prompt, ask.output_tokens, answer, start, chunks)
                if len(answer.token_times) != ask.output_tokens and answer.error is None:
                    answer.error = f"{len(answer.token_times)} of {ask.output_tokens} tokens"
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                answer.error = f"{type(error).__name__}: {error}"[:300]
            except asyncio.CancelledError:
                answer.cut = True
            finally:
                ended[index].set()

        full_prompts: dict[int, list[int]] = {}
        watchers = [asyncio.ensure_future(_lateness(lateness))]
        if sample_every_s > 0:
            watchers.append(asyncio.ensure_future(_sample(session, url, samples, start, sample_every_s)))
        asked = [asyncio.ensure_future(ask_one(i)) for i in range(len(answers))]
        _, late_ones = await asyncio.wait(asked, timeout=workload.seconds)
        for one in late_ones:
            one.cancel()  # which closes its connection, and so ends the request
        await asyncio.gather(*asked)
        seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        if sample_every_s > 0:  # what happened since the last sample belongs to the run too
            await _sample_once(session, url, samples, start)
    late = sorted(lateness) or [0.0]
    load = ClientLoad(late[int(0.99 * (len(late) - 1))] * 1e3, late[-1] * 1e3, cpu / seconds, chunks[0] / seconds)
    return Run([a for a in answers if a.sent or not a.cut], samples, seconds, load)


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    output_tokens: int,
    answer: Answer,
    start: float,
    chunks: list[int],
) -> None:
    sampling = {"max_new_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            return
        async for data in _events(response.content):
            now = time.perf_counter() - start
            chunks[0] += 1
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                answer.error = str(event["error"])[:300]
                return
            meta = event["meta_info"]
            answer.token_times += [now] * (int(meta["completion_tokens"]) - len(answer.token_times))
            answer.output_ids = _joined(answer.output_ids, event.get("output_ids") or [], answer)
            answer.on_host = _joined(answer.on_host, meta.get("neo_host_row") or [], answer)
            answer.retractions = int(meta.get("num_retractions") or 0)
            answer.cached_tokens = int(meta.get("cached_tokens") or 0)


def _joined(before: list[int], chunk: list[int], answer: Answer) -> list[int]:
    """One value per output token so far. Servers send all of them each time, or only new ones, as they are set."""
    return list(chunk) if len(chunk) == len(answer.token_times) else before + list(chunk)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip()


async def _lateness(found: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.01
        await asyncio.sleep(0.01)
        found.append(max(0.0, time.perf_counter() - due))


async def _sample(
    session: aiohttp.ClientSession, url: str, samples: list[dict[str, float]], start: float, every: float
) -> None:
    while True:
        await _sample_once(session, url, samples, start)
        await asyncio.sleep(every)


async def _sample_once(session: aiohttp.ClientSession, url: str, samples: list[dict[str, float]], start: float) -> None:
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=10)) as response:
            if response.status == 200:
                samples.append({"time": time.perf_counter() - start, **parse_metrics(await response.text())})
