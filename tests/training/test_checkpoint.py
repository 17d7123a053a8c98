import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from toy_run import TOY

from torchtitan_lite.config.schema import Checkpoint, Optimizer, OptimizerGroup
from torchtitan_lite.convert.step_folder import MARKER, CheckpointError, complete_steps, damage_named, is_complete
from torchtitan_lite.distributed.fsdp import shard_model
from torchtitan_lite.distributed.mesh import Degrees, Mesh
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.adamw8bit import stored_parts
from torchtitan_lite.training.checkpoint import CheckpointManager
from torchtitan_lite.training.optimizer import build_optimizer

ARGS = replace(TOY, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_hidden_dim=4, vocab_size=5)


class Run:
    """A sharded model with its optimizer and checkpoints; ``learn`` moves both away from where they are."""

    def __init__(self, world, folder: Path, *, seed=0, optimizer=None, args=ARGS, **settings) -> None:
        self.model = Transformer(args)
        shard_model(
            self.model, Mesh("cpu", Degrees(dp_shard=world.size), world.rank).fsdp, torch.float32, torch.float32
        )
        init_weights(self.model, args, seed)
        self.optimizer = build_optimizer(self.model, optimizer or Optimizer())
        self.manager = CheckpointManager(Checkpoint(enable=True, **settings), folder, self.model, self.optimizer)

    def learn(self, steps: int = 2) -> None:
        for step in range(steps):
            for p in self.model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        values = {f"model.{name}": p.full_tensor().detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                for i, part in enumerate(stored_parts(whole)):
                    values[f"{key}.{name}" + f"[{i}]" * (i > 0)] = part.clone()
        return values


@pytest.fixture
def new_run(one_rank, tmp_path):
    return lambda folder="checkpoint", **settings: Run(one_rank, tmp_path / folder, **settings)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[key]) for key, value in left.items())


MODES = pytest.mark.parametrize("async_mode", ["disabled", "async"])


@MODES
def test_bytes_of_a_rank_come_back(new_run, async_mode):
    run = new_run(async_mode=async_mode)
    run.learn()
    run.manager.save(2, {"step": 2}, {0: b"\x00where it stands"})
    run.manager.save(3, {"step": 3})
    run.manager.wait()
    other = new_run(async_mode=async_mode)
    assert other.manager.load() == {"step": 3}
    assert other.manager.load_data_state(2, 0) == b"\x00where it stands"
    with pytest.raises(CheckpointError, match=r"step-2 holds no place in the data of data-parallel rank 1"):
        other.manager.load_data_state(2, 1)
    with pytest.raises(CheckpointError, match=r"step-3 holds no place"):
        other.manager.load_data_state(3, 0)


@MODES
def test_everything_comes_back(new_run, async_mode):
    run = new_run(async_mode=async_mode)
    run.learn()
    run.manager.save(2, {"step": 2, "data": {"rows_trained": 14, "fingerprint": {"seed": 42}}})
    run.manager.wait()
    saved = run.values()
    assert len(saved) == 4 * len(list(run.model.parameters()))  # the weights, two moments and a step count of each

    other = new_run(seed=1, async_mode=async_mode)
    assert other.manager.load() == {"step": 2, "data": {"rows_trained": 14, "fingerprint": {"seed": 42}}}
    assert equal(other.values(), saved)
    run.learn()
    other.learn()
    assert equal(other.values(), run.values())


# 128 x 64 numbers are enough for 8 bits.
OTHERS = [Optimizer("Muon"), Optimizer("AdamW8bit", implementation="for-loop")]
WIDER = replace(ARGS, vocab_size=128, dim=64, n_heads=4, n_kv_heads=2)


@pytest.mark.parametrize("optimizer", OTHERS, ids=["Muon", "AdamW8bit"])
def test_the_state_of_other_optimizers_comes_back(new_run, optimizer):
    if optimizer.name == "AdamW8bit":
        pytest.importorskip("torchao")
    run = new_run(optimizer=optimizer, args=WIDER)
    run.learn()
    run.manager.save(2, {"step": 2})
    other = new_run(seed=1, optimizer=optimizer, args=WIDER)
    other.manager.load()

    assert equal(other.values(), run.values())
    assert (optimizer.name == "AdamW8bit") == ("exp_avg.output.weight[2]" in run.values())
    run.learn()
    other.learn()
    assert equal(other.values(), run.values())


