"""Documents in shards without any file, for streaming."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan_lite.data.sources.document import Document


@dataclass(frozen=True)
class ToyShards:
    """Texts as shards. ``None`` stands for a bad record, an exception for one that cannot be read."""

    shards: list[list]
    identity: str = "toy"

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        for number, text in enumerate(self.shards[shard][start:], start):
            if isinstance(text, Exception):
                raise text
            yield Document(text, None if text is not None else f"shard {shard}, record {number} is bad")


def numbered(*sizes: int) -> ToyShards:
    """Shards of these sizes; each text is the number of its record among all, in four digits."""
    numbers = iter(range(sum(sizes)))
    return ToyShards([[f"{next(numbers):04d}" for _ in range(size)] for size in sizes])
