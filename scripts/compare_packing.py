"""What each packing strategy makes of the same documents, as a Markdown table.

    python scripts/compare_packing.py
    python scripts/compare_packing.py --documents 100000 --seq-len 4096 --mean 200 --sigma 1.5
    python scripts/compare_packing.py --config train_configs/debug_model.toml --seq-len 2048

The lengths are log-normal, or those of a training file's data, tokenised first if need be. "Cut" is the share of
documents that lie in several pieces, each a document of its own to the model. The mask density is the share of plain
causal attention's pairs that are left where documents do not see each other. The last line of each case is the padding
of the fewest rows that can hold its tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from torchtitan_lite.config.load import load_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.packing.plan import OVERSIZE_RULES, STRATEGIES, PackingSettings, pack, packing_settings
from torchtitan_lite.data.packing.report import PackingReport, packing_report
from torchtitan_lite.data.prepared import prepare_sources
from torchtitan_lite.data.tokenized import document_lengths
from torchtitan_lite.data.tokenizer import load_tokenizer

COLUMNS = ("seq_len", "documents", "packing", "padding", "cut", "documents per row", "mask density", "seconds")


def lognormal_lengths(documents: int, mean: float, sigma: float, seed: int) -> np.ndarray:
    """Tokens of each document, [documents] int64, at least 1."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, documents)
    return np.maximum(np.rint(draws), 1).astype(np.int64)


def lengths_of(config_file: str) -> dict[str, np.ndarray]:
    """Tokens of each document of the sources of a training file, by the source's name."""
    config = load_config([f"--job.config_file={config_file}"])
    sources = prepare_sources(config, load_tokenizer(config.model.hf_assets_path))
    return {source.source.name: document_lengths(source.documents) for source in sources}


def settings_of(seq_len: int, strategy: str, arguments: argparse.Namespace) -> PackingSettings:
    config = Config()
    config.training.seq_len, config.training.seed = seq_len, arguments.seed
    config.data.packing, config.data.oversize = strategy, arguments.oversize
    config.data.packing_window, config.data.max_documents_per_row = arguments.window, arguments.max_documents_per_row
    return packing_settings(config)


def results(lengths: np.ndarray, settings: PackingSettings) -> tuple[PackingReport, list[str]]:
    start = time.perf_counter()
    plan = pack(lengths, settings)
    seconds = time.perf_counter() - start
    report = packing_report(plan, lengths)
    return report, [
        settings.strategy,
        f"{report.padding_fraction:.3%}",
        f"{report.split_documents / len(lengths):.1%}",
        f"{report.documents_per_row:.2f}",
        f"{report.mask_density:.1%}",
        f"{seconds:.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="training file whose data to pack, in place of log-normal lengths")
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 1_000_000], help="how many documents")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 8192], help="tokens per row")
    parser.add_argument("--mean", type=float, default=500, help="tokens of a document on average")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the lengths' logarithm")
    parser.add_argument("--oversize", choices=OVERSIZE_RULES, default="split", help="as data.oversize")
    parser.add_argument("--window", type=int, default=100_000, help="as data.packing_window")
    parser.add_argument("--max-documents-per-row", type=int, default=0, help="as data.max_documents_per_row")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths and of the packing")
    arguments = parser.parse_args(argv)
    if min(arguments.documents) < 1 or arguments.mean <= 0 or arguments.sigma < 0:
        parser.error("--documents must be at least 1, --mean above 0 and --sigma not below 0")

    print_row(COLUMNS)
    print_row(["---"] * len(COLUMNS))
    if arguments.config:
        data = lengths_of(arguments.config)
    else:
        data = {
            f"{documents:,}": lognormal_lengths(documents, arguments.mean, arguments.sigma, arguments.seed)
            for documents in arguments.documents
        }
    for seq_len in arguments.seq_len:
        for name, lengths in data.items():
            case = [f"{seq_len:,}", f"{len(lengths):,} of {name}" if arguments.config else name]
            for strategy in STRATEGIES:
                report, cells = results(lengths, settings_of(seq_len, strategy, arguments))
                print_row(case + cells)
            fewest = -(-report.tokens // seq_len)
            print_row([*case, "fewest rows", f"{1 - report.tokens / (fewest * seq_len):.3%}", "", "", "", ""])


def print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"compare_packing: {error}")
