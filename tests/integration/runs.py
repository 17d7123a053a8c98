"""Whole runs through run_train.sh on a tiny model and text made here."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[2]

TINY = (
    "--model.args.dim=64",
    "--model.args.n_layers=2",
    "--model.args.n_heads=4",
    "--model.args.n_kv_heads=2",
    "--model.args.ffn_hidden_dim=128",
    "--training.seq_len=128",
    "--training.local_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--training.deterministic",
    "--metrics.log_freq=1",
    "--lr_scheduler.warmup_steps=2",
)


def write_documents(path: Path, count: int, seed: int = 0) -> Path:
    """A jsonl file of ``count`` documents of very different length (some longer than a row of 128 tokens)."""
    draw = random.Random(seed)
    words = ["def", "return", "model", "token", "mask", "the", "of", "row", "packed", "0", "1", "self", "(x)", "\n"]
    with path.open("w") as file:
        for _ in range(count):
            length = min(int(draw.lognormvariate(3.2, 1.2)) + 1, 400)
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=length))}) + "\n")
    return path


def command(*args: str) -> list[str]:
    return ["bash", str(REPO / "run_train.sh"), *args]


def environment(ngpu: int = 1, **variables: str) -> dict[str, str]:
    """The caller's, without what a torchrun around the tests may have set."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CONFIG_FILE")}
    return {**kept, "PYTHON": sys.executable, "NGPU": str(ngpu), "OMP_NUM_THREADS": "1", **variables}


def train(dump_folder: Path, *args: str, ngpu: int = 1, **variables: str) -> list[dict]:
    """Run to the end and return the metrics of each logged step."""
    done = subprocess.run(
        command(f"--job.dump_folder={dump_folder}", *args),
        env=environment(ngpu, **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(dump_folder)


def metrics(dump_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (dump_folder / "metrics.jsonl").read_text().splitlines()]


def kill_tree(process: subprocess.Popen) -> None:
    """kill -9 for the launcher and all it started, workers first: torchrun gives them a session of their own."""
    family = [*psutil.Process(process.pid).children(recursive=True)[::-1], psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=120)
    process.wait(timeout=120)
