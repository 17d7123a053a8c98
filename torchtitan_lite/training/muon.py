"""Muon (Jordan et al., 2024) on sharded matrices: each is gathered to be orthogonalised, by one of the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_lite.distributed.precision import resolve_param_dtype


class _Member(NamedTuple):
    matrix: nn.Parameter
    group: dict[str, Any]  # of the optimizer's param_groups


class ShardedMuon(torch.optim.Muon):
    """torch.optim.Muon, with its settings and its state, for plain matrices and for DTensors under any placements.

    Momentum is kept and worked out on shards. The direction of an update is one of the whole matrix, so the ranks of a
    mesh take turns: of as many matrices as there are ranks each orthogonalises one, and sends it to the others. At any
    time a rank has its own matrix and one that comes or goes, in the type it computes in: bfloat16 as torch's, but
    float32 on a CPU without kernels for that.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient. All ranks of its mesh call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mesh, members in _rounds(self.param_groups):
            self._round(mesh, members)
        return loss

    def _round(self, mesh: DeviceMesh | None, members: list[_Member]) -> None:
        """Update at most as many matrices as ``mesh`` has ranks, or, without a mesh, one."""
        own_turn = 0 if mesh is None else _place_in(mesh)
        own = None
        for turn, member in enumerate(members):
            gathered = _whole(self._momentum_update(member), member.matrix)
            if turn == own_turn:
                own = gathered
            del gathered
        # Only now: until all are gathered, a rank at work would keep the others waiting.
        if own is not None:
            group = members[own_turn].group
            own = orthogonalise(own, group["ns_coefficients"], group["ns_steps"], group["eps"])
        for turn, member in enumerate(members):
            direction = own if turn == own_turn else _room_for(member.matrix)
            if mesh is not None:
                _broadcast(direction, mesh, turn)
            _descend(member, direction)

    def _momentum_update(self, member: _Member) -> Tensor:
        """What is to be orthogonalised, of this rank's shard; the momentum moves on."""
        state, factor = self.state[member.matrix], member.group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(member.matrix.grad, memory_format=torch.preserve_format)
        momentum, grad = _local(state["momentum_buffer"]), _local(member.matrix.grad)
        momentum.lerp_(grad, 1 - factor)
        return grad.lerp(momentum, factor) if member.group["nesterov"] else momentum


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix [rows, columns] with its singular values brought near 1, by a quintic Newton-Schulz iteration.

    The usual coefficients are those of steepest ascent from 0 and leave the values between about 0.7 and 1.2.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps)  # a bound of the largest singular value
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def lr_ratio(adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """Of a whole matrix's step to the learning rate. ``match_rms_adamw`` (Liu et al., 2025) gives an update the size
    that AdamW's usually has, 0.2 an element; else it is Jordan's."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _rounds(param_groups: list[dict[str, Any]]) -> Iterator[tuple[DeviceMesh | None, list[_Member]]]:
    """All matrices with a gradient; those of a round are much alike, so that its ranks are done together."""
    by_mesh: dict[DeviceMesh | None, list[_Member]] = {}
    for group in param_groups:
        for matrix in group["params"]:
            if matrix.grad is not None:
                mesh = matrix.device_mesh if isinstance(matrix, DTensor) else None
                by_mesh.setdefault(mesh, []).append(_Member(matrix, group))
    for mesh, members in by_mesh.items():
        members.sort(key=lambda member: sorted(member.matrix.shape))
        size = 1 if mesh is None else mesh.size()
        for first in range(0, len(members), size):
            yield mesh, members[first : first + size]


def _descend(member: _Member, direction: Tensor) -> None:
    """Take a step against this rank's part of a whole matrix's ``direction``, with decoupled weight decay."""
    matrix, group = member
    if isinstance(matrix, DTensor):
        shape, offset = compute_local_shape_and_global_offset(matrix.shape, matrix.device_mesh, matrix.placements)
        direction = direction[tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]
    shard = _local(matrix)
    shard.mul_(1 - group["lr"] * group["weight_decay"])
    shard.add_(direction, alpha=-group["lr"] * lr_ratio(group["adjust_lr_fn"], matrix.shape))


def _whole(shard: Tensor, matrix: nn.Parameter) -> Tensor:
    """What all ranks hold of ``matrix``, ``shard`` being this rank's, in the type to compute in."""
    shard = shard.to(_working_dtype(matrix))
    if not isinstance(matrix, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=matrix.shape,
        stride=matrix.stride(),
    ).full_tensor()


def _room_for(matrix: nn.Parameter) -> Tensor:
    return torch.empty(matrix.shape, dtype=_working_dtype(matrix), device=matrix.device)


def _working_dtype(matrix: nn.Parameter) -> torch.dtype:
    return resolve_param_dtype("auto", matrix.device.type)


def _place_in(mesh: DeviceMesh) -> int:
    """This rank's number in the mesh, counted row by row."""
    place = 0
    for coordinate, size in zip(mesh.get_coordinate(), mesh.mesh.shape, strict=True):
        place = place * size + coordinate
    return place


def _broadcast(tensor: Tensor, mesh: DeviceMesh, source: int) -> None:
    """Send a tensor from the rank numbered ``source`` to all of the mesh: along the first dimension, then from all who
    have it along the next."""
    here, there = list(mesh.get_coordinate()), []
    for size in reversed(mesh.mesh.shape):
        source, coordinate = divmod(source, size)
        there.insert(0, coordinate)
    for dim in range(mesh.ndim):
        if here[dim + 1 :] == there[dim + 1 :]:
            dist.broadcast(tensor, group=mesh.get_group(dim), group_src=there[dim])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
