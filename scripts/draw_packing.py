"""Draws one packed row of real training data, and the mask that keeps its documents apart.

    python scripts/draw_packing.py --out docs/images/packed_row.png
    python scripts/draw_packing.py --config train_configs/debug_model.toml --row 1234 --out row.png

Without --row it chooses one with documents of like length. It needs matplotlib (the `plot` extra).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from torchtitan_lite.config.load import load_config
from torchtitan_lite.data.collator import Batch, collate_rows
from torchtitan_lite.data.loader import RowLoader, build_loader
from torchtitan_lite.data.packing import PackingPlan, resolved_max_documents
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PALETTE = ["#3b6fb6", "#e08a1e", "#3a9d6e", "#c2497b", "#7a5cc0", "#2aa5b8", "#b5561f", "#8a9a2b"]
INK, PADDING = "#2b2f36", "#d5d8dd"


def choose_row(plan: PackingPlan) -> int:
    """The row that shows packing best: documents of like length, at most one a colour, and little padding."""
    documents = np.diff(plan.row_offsets)
    attended = np.add.reduceat(plan.length**2, plan.row_offsets[:-1]) / plan.seq_len**2
    padding = 1 - np.add.reduceat(plan.length, plan.row_offsets[:-1]) / plan.seq_len
    return int(np.where(documents <= len(PALETTE), attended + padding, np.inf).argmin())


def spans(document_ids: np.ndarray) -> list[tuple[int, int, int]]:
    """(document id, start, end) of each document and of the padding, from left to right."""
    starts = np.flatnonzero(np.diff(document_ids, prepend=-2))
    ends = [*starts[1:], len(document_ids)]
    return [(int(document_ids[start]), int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


def colour(document: int) -> str:
    return PADDING if document < 0 else PALETTE[document % len(PALETTE)]


def draw_row(axes: Axes, document_ids: np.ndarray) -> None:
    for document, start, end in spans(document_ids):
        hatch = "////" if document < 0 else None
        axes.barh(0, end - start, left=start, height=1, color=colour(document), edgecolor="white", hatch=hatch)
        if end - start > len(document_ids) / 30:
            name = "padding" if document < 0 else str(document)
            style = {"color": INK, "fontsize": 8} if document < 0 else {"color": "white", "weight": "bold"}
            axes.text((start + end) / 2, 0, name, ha="center", va="center", **style)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.set_ylabel("document_ids", rotation=0, ha="right", va="center")


def draw_positions(axes: Axes, document_ids: np.ndarray, positions: np.ndarray) -> None:
    for document, start, end in spans(document_ids):
        if document >= 0:
            where = np.arange(start, end)
            axes.fill_between(where, positions[start:end], color=colour(document), alpha=0.25, lw=0)
            axes.plot(where, positions[start:end], color=colour(document), lw=1.6)
    axes.set_ylim(0, positions.max() * 1.1 + 1)
    axes.set_ylabel("positions", rotation=0, ha="right", va="center")


def draw_mask(axes: Axes, document_ids: np.ndarray) -> None:
    size = len(document_ids)
    causal = np.tril(np.ones((size, size), dtype=bool))
    attends = causal & (document_ids[:, None] == document_ids[None, :])
    image = np.ones((size, size, 3))
    image[causal] = to_rgb("#f1f2f4")
    for document, start, end in spans(document_ids):
        block = attends[start:end, start:end]
        image[start:end, start:end][block] = to_rgb(colour(document))
    axes.imshow(image, interpolation="nearest", extent=(0, size, size, 0))
    query, key = int(0.86 * size), int(0.22 * size)
    if not attends[query, key]:
        style = {"fontsize": 9, "color": "#8b919b", "style": "italic", "ha": "center", "va": "center"}
        axes.text(key, query, "plain causal attention\nwould see this as well", **style)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    share = attends[document_ids >= 0].sum() / causal.sum()
    axes.set_title(f"block-causal mask: {share:.0%} of plain causal attention's pairs", fontsize=10, color=INK, pad=8)


def draw_legend(axes: Axes, batch: Batch, tokenizer: Tokenizer) -> None:
    axes.axis("off")
    tokens, ids = batch.tokens[0], batch.document_ids[0].numpy()
    documents = spans(ids)
    for line, (document, start, end) in enumerate(documents):
        y = 1 - (line + 0.5) / max(len(documents), 8)
        hatch = "////" if document < 0 else None
        axes.barh(y, 0.05, left=0, height=0.04, color=colour(document), edgecolor="white", hatch=hatch)
        title = "padding" if document < 0 else f"document {document}"
        axes.text(0.08, y, f"{title}, {end - start} tokens", va="center", fontsize=10, color=INK)
        if document >= 0:
            words = tokenizer.decode(tokens[start : min(end, start + 40)].tolist())
            opening = " ".join(words.replace("<|begin_of_text|>", "").split())[:38]
            axes.text(0.08, y - 0.042, f"{opening}…", va="center", fontsize=8, family="monospace", color="#6b7280")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def draw(batch: Batch, tokenizer: Tokenizer, title: str, out: Path) -> None:
    document_ids, positions = batch.document_ids[0].numpy(), batch.positions[0].numpy()
    size = len(document_ids)
    figure = plt.figure(figsize=(10, 8.6), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=[0.5, 1.0, 6.0], width_ratios=[1.75, 1.0])
    row, line = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, :])
    mask, legend = figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1])
    draw_row(row, document_ids)
    draw_positions(line, document_ids, positions)
    draw_mask(mask, document_ids)
    draw_legend(legend, batch, tokenizer)
    row.tick_params(labelbottom=False, bottom=False)
    for axes in (row, line):
        axes.set_xlim(0, size)
        axes.spines[["top", "right", "left"]].set_visible(False)
    row.spines["bottom"].set_visible(False)
    figure.suptitle(title, fontsize=12, color=INK, weight="bold")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def read_row(loader: RowLoader, index: int, seq_len: int, cap: int, pad_id: int) -> Batch:
    if not 0 <= index < loader.rows_per_epoch:
        sys.exit(f"draw_packing: --row {index} is not among the {loader.rows_per_epoch} rows of the plan")
    return collate_rows([loader.dataset[index]], seq_len=seq_len, pad_id=pad_id, max_documents_per_row=cap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "train_configs" / "debug_model.toml"), help="training file")
    parser.add_argument("--row", type=int, help="row of the packing plan")
    parser.add_argument("--out", type=Path, default=Path("packed_row.png"), help="picture to write")
    arguments = parser.parse_args()
    try:
        config = load_config([f"--job.config_file={arguments.config}"])
        tokenizer = load_tokenizer(config.model.hf_assets_path)
        loader = build_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    except ValueError as error:
        sys.exit(f"draw_packing: {error}")
    index = choose_row(loader.dataset.plan) if arguments.row is None else arguments.row
    seq_len = config.training.seq_len
    batch = read_row(loader, index, seq_len, resolved_max_documents(config), tokenizer.eos_id or 0)
    title = f"Row {index} of {loader.rows_per_epoch:,}: {len(loader.dataset[index])} documents in {seq_len} tokens"
    draw(batch, tokenizer, title, arguments.out)
    print(f"{arguments.out}: row {index}")


if __name__ == "__main__":
    main()
