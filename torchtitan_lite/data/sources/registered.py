"""Data sets that need no file: each a function that yields documents in a fixed order."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import datasets

from torchtitan_lite.data.sources.document import FEATURES, Document
from torchtitan_lite.data.sources.pychat import pychat
from torchtitan_lite.data.sources.pydocs import pydocs

DATASETS: dict[str, Callable[[], Iterator[str]]] = {"pydocs": pydocs, "pychat": pychat}
"""Registered data sets: the name for ``training.dataset``, and a function that yields documents in a fixed order."""

CHATS = ("pychat",)
"""Those whose documents are chats, as JSON (:mod:`torchtitan_lite.data.sources.chats`)."""


def load_registered(name: str) -> datasets.Dataset:
    """A registered data set as columns ``text`` and ``problem``."""
    texts = list(DATASETS[name]())
    return datasets.Dataset.from_dict({"text": texts, "problem": [None] * len(texts)}, features=FEATURES)


@dataclass(frozen=True)
class RegisteredShards:
    """A registered data set as one shard."""

    name: str

    @property
    def num_shards(self) -> int:
        return 1

    @cached_property
    def identity(self) -> str:
        digest = hashlib.sha256(self.name.encode())
        for text in DATASETS[self.name]():
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()[:16]

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        return (Document(text, None) for text in itertools.islice(DATASETS[self.name](), start, None))
