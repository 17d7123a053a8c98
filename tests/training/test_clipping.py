import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_lite.distributed.mesh import init_distributed, world_from_environment
from torchtitan_lite.training.clipping import clip_grad_norm


def with_gradients(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_gradients_are_clipped_to_the_norm_of_all_of_them():
    # Norms 3 and 4 are 5 together. Each clipped by itself would become 1 and 1.
    parameters = with_gradients([3.0, 0.0], [0.0, 0.0, 4.0])
    assert clip_grad_norm(parameters, max_norm=1.0).item() == pytest.approx(5.0)
    assert [p.grad.norm().item() for p in parameters] == pytest.approx([0.6, 0.8], abs=1e-6)


@pytest.mark.parametrize("max_norm", [0.0, 5.5])
def test_small_gradients_and_max_norm_0_are_left_alone(max_norm):
    parameters = with_gradients([3.0], [4.0])
    assert clip_grad_norm(iter(parameters), max_norm).item() == pytest.approx(5.0)
    assert [p.grad.item() for p in parameters] == [3.0, 4.0]


def test_parameters_without_a_gradient_do_not_count():
    parameters = [*with_gradients([3.0], [4.0]), nn.Parameter(torch.ones(7))]
    assert clip_grad_norm(parameters, 1.0).item() == pytest.approx(5.0)
    assert parameters[-1].grad is None


def test_the_norm_of_many_elements_is_exact():
    # torch's fp32 norm of so many equal numbers is off in the fourth digit on CPU.
    parameter = nn.Parameter(torch.empty(1 << 23))
    parameter.grad = torch.full((1 << 23,), 0.1)
    norm = clip_grad_norm([parameter], 0.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(0.1 * math.sqrt(1 << 23), rel=1e-6)


@pytest.mark.parametrize(("gradient", "clipped"), [(float("inf"), [0.0, math.nan]), (math.nan, [math.nan, math.nan])])
def test_a_norm_that_is_not_finite_is_returned_and_spoils_the_gradients(gradient, clipped):
    parameters = with_gradients([3.0], [gradient])
    norm = clip_grad_norm(parameters, 1.0).item()
    assert norm == gradient or (math.isnan(norm) and math.isnan(gradient))
    assert [p.grad.item() for p in parameters] == pytest.approx(clipped, nan_ok=True)


def test_no_gradient_at_all_is_norm_0():
    assert clip_grad_norm([nn.Parameter(torch.ones(3))], 1.0).item() == 0
    assert clip_grad_norm([], 1.0).item() == 0


def on_a_mesh() -> dict:
    """Gradients of one element a rank on four ranks; norm and what clipping leaves of each on this rank."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    outer, inner = divmod(world.rank, 2)
    fsdp_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    hsdp_tp = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    pp_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def clip(*gradients: torch.Tensor | tuple, max_norm: float, **pp_group) -> tuple[float, list[float]]:
        parameters = []
        for gradient in gradients:
            if isinstance(gradient, tuple):
                value, mesh, *placements = gradient
                gradient = DTensor.from_local(torch.full((1, 1), float(value)), mesh, placements, run_check=False)
            parameters.append(nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        norm = clip_grad_norm(parameters, max_norm, **pp_group).item()
        clipped = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        return norm, [gradient.item() for gradient in clipped]

    kinds = clip(
        (world.rank + 1, fsdp_tp, _StridedShard(0, split_factor=2), Shard(0)),  # 1 + 4 + 9 + 16 = 30
        (world.rank + 1, fsdp_tp, Shard(0), Shard(1)),  # 30
        (outer + 1, fsdp_tp, Shard(0), Replicate()),  # 1 + 4 = 5
        (2, fsdp_tp, Replicate(), Replicate()),  # 4
        (inner + 1, fsdp_tp, Replicate(), Partial()),  # (1 + 2)^2 = 9
        (inner + 1, hsdp_tp, Replicate(), Shard(0), Shard(0)),  # 5
        (world.rank + 1, line, Shard(0)),  # 30
        torch.tensor(3.0),  # 9
        max_norm=122**0.5 / 2,
    )
    # The norms of the stages are 3 and 4: (1 + 4) + 4 = 9 and (4 + 4) + 8 = 16.
    stages = clip(
        ((inner + 1, 2)[outer], pp_tp["tp"], Shard(0)),
        ((2, 8**0.5)[outer], pp_tp["tp"], Replicate()),
        max_norm=1.0,
        pp_group=pp_tp.get_group("pp"),
    )
    # A stage whose parameters are all frozen.
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    (trained,) = with_gradients([3.0])
    partly_frozen = clip_grad_norm([(trained, frozen)[outer]], 1.0, pp_group=pp_tp.get_group("pp")).item()
    return {"kinds": kinds, "stages": stages, "partly_frozen": partly_frozen}


def test_the_norm_over_ranks_counts_every_element_once(rank_pool):
    results = rank_pool.run(4, on_a_mesh)
    for rank, result in enumerate(results):
        outer, inner = divmod(rank, 2)
        norm, clipped = result["kinds"]
        assert norm == pytest.approx(122**0.5)
        before = [rank + 1, rank + 1, outer + 1, 2, inner + 1, inner + 1, rank + 1, 3]
        assert clipped == pytest.approx([value / 2 for value in before])

        norm, clipped = result["stages"]
        assert norm == pytest.approx(5.0)
        assert clipped == pytest.approx([[(inner + 1) / 5, 2 / 5], [2 / 5, 8**0.5 / 5]][outer])
        assert result["partly_frozen"] == pytest.approx(3.0)
    for name in ("kinds", "stages"):
        assert len({result[name][0] for result in results}) == 1  # to the bit
