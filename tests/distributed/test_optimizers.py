"""Optimizers over ranks, as whole training runs, against the same run in one process."""

import pytest
import torch
from toy_run import toy_config

from torchtitan_lite.config.schema import Config, OptimizerGroup
from torchtitan_lite.distributed.mesh import DEGREE_KEYS, Degrees
from torchtitan_lite.training.adamw8bit import stored_parts

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
    if config.optimizer.name == "AdamW8bit":
        embedding = trainer.optimizer.state[trainer.model.tok_embeddings.weight]
        assert len(stored_parts(embedding["exp_avg"].to_local())) == 3
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
        (Degrees(tp=2), "1F1B"),
        (Degrees(pp=2), "Interleaved1F1B"),
        (Degrees(dp_shard=4), "1F1B"),
        (Degrees(dp_replicate=2, dp_shard=2), "1F1B"),
        (Degrees(dp_shard=2, tp=2), "1F1B"),
        (Degrees(pp=2, cp=2), "1F1B"),
    ],
    ids=str,
)
def test_muon_is_the_same_in_every_layout(rank_pool, documents, muon_alone, tmp_path, degrees, schedule):
    """Weights after three steps in fp32. A matrix orthogonalised in parts would be off by the size of a step, 1e-2."""
    config = config_for(tmp_path, documents, degrees, schedule, **MUON)
    held = rank_pool.run(degrees.world_size, trained, config)
    assert set().union(*held) == set(muon_alone)
    for weights in held:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, muon_alone[name], rtol=0, atol=1e-5, msg=name)


EIGHT_BITS = {
    "optimizer.name": "AdamW8bit",
    "optimizer.implementation": "for-loop",
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
    "model.args.vocab_size": 4096,  # so that of some matrices ranks hold enough numbers, and whole blocks of them
}


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("Muon", Degrees(dp_shard=2)), ("AdamW8bit", Degrees(dp_shard=2)), ("AdamW8bit", Degrees(tp=2))],
    ids=str,
)
def test_a_resumed_run_goes_on_to_the_bit(rank_pool, documents, tmp_path, name, degrees):
    if name == "AdamW8bit":
        pytest.importorskip("torchao")
    settings = {**EIGHT_BITS, "optimizer.name": name}
    straight = config_for(tmp_path / "straight", documents, degrees, **settings, **{"training.steps": 4})
    expected = rank_pool.run(2, trained, straight)
    for steps in (2, 4):
        resumed = config_for(tmp_path / "resumed", documents, degrees, **settings, **{"training.steps": steps})
        got = rank_pool.run(2, trained, resumed)
        for one, other in zip(got, expected, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in other) == (steps == 4)


def refused(config: Config) -> str:
    from torchtitan_lite.training.checkpoint import CheckpointError

    try:
        trained(config)
    except CheckpointError as error:
        return str(error)
    return ""


def test_moments_of_8_bits_stay_with_their_ranks(rank_pool, documents, tmp_path):
    pytest.importorskip("torchao")
    first = config_for(tmp_path, documents, Degrees(dp_shard=2), **EIGHT_BITS, **{"training.steps": 2})
    rank_pool.run(2, trained, first)
    for degrees in (Degrees(), Degrees(tp=2)):
        more = config_for(tmp_path, documents, degrees, **EIGHT_BITS, **{"training.steps": 4})
        for message in rank_pool.run(degrees.world_size, refused, more):
            assert "AdamW8bit: moments are scaled within the parts that ranks hold" in message
    # What is the same on every copy may be copied more or less often.
    same_parts = config_for(
        tmp_path, documents, Degrees(dp_replicate=2, dp_shard=2), **EIGHT_BITS, **{"training.steps": 4}
    )
    assert rank_pool.run(4, refused, same_parts) == [""] * 4
