import hashlib
import time
import tracemalloc

import numpy as np
import pytest

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.packing.plan import (
    OVERSIZE_RULES,
    PACKING_VERSION,
    STRATEGIES,
    PackingError,
    PackingSettings,
    pack,
    packing_settings,
    permutation,
    resolved_max_documents,
)


def plan_of(lengths, seq_len, cap=16, seed=0, **settings):
    return pack(np.array(lengths), PackingSettings(seq_len, cap, seed, **settings))


def rows_of(plan):
    return [plan.row(index) for index in range(plan.num_rows)]


def lognormal(documents, mean=500, sigma=1.0, seed=0):
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, documents)
    return np.maximum(np.rint(draws), 1).astype(np.int64)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_longer_than_two_rows(strategy):
    plan = plan_of([121], 60, strategy=strategy)
    assert rows_of(plan) == [[(0, 0, 60)], [(0, 60, 60)], [(0, 120, 1)]]
    assert (plan.tokens_lost, plan.truncated_documents, plan.dropped_documents) == (0, 0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
def test_over_long_documents_do_not_hold_back_short_ones(strategy, oversize):
    lengths = [1050] * 200 + [3] * 10
    plan = plan_of(lengths, 100, strategy=strategy, oversize=oversize, window=64)
    rows = rows_of(plan)
    pieces = {d: sum(n for row in rows for document, _, n in row if document == d) for d in range(210)}
    expected = {"split": 1050, "truncate": 100, "drop": 0}[oversize]
    assert pieces == {d: expected for d in range(200)} | {d: 3 for d in range(200, 210)}
    assert all(any(n > 1 for *_, n in row) for row in rows)  # each row has a target
    assert plan.tokens_lost == 200 * (1050 - expected)
    assert plan.truncated_documents == (200 if oversize == "truncate" else 0)
    assert plan.dropped_documents == (200 if oversize == "drop" else 0)


def test_error_names_what_is_too_long_and_what_would_work():
    with pytest.raises(PackingError, match=r"^2 of 4 documents are longer .*seq_len=8 .*document 3 with 1,200 tokens"):
        plan_of([8, 9, 0, 1200], 8, oversize="error", window=1)
    with pytest.raises(ValueError, match=r"data\.oversize=split, truncate or drop, or training\.seq_len=1200 or more"):
        plan_of([8, 9, 0, 1200], 8, oversize="error", strategy="split")
    assert plan_of([8, 1, 0], 8, oversize="error").num_rows == 2


def test_best_fit_worked_out_by_hand():
    for seed in range(5):  # 5 goes to 7, which leaves 5, and not to 6, which leaves 6
        rows = rows_of(plan_of([3, 7, 5, 2, 6], 12, seed=seed))
        assert sorted(sorted(n for *_, n in row) for row in rows) == [[2, 3, 6], [5, 7]]


def test_documents_of_badly_filled_rows_go_on_to_the_next_window():
    # Windows of two: 6 + 6 do not fit, so one goes on to meet the 4s.
    plan = plan_of([6, 6, 4, 4], 10, window=2)
    assert sorted(sorted(n for *_, n in row) for row in rows_of(plan)) == [[4, 6], [4, 6]]
    for window in (1, 2, 3, 10, 1000):
        tokens = plan_of([6] * 101, 10, window=window).row_tokens
        assert tokens.tolist() == [6] * 101  # none ever fits; they must come out all the same


def test_full_rows_do_not_go_on_to_the_next_window():
    rows = rows_of(plan_of([6, 4, 4, 6], 10, window=2))
    assert sorted(sorted(document for document, *_ in row) for row in rows) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("seq_len", "cap"), [(2048, 64), (8192, 256)])
@pytest.mark.parametrize("window", [1000, 100_000])
def test_best_fit_takes_hardly_a_row_more_than_needed(seq_len, cap, window):
    for seed in range(4):
        lengths = lognormal(10_000, seed=seed)
        plan = plan_of(lengths, seq_len, cap, seed=seed, window=window)
        fewest = -(-int(lengths.sum()) // seq_len)
        assert plan.num_rows <= fewest + 1
        assert plan.row_tokens.sum() == lengths.sum() and plan.tokens_lost == 0
        positions = plan.num_rows * seq_len
        # Of about 610 rows of 8,192, the one that cannot be full may be more than 0.1%.
        assert 1 - lengths.sum() / positions < max(0.001, 1.5 / fewest)


def test_split_pads_the_last_row_only():
    lengths = [5, 17, 1, 8, 30, 2]
    plan = plan_of(lengths, 10, strategy="split", window=2)
    assert plan.row_tokens.tolist() == [10] * 6 + [3]


def test_cap_closes_rows_and_empty_documents_are_left_out():
    for strategy in ("best_fit", "greedy", "split"):
        plan = plan_of([1, 0, 1, 1, 0, 1, 1], 100, cap=2, strategy=strategy)
        assert sorted(len(row) for row in rows_of(plan)) == [1, 2, 2] and plan.empty_documents == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [[], [0, 0, 0], [50, 60]])
def test_nothing_to_pack(strategy, lengths):
    plan = plan_of(lengths, 10, strategy=strategy, oversize="drop")
    assert plan.num_rows == 0 and plan.row_offsets.tolist() == [0] and len(plan.row_tokens) == 0
    assert (plan.empty_documents, plan.dropped_documents, plan.tokens_lost) == (
        lengths.count(0),
        sum(n > 10 for n in lengths),
        sum(lengths),
    )