def test_the_state_of_another_optimizer_is_refused(new_run):
    run = new_run()
    run.learn()
    run.manager.save(1, {"step": 1})
    with pytest.raises(CheckpointError, match=r"momentum_buffer: not in the checkpoint"):
        new_run(optimizer=Optimizer("Muon")).manager.load()


def test_groups_may_change(new_run, warned):
    run = new_run(optimizer=Optimizer(weight_decay=0.1, no_decay=[]))
    run.learn()
    run.manager.save(1, {"step": 1})
    groups = [OptimizerGroup("wq", lr_factor=0.5, weight_decay=0.7), OptimizerGroup("wk", lr_factor=2.0)]
    other = new_run(seed=1, optimizer=Optimizer(lr=1e-3, weight_decay=0.1, groups=groups))
    other.manager.load()
    assert equal(other.values(), run.values())
    other.optimizer.set_lr(1e-3)
    given = {(group["lr"], group["weight_decay"]) for group in other.optimizer.param_groups}
    assert given == {(1e-3, 0.1), (5e-4, 0.7), (2e-3, 0.1), (1e-3, 0.0)}
    assert warned() == [
        "Optimizer settings differ from the checkpoint's: weight_decay 0.1 -> 0.7, weight_decay 0.1 -> 0.0"
    ]


def test_nothing_to_train_is_no_state(new_run):
    def frozen(**settings) -> Run:
        run = new_run(**settings)
        run.model.requires_grad_(False)
        run.manager.optimizer = run.optimizer = build_optimizer(run.model, Optimizer())
        return run

    run = frozen()
    run.manager.save(1, {"step": 1})
    stored = dcp.FileSystemReader(run.manager.folder / "step-1").read_metadata().state_dict_metadata
    assert set(stored) == {"train_state"}  # weights are saved if they are trained
    other = frozen(seed=1)
    before = other.values()
    assert other.manager.load() == {"step": 1}
    assert equal(other.values(), before)


def fabricate(folder: Path, step: int, *, complete: bool) -> None:
    (folder / f"step-{step}").mkdir(parents=True)
    if complete:
        (folder / f"step-{step}" / MARKER).write_text("{}")


def test_steps_are_numbers_and_count_when_complete(tmp_path):
    for step, complete in [(9, True), (10, True), (100, False), (2, True)]:
        fabricate(tmp_path, step, complete=complete)
    fabricate(tmp_path / "step-10", 11, complete=True)  # not a checkpoint of this folder
    (tmp_path / "step-7").write_text("a file")
    (tmp_path / "step-12.old").mkdir()
    assert complete_steps(tmp_path) == [2, 9, 10]
    assert complete_steps(tmp_path / "nowhere") == []


def test_the_newest_complete_one_is_taken(new_run, tmp_path):
    run = new_run()
    for step in (9, 10):
        run.manager.save(step, {"step": step})
    fabricate(tmp_path / "checkpoint", 100, complete=False)
    assert new_run().manager.load() == {"step": 10}
    assert new_run(load_step=9).manager.load() == {"step": 9}


@pytest.mark.parametrize(("steps", "there_are"), [([9, 10], "9, 10"), ([], "none")])
def test_a_missing_step_is_an_error_that_lists_those_there_are(new_run, tmp_path, steps, there_are):
    for step in steps:
        fabricate(tmp_path / "checkpoint", step, complete=True)
    fabricate(tmp_path / "checkpoint", 50, complete=False)
    # Initial weights are no substitute for a step that was asked for.
    run = new_run(load_step=50, initial_load_path=str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"load_step=50: .*no complete checkpoint of that step; .*{there_are}$"):
        run.manager.load()


def test_an_empty_folder_starts_afresh_or_from_given_weights(new_run, tmp_path):
    run = new_run()
    before = run.values()
    assert run.manager.load() is None
    assert equal(run.values(), before)

    donor = new_run("donor", seed=1)
    donor.learn()
    donor.manager.save(3, {"step": 3})
    fresh = new_run(initial_load_path=str(tmp_path / "donor" / "step-3"))
    assert fresh.manager.load() is None
    fresh.manager.load_initial(ARGS, "debug")  # the weights alone: neither a step nor optimizer state
    weights = {key: value for key, value in donor.values().items() if key.startswith("model.")}
    assert equal(fresh.values(), weights)

    fresh.manager.save(1, {"step": 1})
    resumed = new_run(seed=2, initial_load_path=str(tmp_path / "nowhere"))
    assert resumed.manager.load() == {"step": 1}  # a checkpoint of its own goes first


