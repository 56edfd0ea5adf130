"""What becomes of a prefix that a waiting request has in host memory."""

from __future__ import annotations


def loads_back(hit: int, step: int, device_total: int) -> bool:
    """Whether the prefix is copied to the device, or computed there once more.

    A copy is the cheaper of the two on every machine that we know: a token's KV crosses the bus in microseconds, and
    its prefill takes many times that. So a request waits for room for its prefix as it does for its prompt, unless the
    device could never hold the prefix and the step behind it at once.

    Args:
        hit: tokens of the prefix, whole device pages.
        step: tokens of the prompt that the prefill step behind it takes, whole device pages.
        device_total: size of the device pool.
    """
    return hit > 0 and hit + step <= device_total
