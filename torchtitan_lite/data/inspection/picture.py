"""A packed row as a picture: its documents, their positions, and the mask that keeps them apart.

Needs matplotlib, which only those who draw have to have: import this module where it is used.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from torchtitan_lite.data.inspection.rows import Row, counted, visible
from torchtitan_lite.data.packing.report import PackingReport
from torchtitan_lite.data.tokenizer import Tokenizer

PALETTE = ("#3b6fb6", "#e08a1e", "#3a9d6e", "#c2497b", "#7a5cc0", "#2aa5b8", "#b5561f", "#8a9a2b")
INK, FAINT, PADDING, UNSEEN = "#2b2f36", "#6b7280", "#d5d8dd", "#f1f2f4"
MASK_PIXELS = 1024
"""Most pixels of the mask a side: every n-th query and key of a longer row is looked at."""
LEGEND_LINES = 9


def draw_row(row: Row, tokenizer: Tokenizer, report: PackingReport, *, title: str) -> Figure:
    """The picture of a row. ``report``: of the data it is from, for the lengths of documents."""
    figure = Figure(figsize=(10, 10.2), layout="constrained")
    grid = figure.add_gridspec(4, 2, height_ratios=[0.5, 1.0, 6.0, 1.4], width_ratios=[1.75, 1.0])
    documents, positions = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, :])
    _draw_documents(documents, row)
    _draw_positions(positions, row)
    _draw_mask(figure.add_subplot(grid[2, 0]), row)
    _draw_legend(figure.add_subplot(grid[2, 1]), row, tokenizer)
    _draw_lengths(figure.add_subplot(grid[3, :]), report)
    documents.tick_params(labelbottom=False, bottom=False)
    documents.spines["bottom"].set_visible(False)
    for axes in (documents, positions):
        axes.set_xlim(0, len(row.tokens))
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=12, color=INK, weight="bold", parse_math=False)
    return figure


def suffixes() -> list[str]:
    """Those of the formats that pictures can be written in."""
    return [f".{name}" for name in sorted(Figure().canvas.get_supported_filetypes())]


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the picture in the format that the file's suffix names. Raises OSError where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # any script may stand in a document
        figure.savefig(path, dpi=110)


def mask_image(document_ids: np.ndarray, pixels: int = MASK_PIXELS) -> np.ndarray:
    """The block-causal mask of a row in the documents' colours, [size, size, 3] float64, queries down, keys across."""
    places = np.linspace(0, len(document_ids) - 1, min(len(document_ids), pixels)).astype(int)
    ids = document_ids[places]
    causal = places[:, None] >= places
    attends = causal & (ids[:, None] == ids)
    image = np.ones((len(places), len(places), 3))
    image[causal] = to_rgb(UNSEEN)
    colours = np.array([to_rgb(_colour(document)) for document in ids])
    image[attends] = np.broadcast_to(colours[:, None], image.shape)[attends]
    return image


def _colour(document: int) -> str:
    return PADDING if document < 0 else PALETTE[document % len(PALETTE)]


def _hatch(document: int) -> str | None:
    return "////" if document < 0 else None


def _draw_documents(axes: Axes, row: Row) -> None:
    seq_len = len(row.tokens)
    for document, start, end in row.spans:
        style = {"color": _colour(document), "hatch": _hatch(document), "edgecolor": "white"}
        axes.barh(0, end - start, left=start, height=1, **style)
        if end - start > seq_len / 30:
            name = "padding" if document < 0 else str(document)
            style = {"color": INK, "fontsize": 8} if document < 0 else {"color": "white", "weight": "bold"}
            axes.text((start + end) / 2, 0, name, ha="center", va="center", **style)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.set_ylabel("document_ids", rotation=0, ha="right", va="center")


def _draw_positions(axes: Axes, row: Row) -> None:
    for document, start, end in row.spans:
        if document >= 0:
            where = np.arange(start, end)
            axes.fill_between(where, row.positions[start:end], color=_colour(document), alpha=0.25, lw=0)
            axes.plot(where, row.positions[start:end], color=_colour(document), lw=1.6)
    axes.set_ylim(0, row.positions.max() * 1.1 + 1)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("positions", rotation=0, ha="right", va="center")


def _draw_mask(axes: Axes, row: Row) -> None:
    seq_len = len(row.tokens)
    axes.imshow(mask_image(row.document_ids), interpolation="nearest", extent=(0, seq_len, seq_len, 0))
    query, key = int(0.86 * seq_len), int(0.22 * seq_len)
    if row.document_ids[query] != row.document_ids[key]:
        style = {"fontsize": 9, "color": "#8b919b", "style": "italic", "ha": "center", "va": "center"}
        axes.text(key, query, "plain causal attention\nwould see this as well", **style)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    share = f"{row.mask_density:.0%} of plain causal attention's pairs"
    axes.set_title(f"block-causal mask: {share}", fontsize=10, color=INK, pad=8)


def _draw_legend(axes: Axes, row: Row, tokenizer: Tokenizer) -> None:
    axes.axis("off")
    spans = row.spans
    shown = spans if len(spans) <= LEGEND_LINES else [*spans[: LEGEND_LINES - 1], None]
    for line, span in enumerate(shown):
        y = 1 - (line + 0.5) / LEGEND_LINES
        if span is None:
            more = f"and {len(spans) - LEGEND_LINES + 1} more"
            axes.text(0.08, y, more, va="center", fontsize=10, color=INK)
            continue
        document, start, end = span
        style = {"color": _colour(document), "hatch": _hatch(document), "edgecolor": "white"}
        axes.barh(y, 0.05, left=0, height=0.04, **style)
        name = "padding" if document < 0 else f"document {document}"
        axes.text(0.08, y, f"{name}, {counted(end - start, 'token')}", va="center", fontsize=10, color=INK)
        if document >= 0:
            style = {"va": "center", "fontsize": 8, "family": "monospace", "color": FAINT, "parse_math": False}
            axes.text(0.08, y - 0.042, _opening(row.tokens[start:end], tokenizer), **style)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _opening(tokens: np.ndarray, tokenizer: Tokenizer, characters: int = 38) -> str:
    """The first words of a document."""
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    text = tokenizer.decode([token for token in tokens[: 2 * characters].tolist() if token not in ends])
    text = visible(" ".join(text.split()))
    return text if len(text) <= characters else f"{text[:characters]}…"


def _draw_lengths(axes: Axes, report: PackingReport) -> None:
    firsts = [first for first, _ in report.length_bins]
    counts = [count for _, count in report.length_bins]
    fill_rows = [first >= report.seq_len for first in firsts]
    colours = [INK if fills else "#a9b0ba" for fills in fill_rows]
    bars = axes.bar(range(len(firsts)), counts, width=0.85, color=colours)
    axes.bar_label(bars, [f"{count:,}" for count in counts], fontsize=8, color=FAINT)
    axes.set_xticks(range(len(firsts)), [f"{first:,}+" for first in firsts], fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(-0.6, max(len(firsts), 6) - 0.4)  # a few bars are not to be as wide as the picture
    axes.margins(y=0.2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylabel("documents", rotation=0, ha="right", va="center")
    dark = f" (dark: no shorter than a row of {report.seq_len:,})" if any(fill_rows) else ""
    axes.set_xlabel(f"tokens in a document of {report.name or 'the data'}{dark}", parse_math=False)
