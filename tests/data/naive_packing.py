"""Each packing strategy's rule in its plainest form, row by row and piece by piece."""

from torchtitan_lite.data.packing.plan import permutation


def naive_rows(lengths, packing):
    """Rows of (document, start, length), in any order."""
    seq_len, rows, pending = packing.seq_len, [], []
    strategy = {"best_fit": best_fit, "greedy": greedy, "split": end_to_end, "none": one_per_row}[packing.strategy]
    for window, first in enumerate(range(0, len(lengths), packing.window)):
        in_window = lengths[first : first + packing.window]
        for index in permutation(len(in_window), packing.seed, 0, window).tolist():
            start, length = 0, in_window[index]
            if length > seq_len and packing.oversize in ("truncate", "drop"):
                length = seq_len if packing.oversize == "truncate" else 0
            while length >= seq_len and packing.strategy != "split":
                rows.append([(first + index, start, seq_len)])
                start, length = start + seq_len, length - seq_len
            if length:
                pending.append((first + index, start, length))
        closed, pending = strategy(pending, packing, is_last=first + packing.window >= len(lengths))
        rows += closed
    assert not pending
    return rows


def used(row):
    return sum(length for *_, length in row)


def best_fit(pieces, packing, is_last):
    rows = naive_best_fit([length for *_, length in pieces], packing.seq_len, packing.max_documents_per_row)
    rows = [[pieces[index] for index in sorted(row)] for row in rows]
    carried, documents = [], 0
    for row in sorted(rows, key=used):
        documents += len(row)
        if is_last or documents > packing.window or used(row) == packing.seq_len:
            break
        carried.append(row)
    return [row for row in rows if row not in carried], [piece for row in rows if row in carried for piece in row]


def greedy(pieces, packing, is_last):
    rows = []
    for piece in pieces:
        if not rows or used(rows[-1]) + piece[2] > packing.seq_len or len(rows[-1]) == packing.max_documents_per_row:
            rows.append([])
        rows[-1].append(piece)
    return (rows, []) if is_last or not rows else (rows[:-1], rows[-1])


def end_to_end(pieces, packing, is_last):
    rows, row = [], []
    for document, start, length in pieces:
        for token in range(start, start + length):  # token by token
            if row and row[-1][0] == document and token > start:
                row[-1] = (document, row[-1][1], row[-1][2] + 1)
            else:
                row.append((document, token, 1))
            if used(row) == packing.seq_len:
                rows.append(row)
                row = []
        if len(row) == packing.max_documents_per_row:
            rows.append(row)
            row = []
    return (rows + [row] * bool(row), []) if is_last else (rows, row)


def one_per_row(pieces, packing, is_last):
    return [[piece] for piece in pieces], []


def naive_placing(bundles, lengths, seq_len, cap):
    """Rows of document indices, in the order they were opened. Bundles are lists of document indices."""
    rows, changed = [], []
    size = {id(bundle): sum(lengths[d] for d in bundle) for bundle in bundles}
    for clock, bundle in enumerate(sorted(bundles, key=lambda b: (-size[id(b)], len(b)))):
        free = [seq_len - sum(lengths[d] for d in row) for row in rows]
        fitting = [r for r in range(len(rows)) if free[r] >= size[id(bundle)] and len(rows[r]) + len(bundle) <= cap]
        if not fitting:
            rows.append([])
            changed.append(clock)
            fitting, free = [len(rows) - 1], [*free, seq_len]
        best = min(fitting, key=lambda r: (free[r], -changed[r]))
        rows[best] += bundle
        changed[best] = clock
    return rows


def naive_bundles(rows, lengths, seq_len, cap):
    crowded = {
        d for row in rows if len(row) == cap and sum(lengths[d] for d in row) < seq_len for d in row
        if lengths[d] * cap < seq_len
    }  # fmt: skip
    shortest_first = sorted(range(len(lengths)), key=lambda d: lengths[d])
    bundles = [[d] for d in shortest_first if d not in crowded]
    current = 0
    for document in [d for d in shortest_first if d in crowded]:
        while current < len(bundles):
            total = sum(lengths[d] for d in bundles[current]) + lengths[document]
            if total <= seq_len and total / (len(bundles[current]) + 1) >= seq_len / cap:
                bundles[current].append(document)
                break
            current += 1
        else:
            bundles.append([document])
    return sorted(bundles)  # by their first member, as documents that are alone lie in the order given


def naive_best_fit(lengths, seq_len, cap):
    """The rule in its plainest form: rows of document indices, in the order they were opened."""
    rows = naive_placing([[d] for d in range(len(lengths))], lengths, seq_len, cap)
    bundles = naive_bundles(rows, lengths, seq_len, cap)
    bundled = naive_placing(bundles, lengths, seq_len, cap)
    return bundled if len(bundled) < len(rows) else rows
