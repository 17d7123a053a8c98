"""Python's garbage collector, run by the step count instead of by chance.

An automatic collection falls on a different step on every rank, and each time all the others wait for that rank.
"""

from __future__ import annotations

import gc


class GarbageCollection:
    """While entered, Python collects only when :meth:`step` says so: every ``freq`` steps, the same ones on all ranks.

    The two younger generations are collected; walking the oldest one, where the model lives, would stall the step.

    Args:
        freq: steps between two collections.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._was_enabled:
            gc.enable()

    def step(self, step: int) -> None:
        """Collect if ``step`` (the run's step number) is due."""
        if step % self._freq == 0:
            gc.collect(1)
