import math

import pytest
import torch
from torch import nn

from torchtitan_lite.config.schema import Optimizer
from torchtitan_lite.training.optimizer import build_optimizer

IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]
LR, BETA1, BETA2, EPS, DECAY = 0.1, 0.8, 0.9, 1e-3, 0.25


def adam_by_hand(value: float, gradients: list[float], *, decoupled: bool) -> float:
    """Kingma & Ba (2015), with decay inside the gradient or, as Loshchilov & Hutter (2019) have it, beside it."""
    m = v = 0.0
    for step, gradient in enumerate(gradients, start=1):
        gradient += 0 if decoupled else DECAY * value
        m = BETA1 * m + (1 - BETA1) * gradient
        v = BETA2 * v + (1 - BETA2) * gradient**2
        update = (m / (1 - BETA1**step)) / (math.sqrt(v / (1 - BETA2**step)) + EPS)
        value = value * (1 - LR * DECAY * decoupled) - LR * update
    return value


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "decoupled"), [("AdamW", True), ("Adam", False)])
def test_steps_by_hand(name, decoupled, implementation):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    config = Optimizer(name, LR, BETA1, BETA2, EPS, DECAY, implementation)
    optimizer = build_optimizer(model, config)
    gradients = [[0.5, -1.0], [0.25, 2.0], [0.0, 1e-3]]
    for gradient in gradients:
        model.weight.grad = torch.tensor([gradient])
        optimizer.step()
    expected = [adam_by_hand(1.0, [g[i] for g in gradients], decoupled=decoupled) for i in (0, 1)]
    assert model.weight[0].tolist() == pytest.approx(expected, rel=1e-5)
    (group,) = optimizer.param_groups
    assert (bool(group["fused"]), bool(group["foreach"])) == (implementation == "fused", implementation == "foreach")


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    assert build_optimizer(model, Optimizer()).param_groups[0]["params"] == [model.bias]
