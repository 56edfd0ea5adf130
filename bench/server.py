"""Start a server, wait until it answers, and make sure that nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

#: The two kinds of server that are compared, by the module that launches them.
LAUNCHERS = {"plain": "sglang.launch_server", "neo": "sglang_neo.launch_server"}


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    url: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    seconds_to_ready: float = 0.0

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _wait_ready(server: Server, timeout: float) -> None:
    start = time.monotonic()
    while time.monotonic() - start < timeout:
        if server.process.poll() is not None:
            raise RuntimeError(f"server ended with {server.process.returncode} before it was ready:\n{server.tail()}")
        # /model_info answers as soon as HTTP is up; the log line comes after SGLang's own warm-up request.
        if "ready to roll" in server.log.read_text(errors="replace"):
            with contextlib.suppress(requests.RequestException):
                if requests.get(server.url + "/model_info", timeout=5).ok:
                    server.seconds_to_ready = time.monotonic() - start
                    return
        time.sleep(0.2)
    raise TimeoutError(f"server not ready after {timeout:.0f} s:\n{server.tail()}")


def stop(server: Server, timeout: float = 30) -> None:
    """SIGTERM to the launcher, then SIGKILL to whatever is left of its process tree."""
    try:
        tree = psutil.Process(server.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(timeout)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait()
    psutil.wait_procs(tree, timeout=10)


@contextlib.contextmanager
def running(kind: str, args: Sequence[str], log: Path, timeout: float = 600) -> Iterator[Server]:
    """A server of ``kind`` ("plain" or "neo") with command-line ``args``; ready on entry, gone on exit."""
    port = free_port()
    command = [sys.executable, "-m", LAUNCHERS[kind], "--host", "127.0.0.1", "--port", str(port), *args]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        out.write((shlex.join(command) + "\n").encode())
        out.flush()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ)
        )
    server = Server(f"http://127.0.0.1:{port}", command, log, process)
    try:
        _wait_ready(server, timeout)
        yield server
    finally:
        stop(server)
