"""Measuring on data that is not trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_lite.config.schema.data import MixtureSource


@dataclass
class Validation:
    enable: bool = False
    """Measure the loss on the data below before the first step, every freq steps, and after the last."""

    dataset: str | None = None
    """As training.dataset. How documents are read and packed is said by the data section."""

    dataset_path: str | None = None
    """As training.dataset_path."""

    split: str | None = None
    """Split of a Hugging Face data set. Unset: data.split."""

    mix: list[MixtureSource] = field(default_factory=list)
    """Several sources instead of dataset, a [[validation.mix]] table each as in data.mix; the loss of each is reported
    too. Weights and epochs have no meaning here."""

    local_batch_size: int = -1
    """Rows per device and forward pass; the result does not depend on it. -1: as training.local_batch_size."""

    seq_len: int = -1
    """Tokens per row. -1: as training.seq_len."""

    freq: int = 100
    """Steps between two measurements."""

    steps: int = -1
    """Only steps x local_batch_size rows of each source are used, drawn at random but always the same, however many
    ranks share them. -1: all."""

    keep_best: bool = False
    """Save a checkpoint whenever the loss is the lowest so far, and keep the best one beside the latest. best.json in
    the checkpoint folder names it."""
