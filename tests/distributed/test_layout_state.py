"""What a layout must not change: the initial weights, bit for bit, and what a checkpoint gives back."""

import pytest
from layouts import digest, layout_settings
from toy_run import read_metrics, toy_config

from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.models.llama3.flavors import SIZES
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer


def initial_digests(layouts: list[tuple[Degrees, str]]) -> list[dict[str, str]]:
    """Of each layout the digests of the whole weights that this rank has a part of."""
    from torchtitan_lite.training.parallelize import as_one, build_parts

    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    results = []
    for degrees, schedule in layouts:
        config = Config()
        config.training.mixed_precision_param = "float32"
        config.parallelism.pipeline_parallel_schedule = schedule
        config.parallelism.pipeline_parallel_degree = degrees.pp
        parts = build_parts(config, SIZES["debugmodel"], Mesh("cpu", degrees, world.rank))
        for part in parts.values():
            part.to_empty(device="cpu")
        model = as_one(parts)
        init_weights(model, SIZES["debugmodel"], seed=42)
        results.append({name: digest(parameter) for name, parameter in model.named_parameters()})
    return results


@pytest.fixture(scope="module")
def whole_digests():
    model = Transformer(SIZES["debugmodel"])
    init_weights(model, SIZES["debugmodel"], seed=42)
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (1, [Degrees()]),
        (2, [Degrees(dp_shard=2), Degrees(dp_replicate=2), Degrees(tp=2), Degrees(cp=2), Degrees(pp=2)]),
        (
            4,
            [
                Degrees(dp_shard=4),
                Degrees(dp_replicate=2, dp_shard=2),
                Degrees(tp=4),
                Degrees(dp_shard=2, tp=2),
                Degrees(dp_replicate=2, tp=2),
                Degrees(dp_shard=2, cp=2),
                Degrees(pp=2, tp=2),
                Degrees(pp=4),
            ],
        ),
        (
            8,
            [
                Degrees(dp_shard=8),
                Degrees(dp_shard=2, tp=4),
                Degrees(dp_replicate=2, dp_shard=2, tp=2),
                Degrees(pp=2, dp_shard=2, tp=2),
                Degrees(pp=2, cp=2, tp=2),
            ],
        ),
    ],
)
def test_initial_weights_are_the_same_in_every_layout(rank_pool, whole_digests, ranks, layouts):
    planned = [(degrees, "1F1B") for degrees in layouts]
    planned += [(d, s) for d in layouts if d.pp == 2 for s in ("Interleaved1F1B", "ZBVZeroBubble")]
    by_rank = rank_pool.run(ranks, initial_digests, planned)
    for i, layout in enumerate(planned):
        held = [results[i] for results in by_rank]
        assert all(whole_digests.items() >= digests.items() for digests in held), layout
        assert set().union(*held) == set(whole_digests), layout


def resumed(config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of weights and optimizer state before and after training: what was loaded, and what was saved."""
    from torchtitan_lite.training.trainer import Trainer

    trainer = Trainer(config)

    def state() -> dict[str, str]:
        values = {}
        for name, parameter in trainer.model.named_parameters():
            values[name] = digest(parameter)
            for key, value in trainer.optimizer.state[parameter].items():
                values[f"{name}.{key}"] = digest(value)
        return values

    before = state()
    trainer.train()
    return before, state()


def whole(states: list[dict[str, str]]) -> dict[str, str]:
    """The states of all ranks as one; those that hold the same agree."""
    merged = {}
    for state in states:
        for name, value in state.items():
            assert merged.setdefault(name, value) == value, name
    return merged


def test_a_checkpoint_goes_from_layout_to_layout(rank_pool, documents, tmp_path):
    """dp 4 -> tp 2 x pp 2 -> dp 2 x cp 2 -> an interleaved pipeline -> one process: bit for bit at each hand-over, and
    in all the run of one process."""
    layouts = [
        (Degrees(dp_shard=4), "1F1B"),
        (Degrees(tp=2, pp=2), "1F1B"),
        (Degrees(dp_shard=2, cp=2), "1F1B"),
        (Degrees(pp=2), "Interleaved1F1B"),
        (Degrees(), "1F1B"),
    ]
    common = {
        "training.global_batch_size": 8,
        "model.args.n_layers": 4,
        "checkpoint.enable": True,
        "checkpoint.interval": 1,
        "lr_scheduler.decay_ratio": 0.0,
        "optimizer.lr": 1e-3,
    }
    saved = None
    for step, (degrees, schedule) in enumerate(layouts, start=1):
        settings = {
            **common,
            **layout_settings(degrees, schedule),
            "training.steps": step,
            "training.local_batch_size": 8 // degrees.dp if degrees.pp == 1 else 4,
        }
        config = toy_config(tmp_path / "moved", documents, **settings)
        loaded, trained = zip(*rank_pool.run(degrees.world_size, resumed, config), strict=True)
        assert saved is None or whole(loaded) == saved, degrees
        assert len(whole(trained)) == 4 * (4 * 9 + 3)  # weight, two moments and step
        assert saved is None or whole(trained) != saved
        saved = whole(trained)
    straight = toy_config(tmp_path / "straight", documents, **common, **{"training.steps": len(layouts)})
    rank_pool.run(1, resumed, straight)
    got, expected = read_metrics(tmp_path / "moved"), read_metrics(tmp_path / "straight")
    assert [entry["step"] for entry in got] == [1, 2, 3, 4, 5]
    for name in ("loss", "grad_norm", "tokens_seen", "lr"):
        assert [entry[name] for entry in got] == pytest.approx([entry[name] for entry in expected], rel=1e-5), name
