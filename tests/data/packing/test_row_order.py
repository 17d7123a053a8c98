"""The order of rows against a heap that takes one row after the other."""

import heapq
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.data.packing import row_order
from torchtitan_lite.data.packing.plan import permutation
from torchtitan_lite.data.packing.row_order import RowOrder


def one_by_one(row_tokens, weights, epochs, seed, count):
    """The rule in exact arithmetic: always the row that is due first, (source, row) each."""

    def rows_of(source):
        tokens_before, epoch = 0, 0
        while not epochs[source] or epoch < epochs[source]:
            for row in permutation(len(row_tokens[source]), seed, 1, epoch, source).tolist():
                tokens = int(row_tokens[source][row])
                yield Fraction(2 * tokens_before + tokens, 2) / weights[source], source, row
                tokens_before += tokens
            epoch += 1

    merged = heapq.merge(*(rows_of(source) for source in range(len(row_tokens))))
    return [(source, row) for (_, source, row), _ in zip(merged, range(count), strict=False)]


def read(order, start, count):
    found = order.rows(start, count)
    return list(zip(found.source.tolist(), found.row.tolist(), strict=True))


WEIGHTS = {1: (3,), 2: (3, 1), 3: (1, 2, 1), 4: (1, 1, 1, 1)}  # shares that are exact in binary, so that ties are ties
sources = st.lists(
    st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 3)), min_size=1, max_size=4
)


@given(sources=sources, seed=st.integers(0, 100), reads=st.lists(st.integers(0, 300), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_any_stretch_is_what_one_row_after_the_other_gives(sources, seed, reads):
    tokens = [np.array(each) for each, _ in sources]
    epochs = [each for _, each in sources]
    weights = WEIGHTS[len(sources)]
    expected = one_by_one(tokens, weights, epochs, seed, 310)
    with mock.patch.object(row_order, "_ROWS_PER_BLOCK", 16):
        order = RowOrder(tokens, weights, epochs, seed)
        assert order.total_rows == (None if 0 in epochs else len(one_by_one(tokens, weights, epochs, seed, 10**6)))
        for start in reads:
            start = min(start, max(len(expected) - 10, 0))
            count = min(10, len(expected) - start)
            assert read(order, start, count) == expected[start : start + count]
            before = expected[:start]
            for source, rows in enumerate(order.rows_read(start).tolist()):
                mine = [row for each, row in before if each == source]
                assert rows == len(mine)
                assert order.tokens_read(start)[source] == sum(int(tokens[source][row]) for row in mine)


def test_blocks_join_without_a_seam(monkeypatch):
    monkeypatch.setattr(row_order, "_ROWS_PER_BLOCK", 16)
    generator = np.random.default_rng(0)
    tokens = [generator.integers(1, 100, size) for size in (50, 7, 90)]
    expected = one_by_one(tokens, (1, 1, 2), (0, 0, 3), 5, 1000)
    order = RowOrder(tokens, (1, 1, 2), (0, 0, 3), 5)
    assert read(order, 0, 1000) == expected
    for start in (999, 15, 16, 17, 500, 0, 321):  # back and forth
        assert read(order, start, 1) == expected[start : start + 1]


def test_shares_are_those_of_tokens_within_a_row():
    generator = np.random.default_rng(1)
    # Rows of one source are ten times as full as those of another; weights ask for 50, 30 and 20% of the tokens.
    tokens = [generator.integers(150, 200, 300), generator.integers(1, 40, 5000), generator.integers(1, 2048, 40)]
    order = RowOrder(tokens, (5, 3, 2), (0, 0, 0), 0)
    for rows in (1000, 5000, 50_000):
        read_so_far = order.tokens_read(rows)
        assert read_so_far / read_so_far.sum() == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    total = order.tokens_read(1000).sum()
    assert np.abs(order.tokens_read(1000) - total * np.array([0.5, 0.3, 0.2])).max() < 2 * 2048


def test_a_source_that_ends_leaves_the_others_their_proportions():
    tokens = [np.full(10, 100), np.full(1000, 100), np.full(1000, 50)]
    order = RowOrder(tokens, (2, 1, 1), (1, 0, 0), 0)
    assert order.rows_read(100)[0] == 10
    early, late = order.tokens_read(12), order.tokens_read(3000) - order.tokens_read(1000)
    assert early[0] / early.sum() == pytest.approx(0.5, abs=0.1)
    assert late[0] == 0 and late[1] / late.sum() == pytest.approx(0.5, abs=0.002)


@pytest.mark.timeout(20)
def test_weights_however_far_apart():
    tokens, weights, epochs = [np.array([3, 5, 2]), np.array([4, 1])], (10**30, 1), (2, 0)
    expected = one_by_one(tokens, weights, epochs, 0, 40)
    assert [source for source, _ in expected[:8]] == [0] * 6 + [1] * 2
    order = RowOrder(tokens, weights, epochs, 0)
    assert read(order, 0, 40) == expected
    assert read(order, 20, 5) == expected[20:25]
    assert order.rows_read(40).tolist() == [6, 34]


def test_epochs_of_one_source_are_its_permutations():
    order = RowOrder([np.arange(1, 21)], (3,), (0,), 7)
    assert [row for _, row in read(order, 0, 60)] == [
        row for epoch in range(3) for row in permutation(20, 7, 1, epoch, 0).tolist()
    ]
    assert read(order, 0, 20) != read(order, 20, 20)


def test_the_end_of_finite_sources():
    order = RowOrder([np.full(3, 5), np.full(4, 5)], (1, 1), (2, 1), 0)
    assert order.total_rows == 10 and len(read(order, 0, 10)) == 10
    with pytest.raises(IndexError, match="Row 10 of a sequence that ends after 10 rows"):
        order.rows(8, 3)
    with pytest.raises(ValueError, match="without rows"):
        RowOrder([np.array([], np.int64)], (1,), (0,), 0)


def test_a_late_start_looks_at_few_epochs(monkeypatch):
    tokens = [np.full(row_order._ROWS_PER_BLOCK * 2, 7), np.full(row_order._ROWS_PER_BLOCK, 7)]
    built, build = [], RowOrder._build_epoch
    monkeypatch.setattr(RowOrder, "_build_epoch", lambda self, *epoch: built.append(epoch) or build(self, *epoch))
    order = RowOrder(tokens, (2, 1), (0, 0), 0)
    per_epoch = sum(map(len, tokens))
    order.rows(60 * per_epoch + per_epoch // 2, 8)
    assert built == [(0, 60), (1, 60)]
