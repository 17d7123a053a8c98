"""The weights of a finished run as a Hugging Face folder, written by all ranks together."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.config.schema import Config
from torchtitan_lite.convert.adapters import MergedWeights, open_step, write_peft
from torchtitan_lite.convert.folders import partial_of, put_in_place
from torchtitan_lite.convert.hf import CHAT_TEMPLATES, write_hf_assets, write_hf_tensors
from torchtitan_lite.convert.step_folder import MARKER
from torchtitan_lite.observability.logging import logger


def export_hf(step_folder: Path, target: Path, config: Config) -> None:
    """Write the weights of a complete checkpoint to ``target``, a folder in ``hf``; adapters merged, and on their own
    to one in ``peft`` beside that. All ranks call this together; each reads and writes every n-th file, so that none
    holds more than one.

    A folder that is there already is left as it is, unless the checkpoint was written after it.
    """
    peft = target.parent.parent / "peft" / target.name
    if dist.get_rank() == 0:
        for folder in (target, peft):
            if folder.exists() and folder.stat().st_mtime < (step_folder / MARKER).stat().st_mtime:
                logger.info(f"{folder} is from an earlier run and is written anew")
                shutil.rmtree(folder)
        shutil.rmtree(partial_of(target), ignore_errors=True)
        if not target.exists():
            partial_of(target).mkdir(parents=True)
    # Whoever has no file to write waits for those who have, for as long as disks may take.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.comm.data_timeout_seconds))
    dist.barrier(group=group)
    if target.exists():
        logger.info(f"{target} is there already and is left as it is")
        return
    weights = open_step(step_folder)
    partial, dtype = partial_of(target), config.checkpoint.export_dtype
    write_hf_tensors(weights, partial, dtype, turn=(dist.get_rank(), dist.get_world_size()))
    if dist.get_rank() == 0:
        write_hf_assets(weights.args, partial, dtype, config.model.hf_assets_path)
        if config.data.chat_template is not None:  # what was trained with takes the place of the tokenizer's own
            shutil.copyfile(Path(config.data.chat_template).expanduser(), partial / "chat_template.jinja")
            shutil.rmtree(partial / CHAT_TEMPLATES, ignore_errors=True)
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        put_in_place(partial, target)
        logger.info(f"Wrote the weights in {dtype} as a Hugging Face folder to {target}")
        if isinstance(weights, MergedWeights):
            if not peft.exists():
                write_peft(weights.adapters, peft)
            logger.info(f"The adapters merged into it are in PEFT's format in {peft}")
    dist.barrier(group=group)
    dist.destroy_process_group(group)
