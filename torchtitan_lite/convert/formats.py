"""The formats by name: which one a folder is in, and reading and writing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_lite.config.load import load_config
from torchtitan_lite.convert.adapters import MergedWeights, open_step
from torchtitan_lite.convert.dcp import StepFolder, write_step
from torchtitan_lite.convert.hf import HFWeights, write_hf
from torchtitan_lite.convert.meta import MetaWeights, write_meta
from torchtitan_lite.convert.weights import DTYPES, StoredWeights, WeightsError

FORMATS = ("hf", "dcp", "meta")
"""Hugging Face folder, step-N folder of a run, Meta's consolidated.NN.pth."""


def format_of(folder: str | Path) -> str:
    """The format of the weights in a folder. Raises WeightsError where there are none, or of two kinds."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    patterns = {"hf": "*.safetensors", "dcp": ".metadata", "meta": "consolidated.*.pth"}
    found = [name for name, pattern in patterns.items() if any(folder.glob(pattern))]
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(f"{folder} holds weights in the formats {' and '.join(found)}; say which by --from")
    others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pth") for path in folder.glob(pattern))
    there = f"; it has {', '.join(others[:5])}" if others else ""
    raise WeightsError(
        f"{folder} holds no weights that are read: neither *.safetensors (hf), nor .metadata of a run's step-N folder "
        f"(dcp), nor consolidated.NN.pth (meta){there}"
    )


def open_weights(
    folder: str | Path,
    format: str | None = None,
    *,
    rope_factor: float | None = None,
    max_seq_len: int | None = None,
    base: str | Path | None = None,
) -> StoredWeights:
    """The weights of a folder in any format. Raises WeightsError, or HFConfigError of a config.json.

    format: None: seen from the files. rope_factor, max_seq_len: as MetaWeights takes them, of no effect for others.
    base: of a step that holds adapters alone, as open_step takes it.
    """
    format = format or format_of(folder)
    if base is not None and (format != "dcp" or StepFolder(folder).train_state.get("lora") is None):
        raise WeightsError(f"--base={base}: {folder} holds whole weights, and no adapters that it would be for")
    if format == "meta":
        return MetaWeights(folder, rope_factor=rope_factor, max_seq_len=max_seq_len)
    return HFWeights(folder) if format == "hf" else open_step(folder, base)


def write_weights(
    weights: StoredWeights,
    folder: str | Path,
    format: str,
    *,
    dtype: str | None = None,
    assets: str | Path | None = None,
    progress: Callable[[int], Any] = lambda parameters: None,
) -> None:
    """Write weights in any format; see write_hf, write_step and write_meta.

    dtype: None: as they are stored. Checkpoints of runs are always fp32.
    """
    if format == "dcp":
        if dtype not in (None, "float32"):
            raise WeightsError(f"--export-dtype={dtype}: a run's checkpoints hold float32 only")
        write_step(weights, folder, progress=progress)
        return
    write = write_hf if format == "hf" else write_meta
    write(weights, folder, stored_dtype(weights) if dtype is None else dtype, assets, progress=progress)


def assets_of(source: str | Path, format: str) -> str | None:
    """The folder whose tokenizer belongs to weights: their own, or for a step that of its run; None if unknown."""
    if format != "dcp":
        return str(source)
    parents = Path(source).expanduser().absolute().parents
    run = next((folder for folder in parents if (folder / "config.toml").is_file()), None)
    return None if run is None else load_config([f"--job.config_file={run / 'config.toml'}"]).model.hf_assets_path


def stored_dtype(weights: StoredWeights) -> str:
    """The one type of all tensors, merged ones aside, which are rounded to it. Raises WeightsError if they have
    several, or one that is not exported."""
    merged = weights.adapters.tensors if isinstance(weights, MergedWeights) else {}
    kinds = {
        stored.dtype
        for name, stored in weights.tensors.items()
        if f"{name.removesuffix('.weight')}.lora_a" not in merged
    }
    names = [name for name, dtype in DTYPES.items() if dtype in kinds]
    if len(kinds) > 1 or not names:
        there = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise WeightsError(f"{weights.place}: its tensors are of type {there}; choose one by --export-dtype")
    return names[0]
