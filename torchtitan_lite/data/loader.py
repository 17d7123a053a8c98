"""Packed rows in an endless order that a run can leave and re-enter at any step, on any number of ranks.

Global batch ``k`` is rows ``[k * G, (k + 1) * G)`` of the order (:mod:`torchtitan_lite.data.packing.row_order`),
whoever reads them, and may straddle two epochs. So where a run stands is one number, the rows it has trained on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import Batch, collate_rows
from torchtitan_lite.data.packing.plan import PACKING_VERSION, PackingSettings, packing_settings, resolved_max_documents
from torchtitan_lite.data.packing.report import PackingReport
from torchtitan_lite.data.packing.row_order import RowOrder
from torchtitan_lite.data.prepared import PreparedSource, prepare_sources
from torchtitan_lite.data.resume import ResumeError, refuse_changes
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.tokenizer import Tokenizer


class PackedDataset(torch.utils.data.Dataset):
    """Rows of several plans, read by (source, row) from the tokenised documents."""

    def __init__(self, sources: list[PreparedSource]):
        self.sources = sources

    def __len__(self) -> int:
        return sum(source.plan.num_rows for source in self.sources)

    def __getitem__(self, index: tuple[int, int]) -> list[np.ndarray]:
        """The documents of a row, [length] int32 each, as they are stored."""
        source, row = index
        return self.sources[source].row(row)


class RankSampler:
    """Endless row indices of one data-parallel rank, a microbatch at a time.

    The ranks share out each run of ``local_batch_size * dp_degree`` rows in rank order.
    """

    def __init__(self, order: RowOrder, *, start: int, local_batch_size: int, dp_rank: int, dp_degree: int):
        self.order = order
        self.first = start + dp_rank * local_batch_size
        self.local_batch_size = local_batch_size
        self.stride = local_batch_size * dp_degree

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        first = self.first
        while self.order.total_rows is None or first + self.local_batch_size <= self.order.total_rows:
            found = self.order.rows(first, self.local_batch_size)
            yield list(zip(found.source.tolist(), found.row.tolist(), strict=True))
            first += self.stride


class RowLoader:
    """This rank's microbatches, endlessly, from the rows trained so far.

    Workers read ahead, so only the trainer knows what was trained on: it reports every optimizer step by
    :meth:`mark_trained`, and the state counts those rows alone. The state is the same on every rank.
    """

    def __init__(
        self,
        sources: list[PreparedSource],
        tokenizer: Tokenizer,
        *,
        config: Config,
        dp_rank: int,
        dp_degree: int,
        pin_memory: bool,
    ):
        self.global_batch_size = global_batch_size(config, dp_degree)
        self.sources = sources
        self.dataset = PackedDataset(sources)
        self.order = RowOrder(
            [source.plan.row_tokens for source in sources],
            [source.source.weight for source in sources],
            [source.source.epochs for source in sources],
            config.training.seed,
        )
        self._check_length(config.training.steps)
        self.fingerprint = _fingerprint(sources, tokenizer, packing_settings(config))
        self.rows_trained = 0
        self._sampler = partial(
            RankSampler,
            self.order,
            local_batch_size=config.training.local_batch_size,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
        )
        workers = config.data.num_workers
        self._reader = partial(
            StatefulDataLoader,
            self.dataset,
            num_workers=workers,
            prefetch_factor=config.data.prefetch_factor if workers else None,
            collate_fn=partial(
                collate_rows,
                seq_len=config.training.seq_len,
                pad_id=0 if tokenizer.eos_id is None else tokenizer.eos_id,
                max_documents_per_row=resolved_max_documents(config),
            ),
            # torch's allocator of pinned memory reuses a batch's pages only when the copies it has begun are done.
            pin_memory=pin_memory,
            snapshot_every_n_steps=0,  # its state counts what was read, and is tied to the number of workers
        )

    @property
    def rows_per_epoch(self) -> int:
        return len(self.dataset)

    def epochs(self) -> dict[str, int]:
        """For each source the epoch of its next row to train on, from 0."""
        rows = self.order.rows_read(self.rows_trained) // self.order.num_rows
        return {source.source.name: epoch for source, epoch in zip(self.sources, rows.tolist(), strict=True)}

    def shares(self) -> dict[str, float]:
        """For each source its share of the tokens trained on so far, without padding."""
        tokens = self.order.tokens_read(self.rows_trained)
        shares = tokens / max(tokens.sum(), 1)
        return {source.source.name: share for source, share in zip(self.sources, shares.tolist(), strict=True)}

    def reports(self) -> list[PackingReport]:
        """What the plan makes of each source."""
        return [source.report() for source in self.sources]

    def counters(self) -> dict[str, float]:
        """None: :meth:`reports` has said all ahead."""
        return {}

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
            "epoch": self.epochs(),
            "global_batch_size": self.global_batch_size,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the rows that the state counts; takes effect at the next ``iter()``.

        Raises:
            ResumeError: the data, tokenizer, packing or global batch size differ; says which.
        """
        if "lanes" in state:
            raise ResumeError(
                "The data position of the checkpoint is that of a stream; data.streaming=true continues it."
            )
        advice = {name: "documents were edited, added or removed" for name in self.fingerprint if "text" in name}
        refuse_changes(state, self.fingerprint, self.global_batch_size, advice)
        self.rows_trained = state["rows_trained"]

    def _check_length(self, steps: int) -> None:
        size, total = self.global_batch_size, self.order.total_rows
        if total is not None and total < steps * size:
            raise SourceError(
                f"training.steps={steps} of {size} rows need {steps * size:,} rows, but every source ends, after "
                f"{total:,} rows in all: train for {total // size} steps, or raise the sources' epochs (0: no end)."
            )


