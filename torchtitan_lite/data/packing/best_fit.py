"""Best-fit decreasing: the longest document first, each into the row with the least free space that still takes it.

Rows have two limits, tokens and documents, and going by length alone leaves the shortest documents to the end, where
they fill rows by their number and not by their tokens. Where that happens, they are bundled with longer ones first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np


def best_fit_rows(lengths: np.ndarray, seq_len: int, max_documents: int) -> np.ndarray:
    """Row of each document, [documents] int64; rows count from 0 and each has a document.

    Among documents of equal length the first comes first; among rows with equal space, the last one to get it.

    Args:
        lengths: tokens of each document, [documents] int64, 1 to seq_len, in any order.
        seq_len: tokens per row.
        max_documents: a row closes when it holds this many.
    """
    rows = _rows_of_bundles(np.arange(len(lengths)), lengths, seq_len, max_documents)
    fewest = max(-(-int(lengths.sum()) // seq_len), -(-len(lengths) // max_documents))
    if len(lengths) == 0 or rows.max() < fewest:
        return rows
    closed_early = (np.bincount(rows) == max_documents) & (np.bincount(rows, weights=lengths) < seq_len)
    crowded = closed_early[rows] & (lengths * max_documents < seq_len)
    if crowded.any():
        bundles = _bundle(lengths, crowded, seq_len, max_documents)
        rows_of_bundles = _rows_of_bundles(bundles, lengths, seq_len, max_documents)
        if rows_of_bundles.max() < rows.max():
            return rows_of_bundles
    return rows


def _bundle(lengths: np.ndarray, crowded: np.ndarray, seq_len: int, max_documents: int) -> np.ndarray:
    """Bundle of each document, [documents] int64, named by one of its members; most are alone in theirs.

    Every crowded document joins one that is not, as long as the bundle fits a row and its documents have an average
    length of at least ``seq_len / max_documents``: rows of such bundles run out of space before they run out of
    documents. Both are taken shortest first, so that bundles become no longer than they need to be.
    """
    bundle = np.arange(len(lengths))
    shortest_first = np.argsort(lengths, kind="stable")
    hosts = iter(shortest_first[~crowded[shortest_first]].tolist())
    host, used, spare = -1, seq_len, 0  # spare: tokens x max_documents beyond the average that the bundle must have
    for document in shortest_first[crowded[shortest_first]].tolist():
        length = int(lengths[document])
        lacking = seq_len - length * max_documents
        while spare < lacking or used + length > seq_len:
            host = next(hosts, -1)
            if host < 0:
                return bundle
            used = int(lengths[host])
            spare = used * max_documents - seq_len
        bundle[document] = host
        used += length
        spare -= lacking
    return bundle


def _rows_of_bundles(bundle: np.ndarray, lengths: np.ndarray, seq_len: int, max_documents: int) -> np.ndarray:
    """Row of each document, best-fit decreasing by the length of bundles; of equal ones that with fewest documents."""
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    length = np.bincount(bundle, weights=lengths, minlength=len(lengths)).astype(np.int64)
    documents = np.bincount(bundle, minlength=len(lengths))
    order = np.lexsort((documents, -length))
    order = order[documents[order] > 0]
    row = np.empty(len(lengths), dtype=np.int64)
    row[order] = _best_fit_decreasing(length[order], documents[order], seq_len, max_documents)
    return row[bundle]


def _best_fit_decreasing(lengths: np.ndarray, documents: np.ndarray, seq_len: int, max_documents: int) -> np.ndarray:
    """Row of each bundle, [bundles] int64.

    Equal bundles that come to one row are laid at once: as long as it takes another, it is still the row with the least
    space. A bundle of several documents is of at least average length, and so are all before it; so a row with space
    for its tokens has room for its documents too.

    Args:
        lengths: tokens of each bundle, falling.
        documents: documents in each bundle, rising where lengths are equal.
    """
    firsts = np.flatnonzero((np.diff(lengths, prepend=-1) != 0) | (np.diff(documents, prepend=-1) != 0))
    runs = (lengths[firsts].tolist(), documents[firsts].tolist(), np.diff(firsts, append=len(lengths)).tolist())
    shortest = int(lengths[-1])

    spaces: list[int] = []  # distinct free spaces of the open rows, rising
    open_rows: defaultdict[int, list[int]] = defaultdict(list)  # the rows that have a space
    room: list[int] = []  # documents that each row still takes
    laid_rows: list[int] = []  # bundles come to rows in groups: row and number of bundles of each
    laid_counts: list[int] = []
    for length, weight, count in zip(*runs, strict=True):
        at = bisect_left(spaces, length)
        while count and at < len(spaces):
            space = spaces[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del spaces[at]
            taken = min(space // length, room[row] // weight, count)
            laid_rows.append(row)
            laid_counts.append(taken)
            count -= taken
            space -= taken * length
            room[row] -= taken * weight
            if space >= shortest and room[row]:
                if not open_rows[space]:
                    insort(spaces, space)
                    at += 1
                open_rows[space].append(row)
        while count:  # twice at most: rows with as many as they take, and one with what is left
            taken = min(seq_len // length, max_documents // weight, count)
            new_rows = range(len(room), len(room) + count // taken)
            laid_rows.extend(new_rows)
            laid_counts.extend([taken] * len(new_rows))
            count -= taken * len(new_rows)
            space = seq_len - taken * length
            room.extend([max_documents - taken * weight] * len(new_rows))
            if space >= shortest and room[-1]:
                if not open_rows[space]:
                    insort(spaces, space)
                open_rows[space].extend(new_rows)
    return np.repeat(laid_rows, laid_counts)
