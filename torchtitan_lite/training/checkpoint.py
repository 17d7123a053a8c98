"""Checkpoints through torch.distributed.checkpoint (DCP): sharded, and readable by another number of ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.convert.step_folder import MARKER, CheckpointError, complete_steps, damage_named
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.lora import is_adapter
from torchtitan_lite.models.llama3.nf4 import fill_quantized, quantized_layers
from torchtitan_lite.observability.logging import logger
from torchtitan_lite.training.optimizer import Optimizers

BEST = "best.json"

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint: the marker first, or a kill in the middle would leave a torso that counts."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


class CheckpointManager:
    """Saves and loads the state of one run.

    Contents: ``model``, what is trained of it, and ``optimizer``, under the model's own parameter names;
    ``train_state``, plain data that the trainer passes in and gets back (as JSON, so that its form may grow), the same
    on every rank; and ``data_state.R`` of each data-parallel rank R, bytes, where data is streamed.

    Args:
        config: the checkpoint section.
        folder: where the step-N folders lie.
        model, optimizer: what is saved and loaded in place; a rank's share of the parameters, under their names in the
            whole model.
        pp_group: the ranks that hold the other parameters.
    """

    def __init__(
        self,
        config: Checkpoint,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizers,
        pp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.pp_group = pp_group
        self._pending: Future | None = None
        self.groups: list[dist.ProcessGroup] = []  # that wait for disks, and not for steps
        if config.async_mode == "async":
            # A background save on the default group would wait for the training step's collectives, and they for it.
            self._group = dist.new_group(backend="gloo")
            self.groups.append(self._group)
            self._background = ThreadPoolExecutor(max_workers=1)

    def save(
        self,
        step: int,
        train_state: dict[str, Any],
        data_state: dict[int, bytes] | None = None,
        *,
        model_only: bool = False,
        best: dict[str, Any] | None = None,
    ) -> None:
        """Write step-``step``; in async mode only a copy is made before this returns.

        Args:
            model_only: leave the optimizer's state out. No run resumes from such a checkpoint.
            best: ``step`` and ``loss`` of the step to keep whatever comes after it; written to best.json.
            data_state: what this process knows of its data-parallel rank's place in the data, by that rank.
        """
        self.wait()
        path = self.folder / f"step-{step}"
        if dist.get_rank() == 0 and path.exists():
            _remove(path)  # left by a run that died here, or by one that was rewound with load_step
        dist.barrier()
        state = {
            "model": self._trained(),
            "train_state": json.dumps(train_state),
        }
        if not model_only:
            state["optimizer"] = self._optimizer_state()
        if data_state:
            state["data_state"] = {str(rank): value for rank, value in data_state.items()}
        if self.config.async_mode == "disabled":
            dcp.save(state, checkpoint_id=path)
            self._finish(path, step, model_only, best)
            return
        written = dcp.async_save(state, checkpoint_id=path, process_group=self._group)
        self._pending = self._background.submit(self._finish_after, written, path, step, model_only, best)

    def wait(self) -> None:
        """Wait until a background save has ended and is marked complete. Raises what went wrong in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, require: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any] | None:
        """Load the newest complete checkpoint, or the one that ``load_step`` names, and return its train_state; None
        without a checkpoint in the folder. Raises CheckpointError.

        require: is shown the train_state before anything else is read, and raises if it is not this run's.
        """
        agreed = [complete_steps(self.folder)]  # rank 0's, lest a lagging file system shows others something else
        dist.broadcast_object_list(agreed)
        steps = agreed[0]
        wanted = self.config.load_step
        if wanted != -1 and wanted not in steps:
            raise CheckpointError(
                f"checkpoint.load_step={wanted}: {self.folder} has no complete checkpoint of that step; "
                f"it has {', '.join(map(str, steps)) or 'none'}"
            )
        if steps:
            step = steps[-1] if wanted == -1 else wanted
            if later := [other for other in steps if other > step]:
                logger.warning(
                    f"Going back to step {step}. Later checkpoints stay until this run overwrites them, and a run "
                    f"without load_step would resume from them: {', '.join(map(str, later))}"
                )
            return self._load_run(self.folder / f"step-{step}", require)
        return None

    def load_initial(self, args: ModelArgs, hf_assets_path: str) -> None:
        """Take the weights that the configuration says a run starts from, if it names any.

        Raises:
            CheckpointError: a checkpoint is incomplete or does not fit the model.
            WeightsError: likewise for a Hugging Face folder.
        """
        path = self.config.initial_load_path
        if self.config.initial_load_in_hf:
            path = hf_assets_path if path is None else path
            HFWeights(path, args).load_into(self.model)
        elif path is not None:
            if not (Path(path) / ".metadata").is_file():  # DCP's own last word; it need not be from this project
                raise CheckpointError(f"checkpoint.initial_load_path={path}: not a complete checkpoint (no .metadata)")
            self._read_base(Path(path))
        if path is not None:
            logger.info(f"Took initial weights from {path}")

    def load_data_state(self, step: int, dp_rank: int) -> bytes:
        """The ``data_state`` that a data-parallel rank saved. All ranks call this together.

        Raises:
            CheckpointError: it saved none.
        """
        path, key = self.folder / f"step-{step}", f"data_state.{dp_rank}"
        state = {"data_state": {str(dp_rank): b""}}
        with damage_named(path):
            stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            if key in stored:
                dcp.load(state, checkpoint_id=path)
                return state["data_state"][str(dp_rank)]
        raise CheckpointError(f"{path} holds no place in the data of data-parallel rank {dp_rank} ({key})")

    def _read_base(self, path: Path) -> None:
        """Fill all but adapters from a checkpoint. Types may differ: what is not trained is kept in the type that
        computes, or quantised."""
        own = get_model_state_dict(self.model)
        kept = {name: value for name, value in own.items() if not is_adapter(name)}
        quantized = {
            name: torch.empty(layer.out_features, layer.in_features, device="meta")
            for name, layer in quantized_layers(self.model)
        }
        self._require_fitting(path, {"model": kept | quantized}, any_dtype=True)
        self._read(path, {"model": kept})

        def read(name: str, shape: tuple[int, int]) -> torch.Tensor:
            state = {"model": {name: torch.empty(shape)}}
            with damage_named(path):
                dcp.load(state, checkpoint_id=path, no_dist=True)
            return state["model"][name]

        fill_quantized(self.model, read)

    def _load_run(self, path: Path, require: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        if json.loads((path / MARKER).read_text()).get("model_only"):
            raise CheckpointError(
                f"{path} holds the weights alone (checkpoint.last_save_model_only), and no run goes on from it. "
                "checkpoint.load_step names an earlier step; checkpoint.initial_load_path, with another "
                "job.dump_folder, starts a new run from these weights"
            )
        with damage_named(path):
            first = {"train_state": ""}
            dcp.load(first, checkpoint_id=path)
        train_state = json.loads(first["train_state"])
        if require is not None:
            require(train_state)
        # Reading brings back the hyper-parameters of the run that wrote, too; those of this run's configuration rule.
        configured = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = {
            "model": self._trained(),
            "optimizer": self._optimizer_state(),
        }
        self._require_fitting(path, state)
        self._read(path, state)
        if self.optimizer.optimizers:
            set_optimizer_state_dict(self.model, self.optimizer.optimizers, state["optimizer"], options=_OPTIONS)
        changed = []
        for group, values in zip(self.optimizer.param_groups, configured, strict=True):
            changed += [f"{k} {group[k]} -> {v}" for k, v in values.items() if k != "lr" and group.get(k) != v]
            group.update(values)
        if changed:
            logger.warning(f"Optimizer settings differ from the checkpoint's: {', '.join(dict.fromkeys(changed))}")
        logger.info(f"Loaded {path}")
        return train_state

    def _optimizer_state(self) -> dict[str, Any]:
        if not self.optimizer.optimizers:  # nothing is trained on this rank; torch would refuse to be asked
            return {}
        return get_optimizer_state_dict(self.model, self.optimizer.optimizers, options=_OPTIONS)

    def _trained(self) -> dict[str, Any]:
        """The parameters that are trained: all, or the adapters alone."""
        return get_model_state_dict(self.model, options=StateDictOptions(ignore_frozen_params=True))

    def _require_fitting(self, path: Path, state: dict[str, Any], any_dtype: bool = False) -> None:
        """Raise CheckpointError unless ``path`` holds ``state``. DCP would drop keys and cast types without a word."""
        with damage_named(path):
            stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if problems := self._differences(stored, state, any_dtype):
            listed = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
            raise CheckpointError(f"{path} does not fit this run's model or optimizer:\n  " + "\n  ".join(listed))

    def _read(self, path: Path, state: dict[str, Any]) -> None:
        """Fill ``state``, which fits, from ``path``, and the model from it."""
        with damage_named(path):
            dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=False))  # keys are checked

    def _differences(self, stored: dict[str, Any], state: STATE_DICT_TYPE, any_dtype: bool) -> list[str]:
        """What keeps ``state`` from being read out of a checkpoint with these entries, a line each; the same on all
        pipeline stages, whose states make one."""
        flat, _ = dcp._nested_dict.flatten_state_dict(state)
        problems = [f"{key}: not in the checkpoint" for key in flat if key not in stored]
        moved: list[str] = []
        in_8_bits = any(group.algorithm == "AdamW8bit" for group in self.optimizer.groups)
        for key, value in flat.items():
            entry = stored.get(key)
            if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
                if entry.size != value.shape:
                    problems.append(f"{key}: {list(entry.size)} in the checkpoint, {list(value.shape)} here")
                elif entry.properties.dtype != value.dtype and not any_dtype:
                    problems.append(f"{key}: {entry.properties.dtype} in the checkpoint, {value.dtype} here")
                elif in_8_bits and key.startswith("optimizer.state.") and not _holds_the_same_part(value, entry):
                    moved.append(key)
        if moved:
            problems.append(
                f"optimizer.name=AdamW8bit: moments are scaled within the parts that ranks hold, and {len(moved)} of "
                f"these, as that of {moved[0]}, are not those of the checkpoint; go on with as many ranks along "
                "dp_shard, cp and tp"
            )
        stages = [(list(flat), problems)]
        if self.pp_group is not None:
            stages = [None] * self.pp_group.size()
            dist.all_gather_object(stages, (list(flat), problems), group=self.pp_group)
        known = {key for keys, _ in stages for key in keys}
        sections = tuple(f"{section}." for section in state)
        unknown = [f"{key}: only in the checkpoint" for key in stored if key.startswith(sections) and key not in known]
        return list(dict.fromkeys(problem for _, found in stages for problem in found)) + unknown

    def _finish_after(self, written: Future, path: Path, step: int, model_only: bool, best: dict | None) -> None:
        written.result()
        self._finish(path, step, model_only, best)

    def _finish(self, path: Path, step: int, model_only: bool, best: dict | None) -> None:
        """Once all ranks have written: mark the checkpoint complete and remove old ones (rank 0 alone)."""
        if dist.get_rank() != 0:
            return
        partial = path / f"{MARKER}.tmp"
        marker = {"step": step, "world_size": dist.get_world_size()} | ({"model_only": True} if model_only else {})
        partial.write_text(json.dumps(marker) + "\n")
        os.replace(partial, path / MARKER)
        logger.info(f"Saved a checkpoint to {path}")
        if best is not None:
            (self.folder / BEST).write_text(json.dumps(best) + "\n")
        if self.config.keep_latest_k > 0:
            # Later steps are those of a run that was rewound by load_step; they are no reason to drop this one.
            saved = [other for other in complete_steps(self.folder) if other <= step]
            for old in saved[: -self.config.keep_latest_k]:
                if best is not None and old == best["step"]:
                    continue
                _remove(self.folder / f"step-{old}")


def _holds_the_same_part(value: torch.Tensor, entry: TensorStorageMetadata) -> bool:
    """Whether a rank that saved ``entry`` had the part of it that this one has in ``value``."""
    shape, offset = value.shape, (0,) * value.ndim
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return any((tuple(chunk.sizes), tuple(chunk.offsets)) == (tuple(shape), tuple(offset)) for chunk in entry.chunks)
