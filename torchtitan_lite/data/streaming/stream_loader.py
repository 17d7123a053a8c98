"""Packed rows from text that is tokenised while training goes on, for sets too large to tokenise ahead.

Reading and tokenising may run ahead in loader workers (:mod:`torchtitan_lite.data.streaming.lanes`); packing waits
until the trainer asks for a batch (:mod:`torchtitan_lite.data.streaming.stream_packing`). So the documents that the
packers hold and how far the lanes before them have come are exactly the state after the rows handed out. That state
belongs to a rank: a run can change its number of workers, but not its number of data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.chat.encoding import Encoder, encoder_of
from torchtitan_lite.data.collator import Batch, collate_rows
from torchtitan_lite.data.loader import global_batch_size
from torchtitan_lite.data.packing.plan import packing_settings
from torchtitan_lite.data.packing.report import PackingReport
from torchtitan_lite.data.resume import ResumeError, differences, refuse_changes
from torchtitan_lite.data.sources.document import Source, SourceError
from torchtitan_lite.data.sources.reading import DocumentShards, open_shards
from torchtitan_lite.data.sources.resolve import sources_of
from torchtitan_lite.data.streaming.lanes import LANES_VERSION, ChunkFeed, ChunkReader, Lane, largest_divisor
from torchtitan_lite.data.streaming.source_stream import SourceStream, pack_state, unpack_state
from torchtitan_lite.data.streaming.stream_packing import STREAM_PACKING_VERSION, StreamCounts, StreamPacker
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class StreamLoader:
    """This rank's microbatches, endlessly, from the rows trained so far.

    Each row is of one source: of the one that, by its weight, has given the fewest tokens so far (without padding; of
    equals the first). A source that has been read for its epochs drops out.

    The position has two parts, :meth:`state_dict`, the same on every rank, and :meth:`rank_state`. Both are to be asked
    for when every microbatch handed out has been reported by :meth:`mark_trained`.

    Args:
        shards: for each source its documents.
        sources: their names, weights and epochs.
        encoders: for each source what makes tokens of its documents.
    """

    def __init__(
        self,
        shards: list[DocumentShards],
        sources: list[Source],
        tokenizer: Tokenizer,
        encoders: list[Encoder],
        *,
        config: Config,
        dp_rank: int,
        dp_degree: int,
        pad_id: int,
        pin_memory: bool,
    ):
        for source, documents in zip(sources, shards, strict=True):
            if documents.num_shards == 0:
                raise SourceError(f"{source.name}: no samples, it has no shards.")
        self.global_batch_size = global_batch_size(config, dp_degree)
        self.rows_trained = 0
        self.lanes = max(1, config.data.num_workers)
        self._shards = shards
        self._sources = sources
        self._tokenizer = tokenizer
        self._encoders = encoders
        self._on_bad_record = config.data.on_bad_record
        self._settings = packing_settings(config)
        self._buffer = config.data.streaming_buffer
        self._num_workers, self._prefetch_factor = config.data.num_workers, config.data.prefetch_factor
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._local_batch_size = config.training.local_batch_size
        self._pin_memory = pin_memory
        self._collate = partial(
            collate_rows,
            seq_len=self._settings.seq_len,
            pad_id=pad_id,
            max_documents_per_row=self._settings.max_documents_per_row,
        )
        self.fingerprint = self._fingerprint()
        self._feed: ChunkFeed | None = None
        self._reset()

    def _fingerprint(self) -> dict[str, str | int | float]:
        """What a position depends on; the same on every rank."""
        settings = self._settings
        fingerprint: dict[str, str | int | float] = {
            "tokenizer": self._tokenizer.fingerprint,
            "seq_len": settings.seq_len,
            "packing": settings.strategy,
            "oversize": settings.oversize,
            "streaming_buffer": self._buffer,
            "max_documents_per_row": settings.max_documents_per_row,
            "seed": settings.seed,
            "dp_degree": self._dp_degree,
            "streaming_version": f"{LANES_VERSION}.{STREAM_PACKING_VERSION}",
        }
        # By number: a name may come from where the files lie, and they may be moved.
        for number, (source, shards, encoder) in enumerate(
            zip(self._sources, self._shards, self._encoders, strict=True), 1
        ):
            of = f" of source {number}" if len(self._sources) > 1 else ""
            fingerprint[f"documents{of}"] = shards.identity
            fingerprint.update({f"{name}{of}": value for name, value in encoder.settings.items()})
            fingerprint[f"epochs{of}"] = source.epochs
            if of:
                fingerprint[f"weight{of}"] = source.weight
        return fingerprint

    def _reset(self) -> None:
        """To the state before the first row."""
        self._rows_handed = 0  # over all ranks
        self._streams = [
            SourceStream(
                source,
                StreamPacker(self._settings, self._buffer, key=(number, self._dp_rank)),
                lanes=self.lanes,
                dp_rank=self._dp_rank,
                dp_degree=self._dp_degree,
            )
            for number, source in enumerate(self._sources)
        ]
        self._live = list(self._streams)

    # -- what came out -------------------------------------------------------------------------------------------------

    def shares(self) -> dict[str, float]:
        """For each source its share of the tokens that this rank has handed out so far, without padding."""
        total = max(sum(stream.tokens for stream in self._streams), 1)
        return {stream.source.name: stream.tokens / total for stream in self._streams}

    @property
    def counts(self) -> StreamCounts:
        """What became of the records that this rank has read so far, summed over the sources."""
        return sum((stream.packer.counts for stream in self._streams), StreamCounts())

    def counters(self) -> dict[str, float]:
        """:attr:`counts` under TensorBoard names."""
        return {f"packing/{name}": value for name, value in asdict(self.counts).items()}

    def reports(self) -> list[PackingReport]:
        """None: what packing comes to is not known ahead."""
        return []

    # -- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Starts reading behind the rows trained so far; an iterator from before can go on no longer.

        Raises:
            RuntimeError: rows were handed out and not trained on, or of the position only one part was loaded.
        """
        self._check_reported("reading start anew")
        workers = largest_divisor(self.lanes, self._num_workers) if self._num_workers else 0
        if workers != self._num_workers:
            logger.info(
                f"Streaming in {workers} of {self._num_workers} loader processes: the run was started with "
                f"{self.lanes} lane(s), and each process takes as many"
            )
        lanes = [
            [
                Lane(
                    shards,
                    position,
                    epochs=stream.source.epochs,
                    consumer=lane * self._dp_degree + self._dp_rank,
                    consumers=self.lanes * self._dp_degree,
                    key=(self._settings.seed, 2, number),  # 2: apart from every other use of the seed
                )
                for lane, position in enumerate(stream.positions)
            ]
            for number, (shards, stream) in enumerate(zip(self._shards, self._streams, strict=True))
        ]
        turns = [stream.next_lane for stream in self._streams]
        reader = ChunkReader(lanes, turns, self._encoders, self._on_bad_record)
        self._feed = ChunkFeed(
            reader,
            sources=len(self._streams),
            lanes=self.lanes,
            workers=workers,
            prefetch_factor=self._prefetch_factor,
        )
        return self._batches(self._feed)

    def _batches(self, feed: ChunkFeed) -> Iterator[Batch]:
        while True:
            if feed is not self._feed:
                raise RuntimeError("the loader has been started anew; this iterator is one from before.")
            self._rows_handed += self._local_batch_size * self._dp_degree
            batch = self._collate([self._next_row(feed) for _ in range(self._local_batch_size)])
            yield Batch(*(field.pin_memory() for field in batch)) if self._pin_memory else batch

    def _next_row(self, feed: ChunkFeed) -> list[np.ndarray]:
        while self._live:
            stream = min(self._live, key=lambda stream: stream.tokens / stream.source.weight)
            if row := stream.next_row(partial(feed.take, self._streams.index(stream))):
                if stream.packer.rows == 1 and all(position.epoch > 0 for position in stream.positions):
                    logger.warning(
                        f"{stream.source.name} has fewer documents for this rank than data.streaming_buffer="
                        f"{self._buffer}, which holds some of them several times; a smaller buffer, or "
                        "data.streaming=false, suits it better"
                    )
                return row
            self._live.remove(stream)
            logger.info(f"{stream.source.name} has been read for its {stream.source.epochs} epoch(s)")
        rows = sum(stream.packer.rows for stream in self._streams)
        raise SourceError(
            f"The data ended after {rows:,} rows of rank {self._dp_rank}: every source has been read for its epochs. "
            "Fewer training.steps, more epochs, or a source without end (epochs=0) would do."
        )

    # -- position ------------------------------------------------------------------------------------------------------

    def mark_trained(self, rows: int) -> None:
        """Counts the rows of a finished step, over all ranks: a whole number of global batches."""
        if rows < 0 or rows % self.global_batch_size:
            raise ValueError(f"{rows} rows are not a whole number of global batches of {self.global_batch_size}.")
        if self.rows_trained + rows > self._rows_handed:
            raise ValueError(f"{rows} rows are more than were handed out and not reported yet.")
        self.rows_trained += rows

    def state_dict(self) -> dict[str, Any]:
        """The part of the position that all ranks share: plain values, independent of workers and read-ahead."""
        self._check_reported("the position be told")
        return {
            "rows_trained": self.rows_trained,
            "global_batch_size": self.global_batch_size,
            "lanes": self.lanes,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the rows that the state counts; :meth:`load_rank_state` must follow.

        Raises:
            ResumeError: the data, tokenizer, packing, batch size or number of ranks differ; says which.
        """
        if "lanes" not in state:
            raise ResumeError(
                "The data position of the checkpoint was left by a run that did not stream; data.streaming=false "
                "continues it."
            )
        advice = "a streaming run keeps its number of data-parallel ranks; one with data.streaming=false may change it"
        refuse_changes(state, self.fingerprint, self.global_batch_size, {"dp_degree": advice})
        self.rows_trained, self.lanes = state["rows_trained"], state["lanes"]
        self._reset()

    def rank_state(self) -> bytes:
        """The part of the position that is this rank's: how far its lanes have come and the documents it holds."""
        self._check_reported("the position be told")
        return pack_state(self._rank_header(), self._streams)

    def load_rank_state(self, state: bytes) -> None:
        """Continues with this rank's part of the position whose shared part has been loaded.

        Raises:
            ResumeError: it is of another rank, step or run, or damaged.
        """
        header, streams = unpack_state(state)
        if changes := differences(header, self._rank_header()):
            raise ResumeError(f"This is not the data position of this rank: {'; '.join(changes)}.")
        self._reset()
        for stream, (plain, arrays) in zip(self._streams, streams, strict=True):
            stream.load_state(plain, arrays)
        self._rows_handed = self.rows_trained

    def _rank_header(self) -> dict[str, Any]:
        return {
            "rank": self._dp_rank,
            "rows_trained": self.rows_trained,
            "lanes": self.lanes,
            **self.fingerprint,
        }

    def _check_reported(self, what: str) -> None:
        if self._rows_handed > self.rows_trained:
            raise RuntimeError(
                f"{self._rows_handed - self.rows_trained} rows were handed out and not reported by mark_trained(); "
                f"only behind a whole step can {what}."
            )
        if self._rows_handed < self.rows_trained:
            raise RuntimeError("load_state_dict() was not followed by load_rank_state().")


def build_stream_loader(
    config: Config, tokenizer: Tokenizer, *, dp_rank: int, dp_degree: int, device_type: str
) -> StreamLoader:
    """Opens the sources of ``config`` for one data-parallel rank.

    Raises:
        SourceError: a source cannot be opened.
    """
    sources = sources_of(config)
    shards = [open_shards(source, on_bad_record=config.data.on_bad_record) for source in sources]
    loader = StreamLoader(
        shards,
        sources,
        tokenizer,
        [encoder_of(source, tokenizer, config.model.hf_assets_path) for source in sources],
        config=config,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        pad_id=0 if tokenizer.eos_id is None else tokenizer.eos_id,
        pin_memory=device_type == "cuda",
    )
    for source, documents in zip(sources, shards, strict=True):
        _say_who_reads(source.name, documents.num_shards, loader.lanes * dp_degree)
    return loader


def _say_who_reads(name: str, shards: int, lanes: int) -> None:
    readers = lanes // largest_divisor(lanes, shards)
    logger.info(
        f"Streaming {name}: {shards:,} shard(s), each read by {readers:,} of {lanes:,} lanes (data-parallel ranks x "
        "loader processes)"
    )
    if readers > -(-lanes // shards):
        logger.warning(
            f"{name}: every shard is read {readers:,} times over, for lanes can share shards in equal groups only. A "
            f"number of lanes that divides the {shards:,} shards, or is a multiple of them, reads less"
        )
