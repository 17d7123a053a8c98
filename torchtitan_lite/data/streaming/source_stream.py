"""One source's share of a rank: chunks of its lanes in, rows out, and what is needed to go on from there."""

from __future__ import annotations

import io
import json
import logging
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.resume import ResumeError
from torchtitan_lite.data.sources.document import Source, SourceError
from torchtitan_lite.data.streaming.lanes import Chunk, Position, has_ended
from torchtitan_lite.data.streaming.stream_packing import StreamPacker

logger = logging.getLogger(__name__)

_PROBLEMS_SHOWN = 3
_PATIENCE = 10
"""Epochs without a document after which a rank gives up on a source that it did get some of before."""


class SourceStream:
    """Rows of one source on one rank.

    Args:
        packer: to be fed by this stream alone.
        lanes: in which the rank reads the source.
        dp_rank, dp_degree: for messages.
    """

    def __init__(self, source: Source, packer: StreamPacker, *, lanes: int, dp_rank: int, dp_degree: int):
        self.source = source
        self.packer = packer
        self.tokens = 0
        """Tokens in the rows so far, without padding."""
        self.positions = [Position()] * lanes
        """How far each lane has come, as far as its chunks have been added to the packer."""
        self.next_lane = 0
        """The lane whose turn it is, unless it has ended."""
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._found = [False] * lanes  # whether the lane has had a document in this epoch
        self._barren_epochs = [0] * lanes  # since the lane's last one with a document

    def next_row(self, take: Callable[[int], Chunk]) -> list[np.ndarray]:
        """The documents of the next row; none at all once the source has been read for all its epochs.

        Args:
            take: gives the next chunk of a lane.

        Raises:
            SourceError: a record cannot be read, or there is no document at all.
            PackingError: a document is longer than a row where that is an error.
        """
        while self.packer.wants_more:
            lane = self._lane_in_turn()
            if lane is None:
                self.packer.finish()
            else:
                self._add(take(lane))
        row = self.packer.next_row()
        self.tokens += sum(len(tokens) for tokens in row)
        return row

    def _lane_in_turn(self) -> int | None:
        lanes = len(self.positions)
        in_turn = ((self.next_lane + step) % lanes for step in range(lanes))
        return next((lane for lane in in_turn if not has_ended(self.positions[lane], self.source.epochs)), None)

    def _add(self, chunk: Chunk) -> None:
        for problem in chunk.problems:
            self._skip(problem)
        kept = self._documents_kept
        ends = np.cumsum(chunk.lengths)
        for start, end, (shard, record) in zip(ends - chunk.lengths, ends, chunk.places, strict=True):
            try:
                self.packer.add(chunk.tokens[start:end])
            except PackingError as error:
                raise PackingError(f"{self.source.name}, record {record} of shard {shard}: {error}") from None
        epoch = self.positions[chunk.lane].epoch
        self.positions[chunk.lane] = chunk.position
        self.next_lane = (chunk.lane + 1) % len(self.positions)
        self._found[chunk.lane] |= self._documents_kept > kept
        if chunk.position.epoch > epoch:
            self._end_epoch(chunk.lane)

    @property
    def _documents_kept(self) -> int:
        return self.packer.counts.documents - self.packer.counts.dropped

    def _end_epoch(self, lane: int) -> None:
        """Raises SourceError if the rank would go on for ever without getting a document."""
        self._barren_epochs[lane] = 0 if self._found[lane] else self._barren_epochs[lane] + 1
        self._found[lane] = False
        if min(self._barren_epochs) >= (_PATIENCE if self._documents_kept else 1):
            raise SourceError(self._no_samples())

    def _no_samples(self) -> str:
        counts = self.packer.counts
        records = counts.documents + counts.empty + counts.skipped
        message = f"{self.source.name}: no samples for rank {self._dp_rank} of {self._dp_degree}"
        if records == 0:
            return (
                f"{message}: the source has too few records for {self._dp_degree} ranks to share them out. Fewer ranks "
                "would do, or data.streaming=false."
            )
        reasons = [
            f"{number:,} {what}"
            for number, what in (
                (counts.empty, "empty"),
                (counts.skipped, "bad and left out"),
                (counts.dropped, "longer than a row and dropped (data.oversize=drop)"),
                (self._documents_kept, "read in earlier epochs, but none any more"),
            )
            if number
        ]
        return f"{message}: of the {records:,} records that it has read {', '.join(reasons)}."

    def _skip(self, problem: str) -> None:
        counts = self.packer.counts
        counts.skipped += 1
        if counts.skipped <= _PROBLEMS_SHOWN:
            logger.warning(f"{self.source.name}: bad record left out: {problem}")
        elif str(counts.skipped).strip("0") == "1":  # 10, 100, ...
            logger.warning(f"{self.source.name}: {counts.skipped:,} bad records left out so far")

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """All that the rows to come depend on, as plain values and arrays."""
        packer = self.packer.state_dict()
        arrays = {name: value for name, value in packer.items() if isinstance(value, np.ndarray)}
        plain = {
            "positions": [list(position) for position in self.positions],
            "next_lane": self.next_lane,
            "tokens": self.tokens,
            "packer": {name: value for name, value in packer.items() if name not in arrays},
        }
        return plain, arrays

    def load_state(self, plain: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Continues from a state of a stream of the same source, settings and lanes."""
        self.positions = [Position(*position) for position in plain["positions"]]
        self.next_lane = plain["next_lane"]
        self.tokens = plain["tokens"]
        self.packer.load_state_dict({**plain["packer"], **arrays})


def pack_state(header: dict[str, Any], streams: Sequence[SourceStream]) -> bytes:
    """The states of streams as the bytes of an .npz file: a text in JSON, and arrays, each named by its stream."""
    states = [stream.state() for stream in streams]
    text = json.dumps({"header": header, "streams": [plain for plain, _ in states]})
    file = io.BytesIO()
    arrays = {f"{number}.{name}": array for number, (_, part) in enumerate(states) for name, array in part.items()}
    np.savez(file, json=np.frombuffer(text.encode(), dtype=np.uint8), **arrays)
    return file.getvalue()


def unpack_state(state: bytes) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, np.ndarray]]]]:
    """The header and the state of each stream. Raises ResumeError if the bytes are damaged or something else."""
    try:
        with np.load(io.BytesIO(state), allow_pickle=False) as file:
            arrays = dict(file)
        content = json.loads(arrays.pop("json").tobytes())
        streams = []
        for number, plain in enumerate(content["streams"]):
            own = {name.split(".", 1)[1]: array for name, array in arrays.items() if name.startswith(f"{number}.")}
            streams.append((plain, own))
        return content["header"], streams
    except (
        ValueError,
        KeyError,
        TypeError,
        OSError,
        EOFError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ResumeError(f"The data position of this rank is damaged ({error}).") from error
