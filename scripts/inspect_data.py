"""Shows what a run trains on: a report of how its data is packed, and rows of it as text, document by document.

    python scripts/inspect_data.py train_configs/debug_model.toml
    python scripts/inspect_data.py train_configs/debug_model.toml --row 0 --rows 3 --training.seq_len=2048
    python scripts/inspect_data.py train_configs/debug_model.toml --save row.png
    python scripts/inspect_data.py train_configs/debug_sft.toml --record 3

Rows are counted as the run reads them: its first step trains on row 0 and those after it. Without --row, one is chosen
that shows packing well. What is not trained on (prompts, say) is dim or in brackets. It needs no accelerator; what is
not in the cache yet is tokenised first.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for environments without the package installed

import numpy as np

from torchtitan_lite.attention.backends import masks_documents
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import collate_rows
from torchtitan_lite.data.inspection.command_line import argument_parser, read_command_line, run_script
from torchtitan_lite.data.inspection.rows import Row, counted, legend, plan_of, row_lines, show_value, token_table
from torchtitan_lite.data.loader import RowLoader, build_loader
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.packing.report import PackingReport, packing_report
from torchtitan_lite.data.prepared import PreparedSource, prepare_sources
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.streaming.stream_loader import build_stream_loader
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.models.llama3.flavors import split_flavor

ROOT = Path(__file__).resolve().parent.parent
CHOSEN_AMONG = 100_000  # rows; more would show packing no better
CHOSEN_DOCUMENTS = 8  # at most in a chosen row, so that each can be told from the others
STREAMED_ROWS = 64
WIDTH = (100, 24)  # columns and lines where there is no terminal


@dataclass(frozen=True)
class Inspection:
    """What there is to show."""

    rows: list[Row]
    reports: list[PackingReport]
    report: PackingReport  # the one about the data of the first row
    remarks: list[str]
    failure: ValueError | None = None  # that ended the reading early


def main(argv: Sequence[str]) -> None:
    options, config, _ = read_command_line(own_options(), argv, ROOT)
    check_options(options)
    # Which rows there are depends on none of these, and they are taken one at a time.
    config.training.local_batch_size, config.training.global_batch_size, config.training.steps = 1, -1, 1
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    if options.record is not None:
        show_record(config, tokenizer, options)
        return
    found = (streamed_rows if config.data.streaming else planned_rows)(config, tokenizer, options.row, options.rows)
    ignoring = attention_that_ignores_documents(config)

    if not options.no_report:
        for report in found.reports:
            print("\n".join([*report.lines(), ""]))
    for remark in found.remarks:
        print(remark)
    if ignoring:
        print(f"The attention of this run, {ignoring}, ignores document_ids: it sees all documents before a token.")
    colour = in_colour(options.color)
    print(legend(colour))
    for row in found.rows:
        show_row(row, tokenizer, options)
    if options.save:
        save(options.save, found, tokenizer, ignoring)
    if found.failure:
        raise found.failure


def show_row(row: Row, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Prints a row, and its tokens where they are asked for."""
    width = shutil.get_terminal_size(WIDTH).columns
    print("\n".join(["", *row_lines(row, tokenizer, width=width, colour=in_colour(options.color))]))
    if options.ids:
        print("\n".join(["", *token_table(row, tokenizer)]))


