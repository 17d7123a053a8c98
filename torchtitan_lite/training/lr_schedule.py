"""Warm-up, plateau, decay: the learning rate as a pure function of the step.

Nothing is stored and nothing can go out of step on resume.
"""

from __future__ import annotations

import math

from torchtitan_lite.config.schema import LRScheduler


def lr_factor(step: int, total_steps: int, config: LRScheduler) -> float:
    """The share of the peak learning rate that update number ``step`` (from 1) uses.

    Warm-up rises in equal parts to 1 at step ``warmup_steps``; the decay would reach ``min_lr_factor`` one step after
    the last. A decay longer than what the warm-up leaves is cut to that.
    """
    done = step - 1
    if done < config.warmup_steps:
        return step / config.warmup_steps
    decay_steps = total_steps - config.warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * config.decay_ratio))
    progress = done - (total_steps - decay_steps)
    if progress <= 0:
        return 1.0
    x = min(progress / decay_steps, 1.0)
    shape = {"linear": 1 - x, "sqrt": 1 - math.sqrt(x), "cosine": 0.5 * (1 + math.cos(math.pi * x))}[config.decay_type]
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape
