import math

import pytest
import torch
from torch import nn
from toy_run import TOY

from torchtitan_lite.config.schema import Optimizer, OptimizerGroup
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.adamw8bit import stored_parts
from torchtitan_lite.training.muon import ShardedMuon
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


def test_nothing_to_train_is_no_optimizer():
    optimizer = build_optimizer(nn.Linear(2, 1).requires_grad_(False), Optimizer("Muon"))
    optimizer.set_lr(0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.optimizers == () and optimizer.param_groups == [] and optimizer.state == {}


def after_a_step_without_gradient(config: Optimizer) -> dict[str, float]:
    """What is left of each weight, as a share of what it was."""
    model = Transformer(TOY)
    for p in model.parameters():
        nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    optimizer = build_optimizer(model, config)
    optimizer.set_lr(0.5)
    optimizer.step()
    return {name: p.mean().item() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["AdamW", "Muon", "AdamW8bit"])
def test_norms_are_not_decayed(name):
    """1 - lr x decay = 1 - 0.5 x 0.2 for all but norms; half of that decay where the learning rate is half."""
    if name == "AdamW8bit":
        pytest.importorskip("torchao")
    settings = {"weight_decay": 0.2, "implementation": "for-loop"}
    left = after_a_step_without_gradient(Optimizer(name, **settings))
    assert left == {key: pytest.approx(1.0 if "norm" in key else 0.9) for key in left}
    halved = [OptimizerGroup(r"^output|layers\.1\.", lr_factor=0.5)]
    left = after_a_step_without_gradient(Optimizer(name, no_decay=["wq"], groups=halved, **settings))
    assert left["layers.0.attention.wq.weight"] == 1
    assert left["layers.0.attention_norm.weight"] == pytest.approx(0.9)
    assert left["layers.1.attention.wk.weight"] == pytest.approx(0.95) == left["output.weight"]


@pytest.mark.parametrize("name", ["AdamW", "Muon", "AdamW8bit"])
def test_every_group_gets_its_share_of_the_learning_rate(name):
    if name == "AdamW8bit":
        pytest.importorskip("torchao")
    tables = [OptimizerGroup("w1", lr_factor=0.0), OptimizerGroup("output", lr_factor=2.0)]
    optimizer = build_optimizer(Transformer(TOY), Optimizer(name, groups=tables))
    for lr in (0.1, 0.3):
        optimizer.set_lr(lr)
        given = {float(group["lr"]) for group in optimizer.param_groups}
        assert sorted(given) == pytest.approx([0.0, lr, 2 * lr])


def test_a_factor_of_0_leaves_weights_as_they_are():
    left = after_a_step_without_gradient(Optimizer(weight_decay=0.2, groups=[OptimizerGroup("w1", lr_factor=0.0)]))
    assert {value for name, value in left.items() if "w1" in name} == {1.0}


def test_muon_goes_beside_adamw_with_its_settings():
    model = Transformer(TOY)
    config = Optimizer("Muon", beta1=0.7, muon_momentum=0.8, muon_ns_steps=3, muon_adjust_lr_fn="original")
    adamw, muon = build_optimizer(model, config).optimizers
    assert isinstance(muon, ShardedMuon) and isinstance(adamw, torch.optim.AdamW)
    (group,) = muon.param_groups
    assert (group["momentum"], group["ns_steps"], group["adjust_lr_fn"]) == (0.8, 3, "original")
    assert {p for p in group["params"]} == {p for p in model.layers.parameters() if p.ndim == 2}
    assert all(group["betas"] == (0.7, 0.95) for group in adamw.param_groups)


def test_8_bits_are_near_32_and_take_a_quarter():
    """A moment of 128 x 64 numbers: a byte each, a fp32 scale for 256 of them, and fp32 values of 256 codes."""
    pytest.importorskip("torchao")
    weights = {}
    for name in ("AdamW", "AdamW8bit"):
        model = nn.Linear(64, 128)
        nn.init.ones_(model.weight)
        optimizer = build_optimizer(model, Optimizer(name, lr=0.01, implementation="for-loop"))
        for seed in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        weights[name] = model.weight.detach()
    difference = (weights["AdamW8bit"] - weights["AdamW"]).abs()
    assert difference.max() < 0.01 and difference.mean() < 3e-4  # of three steps of 0.01
    state = optimizer.state[model.weight]
    for moment in (state["exp_avg"], state["exp_avg_sq"]):
        assert sum(part.nbytes for part in stored_parts(moment)) == 128 * 64 + 4 * 32 + 4 * 256
    assert type(optimizer.state[model.bias]["exp_avg"]) is torch.Tensor  # fewer than 4,096 numbers
