"""The rows of a run, training and held out, which every rank has to have packed alike."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.held_out import HeldOutRows
from torchtitan_lite.data.loader import RowLoader, build_loader
from torchtitan_lite.data.streaming.stream_loader import StreamLoader, build_stream_loader
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.distributed.mesh import DataParallel


def build_rows(
    config: Config, dp: DataParallel, device: torch.device
) -> tuple[RowLoader | StreamLoader, HeldOutRows | None]:
    """The loader of this rank's training rows, and the rows to validate on, if any.

    All ranks call this together. Raises RuntimeError where they have read different data, and what the loaders raise.
    """
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    build = build_stream_loader if config.data.streaming else build_loader
    loader = build(config, tokenizer, dp_rank=dp.rank, dp_degree=dp.degree, device_type=device.type)
    held_out = HeldOutRows(config, tokenizer) if config.validation.enable else None
    own = [loader.fingerprint, None if held_out is None else held_out.fingerprint]
    # A group with the time limit of the data: another node may still be tokenising.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.comm.data_timeout_seconds))
    fingerprints = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, own, group=group)
    dist.destroy_process_group(group)
    if differing := [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]:
        raise RuntimeError(
            f"Rank 0 has packed other data than rank(s) {differing}: {fingerprints[0]} is not "
            f"{fingerprints[differing[0]]}. Do all nodes read the same files with the same software?"
        )
    return loader, held_out
