"""One rank of a run, on this machine alone: built by the trainer's own code on the meta device, with a fake process
group, and run on fake tensors."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.config.schema import ActivationCheckpoint
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.estimate.ledger import Ledger, Traffic
from torchtitan_lite.estimate.parts import Done, Microbatch, Rows, State, ThinnedPart, count_state
from torchtitan_lite.estimate.plan import Plan, paper_args, paper_config
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.models.llama3.nf4 import quantize, quantized_layers
from torchtitan_lite.training.parallelize import as_one, build_parts, reshards


@dataclass(frozen=True)
class RankCosts:
    """What a rank holds, and what its stages cost.

    Attributes:
        stages: numbers of its pipeline stages.
        microbatches: by the setting of activation checkpointing and for each stage, as of :meth:`ThinnedPart.measure`.
    """

    rank: int
    stages: tuple[int, ...]
    state: State
    microbatches: dict[str, list[list[Microbatch]]]


def measure_ranks(
    plan: Plan, ranks: list[int], settings: dict[str, ActivationCheckpoint], progress: Callable[[str], None]
) -> list[RankCosts]:
    """Each in a process of its own: DTensor holds on to the process groups of the rank that it was used for first."""
    processes = min(len(ranks), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_quietly, max_tasks_per_child=1) as pool:
        measured = [pool.submit(measure_rank, plan, rank, settings) for rank in ranks]
        progress(f"building ranks {', '.join(map(str, ranks))} on paper")
        for done, _ in enumerate(as_completed(measured), 1):
            progress(f"building ranks {', '.join(map(str, ranks))} on paper: {done} of {len(ranks)} done")
        return [future.result() for future in measured]


def _quietly() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)


def measure_rank(plan: Plan, rank: int, settings: dict[str, ActivationCheckpoint]) -> RankCosts:
    """Needs that no process group has been started."""
    config, args = paper_config(plan), paper_args(plan)
    pipelined = plan.schedule is not None
    with fake_ranks(plan.world_size, rank):
        mesh = Mesh("cpu", plan.degrees, rank)
        parts = build_parts(config, args, mesh)
        dimensions = _dimensions(mesh)
        rows = Rows(
            plan.document_ids,
            tokens=plan.local_tokens,
            hidden=plan.hidden,
            dtype=plan.param_dtype,
        )
        # The embedding's rows are looked at by their values only: zeros will do.
        with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
            for part in parts.values():
                part.to_empty(device="cpu")
                _quantize(part, plan.param_dtype)
            state = count_state(as_one(parts), config.optimizer, ledger)
            found: dict[str, list[list[Microbatch]]] = {name: [] for name in settings}
            for part in parts.values():
                thinned = ThinnedPart(
                    part,
                    ledger,
                    rows,
                    settings.values(),
                    reduce_each=not pipelined and config.parallelism.fsdp_gradient_reduction == "microbatch",
                    reshard_each=not pipelined and reshards(config),
                )
                for name, microbatches in thinned.measure(settings, plan.own_setting, plan.microbatches).items():
                    found[name].append([_by_dimension(m, dimensions) for m in microbatches])
    return RankCosts(rank, tuple(parts), state, found)


def _quantize(part: Transformer, dtype: torch.dtype) -> None:
    """Fill quantised layers. Quantising is thousands of operators, so it is done once for a shape."""
    made: dict[tuple[int, int], torch.Tensor] = {}
    for _, layer in quantized_layers(part):
        shape = layer.out_features, layer.in_features
        if shape not in made:
            made[shape] = quantize(torch.empty(shape, dtype=dtype))
        layer.weight = torch.empty_like(made[shape])


@contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """A default process group whose collectives return at once, and nothing sensible."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _dimensions(mesh: Mesh) -> dict[str, str]:
    """What runs along each process group, by the group's name."""
    meshes = {"pp": mesh.pp, "cp": mesh.cp, "tp": mesh.tp}
    meshes |= {name: mesh.fsdp[name] for name in mesh.fsdp.mesh_dim_names}
    return {each.get_group().group_name: name for name, each in meshes.items()}


def _by_dimension(microbatch: Microbatch, dimensions: dict[str, str]) -> Microbatch:
    def named(done: Done) -> Done:
        return Counter({_renamed(key, dimensions): value for key, value in done.items() if value})

    return Microbatch(
        **{
            **vars(microbatch),
            "forward_done": named(microbatch.forward_done),
            "backward_done": named(microbatch.backward_done),
        }
    )


def _renamed(key: str | Traffic, dimensions: dict[str, str]) -> str | Traffic:
    return Traffic(key.collective, dimensions[key.group]) if isinstance(key, Traffic) else key
