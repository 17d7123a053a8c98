"""Packed rows in an endless order that a run can leave and re-enter at any step, on any number of ranks.

Row order: global row ``g`` belongs to epoch ``g // rows_per_epoch``, and each epoch has its own permutation, a pure
function of (seed, epoch). Global batch ``k`` is rows ``[k * G, (k + 1) * G)`` whoever reads them, and may straddle two
epochs. So where a run stands is one number, the rows it has trained on.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import Batch, collate_rows
from torchtitan_lite.data.packing import (
    PACKING_VERSION,
    PackingPlan,
    PackingStats,
    pack,
    packing_stats,
    permutation,
    resolved_max_documents,
)
from torchtitan_lite.data.sources import SourceError, load_documents
from torchtitan_lite.data.tokenized import document_lengths, tokenize_documents
from torchtitan_lite.data.tokenizer import Tokenizer


class ResumeError(ValueError):
    """A saved data position does not fit the data, packing or batch of this run."""


class PackedDataset(torch.utils.data.Dataset):
    """Rows of a packing plan, read by index from the tokenised documents. Pickles as file names and the plan."""

    def __init__(self, documents: datasets.Dataset, plan: PackingPlan):
        self.documents = documents
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, index: int) -> list[np.ndarray]:
        """The documents of a row, [length] int32 each; read-only views of the cache file."""
        tokens = self.documents.data.column("tokens")
        return [
            tokens[document].values.slice(start, length).to_numpy() for document, start, length in self.plan.row(index)
        ]


class RankSampler:
    """Endless row indices of one data-parallel rank, a microbatch at a time.

    The ranks share out each run of ``local_batch_size * dp_degree`` rows in rank order.
    """

    def __init__(self, num_rows: int, seed: int, *, start: int, local_batch_size: int, dp_rank: int, dp_degree: int):
        self.num_rows = num_rows
        self.seed = seed
        self.first = start + dp_rank * local_batch_size
        self.local_batch_size = local_batch_size
        self.stride = local_batch_size * dp_degree

    def __iter__(self) -> Iterator[list[int]]:
        current, order = -1, np.empty(0, np.int64)
        first = self.first
        while True:
            indices = []
            for position in range(first, first + self.local_batch_size):
                epoch, offset = divmod(position, self.num_rows)
                if epoch != current:
                    current, order = epoch, permutation(self.num_rows, self.seed, 1, epoch)
                indices.append(int(order[offset]))
            yield indices
            first += self.stride


class RowLoader:
    """This rank's microbatches, endlessly, from the rows trained so far.

    Workers read ahead, so only the trainer knows what was trained on: it reports every optimizer step by
    :meth:`mark_trained`, and the state counts those rows alone. The state is the same on every rank.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        config: Config,
        dp_rank: int,
        dp_degree: int,
        pad_id: int,
        fingerprint: dict[str, str | int],
        pin_memory: bool,
    ):
        local_batch_size, global_batch_size = config.training.local_batch_size, config.training.global_batch_size
        stride = local_batch_size * dp_degree
        self.global_batch_size = stride if global_batch_size == -1 else global_batch_size
        if self.global_batch_size % stride:
            raise ValueError(
                f"training.global_batch_size={global_batch_size} must be a multiple of "
                f"local_batch_size x data-parallel degree = {local_batch_size} x {dp_degree} = {stride}."
            )
        self.dataset = dataset
        self.fingerprint = fingerprint
        self.rows_trained = 0
        self._sampler = partial(
            RankSampler,
            len(dataset),
            config.training.seed,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
        )
        self._reader = partial(
            StatefulDataLoader,
            dataset,
            num_workers=config.data.num_workers,
            collate_fn=partial(
                collate_rows,
                seq_len=config.training.seq_len,
                pad_id=pad_id,
                max_documents_per_row=resolved_max_documents(config),
            ),
            pin_memory=pin_memory,
            snapshot_every_n_steps=0,  # its state counts what was read, and is tied to the number of workers
        )

    @property
    def rows_per_epoch(self) -> int:
        return len(self.dataset)

    @property
    def epoch(self) -> int:
        """Epoch of the next row to train on, from 0."""
        return self.rows_trained // self.rows_per_epoch

    @property
    def stats(self) -> PackingStats:
        return packing_stats(self.dataset.plan)

    def __iter__(self) -> Iterator[Batch]:
        """Starts reading at the rows trained so far. Call it anew after :meth:`load_state_dict`."""
        sampler = self._sampler(start=self.rows_trained)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's, not the user's doing
            # A generator of its own: the loader draws a seed for its workers, which must not move the run's RNG.
            return iter(self._reader(batch_sampler=sampler, generator=torch.Generator()))

    def mark_trained(self, rows: int) -> None:
        """Counts the rows of a finished step, over all ranks: a whole number of global batches."""
        if rows < 0 or rows % self.global_batch_size:
            raise ValueError(f"{rows} rows are not a whole number of global batches of {self.global_batch_size}.")
        self.rows_trained += rows

    def state_dict(self) -> dict[str, Any]:
        """The position: plain values, the same on every rank, independent of ranks, workers and read-ahead."""
        return {
            "rows_trained": self.rows_trained,
            "epoch": self.epoch,
            "global_batch_size": self.global_batch_size,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the rows that the state counts; takes effect at the next ``iter()``.

        Raises:
            ResumeError: the data, tokenizer, packing or global batch size differ; says which.
        """
        changes = [
            f"{name} was {state['fingerprint'].get(name)}, is now {value}"
            for name, value in self.fingerprint.items()
            if state["fingerprint"].get(name) != value
        ]
        if state["global_batch_size"] != self.global_batch_size:
            changes.append(
                f"global_batch_size was {state['global_batch_size']}, is now {self.global_batch_size} "
                f"(set training.global_batch_size={state['global_batch_size']})"
            )
        if changes:
            raise ResumeError(f"The data position of the checkpoint does not fit this run: {'; '.join(changes)}.")
        self.rows_trained = state["rows_trained"]


def build_loader(config: Config, tokenizer: Tokenizer, *, dp_rank: int, dp_degree: int, device_type: str) -> RowLoader:
    """Reads, tokenises and packs the training text of ``config`` for one data-parallel rank.

    Raises:
        SourceError: the text cannot be read, or holds no document at all.
    """
    documents = tokenize_documents(
        load_documents(config), tokenizer, num_proc=config.data.num_proc, cache_dir=config.data.cache_dir
    )
    lengths = document_lengths(documents)
    seq_len, seed, max_documents = config.training.seq_len, config.training.seed, resolved_max_documents(config)
    plan = pack(lengths, seq_len, max_documents, seed)
    if plan.num_rows == 0:
        where = config.training.dataset_path or config.training.dataset
        raise SourceError(f"{where}: no samples, all of its {len(lengths)} documents are empty.")
    return RowLoader(
        PackedDataset(documents, plan),
        config=config,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        pad_id=0 if tokenizer.eos_id is None else tokenizer.eos_id,
        fingerprint={
            "documents": hashlib.sha256(lengths.tobytes()).hexdigest()[:16],
            "tokenizer": tokenizer.fingerprint,
            "seq_len": seq_len,
            "max_documents_per_row": max_documents,
            "seed": seed,
            "packing_version": PACKING_VERSION,
        },
        pin_memory=device_type == "cuda",
    )
