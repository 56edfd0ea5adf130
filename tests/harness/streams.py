"""Requests that are being answered while something happens to their server."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import requests

from bench.servers import Server, generate_body, wait_until


class Streams:
    """Streaming requests in flight on a server, one for each number of tokens to generate."""

    def __init__(self, server: Server, tokens: list[int]):
        self.tokens = tokens
        self._events = [0] * len(tokens)
        pool = ThreadPoolExecutor()
        self.results: list[Future[str]] = [pool.submit(self._run, server, i) for i in range(len(tokens))]
        wait_until(lambda: all(self._events), 60, "every stream begun", every=0.02)

    def _run(self, server: Server, i: int) -> str:
        body = generate_body(input_ids=[3 + i, 4, 5], max_new_tokens=self.tokens[i], ignore_eos=True, stream=True)
        last = ""
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=120) as answer:
            for line in answer.iter_lines():
                if line:
                    self._events[i] += 1
                    last = line.decode()
        return last

    def ended_well(self, i: int) -> bool:
        """Whether stream ``i`` (awaited) came to its proper end rather than being cut."""
        return self.results[i].exception(90) is None and self.results[i].result() == "data: [DONE]"
