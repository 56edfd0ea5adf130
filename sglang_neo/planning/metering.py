"""How fast prompts are computed straight into host memory while others decode on the device.

Such a prefill holds the device up for as long as it takes. A decode step reads all weights, a prefill of n tokens
multiplies with them n times: on a machine that does b multiplications in the time in which it reads a weight, the
prefill of b tokens takes as long as a decode step, whatever the model. b is 100 to 300 on the GPUs that we know. So a
budget of tokens per decode step bounds the share of time that prefills take from decoding, without any clock: ranks
that decide for themselves decide the same.
"""

from __future__ import annotations


class Meter:
    """A budget of prompt tokens that grows by ``per_step`` with each decode step that has device rows.

    It may be overdrawn: a step computes a whole chunk, and what it took too much is waited for afterwards. Unused
    budget is not kept, for decoding does not get faster by it later.

    Args:
        per_step: tokens.
    """

    def __init__(self, per_step: float):
        if per_step <= 0:
            raise ValueError(f"the budget per step must be greater than 0, got {per_step}")
        self.per_step = per_step
        self._debt = 0.0

    def decoded(self) -> None:
        """A decode step with device rows."""
        self._debt = max(0.0, self._debt - self.per_step)

    def computed(self, tokens: int) -> None:
        """A prefill step to the host."""
        self._debt += tokens

    def open(self, device_rows: int) -> bool:
        """Whether prompts may be computed to the host now. Nobody is held up where no device row decodes; what was
        overdrawn is forgotten then."""
        if not device_rows:
            self._debt = 0.0
        return self._debt <= 0
