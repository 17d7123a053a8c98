"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import math

from tqdm import tqdm


def eta_text(seconds: float) -> str:
    """Time left in its two largest units: ``42s``, ``3m07s``, ``2h05m``, ``4d01h``; ``?`` if it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    if minutes:
        return f"{m}m{s:02}s"
    return f"{s}s"


class ProgressBar:
    """Steps done, loss, tokens/s and time left, on stderr while that is a terminal.

    Example:
        with ProgressBar(total_steps=1000, start_step=200, main_rank=rank == 0) as bar:
            for step in range(201, 1001):
                ...
                bar.step()
                bar.show(loss=2.3, tps=12_345)  # when there are new numbers

    Args:
        total_steps: steps of the run, counted from its very start.
        start_step: steps done before this process started; they do not count in the speed.
        main_rank: whether this process draws.
    """

    def __init__(self, total_steps: int, start_step: int, main_rank: bool) -> None:
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            disable=None if main_rank else True,  # None: tqdm looks whether stderr is a terminal
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def step(self) -> None:
        """Count one more step."""
        self._bar.update()

    def show(self, *, loss: float, tps: float) -> None:
        """Replace the numbers beside the bar."""
        self._bar.set_postfix_str(f"loss {loss:.4f}, {tps:,.0f} tokens/s")
