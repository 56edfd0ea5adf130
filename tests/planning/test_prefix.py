"""When a prefix in host memory is copied to the device."""

from __future__ import annotations

from sglang_neo.planning.prefix import loads_back


def test_a_hit_comes_back_if_the_device_could_hold_it_with_the_next_step() -> None:
    assert loads_back(1024, 512, 2048)
    assert loads_back(1536, 512, 2048)
    assert not loads_back(1600, 512, 2048)
    assert not loads_back(0, 512, 2048), "nothing to load"
