"""Real servers in processes of their own: start, readiness, signals, and an end that leaves nothing behind.

A server is a tree of processes (launcher, schedulers, detokenizer, perhaps a data-parallel controller). Each is
started in a session of its own, so that every process of it can be found by the session id, also one whose parent has
died, and so that the tests can signal it as a terminal does: the whole group at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

NEO = ("-m", "sglang_neo.launch_server")
PLAIN = ("-m", "sglang.launch_server")

#: Flags with which the suites that only look at answers are to be run again, e.g. with every request on the host:
#: ``NEO_TEST_SERVER_ARGS="--neo-mode ..." pytest tests/server/test_http.py tests/server/test_frontend.py``.
EXTRA_FLAGS_VARIABLE = "NEO_TEST_SERVER_ARGS"

#: Generous, since a loaded machine is slow; a test that meets them has failed.
READY_SECONDS = 500.0
EXIT_SECONDS = 120.0

#: What the test session sets for itself, or what would change a server: servers run as a user would run them.
_NOT_INHERITED = ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "CUDA_VISIBLE_DEVICES")


def extra_flags() -> tuple[str, ...]:
    """The flags of EXTRA_FLAGS_VARIABLE."""
    return tuple(shlex.split(os.environ.get(EXTRA_FLAGS_VARIABLE, "")))


#: Below the ports that Linux gives to outgoing connections: one of those could take a port between its choice and the
#: server's use of it, which is ten seconds of imports.
PORTS = range(10000, 30000)


def free_port(ports: Sequence[int] = PORTS) -> int:
    """One of ``ports`` on 127.0.0.1 that nothing listens on. Of several processes, give each a range of its own.

    Chosen by the system's random numbers: SGLang seeds Python's, and two runs of the tests would choose alike.
    """
    for port in random.SystemRandom().sample(ports, len(ports)):
        if port_is_free(port):
            return port
    raise OSError(f"no port from {ports[0]} to {ports[-1]} is free")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do no harm
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_until(condition: Callable[[], bool], seconds: float, what: str, every: float = 0.2) -> None:
    """Raises AssertionError naming ``what`` if ``condition`` does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}"
        time.sleep(every)


@dataclass(frozen=True)
class ServerSpec:
    """What to start. Equal specs mean servers that may stand in for each other."""

    model: Path
    flags: tuple[str, ...] = ()
    entry: tuple[str, ...] = NEO  # what Python is told to run
    environment: tuple[tuple[str, str], ...] = ()

    def with_flags(self, *flags: str) -> ServerSpec:
        return ServerSpec(self.model, (*self.flags, *flags), self.entry, self.environment)


@dataclass
class Server:
    """One started server. Nothing is awaited on construction: see ``wait_ready``."""

    spec: ServerSpec
    log_path: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        command = [
            *(sys.executable, *self.spec.entry),
            *("--model-path", str(self.spec.model), "--port", str(self.port), *self.spec.flags),
        ]
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment.update(self.spec.environment)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._seen: dict[int, psutil.Process] = {}

    # what it says

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        text = "\n".join(line[:400] for line in self.log().splitlines()[-lines:])
        return f"--- end of {self.log_path} ({' '.join(self.spec.entry)}) ---\n{text}"

    def get(self, path: str, timeout: float = 60) -> requests.Response:
        return requests.get(self.url + path, timeout=timeout)

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 120) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

    def generate(self, timeout: float = 120, **body: Any) -> Any:
        """The JSON answer of /generate; ``max_new_tokens`` and other sampling parameters may be given directly."""
        answer = self.post("/generate", generate_body(**body), timeout)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
        return answer.json()

    def info(self) -> dict[str, Any]:
        answer = self.get("/server_info")
        assert answer.status_code == 200, answer.text
        info: dict[str, Any] = answer.json()
        return info

    # its processes

    def members(self) -> list[psutil.Process]:
        """Every live process of this server, whoever its parent is by now."""
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.process.pid:
                    self._seen.setdefault(pid, psutil.Process(pid))
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        return [process for process in self._seen.values() if is_alive(process)]

    def children(self, title: str) -> list[psutil.Process]:
        """The live processes of this server whose title contains ``title``, e.g. ``sglang::scheduler``."""
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def signal(self, signum: signal.Signals, group: bool = False) -> None:
        """Send ``signum`` to the launcher, or to every process at once, as a terminal's Ctrl-C does."""
        if group:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)

    # waiting

    def wait_ready(self, seconds: float = READY_SECONDS) -> Server:
        """Until /health answers 200 (SGLang then has generated a token). Shows the log if the server does not."""
        deadline = time.monotonic() + seconds
        while True:
            code = self.process.poll()
            assert code is None, f"the server ended with {code} instead of getting ready\n{self.log_tail()}"
            with contextlib.suppress(requests.RequestException):
                if self.get("/health", timeout=30).status_code == 200:
                    self.members()
                    return self
            assert time.monotonic() < deadline, f"not ready after {seconds:.0f} s\n{self.log_tail()}"
            time.sleep(0.3)

    def wait_log(self, pattern: str, seconds: float = READY_SECONDS) -> None:
        """Until a line of the log matches; fails if the server ends before."""

        def found() -> bool:
            ended = self.process.poll() is not None
            if re.search(pattern, self.log()):
                return True
            assert not ended, f"the server ended before its log said {pattern!r}\n{self.log_tail()}"
            return False

        try:
            wait_until(found, seconds, f"a log line {pattern!r}", every=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tail()}") from None

    def wait_exit(self, seconds: float = EXIT_SECONDS) -> int:
        """The exit code of the launcher, as a shell reports it (128 + n after signal n)."""
        self.members()
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s\n{self.log_tail()}") from None
        return 128 - code if code < 0 else code

    def check_gone(self, seconds: float = 10) -> None:
        """Fails if a process of the server, or a listener on its port, outlives the launcher by more than that."""
        try:
            wait_until(lambda: not self.members(), seconds, "all processes of the server gone")
        except AssertionError as error:
            left = [f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in self.members()]
            raise AssertionError(f"{error}; left: {left}\n{self.log_tail()}") from None
        wait_until(lambda: port_is_free(self.port), seconds, f"port {self.port} free again")

    # end

    def ask_to_stop(self) -> None:
        """What ``stop`` begins with, for callers with something else to do meanwhile."""
        self.members()
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """Ask, then kill; afterwards nothing of the server is left."""
        self.ask_to_stop()
        if self.process.poll() is None:
            # A drain looks for its end every five seconds; nothing here is worth waiting longer for.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=20)
        self.check_gone()


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie that its new parent has not collected yet does not."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


