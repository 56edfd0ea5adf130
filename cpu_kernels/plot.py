"""The result of the bench as a picture: the fraction of the probe, per case, element type and threads."""

from __future__ import annotations

import importlib.util
from typing import Any


def require() -> None:
    """ValueError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def draw(document: dict[str, Any], path: str) -> None:
    """Writes the picture; the file's ending decides its kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = document["results"]
    main_isa = next((r["isa"] for r in results if r["isa"]), None)

    def label(r: dict[str, Any]) -> str:
        if r["backend"] != "cpu_kernels":
            return str(r["backend"])
        return str(r["dtype"]) if r["isa"] == main_isa else f"{r['dtype']}, {r['isa']}"

    cases = list(dict.fromkeys(r["case"] for r in results))
    kinds = list(dict.fromkeys(label(r) for r in results))
    threads = sorted({r["threads"] for r in results})
    figure, axes = pyplot.subplots(
        len(threads), 1, figsize=(max(7.0, 1.5 * len(cases)), 3.2 * max(1, len(threads))), squeeze=False, sharex=True
    )
    colours = pyplot.get_cmap("tab10")
    for ax, count in zip(axes[:, 0], threads, strict=True):
        at = 0.0
        ticks = []
        for case in cases:
            here = {label(r): r for r in results if r["case"] == case and r["threads"] == count}
            begin = at
            for kind in (k for k in kinds if k in here):
                r = here[kind]
                low, high = r["fraction"] - r["fraction_min"], r["fraction_max"] - r["fraction"]
                ax.bar(at, r["fraction"], 0.9, color=colours(kinds.index(kind) % 10), label=kind)
                ax.errorbar(at, r["fraction"], [[low], [high]], color="black", linewidth=0.8)
                at += 1
            ticks.append((begin + at - 1) / 2)
            at += 1
        ax.axhline(1, color="grey", linewidth=0.8, linestyle="--")
        ax.set_ylabel(f"fraction of the probe\n{count} thread(s)")
        ax.set_xticks(ticks, cases, fontsize="small")
        ax.tick_params(labelbottom=True)
        ax.grid(axis="y", linewidth=0.3)
    handles: dict[str, Any] = {}
    for ax in axes[:, 0]:
        for handle, kind in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(kind, handle)
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, fontsize="small", frameon=False)
    s, m = document["shape"], document["machine"]
    figure.text(
        0.5,
        0.005,
        f"{m['cpu']}, {m['cores']} cores, {main_isa}; {s['q_heads']} query heads, {s['kv_heads']} KV heads, "
        f"head_dim {s['head_dim']}; bars: median, lines: all repetitions; {document['date'][:10]}",
        ha="center",
        fontsize="x-small",
    )
    figure.tight_layout(rect=(0, 0.02, 1, 0.93))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
