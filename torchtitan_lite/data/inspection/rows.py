"""A packed row as a person can read it: the text of its documents, and where each begins and ends."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from torchtitan_lite.data.collator import IGNORE_INDEX, Batch
from torchtitan_lite.data.packing.plan import PackingPlan
from torchtitan_lite.data.tokenizer import Tokenizer

COLOURS = (36, 33, 32, 35)
"""ANSI codes of the documents' colours, in turn: those that can be read on dark and light ground."""

NEWLINE, TAB = "↵", "→"
MASKED = "⟦", "⟧"
_BOLD, _DIM, _REVERSED = "1", "2", "7"
_GUTTER = "│ "


class Span(NamedTuple):
    """A document of a row, or its padding."""

    document: int  # PADDING_ID for padding
    start: int
    end: int


@dataclass(frozen=True)
class Row:
    """A row of a batch, and what else is known of it."""

    name: str  # which row it is
    tokens: np.ndarray  # [seq] int64; see Batch for these four
    labels: np.ndarray
    document_ids: np.ndarray
    positions: np.ndarray
    origins: Sequence[str] = ()  # for each document where it comes from; none where that is not known

    @classmethod
    def of(cls, batch: Batch, index: int, name: str, origins: Sequence[str] = ()) -> Row:
        return cls(name, *(field[index].numpy() for field in batch), origins)

    @property
    def is_target(self) -> np.ndarray:
        """Which tokens are to be predicted, [seq] bool: those that are the label of the one before them."""
        return np.concatenate([[False], self.labels[:-1] != IGNORE_INDEX])

    @property
    def spans(self) -> list[Span]:
        """Documents and padding from left to right."""
        starts = np.flatnonzero(np.diff(self.document_ids, prepend=self.document_ids[0] - 1)).tolist()
        return [
            Span(int(self.document_ids[start]), start, end)
            for start, end in zip(starts, [*starts[1:], len(self.document_ids)], strict=True)
        ]

    @property
    def summary(self) -> str:
        documents = sum(span.document >= 0 for span in self.spans)
        tokens, targets = int((self.document_ids >= 0).sum()), int((self.labels != IGNORE_INDEX).sum())
        return (
            f"{counted(documents, 'document')} · {tokens:,} of {len(self.tokens):,} tokens · "
            f"{counted(targets, 'target')} · mask {self.mask_density:.0%} of plain causal attention's pairs"
        )

    @property
    def mask_density(self) -> float:
        """Pairs that its documents attend, as a share of those that plain causal attention has."""
        lengths = [end - start for document, start, end in self.spans if document >= 0]
        seq_len = len(self.tokens)
        return sum(length * (length + 1) for length in lengths) / (seq_len * (seq_len + 1))


def plan_of(rows: Iterable[Row], seq_len: int) -> PackingPlan:
    """A plan that would give these rows, if each of their documents were one of the source."""
    lengths = [[end - start for document, start, end in row.spans if document >= 0] for row in rows]
    length = np.array([length for row in lengths for length in row], dtype=np.int32)
    return PackingPlan(
        seq_len,
        row_offsets=np.cumsum([0, *map(len, lengths)], dtype=np.int64),
        document=np.arange(len(length)),
        start=np.zeros_like(length),
        length=length,
        empty_documents=0,
    )


def show_value(plan: PackingPlan, most_documents: int) -> np.ndarray:
    """How well each row shows what packing does, [rows] float64, lower is better: several documents, at most
    ``most_documents``, of like length, and little padding."""
    length = plan.length.astype(np.float64) / plan.seq_len
    attended = np.add.reduceat(length**2, plan.row_offsets[:-1])
    padding = 1 - np.add.reduceat(length, plan.row_offsets[:-1])
    return np.where(np.diff(plan.row_offsets) <= most_documents, attended + padding, np.inf)


def counted(number: int, what: str) -> str:
    """``1 token``, ``2,000 tokens``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- text --------------------------------------------------------------------------------------------------------------


def legend(colour: bool) -> str:
    """What the signs in the text of :func:`row_lines` mean."""
    masked = "dim: not trained on" if colour else f"{MASKED[0]} {MASKED[1]} not trained on"
    return f"{NEWLINE} newline, {TAB} tab, {masked}" + (", reversed: special token" if colour else "")


def row_lines(row: Row, tokenizer: Tokenizer, *, width: int, colour: bool) -> list[str]:
    """The documents of a row one below the other, each with a head line; at most ``width`` columns."""
    lines = _wrapped(f"{row.name} · {row.summary}", width, _BOLD if colour else "")
    for document, start, end in row.spans:
        if document < 0:
            lines.append(f"... {end - start:,} padding")
            continue
        tint = str(COLOURS[document % len(COLOURS)]) if colour else ""
        lines += _wrapped("── " + _head(row, document, start, end), width, f"{_BOLD};{tint}" if colour else "")
        cells = _cells(_runs(row, start, end, tokenizer), mark_masked=not colour)
        for line in _broken(cells, max(width - len(_GUTTER), 8)):
            lines.append(_painted(_GUTTER, tint) + "".join(_styled(line, tint)))
    return lines


def token_table(row: Row, tokenizer: Tokenizer) -> list[str]:
    """A line a token: its place in the row, id, text, label, document and position in the document."""
    lines = [f"{'place':>7}{'token':>9}  {'text':<24}{'label':>9}{'document_id':>13}{'position':>10}"]
    for document, start, end in row.spans:
        if document < 0:
            lines.append(f"... {end - start:,} padding")
            continue
        for place in range(start, end):
            token, before = int(row.tokens[place]), int(row.tokens[place - 1]) if place > start else None
            text = _padded(token_text(token, before, tokenizer), 24)
            lines.append(f"{place:>7}{token:>9}  {text}{row.labels[place]:>9}{document:>13}{row.positions[place]:>10}")
    return lines


def token_text(token: int, before: int | None, tokenizer: Tokenizer) -> str:
    """The text that a token adds to the one before it; its entry in the vocabulary where that is no whole character."""
    head = "" if before is None else tokenizer.decode([before])
    if "\ufffd" in head:  # the one before is no whole character
        head, before = "", None
    both = tokenizer.decode([token] if before is None else [before, token])
    text = both[len(head) :]
    if not both.startswith(head) or not text or "\ufffd" in text:
        return visible(tokenizer.backend.id_to_token(token) or "")
    return visible(text)


def visible(text: str) -> str:
    """``text`` with every character that would move the cursor, colour the terminal or not be seen spelled out."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\n":
        return NEWLINE
    if character == "\t":
        return TAB
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character


