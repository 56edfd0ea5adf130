"""``python -m sglang_neo.launch_server``: SGLang's server with sglang_neo's runtime, all of SGLang's flags and ours."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from sglang_neo import processes

if __name__ == "__mp_main__":
    # A worker that multiprocessing has just spawned re-imports this module before anything else.
    processes.become_worker()

logger = logging.getLogger("sglang_neo")


def fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def check_port(host: str, port: int) -> None:
    """Raises UsageError if nothing can listen on ``host:port``."""
    from sglang_neo.errors import UsageError

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


class _Interrupted(SystemExit):
    """Raised by a signal before the HTTP server handles signals itself, and by it once it has shut down."""


def _install_signal_handlers() -> None:
    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        logger.info("Received %s: stopping the server.", signal.Signals(signum).name)
        raise _Interrupted(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)


def _check_served_by_neo(server_args: Any, exit_now: Any) -> None:
    """Ask the running server what it is; a server without our block would be a silently plain one: stop it."""
    import requests

    key = server_args.admin_api_key or server_args.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = requests.get(
        f"{server_args.url()}/server_info", headers=headers, timeout=60, verify=server_args.ssl_verify()
    )
    if answer.status_code != 200 or not answer.json().get("neo"):
        logger.error(
            "The server answers without sglang_neo's state (/server_info %s): stopping it.", answer.status_code
        )
        exit_now(1)
    neo = answer.json()["neo"]
    logger.info(
        "sglang_neo %s on SGLang %s serves at %s (mode %s, device %s, kernel ISA %s).",
        neo["version"],
        neo["sglang_version"],
        server_args.url(),
        neo["active_mode"],
        neo["device"],
        neo["cpu_kernel_isa"],
    )


def serve(server_args: Any) -> int:
    """Run the server until it is stopped; returns the exit code."""
    import sglang.srt.entrypoints.engine as engine
    import sglang.srt.managers.tokenizer_manager as tokenizer_manager_module
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    from sglang_neo.tokenizer_manager import init_neo_tokenizer_manager

    process_exit = processes.ProcessExit(kill_process_tree)
    engine.kill_process_tree = process_exit
    tokenizer_manager_module.kill_process_tree = process_exit

    def init_tokenizer_manager(args: Any, port_args: Any) -> Any:
        result = init_neo_tokenizer_manager(args, port_args)
        process_exit.tokenizer_manager = result[0]
        return result

    def on_ready() -> None:
        # In a thread of its own: with SGLang's warm-up skipped, this is called on the loop that must answer.
        threading.Thread(target=_check_served_by_neo, args=(server_args, process_exit.exit_now), daemon=True).start()

    try:
        launch_server(
            server_args,
            init_tokenizer_manager_func=init_tokenizer_manager,
            run_scheduler_process_func=processes.run_scheduler_process,
            launch_callback=on_ready,
        )
        return 0
    finally:
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=30)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 after a clean stop, 1 if the server failed, 2 for bad input, 128+n for a signal."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "debug" in argv or "--log-level=debug" in argv
    _install_signal_handlers()
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
    except (UsageError, ValueError, OSError, AssertionError, seams.SeamError) as error:
        # The command line, the model's files and the installation are input: one line, not a traceback.
        if debug:
            raise
        return fail(processes.first_line(error), 1 if isinstance(error, seams.SeamError) else 2)

    logger.info("Device %s: %s.", choice.device, choice.reason)
    for line in mode_lines(server_args):
        logger.warning("%s.", line)
    try:
        return serve(server_args)
    except (ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        return fail(f"the server failed to start: {processes.first_line(error)}", 1)


if __name__ == "__main__":
    sys.exit(main())