_SAMPLING = (
    "max_new_tokens",
    "temperature",
    "ignore_eos",
    "regex",
    "json_schema",
    "ebnf",
    "stop",
    "n",
    "frequency_penalty",
)


def generate_body(**body: Any) -> dict[str, Any]:
    """A /generate request, greedy unless told otherwise, with the sampling parameters sorted out."""
    sampling = {"temperature": 0.0, **{name: body.pop(name) for name in _SAMPLING if name in body}}
    return {**body, "sampling_params": sampling}


class ServerPool:
    """Servers for a test session, of which one at a time is shared.

    A start costs half a minute, so tests share a server where they can. A server that goes is asked to, and has until
    the next one goes, or the pool is closed: its drain takes seconds in which nothing is computed.
    """

    def __init__(self, directory: Path, ports: Sequence[int] = PORTS):
        self.directory = directory
        self.ports = ports
        self.current: Server | None = None
        self.last: Server | None = None  # for reports: also after its end
        self._leaving: Server | None = None
        self._count = 0

    def shared(self, spec: ServerSpec) -> Server:
        """A ready server of ``spec``, to be left running. It may have served other tests."""
        if not self._is_shared(spec):
            self._release()
            self.current = self._start(spec)
            try:
                self.current.wait_ready()
            except BaseException:
                self.close()
                raise
        assert self.current is not None
        return self.current

    @contextlib.contextmanager
    def own(self, spec: ServerSpec) -> Iterator[Server]:
        """A ready server of ``spec`` to do anything with: the shared one if it is that, else one beside it."""
        if self._is_shared(spec):
            assert self.current is not None
            server, self.current = self.current, None
        else:
            server = self._start(spec)
        try:
            yield server.wait_ready()
        finally:
            self._leave(server)

    @contextlib.contextmanager
    def starting(self, spec: ServerSpec) -> Iterator[Server]:
        """A server of ``spec`` whose start has only begun, to do anything with."""
        self._release()
        server = self._start(spec)
        try:
            yield server
        finally:
            server.stop()

    def close(self) -> None:
        """Afterwards nothing of any server is left."""
        self._release()
        server, self._leaving = self._leaving, None
        if server is not None:
            server.stop()

    def _is_shared(self, spec: ServerSpec) -> bool:
        return self.current is not None and self.current.spec == spec and self.current.process.poll() is None

    def _release(self) -> None:
        server, self.current = self.current, None
        if server is not None:
            self._leave(server)

    def _leave(self, server: Server) -> None:
        server.ask_to_stop()
        before, self._leaving = self._leaving, server
        if before is not None:
            before.stop()

    def _start(self, spec: ServerSpec) -> Server:
        self._count += 1
        self.last = Server(spec, self.directory / f"server-{self._count}.log", free_port(self.ports))
        return self.last


def error_lines(text: str) -> list[str]:
    """The lines that a user is meant to read when something went wrong."""
    return [line for line in text.splitlines() if line.startswith("error:")]


def check_clean_end(server: Server, code: int) -> None:
    """AssertionError unless the server ended with this exit code, left nothing behind and showed no traceback."""
    assert server.wait_exit() == code, server.log_tail()
    server.check_gone()
    assert "Traceback" not in server.log(), server.log_tail(80)


def check_told_in_one_line(text: str, expected: Sequence[str]) -> None:
    """Fails unless ``text`` has exactly one line ``error: ...``, with every part ``expected``, and no traceback."""
    lines = error_lines(text)
    assert len(lines) == 1, f"expected one line 'error: ...', found {len(lines)}:\n{text[-4000:]}"
    for part in expected:
        assert re.search(part, lines[0]), f"{part!r} is not in {lines[0]!r}"
    assert "Traceback" not in text, text[-6000:]