def test_initial_weights_must_be_a_checkpoint(new_run, tmp_path):
    with pytest.raises(CheckpointError, match=r"initial_load_path=.*: not a complete checkpoint"):
        new_run(initial_load_path=str(tmp_path)).manager.load_initial(ARGS, "debug")


@pytest.mark.parametrize(("keep", "left"), [(2, [3, 4]), (3, [2, 3, 4]), (0, [1, 2, 3, 4])])
@MODES
def test_old_checkpoints_are_removed(new_run, tmp_path, keep, left, async_mode):
    run = new_run(keep_latest_k=keep, async_mode=async_mode)
    for step in (1, 2, 3, 4):
        run.manager.save(step, {"step": step})
    run.manager.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [f"step-{step}" for step in left]


def test_a_rewound_run_keeps_what_it_saves_and_warns_of_what_lies_ahead(new_run, tmp_path, warned):
    new_run().manager.save(5, {"step": 5})
    for step in (8, 10):
        fabricate(tmp_path / "checkpoint", step, complete=True)
    run = new_run(keep_latest_k=2, load_step=5)
    assert run.manager.load() == {"step": 5}
    assert any("Going back to step 5" in message and message.endswith("8, 10") for message in warned())
    run.manager.save(6, {"step": 6})
    assert complete_steps(tmp_path / "checkpoint") == [5, 6, 8, 10]


def test_saving_over_a_torso(new_run, tmp_path):
    fabricate(tmp_path / "checkpoint", 4, complete=False)
    (tmp_path / "checkpoint" / "step-4" / "__9_0.distcp").write_text("left by a killed run of ten ranks")
    new_run().manager.save(4, {"step": 4})
    assert not (tmp_path / "checkpoint" / "step-4" / "__9_0.distcp").exists()
    assert new_run(seed=1).manager.load() == {"step": 4}


@pytest.mark.parametrize("keep", [0, 2])
def test_what_is_being_removed_no_longer_counts(new_run, tmp_path, monkeypatch, keep):
    """A kill in the middle of it must not leave a torso that a run resumes from."""
    run = new_run(keep_latest_k=keep)
    for step in (1, 2):
        run.manager.save(step, {"step": step})

    removed = []
    remove = shutil.rmtree

    def look(path):
        removed.append(path.name)
        assert not is_complete(path)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", look)
    if keep:
        run.manager.save(3, {"step": 3})  # one too many
        assert removed == ["step-1"]
    else:
        run.manager.save(2, {"step": 2})  # again, as after load_step=1
        assert removed == ["step-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 12}, r"model\.tok_embeddings\.weight: \[5, 8\] in the checkpoint, \[5, 12\] here"),
        ({"n_layers": 2}, r"model\.layers\.1\.[\w.]+: not in the checkpoint"),
        ({"tie_embeddings": True}, r"model\.output\.weight: only in the checkpoint"),
    ],
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_another_model_is_refused_by_the_names_that_differ(new_run, tmp_path, change, message, weights_only):
    new_run().manager.save(1, {"step": 1})
    settings = {"initial_load_path": str(tmp_path / "checkpoint" / "step-1")} if weights_only else {}
    run = new_run("elsewhere" if weights_only else "checkpoint", args=replace(ARGS, **change), **settings)
    before = run.values()
    with pytest.raises(CheckpointError, match=message):
        run.manager.load_initial(ARGS, "debug") if weights_only else run.manager.load()
    if weights_only:  # else the optimizer's state has been prepared
        assert equal(run.values(), before)


def test_a_long_list_of_differences_is_cut(new_run):
    new_run().manager.save(1, {"step": 1})
    with pytest.raises(CheckpointError, match=r"and \d+ more$") as error:
        new_run(args=replace(ARGS, n_layers=3)).manager.load()
    assert len(str(error.value).splitlines()) == 12


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [cut_in_half, Path.unlink])
def test_a_damaged_checkpoint_is_named(new_run, tmp_path, file, damage):
    new_run().manager.save(1, {"step": 1})
    damage(tmp_path / "checkpoint" / "step-1" / file)
    with pytest.raises(CheckpointError, match=r"step-1 is damaged .*checkpoint\.load_step") as error:
        new_run().manager.load()
    assert len(str(error.value).splitlines()) == 1  # no traceback


