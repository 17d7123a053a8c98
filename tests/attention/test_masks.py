"""Masks from document ids, against the rule applied pair by pair and against offsets written by hand."""

import pytest
import torch
from naive import brute_force_mask, document_ids, segments

from torchtitan_lite.attention.masks import MaskSpec, cumulative_lengths, dense_mask, document_boundaries, first_keys

ROWS = [[5, 1, 4], [13], [1, 1, 1, 6]]  # seq 13: with padding 3, 0 and 4
DOCUMENT = MaskSpec()
CAUSAL = MaskSpec(document=False)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 13, 50])
@pytest.mark.parametrize("documents", [True, False])
def test_dense_mask_is_the_rule_pair_by_pair(documents, window):
    ids = document_ids(ROWS, 13)
    mask = dense_mask(ids, MaskSpec(document=documents, sliding_window=window))
    assert mask.shape == (3, 1, 13, 13)
    assert torch.equal(mask[:, 0], brute_force_mask(ids, documents=documents, window=window))


def test_first_keys_by_hand():
    ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    assert first_keys(ids, DOCUMENT).tolist() == [[0, 0, 0, 3, 3, 5, 5]]
    assert first_keys(ids, MaskSpec(sliding_window=2)).tolist() == [[0, 0, 1, 3, 3, 5, 5]]
    assert first_keys(ids, MaskSpec(document=False, sliding_window=3)).tolist() == [[0, 0, 0, 1, 2, 3, 4]]


def test_no_query_is_left_without_a_key():
    ids = document_ids([[3], []], 6)  # the second row is padding alone
    for window in (None, 1, 3):
        assert dense_mask(ids, MaskSpec(sliding_window=window)).any(dim=-1).all()


def test_row_starts_are_boundaries_even_where_ids_continue():
    ids = torch.zeros(2, 3, dtype=torch.int32)
    assert document_boundaries(ids).tolist() == [[True, False, False]] * 2
    assert cumulative_lengths(ids, DOCUMENT, max_documents_per_row=1).tolist()[:3] == [0, 3, 6]


def test_offsets_by_hand():
    ids = document_ids([[3, 2], [2, 3]], 5)
    assert cumulative_lengths(ids, DOCUMENT, max_documents_per_row=2).tolist() == [0, 3, 5, 7, 10, 10, 10]
    assert cumulative_lengths(ids, CAUSAL, max_documents_per_row=2).tolist() == [0, 5, 10, 10, 10, 10, 10]


def test_microbatches_get_their_own_offsets_and_masks():
    ids = document_ids([[3, 2], [2, 3]], 5)
    first, second = ids.split(1)
    assert cumulative_lengths(first, DOCUMENT, 2).tolist() == [0, 3, 5, 5]
    assert cumulative_lengths(second, DOCUMENT, 2).tolist() == [0, 2, 5, 5]
    whole = dense_mask(ids, DOCUMENT)
    assert torch.equal(torch.cat([dense_mask(first, DOCUMENT), dense_mask(second, DOCUMENT)]), whole)


def test_padding_takes_the_place_kept_for_it():
    ids = document_ids([[1, 1]], 4)
    assert cumulative_lengths(ids, DOCUMENT, max_documents_per_row=2).tolist() == [0, 1, 2, 4]


def test_offsets_have_one_shape_whatever_the_documents():
    few, many = document_ids([[8], [8]], 8), document_ids([[1] * 8, [1] * 8], 8)
    for cap, places in ((8, 2 * 9 + 1), (None, 2 * 9 + 1), (11, 2 * 12 + 1)):
        for ids in (few, many):
            offsets = cumulative_lengths(ids, DOCUMENT, cap)
            assert offsets.shape == (places,) and offsets.dtype == torch.int32


def test_offsets_of_random_rows_are_the_segments():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(0, 2, (3, 17), generator=generator).cumsum(1).to(torch.int32)
        expected = [row * 17 + start for row in range(3) for start, _ in segments(ids[row].tolist())]
        offsets = cumulative_lengths(ids, DOCUMENT, None).tolist()
        assert offsets[: len(expected)] == expected and set(offsets[len(expected) :]) == {51}


def test_nothing_is_read_back_from_the_device():
    # a meta tensor has no values: whatever waited for one would fail
    ids = torch.zeros(2, 8, dtype=torch.int32, device="meta")
    spec = MaskSpec(sliding_window=3)
    assert cumulative_lengths(ids, spec, 3).shape == (9,)
    assert dense_mask(ids, spec).shape == (2, 1, 8, 8)


def test_more_documents_than_the_table_holds():
    ids = document_ids([[1, 1, 1, 1]], 4)
    assert cumulative_lengths(ids, DOCUMENT, max_documents_per_row=3).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"4 documents .* exceed the 3 that max_documents_per_row=2"):
        cumulative_lengths(ids, DOCUMENT, max_documents_per_row=2)


def test_an_end_token_inside_a_document_starts_no_other():
    # tokens [1, 2, E, 3, 4, 5, 6] in documents of 5 and 2: only the ids count
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1]], dtype=torch.int32)
    expected = torch.zeros(7, 7, dtype=torch.bool)
    expected[:5, :5] = torch.ones(5, 5, dtype=torch.bool).tril()
    expected[5:, 5:] = torch.ones(2, 2, dtype=torch.bool).tril()
    assert torch.equal(dense_mask(ids, DOCUMENT)[0, 0], expected)
    assert cumulative_lengths(ids, DOCUMENT, 2).tolist() == [0, 5, 7, 7]


def test_impossible_rules_are_refused():
    with pytest.raises(ValueError, match="causal=False"):
        MaskSpec(causal=False)
    with pytest.raises(ValueError, match="sliding_window=0"):
        MaskSpec(sliding_window=0)
