"""Documents as token ids: made once, kept in an Arrow cache, read in place."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute
from filelock import FileLock

from torchtitan_lite.data.sources import progress_on_terminal
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TOKENS = datasets.Features({"tokens": datasets.List(datasets.Value("int32"))})

_CACHE_VERSION = 1
"""Raised whenever the same text and tokenizer would give other tokens."""


def tokenize_documents(
    documents: datasets.Dataset, tokenizer: Tokenizer, *, num_proc: int, cache_dir: str | None
) -> datasets.Dataset:
    """Tokenises the column ``text``: one row of ``tokens`` (int32, BOS and EOS included) for each document.

    A document without text (nothing but white space) gets no tokens, so that row i is always document i.

    The result lies in ``cache_dir`` (or the data sets library's own) under a name made of the documents' and the
    tokenizer's fingerprints. Of several processes that ask at once, ranks of a run or runs side by side, one builds and
    the others wait for its lock, outside of any collective: a builder that fails or dies frees the lock, and the next
    one meets the error itself.

    Args:
        num_proc: processes to tokenise with. 1: this one, with a thread per core.
    """
    identity = f"{_CACHE_VERSION} {documents._fingerprint} {tokenizer.fingerprint}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE).expanduser() / "torchtitan_lite"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{fingerprint}.arrow"
    with FileLock(folder / f"{fingerprint}.lock"), progress_on_terminal(), _tokenizer_threads(num_proc == 1):
        if not file.exists():
            logger.info(f"Tokenising {len(documents):,} documents, once; the tokens are kept in {folder}")
        return documents.map(
            _tokenize_batch,
            fn_kwargs={"tokenizer": tokenizer},
            batched=True,
            batch_size=128,
            num_proc=None if num_proc == 1 else num_proc,
            remove_columns=documents.column_names,
            features=TOKENS,
            cache_file_name=str(file),
            new_fingerprint=fingerprint,
            desc="Tokenising",
        )


def document_lengths(tokenized: datasets.Dataset) -> np.ndarray:
    """Tokens of each document, [documents] int64, from Arrow's offsets alone."""
    return pyarrow.compute.list_value_length(tokenized.data.column("tokens")).to_numpy().astype(np.int64)


def _tokenize_batch(batch: dict[str, list[str]], tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    encoded = tokenizer.encode_batch(batch["text"])
    return {"tokens": [ids if text.strip() else [] for text, ids in zip(batch["text"], encoded, strict=True)]}


@contextlib.contextmanager
def _tokenizer_threads(enabled: bool) -> Iterator[None]:
    """Sets whether the tokenizers library may use threads, and forbids them afterwards unless the user had a say.

    Loader workers are forked later. They never tokenise, but if nothing were said the library would warn in each.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name, "false")
    os.environ[name] = "true" if enabled else "false"
    try:
        yield
    finally:
        os.environ[name] = before
