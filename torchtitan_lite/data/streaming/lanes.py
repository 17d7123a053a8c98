"""Streaming's reading side: which records a rank reads, in which order, and in which process.

A rank reads every source in a fixed number of *lanes*. The lanes of all ranks share out the source's records, each of
them reads its share epoch after epoch, and a rank takes documents from its lanes in turn, a chunk at a time. So what it
gets does not depend on who does the reading: one process for all lanes, or several with some lanes each.

Shards are dealt out anew in each epoch, and whole, if there are as many as lanes. Of fewer shards each is read by
several lanes, which take its records in turn.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite.data.chat.encoding import Encoder
from torchtitan_lite.data.packing.plan import permutation
from torchtitan_lite.data.sources.document import Document, OnBadRecord, SourceError, bad_record_error
from torchtitan_lite.data.tokenized import tokenizer_threads

if TYPE_CHECKING:
    from torchtitan_lite.data.sources.reading import DocumentShards

LANES_VERSION = 1
"""Raised whenever the same source would come in another order; a resume across versions is refused."""

_CHUNK_RECORDS = 64
_CHUNK_CHARACTERS = 1_000_000


class Position(NamedTuple):
    """How far a lane has come: the next record that it may read."""

    epoch: int = 0
    index: int = 0  # in the order of its shards in this epoch
    record: int = 0  # of that shard


class PlacedDocument(NamedTuple):
    """A document and where it is from."""

    document: Document
    shard: int
    record: int


@dataclass(frozen=True)
class Chunk:
    """Some records of a lane, tokenised."""

    lane: int
    position: Position  # of the lane, behind the chunk
    tokens: np.ndarray  # [total] int32: the documents end to end, as they are stored
    lengths: np.ndarray  # [documents] int64; 0 for a document of nothing but white space
    places: list[tuple[int, int]]  # [documents]: shard and number of the record
    problems: list[str]  # of the records that are no documents
    error: str | None = None  # why nothing comes after this chunk


class Lane:
    """One of the consumers that share out a source, from a position on.

    Args:
        shards: the source.
        position: where to go on.
        epochs: passes over the share before it ends. 0: no end.
        consumer: number of this lane among those of all ranks.
        consumers: their number.
        key: determines the order of shards; the same for all consumers.
    """

    def __init__(
        self,
        shards: DocumentShards,
        position: Position,
        *,
        epochs: int,
        consumer: int,
        consumers: int,
        key: tuple[int, ...],
    ):
        self.position = position
        self._shards = shards
        self._epochs = epochs
        self._key = key
        # A group reads the same shards. As many groups as there can be, all of one size.
        self._groups = largest_divisor(consumers, shards.num_shards)
        self._group_size = consumers // self._groups
        self._group, self._member = consumer % self._groups, consumer // self._groups
        self._order: list[int] = []  # of this epoch, once it is known
        self._open: Iterator[Document] | None = None

    @property
    def ended(self) -> bool:
        """Whether all epochs have been read."""
        return has_ended(self.position, self._epochs)

    def read(self) -> list[PlacedDocument]:
        """The records of the next chunk. It ends with the epoch at the latest, and may be empty.

        Raises:
            SourceError: a record cannot be read, or is bad where that is an error.
        """
        records: list[PlacedDocument] = []
        characters = 0
        epoch = self.position.epoch
        while len(records) < _CHUNK_RECORDS and characters < _CHUNK_CHARACTERS and self.position.epoch == epoch:
            record = self._next_record()
            if record is not None:
                records.append(record)
                characters += len(record.document.text or "")
        return records

    def _next_record(self) -> PlacedDocument | None:
        """Moves on by a record. None if it was another lane's, or the end of a shard."""
        epoch, index, number = self.position
        if not self._order:
            every = permutation(self._shards.num_shards, *self._key, epoch)
            self._order = every[self._group :: self._groups].tolist()
        if self._open is None:
            self._open = iter(self._shards.read(self._order[index], number))
        document = next(self._open, None)
        if document is not None:
            self.position = Position(epoch, index, number + 1)
            # Who begins changes from shard to shard, so that what does not divide evenly goes round.
            is_mine = (number + index + epoch) % self._group_size == self._member
            return PlacedDocument(document, self._order[index], number) if is_mine else None
        self._open = None
        if index + 1 < len(self._order):
            self.position = Position(epoch, index + 1)
        else:
            self.position = Position(epoch + 1)
            self._order = []
        return None


