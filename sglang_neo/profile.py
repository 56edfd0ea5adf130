"""Measures this machine for the planner: ``python -m sglang_neo.profile MODEL [flags of sglang_neo.launch_server]``.

Starts the server as it would serve, with its graphs and workers, measures, saves the tables where the next start finds
them (``profiling/store.py``) and ends. Takes seconds for small models, about a minute for large ones.

Exit codes: as those of the server; 2 if nothing can be measured, because there would be no host rows.
"""

from __future__ import annotations

import sys

from sglang_neo import launch_server, processes


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        print((__doc__ or "").strip())
        if argv and argv[0] in ("-h", "--help"):
            return 0
        processes.print_error("MODEL is needed, before any flags")
        return 2
    measured = ["--neo-mode", "auto", "--neo-profile-anew", "--skip-server-warmup"]
    return launch_server.main(["--model-path", argv[0], *argv[1:], *measured], profile_only=True)


if __name__ == "__main__":
    sys.exit(main())
