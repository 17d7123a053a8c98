"""Rules on what lies outside of the configuration: tokenizer, data, folders, packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.checks.samples import samples_prompts
from torchtitan_lite.config.checks.validation import validation_sources
from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.convert.weights import WeightsError
from torchtitan_lite.data.chat.encoding import check_chats
from torchtitan_lite.data.sources.resolve import check_sources
from torchtitan_lite.data.tokenizer import TokenizerError, load_tokenizer
from torchtitan_lite.models.llama3 import nf4


def _tokenizer(run: Run) -> Iterator[str]:
    path = run.config.model.hf_assets_path
    try:
        size = load_tokenizer(path).vocab_size
    except TokenizerError as error:
        yield str(error)
        return
    if run.args is not None and size > run.args.vocab_size:
        yield (
            f"model.hf_assets_path={path}: the tokenizer has ids up to {size - 1}, but the model embeds only "
            f"{run.args.vocab_size} tokens; set model.args.vocab_size to {size} or more"
        )


def _data(run: Run) -> Iterator[str]:
    yield from check_sources(run.config)
    yield from check_chats(run.config)


def _initial_weights(run: Run) -> Iterator[str]:
    checkpoint = run.config.checkpoint
    if checkpoint.initial_load_in_hf:
        path = checkpoint.initial_load_path or run.config.model.hf_assets_path
        if run.args is not None:
            try:
                HFWeights(path, run.args)  # reads names and shapes
            except WeightsError as error:
                yield f"checkpoint.initial_load_in_hf: {error}"
    elif checkpoint.initial_load_path is not None:
        folder = Path(checkpoint.initial_load_path)
        # DCP writes .metadata last, after every rank's share is on disk.
        if not folder.is_dir():
            yield f"checkpoint.initial_load_path={folder}: no such folder; give the step-N folder of a run"
        elif any(folder.glob("*.safetensors")):
            yield (
                f"checkpoint.initial_load_path={folder}: a Hugging Face folder; checkpoint.initial_load_in_hf reads it"
            )
        elif not (folder / ".metadata").is_file():
            yield (
                f"checkpoint.initial_load_path={folder}: not a complete checkpoint (it has no .metadata); "
                "give the step-N folder itself"
            )


def _output_folders(run: Run) -> Iterator[str]:
    job, checkpoint = run.config.job, run.config.checkpoint
    folders = {f"job.dump_folder={job.dump_folder}": Path(job.dump_folder)}
    if checkpoint.enable:
        folders[f"checkpoint.folder={checkpoint.folder}"] = Path(job.dump_folder, checkpoint.folder)
    for setting, folder in folders.items():
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            yield f"{setting}: {existing} is a file; give a folder, which need not exist yet"
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield f"{setting}: no permission to write in {existing}"


def _metrics(run: Run) -> Iterator[str]:
    if run.config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield "metrics.enable_wandb: the package wandb is not installed; pip install wandb, or leave it off"


def _optimizer(run: Run) -> Iterator[str]:
    if run.config.optimizer.name == "AdamW8bit" and importlib.util.find_spec("torchao") is None:
        yield "optimizer.name=AdamW8bit: the package torchao is not installed; pip install torchao, or use AdamW"


def _quantized_base(run: Run) -> Iterator[str]:
    if run.config.lora.rank and run.config.lora.quantize_base == "nf4" and (problem := nf4.missing()):
        yield f"lora.quantize_base=nf4: {problem}"


OUTSIDE_RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    _tokenizer,
    _data,
    validation_sources,
    samples_prompts,
    _initial_weights,
    _output_folders,
    _metrics,
    _optimizer,
    _quantized_base,
)