def global_batch_size(config: Config, dp_degree: int) -> int:
    """Rows of an optimizer step over all ranks. Raises ValueError where the ranks cannot share them out."""
    given, local = config.training.global_batch_size, config.training.local_batch_size
    stride = local * dp_degree
    if given != -1 and given % stride:
        raise ValueError(
            f"training.global_batch_size={given} must be a multiple of local_batch_size x data-parallel degree = "
            f"{local} x {dp_degree} = {stride}."
        )
    return stride if given == -1 else given


def build_loader(config: Config, tokenizer: Tokenizer, *, dp_rank: int, dp_degree: int, device_type: str) -> RowLoader:
    """Reads, tokenises and packs the training text of ``config`` for one data-parallel rank.

    Raises:
        SourceError: the text cannot be read, or a source holds no document at all; or all sources end before the run.
    """
    sources = prepare_sources(config, tokenizer)
    return RowLoader(
        sources, tokenizer, config=config, dp_rank=dp_rank, dp_degree=dp_degree, pin_memory=device_type == "cuda"
    )


def _fingerprint(
    sources: list[PreparedSource], tokenizer: Tokenizer, settings: PackingSettings
) -> dict[str, str | int | float]:
    """All that the sequence of rows follows from, each under a name to be told by."""
    fingerprint: dict[str, str | int | float] = {
        "tokenizer": tokenizer.fingerprint,
        "seq_len": settings.seq_len,
        "packing": settings.strategy,
        "oversize": settings.oversize,
        "packing_window": settings.window,
        "max_documents_per_row": settings.max_documents_per_row,
        "seed": settings.seed,
        "packing_version": PACKING_VERSION,
    }
    if len(sources) == 1:
        fingerprint["text"] = sources[0].fingerprint
        fingerprint.update(sources[0].encoder.settings)
    else:  # by number: a name may come from where the files lie, and they may be moved
        for number, source in enumerate(sources, 1):
            fingerprint[f"text of source {number}"] = source.fingerprint
            fingerprint.update({f"{name} of source {number}": value for name, value in source.encoder.settings.items()})
            fingerprint[f"weight of source {number}"] = source.source.weight
            fingerprint[f"epochs of source {number}"] = source.source.epochs
    return fingerprint
