"""Rows to measure on: of every source all, or the same few, in a fixed order, whoever reads them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np

from torchtitan_lite.config.schema import Config, Training
from torchtitan_lite.data.collator import Batch, collate_rows
from torchtitan_lite.data.packing.plan import permutation, resolved_max_documents
from torchtitan_lite.data.prepared import PreparedSource, prepare_sources
from torchtitan_lite.data.tokenizer import Tokenizer


def validation_config(config: Config) -> Config:
    """The configuration whose training data is the validation data of ``config``.

    Its packing does not depend on the run's seed, so that runs compare.
    """
    own, validation = copy.deepcopy(config), config.validation
    own.training.dataset = Training().dataset if validation.dataset is None else validation.dataset
    own.training.dataset_path = validation.dataset_path
    own.data.mix = copy.deepcopy(validation.mix)
    own.data.streaming = False
    if validation.split is not None:
        own.data.split = validation.split
    if validation.seq_len != -1:
        own.training.seq_len = validation.seq_len
    if validation.local_batch_size != -1:
        own.training.local_batch_size = validation.local_batch_size
    own.training.global_batch_size = -1
    own.training.seed = 0
    own.data.max_documents_per_row = resolved_max_documents(config)  # what the model's offset tables are sized for
    return own


class HeldOutRows:
    """The validation rows of a run.

    Reads, tokenises and packs them when made, or finds all that in the cache. Raises what prepare_sources raises.

    Args:
        config: that of the run.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        own = validation_config(config)
        self.sources: list[PreparedSource] = prepare_sources(own, tokenizer)
        self.local_batch_size = own.training.local_batch_size
        steps = config.validation.steps
        most = None if steps == -1 else steps * self.local_batch_size
        # A plan's first rows hold its longest documents, so that a few are drawn from all.
        self._drawn = [np.sort(permutation(source.plan.num_rows, 0)[:most]) for source in self.sources]
        self._collate = {
            "seq_len": own.training.seq_len,
            "pad_id": 0 if tokenizer.eos_id is None else tokenizer.eos_id,
            "max_documents_per_row": min(own.data.max_documents_per_row, own.training.seq_len),
        }

    @property
    def fingerprint(self) -> list[list[str | int]]:
        """Changes with the rows' text, length and number; the same on ranks that have read the same."""
        return [
            [source.fingerprint, self._collate["seq_len"], rows]
            for source, rows in zip(self.sources, self.rows, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        return [source.source.name for source in self.sources]

    @property
    def rows(self) -> list[int]:
        """How many rows of each source are measured on."""
        return [len(drawn) for drawn in self._drawn]

    def num_batches(self, dp_degree: int) -> int:
        """Batches that each of ``dp_degree`` ranks gets."""
        return sum(-(-rows // (self.local_batch_size * dp_degree)) for rows in self.rows)

    def batches(self, dp_rank: int, dp_degree: int) -> Iterator[tuple[int, Batch]]:
        """The number of its source, and a batch of that source's rows; equally many on every data-parallel rank, filled
        up with rows of padding."""
        size = self.local_batch_size
        for number, (source, drawn) in enumerate(zip(self.sources, self._drawn, strict=True)):
            together = size * dp_degree
            for first in range(dp_rank * size, -(-len(drawn) // together) * together, together):
                documents = [source.row(row) for row in drawn[first : first + size].tolist()]
                padding = [[]] * (size - len(documents))
                yield number, collate_rows([*documents, *padding], **self._collate)
