"""Validation: the loss of every token once, whatever batch size, ranks and layout."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import layout_settings
from toy_run import toy_config

from torchtitan_lite.config.checks import check_config
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.config.schema import MixtureSource
from torchtitan_lite.convert.step_folder import complete_steps
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.distributed.mesh import Degrees
from torchtitan_lite.training.trainer import Trainer


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Eleven documents of very different length."""
    path = tmp_path_factory.mktemp("held_out") / "held.jsonl"
    texts = ["a cat sat " * n for n in (1, 2, 3, 5, 8, 13, 21, 2, 4, 1, 6)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def new_trainer(cpu_only, tmp_path, documents, held_out):
    def make(dump: str = "run", **settings) -> Trainer:
        if dist.is_initialized():
            dist.destroy_process_group()
        return Trainer(validated(tmp_path / dump, documents, held_out, **settings))

    return make


def validated(folder, documents, held_out, **settings):
    given = {
        "validation.enable": True,
        "validation.dataset": "json",
        "validation.dataset_path": str(held_out),
        "validation.freq": 2,
        **settings,
    }
    return toy_config(folder, documents, **given)


def found(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


def naive_loss(model, path) -> tuple[float, int]:
    """Documents one at a time, cut into pieces of a row, with torch's own cross-entropy."""
    tokenizer = load_tokenizer("debug")
    total, targets = 0.0, 0
    with torch.no_grad():
        for line in path.read_text().splitlines():
            ids = tokenizer.encode(json.loads(line)["text"])
            for start in range(0, len(ids), 32):
                piece = torch.tensor([ids[start : start + 32]])
                if piece.shape[1] > 1:
                    logits = model(piece[:, :-1])[0]
                    total += F.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
                    targets += piece.shape[1] - 1
    return total / targets, targets


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_loss_is_that_of_every_document_alone(new_trainer, held_out, rows):
    trainer = new_trainer(**{"validation.local_batch_size": rows})
    loss, targets = naive_loss(trainer.model, held_out)
    result = trainer.evaluation.validator.run(0)
    assert result.targets == targets
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert trainer.evaluation.validator.run(0) == result  # the same rows again


def test_before_every_few_steps_and_at_the_end(new_trainer, tmp_path):
    new_trainer(**{"training.steps": 5}).train()
    lines = found(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert lines[0]["loss"] == pytest.approx(math.log(2048), abs=0.3)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert set(lines[0]) == {"step", "loss", "perplexity", "targets"}


def test_measuring_leaves_training_as_it_was(new_trainer, tmp_path):
    def losses(dump):
        return [json.loads(line)["loss"] for line in (tmp_path / dump / "metrics.jsonl").read_text().splitlines()]

    new_trainer("with", **{"lora.rank": 2, "lora.dropout": 0.5}).train()
    new_trainer("without", **{"lora.rank": 2, "lora.dropout": 0.5, "validation.enable": False}).train()
    assert losses("with") == losses("without")


def test_accumulation_does_not_change_the_loss(new_trainer, tmp_path):
    for name, rows in (("one", 2), ("four", 8)):
        new_trainer(name, **{"training.global_batch_size": rows, "training.steps": 1}).train()
    assert found(tmp_path / "one")[0] == found(tmp_path / "four")[0]


def test_a_loss_that_is_no_number_is_not_the_best(new_trainer, monkeypatch):
    trainer = new_trainer(**{"validation.keep_best": True, "validation.freq": 1, "checkpoint.enable": True})
    losses = iter([math.nan, 2.0, math.inf, 1.0, 1.5])
    run = trainer.evaluation.validator.run

    def scripted(step):
        result = run(step)
        object.__setattr__(result, "loss", next(losses))
        return result

    monkeypatch.setattr(trainer.evaluation.validator, "run", scripted)
    kept = [trainer.evaluation.after(step, None) for step in (1, 2, 3, 4, 5)]
    assert kept == [False, True, False, True, False]
    assert trainer.evaluation.best == {"step": 4, "loss": 1.0}


def test_each_source_of_a_mixture(new_trainer, tmp_path, held_out, documents):
    mix = [
        MixtureSource(dataset="json", dataset_path=str(held_out), name="cats"),
        MixtureSource(dataset="json", dataset_path=str(documents), name="more"),
    ]
    trainer = new_trainer(**{"validation.dataset": None, "validation.dataset_path": None, "validation.mix": mix})
    result = trainer.evaluation.validator.run(0)
    naive = {name: naive_loss(trainer.model, path) for name, path in (("cats", held_out), ("more", documents))}
    assert result.sources == {name: pytest.approx(loss, rel=1e-6) for name, (loss, _) in naive.items()}
    whole = sum(loss * targets for loss, targets in naive.values()) / sum(targets for _, targets in naive.values())
    assert result.loss == pytest.approx(whole, rel=1e-6)


def test_a_share_of_the_rows(new_trainer):
    trainer = new_trainer(**{"validation.steps": 2, "validation.local_batch_size": 1})
    assert trainer.evaluation.validator.rows.rows == [2]
    few = trainer.evaluation.validator.run(0)
    other = new_trainer(**{"validation.steps": 1, "validation.local_batch_size": 2})
    same = other.evaluation.validator.run(0)
    assert (few.targets, few.loss) == (same.targets, pytest.approx(same.loss, rel=1e-6))


def test_the_best_step_is_kept(new_trainer, tmp_path, monkeypatch):
    trainer = new_trainer(
        **{
            "training.steps": 8,
            "validation.freq": 1,
            "validation.keep_best": True,
            "checkpoint.enable": True,
            "checkpoint.interval": 2,
            "checkpoint.keep_latest_k": 2,
        }
    )
    losses = iter([9.0, 8.0, 7.0, 5.0, 6.0, 6.5, 7.0, 7.5, 8.0])  # before the first step, then after each: 3 is best
    run = trainer.evaluation.validator.run

    def scripted(step):
        result = run(step)
        object.__setattr__(result, "loss", next(losses))
        return result

    monkeypatch.setattr(trainer.evaluation.validator, "run", scripted)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint"
    assert complete_steps(folder) == [3, 6, 8]
    assert json.loads((folder / "best.json").read_text()) == {"step": 3, "loss": 5.0}


def test_the_best_is_forgotten_with_the_rows_it_was_measured_on(new_trainer, tmp_path, warned):
    settings = {"validation.keep_best": True, "checkpoint.enable": True, "training.steps": 2}
    new_trainer(**settings).train()
    again = new_trainer(**settings)
    assert again.evaluation.best == {"step": 2, "loss": found(tmp_path / "run")[-1]["loss"]} and not warned()
    other = new_trainer(**settings, **{"validation.steps": 1, "validation.local_batch_size": 1})
    assert other.evaluation.best is None
    assert warned() == ["Other validation data than before: step 2 is no longer the best so far"]


def first_result(config) -> tuple[float, int]:
    result = Trainer(config).evaluation.validator.run(0)
    return result.loss, result.targets


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(dp_shard=2),
        Degrees(dp_replicate=2),
        Degrees(tp=2),
        Degrees(pp=2),
        Degrees(cp=2),
        Degrees(dp_shard=2, pp=2),
    ],
    ids=str,
)
def test_every_layout_finds_the_same(rank_pool, tmp_path, documents, held_out, one_process, degrees):
    settings = layout_settings(degrees) | {"training.local_batch_size": 2, "training.global_batch_size": 4}
    for loss, targets in rank_pool.run(
        degrees.world_size, first_result, validated(tmp_path, documents, held_out, **settings)
    ):
        assert targets == one_process[1]
        assert loss == pytest.approx(one_process[0], rel=1e-6)


@pytest.fixture(scope="module")
def one_process(rank_pool, tmp_path_factory, documents, held_out):
    config = validated(tmp_path_factory.mktemp("one"), documents, held_out)
    return rank_pool.run(1, first_result, config)[0]


def test_rules(tmp_path, documents, held_out):
    def problems(**settings) -> list[str]:
        config = validated(tmp_path, documents, held_out, **settings)
        try:
            return check_config(config, world_size=1, device_type="cpu")
        except ConfigError as error:
            return error.problems

    assert problems() == []
    nothing = {"validation.dataset": None, "validation.dataset_path": None}
    assert "validation.enable: no data" in problems(**nothing)[0]
    mix = {"validation.mix": [MixtureSource(dataset="pydocs")]}
    assert "beside validation.mix" in problems(**mix)[0]
    (missing,) = problems(**{"validation.dataset_path": "/nowhere.jsonl"})
    assert missing.startswith("validation.dataset_path=/nowhere.jsonl")
    assert (
        "validation.seq_len=600 is more than"
        in problems(**{"model.args.max_seq_len": 512, "validation.seq_len": 600})[0]
    )
    assert "without checkpoint.enable" in problems(**{"validation.keep_best": True})[0]
    assert "validation.steps=0" in problems(**{"validation.steps": 0})[0]
    weighted = {"validation.mix": [MixtureSource(dataset="pydocs", weight=2.0)], **nothing}
    assert "table 1: weight and epochs say how much is trained on" in problems(**weighted)[0]
    tables = [MixtureSource(dataset_path="/nowhere.jsonl"), *(MixtureSource(name="a") for _ in range(2))]
    same, missing = problems(**{"validation.mix": tables, **nothing})
    assert same.startswith("validation.mix: 2 tables are named a")
    assert missing.startswith("validation.mix, table 1: dataset_path=/nowhere.jsonl")
    chats = MixtureSource(dataset="pychat", chat_template="/nowhere.jinja")
    assert problems(**{"validation.mix": [chats], **nothing}) == [
        "validation: /nowhere.jinja: no such file; give a Jinja file with a chat template"
    ]
    assert len(problems(**mix)) == 1
    assert problems(**{"validation.split": "test"})[0].startswith("validation.split='test': nothing would use it")
    # pydocs has no fields, but the training data has.
    other = {"data.text_field": "text2", "validation.dataset": "pydocs", "validation.dataset_path": None}
    assert problems(**other) == []
    (warning,) = problems(**{"validation.enable": False})
    assert warning == "validation.dataset, dataset_path, freq: of no effect without validation.enable"
