"""Checkpoints of this project's runs, read and written a few tensors at a time, by one process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_lite.convert.folders import written_whole
from torchtitan_lite.convert.step_folder import MARKER, CheckpointError, damage_named, is_complete
from torchtitan_lite.convert.weights import Stored, StoredWeights, WeightsError, parameter_shapes, require_same
from torchtitan_lite.models.llama3.args import args_from_json

_SECTION = "model."


class StepFolder:
    """A step-N folder as it was written.

    Attributes:
        place: the folder.
        train_state: what the run wrote beside the tensors.
        args: of the model.
        stored: every tensor of the model that was saved, by its parameter's name.

    Raises:
        WeightsError: it is not complete, or was not written by a run of this project.
    """

    def __init__(self, folder: str | Path) -> None:
        self.place = Path(folder).expanduser()
        if not is_complete(self.place):
            raise WeightsError(f"{self.place}: no complete checkpoint (no {MARKER}); give the step-N folder of a run")
        try:
            with damage_named(self.place):
                stored = dcp.FileSystemReader(self.place).read_metadata().state_dict_metadata
                state = {"train_state": ""}
                _load(state, self.place)
        except CheckpointError as error:
            raise WeightsError(str(error)) from error
        self.train_state: dict[str, Any] = json.loads(state["train_state"])
        self.args = args_from_json(self.train_state["model"])
        self.stored = {
            name.removeprefix(_SECTION): Stored(tuple(entry.size), entry.properties.dtype)
            for name, entry in stored.items()
            if name.startswith(_SECTION) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors, in the types they are stored in."""
        tensors = {name: torch.empty(self.stored[name].shape, dtype=self.stored[name].dtype) for name in names}
        with damage_named(self.place):
            _load({"model": tensors}, self.place)
        return tensors


class StepWeights(StoredWeights):
    """The weights of a step-N folder that holds all of them.

    Raises:
        WeightsError: it does not, or is not complete.
    """

    def __init__(self, folder: str | Path) -> None:
        self._step = StepFolder(folder)
        self.place, self.args = self._step.place, self._step.args
        if "lora" in self._step.train_state:
            raise WeightsError(f"{self.place} holds adapters alone, not the weights beside them")
        expected = parameter_shapes(self.args)
        require_same({name: stored.shape for name, stored in self._step.stored.items()}, expected, self.place)
        self.tensors = {name: self._step.stored[name] for name in expected}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self._step.read(names)


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Plans with empty tensors on the meta device, and reads each when its turn to be written comes."""

    def __init__(self, weights: StoredWeights, progress: Callable[[int], Any]) -> None:
        super().__init__()
        self._weights, self._progress = weights, progress

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        if not isinstance(value, Tensor):
            return value
        name = index.fqn.removeprefix(_SECTION)
        self._progress(value.numel())
        return self._weights.read([name])[name].to(value.dtype)


def write_step(
    weights: StoredWeights, folder: str | Path, *, progress: Callable[[int], Any] = lambda parameters: None
) -> None:
    """Write weights as a step-N folder in fp32, as runs do, for ``checkpoint.initial_load_path`` to name. It holds
    neither an optimizer's state nor a place in the data.

    Raises:
        WeightsError: the folder exists and is not empty.
    """
    tensors = {
        name: torch.empty(stored.shape, dtype=torch.float32, device="meta") for name, stored in weights.tensors.items()
    }
    state = {"model": tensors, "train_state": json.dumps({"step": 0, "model": weights.args.as_json()})}
    with written_whole(folder) as partial:
        planner = _LazyPlanner(weights, progress)
        with _alone():
            dcp.save(state, checkpoint_id=partial, planner=planner, no_dist=True)
        (partial / MARKER).write_text(json.dumps({"step": 0, "world_size": 1, "model_only": True}) + "\n")


def _load(state: dict[str, Any], folder: Path) -> None:
    with _alone():
        dcp.load(state, checkpoint_id=folder, no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """DCP warns one process that it is alone, which here is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