class ChunkReader(torch.utils.data.Dataset):
    """Reads and tokenises the lanes of this process: all of them, or in a loader worker every W-th.

    Indexed by the number of a source, gives the next chunk of that source: of the lane whose turn it is.

    Args:
        lanes: for each source its lanes.
        turns: for each source the lane to begin with.
        encoders: for each source what makes tokens of its documents.
        on_bad_record: whether a document that an encoder makes no tokens of is an error.
    """

    def __init__(
        self, lanes: list[list[Lane]], turns: list[int], encoders: list[Encoder], on_bad_record: OnBadRecord = "error"
    ):
        self._lanes = lanes
        self._first = turns
        self._encoders = encoders
        self._on_bad_record = on_bad_record
        self._turns: list[deque[int]] | None = None

    def __getitem__(self, source: int) -> Chunk | None:
        """None if there is nothing left of the source for this process."""
        if self._turns is None:
            self._turns = self._own_turns()
        turns = self._turns[source]
        if not turns:
            return None
        number = turns.popleft()
        lane = self._lanes[source][number]
        try:
            chunk = self._tokenize(source, number, lane.read(), lane)
        except SourceError as error:
            # Handed on as text: the loader would bury the message in the traceback of another process.
            return Chunk(number, lane.position, np.empty(0, np.int32), np.empty(0, np.int64), [], [], str(error))
        if not lane.ended:
            turns.append(number)
        return chunk

    def _own_turns(self) -> list[deque[int]]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        turns = []
        for lanes, first in zip(self._lanes, self._first, strict=True):
            in_turn = ((first + step) % len(lanes) for step in range(len(lanes)))
            turns.append(deque(lane for lane in in_turn if lane % workers == number and not lanes[lane].ended))
        return turns

    def _tokenize(self, source: int, number: int, records: list[PlacedDocument], lane: Lane) -> Chunk:
        """Raises SourceError at a document that gives no tokens, where that is an error."""
        problems = [record.document.problem for record in records if record.document.text is None]
        records = [record for record in records if record.document.text is not None]
        with tokenizer_threads(torch.utils.data.get_worker_info() is None):  # workers are parallel enough
            encoded = self._encoders[source].encode_batch([record.document.text for record in records])
        documents, places = [], []
        for (_, shard, record), (tokens, problem) in zip(records, encoded, strict=True):
            if problem is None:
                documents.append(tokens)
                places.append((shard, record))
                continue
            problem = f"record {record + 1:,} of shard {shard}: {problem}"
            if self._on_bad_record == "error":
                raise bad_record_error(problem)
            problems.append(problem)
        lengths = np.array([len(tokens) for tokens in documents], dtype=np.int64)
        tokens = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.int32, count=int(lengths.sum()))
        return Chunk(number, lane.position, tokens, lengths, places, problems)


class ChunkFeed:
    """Chunks of any source and lane on demand, read ahead by ``workers`` processes, or on the spot by this one.

    For ``workers`` > 0 their number must divide that of the lanes. Only the chunks of one lane have an order; so
    sources may be asked for in any, and the processes are kept to work at those that are asked for most.
    """

    def __init__(self, reader: ChunkReader, *, sources: int, lanes: int, workers: int, prefetch_factor: int):
        self._requests = _Requests(sources, max(1, workers))
        self._waiting: list[list[deque[Chunk]]] = [[deque() for _ in range(lanes)] for _ in range(sources)]
        with warnings.catch_warnings(), tokenizer_threads(False):  # as workers are forked, the library would warn
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's, not the user's doing
            loader = StatefulDataLoader(
                reader,
                batch_size=None,
                sampler=self._requests,
                collate_fn=_unchanged,
                num_workers=workers,
                prefetch_factor=prefetch_factor if workers else None,
                # A generator of its own: the loader draws a seed for its workers, which must not move the run's RNG.
                generator=torch.Generator(),
                snapshot_every_n_steps=0,  # its state counts what was read, and is tied to the number of workers
            )
            self._chunks = iter(loader)

    def take(self, source: int, lane: int) -> Chunk:
        """The next chunk of a lane, which must not have ended.

        Raises:
            SourceError: its records could not be read.
        """
        waiting = self._waiting[source][lane]
        while not waiting:
            self._requests.wanted = source
            chunk = next(self._chunks)
            asked_of, asked_for = self._requests.answered()
            if chunk is None:
                self._requests.close(asked_of, asked_for)
            else:
                self._waiting[asked_for][chunk.lane].append(chunk)
        chunk = waiting.popleft()
        if chunk.error is not None:
            raise SourceError(chunk.error)
        self._requests.taken(source, lane)
        return chunk


class _Requests:
    """Which source each worker is asked for next: the one of which least is waiting or under way.

    The loader asks its workers in turn, and gives their answers in the order of the questions.
    """

    def __init__(self, sources: int, workers: int):
        self.wanted = 0
        self._ahead = [[0.0] * sources for _ in range(workers)]  # chunks asked for and not taken yet
        self._under_way: deque[tuple[int, int]] = deque()  # (worker, source)

    def __iter__(self) -> Iterator[int]:
        for worker in itertools.cycle(range(len(self._ahead))):
            ahead = self._ahead[worker]
            source = min(range(len(ahead)), key=lambda source: (ahead[source], source != self.wanted))
            ahead[source] += 1
            self._under_way.append((worker, source))
            yield source

    def answered(self) -> tuple[int, int]:
        """The oldest question that was still open: which worker was asked for which source."""
        return self._under_way.popleft()

    def taken(self, source: int, lane: int) -> None:
        self._ahead[lane % len(self._ahead)][source] -= 1

    def close(self, worker: int, source: int) -> None:
        """The worker has nothing more of the source."""
        self._ahead[worker][source] = math.inf


def has_ended(position: Position, epochs: int) -> bool:
    """Whether a lane at this position has read all ``epochs`` (0: no end) of its share."""
    return 0 < epochs <= position.epoch


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit`` (at least 1)."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def _unchanged(chunk: Chunk | None) -> Chunk | None:
    return chunk
