"""When a mode pays: the closed forms, derived in docs/planner.md.

They say *why* a mode is chosen, under assumptions that make them short: a decode pass takes the same linear time
whatever its rows, and nothing but linear layers and attention takes time. ``costs.py`` predicts steps without these
assumptions, and the planner goes by that; where they hold, both agree.

Every function computes with whatever numbers it is given, so that tests can be exact with fractions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """One load on one machine. T and t of the papers are ``linear`` and ``attention``.

    Attributes:
        device_rows: rows on the device, each of which gets one token per step.
        linear: seconds per step of a decode pass that are not attention.
        attention: seconds per step of the device rows' attention on the device.
        host_rate: rows per second of the CPU's time: how many rows' attention in all layers it computes in one second.
        layers: of the model.
    """

    device_rows: float
    linear: float
    attention: float
    host_rate: float
    layers: int

    def __post_init__(self) -> None:
        if not (self.device_rows > 0 and self.linear > 0 and self.attention > 0 and self.host_rate > 0):
            raise ValueError(f"device rows, times and rates must be positive: {self}")

    @property
    def device_rate(self) -> float:
        """Rows per second of the device's attention time; N_g of the papers."""
        return self.device_rows / self.attention


# -- tokens per second -------------------------------------------------------------------------------------------------


def gpu_only_rate(terms: Terms) -> float:
    """X0: device rows alone."""
    return terms.device_rows / (terms.linear + terms.attention)


def pipelined_rate(terms: Terms, host_rows: float | None = None) -> float:
    """X1: two lanes, so the linear time twice. ``host_rows``: in the step; by default as many as keep the CPU busy."""
    seconds = 2 * terms.linear + terms.attention
    return (terms.device_rows + (pipelined_host_rows(terms) if host_rows is None else host_rows)) / seconds


def pipelined_host_rows(terms: Terms) -> float:
    """Host rows per step that keep the CPU busy for the whole step. It works on both lanes in turn, on either while the
    other one's linear layers and the device's attention run."""
    return terms.host_rate * (2 * terms.linear + terms.attention)


def deferred_rate(terms: Terms, slots: float, handoff: float = 0) -> float:
    """X2: ``slots`` host rows come to their token per step; ``handoff`` seconds per step go to handing over."""
    return (terms.device_rows + slots) / (terms.linear + terms.attention + handoff)


# -- inequalities ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inequality:
    """``left < right``, with what the sides are."""

    name: str
    left: float
    right: float
    left_is: str
    right_is: str

    @property
    def holds(self) -> bool:
        return self.left < self.right

    def __str__(self) -> str:
        sign = "<" if self.holds else ">="
        verdict = "holds" if self.holds else "fails"
        return f"{self.name} {verdict}: {self.left_is} = {self.left:.4g} {sign} {self.right_is} = {self.right:.4g}"


def pipelined_beats_gpu_only(terms: Terms) -> Inequality:
    """X1 > X0 with the CPU busy all the time: APEX's inequality (6) (arXiv 2506.03296)."""
    linear, attention = terms.linear, terms.attention
    return Inequality(
        "pipelined beats gpu_only",
        terms.device_rate / terms.host_rate,
        2 * linear / attention + 3 + attention / linear,
        "N_g/N_c",
        "2T/t + 3 + t/T",
    )


def pipelined_beats_gpu_only_with(terms: Terms, host_rows: float) -> Inequality:
    """X1 > X0 with ``host_rows`` host rows in the step, no more than keep the CPU busy: what they add must be more than
    what the device rows lose by the second reading of the weights."""
    linear, attention = terms.linear, terms.attention
    lost = terms.device_rows * linear / (linear + attention)
    return Inequality("pipelined beats gpu_only", lost, host_rows, "n T/(T + t)", "host rows")


def pipelined_prefill_beats_mixed(terms: Terms, prefill_linear: float) -> Inequality:
    """The same where lane A carries a prefill besides the device rows, against one pass that carries both.

    Args:
        prefill_linear: T_p, seconds of that pass that are not attention.
    """
    linear, attention = terms.linear, terms.attention
    return Inequality(
        "pipelined beats gpu_only, with a prefill",
        terms.device_rate / terms.host_rate,
        (prefill_linear + attention) * (prefill_linear + linear + attention) / (attention * linear),
        "N_g/N_c",
        "(T_p + t)(T_p + T + t)/(t T)",
    )


