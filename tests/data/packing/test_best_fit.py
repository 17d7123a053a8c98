import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_packing import naive_best_fit

from torchtitan_lite.data.packing.best_fit import best_fit_rows


def as_lists(rows):
    return [sorted(np.flatnonzero(rows == row).tolist()) for row in range(rows.max() + 1)] if len(rows) else []


@st.composite
def cases(draw):
    """Documents of any length, and ones so short that a row of them alone is closed by the cap."""
    seq_len, cap = draw(st.integers(1, 64)), draw(st.integers(1, 12))
    any_length, short = st.integers(1, seq_len), st.integers(1, max(1, seq_len // cap))
    lengths = draw(st.lists(any_length, max_size=25)) + draw(st.lists(short, max_size=40))
    return draw(st.permutations(lengths)), seq_len, cap


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_equals_the_rule_in_its_plainest_form(case):
    lengths, seq_len, cap = case
    rows = as_lists(best_fit_rows(np.array(lengths, dtype=np.int64), seq_len, cap))
    assert rows == [sorted(row) for row in naive_best_fit(lengths, seq_len, cap)]


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_rule_on_many_documents(seed):
    random = np.random.default_rng(seed)
    seq_len, cap = 256, (4, 8, 16)[seed % 3]
    lengths = np.clip(random.lognormal(np.log(256 / cap), 1, 400).astype(np.int64), 1, seq_len)
    rows = best_fit_rows(lengths, seq_len, cap)
    assert as_lists(rows) == [sorted(row) for row in naive_best_fit(lengths.tolist(), seq_len, cap)]


def test_worked_out_by_hand():
    # 7 and 6 open rows; 4 fits beside 6 exactly; 3 fits beside 7; 2, 2, 2 open the third row; 1 joins them.
    assert best_fit_rows(np.array([2, 7, 2, 4, 6, 2, 3, 1]), 10, 4).tolist() == [2, 0, 2, 1, 1, 2, 0, 2]
    # Row 0 is left with 3, row 1 with 2: a document of 2 goes where less is left.
    assert best_fit_rows(np.array([7, 8, 2]), 10, 4).tolist() == [1, 0, 0]


def test_short_documents_are_bundled_where_the_cap_would_waste_rows():
    # By length alone: 8 | 8 | 8 | 8 | 4 x 1 | 4 x 1, though 32 + 8 tokens fill four rows of 10 with 3 documents each.
    lengths = np.array([8] * 4 + [1] * 8)
    rows = best_fit_rows(lengths, 10, 3)
    assert np.bincount(rows, weights=lengths).tolist() == [10] * 4
    assert np.bincount(rows).tolist() == [3] * 4


@pytest.mark.parametrize("mean", [40, 60, 150])
def test_short_documents_leave_little_padding(mean):
    """With a cap of 64 per row of 2,048 tokens, going by length alone pads 1% to 20% of these."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.5, 1, 20_000).round().astype(np.int64), 1, 2048)
    rows = best_fit_rows(lengths, 2048, 64)
    assert np.bincount(rows, weights=lengths).max() <= 2048 and np.bincount(rows).max() <= 64
    assert 1 - lengths.sum() / ((rows.max() + 1) * 2048) < 0.005


def test_no_documents():
    assert best_fit_rows(np.empty(0, dtype=np.int64), 8, 4).tolist() == []
