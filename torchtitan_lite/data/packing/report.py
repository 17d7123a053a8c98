"""What a packing plan makes of a data set, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow

from torchtitan_lite.data.packing.plan import PackingPlan
from torchtitan_lite.data.supervision import is_supervised

BAR_WIDTH = 50


@dataclass(frozen=True)
class PackingReport:
    """Counts of a plan. Fractions are of 1, and 0 where there is nothing to divide by."""

    name: str  # of the data, may be empty
    seq_len: int
    documents: int  # in the rows; a split one counts once
    empty_documents: int  # bad records are not among them
    bad_records: int
    split_documents: int  # in more than one piece
    truncated_documents: int
    dropped_documents: int
    tokens: int  # in the rows
    tokens_lost: int  # by truncating and dropping
    rows: int
    segments: int  # documents of all rows; a split one counts in each row
    max_documents_in_row: int
    attended_pairs: int  # (query, key) pairs of the block-causal mask, padding left out
    length_bins: tuple[tuple[int, int], ...]  # (n, documents of n to 2n - 1 tokens), n = 1, 2, 4, ...; before any cut
    targets: int  # tokens to be predicted, in the rows: those with one before them, of chats the supervised ones
    untrained_documents: int  # truncated so that no target is left

    @property
    def documents_per_row(self) -> float:
        return _ratio(self.segments, self.rows)

    @property
    def padding_fraction(self) -> float:
        """Share of the rows' positions that hold no token."""
        return _ratio(self.rows * self.seq_len - self.tokens, self.rows * self.seq_len)

    @property
    def target_fraction(self) -> float:
        """Share of the rows' positions that have a target."""
        return _ratio(self.targets, self.rows * self.seq_len)

    @property
    def supervised_fraction(self) -> float:
        """Share of the rows' tokens that are to be predicted."""
        return _ratio(self.targets, self.tokens)

    @property
    def lost_fraction(self) -> float:
        """Share of the data's tokens that are in no row."""
        return _ratio(self.tokens_lost, self.tokens + self.tokens_lost)

    @property
    def mask_density(self) -> float:
        """Attended pairs as a share of those that plain causal attention has."""
        return _ratio(self.attended_pairs, self.rows * (self.seq_len * (self.seq_len + 1) // 2))

    def summary(self) -> str:
        """One line for the log."""
        special = [f"{self.split_documents:,} split", f"{self.empty_documents:,} empty"]
        special += [f"{self.bad_records:,} bad"] * (self.bad_records > 0)
        special += [f"{self.truncated_documents:,} truncated"] * (self.truncated_documents > 0)
        special += [f"{self.untrained_documents:,} without a target left"] * (self.untrained_documents > 0)
        special += [f"{self.dropped_documents:,} dropped"] * (self.dropped_documents > 0)
        lost = f", {self.tokens_lost:,} tokens ({self.lost_fraction:.2%}) lost" if self.tokens_lost else ""
        return (
            f"{self.name + ': ' if self.name else ''}{self.documents:,} documents ({'; '.join(special)}), "
            f"{self.tokens:,} tokens in {self.rows:,} rows: {self.documents_per_row:.2f} documents per row, "
            f"{self.padding_fraction:.2%} padding{lost}"
        )

    def lines(self) -> list[str]:
        """All numbers and a histogram of document lengths as plain text, at most 100 columns wide."""
        values = [
            ("documents", f"{self.documents:,}", ""),
            ("  split", f"{self.split_documents:,}", "in more than one piece"),
            ("  truncated", f"{self.truncated_documents:,}", ""),
            ("  untrained", f"{self.untrained_documents:,}", "truncated so that no target is left"),
            ("dropped documents", f"{self.dropped_documents:,}", "longer than a row"),
            ("empty documents", f"{self.empty_documents:,}", "left out"),
            ("bad records", f"{self.bad_records:,}", "left out"),
            ("tokens", f"{self.tokens:,}", ""),
            ("tokens lost", f"{self.tokens_lost:,}", f"{self.lost_fraction:.2%} of all"),
            ("rows", f"{self.rows:,}", f"of {self.seq_len:,} tokens"),
            ("documents per row", f"{self.documents_per_row:.2f}", f"{self.max_documents_in_row:,} at most"),
            ("padding", f"{self.padding_fraction:.2%}", "of all positions"),
            ("targets", f"{self.targets:,}", f"{self.supervised_fraction:.2%} of the tokens"),
            ("mask density", f"{self.mask_density:.2%}", "of plain causal attention's pairs"),
        ]
        title = f"Packing of {self.name}"[:100] if self.name else "Packing"
        width = max(len(value) for _, value, _ in values)
        lines = [title]
        lines += [f"  {label:<19}{value:>{width}}  {remark}".rstrip() for label, value, remark in values]
        return lines + self._histogram_lines()

    def _histogram_lines(self) -> list[str]:
        if not self.length_bins:
            return []
        highest = max(count for _, count in self.length_bins)
        ends = max(len(f"{2 * self.length_bins[-1][0] - 1:,}"), len("to"))
        counts = max(len(f"{highest:,}"), len("documents"))
        lines = [f"  {'tokens':>{ends}}    {'':>{ends}}{'documents':>{counts + 2}}"]
        for first, count in self.length_bins:
            bar = "#" * -(-count * BAR_WIDTH // highest)  # rounded up: a bin that has documents has a bar
            lines.append(f"  {first:>{ends},} to {2 * first - 1:>{ends},}{count:>{counts + 2},}  {bar}".rstrip())
        return lines

    def scalars(self) -> dict[str, float]:
        """Values for TensorBoard."""
        prefix = f"packing/{self.name}/" if self.name else "packing/"
        return {
            f"{prefix}padding(%)": 100 * self.padding_fraction,
            f"{prefix}documents_per_row": self.documents_per_row,
            f"{prefix}tokens_lost(%)": 100 * self.lost_fraction,
            f"{prefix}mask_density(%)": 100 * self.mask_density,
            f"{prefix}supervised(%)": 100 * self.supervised_fraction,
        }


def packing_report(
    plan: PackingPlan,
    lengths: np.ndarray,
    name: str = "",
    bad_records: int = 0,
    targets: np.ndarray | None = None,
) -> PackingReport:
    """The report of a plan.

    Args:
        lengths: [documents] integers, that it was made from.
        bad_records: how many of them are 0 for a reason.
        targets: [segments] integers, the tokens of each to be predicted. None: all but the first.
    """
    length = plan.length.astype(np.int64)
    targets = length - 1 if targets is None else targets
    cut_short = (plan.start == 0) & (length < np.asarray(lengths)[plan.document])
    # A split document may have its targets in another piece; a truncated one has no other.
    untrained = cut_short & (targets == 0) if plan.truncated_documents else np.zeros(0)
    return PackingReport(
        name=name,
        seq_len=plan.seq_len,
        documents=len(lengths) - plan.empty_documents - plan.dropped_documents,
        empty_documents=plan.empty_documents - bad_records,
        bad_records=bad_records,
        split_documents=int(np.count_nonzero(np.bincount(plan.document) > 1)),
        truncated_documents=plan.truncated_documents,
        dropped_documents=plan.dropped_documents,
        tokens=int(length.sum()),
        tokens_lost=plan.tokens_lost,
        rows=plan.num_rows,
        segments=len(length),
        max_documents_in_row=int(np.diff(plan.row_offsets).max(initial=0)),
        attended_pairs=int((length * (length + 1) // 2).sum()),
        length_bins=_length_bins(np.asarray(lengths)),
        targets=int(targets.sum()),
        untrained_documents=int(np.count_nonzero(untrained)),
    )


def segment_targets(plan: PackingPlan, tokens: pyarrow.ChunkedArray) -> np.ndarray:
    """Supervised tokens of each segment of a plan but its first token, which nothing predicts: [segments] int64.

    Args:
        tokens: [documents] lists of int32, as they are stored.
    """
    targets = np.zeros(len(plan.length), dtype=np.int64)
    by_document = np.argsort(plan.document, kind="stable")
    document = np.asarray(plan.document)[by_document]
    first = 0
    for chunk in tokens.chunks:
        segments = by_document[slice(*np.searchsorted(document, [first, first + len(chunk)]))]
        before = np.concatenate([[0], np.cumsum(is_supervised(chunk.values.to_numpy()), dtype=np.int64)])
        begin = chunk.offsets.to_numpy()[plan.document[segments] - first] + plan.start[segments]
        targets[segments] = before[begin + plan.length[segments]] - before[begin + 1]
        first += len(chunk)
    return targets


def _length_bins(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """From the first to the last bin with documents; empty documents are in none."""
    exponents = np.frexp(lengths[lengths > 0].astype(np.float64))[1] - 1  # exact: floor(log2(length))
    counts = np.bincount(exponents).tolist() if len(exponents) else []
    first = next((exponent for exponent, count in enumerate(counts) if count), 0)
    return tuple((2**exponent, count) for exponent, count in enumerate(counts) if exponent >= first)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
