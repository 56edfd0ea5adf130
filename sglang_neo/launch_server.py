"""``python -m sglang_neo.launch_server``: SGLang's server with sglang_neo's runtime, all of SGLang's flags and ours."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from sglang_neo import affinity, processes

if __name__ == "__mp_main__":
    # A worker that multiprocessing has just spawned re-imports this module before anything else.
    processes.become_worker()

logger = logging.getLogger("sglang_neo")


def fail(message: str, code: int) -> int:
    processes.print_error(message)
    return code


def check_port(host: str, port: int) -> None:
    """Raises UsageError if nothing can listen on ``host:port``."""
    from sglang_neo.errors import UsageError

    if not 0 <= port < 65536:
        raise UsageError(f"--port must be between 0 and 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host, "
                "or stop what listens there"
            ) from None


def _on_stop_signals(leave: Callable[[int], Any]) -> None:
    """Call ``leave`` with the exit code on SIGINT and SIGTERM, until the HTTP server handles them itself."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        logger.info("Received %s: stopping the server.", signal.Signals(signum).name)
        leave(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)


def _leave_at_once(code: int) -> NoReturn:
    """For the time before there is anything to end but this process. An exception would be lost where a signal meets
    an import inside a callback or a bare ``except``, and the server would start."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_at_once_until(ready: threading.Event, process_exit: processes.ProcessExit) -> None:
    """Before the server is ready, a signal ends it at once; afterwards uvicorn lets requests in flight finish.

    Uvicorn would wait for SGLang's warm-up thread, which tries for two minutes to reach a server that is shut down.
    """
    import uvicorn

    handle_exit = uvicorn.Server.handle_exit

    def handle(self: Any, sig: int, frame: FrameType | None) -> None:
        if not ready.is_set():
            logger.info("Received %s: stopping the server.", signal.Signals(sig).name)
            process_exit.exit_now(128 + sig)
        handle_exit(self, sig, frame)

    uvicorn.Server.handle_exit = handle  # type: ignore[method-assign]


def _check_served_by_neo(
    server_args: Any, process_exit: processes.ProcessExit, profile_only: bool = False, seconds: float = 60
) -> None:
    """Ask the running server what it is; a server without our block would be a silently plain one: stop it.

    Args:
        profile_only: end the server then; it is an error if it has measured nothing.
    """
    import requests

    key = server_args.admin_api_key or server_args.api_key
    deadline = time.monotonic() + seconds
    with requests.Session() as session:
        session.trust_env = False  # a proxy has no business between the two
        session.verify = server_args.ssl_verify()
        session.headers.update({"Authorization": f"Bearer {key}"} if key else {})
        while True:
            try:
                answer = session.get(f"{server_args.url()}/server_info", timeout=seconds)
                break
            except requests.RequestException as error:
                # With SGLang's warm-up skipped, this runs before the server listens.
                if process_exit.is_stopping():
                    return
                if time.monotonic() > deadline:
                    process_exit.fail(f"the server cannot be asked what it is: {processes.first_line(error)}", 1)
                time.sleep(0.2)
    if answer.status_code != 200 or not answer.json().get("neo"):
        if process_exit.is_stopping():
            return
        process_exit.fail(f"the server answers without sglang_neo's state (/server_info {answer.status_code})", 1)
    neo = answer.json()["neo"]
    if profile_only:
        if neo["planner"] is None and neo["gpu_only_reason"] is None:
            process_exit.fail("this machine could not be measured, for the reason above", 1)
        if neo["planner"] is None:
            process_exit.fail(f"nothing to measure, the server would run gpu-only: {neo['gpu_only_reason']}", 2)
        process_exit.exit_now(0)
    logger.info(
        "sglang_neo %s on SGLang %s serves at %s (mode %s, device %s, kernel ISA %s).",
        neo["version"],
        neo["sglang_version"],
        server_args.url(),
        neo["active_mode"],
        neo["device"],
        neo["cpu_kernel_isa"],
    )


def serve(server_args: Any, debug: bool = False, profile_only: bool = False) -> int:
    """Run the server until it is stopped; returns the exit code, or leaves the process with it.

    Args:
        debug: raise the error that stops the start, for its traceback.
        profile_only: stop it as soon as it is ready.
    """
    import sglang.srt.entrypoints.engine as engine
    import sglang.srt.entrypoints.http_server as http_server
    import sglang.srt.managers.tokenizer_manager as tokenizer_manager_module
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.utils import kill_process_tree

    from sglang_neo.errors import UsageError
    from sglang_neo.tokenizer_manager import init_neo_tokenizer_manager

    process_exit = processes.ProcessExit(kill_process_tree)
    for module in (engine, http_server, tokenizer_manager_module):
        module.kill_process_tree = process_exit
    failures, report_failure = multiprocessing.Pipe(duplex=False)
    process_exit.watch_failures(failures)
    os.environ[processes.LAUNCHER_PID_VARIABLE] = str(os.getpid())
    processes.shield_starting_children()
    _on_stop_signals(process_exit.exit_now)
    ready = threading.Event()
    _leave_at_once_until(ready, process_exit)

    def init_tokenizer_manager(args: Any, port_args: Any) -> Any:
        process_exit.leftovers.append(shm_path_for(port_args.instance_id))
        try:
            result = init_neo_tokenizer_manager(args, port_args)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"the tokenizer of {args.tokenizer_path} cannot be loaded ({processes.first_line(error)}); "
                "give --tokenizer-path, or --skip-tokenizer-init to serve token ids alone"
            ) from error
        process_exit.tokenizer_manager = result[0]
        return result

    def on_ready() -> None:
        ready.set()
        if server_args.dp_size > 1:
            process_exit.watch_grandchildren()
        # In a thread of its own: with SGLang's warm-up skipped, this is called on the loop that must answer.
        threading.Thread(target=after_start, daemon=True).start()

    def after_start() -> None:
        _check_served_by_neo(server_args, process_exit, profile_only)
        affinity.leave_to_all_workers(server_args)

    try:
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=init_tokenizer_manager,
            run_scheduler_process_func=functools.partial(processes.run_scheduler_process, failures=report_failure),
            launch_callback=on_ready,
        )
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        # Not by returning: another thread may be telling the user already, and ends the process then.
        process_exit.fail(
            f"the server failed to start: {processes.first_line(error)}", 2 if isinstance(error, UsageError) else 1
        )
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)  # the end is near and must not be cut short: children would be left
        process_exit.expect_ends()
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=30)
        process_exit.remove_leftovers()


def main(argv: list[str] | None = None, profile_only: bool = False) -> int:
    """Returns the exit code: 0 after a clean stop, 1 if the server failed, 2 for bad input, 128+n for a signal.

    Args:
        profile_only: see ``sglang_neo.profile``.
    """
    argv = sys.argv[1:] if argv is None else argv
    debug = "debug" in argv or "--log-level=debug" in argv
    _on_stop_signals(_leave_at_once)
    import yaml

    from sglang_neo import seams
    from sglang_neo.errors import UsageError
    from sglang_neo.platforms import device

    try:
        seams.sglang_version()
        choice = device.select(argv)
        from sglang.srt.plugins import load_plugins

        from sglang_neo.args import mode_lines, prepare_server_args

        load_plugins()
        server_args = prepare_server_args(argv)
        check_port(server_args.host, server_args.port)
        seams.check_seams()
    except (UsageError, ValueError, OSError, AssertionError, yaml.YAMLError, seams.SeamError) as error:
        # The command line, the model's files and the installation are input: one line, not a traceback.
        if debug:
            raise
        return fail(processes.first_line(error), 1 if isinstance(error, seams.SeamError) else 2)

    logger.info("Device %s: %s.", choice.device, choice.reason)
    for line in mode_lines(server_args):
        logger.warning("%s.", line)
    return serve(server_args, debug, profile_only)


if __name__ == "__main__":
    sys.exit(main())
