import numpy as np
import pytest
import torch

from torchtitan_lite.data.collator import Batch, collate_rows, num_targets
from torchtitan_lite.data.supervision import mark


def collate(rows, seq_len=8, cap=16):
    documents = [[np.array(document, dtype=np.int32) for document in row] for row in rows]
    return collate_rows(documents, seq_len=seq_len, pad_id=1, max_documents_per_row=cap)


def test_contract_worked_out_by_hand():
    batch = collate([[[5, 6, 7], [8, 9, 10, 11]], [[2] * 8]])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 10, 11, 1], [2] * 8]
    assert batch.labels.tolist() == [[6, 7, -100, 9, 10, 11, -100, -100], [2] * 7 + [-100]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1], [0] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]
    assert [field.dtype for field in batch] == [torch.int64, torch.int64, torch.int32, torch.int32]
    assert num_targets(batch) == 5 + 7


def test_documents_do_not_depend_on_their_tokens():
    end = 1  # a document may hold the end token in its middle, and one that was cut has none
    batch = collate([[[7, 7, end, 3, 4], [5, 6]]], seq_len=7)
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert collate([[[7, end], [7, 7], [7, end]]]).document_ids.tolist() == [[0, 0, 1, 1, 2, 2, -1, -1]]


def test_no_label_crosses_a_boundary():
    first, second = (collate([[[5, 6, 7], [start, 9]]]).labels for start in (8, 30))
    assert first[0].tolist() == [6, 7, -100, 9, -100, -100, -100, -100]
    assert torch.equal(first, second)  # what document B starts with is no target of document A


def test_targets_are_counted_after_the_shift():
    assert num_targets(collate([[[3] * 16]] * 8, seq_len=16)) == 120


def test_one_token_documents_and_padding_rows_have_no_target():
    batch = collate([[[4], [5], [6]], []], seq_len=4)
    assert num_targets(batch) == 0
    assert batch.document_ids.tolist() == [[0, 1, 2, -1], [-1] * 4]
    assert batch.positions.tolist() == [[0] * 4, [0] * 4]


def test_batches_share_nothing():
    document = np.array([5, 6, 7], dtype=np.int32)
    padded = collate_rows([[document]], seq_len=8, pad_id=1, max_documents_per_row=4)
    before = [field.clone() for field in padded]
    full = collate_rows([[document, document]], seq_len=6, pad_id=1, max_documents_per_row=4)
    for field in full:
        field.fill_(99)
    assert all(map(torch.equal, padded, before)) and document.tolist() == [5, 6, 7]
    again = collate_rows([[document]], seq_len=8, pad_id=1, max_documents_per_row=4)
    assert isinstance(again, Batch) and all(map(torch.equal, again, before))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[5] * 6, [5] * 3], "row 1: its documents have 9 tokens, more than seq_len=8"),
        ([[5]] * 4, "row 1: 4 documents, more than max_documents_per_row=3"),
        ([[5], [], [5]], "row 1: document 1 is empty"),
    ],
)
def test_rows_that_break_the_contract(row, message):
    with pytest.raises(ValueError, match=message):
        collate([[[5]], row], cap=3)


def test_a_prompt_has_no_labels_and_the_first_token_of_the_answer_has_one():
    chat = mark([10, 11, 12, 13, 20, 21, 22], np.arange(7) >= 4)
    batch = collate([[chat.tolist(), [5, 6]]], seq_len=10)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22, 5, 6, 1]]
    assert batch.labels.tolist() == [[-100, -100, -100, 20, 21, 22, -100, 6, -100, -100]]
    assert num_targets(batch) == 3 + 1


def test_rows_do_not_share_their_marks():
    chat, text = mark([3, 4], np.array([False, False])), np.array([3, 4], dtype=np.int32)
    first, second = collate([[chat]]), collate([[text]])
    assert num_targets(first) == 0 and num_targets(second) == 1
    assert first.tokens.tolist() == second.tokens.tolist()
