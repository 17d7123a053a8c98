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

from torchtitan_lite.data.build_lock import built_once
from torchtitan_lite.data.chat.encoding import Encoder
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.sources.reading import progress_on_terminal

logger = logging.getLogger(__name__)

TOKENS = datasets.Features(
    {
        "tokens": datasets.List(datasets.Value("int32")),
        "text_hash": datasets.Value("int64"),
        "problem": datasets.Value("string"),
    }
)

_BATCH_BYTES = 8_000_000

_CACHE_VERSION = 2
"""Raised whenever the same text and tokenizer would give other columns."""


def cache_folder(cache_dir: str | None) -> Path:
    """Where tokens and plans are kept: below ``cache_dir``, or in the data sets library's own cache.

    Raises:
        SourceError: the folder cannot be made.
    """
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE).expanduser() / "torchtitan_lite"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cache_error(folder, error) from error
    return folder


def cache_error(folder: Path, error: OSError) -> SourceError:
    """The error of a run that cannot keep its tokenised data in ``folder``."""
    what = f"{error.filename or folder}: {error.strerror}"
    return SourceError(f"{what}. Tokenised data is kept in {folder.parent}; data.cache_dir names another folder.")


def tokenize_documents(
    documents: datasets.Dataset, encoder: Encoder, *, num_proc: int, folder: Path, timeout_seconds: float
) -> datasets.Dataset:
    """Tokenises the column ``text``: one row of ``tokens`` (int32, as they are stored) for each document.

    A document without text (nothing but white space) gets no tokens, so that row i is always document i. ``problem``
    is handed on, or says why the encoder made no tokens of it. ``text_hash`` is 64 bits of the text's BLAKE2 digest.

    The result lies in ``folder`` under a name made of the documents' and the encoder's fingerprints. Of several
    processes that ask at once, one builds it and the others wait.

    Args:
        num_proc: processes to tokenise with. 1: this one, with a thread per core.
        timeout_seconds: how long to wait for another process that builds.
    """
    identity = f"{_CACHE_VERSION} {documents._fingerprint} {encoder.fingerprint}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    file = folder / f"{fingerprint}.arrow"
    with (
        built_once(folder / f"{fingerprint}.lock", "tokens", timeout_seconds),
        progress_on_terminal(),
        tokenizer_threads(num_proc == 1),
    ):
        if not any(folder.glob(f"{fingerprint}*.arrow")):  # one file a process that made it
            logger.info(f"Tokenising {len(documents):,} documents, once; the tokens are kept in {folder}")
        return documents.map(
            _tokenize_batch,
            fn_kwargs={"encoder": encoder},
            with_indices=True,
            batched=True,
            batch_size=_batch_size(documents),
            num_proc=None if num_proc == 1 else num_proc,
            remove_columns=documents.column_names,
            features=TOKENS,
            cache_file_name=str(file),
            new_fingerprint=fingerprint,
            desc="Tokenising",
        )


def _batch_size(documents: datasets.Dataset) -> int:
    """Documents to tokenise at a time: few where they are long, and many where they are short, as each batch costs
    every start a little."""
    mean = documents.data.nbytes / max(len(documents), 1)
    return int(min(max(_BATCH_BYTES / max(mean, 1), 1), 1000))


def document_lengths(tokenized: datasets.Dataset) -> np.ndarray:
    """Tokens of each document, [documents] int64, from Arrow's offsets alone."""
    return pyarrow.compute.list_value_length(tokenized.data.column("tokens")).to_numpy().astype(np.int64)


def text_fingerprint(tokenized: datasets.Dataset) -> str:
    """Digest of all documents' text in order, whatever files it came from and whatever tokenizer read it."""
    return hashlib.sha256(tokenized.data.column("text_hash").to_numpy().tobytes()).hexdigest()[:16]


def bad_records(tokenized: datasets.Dataset, most: int) -> tuple[int, list[str]]:
    """How many records were left out for a problem, and the problems of the first ``most``."""
    problems = tokenized.data.column("problem")
    count = len(problems) - problems.null_count
    return count, problems.drop_null().slice(0, most).to_pylist() if count else []


def _tokenize_batch(batch: dict[str, list], indices: list[int], encoder: Encoder) -> dict[str, list]:
    encoded = encoder.encode_batch(batch["text"])
    return {
        "tokens": [one.tokens for one in encoded],
        "text_hash": [
            int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
            for text in batch["text"]
        ],
        "problem": [
            f"record {index + 1:,}: {one.problem}" if one.problem else problem
            for index, one, problem in zip(indices, encoded, batch["problem"], strict=True)
        ],
    }


@contextlib.contextmanager
def tokenizer_threads(enabled: bool) -> Iterator[None]:
    """Sets whether the tokenizers library may use threads, and forbids them afterwards unless the user had a say.

    Loader workers are forked later. If nothing were said the library would warn in each.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name, "false")
    os.environ[name] = "true" if enabled else "false"
    try:
        yield
    finally:
        os.environ[name] = before
