"""Which tests stay together when pytest-xdist runs them in several processes.

Each test by itself, so that no process runs dry before the others, but for those that share something slow to start.
The largest groups begin. (Not by the marker ``xdist_group``: of pytest 9.2, pytest-xdist 3.8 overlooks it.)
"""

from __future__ import annotations

import re
from typing import Any

#: Patterns of test ids: what matches the same one runs in one process, in the usual order.
TOGETHER = (
    r"tests/gpu/",  # a GPU's memory
    # CPU workers of several processes at once wait for one another's cores: two such groups are much.
    r"tests/(test_(host_rows|host_prefixes|host_prefill|lane_turns|prefill_lane|recovery|symmetric|tensor_parallel|"
    r"timeline)|hybrid/test_graphs)\.py",
    r"tests/test_(auto|copies|deferred|failures|pipelined|priorities|profiling|requests|scenarios|traffic)\.py",
    r"tests/server/test_(frontend|http)\.py",  # the server with the real model
    r"tests/server/test_parallel\.py",  # servers with the tiny model
)


def group_of(test_id: str) -> str:
    """Tests with equal groups stay together."""
    return next((pattern for pattern in TOGETHER if re.match(pattern, test_id)), test_id)


def scheduler(config: Any, log: Any) -> Any:
    """What pytest-xdist asks for in ``pytest_xdist_make_scheduler``."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduler(config, log)
