"""Measured tables: monotone whatever was measured, exact where it was, saved under a key and refused under another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.planning.tables import CpuAttention, Curve, Key, ProfileError, Surface, load, monotone, read, save
from tests.planning.machines import proportional, real

KEY = Key(model="8B bf16 tp1", gpu="H200", cpu="Xeon, 16 cores", threads=14, kernels="0.1.0 amx", sglang="0.5.17")

times = st.floats(0, 1e3, allow_nan=False, allow_subnormal=False)
sizes = st.floats(0, 1e6, allow_nan=False, allow_subnormal=False)
axes = st.lists(st.integers(0, 10_000), min_size=1, max_size=5, unique=True)


def test_a_curve_is_exact_at_its_points_linear_between_and_goes_on_with_the_last_slope() -> None:
    curve = Curve((1.0, 16.0, 17.0, 64.0), (2.0, 2.0, 5.0, 9.7))
    assert [curve.at(x) for x in (1, 16, 17, 64)] == [2.0, 2.0, 5.0, 9.7]
    assert curve.at(16.5) == 3.5, "a step of the kernels stays a step"
    assert curve.at(0) == 2.0
    assert curve.at(164) == pytest.approx(9.7 + 100 * 0.1)
    assert Curve((3.0,), (2.0,)).at(100) == 2.0


def test_a_surface_is_bilinear_and_goes_on_with_the_mean_last_slope() -> None:
    surface = Surface((0.0, 10.0), (0.0, 100.0), ((0.0, 1.0), (2.0, 4.0)))
    assert surface.at(5, 50) == 1.75
    assert surface.at(10, 100) == 4.0
    assert surface.at(20, 100) == pytest.approx(4.0 + 10 * (2.0 + 3.0) / 2 / 10)
    assert surface.at(10, 300) == pytest.approx(4.0 + 200 * (1.0 + 2.0) / 2 / 100)


@given(st.lists(times, min_size=1, max_size=12))
def test_smoothing_gives_order_and_leaves_ordered_values_alone(values: list[float]) -> None:
    smooth = monotone(values)
    assert list(smooth) == sorted(smooth)
    assert min(values) <= smooth[0] and smooth[-1] <= max(values)
    assert list(monotone(sorted(values))) == pytest.approx(sorted(values))


@given(st.dictionaries(st.integers(0, 10_000), times, min_size=1, max_size=8), sizes, sizes)
def test_a_curve_never_falls(points: dict[float, float], a: float, b: float) -> None:
    curve = Curve.fit(points)
    low, high = sorted((a, b))
    assert 0 <= curve.at(low) <= curve.at(high) * (1 + 1e-9) + 1e-9


@given(axes, axes, st.data(), st.tuples(sizes, sizes, sizes, sizes))
def test_a_surface_never_falls(
    xs: list[int], ys: list[int], data: st.DataObject, at: tuple[float, float, float, float]
) -> None:
    points = {(float(x), float(y)): data.draw(times) for x in xs for y in ys}
    surface = Surface.fit(points)
    (x0, x1), (y0, y1) = sorted(at[:2]), sorted(at[2:])
    small, large = surface.at(x0, y0), surface.at(x1, y1)
    assert 0 <= small <= large * (1 + 1e-9) + 1e-9


@given(st.lists(times, min_size=4, max_size=4).map(sorted))
def test_a_surface_of_an_ordered_grid_is_that_grid(v: list[float]) -> None:
    points = {(1.0, 10.0): v[0], (1.0, 20.0): v[1], (2.0, 10.0): v[2], (2.0, 20.0): v[3]}
    surface = Surface.fit(points)
    for (x, y), seconds in points.items():
        assert surface.at(x, y) == pytest.approx(seconds)


def test_a_grid_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks \(2.0, 20.0\)"):
        Surface.fit({(1.0, 10.0): 1.0, (1.0, 20.0): 1.0, (2.0, 10.0): 1.0})


@pytest.mark.parametrize(
    ("x", "seconds"), [((1.0, 1.0), (0.0, 1.0)), ((1.0, 2.0), (1.0, 0.5)), ((), ()), ((1.0,), (float("nan"),))]
)
def test_what_is_no_curve_is_refused(x: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Curve(x, seconds)


def test_cpu_attention_counts_threads_and_a_shared_prefix_once() -> None:
    cpu = CpuAttention((4, 8), (proportional(4e-6), proportional(2e-6)), (proportional(4e-7), proportional(2e-7)))
    assert cpu.at(2, 1000, threads=4) == pytest.approx(4e-3)
    assert cpu.at(2, 1000, threads=6) == pytest.approx(3e-3)
    assert cpu.at(2, 1000, threads=16) == pytest.approx(2e-3)
    assert cpu.at(2, 1000, threads=8, shared_tokens=1000) == pytest.approx(2.2e-3)
    assert cpu.at(0, 0, threads=8) == 0


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / KEY.file_name
    save(path, KEY, real())
    assert load(path, KEY) == real()
    assert read(path) == (KEY, real())
    assert [p.name for p in path.parent.iterdir()] == [KEY.file_name]


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "70B"), ("gpu", "T4"), ("cpu", "EPYC"), ("threads", 12), ("kernels", "0.2.0"), ("sglang", "0.5.18")],
)
def test_a_foreign_or_stale_table_is_refused_in_one_line_that_says_why(
    tmp_path: Path, field: str, value: object
) -> None:
    path = tmp_path / "profile.json"
    other = replace(KEY, **{field: value})
    save(path, other, real())
    with pytest.raises(ProfileError, match=f"{field} {value!r} instead of {getattr(KEY, field)!r}") as refusal:
        load(path, KEY)
    assert "\n" not in str(refusal.value)
    assert other.file_name != KEY.file_name


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"format": 0}', '{"format": 1}', '{"format": 2}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(damage)
    with pytest.raises(ProfileError, match="profile"):
        load(path, KEY)


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(path, KEY, real())
    content = json.loads(path.read_text())
    content["tables"]["linear"]["seconds"][0] = 1e9
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="damaged"):
        load(path, KEY)
    del content["tables"]["linear"]
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=r"damaged.*linear"):
        load(path, KEY)
