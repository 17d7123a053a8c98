"""AdamW with both moments in 8 bits (Dettmers et al., 2022), torchao's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.observability.logging import quiet_import


def build_adamw8bit(param_groups: list[dict[str, Any]], *, compiled: bool, **settings: Any) -> torch.optim.Optimizer:
    """torchao.optim.AdamW8bit. Its learning rates are tensors, to be filled and not replaced.

    compiled: let it compile its step, once a shape and sharding; otherwise that runs operator by operator.
    """
    with quiet_import():
        from torchao.optim import AdamW8bit
    optimizer = AdamW8bit(param_groups, **settings)
    if not compiled:
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def make_tables() -> None:
    """Have torchao work out the values of its codes, which it does once, on real tensors."""
    with quiet_import():
        from torchao.optim.subclass_8bit import OptimState8bit
    for signed in (True, False):
        OptimState8bit.zeros((256,), signed)


def stored_parts(state: Tensor) -> list[Tensor]:
    """The plain tensors that a moment is stored in: codes, scales and the codes' values; or itself if it is plain, as
    small ones are, and those whose blocks of 256 numbers do not come out even."""
    if hasattr(state, "__tensor_flatten__"):
        names, _ = state.__tensor_flatten__()
        return [getattr(state, name) for name in names]
    return [state]
