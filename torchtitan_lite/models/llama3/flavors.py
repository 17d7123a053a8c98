"""The sizes of Llama 3 by name, with Meta's published shapes (Llama 3.1 for 8B, 70B and 405B; 3.2 for 1B and 3B)."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan_lite.attention.backends import ATTENTIONS
from torchtitan_lite.models.llama3.args import ModelArgs, RopeScaling
from torchtitan_lite.models.llama3.hf_config import HFConfigError, args_from_hf, read_hf_config

HF = "hf"
"""The size that is read from the config.json of a Hugging Face folder."""

SIZES: dict[str, ModelArgs] = {
    "debugmodel": ModelArgs(
        dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_hidden_dim=768, vocab_size=2048, max_seq_len=8192
    ),
    "1B": ModelArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tie_embeddings=True,
    ),
    "3B": ModelArgs(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tie_embeddings=True,
    ),
    "8B": ModelArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_hidden_dim=14336, rope_scaling=RopeScaling(factor=8.0)
    ),
    "70B": ModelArgs(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_hidden_dim=28672, rope_scaling=RopeScaling(factor=8.0)
    ),
    "405B": ModelArgs(
        dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_hidden_dim=53248, rope_scaling=RopeScaling(factor=8.0)
    ),
}


def split_flavor(flavor: str) -> tuple[str | None, str | None]:
    """``SIZE``, ``SIZE_ATTENTION`` or ``ATTENTION`` -> (size, attention), None for the part not named.

    Raises ValueError, listing the choices, when a part is unknown.
    """
    if flavor in ATTENTIONS:
        return None, flavor
    size, _, attention = flavor.partition("_")
    if size in (*SIZES, HF) and (attention in ATTENTIONS or flavor == size):
        return size, attention or None
    raise ValueError(
        f"unknown flavor {flavor!r}: give SIZE, SIZE_ATTENTION or ATTENTION "
        f"with a size of {', '.join(SIZES)}, {HF} and an attention of {', '.join(ATTENTIONS)}"
    )


def join_flavor(size: str, attention: str | None) -> str:
    """The inverse of :func:`split_flavor`; plain ``sdpa`` is the size alone."""
    return size if attention in (None, "sdpa") else f"{size}_{attention}"


def model_args(flavor: str, overrides: dict[str, Any] | None = None, hf_assets_path: str | None = None) -> ModelArgs:
    """The arguments of a flavor with single fields replaced; None leaves a field as it is.

    hf_assets_path: the folder whose config.json the size ``hf`` means.
    Raises ValueError for an unknown flavor, a folder that this model cannot be built from, or for shapes that do not
    fit together.
    """
    size, attention = split_flavor(flavor)
    changes = {name: value for name, value in (overrides or {}).items() if value is not None}
    if isinstance(changes.get("sliding_window_pattern"), list):
        changes["sliding_window_pattern"] = tuple(changes["sliding_window_pattern"])
    if "head_dim" in changes:
        changes["own_head_dim"] = changes.pop("head_dim")
    return dataclasses.replace(_sized(size, hf_assets_path), attention=attention or "sdpa", **changes)


def _sized(size: str | None, hf_assets_path: str | None) -> ModelArgs:
    if size != HF:
        return SIZES[size or "debugmodel"]
    if hf_assets_path in (None, "debug"):
        raise HFConfigError(
            f"model.hf_assets_path={hf_assets_path}: the size {HF} is read from config.json of a Hugging Face model "
            "folder; name it there"
        )
    return args_from_hf(read_hf_config(hf_assets_path))