def test_the_configuration_rules_over_saved_hyper_parameters(new_run, warned):
    new_run(optimizer=Optimizer(lr=1e-3, weight_decay=0.1)).manager.save(1, {"step": 1})
    new_run(optimizer=Optimizer(lr=5e-4)).manager.load()
    assert not warned()  # the schedule sets the learning rate at every step

    run = new_run(optimizer=Optimizer(lr=5e-4, weight_decay=0.3, beta2=0.99))
    run.manager.load()
    matrices, norms = run.optimizer.param_groups
    assert (matrices["lr"], matrices["weight_decay"], matrices["betas"]) == (5e-4, 0.3, (0.9, 0.99))
    assert (norms["lr"], norms["weight_decay"], norms["betas"]) == (5e-4, 0.0, (0.9, 0.99))
    (warning,) = warned()
    assert "weight_decay 0.1 -> 0.3" in warning and "betas (0.9, 0.95) -> (0.9, 0.99)" in warning


class Gate:
    """Holds back the writing of data until opened."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        write = dcp.FileSystemWriter.write_data

        def gated(writer, *args, **kwargs):
            self.reached.set()
            assert self.open.wait(timeout=120)
            return write(writer, *args, **kwargs)

        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", gated)


def test_training_goes_on_during_an_async_save_and_does_not_reach_the_file(new_run, tmp_path, monkeypatch):
    run = new_run(async_mode="async")
    run.learn()
    saved = run.values()
    gate = Gate(monkeypatch)
    run.manager.save(2, {"step": 2})
    assert gate.reached.wait(timeout=120)
    run.learn(3)
    assert complete_steps(tmp_path / "checkpoint") == []  # no marker before the data
    gate.open.set()
    run.manager.wait()
    # Once waiting ends, the marker is there: the process group may be taken down now.
    assert json.loads((tmp_path / "checkpoint" / "step-2" / MARKER).read_text()) == {"step": 2, "world_size": 1}
    other = new_run(seed=1)
    other.manager.load()
    assert equal(other.values(), saved)


def fail(*args, **kwargs):
    raise OSError("disk full")


@MODES
@pytest.mark.parametrize("method", ["write_data", "finish"])
def test_a_failed_save_is_reported_and_does_not_count(new_run, tmp_path, monkeypatch, async_mode, method):
    run = new_run(async_mode=async_mode)
    run.manager.save(1, {"step": 1})
    run.manager.wait()
    with monkeypatch.context() as broken, pytest.raises(BaseException, match="disk full"):  # not an Exception
        broken.setattr(dcp.FileSystemWriter, method, fail)
        run.manager.save(2, {"step": 2})
        run.manager.wait()
    assert complete_steps(tmp_path / "checkpoint") == [1]
    run.manager.save(2, {"step": 2})  # over what the failure left
    run.manager.wait()
    assert complete_steps(tmp_path / "checkpoint") == [1, 2]


@MODES
def test_a_failure_to_mark_is_reported(new_run, tmp_path, monkeypatch, async_mode):
    run = new_run(async_mode=async_mode)
    monkeypatch.setattr("torchtitan_lite.training.checkpoint.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        run.manager.save(1, {"step": 1})
        run.manager.wait()
    assert complete_steps(tmp_path / "checkpoint") == []


@pytest.mark.parametrize("message", ["Connection closed by peer [127.0.0.1]:1", "Timed out waiting 1000ms for recv"])
def test_a_rank_that_is_gone_is_no_damage(tmp_path, message):
    with pytest.raises(RuntimeError, match=message[:20]), damage_named(tmp_path):
        raise RuntimeError(message)


def test_weights_alone_are_saved_and_not_resumed_from(new_run, tmp_path):
    run = new_run()
    run.learn()
    run.manager.save(1, {"step": 1})
    run.manager.save(2, {"step": 2}, model_only=True)
    stored = dcp.FileSystemReader(tmp_path / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    assert not any(key.startswith("optimizer") for key in stored)
    with pytest.raises(CheckpointError, match=r"step-2 holds the weights alone .*load_step names an earlier step"):
        new_run().manager.load()
    assert new_run(load_step=1).manager.load() == {"step": 1}
    other = new_run("other", initial_load_path=str(tmp_path / "checkpoint" / "step-2"))
    other.manager.load_initial(ARGS, "debug")
    weights = {key: value for key, value in run.values().items() if key.startswith("model.")}
    assert equal(other.values(), weights)
