"""A run that is killed and resumed goes on as if nothing had happened, bit for bit."""

import json
import subprocess
import time

import numpy as np
import pytest
from runs import TINY, command, environment, kill_tree, train, write_documents

from torchtitan_lite.convert.step_folder import is_complete
from torchtitan_lite.data.packing.plan import PackingSettings, pack
from torchtitan_lite.data.tokenizer import load_tokenizer

ROWS = 40  # of the data set: ten global batches of four, so that step 10 ends an epoch and step 15 lies within one


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A file whose documents pack into exactly ROWS rows."""
    folder = tmp_path_factory.mktemp("data")
    lines = write_documents(folder / "all.jsonl", 200).read_text().splitlines(keepends=True)
    tokenizer = load_tokenizer("debug")

    lengths = np.array([len(tokenizer.encode(json.loads(line)["text"])) for line in lines])
    packing = PackingSettings(seq_len=128, max_documents_per_row=16, seed=42)
    count = next(n for n in range(1, 200) if pack(lengths[:n], packing).num_rows == ROWS)
    path = folder / "documents.jsonl"
    path.write_text("".join(lines[:count]))
    return path


@pytest.fixture(scope="module")
def settings(documents):
    return (
        *TINY,
        f"--training.dataset_path={documents}",
        "--training.steps=20",
        "--checkpoint.enable",
        "--checkpoint.interval=5",
        "--data.num_workers=0",
    )


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight"), *settings)


def train_until_saved(dump_folder, step, *args, ngpu=1):
    """Start a run and kill it with signal 9 as soon as the checkpoint of ``step`` is complete."""
    process = subprocess.Popen(
        command(f"--job.dump_folder={dump_folder}", *args),
        env=environment(ngpu),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while not is_complete(dump_folder / "checkpoint" / f"step-{step}"):
        assert process.poll() is None or is_complete(dump_folder / "checkpoint" / f"step-{step}"), "ended too early"
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        time.sleep(0.02)
    kill_tree(process)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_killed_twice_equals_straight(async_mode, settings, straight, tmp_path):
    settings = (*settings, f"--checkpoint.async_mode={async_mode}")
    train_until_saved(tmp_path, 10, *settings)  # exactly at the end of an epoch
    train_until_saved(tmp_path, 15, *settings, "--checkpoint.load_step=10")  # in the middle of one
    resumed = train(tmp_path, *settings, "--checkpoint.load_step=15")

    assert [m["step"] for m in resumed] == list(range(1, 21))
    for name in ("loss", "max_loss", "grad_norm", "lr", "tokens_seen", "padding_fraction", "documents_per_row"):
        assert [m[name] for m in resumed] == [m[name] for m in straight], name


def test_straight_run_learns_and_counts(straight):
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.5
    assert [m["tokens_seen"] for m in straight] == [4 * 128 * step for step in range(1, 21)]
    documents = [m["documents_per_row"] for m in straight]
    assert np.mean(documents) > 1.5  # several share a row
    # Ten steps are an epoch, so that step 10 is the end of one: both halves see the same rows, in another order.
    assert sum(documents[:10]) == pytest.approx(sum(documents[10:]))
    assert documents[:10] != documents[10:]


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Options of a run over two sources of unlike documents, in several files, for every step of which a checkpoint is
    kept."""
    folder = tmp_path_factory.mktemp("sources")
    for number in range(3):
        (folder / "long").mkdir(exist_ok=True)
        write_documents(folder / "long" / f"{number}.jsonl", 30, seed=number)
    short = [json.dumps({"text": f"short document {number}"}) for number in range(50)]
    (folder / "short.jsonl").write_text("\n".join(short))
    mix = f'[{{dataset_path="{folder}/long", weight=3}}, {{dataset_path="{folder}/short.jsonl", weight=1}}]'
    return (
        *TINY,
        f"--data.mix={mix}",
        "--training.global_batch_size=4",
        "--training.steps=12",
        "--checkpoint.enable",
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=0",
    )


SAME = ("tokens_seen", "padding_fraction", "documents_per_row", "mask_density", "lr")


def test_a_mixture_goes_on_with_other_ranks_and_workers(two_sources, tmp_path):
    straight = train(tmp_path / "straight", *two_sources, "--training.local_batch_size=4")
    folder = tmp_path / "killed"
    train_until_saved(folder, 4, *two_sources, "--training.local_batch_size=2", ngpu=2)
    resumed = train(folder, *two_sources, "--checkpoint.load_step=4", "--data.num_workers=2")
    for name in (*SAME, "shares"):
        assert [m[name] for m in resumed] == [m[name] for m in straight], name
    for name in ("loss", "grad_norm"):
        assert [m[name] for m in resumed] == pytest.approx([m[name] for m in straight], rel=1e-5), name
    assert straight[-1]["shares"] == pytest.approx({"long": 0.75, "short": 0.25}, abs=0.02)


def test_a_stream_goes_on_with_other_workers(two_sources, tmp_path):
    settings = (*two_sources, "--training.local_batch_size=2", "--data.streaming", "--data.streaming_buffer=16")
    straight = train(tmp_path / "straight", *settings, "--data.num_workers=2", ngpu=2)
    folder = tmp_path / "killed"
    train_until_saved(folder, 4, *settings, "--data.num_workers=2", ngpu=2)
    resumed = train(folder, *settings, "--data.num_workers=0", "--checkpoint.load_step=4", ngpu=2)
    for name in (*SAME, "loss", "max_loss", "grad_norm", "shares"):
        assert [m[name] for m in resumed] == [m[name] for m in straight], name
    assert straight[-1]["shares"] == pytest.approx({"long": 0.75, "short": 0.25}, abs=0.05)
    assert np.mean([m["documents_per_row"] for m in straight]) > 2
