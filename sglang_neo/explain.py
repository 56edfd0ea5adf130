"""Which mode a load gets and why: ``python -m sglang_neo.explain PROFILE --device-rows 12 --host-rows 64``, or
``python -m sglang_neo.explain http://HOST:PORT`` for what a server has to do now.

Reads a profile (planning/tables.py) of any machine, or asks a server in mode auto for its tables, for what it has
learnt since, and for its requests. Needs neither a GPU nor SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_neo.planning import inequalities as q
from sglang_neo.planning.costs import MODES, Corrections, Costs, Rows
from sglang_neo.planning.planner import Choice, Limits, State, compare
from sglang_neo.planning.tables import Key, ProfileError, Tables, read, tables_of


def terms(costs: Costs, device: Rows, mean_tokens: float, host_rows: int) -> q.Terms:
    """The terms of the inequalities for a load, from measured tables.

    The CPU's rate is that of as many rows at once as a lane would hold: one row alone is attended to less efficiently.
    """
    layers = costs.tables.layers
    at_once = max(1, max(costs.lanes(device, mean_tokens, host_rows)))
    seconds = layers * costs.cpu_layer(Rows(at_once, at_once * mean_tokens))
    return q.Terms(
        device_rows=device.count,
        linear=costs.linear(device.count),
        attention=costs.device_attention(device),
        host_rate=at_once / seconds,
        layers=layers,
    )


def explain(tables: Tables, limits: Limits, state: State, corrections: Corrections | None = None) -> list[str]:
    """Lines for people. ``state`` must have device rows and host rows."""
    corrections = corrections or Corrections()
    costs = Costs(tables, limits.threads, corrections)
    device = Rows(len(state.device_rows), sum(state.device_rows))
    resident = len(state.host_rows)
    mean = sum(state.host_rows) / resident
    choices = compare(state, limits, tables, corrections)
    best = max(choices, key=lambda choice: choice.worth)
    t = terms(costs, device, mean, resident)
    lines = [
        f"T = {1e3 * t.linear:.2f} ms, t = {1e3 * t.attention:.2f} ms, n = {device.count:.0f}, R = {resident}, "
        f"N_g = {t.device_rate:.0f} rows/s, N_c = {t.host_rate:.0f} rows/s, L = {t.layers}",
        "",
        "mode       ms/step  tokens/s  over gpu_only  host rows per step  ms per host token  CPU busy",
        *(_line(choice, choices[0].rate) for choice in choices),
    ]
    missing = [mode for mode in limits.modes if mode not in [choice.mode for choice in choices]]
    if missing:
        lines.append(f"not possible: {', '.join(missing)} (no row fits in time, or a bound on latency forbids it)")
    lines += ["", f"-> {best.mode}"]
    if (fastest := max(choices, key=lambda choice: choice.rate)) is not best:
        slower, asked = fastest.cost.seconds / choices[0].cost.seconds, fastest.slower
        lines.append(
            f"{fastest.mode} is faster, but device rows take {slower:.2f} times as long per token there, "
            f"which {asked:.2f} times the tokens would be worth"
        )
    lines.append("")
    lanes = costs.lanes(device, mean, limits.max_lane_rows)
    rows = q.pipelined_rows(t, resident, resident + state.host_free // max(mean, 1))
    slots = q.deferred_slots(t, resident, resident + state.host_free // max(mean, 1), limits.max_slots)
    handoff = costs.slot_handoffs(limits.max_slots)
    lines += [
        str(q.pipelined_beats_gpu_only(t)) + " (CPU busy all the time)",
        str(q.pipelined_beats_gpu_only_with(t, min(resident, sum(lanes)))) + " (with the rows there are)",
        str(q.deferred_beats_gpu_only(t, min(slots.values()), handoff)),
        str(q.deferred_beats_pipelined(t, min(slots.values()))),
        _bound("host rows of a pipelined step", rows),
        _bound("slots of a deferred step", slots),
    ]
    return lines


def _line(choice: Choice, alone: float) -> str:
    host = f"{choice.host_tokens:.2f}" if choice.host_tokens else "-"
    tpot = f"{1e3 * choice.host_tpot:.0f}" if choice.host_tokens else "-"
    busy = choice.cost.cpu / choice.cost.seconds
    return (
        f"{choice.mode:10} {1e3 * choice.cost.seconds:7.2f} {choice.rate:9.1f} {choice.rate / alone:14.3f} "
        f"{host:>19} {tpot:>18} {busy:9.0%}"
    )


def _bound(what: str, bounds: Mapping[str, float]) -> str:
    least = min(bounds, key=lambda name: bounds[name])
    return f"{what}: {', '.join(f'{name} {value:.3g}' for name, value in bounds.items())}; bound by: {least}"


def explain_server(planner: Mapping[str, Any]) -> list[str]:
    """The same for what a server has to do now.

    Args:
        planner: of the ``neo`` block of its ``/server_info``. Raises ProfileError if its tables are none.
    """
    corrections, guard, counters = Corrections(**planner["corrections"]), planner["guard"], planner["counters"]
    limits = Limits(**{**planner["limits"], "modes": tuple(planner["limits"]["modes"])})
    device, host, waiting = planner["device_rows"], planner["host_rows"], planner["waiting"]
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in planner["corrections"].items())
    lines = [
        f"mode {planner['mode']}; {len(device)} device rows, {len(host)} host rows, {waiting} requests waiting",
        f"measured over profiled times: {factors}; steps are predicted to {planner['error']:.1%}",
        f"{counters['changes']} changes of mode; the CPU was left out {counters['pauses']} times"
        + (f", and is for {guard['pause_left']} more steps" if guard["pause_left"] else ""),
    ]
    if not device or not (host or waiting):
        return [*lines, "nothing to compare: that takes device rows, and host rows or requests that wait"]
    if not host:
        lines.append("as if the requests that wait were host rows, as long as the device's are:")
        host = [sum(device) // len(device)] * waiting
    state = State(
        device_rows=tuple(device),
        host_rows=tuple(host),
        waiting=(),
        device_free=planner["device_free"],
        host_free=planner["host_free"],
    )
    return [*lines, "", *explain(tables_of(planner["tables"]), limits, state, corrections)]


def _ask(url: str) -> Mapping[str, Any]:
    """The planner's part of a server's state. Raises ProfileError if there is none."""
    key = os.environ.get("SGLANG_API_KEY")
    request = urllib.request.Request(
        f"{url.rstrip('/')}/server_info", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            info = json.load(answer)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{url} does not answer as a server would: {error}") from None
    neo = info.get("neo") if isinstance(info, dict) else None
    if not neo or not neo.get("planner"):
        why = f"it runs in mode {neo['active_mode']}" if neo else "it is not one of ours"
        raise ProfileError(f"the server at {url} has no planner: {why}")
    planner: Mapping[str, Any] = neo["planner"]
    return planner


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_neo.explain", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "profile", help="a file of python -m sglang_neo.profile, or a server in mode auto: http://HOST:PORT"
    )
    parser.add_argument("--device-rows", type=int, default=16)
    parser.add_argument("--host-rows", type=int, default=64, help="in host memory, or waiting and able to go there")
    parser.add_argument("--tokens", type=int, default=1000, help="KV tokens of a row (default 1000)")
    parser.add_argument("--host-kv-tokens", type=int, help="room in host memory (default: for the host rows)")
    parser.add_argument("--best-effort", action="store_true", help="host rows have no bound on their latency")
    parser.add_argument("--max-host-tpot", type=float, default=250.0, help="ms per token of a host row (default 250)")
    parser.add_argument("--max-tpot", type=float, help="ms per token of a device row")
    parser.add_argument("--mode", choices=MODES, action="append", help="that may run besides gpu_only (default: all)")
    return parser


def _heading(key: Key) -> str:
    return f"{key.model} on {key.gpu}; {key.cpu}, {key.threads} threads; kernels {key.kernels}; SGLang {key.sglang}"


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.profile.startswith(("http://", "https://")):
        try:
            print("\n".join(explain_server(_ask(args.profile))))
        except ProfileError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    if args.device_rows < 1 or args.host_rows < 1 or args.tokens < 1:
        print("error: rows and tokens must be at least 1", file=sys.stderr)
        return 2
    try:
        key, tables = read(Path(args.profile))
    except ProfileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    limits = Limits(
        threads=key.threads,
        modes=tuple(mode for mode in MODES if mode == "gpu_only" or not args.mode or mode in args.mode),
        max_tpot=args.max_tpot / 1e3 if args.max_tpot else None,
        max_host_tpot=None if args.best_effort else args.max_host_tpot / 1e3,
    )
    used = args.host_rows * args.tokens
    state = State(
        device_rows=(args.tokens,) * args.device_rows,
        host_rows=(args.tokens,) * args.host_rows,
        waiting=(),
        device_free=args.device_rows,
        host_free=max(0, (args.host_kv_tokens or used) - used),
    )
    print("\n".join([_heading(key), *explain(tables, limits, state)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