def lane_beside_prefill_pays(rate: float, host_rows: float, lane_seconds: float) -> Inequality:
    """Whether host rows should decode in lane B of a step that only prefills: the lane's time must give more tokens
    than it would in the best decode step, which is what waits behind it.

    Args:
        rate: tokens per second of the best decode step.
        lane_seconds: that the second lane adds to the step.
    """
    return Inequality(
        "a lane of host rows beside a prefill pays", rate * lane_seconds, host_rows, "X * T_B", "host rows"
    )


def deferred_beats_gpu_only(terms: Terms, slots: float, handoff: float) -> Inequality:
    """X2 > X0: the tokens that handing over costs the device rows are fewer than those that it brings."""
    return Inequality("deferred beats gpu_only", gpu_only_rate(terms) * handoff, slots, "X0 * hand-off time", "S")


def deferred_beats_pipelined(terms: Terms, slots: float) -> Inequality:
    """X2 > X1 with the CPU busy all the time in X1. Where APEX's (6) fails, the left side is not positive: then
    deferred wins with any slot at all, which is APEX's rule."""
    n, linear, attention = terms.device_rows, terms.linear, terms.attention
    return Inequality(
        "deferred beats pipelined",
        terms.host_rate - n * linear / ((linear + attention) * (2 * linear + attention)),
        slots / (linear + attention),
        "N_c - N_g t T/((T + t)(2T + t))",
        "S/(T + t)",
    )


# -- bounds ------------------------------------------------------------------------------------------------------------


def host_rate_within(host_rate: float, bandwidth: float, copies: float, row_bytes: float) -> float:
    """The host rate that is left while copies run: the CPU's reads and the copies share the host memory's bandwidth.

    Args:
        host_rate: with the memory to itself.
        bandwidth: bytes per second that host memory gives in all.
        copies: bytes per second of them that copies take.
        row_bytes: KV bytes of one row, all layers.
    """
    return min(host_rate, max(bandwidth - copies, 0) / row_bytes)


def deferred_slots(terms: Terms, host_rows: float, rows_that_fit: float, graph_slots: float) -> Mapping[str, float]:
    """What bounds the slots of deferred mode, each by name; the least of them counts.

    Args:
        host_rows: that are there or could be: resident and waiting ones.
        rows_that_fit: of this length in host memory.
        graph_slots: slot rows of the captured steps.
    """
    cohorts = terms.layers + 1
    return {
        "CPU": terms.host_rate * (terms.linear + terms.attention),
        "queue": host_rows / cohorts,
        "host memory": rows_that_fit / cohorts,
        "graph": graph_slots,
    }


#: Tokens of a usual host row.
ROW_TOKENS = 1024


def usual_slots(
    step: float, row: float, layers: int, host_rows: float, rows_that_fit: float, graph_slots: float
) -> int:
    """Slots of deferred mode where the user does not say: those that a step of the usual size has a use for.

    Args:
        step: seconds of reading all weights.
        row: seconds of the CPU's attention to a usual row in all layers.
        host_rows, rows_that_fit, graph_slots: see ``deferred_slots``.
    """
    terms = Terms(device_rows=1, linear=step, attention=1e-9, host_rate=1 / row, layers=layers)
    return int(min(deferred_slots(terms, host_rows, rows_that_fit, graph_slots).values()))


def pipelined_rows(terms: Terms, host_rows: float, rows_that_fit: float) -> Mapping[str, float]:
    """What bounds the host rows of a pipelined step, each by name; the least of them counts."""
    return {"CPU": pipelined_host_rows(terms), "queue": host_rows, "host memory": rows_that_fit}


def deferred_tpot(terms: Terms, host_rows: float, slots: float, handoff: float = 0) -> float:
    """Seconds per token of a host row: a step per layer and one more, and a wait if more rows are there than cohorts
    hold."""
    turns = max(1, host_rows / (slots * (terms.layers + 1)))
    return (terms.layers + 1) * (terms.linear + terms.attention + handoff) * turns


def pipelined_tpot(terms: Terms, resident: float, host_rows: float) -> float:
    """Seconds per token of a host row if ``host_rows`` of the resident ones take part in a step, in turns."""
    return (2 * terms.linear + terms.attention) * max(1, resident / host_rows)
