"""What holds for every plan, and each strategy against its rule in the plainest form."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_packing import naive_rows

from torchtitan_lite.data.collator import collate_rows
from torchtitan_lite.data.packing.plan import OVERSIZE_RULES, STRATEGIES, PackingError, PackingSettings, pack

PADDING = -7


@st.composite
def cases(draw):
    """Lengths and settings: few and many documents, short and over-long ones, small and large caps and windows."""
    seq_len = draw(st.integers(1, 40))
    longest = draw(st.sampled_from([max(1, seq_len // 4), seq_len, 4 * seq_len]))
    lengths = draw(st.lists(st.integers(0, longest), max_size=40))
    return lengths, PackingSettings(
        seq_len=seq_len,
        max_documents_per_row=draw(st.sampled_from([1, 2, 3, 5, 100])),
        seed=draw(st.integers(-5, 2**65)),
        strategy=draw(st.sampled_from(STRATEGIES)),
        oversize=draw(st.sampled_from(OVERSIZE_RULES)),
        window=draw(st.sampled_from([1, 2, 5, 12, 1000])),
    )


def plan_or_none(lengths, packing):
    """The plan, or None where the rule ``error`` refuses the lengths, as it must."""
    if packing.oversize == "error" and max(lengths, default=0) > packing.seq_len:
        try:
            pack(np.array(lengths), packing)
        except PackingError:
            return None
        raise AssertionError("over-long documents were accepted")
    return pack(np.array(lengths, dtype=np.int64), packing)


def kept_tokens(lengths, packing):
    """(document, position) of each token that must lie in some row."""
    kept = {"truncate": packing.seq_len, "drop": 0}.get(packing.oversize)
    return [
        (document, position)
        for document, length in enumerate(lengths)
        for position in range(length if length <= packing.seq_len or kept is None else kept)
    ]


@given(cases())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_every_token_lies_in_one_row_or_is_counted_as_lost(case):
    lengths, packing = case
    plan = plan_or_none(lengths, packing)
    if plan is None:
        return
    rows = [plan.row(index) for index in range(plan.num_rows)]
    tokens = sorted((document, start + i) for row in rows for document, start, n in row for i in range(n))
    assert tokens == kept_tokens(lengths, packing)
    assert plan.tokens_lost == sum(lengths) - len(tokens)
    assert plan.empty_documents == lengths.count(0)
    over_long = sum(length > packing.seq_len for length in lengths)
    assert plan.truncated_documents == (over_long if packing.oversize == "truncate" else 0)
    assert plan.dropped_documents == (over_long if packing.oversize == "drop" else 0)

    assert all(0 < len(row) <= packing.max_documents_per_row for row in rows)
    assert all(n > 0 for row in rows for *_, n in row)
    assert [sum(n for *_, n in row) for row in rows] == plan.row_tokens.tolist()
    assert plan.row_tokens.max(initial=0) <= packing.seq_len


@given(cases())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_batches_of_a_plan_keep_documents_apart(case):
    lengths, packing = case
    plan = plan_or_none(lengths, packing)
    if plan is None or plan.num_rows == 0:
        return
    documents = [1000 * index + np.arange(length) for index, length in enumerate(lengths)]  # token = where it is from
    rows = [plan.row(index) for index in range(plan.num_rows)]
    batch = collate_rows(
        [[documents[document][start : start + n] for document, start, n in row] for row in rows],
        seq_len=packing.seq_len,
        pad_id=PADDING,
        max_documents_per_row=packing.max_documents_per_row,
    )
    for row, tokens, labels, ids, positions in zip(rows, *(field.tolist() for field in batch), strict=True):
        place = 0
        for number, (document, start, n) in enumerate(row):
            part = slice(place, place + n)
            expected = [1000 * document + start + i for i in range(n)]
            assert tokens[part] == expected
            assert labels[part] == [*expected[1:], -100]
            assert ids[part] == [number] * n and positions[part] == list(range(n))
            place += n
        rest = packing.seq_len - place
        assert (tokens[place:], labels[place:], ids[place:]) == ([PADDING] * rest, [-100] * rest, [-1] * rest)


@given(cases())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_strategies_equal_their_rules_in_the_plainest_form(case):
    lengths, packing = case
    plan = plan_or_none(lengths, packing)
    if plan is not None:
        assert sorted(plan.row(index) for index in range(plan.num_rows)) == sorted(naive_rows(lengths, packing))
