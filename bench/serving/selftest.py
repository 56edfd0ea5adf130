"""How much the client can take: a server in a process of its own that sends tokens as fast as they are read."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

from bench.serving.client import run
from bench.serving.workloads import Ask, Workload


def measure(streams: int = 64, tokens: int = 200) -> dict[str, Any]:
    """Chunks per second over so many streams at once, and how busy and late the client was meanwhile."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        port = ours.recv()
        asks = tuple(Ask((5, 6, 7), tokens) for _ in range(streams))
        result = run(f"http://127.0.0.1:{port}", Workload("self-test", asks, streams), 120, sample_every_s=0)
    finally:
        server.terminate()
        server.join()
    failed = [answer.error for answer in result.answers if answer.error]
    if failed:
        raise ValueError(f"the client lost tokens: {failed[0]}")
    return {
        "streams": streams,
        "tokens_per_stream": tokens,
        "chunks_per_second": result.load.chunks_per_second,
        "client_cpu_share": result.load.cpu_share,
        "lateness_ms_p99": result.load.lateness_ms_p99,
    }


async def serve_generate(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> tuple[web.AppRunner, int]:
    """Serves nothing but /generate, on this machine, until the runner is cleaned up; and the port."""
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined, unused-ignore]
    return runner, port


def _serve(pipe: Connection) -> None:
    import asyncio

    import uvloop

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            # As heavy as a server's: it sends all ids so far in each event, unless told otherwise.
            event = {"output_ids": list(range(i)), "meta_info": {"completion_tokens": i, "num_retractions": 0}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve() -> None:
        _, port = await serve_generate(generate)
        pipe.send(port)
        await asyncio.Event().wait()

    uvloop.new_event_loop().run_until_complete(serve())
