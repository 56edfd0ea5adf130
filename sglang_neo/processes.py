"""Start and end of the server's processes: our scheduler in the worker, exit codes, no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

#: Set by the launcher for its workers: its process id. In a container it may be 1.
LAUNCHER_PID_VARIABLE = "SGLANG_NEO_LAUNCHER_PID"

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: In a scheduler process: where a failed start is reported to the launcher.
_failures: Connection | None = None


def become_worker() -> None:
    """Tie this freshly spawned process to its parent. Call before any slow import.

    - The kernel kills it when its parent dies (Linux). SGLang's workers ask for the same, but only once they have
      imported SGLang: ten seconds in which a killed launcher would leave them behind.
    - A terminal's Ctrl-C and a service manager's stop reach every process of the server at once. The parent alone
      decides what they mean (drain, then end its children); a worker that obeyed them too would look like a crash.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see shield_starting_children
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and os.environ.get(LAUNCHER_PID_VARIABLE) != "1":  # it died before the call
        os._exit(1)


def shield_starting_children() -> None:
    """Keep the signals of ``become_worker`` from children that have not called it yet, in the launching process.

    A Python that has only just been started dies of Ctrl-C with a traceback. A child inherits which signals are held
    back, so they are while one is started; the launcher gets them a moment later.
    """
    resource_tracker.ensure_running()  # started with the first child otherwise, it would let the signals through
    start = BaseProcess.start

    def start_shielded(self: BaseProcess) -> None:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            start(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    BaseProcess.start = start_shielded  # type: ignore[method-assign]


def run_scheduler_process(*args: Any, failures: Connection | None = None, **kwargs: Any) -> None:
    """The scheduler process of sglang_neo, with the arguments of SGLang's (managers/scheduler.py).

    A module-level function because ``multiprocessing``'s spawn pickles it by name; the data-parallel controller
    forwards it to the processes it starts.

    Args:
        failures: takes (message, exit code for the launcher) if the start fails. SGLang's own pipe says no more than
            that it failed, and behind a data-parallel controller not even that.
    """
    global _failures
    _failures = failures
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
    except Exception as error:
        message, code = explain_failed_start(error)
        _report(message, code or 1)
        if code is None:
            raise  # a bug: SGLang, which catches it, prints the traceback
        logger.debug("traceback of the failed start:", exc_info=True)
        logger.error("The scheduler could not start: %s", message)
        sys.exit(1)  # SystemExit passes SGLang's handler
    logger.info(
        "sglang_neo runs: %s", ", ".join(f"{role}={name}" for role, name in seams.running_classes(scheduler).items())
    )
    return scheduler


def explain_failed_start(error: Exception) -> tuple[str, int | None]:
    """What to tell the user, and the exit code: 2 for bad input, 1 for a bad installation, None for a bug."""
    from safetensors import SafetensorError

    from sglang_neo import seams

    if isinstance(error, (SafetensorError, pickle.UnpicklingError)):
        return f"a file of the model's weights is damaged: {first_line(error)}", 2
    if isinstance(error, seams.SeamError):
        return first_line(error), 1
    if isinstance(error, (ValueError, OSError)):
        return first_line(error), 2
    if isinstance(error, ImportError):
        return f"{first_line(error)}: a package that one of the flags needs is not installed", 1
    return f"{type(error).__name__}: {first_line(error)}", None


def _report(message: str, code: int) -> None:
    if _failures is not None:
        with contextlib.suppress(OSError):
            _failures.send((message[:2000], code))  # small: several ranks share the pipe, and small writes are atomic


def first_line(error: BaseException) -> str:
    """The message of ``error`` on one line; its type where there is no message."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


class ProcessExit:
    """The one way out of the launching process; replaces SGLang's ``kill_process_tree`` there.

    SGLang ends a server by SIGKILL on itself, after a graceful drain as after a crash. Here the exit code tells how it
    ended (0 after a drain, 1 after the failure of a child), and a failure is told in one line. Several threads may
    find out about the same failure: the first one speaks.
    """

    def __init__(self, original: Any):
        self._original = original
        self.tokenizer_manager: Any = None  # set once it exists; knows whether a drain was asked for
        self.stopping = False
        self._leaving = threading.RLock()  # held until the process is gone; signal handlers of the holder may re-enter
        self._code: int | None = None
        self.leftovers: list[str] = []  # files that SGLang leaves behind when it is killed
        self._failures: Connection | None = None
        self._told = threading.Event()

    def __call__(self, parent_pid: int | None, include_parent: bool = True, **kwargs: Any) -> None:
        if parent_pid != os.getpid() or not include_parent:
            self._original(parent_pid, include_parent=include_parent, **kwargs)
            return
        if self._draining():
            self.exit_now(0)
        if self._failures is not None:
            self._told.wait(1)  # a worker that could say why has done so before it ended
        self.fail("a process of the server ended unexpectedly; the lines above may say why", 1)

    def _draining(self) -> bool:
        return bool(getattr(self.tokenizer_manager, "gracefully_exit", False))

    def is_stopping(self) -> bool:
        """Whether an end is under way, in which children end and the server does not answer."""
        return self.stopping or self._draining()

    def watch_failures(self, failures: Connection) -> None:
        """End the server with the message of the first worker whose start fails (``run_scheduler_process``)."""
        self._failures = failures

        def watch() -> None:
            with contextlib.suppress(EOFError, OSError):
                message, code = failures.recv()
                self._told.set()
                self.fail(f"the server failed to start: {message}", code)

        threading.Thread(target=watch, name="failed-starts", daemon=True).start()

    def watch_grandchildren(self, every: float = 1.0) -> None:
        """End the server when a scheduler behind the data-parallel controller ends.

        SGLang watches its children alone: with a dead rank, every request sent to that rank would wait for ever.
        """
        import psutil

        me = psutil.Process()
        watched = [p for child in me.children() for p in child.children(recursive=True)]

        def has_ended(process: psutil.Process) -> bool:
            try:
                return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:  # between the two questions
                return True

        def watch() -> None:
            while True:
                threading.Event().wait(every)
                if self.is_stopping():
                    return
                for process in watched:
                    if has_ended(process):
                        self.fail(f"a worker process ({process.pid}) ended unexpectedly; the log may say why", 1)

        threading.Thread(target=watch, name="grandchildren", daemon=True).start()

    def fail(self, message: str, code: int) -> NoReturn:
        """Tell the user in one line, and end the server."""
        with self._leaving:
            if self._code is None:
                print_error(message)
            self.exit_now(code)

    def expect_ends(self) -> None:
        """From now on children end because they are told to. SGLang's watchdog would call that a crash."""
        self.stopping = True
        watchdog = getattr(self.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()

    def remove_leftovers(self) -> None:
        for path in self.leftovers:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def exit_now(self, code: int) -> NoReturn:
        with self._leaving:
            if self._code is None:
                self._code = code
            self.expect_ends()
            self._original(os.getpid(), include_parent=False, wait_timeout=30)
            self.remove_leftovers()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)  # handlers and threads of a server that is torn down have nothing left to do
