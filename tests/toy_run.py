"""A run small enough for a test: a two-layer model on a handful of documents, fp32, on the CPU."""

import json
import random
from pathlib import Path

from torchtitan_lite.config.schema import Config
from torchtitan_lite.models.llama3.args import ModelArgs

TOY = ModelArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_hidden_dim=48,
    vocab_size=50,
    max_seq_len=512,
    max_documents_per_row=16,
)


def write_documents(path: Path) -> Path:
    """Documents of 1 to 60 words, so that rows hold different numbers of documents and of targets."""
    words = random.Random(0)
    with path.open("w") as file:
        for _ in range(60):
            text = " ".join(words.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(words.randint(1, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def toy_config(folder: Path, documents: Path, **settings) -> Config:
    """A run in ``folder``. ``settings`` are "section.field" (or "model.args.field") -> value."""
    config = Config()
    config.job.dump_folder = str(folder)
    config.data.cache_dir = str(documents.parent / "cache")
    toy = {
        "model.args.dim": 32,
        "model.args.n_layers": 2,
        "model.args.n_heads": 4,
        "model.args.n_kv_heads": 2,
        "model.args.ffn_hidden_dim": 48,
        "model.flavor": "debugmodel_sdpa_block_causal",
        "training.dataset": "json",
        "training.dataset_path": str(documents),
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "training.steps": 3,
        "training.mixed_precision_param": "float32",
        "training.deterministic": True,
        "optimizer.lr": 1e-2,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        "activation_checkpoint.mode": "none",
    }
    for name, value in {**toy, **settings}.items():
        *path, field = name.split(".")
        section = config
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, field), name
        setattr(section, field, value)
    return config


def read_metrics(folder: Path) -> list[dict]:
    """What a run logged, a dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
