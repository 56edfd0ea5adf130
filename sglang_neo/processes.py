"""Start and end of the server's processes: our scheduler in the worker, exit codes, no orphans."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def become_worker() -> None:
    """Tie this freshly spawned process to its parent. Call before any slow import.

    - The kernel kills it when its parent dies (Linux). SGLang's workers ask for the same, but only once they have
      imported SGLang: ten seconds in which a killed launcher would leave them behind.
    - A terminal's Ctrl-C and a service manager's stop reach every process of the server at once. The parent alone
      decides what they mean (drain, then end its children); a worker that obeyed them too would look like a crash.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it died before the call
        os._exit(1)


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of sglang_neo, with the arguments of SGLang's (managers/scheduler.py).

    A module-level function because ``multiprocessing``'s spawn pickles it by name; the data-parallel controller
    forwards it to the processes it starts.
    """
    from sglang.srt.managers import scheduler as sglang_scheduler

    from sglang_neo import scheduler, seams  # noqa: F401  NeoScheduler needs the original as its base

    seams.check_seams()
    sglang_scheduler.Scheduler = _build_scheduler
    sglang_scheduler.run_scheduler_process(*args, **kwargs)


def _build_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Called by SGLang's ``run_scheduler_process`` in place of the class ``Scheduler``."""
    from sglang_neo import seams
    from sglang_neo.scheduler import NeoScheduler

    try:
        scheduler = NeoScheduler(*args, **kwargs)
        seams.check_running(scheduler)
    except (ValueError, OSError, seams.SeamError) as error:
        # What the user gave is at fault, or the installation: one line. Anything else is a bug and SGLang, which
        # catches it, prints the traceback. SystemExit passes SGLang's handler; the launcher sees the process end.
        logger.debug("traceback of the failed start:", exc_info=True)
        logger.error("The scheduler could not start: %s", first_line(error))
        sys.exit(1)
    logger.info(
        "sglang_neo runs: %s", ", ".join(f"{role}={name}" for role, name in seams.running_classes(scheduler).items())
    )
    return scheduler


def first_line(error: BaseException) -> str:
    """The message of ``error`` on one line; its type where there is no message."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


class ProcessExit:
    """Replaces SGLang's ``kill_process_tree`` in the launching process, so that its exit code tells how it ended.

    SGLang ends a server by SIGKILL on itself, after a graceful drain as after a crash. Here: 0 after a drain,
    1 after the failure of a child.
    """

    def __init__(self, original: Any):
        self._original = original
        self.tokenizer_manager: Any = None  # set once it exists; knows whether a drain was asked for

    def __call__(self, parent_pid: int | None, include_parent: bool = True, **kwargs: Any) -> None:
        if parent_pid != os.getpid() or not include_parent:
            self._original(parent_pid, include_parent=include_parent, **kwargs)
            return
        drained = bool(getattr(self.tokenizer_manager, "gracefully_exit", False))
        self.exit_now(0 if drained else 1)

    def exit_now(self, code: int) -> NoReturn:
        self._original(os.getpid(), include_parent=False, wait_timeout=30)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # handlers and threads of a server that is being torn down have nothing left to do