def show_record(config: Config, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Prints one record as it is tokenised, before anything is packed or cut: a chat as the template renders it."""
    if config.data.streaming:
        sys.exit("--record: a stream cannot be asked for a record; with --data.streaming=false it can be shown.")
    name, _, number = options.record.rpartition(":")
    sources = {source.source.name: source for source in prepare_sources(config, tokenizer)}
    source = sources.get(name or next(iter(sources)))
    if source is None or not number.isdecimal():
        sys.exit(
            f"--record {options.record}: give a number from 1 on, or SOURCE:NUMBER; there are {', '.join(sources)}."
        )
    total = len(source.documents)
    if not 1 <= int(number) <= total:
        sys.exit(f"--record {options.record}: {source.source.name} has {total:,} records, 1 to {total}.")
    tokens = source.documents.data.column("tokens")[int(number) - 1].values.to_numpy()
    title = f"record {int(number):,} of {source.source.name}"
    if not len(tokens):
        sys.exit(f"{title} has no tokens: {source.documents[int(number) - 1]['problem'] or 'it is empty'}.")
    print(legend(in_colour(options.color)))
    batch = collate_rows([[tokens]], seq_len=len(tokens), pad_id=0, max_documents_per_row=1)
    show_row(Row.of(batch, 0, title), tokenizer, options)


def own_options() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    parser.add_argument("--row", type=int, metavar="N", help="first row to show (default: one that shows packing well)")
    parser.add_argument(
        "--rows",
        type=int,
        metavar="K",
        help=f"how many rows to show (default: 1); with data.streaming also to report on (default: {STREAMED_ROWS})",
    )
    parser.add_argument(
        "--record",
        metavar="[SOURCE:]N",
        help="show this record of the data (from 1 on) alone, whole and as tokenised, instead of rows",
    )
    parser.add_argument("--ids", action="store_true", help="each token on a line of its own, too")
    parser.add_argument("--no-report", action="store_true", help="rows alone")
    parser.add_argument("--save", type=Path, metavar="FILE.png", help="draw the first row, its mask and all lengths")
    parser.add_argument(
        "--color",
        choices=["auto", "always", "never"],
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set",
    )
    parser.add_argument("--no-color", dest="color", action="store_const", const="never", help="as --color=never")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Ends the script where an option makes no sense, before anything is read."""
    if options.row is not None and options.row < 0:
        sys.exit(f"--row {options.row}: rows are counted from 0.")
    if options.rows is not None and options.rows < 1:
        sys.exit(f"--rows {options.rows}: show at least 1.")
    if options.save is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("--save draws with matplotlib, which is not installed: pip install matplotlib, or the `plot` extra.")
    from torchtitan_lite.data.inspection.picture import suffixes

    if options.save.suffix.lower() not in suffixes():
        sys.exit(f"--save {options.save}: the suffix names no format of a picture; there are {', '.join(suffixes())}.")


def in_colour(color: str) -> bool:
    """Whether to print in colour, for a value of --color (NO_COLOR: https://no-color.org)."""
    if color == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return color == "always"


def attention_that_ignores_documents(config: Config) -> str | None:
    """The name of the run's attention, if it is one that does not keep documents apart."""
    attention = split_flavor(config.model.flavor)[1] or "sdpa"
    return None if masks_documents(attention) else attention


def planned_rows(config: Config, tokenizer: Tokenizer, first: int | None, count: int | None) -> Inspection:
    """``count`` rows of the run's order from row ``first`` on, and the report of each source."""
    config.data.num_workers = 0  # for a few rows none is worth its start
    loader = build_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    total, count = loader.rows_per_epoch, count or 1
    if first is None:
        first = chosen_row(loader)
    if first >= total:
        sys.exit(f"--row {first}: there are {total:,} rows, 0 to {total - 1}; the next epoch has the same ones again.")
    last = min(first + count, total)
    order = loader.order.rows(first, last - first)
    loader.mark_trained(first)
    rows = []
    for number, which, index, batch in zip(
        range(first, last), order.source.tolist(), order.row.tolist(), loader, strict=False
    ):
        source = loader.sources[which]
        epoch = int(loader.order.rows_read(number)[which]) // source.plan.num_rows
        name = f"row {number:,} · epoch {epoch} of {source.source.name}, row {index:,} of {source.plan.num_rows:,}"
        rows.append(Row.of(batch, 0, name, origins(source, index)))
    remarks = (
        [f"The last row is {total - 1:,}: {last - first:,} of {count:,} are left."] if last < first + count else []
    )
    reports = loader.reports()
    return Inspection(rows, reports, reports[int(order.source[0])], remarks)


def chosen_row(loader: RowLoader) -> int:
    """A row in the run's order that shows packing well."""
    found = loader.order.rows(0, min(loader.rows_per_epoch, CHOSEN_AMONG))
    value = np.empty(len(found.row))
    for number, source in enumerate(loader.sources):
        of_source = found.source == number
        value[of_source] = show_value(source.plan, CHOSEN_DOCUMENTS)[found.row[of_source]]
    return int(value.argmin())


def origins(source: PreparedSource, index: int) -> list[str]:
    """For each document of a row of the plan, which record of its source it is, and which part of it."""
    tokens = source.documents.data.column("tokens")
    found = []
    for document, start, length in source.plan.row(index):
        whole = len(tokens[document])
        part = "" if length == whole else f", tokens {start:,}-{start + length - 1:,} of {whole:,}"
        found.append(f"record {document + 1:,} of {source.source.name}{part}")
    return found


def streamed_rows(config: Config, tokenizer: Tokenizer, first: int | None, count: int | None) -> Inspection:
    """As :func:`planned_rows`, of what one rank alone would read; the report is of all rows read here."""
    loader = build_stream_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    wanted = (first or 0) + count if count else max(STREAMED_ROWS, (first or 0) + 1)
    remarks = ["Rows of rank 0's stream, as a run on one rank reads it; more ranks would share the records out."]
    rows: list[Row] = []
    failure = None
    try:
        for number, batch in enumerate(islice(loader, wanted)):
            rows.append(Row.of(batch, 0, f"row {number:,} of rank 0's stream"))
    except (SourceError, PackingError) as error:
        if len(rows) <= (first or 0):
            raise
        failure = error
        remarks.append(
            f"Of {counted(wanted, 'row')} only {len(rows):,} could be read; what stopped it is said at the end."
        )
    plan = plan_of(rows, config.training.seq_len)
    targets = [
        int(row.is_target[start:end].sum()) for row in rows for document, start, end in row.spans if document >= 0
    ]
    name = f"{counted(len(rows), 'row')} of rank 0's stream"
    report = packing_report(plan, plan.length, name, targets=np.array(targets, dtype=np.int64))
    counts = [f"{value:,} {name.replace('_', ' ')}" for name, value in asdict(loader.counts).items() if value]
    remarks.append(
        f"In the report each piece of a document counts as one. Read so far, also for later rows: {', '.join(counts)}."
    )
    if first is None:
        first = 0 if count else int(show_value(plan, CHOSEN_DOCUMENTS).argmin())
    return Inspection(rows[first : first + (count or 1)], [report], report, remarks, failure)


def save(path: Path, found: Inspection, tokenizer: Tokenizer, ignoring: str | None) -> None:
    """Draws the first row. ``ignoring``: the run's attention, if the mask drawn is not its."""
    from torchtitan_lite.data.inspection.picture import draw_row, save_figure

    row = found.rows[0]
    documents = sum(span.document >= 0 for span in row.spans)
    title = f"{row.name}: {counted(documents, 'document')} in {len(row.tokens):,} tokens"
    title += f"\nThe attention of this run, {ignoring}, ignores this mask" if ignoring else ""
    save_figure(draw_row(row, tokenizer, found.report, title=title), path)
    print(f"\n{path}: {row.name}")


if __name__ == "__main__":
    run_script(main)
