"""Pictures of docs/planner.md: ``python -m bench.planner_plots docs/images``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.evidence import published
from bench.machines import MACHINES, MODELS, device_tokens, host_tokens, tables
from bench.simulate import limits_of
from sglang_neo.planning.costs import MODES, Mode
from sglang_neo.planning.planner import State, compare

#: A model for each machine that leaves little room beside its weights.
USUAL = {
    "T4": "Llama-2-7B",
    "A10G": "Llama-3.1-8B",
    "L4": "Llama-3.1-8B",
    "A100": "Llama-3.1-8B",
    "H100": "Llama-3.1-8B",
    "H200": "Llama-3.1-70B",
    "B200": "Llama-3.1-70B",
}
COLOURS = {"gpu_only": "#d9d9d9", "sync": "#fdb863", "pipelined": "#5ab4ac", "deferred": "#8073ac"}
DEVICE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
HOST_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = 1000


def crossover(machine: str, model: str) -> list[list[tuple[Mode, float]]]:
    """[host rows][device rows]: the mode that a decode step is given and its gain; rows of ``TOKENS`` tokens."""
    known, host_pool = tables(MACHINES[machine], MODELS[model]), host_tokens(MACHINES[machine], MODELS[model])
    limits = limits_of(known, MACHINES[machine].threads, host_pool, MODES, max_host_tpot=None)
    grid: list[list[tuple[Mode, float]]] = []
    for host in HOST_ROWS:
        grid.append([])
        for device in DEVICE_ROWS:
            state = State((TOKENS,) * device, (TOKENS,) * host, (), device, 0)
            choices = compare(state, limits, known)
            best = max(choices, key=lambda choice: choice.worth)
            grid[-1].append((best.mode, best.rate / choices[0].rate))
    return grid


def draw_crossovers(path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(2, 4, figsize=(15, 7.5), constrained_layout=True)
    colours = ListedColormap([COLOURS[mode] for mode in MODES])
    for (machine, model), axis in zip(USUAL.items(), axes.flat, strict=False):
        grid = crossover(machine, model)
        codes = [[MODES.index(mode) for mode, _ in row] for row in grid]
        gains = [[gain for _, gain in row] for row in grid]
        axis.imshow(codes, origin="lower", aspect="auto", cmap=colours, vmin=-0.5, vmax=len(MODES) - 0.5)
        levels = [1.1, 1.25, 1.5, 2.0, 3.0]
        if max(map(max, gains)) > levels[0]:
            lines = axis.contour(gains, levels=levels, colors="black", linewidths=0.7)
            axis.clabel(lines, fmt="%gx", fontsize=7)
        fits = device_tokens(MACHINES[machine], MODELS[model]) // TOKENS
        room = f"{fits} rows fit" if fits else "none fits in 90 % of its memory"
        axis.set_title(f"{machine}, {model} ({room})", fontsize=9)
        axis.set_xticks(range(0, len(DEVICE_ROWS), 3), [str(rows) for rows in DEVICE_ROWS[::3]], fontsize=7)
        axis.set_yticks(range(0, len(HOST_ROWS), 2), [str(rows) for rows in HOST_ROWS[::2]], fontsize=7)
        axis.set_xlabel("device rows", fontsize=8)
        axis.set_ylabel("host rows, there or waiting", fontsize=8)
    last = axes.flat[-1]
    last.axis("off")
    last.legend(handles=[Patch(color=COLOURS[mode], label=mode) for mode in MODES], loc="center", fontsize=11)
    figure.suptitle(f"Mode of a decode step, rows of {TOKENS} tokens; lines: tokens/s over gpu_only")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_published(path: Path, lines: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 3.8), constrained_layout=True)
    for place, line in enumerate(lines):
        low, high = line["published"]
        simulated = list(line["simulated"].values())
        for side, ratios, colour in ((-0.12, [low, high], "black"), (0.12, simulated, "#5ab4ac")):
            axis.plot([place + side] * 2, [min(ratios), max(ratios)], color=colour, marker="_", markersize=14, lw=3)
    axis.plot([], [], color="black", lw=3, label="published")
    axis.plot([], [], color="#5ab4ac", lw=3, label="simulated, all lengths")
    axis.set_yscale("log")
    ticks = [1, 1.25, 1.5, 2, 3, 4, 6, 8]
    axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks], minor=False)
    axis.minorticks_off()
    axis.set_xticks(range(len(lines)), [f"{line['paper']}\n{line['case'].replace(', ', chr(10))}" for line in lines])
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="y", linewidth=0.3)
    axis.set_title("Throughput over the GPU alone", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.planner_plots", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--published", type=Path, help="what bench.simulate --published wrote (default: simulated anew)"
    )
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    draw_crossovers(args.folder / "planner_crossover.png")
    found = json.loads(args.published.read_text()) if args.published else published()
    draw_published(args.folder / "planner_published.png", found["published"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
