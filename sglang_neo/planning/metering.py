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

    It may be overdrawn: a step computes up to ``step_tokens``, and what it took too much is waited for afterwards.
    Unused budget is not kept, for decoding does not get faster by it later.

    Args:
        per_step: tokens.
    """

    #: Decode steps whose budget one prefill step may take, so that a short answer does not meet a long prompt whole.
    STEPS_AT_ONCE = 32
    #: Tokens that one may take whatever the budget: fewer would not keep a GPU busy.
    LEAST_AT_ONCE = 256

    def __init__(self, per_step: float):
        if per_step <= 0:
            raise ValueError(f"the budget per step must be greater than 0, got {per_step}")
        self.per_step = per_step
        self._debt = 0.0

    @property
    def step_tokens(self) -> int:
        """Tokens of a prefill step at most, while device rows decode. A prompt that may not be cut is taken whole."""
        return max(self.LEAST_AT_ONCE, int(self.STEPS_AT_ONCE * self.per_step))

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
