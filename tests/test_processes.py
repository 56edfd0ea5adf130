"""How the server's processes start and end: exit codes, no orphans, one line for a failed start."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sglang_neo import launch_server, processes
from sglang_neo.errors import UsageError
from sglang_neo.seams import SeamError
from tests.harness.models import REPO_ROOT


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that os._exit was called with."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(processes.os, "_exit", leave)
    monkeypatch.setattr(processes.logging, "shutdown", lambda: None)
    return codes


@pytest.mark.parametrize(("manager", "code"), [(None, 1), (False, 1), (True, 0)])
def test_the_exit_code_tells_a_drain_from_a_failure(ended: list[int], manager: bool | None, code: int) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    process_exit = processes.ProcessExit(lambda pid, **kwargs: calls.append((pid, kwargs)))
    if manager is not None:
        process_exit.tokenizer_manager = SimpleNamespace(gracefully_exit=manager)
    with pytest.raises(Exited):
        process_exit(os.getpid(), include_parent=True)
    assert ended == [code]
    [(pid, kwargs)] = calls
    assert pid == os.getpid() and kwargs["include_parent"] is False, "children end first, this process by its own code"


@pytest.mark.parametrize(("own", "include_parent"), [(True, False), (False, True), (False, False)])
def test_killing_others_is_left_to_sglang(ended: list[int], own: bool, include_parent: bool) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    process_exit = processes.ProcessExit(lambda pid, **kwargs: calls.append((pid, kwargs)))
    pid = os.getpid() if own else 12345
    process_exit(pid, include_parent=include_parent, skip_pid=7)
    assert calls == [(pid, {"include_parent": include_parent, "skip_pid": 7})]
    assert ended == []


def test_children_that_are_told_to_end_are_not_watched_any_more(ended: list[int]) -> None:
    """SGLang's watchdog would report the kill as a crash."""
    events: list[str] = []
    process_exit = processes.ProcessExit(lambda *args, **kwargs: events.append("children killed"))
    watchdog = SimpleNamespace(stop=lambda: events.append("watchdog stopped"))
    process_exit.tokenizer_manager = SimpleNamespace(_subprocess_watchdog=watchdog)
    with pytest.raises(Exited):
        process_exit.exit_now(130)
    assert events == ["watchdog stopped", "children killed"] and ended == [130]


@pytest.mark.parametrize("drained", [True, False])
def test_the_exit_code_of_a_real_process(drained: bool) -> None:
    script = f"""
import os, types
from sglang_neo.processes import ProcessExit
process_exit = ProcessExit(lambda *args, **kwargs: print("children ended"))
process_exit.tokenizer_manager = types.SimpleNamespace(gracefully_exit={drained})
try:
    process_exit(os.getpid())
finally:
    print("not reached")
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == (0 if drained else 1), run.stderr
    assert run.stdout == "children ended\n"


def launcher_script(body: str, ends: str = "None") -> subprocess.CompletedProcess[str]:
    """Run ``body`` in a process that has a ProcessExit, listening to the pipe ``failures``.

    Args:
        ends: what it does in place of ending its children.
    """
    script = f"""
import multiprocessing, os, time
from sglang_neo import processes
process_exit = processes.ProcessExit(lambda *args, **kwargs: {ends})
receiver, failures = multiprocessing.Pipe(duplex=False)
process_exit.watch_failures(receiver)
{body}
time.sleep(60)
"""
    return subprocess.run([sys.executable, "-c", script], cwd=REPO_ROOT, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("code", [1, 2])
def test_a_workers_failed_start_ends_the_launcher_with_its_message_and_code(code: int) -> None:
    run = launcher_script(f"failures.send(('no such model', {code}))")
    assert run.returncode == code
    assert run.stderr == "error: the server failed to start: no such model\n"


def test_a_failure_is_told_once_by_whoever_knows_why() -> None:
    """The worker's message and the end of the worker's process reach the launcher at about the same time."""
    run = launcher_script(
        "process_exit.tokenizer_manager = None\n"
        "import threading; threading.Timer(0.3, lambda: failures.send(('too little memory', 2))).start()\n"
        "process_exit(os.getpid())"
    )
    assert run.returncode == 2
    assert run.stderr == "error: the server failed to start: too little memory\n"


def test_a_worker_behind_another_that_ends_ends_the_server() -> None:
    """SGLang watches its children alone: the requests of a data-parallel rank that is lost would wait for ever."""
    run = launcher_script(
        "import psutil, subprocess\n"
        "controller = subprocess.Popen(['sh', '-c', 'sleep 60 & sleep 60 & wait'])\n"
        "ranks = []\n"
        "while len(ranks) < 2: ranks = psutil.Process(controller.pid).children()\n"
        "process_exit.watch_grandchildren(every=0.1)\n"
        "time.sleep(0.5)\n"
        "print('all there', flush=True)\n"
        "ranks[1].kill()\n"
        "time.sleep(20)\n"
        "print('not reached')",
        ends="[controller.kill(), ranks[0].kill()]",
    )
    assert (run.returncode, run.stdout) == (1, "all there\n")
    assert re.fullmatch(r"error: a worker process \(\d+\) ended unexpectedly; the log may say why\n", run.stderr)


#: What the launcher reads of a server's state.
BLOCK = dict.fromkeys(("version", "sglang_version", "active_mode", "device", "cpu_kernel_isa"), "as usual")


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [(200, {"neo": None}, True), (200, {}, True), (503, {"neo": BLOCK}, True), (200, {"neo": BLOCK}, False)],
)
def test_a_server_that_is_silently_plain_is_ended(status: int, body: dict[str, Any], refused: bool) -> None:
    """The launcher asks the server that it has started what it is. Without a block of ours, SGLang's own scheduler runs
    there (test_tokenizer_manager.py)."""
    told: list[tuple[str, int]] = []

    class Stub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body if self.path == "/server_info" else {}).encode())

        def log_message(self, *args: Any) -> None:
            pass

    def fail(message: str, code: int) -> None:
        told.append((message, code))
        raise Exited

    with http.server.HTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        args = SimpleNamespace(admin_api_key=None, api_key=None, ssl_verify=lambda: True, url=lambda: url)
        process_exit = SimpleNamespace(is_stopping=lambda: False, fail=fail)
        with pytest.raises(Exited) if refused else contextlib.nullcontext():
            launch_server._check_served_by_neo(args, process_exit)  # type: ignore[arg-type]
        server.shutdown()
    assert [code for _, code in told] == [1] * refused
    assert all("without sglang_neo's state" in message for message, _ in told)


def test_the_end_of_a_worker_that_said_nothing() -> None:
    run = launcher_script("process_exit(os.getpid())")
    assert run.returncode == 1
    assert run.stderr.startswith("error: a process of the server ended unexpectedly") and run.stderr.count("\n") == 1


_WORKER = """
import time
from sglang_neo import processes
processes.become_worker()
print("ready", flush=True)
time.sleep(120)
"""
_LAUNCHER = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {_WORKER!r}], stdout=subprocess.PIPE, text=True)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(120)
"""


