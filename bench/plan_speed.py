"""How long a plan takes: ``python -m bench.plan_speed``. The planner runs between two steps, so it must not show."""

from __future__ import annotations

import random
import timeit

from bench.machines import MACHINES, MODELS, tables
from sglang_neo.planning.planner import Limits, Memory, Prompt, State, plan


def main() -> None:
    machine = MACHINES["H200"]
    measured = tables(machine, MODELS["Llama-3.1-8B"])
    limits = Limits(threads=machine.threads)
    draw = random.Random(0)

    def rows(count: int) -> tuple[int, ...]:
        return tuple(draw.randint(100, 4000) for _ in range(count))

    waiting = tuple(Prompt(tokens, 0, tokens + 200) for tokens in rows(200))
    cases = {
        "1,000 device rows": State(rows(1000), (), (), 100_000, 10**7),
        "500 + 500 rows, 200 waiting": State(rows(500), rows(500), waiting, 600, 10**7),
        "64 + 936 rows, 200 waiting": State(rows(64), rows(936), waiting, 100, 10**7),
        "500 + 500 rows, some must leave": State(rows(500), rows(500), waiting, 100, 10**7),
    }
    memory = Memory()
    for name, state in cases.items():
        times = timeit.repeat(lambda state=state: plan(state, limits, measured, memory), number=200, repeat=20)  # type: ignore[misc]
        best, median = (1e6 * seconds / 200 for seconds in (min(times), sorted(times)[10]))
        print(f"{name}: {median:.0f} us (best {best:.0f})")


if __name__ == "__main__":
    main()
