"""What a run is judged by between its steps: the loss on held-out rows, and samples of text."""

from __future__ import annotations

import math
from typing import Any

from torchtitan_lite.config.schema import Config
from torchtitan_lite.observability.logging import logger
from torchtitan_lite.observability.metrics import MetricsLogger
from torchtitan_lite.training.samples import SampleWriter
from torchtitan_lite.training.validate import Validator


class Evaluation:
    """Says when, and remembers the best.

    Attributes:
        best: step and loss of the best validation so far; None before there is one.

    Args:
        validator, samples: None where the configuration asks for neither.
    """

    def __init__(self, config: Config, validator: Validator | None, samples: SampleWriter | None) -> None:
        self.config, self.validator, self.samples = config, validator, samples
        self.best: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the best so far, and what it was measured on."""
        return {"best": self.best, "held_out": None if self.validator is None else self.validator.rows.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the best over, unless it was measured on other rows: losses on those say nothing of these."""
        self.best = state.get("best")
        now = self.state_dict()["held_out"]
        if self.best is not None and now is not None and state.get("held_out", now) != now:
            logger.warning(f"Other validation data than before: step {self.best['step']} is no longer the best so far")
            self.best = None

    def after(self, step: int, metrics: MetricsLogger | None) -> bool:
        """Do what is due after ``step``, 0 being before the first. All ranks call this together.

        metrics: where results go; None on all ranks but the main one.

        Returns whether the model is the best so far, and to be kept.
        """
        if self._samples_due(step):
            written = self.samples.write()
            if metrics is not None:
                metrics.log_samples(written, step)
        if not self._validation_due(step):
            return False
        result = self.validator.run(step)
        if metrics is not None:
            metrics.log_validation(result)
        if not self.config.validation.keep_best or step == 0 or not math.isfinite(result.loss):
            return False
        if self.best is not None and result.loss >= self.best["loss"]:
            return False
        self.best = {"step": step, "loss": result.loss}
        return True

    def is_due(self, step: int) -> bool:
        """Whether there is anything to do after ``step``."""
        return self._samples_due(step) or self._validation_due(step)

    def _samples_due(self, step: int) -> bool:
        return self.samples is not None and self._falls_on(step, self.config.samples.freq)

    def _validation_due(self, step: int) -> bool:
        return self.validator is not None and self._falls_on(step, self.config.validation.freq)

    def _falls_on(self, step: int, freq: int) -> bool:
        return step % freq == 0 or step == self.config.training.steps
