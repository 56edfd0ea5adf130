"""Queues of work that run as late, and in as strange an order, as their marks allow; in the place of CUDA streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sglang_neo.host_kv.streams import CpuDevice


class Mark:
    def __init__(self, device: ShuffledDevice) -> None:
        self.device, self.reached = device, False

    def done(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        while not self.reached:
            assert self.device.step(), "deadlock"

    def wait(self, stream: Any) -> None:
        self.device.current().wait(self)


class ShuffledQueue:
    def __init__(self, device: ShuffledDevice) -> None:
        self.device = device
        self.entries: list[Callable[[], None] | Mark] = []  # work, or a mark to reach
        self.waits: dict[int, Mark] = {}
        self.number = 0  # of the next entry to run

    def run(self, work: Callable[[], None]) -> None:
        self.entries.append(work)

    def record(self) -> Mark:
        mark = Mark(self.device)
        self.entries.append(mark)
        return mark

    def wait(self, mark: Mark) -> None:
        if self.device.heeds_waits:
            self.entries.append(lambda: None)
            self.waits[len(self.entries) - 1] = mark

    def ready(self) -> bool:
        if self.number == len(self.entries):
            return False
        mark = self.waits.get(self.number)
        return mark is None or mark.reached

    def step(self) -> None:
        entry = self.entries[self.number]
        self.number += 1
        if isinstance(entry, Mark):
            entry.reached = True
        else:
            entry()


class ShuffledDevice(CpuDevice):
    """Runs the heads of its queues in random order, and some time after they were enqueued."""

    def __init__(self, seed: int, heeds_waits: bool = True) -> None:
        self.random = random.Random(seed)
        self.heeds_waits = heeds_waits
        self.queues: list[ShuffledQueue] = []
        self.favourites: list[ShuffledQueue] = []
        self.main = self.queue()

    def current(self) -> ShuffledQueue:
        return self.main

    def queue(self) -> ShuffledQueue:
        self.queues.append(ShuffledQueue(self))
        self.favourites.append(self.queues[-1])
        return self.queues[-1]

    def step(self) -> bool:
        ready = [queue for queue in self.queues if queue.ready()]
        if not ready:
            return False
        if self.random.random() < 0.05:  # the favourites change: one queue may run far ahead of the others
            self.random.shuffle(self.favourites)
        if self.random.random() < 0.1:
            self.random.choice(ready).step()
        else:
            next(queue for queue in self.favourites if queue.ready()).step()
        return True

    def some_steps(self) -> None:
        for _ in range(self.random.choice([0, 0, 3, 30])):
            self.step()


class AtOnce:
    """The current queue of a device that computes at once: waiting means to make the others come to the mark."""

    def __init__(self, device: ShuffledDevice) -> None:
        self.device = device

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Mark:
        mark = Mark(self.device)
        mark.reached = True
        return mark

    def wait(self, mark: Mark) -> None:
        mark.synchronize()


class LateCopies(ShuffledDevice):
    """For a scheduler on the CPU device: copies between the pools are under way until somebody waits, or ``some_steps``
    are made."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.at_once = AtOnce(self)

    def current(self) -> Any:
        return self.at_once
