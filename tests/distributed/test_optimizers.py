"""Optimizers over ranks, as whole training runs, against the same run in one process."""

import pytest
import torch
from toy_run import toy_config

from torchtitan_lite.config.schema import Config, OptimizerGroup
from torchtitan_lite.distributed.mesh import DEGREE_KEYS, Degrees

# 46 does not divide by 4, nor does a half of it by 2: some ranks hold less of a matrix than others.
SETTINGS = {
    "model.args.ffn_hidden_dim": 46,
    "model.args.n_layers": 4,
    "training.global_batch_size": 8,
    "lr_scheduler.decay_ratio": 0.0,
}


def config_for(folder, documents, degrees: Degrees, schedule: str = "1F1B", **settings) -> Config:
    layout = {f"parallelism.{DEGREE_KEYS[name]}": degree for name, degree in vars(degrees).items()}
    layout |= {
        "parallelism.pipeline_parallel_schedule": schedule,
        "training.local_batch_size": 8 // degrees.dp if degrees.pp == 1 else 4,
    }
    return toy_config(folder, documents, **SETTINGS, **layout, **settings)


def trained(config: Config) -> dict[str, torch.Tensor]:
    """What this rank holds of the weights after the run, each whole."""
    from torchtitan_lite.training.trainer import Trainer

    trainer = Trainer(config)
    trainer.train()
    return {name: p.full_tensor().detach() for name, p in trainer.model.named_parameters()}


MUON = {
    "optimizer.name": "Muon",
    "optimizer.groups": [OptimizerGroup("w[12]", lr_factor=0.5, weight_decay=0.2)],
}


@pytest.fixture(scope="module")
def muon_alone(rank_pool, documents, tmp_path_factory):
    config = config_for(tmp_path_factory.mktemp("alone"), documents, Degrees(), **MUON)
    return rank_pool.run(1, trained, config)[0]


@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [
        (Degrees(dp_shard=2), "1F1B"),
        (Degrees(dp_replicate=2), "1F1B"),
        (Degrees(tp=2), "1F1B"),
        (Degrees(cp=2), "1F1B"),
        (Degrees(pp=2), "Interleaved1F1B"),
        (Degrees(dp_shard=4), "1F1B"),
        (Degrees(dp_replicate=2, dp_shard=2), "1F1B"),
        (Degrees(dp_shard=2, tp=2), "1F1B"),
        (Degrees(dp_replicate=2, tp=2), "1F1B"),
        (Degrees(pp=2, dp_shard=2), "1F1B"),
        (Degrees(pp=2, tp=2), "1F1B"),
    ],
    ids=str,
)
def test_muon_is_the_same_in_every_layout(rank_pool, documents, muon_alone, tmp_path, degrees, schedule):
    """Weights after three steps in fp32. A matrix orthogonalised in parts would be off by the size of a step, 1e-2."""
    config = config_for(tmp_path, documents, degrees, schedule, **MUON)
    held = rank_pool.run(degrees.world_size, trained, config)
    assert set().union(*held) == set(muon_alone)
    worst = 0.0
    for weights in held:
        for name, weight in weights.items():
            worst = max(worst, (weight - muon_alone[name]).abs().max().item())
    print("worst", degrees, worst)
    assert worst < 5e-6
