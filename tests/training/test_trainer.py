"""Whole runs in this process, fp32 and deterministic. What several ranks do is tested in tests/distributed."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from toy_run import read_metrics, toy_config

from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.convert.step_folder import complete_steps
from torchtitan_lite.data.collator import IGNORE_INDEX
from torchtitan_lite.data.loader import RowLoader
from torchtitan_lite.models.llama3.model import FeedForward
from torchtitan_lite.training.trainer import Trainer


@pytest.fixture
def new_trainer(cpu_only, tmp_path, documents):
    """A trainer of the run in ``tmp_path / name``, one at a time."""

    def make(name="run", **settings):
        if dist.is_initialized():
            dist.destroy_process_group()
        return Trainer(toy_config(tmp_path / name, documents, **settings))

    return make


@pytest.fixture
def run(new_trainer, tmp_path):
    """Train to the end; returns what was logged."""

    def train(name="run", **settings):
        new_trainer(name, **settings).train()
        return read_metrics(tmp_path / name)

    return train


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in trainer.model.named_parameters()}


def column(metrics: list[dict], name: str) -> list:
    return [entry[name] for entry in metrics]


def on_batches(monkeypatch, change) -> None:
    """Pass microbatch number i (from 0) of every epoch of reading through ``change(i, batch)``."""
    plain = RowLoader.__iter__
    monkeypatch.setattr(RowLoader, "__iter__", lambda self: (change(i, b) for i, b in enumerate(plain(self))))


def test_accumulation_does_not_change_the_run(run):
    settings = {"training.global_batch_size": 8, "training.steps": 4}
    whole = run("whole", **settings, **{"training.local_batch_size": 8})
    parts = run("parts", **settings, **{"training.local_batch_size": 1})
    for name in ("loss", "grad_norm", "tokens_seen", "lr"):
        assert column(parts, name) == pytest.approx(column(whole, name), rel=1e-6)
    assert column(whole, "tokens_seen") == [8 * 32 * step for step in (1, 2, 3, 4)]
    assert column(parts, "padding_fraction") == column(whole, "padding_fraction")
    assert column(parts, "documents_per_row") == column(whole, "documents_per_row")


def test_the_first_loss_is_the_mean_over_target_tokens(new_trainer, run):
    trainer = new_trainer(**{"training.global_batch_size": 4})
    batches = iter(trainer.loader)
    losses, targets = 0.0, 0
    for batch in (next(batches), next(batches)):
        logits = trainer.model(batch.tokens, batch.document_ids, batch.positions)
        losses += F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").item()
        targets += (batch.labels != IGNORE_INDEX).sum().item()
    first = run(**{"training.global_batch_size": 4})[0]
    assert [first["loss"], first["max_loss"]] == pytest.approx([losses / targets] * 2, rel=1e-6)


def test_a_folder_for_others_is_that_of_the_last_run(new_trainer, tmp_path):
    """Whatever an earlier run left under the name; a run that only looks in leaves it as it is."""
    settings = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True, "training.steps": 1}
    (tmp_path / "given.jinja").write_text("given")
    folder, written = tmp_path / "run" / "hf" / "step-1", []
    for seed in (1, 2, 2):
        trainer = new_trainer(**settings, **{"training.seed": seed})
        trainer.config.data.chat_template = str(tmp_path / "given.jinja")  # as a run on chats may have one
        trainer.train()
        exported = HFWeights(folder).read(["norm.weight", "output.weight"])
        assert all(tensor.equal(weights(trainer)[name]) for name, tensor in exported.items())
        written.append((folder / "config.json").stat().st_ino)
        if seed == 1:
            shutil.rmtree(tmp_path / "run" / "checkpoint")
    assert written[1] == written[2]
    assert (folder / "chat_template.jinja").read_text() == "given"  # the one trained with


def test_one_line_for_each_logged_step(run):
    logged = run(**{"training.steps": 7, "metrics.log_freq": 3})
    assert column(logged, "step") == [1, 3, 6, 7]
    assert column(logged, "tokens_seen") == [2 * 32 * step for step in (1, 3, 6, 7)]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.3


def test_a_step_without_targets_changes_nothing_but_the_count(run, new_trainer, monkeypatch, warned):
    masked = 2  # microbatches 2 and 3 are step 2

    def mask(i, batch):
        return batch._replace(labels=torch.full_like(batch.labels, IGNORE_INDEX)) if i // 2 == masked - 1 else batch

    on_batches(monkeypatch, mask)
    trainer = new_trainer(**{"training.global_batch_size": 4, "training.steps": 3})
    seen = []
    plain_step = trainer.train_step

    def watched_step():
        before = weights(trainer)
        measured = plain_step()
        after = weights(trainer)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        seen.append((trainer.step, bool(changed), measured is not None))
        return measured

    trainer.train_step = watched_step
    trainer.train()
    assert seen == [(1, True, True), (2, False, False), (3, True, True)]
    assert trainer.tokens_seen == 3 * 4 * 32 and trainer.loader.rows_trained == 12
    assert any("Step 2: the global batch has no target token" in message for message in warned())
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_a_microbatch_without_targets_counts_for_nothing(new_trainer, run, monkeypatch):
    """Two microbatches, the second one masked: the loss and gradients of the first alone."""
    alone = run("alone", **{"training.steps": 1})[0]
    ignore = IGNORE_INDEX
    on_batches(monkeypatch, lambda i, b: b._replace(labels=torch.full_like(b.labels, ignore)) if i == 1 else b)
    both = run("both", **{"training.steps": 1, "training.global_batch_size": 4})[0]
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)


class Killed(Exception):
    pass


@pytest.fixture
def dropout(monkeypatch):
    plain = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: F.dropout(plain(self, x), 0.1))


@pytest.mark.parametrize(
    ("async_mode", "compiled"),
    [("disabled", False), ("async", False), ("async", True)],
    ids=["sync", "async", "compiled"],
)
def test_a_run_killed_twice_is_the_run_that_was_not(new_trainer, run, tmp_path, dropout, async_mode, compiled):
    settings = {
        "training.steps": 9,
        "training.global_batch_size": 4,
        "checkpoint.enable": True,
        "checkpoint.interval": 3,
        "checkpoint.async_mode": async_mode,
        "compile.enable": compiled,
        "compile.backend": "aot_eager",
    }
    straight = run("straight", **settings)
    rates = [1e-2 * x for x in (1 / 2, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7)]
    assert column(straight, "lr") == pytest.approx(rates)

    used = []  # (step, learning rate, tokens seen before it) at each call of the optimizer
    for start, killed_in in [(0, 5), (3, 8), (6, None)]:
        trainer = new_trainer("killed", **settings)
        assert (trainer.step, trainer.tokens_seen) == (start, start * 4 * 32)

        def note(optimizer, args, kwargs, trainer=trainer, killed_in=killed_in):
            used.append((trainer.step, optimizer.param_groups[0]["lr"], trainer.tokens_seen))
            if trainer.step == killed_in:
                trainer.checkpoint.wait()
                raise Killed

        trainer.optimizer.optimizers[0].register_step_pre_hook(note)
        if killed_in is None:
            trainer.train()
        else:
            with pytest.raises(Killed):
                trainer.train()

    assert [step for step, _, _ in used] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 7, 8, 9]
    assert [lr for _, lr, _ in used] == pytest.approx([rates[step - 1] for step, _, _ in used])
    assert all(tokens == (step - 1) * 4 * 32 for step, _, tokens in used)
    resumed = read_metrics(tmp_path / "killed")  # one line a step, the killed steps' lines replaced
    for name in ("step", "loss", "max_loss", "grad_norm", "lr", "tokens_seen"):
        assert column(resumed, name) == column(straight, name), name
    assert trainer.loader.rows_trained == 36


def test_resuming_a_finished_run_does_nothing(new_trainer, run, tmp_path):
    settings = {"training.steps": 2, "checkpoint.enable": True}
    logged = run(**settings)
    trainer = new_trainer(**settings)
    before = weights(trainer)
    trainer.train()
    assert trainer.step == 2 and read_metrics(tmp_path / "run") == logged
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_an_extended_run_goes_on(run, tmp_path):
    run(**{"training.steps": 2, "checkpoint.enable": True, "lr_scheduler.decay_ratio": 0.0})
    extended = run(**{"training.steps": 4, "checkpoint.enable": True, "lr_scheduler.decay_ratio": 0.0})
    straight = run("straight", **{"training.steps": 4, "lr_scheduler.decay_ratio": 0.0})
    assert column(extended, "loss") == column(straight, "loss")


def poison(trainer: Trainer, step: int) -> None:
    """Make the loss of that step, and so its gradients, overflow."""
    plain = trainer.loss_fn
    trainer.loss_fn = lambda *args: plain(*args) * (torch.inf if trainer.step == step else 1)


@pytest.mark.parametrize(
    ("log_freq", "stopped_at", "steps_named"),
    [(1, 5, "step 5"), (100, 6, "steps 4 to 6")],  # at the step itself, or at the next that would be saved
)
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_diverged_run_stops_and_saves_nothing_of_it(
    new_trainer, tmp_path, async_mode, log_freq, stopped_at, steps_named
):
    trainer = new_trainer(
        **{
            "training.steps": 20,
            "metrics.log_freq": log_freq,
            "checkpoint.enable": True,
            "checkpoint.interval": 3,
            "checkpoint.async_mode": async_mode,
        }
    )
    poison(trainer, step=5)
    with pytest.raises(
        FloatingPointError, match=rf"in {steps_named}\. Checkpoints from before: step 3 in .*checkpoint"
    ):
        trainer.train()
    assert trainer.step == stopped_at
    assert complete_steps(tmp_path / "run" / "checkpoint") == [3]
    assert all(entry["step"] < 5 for entry in read_metrics(tmp_path / "run"))
    resumed = new_trainer(**{"training.steps": 20, "checkpoint.enable": True})
    assert resumed.step == 3 and all(torch.isfinite(value).all() for value in weights(resumed).values())


def test_one_broken_step_is_not_forgotten_by_the_next(new_trainer, monkeypatch):
    """An infinite gradient may touch only embedding rows that later batches do not use."""
    trainer = new_trainer(**{"training.steps": 9, "metrics.log_freq": 4})
    norms = {2: torch.inf}
    name = "torchtitan_lite.training.trainer.clip_grad_norm"
    monkeypatch.setattr(name, lambda *_, **__: torch.tensor(norms.get(trainer.step, 1.0)))
    with pytest.raises(FloatingPointError, match="steps 2 to 4"):
        trainer.train()


def test_a_diverged_run_without_checkpoints_says_so(new_trainer):
    trainer = new_trainer()
    poison(trainer, step=1)
    with pytest.raises(FloatingPointError, match="There is no checkpoint from before"):
        trainer.train()


def test_what_a_run_leaves_behind(run, tmp_path):
    run(**{"checkpoint.enable": True, "training.steps": 3, "checkpoint.interval": 2})
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {"config.toml", "metrics.jsonl", "checkpoint", ".lock"}
    assert complete_steps(folder / "checkpoint") == [2, 3]  # the last one too
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert entry["loss"] > 0 and entry["grad_norm"] > 0 and entry["tps"] > 0


def test_a_folder_takes_one_run_at_a_time(new_trainer, tmp_path, monkeypatch):
    message = "another run is writing there"
    trainer = new_trainer()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(ConfigError, match=message):
        trainer.train()
    assert not (tmp_path / "run" / "config.toml").exists()  # that of the other run would have been overwritten
    trainer.train()
    assert len(read_metrics(tmp_path / "run")) > 0
    monkeypatch.setattr(Trainer, "_build_rows", lambda self: pytest.fail("the data was read first"))
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(ConfigError, match=message):
        new_trainer()


def test_resuming_another_model_that_fits_the_weights_is_said(run, warned):
    settings = {"checkpoint.enable": True, "model.flavor": "debugmodel_sdpa_block_causal"}
    run(**settings, **{"training.steps": 1})
    run(**settings, **{"training.steps": 2})
    assert not any("differs" in text for text in warned())
    run(**settings, **{"training.steps": 3, "model.args.sliding_window": 5})
    assert any("sliding_window None -> 5" in text for text in warned())
