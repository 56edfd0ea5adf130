"""How a server ends: exit codes, requests in flight, nothing left behind, no traceback for the user to read.

128 + n after signal n, as a shell has it; but SIGTERM asks a serving server to finish what it has begun, and that is a
success: 0 (tested in test_http.py; Ctrl-C in test_parallel.py). A terminal's Ctrl-C and some service managers signal
every process of the server at once, others only the launcher: both must do the same.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.servers import (
    READY_SECONDS,
    Server,
    ServerPool,
    ServerSpec,
    check_told_in_one_line,
    wait_until,
)
from tests.harness.models import REPO_ROOT

MOMENTS: dict[str, Callable[[Server], None]] = {
    "importing": lambda server: time.sleep(1),
    "workers-begin": lambda server: wait_until(
        lambda: bool(server.children("spawn_main")), 120, "a worker process", every=0.05
    ),
    "model-loads": lambda server: server.wait_log("Init torch distributed begin"),
    "warm-up": lambda server: server.wait_log("Application startup complete"),
}


@pytest.mark.parametrize(
    ("moment", "signum", "group"),
    [
        ("importing", signal.SIGINT, True),
        ("importing", signal.SIGTERM, False),
        ("workers-begin", signal.SIGINT, True),
        pytest.param("model-loads", signal.SIGTERM, True, marks=pytest.mark.slow),  # between the two beside it
        pytest.param("warm-up", signal.SIGINT, False, marks=pytest.mark.slow),
    ],
)
def test_signal_while_starting(
    servers: ServerPool, tiny_spec: ServerSpec, moment: str, signum: signal.Signals, group: bool
) -> None:
    flags = tuple(flag for flag in tiny_spec.flags if flag != "--skip-server-warmup")
    with servers.starting(ServerSpec(tiny_spec.model, flags)) as server:
        MOMENTS[moment](server)
        server.signal(signum, group)
        assert server.wait_exit() == 128 + signum
        server.check_gone()
        assert "Traceback" not in server.log(), server.log_tail(80)


PLAIN_SCHEDULER = """
import sys
from sglang_neo import launch_server, processes

def plain(*args, failures=None, **kwargs):
    from sglang.srt.managers.scheduler import run_scheduler_process
    run_scheduler_process(*args, **kwargs)

if __name__ == "__main__":
    processes.run_scheduler_process = plain
    sys.exit(launch_server.main())
"""


@pytest.mark.slow  # against a stub that answers as such a server: test_processes.py
def test_silently_plain_server_is_refused(servers: ServerPool, tiny_spec: ServerSpec, tmp_path: Any) -> None:
    """Our launcher and SGLang's own scheduler: it would serve, and nothing of ours would run."""
    script = tmp_path / "plain_scheduler.py"
    script.write_text(PLAIN_SCHEDULER)
    with servers.starting(ServerSpec(tiny_spec.model, tiny_spec.flags, entry=(str(script),))) as server:
        assert server.wait_exit(READY_SECONDS) == 1
        server.check_gone()
        check_told_in_one_line(server.log(), ["without sglang_neo's state"])


def test_interrupted_help_is_no_traceback() -> None:
    """The first second of the process, before any import that takes time, belongs to the signal handlers already."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_neo.launch_server", "--help"],
        cwd=REPO_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in text
