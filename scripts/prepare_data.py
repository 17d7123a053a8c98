"""Reads, tokenises and packs the data of a run ahead of it, on any machine: it needs no accelerator.

    python scripts/prepare_data.py train_configs/llama3_8b.toml
    python scripts/prepare_data.py train_configs/llama3_8b.toml --data.cache_dir=/shared/cache --data.num_proc=32

The run finds the result in the cache and starts within seconds. All cores are used unless data.num_proc is given. What
is in the cache already is not made again.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for environments without the package installed

import datasets
import tomli

from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.inspection.command_line import argument_parser, read_command_line, run_script
from torchtitan_lite.data.prepared import PreparedSource, prepare_sources
from torchtitan_lite.data.sources.reading import load_documents
from torchtitan_lite.data.sources.resolve import kind_of
from torchtitan_lite.data.tokenized import cache_folder
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.observability.progress import eta_text

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> None:
    _, config, words = read_command_line(argument_parser(__doc__), argv, ROOT)
    if config.data.streaming:
        raise ConfigError(
            [
                "data.streaming=true: a run that streams tokenises while it trains, so there is nothing to prepare; "
                "data.streaming=false tokenises ahead"
            ]
        )
    if not num_proc_given(config.job.config_file, words):
        config.data.num_proc = available_cores()
    prepare(config, words)


def prepare(config: Config, words: Sequence[str]) -> None:
    """Fills the cache and says what is in it. ``words``: the command line that the run is to be given, too."""
    began = time.monotonic()
    folder = cache_folder(config.data.cache_dir)
    before = set(folder.iterdir())
    sources = prepare_sources(config, load_tokenizer(config.model.hf_assets_path))
    made = set(folder.iterdir()) - before
    for source in sources:
        print("\n".join(["", *source.report().lines(), *_rest_of_report(source, made)]))
    texts = sum(_text_size(source, config) for source in sources)
    tokens = sum(_file_size(source.documents) + _plan_size(source) for source in sources)
    seconds = time.monotonic() - began
    took = f"{seconds:.1f} s" if seconds < 60 else eta_text(seconds)
    if any(path.suffix in (".arrow", ".plan") for path in made):
        print(f"\nReady after {took}, with data.num_proc={config.data.num_proc}.")
    else:
        print(f"\nEverything was there: nothing was tokenised or planned anew. Looking took {took}.")
    print(f"Tokens and plans: {size_text(tokens)} in {folder}")
    if texts:
        print(f"The text they come from: {size_text(texts)} in {_library_cache(config)}")
    print("\n" + "\n".join(_what_to_share(config, sources, words)))


def num_proc_given(config_file: str | None, words: Sequence[str]) -> bool:
    """Whether the file or the command line says how many processes to use."""
    file = tomli.loads(Path(config_file).read_text(encoding="utf-8-sig")) if config_file else {}
    on_line = (word.partition("=")[0].replace("-", "_") == "__data.num_proc" for word in words)
    return "num_proc" in file.get("data", {}) or any(on_line)


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rest_of_report(source: PreparedSource, made: set[Path]) -> list[str]:
    is_new = any(Path(file["filename"]) in made for file in source.documents.cache_files)
    return ["  tokenised now" if is_new else "  tokens were in the cache"]


def _what_to_share(config: Config, sources: list[PreparedSource], words: Sequence[str]) -> list[str]:
    """What must be the same for a run to find all this."""
    data, kinds = config.data, {kind_of(source.source) for source in sources}
    lines = ["A run finds this if it has the same"]
    if data.cache_dir is None:
        lines.append(f"  - cache: HF_DATASETS_CACHE={_library_cache(config)}, data.cache_dir being unset")
    else:
        lines.append(f"  - cache: data.cache_dir={_library_cache(config)}")
    if "files" in kinds:
        lines.append("  - files: the same paths, sizes and times of change")
    if kinds & {"hub", "hub folder"}:
        lines.append("  - data sets: the same name or folder, subset, split and revision")
    if "registered" in kinds:
        lines.append(f"  - Python, whose own text it is: {platform.python_version()}")
    if kinds != {"registered"}:
        lines.append("  - text_field and template, or of chats format and messages_field")
    if any(source.encoder.settings for source in sources):
        lines.append("  - of chats train_on and the chat template's content")
    lines += [
        "  - content of model.hf_assets_path (the tokenizer)",
        "  - training.seq_len, training.seed, data.packing, data.oversize, data.packing_window and",
        "    data.max_documents_per_row (another value is planned anew, which takes seconds)",
        "Ranks, batch sizes, weights, epochs and data.num_proc may differ. For one machine:",
        f"  {shlex.join([str(ROOT / 'run_train.sh'), *words])}",
    ]
    return lines


def _library_cache(config: Config) -> Path:
    return cache_folder(config.data.cache_dir).parent


def _text_size(source: PreparedSource, config: Config) -> int:
    """Bytes of the text in the data sets library's cache, where a start looks it up."""
    if kind_of(source.source) == "registered":
        return 0
    documents = load_documents(
        source.source, on_bad_record=config.data.on_bad_record, num_proc=1, cache_dir=config.data.cache_dir
    )
    return _file_size(documents)


def _file_size(documents: datasets.Dataset) -> int:
    return sum(os.path.getsize(name) for name in {file["filename"] for file in documents.cache_files})


def _plan_size(source: PreparedSource) -> int:
    plan = source.plan
    return sum(array.nbytes for array in (plan.row_offsets, plan.document, plan.start, plan.length))


def size_text(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


if __name__ == "__main__":
    run_script(main)
