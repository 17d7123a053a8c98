import math

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan_lite.training import muon
from torchtitan_lite.training.muon import ShardedMuon, lr_ratio, orthogonalise

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LR, DECAY, MOMENTUM = 0.1, 0.25, 0.9


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def polynomial_of_singular_values(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Newton-Schulz as what it does to singular values, which it leaves the directions of: no product of matrices."""
    a, b, c = COEFFICIENTS
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ vt


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 4)])
@pytest.mark.parametrize("steps", [1, 5])
def test_singular_values_go_through_the_polynomial(shape, steps):
    given = matrix(*shape)
    found = orthogonalise(given, COEFFICIENTS, steps, 1e-7)
    assert found.shape == given.shape and found.is_contiguous()
    np.testing.assert_allclose(found.numpy(), polynomial_of_singular_values(given.numpy(), steps), atol=2e-5)
    if steps == 5:
        assert 0.6 < np.linalg.svd(found.numpy(), compute_uv=False)[0] < 1.3


def test_no_gradient_is_no_direction():
    assert not orthogonalise(torch.zeros(3, 4), COEFFICIENTS, 5, 1e-7).any()


def test_ratios_by_hand():
    assert lr_ratio("match_rms_adamw", torch.Size([100, 25])) == 0.2 * 10 == lr_ratio("match_rms_adamw", (25, 100))
    assert lr_ratio("original", torch.Size([100, 25])) == 2 and lr_ratio("original", torch.Size([25, 100])) == 1


def test_matched_updates_have_the_size_of_adamws():
    """An orthogonal [m, n] matrix has min(m, n) singular values of 1, so a root mean square of 1 / sqrt(max(m, n))."""
    orthogonal = np.linalg.svd(matrix(64, 256).numpy(), full_matrices=False)
    rms = np.sqrt(((orthogonal[0] @ orthogonal[2]) ** 2).mean())
    assert rms * lr_ratio("match_rms_adamw", (64, 256)) == pytest.approx(0.2)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_steps_by_hand(adjust):
    """Nesterov momentum, decoupled decay, and the naive direction, over three gradients."""
    weight, momentum = matrix(4, 6, 9).double().numpy(), np.zeros((4, 6))
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    optimizer = ShardedMuon([parameter], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn=adjust)
    ratio = {"match_rms_adamw": 0.2 * math.sqrt(6), "original": 1.0}[adjust]
    for seed in range(3):
        parameter.grad = matrix(4, 6, seed)
        optimizer.step()
        gradient = parameter.grad.double().numpy()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        update = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
        direction = polynomial_of_singular_values(update, 5)
        weight = weight * (1 - LR * DECAY) - LR * ratio * direction
    np.testing.assert_allclose(parameter.detach().numpy(), weight, atol=1e-5)


def test_in_bfloat16_it_is_torchs_to_the_bit(monkeypatch):
    monkeypatch.setattr(muon, "resolve_param_dtype", lambda name, device_type: torch.bfloat16)
    ours, theirs = ([nn.Parameter(matrix(*shape)) for shape in ((8, 4), (4, 8), (5, 5))] for _ in range(2))
    settings = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = ShardedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for seed in range(3):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p in parameters:
                p.grad = matrix(*p.shape, seed)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_what_has_no_gradient_stays():
    parameters = [nn.Parameter(matrix(3, 3)), nn.Parameter(matrix(3, 3))]
    parameters[0].grad = matrix(3, 3, 1)
    ShardedMuon(parameters, lr=LR, weight_decay=DECAY).step()
    assert torch.equal(parameters[1], matrix(3, 3)) and not torch.equal(parameters[0], matrix(3, 3))