@pytest.mark.parametrize("strategy", ["best_fit", "greedy", "split"])
def test_seed_decides_who_lies_together(strategy):
    lengths = np.arange(1, 30).repeat(2)
    plans = [sorted(rows_of(plan_of(lengths, 40, seed=seed, strategy=strategy))) for seed in (0, 0, 1, -1)]
    assert plans[0] == plans[1] and plans[1] != plans[2] != plans[3]


def test_documents_meet_inside_their_window_only():
    plan = plan_of([1] * 30, 10, strategy="greedy", window=10)
    assert sorted(sorted(d for d, *_ in row) for row in rows_of(plan)) == [list(range(n, n + 10)) for n in (0, 10, 20)]


def test_any_integer_type_and_the_types_of_the_plan():
    lengths = [3, 9, 25, 1, 0, 8]
    plans = [plan_of(np.array(lengths, dtype), 10) for dtype in (np.int64, np.int32, np.uint8, np.uint64)]
    assert all(rows_of(plan) == rows_of(plans[0]) for plan in plans)
    types = [array.dtype for array in (plans[1].row_offsets, plans[1].document, plans[1].start, plans[1].length)]
    assert types == [np.int64, np.int64, np.int32, np.int32]


def test_the_same_plan_on_every_machine():
    """A change of any of these digests breaks the resume of saved runs: raise PACKING_VERSION with it."""
    lengths = np.arange(2000) ** 2 % 997**2 // 3000  # 0 to 331
    digests = {}
    for strategy in STRATEGIES:
        plan = plan_of(lengths, 256, seed=42, strategy=strategy, window=300)
        arrays = (plan.row_offsets, plan.document, plan.start.astype(np.int64), plan.length.astype(np.int64))
        digests[strategy] = hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()[:8]
    assert PACKING_VERSION == 2
    assert digests == {"best_fit": "547994a0", "greedy": "d9e21989", "split": "e8001538", "none": "5534da3d"}


def test_permutation_is_of_the_key_alone():
    assert sorted(permutation(50, 3, 1, 0).tolist()) == list(range(50))
    assert len({tuple(permutation(50, *key).tolist()) for key in [(3, 0), (3, 1, 0), (3, 1, 1), (4, 1, 0)]}) == 4
    # Sorted by hand from the generator's raw stream; a change would break the resume of every saved run.
    raw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([42, 1, 0]))).integers(0, 2**64, 6, np.uint64)
    assert permutation(6, 42, 1, 0).tolist() == sorted(range(6), key=lambda i: raw[i]) == [1, 2, 5, 3, 0, 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_million_lengths_in_seconds(strategy):
    lengths = lognormal(1_000_000)
    start = time.perf_counter()
    plan = pack(lengths, PackingSettings(2048, 64, 0, strategy))
    assert time.perf_counter() - start < 30  # 0.2 to 2 s on an idle core
    assert plan.row_tokens.sum() == lengths.sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [np.full(200_000, 1), np.full(200_000, 700), np.array([3, 40_000_000, 2])])
def test_nasty_lengths_in_seconds(strategy, lengths):
    start = time.perf_counter()
    plan = pack(lengths, PackingSettings(2048, 64, 0, strategy))
    assert time.perf_counter() - start < 30
    assert plan.row_tokens.sum() == lengths.sum() and plan.row_tokens.max() <= 2048


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_beside_the_plan_does_not_grow(strategy, monkeypatch):
    monkeypatch.setattr("torchtitan_lite.data.packing.plan._Column.STEP", 64)
    window = lognormal(100, mean=300)

    def scratch(windows):
        lengths = np.tile(window, windows)
        tracemalloc.start()
        plan = pack(lengths, PackingSettings(2048, 64, 0, strategy, window=len(window)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak - sum(array.nbytes for array in (plan.row_offsets, plan.document, plan.start, plan.length))

    # The least of several: what is made once and kept, and what awaits the garbage collector, is not the plan's.
    small, large = (min(scratch(windows) for _ in range(4)) for windows in (50, 250))
    assert large < small + 200 * len(window), (small, large)  # less than a byte for each further document


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -2, 5], "document 1 has a negative length, -2"),
        ([3.0, 2.5], "lengths must be a list of integers, not float64 of shape"),
        ([[3], [2]], r"of shape \(2, 1\)"),
        ([5, 2**31], "document 1 has 2,147,483,648 tokens, more than the 2,147,483,647"),
    ],
)
def test_bad_lengths(lengths, message):
    with pytest.raises(ValueError, match=message):
        plan_of(lengths, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"max_documents_per_row": 0}, "max_documents_per_row=0 must be at least 1"),
        ({"window": -3}, "window=-3 must be at least 1"),
        ({"strategy": "bestfit"}, "strategy='bestfit' must be one of best_fit, greedy, split, none"),
        ({"oversize": "cut"}, "oversize='cut' must be one of split, truncate, drop, error"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PackingSettings(**{"seq_len": 8, "max_documents_per_row": 4, "seed": 0} | settings)


def test_settings_of_a_run():
    config = Config()
    config.training.seq_len, config.training.seed = 512, 7
    config.data.packing, config.data.oversize, config.data.packing_window = "greedy", "drop", 99
    assert packing_settings(config) == PackingSettings(512, 16, 7, "greedy", "drop", 99)
    assert config.data.packing in STRATEGIES and config.data.oversize in OVERSIZE_RULES


@pytest.mark.parametrize(
    ("setting", "seq_len", "expected"), [(0, 2048, 64), (0, 128, 16), (0, 8, 8), (5, 2048, 5), (100, 32, 32)]
)
def test_resolved_max_documents(setting, seq_len, expected):
    config = Config()
    config.data.max_documents_per_row, config.training.seq_len = setting, seq_len
    assert resolved_max_documents(config) == expected