def _head(row: Row, document: int, start: int, end: int) -> str:
    targets = int((row.labels[start:end] != IGNORE_INDEX).sum())
    parts = [
        f"document {document}",
        f"positions {row.positions[start]}-{row.positions[end - 1]}",
        counted(end - start, "token"),
        counted(targets, "target"),
        *row.origins[document : document + 1],
    ]
    return " · ".join(parts)


class _Run(NamedTuple):
    """Text of neighbouring tokens of one kind."""

    text: str
    masked: bool
    special: bool


class _Cell(NamedTuple):
    """What is put on the terminal for one character of text."""

    shown: str
    columns: int
    masked: bool
    special: bool
    ends_line: bool = False


def _runs(row: Row, start: int, end: int, tokenizer: Tokenizer) -> Iterator[_Run]:
    """A document's text, cut where tokens begin or cease to be masked (nothing is trained to predict them) or special.

    A token may be part of a character. So the document is decoded as a whole, and a cut that meets a character is put
    before it.
    """
    tokens = row.tokens[start:end]
    masked = ~row.is_target[start:end]
    special = np.isin(tokens, _special_ids(tokenizer))
    cuts = np.flatnonzero(np.diff(masked.astype(int) + 2 * special, prepend=-1)).tolist()
    text = tokenizer.decode(tokens.tolist())
    places = [_in_common(tokenizer.decode(tokens[:cut].tolist()), text) for cut in cuts[1:]]
    places = list(accumulate(places, max))
    for cut, place, next_place in zip(cuts, [0, *places], [*places, len(text)], strict=True):
        yield _Run(text[place:next_place], bool(masked[cut]), bool(special[cut]))


def _in_common(left: str, right: str) -> int:
    """Characters that two texts have in common at their beginning."""
    differ = (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differ, min(len(left), len(right)))


def _special_ids(tokenizer: Tokenizer) -> list[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return [token for token, content in added.items() if content.special]


def _cells(runs: Iterable[_Run], mark_masked: bool) -> Iterator[_Cell]:
    was_masked = False
    for text, masked, special in runs:
        if mark_masked and masked != was_masked:
            yield _Cell(MASKED[0 if masked else 1], 1, masked, False)
        was_masked = masked
        for character in text:
            shown = _visible(character)
            yield _Cell(shown, _columns(shown), masked, special, ends_line=character == "\n")
    if mark_masked and was_masked:
        yield _Cell(MASKED[1], 1, True, False)


def _columns(text: str) -> int:
    """Columns that a terminal gives to text."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _broken(cells: Iterable[_Cell], width: int) -> Iterator[list[_Cell]]:
    """Lines: they end with the text's, or else at ``width`` columns."""
    line: list[_Cell] = []
    used = 0
    for cell in cells:
        if used + cell.columns > width:
            yield line
            line, used = [], 0
        line.append(cell)
        used += cell.columns
        if cell.ends_line:
            yield line
            line, used = [], 0
    if line:
        yield line


def _styled(line: list[_Cell], tint: str) -> Iterator[str]:
    """The text of a line, in colour where there is a tint."""
    start = 0
    for end in range(1, len(line) + 1):
        style = line[start].masked, line[start].special
        if end == len(line) or (line[end].masked, line[end].special) != style:
            codes = [tint, *[_DIM] * line[start].masked, *[_REVERSED] * line[start].special]
            yield _painted("".join(cell.shown for cell in line[start:end]), ";".join(codes) if tint else "")
            start = end


def _wrapped(text: str, width: int, codes: str) -> list[str]:
    lines = textwrap.wrap(text, max(width, 8), subsequent_indent="   ", break_on_hyphens=False)
    return [_painted(line, codes) for line in lines]


def _painted(text: str, codes: str) -> str:
    return f"\033[{codes}m{text}\033[0m" if codes else text


def _padded(text: str, columns: int) -> str:
    """Cut or filled up to a number of columns."""
    while _columns(text) > columns:
        text = text[:-2] + "…"
    return text + " " * (columns - _columns(text))
