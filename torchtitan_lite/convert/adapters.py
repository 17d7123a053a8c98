"""Adapters of a run: merged into the weights they were trained beside, or on their own in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lite.convert.dcp import StepFolder, StepWeights
from torchtitan_lite.convert.folders import written_whole
from torchtitan_lite.convert.hf import HFWeights, hf_name
from torchtitan_lite.convert.weights import DTYPES, Stored, StoredWeights, WeightsError, parameter_shapes, require_same
from torchtitan_lite.models.llama3 import nf4
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.lora import TARGETS, LoraSpec, adapter_shapes, merged


class Adapters:
    """The adapters of a step-N folder.

    Attributes:
        args, spec: of the model and of its adapters.
        tensors: all of them, fp32, by their parameters' names.

    Raises:
        WeightsError: the step holds none, or others than it says.
    """

    def __init__(self, step: StepFolder) -> None:
        if (lora := step.train_state.get("lora")) is None:
            raise WeightsError(f"{step.place} holds no adapters: its run trained all weights")
        self.place, self.args = step.place, step.args
        self.spec = LoraSpec(lora["rank"], lora["alpha"], targets=tuple(lora["targets"]), rslora=lora["rslora"])
        self.base: dict[str, Any] | None = step.train_state.get("base")
        expected = adapter_shapes(parameter_shapes(self.args), self.spec)
        require_same({name: stored.shape for name, stored in step.stored.items()}, expected, self.place)
        self.tensors = step.read(list(expected))


class MergedWeights(StoredWeights):
    """Weights with adapters added to them, in the types of the former, summed in fp32.

    Raises:
        WeightsError: they are not the adapters of such a model.
    """

    def __init__(self, base: StoredWeights, adapters: Adapters) -> None:
        shapes = adapter_shapes(parameter_shapes(base.args), adapters.spec)
        require_same({name: tuple(t.shape) for name, t in adapters.tensors.items()}, shapes, adapters.place)
        self.place, self.args, self._base, self.adapters = adapters.place, adapters.args, base, adapters
        # fp32, whatever the base is in: rounding is left to whoever writes.
        self.tensors = {
            name: stored._replace(dtype=torch.float32) if self._adapter(name) is not None else stored
            for name, stored in base.tensors.items()
        }

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        read = self._base.read(names)
        for name in names:
            if (adapter := self._adapter(name)) is not None:
                read[name] = merged(read[name], *adapter, self.adapters.spec.scale)
        return read

    def _adapter(self, name: str) -> tuple[Tensor, Tensor] | None:
        layer, tensors = name.removesuffix(".weight"), self.adapters.tensors
        return (tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"]) if f"{layer}.lora_a" in tensors else None


class RoundedWeights(StoredWeights):
    """Weights as a run computed with them that kept those of the blocks in NF4, quantised in ``dtype``."""

    def __init__(self, base: StoredWeights, dtype: torch.dtype) -> None:
        self.place, self.args, self._base, self._dtype = base.place, base.args, base, dtype
        self.tensors = {
            name: stored._replace(dtype=dtype) if _in_block(name, stored) else stored
            for name, stored in base.tensors.items()
        }

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        read = self._base.read(names)
        return {
            name: nf4.rounded(t, self._dtype) if _in_block(name, self.tensors[name]) else t for name, t in read.items()
        }


def _in_block(name: str, stored: Stored) -> bool:
    """Whether it is a matrix of a block."""
    return name.startswith("layers.") and len(stored.shape) == 2


def open_step(folder: str | Path, base: str | Path | None = None) -> StoredWeights:
    """The weights of a step-N folder; where it holds adapters alone, merged into what they were trained beside.

    base: where that lies now, a Hugging Face or step-N folder; None: where the run took it from.
    Raises WeightsError.
    """
    step = StepFolder(folder)
    if step.train_state.get("lora") is None:
        return StepWeights(folder)
    adapters = Adapters(step)
    return MergedWeights(_open_base(adapters, base), adapters)


def write_peft(adapters: Adapters, folder: str | Path, dtype: str = "float32") -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` as ``peft`` loads them.

    Raises:
        WeightsError: the folder exists and is not empty.
    """
    with written_whole(folder) as partial:
        tensors = {peft_name(name): t.to(DTYPES[dtype]).contiguous() for name, t in adapters.tensors.items()}
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(_peft_config(adapters), indent=2) + "\n")


def peft_name(name: str) -> str:
    """An adapter's parameter as PEFT names it."""
    layer, _, which = name.rpartition(".")
    module = hf_name(f"{layer}.weight").removesuffix(".weight")
    return f"base_model.model.{module}.{'lora_A' if which == 'lora_a' else 'lora_B'}.weight"


def _peft_config(adapters: Adapters) -> dict[str, Any]:
    spec = adapters.spec
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if adapters.base is None else adapters.base["path"],
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": [TARGETS[name] for name in spec.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _open_base(adapters: Adapters, folder: str | Path | None) -> StoredWeights:
    recorded = adapters.base
    if folder is None and recorded is None:
        raise WeightsError(
            f"{adapters.place} holds adapters alone, of a run that began from its seed's weights; they cannot be merged"
        )
    place = Path(recorded["path"] if folder is None else folder).expanduser()
    if not place.is_dir():
        raise WeightsError(
            f"{adapters.place} holds adapters alone, and the weights they were trained beside are not at {place}; "
            "--base names them"
        )
    args: ModelArgs = adapters.args
    base = HFWeights(place, args) if any(place.glob("*.safetensors")) else StepWeights(place)
    if recorded is None or "nf4" not in recorded:
        return base
    if problem := nf4.missing():
        raise WeightsError(f"{adapters.place} was trained beside weights in NF4, and is merged into them: {problem}")
    return RoundedWeights(base, DTYPES[recorded["nf4"]])
