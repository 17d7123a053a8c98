"""Noticing that a run has diverged, without waiting for the device in every step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchtitan_lite.convert.step_folder import complete_steps
from torchtitan_lite.training.checkpoint import CheckpointManager


class DivergenceCheck:
    """Adds up the gradient norms of steps, and looks at the sum when asked.

    A loss that is not finite has no finite gradient, and the norm is the same on every rank, so all stop at once. The
    sum stays broken after a single broken step, even if only a few rows of the embedding carry the damage on.

    Args:
        checkpoint: what the run saves to; the error says what is there. None if it saves nothing.
    """

    def __init__(self, device: torch.device, checkpoint: CheckpointManager | None) -> None:
        self._norms = torch.zeros((), device=device)
        self._checkpoint = checkpoint
        self.finite_step = 0  # up to this step all was finite

    def add(self, grad_norm: Tensor) -> None:
        self._norms += grad_norm.to(self._norms.device)

    def require_finite(self, step: int) -> None:
        """Raise FloatingPointError unless all norms up to ``step`` are finite. Waits for the device."""
        norms = self._norms.item()
        if not math.isfinite(norms):
            raise FloatingPointError(self._message(norms, step))
        self.finite_step = step
        self._norms.zero_()

    def _message(self, norms: float, step: int) -> str:
        first = self.finite_step + 1
        steps = f"step {first}" if first == step else f"steps {first} to {step}"
        good = []
        if self._checkpoint is not None:
            self._checkpoint.wait()
            good = [saved for saved in complete_steps(self._checkpoint.folder) if saved < first]
        resume = "There is no checkpoint from before"
        if good:
            resume = (
                f"Checkpoints from before: step {', '.join(map(str, good))} in {self._checkpoint.folder}; where the "
                "newest diverges again, checkpoint.load_step takes an older one"
            )
        return (
            f"Training diverged: loss or gradients were not finite (norm {norms}) in {steps}. {resume}. A lower "
            "optimizer.lr or a longer lr_scheduler.warmup_steps may help"
        )
