"""Data sets that need no file: each a function that yields documents in a fixed order."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import datasets

from torchtitan_lite.data.sources.document import FEATURES, Document

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def pydocs() -> Iterator[str]:
    """Documentation topics and standard-library sources of the running CPython; each topic and each file a document.

    Tests and installed packages are left out, so the text is the same in every environment of one interpreter.
    """
    with contextlib.suppress(ImportError):  # some distributions package pydoc's topics apart
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    for name in sorted(paths):
        if name == "pydoc_data/topics.py" or _NOT_LIBRARY.intersection(name.split("/")):
            continue
        # Sources that do not follow their own coding line, or are links to nowhere, are nobody's training text.
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(paths[name]) as file:
            yield file.read()


DATASETS: dict[str, Callable[[], Iterator[str]]] = {"pydocs": pydocs}
"""Registered data sets: the name for ``training.dataset``, and a function that yields documents in a fixed order."""


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
