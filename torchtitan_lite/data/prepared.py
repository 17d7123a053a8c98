"""Each source read, tokenised and planned: all that can be done ahead of a run, kept in a cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.build_lock import built_once
from torchtitan_lite.data.chat.encoding import Encoder, TextEncoder, encoder_of
from torchtitan_lite.data.packing.plan import PACKING_VERSION, PackingPlan, PackingSettings, pack, packing_settings
from torchtitan_lite.data.packing.report import PackingReport, packing_report, segment_targets
from torchtitan_lite.data.sources.document import Source, SourceError, bad_record_error
from torchtitan_lite.data.sources.reading import load_documents
from torchtitan_lite.data.sources.resolve import sources_of
from torchtitan_lite.data.tokenized import (
    bad_records,
    cache_error,
    cache_folder,
    document_lengths,
    text_fingerprint,
    tokenize_documents,
)
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PROBLEMS_SHOWN = 3


@dataclass(frozen=True)
class PreparedSource:
    """A source ready to be read row by row. Pickles as file names and the plan."""

    source: Source
    documents: datasets.Dataset  # column ``tokens``
    plan: PackingPlan
    fingerprint: str  # of the text
    bad_records: int
    encoder: Encoder

    def row(self, index: int) -> list[np.ndarray]:
        """The documents of a row of the plan, [length] int32 each, as they are stored; read-only views of the file."""
        tokens = self.documents.data.column("tokens")
        return [
            tokens[document].values.slice(start, length).to_numpy() for document, start, length in self.plan.row(index)
        ]

    def report(self) -> PackingReport:
        """What the plan makes of the source."""
        targets = None
        if not isinstance(self.encoder, TextEncoder):
            targets = segment_targets(self.plan, self.documents.data.column("tokens"))
        return packing_report(self.plan, document_lengths(self.documents), self.source.name, self.bad_records, targets)


def prepare_sources(config: Config, tokenizer: Tokenizer) -> list[PreparedSource]:
    """Reads, tokenises and plans every source of a run, or finds all that in the cache.

    Of several processes that ask at once, one builds and the others wait, ``comm.data_timeout_seconds`` at most.

    Raises:
        SourceError: text that cannot be read, a bad record where those are errors, or a source without any document.
        PackingError: a document longer than a row where ``data.oversize`` is ``error``.
        TimeoutError: another process is still building.
    """
    return [
        _prepare(source, config, encoder_of(source, tokenizer, config.model.hf_assets_path))
        for source in sources_of(config)
    ]


def _prepare(source: Source, config: Config, encoder: Encoder) -> PreparedSource:
    data, timeout = config.data, config.comm.data_timeout_seconds
    folder = cache_folder(data.cache_dir)
    cache_dir = None if data.cache_dir is None else os.path.expanduser(data.cache_dir)
    # What is read does not depend on how it is mixed, and the lock's name only has to be the same for equal sources.
    reading = replace(source, name="", weight=1.0, epochs=0)
    lock = folder / f"{hashlib.sha256(repr(astuple(reading)).encode()).hexdigest()[:16]}.lock"
    with _cache_errors(folder), built_once(lock, source.name, timeout):
        documents = load_documents(
            source, on_bad_record=data.on_bad_record, num_proc=data.num_proc, cache_dir=cache_dir
        )
        tokenized = tokenize_documents(
            documents, encoder, num_proc=data.num_proc, folder=folder, timeout_seconds=timeout
        )
        skipped, problems = bad_records(tokenized, _PROBLEMS_SHOWN)
        if skipped and data.on_bad_record == "error":  # those of the reading have ended the run already
            more = f" (and {skipped - 1:,} more bad records among {len(tokenized):,})" if skipped > 1 else ""
            raise bad_record_error(f"{source.name}: {problems[0]}{more}")
        plan = _planned(folder, tokenized, packing_settings(config))
    if skipped:
        more = f"; and {skipped - len(problems):,} more" if skipped > len(problems) else ""
        logger.warning(f"{source.name}: {skipped:,} bad records left out: {'; '.join(problems)}{more}")
    if plan.num_rows == 0:
        raise SourceError(_no_samples(source, plan, len(tokenized), skipped, problems))
    return PreparedSource(source, tokenized, plan, text_fingerprint(tokenized), skipped, encoder)


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turns what reading and writing the cache may raise into a SourceError: errors of the texts are of that kind."""
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, EOFError, pyarrow.ArrowException, json.JSONDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise cache_error(folder, error) from error
        raise SourceError(
            f"The cache in {folder.parent} is damaged ({error}). Delete it, and all is read and tokenised anew; or "
            "name another folder by data.cache_dir."
        ) from error


def _no_samples(source: Source, plan: PackingPlan, documents: int, skipped: int, problems: list[str]) -> str:
    if skipped == documents:
        return f"{source.name}: no samples, all of its {skipped:,} records are bad, the first one for {problems[0]}."
    if plan.dropped_documents:
        return (
            f"{source.name}: no samples, as data.oversize=drop leaves out all {plan.dropped_documents:,} documents: "
            "each is longer than a row. A longer training.seq_len or data.oversize=split keeps them."
        )
    reason = f" ({skipped:,} of them bad records)" if skipped else ""
    return f"{source.name}: no samples, all of its {documents:,} documents are empty{reason}."


def _planned(folder: Path, tokenized: datasets.Dataset, settings: PackingSettings) -> PackingPlan:
    """The plan of these documents, made once and mapped into memory, which ranks and workers of a machine share."""
    identity = f"{PACKING_VERSION} {tokenized._fingerprint} {json.dumps(asdict(settings))}"
    path = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.plan"
    if not path.is_dir():
        _save_plan(pack(document_lengths(tokenized), settings), path)
    return _load_plan(path)


def _save_plan(plan: PackingPlan, path: Path) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    counts = {}
    for name, value in vars(plan).items():
        if isinstance(value, np.ndarray):
            np.save(partial / f"{name}.npy", value)
        else:
            counts[name] = value
    (partial / "counts.json").write_text(json.dumps(counts))
    try:
        os.replace(partial, path)
    except OSError:  # another source with the same documents was planned meanwhile
        shutil.rmtree(partial)


def _load_plan(path: Path) -> PackingPlan:
    try:
        arrays = {file.stem: np.load(file, mmap_mode="r") for file in path.glob("*.npy")}
        return PackingPlan(**arrays, **json.loads((path / "counts.json").read_text()))
    except (OSError, EOFError, ValueError, TypeError) as error:  # as a machine that fell over may leave it
        raise SourceError(f"{path}: the packing plan is damaged ({error}). Delete it, and it is made anew.") from error
