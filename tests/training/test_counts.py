from dataclasses import replace

import numpy as np
import pytest
from toy_run import TOY

from torchtitan_lite.data.collator import collate_rows
from torchtitan_lite.training.counts import Counts


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({"attention": "sdpa"}, 2 * (28 + 1)),  # plain causal over 7 tokens, then over 1, in two layers
        ({"attention": "sdpa_block_causal"}, 2 * (16 + 1)),
        # Of two layers the first sees 2 tokens: 1 + 2 + 2 and 1 + 2 + 2 + 2.
        (
            {"attention": "sdpa_block_causal", "sliding_window": 2, "sliding_window_pattern": (True, False)},
            (5 + 7 + 1) + (16 + 1),
        ),
    ],
)
def test_two_batches_worked_out_by_hand(changes, pairs):
    """A row of documents of 3 and 4 tokens and one of padding, and a row of one token."""
    batches = [
        collate_rows([[np.arange(3), np.arange(4)]], seq_len=8, pad_id=0, max_documents_per_row=4),
        collate_rows([[np.arange(1)]], seq_len=8, pad_id=0, max_documents_per_row=4),
    ]
    counts = Counts.of(batches, replace(TOY, n_layers=2, **changes))
    assert counts == Counts(targets=5, tokens=8, documents=3, document_pairs=6 + 10 + 1, pairs=pairs)