@pytest.fixture
def launcher_and_worker() -> Any:
    launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER], cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    yield launcher, worker
    for pid in (launcher.pid, worker):
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()


def test_a_worker_leaves_signals_to_its_parent(launcher_and_worker: tuple[Any, int]) -> None:
    launcher, worker = launcher_and_worker
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, signum)
    time.sleep(0.3)
    assert not gone(worker)
    assert launcher.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_worker_dies_with_its_parent(launcher_and_worker: tuple[Any, int]) -> None:
    launcher, worker = launcher_and_worker
    launcher.kill()
    wait_for(lambda: gone(worker), "the worker to end")


def test_first_line() -> None:
    assert processes.first_line(ValueError("one\n  two\tthree ")) == "one two three"
    assert processes.first_line(KeyError()) == "KeyError"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What a scheduler process has told the launcher."""
    messages: list[tuple[str, int]] = []
    monkeypatch.setattr(processes, "_failures", SimpleNamespace(send=messages.append))
    return messages


def damaged_weights() -> Exception:
    from safetensors import SafetensorError

    return SafetensorError("header too large")


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (UsageError("bad\nflags"), "bad flags", 2),
        (OSError("no such file"), "no such file", 2),
        (ValueError("no config"), "no config", 2),
        (damaged_weights(), "a file of the model's weights is damaged: header too large", 2),
        (SeamError("plain classes"), "plain classes", 1),
        (
            ModuleNotFoundError("No module named 'torch_memory_saver'"),
            "No module named 'torch_memory_saver': a package that one of the flags needs is not installed",
            1,
        ),
    ],
)
def test_a_failed_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reported: list[tuple[str, int]],
    error: Exception,
    message: str,
    code: int,
) -> None:
    import sglang_neo.scheduler

    def fail() -> None:
        raise error

    monkeypatch.setattr(sglang_neo.scheduler, "NeoScheduler", fail)
    with caplog.at_level(logging.INFO, "sglang_neo"), pytest.raises(SystemExit) as end:
        processes._build_scheduler()
    assert end.value.code == 1
    [record] = caplog.records
    assert record.getMessage() == f"The scheduler could not start: {message}"
    assert record.exc_info is None
    assert reported == [(message, code)]


def test_a_bug_at_start_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch, reported: list[tuple[str, int]]) -> None:
    import sglang_neo.scheduler

    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(sglang_neo.scheduler, "NeoScheduler", fail)
    with pytest.raises(RuntimeError):
        processes._build_scheduler()
    assert reported == [("RuntimeError: a bug", 1)]


def test_a_launcher_that_is_gone_is_no_reason_to_fail_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(message: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(processes, "_failures", SimpleNamespace(send=broken))
    processes._report("a message", 1)
    monkeypatch.setattr(processes, "_failures", None)
    processes._report("a message", 1)


def test_a_scheduler_of_plain_objects_does_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sglang_neo.scheduler

    worker = SimpleNamespace(model_runner=SimpleNamespace())
    plain = SimpleNamespace(tp_worker=worker, token_to_kv_pool_allocator=None)
    monkeypatch.setattr(sglang_neo.scheduler, "NeoScheduler", lambda: plain)
    with pytest.raises(SystemExit):
        processes._build_scheduler()
    assert "plain SGLang classes are running" in caplog.text


def test_sglangs_worker_entry_builds_our_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import scheduler as sglang_scheduler

    found: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> None:
        found.append((args, kwargs, sglang_scheduler.Scheduler))

    monkeypatch.setattr(sglang_scheduler, "Scheduler", sglang_scheduler.Scheduler)  # put back afterwards
    monkeypatch.setattr(sglang_scheduler, "run_scheduler_process", run)
    # The check of the seams looks at the signature that was just replaced.
    monkeypatch.setattr("sglang_neo.seams.check_seams", lambda: found.append("seams checked"))
    monkeypatch.setattr(processes, "_failures", None)
    processes.run_scheduler_process(1, 2, dp_rank=3, failures="the pipe")  # type: ignore[arg-type]
    assert processes._failures == "the pipe"
    assert found == ["seams checked", ((1, 2), {"dp_rank": 3}, processes._build_scheduler)]
