import numpy as np

from torchtitan_lite.data.supervision import is_supervised, mark, tokens_of


def test_a_token_that_is_not_supervised_is_its_complement():
    stored = mark([0, 7, 0, 2**31 - 1, 5], np.array([False, False, True, False, True]))
    assert stored.tolist() == [-1, -8, 0, -(2**31), 5] and stored.dtype == np.int32
    assert tokens_of(stored).tolist() == [0, 7, 0, 2**31 - 1, 5] and tokens_of(stored).dtype == np.int32
    assert is_supervised(stored).tolist() == [False, False, True, False, True]


def test_text_is_stored_as_it_is():
    ids = np.array([0, 3, 9], dtype=np.int32)
    assert mark(ids, np.ones(3, bool)).tolist() == ids.tolist() == tokens_of(ids).tolist()
    assert is_supervised(ids).all()


def test_a_part_has_the_marks_of_its_tokens():
    stored = mark(range(10), np.arange(10) % 3 == 0)
    assert tokens_of(stored[4:8]).tolist() == [4, 5, 6, 7]
    assert is_supervised(stored[4:8]).tolist() == [False, False, True, False]
