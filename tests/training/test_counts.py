from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_run import TOY

from torchtitan_lite.data.collator import collate_rows
from torchtitan_lite.distributed.mesh import Degrees, init_distributed, world_from_environment
from torchtitan_lite.training.counts import Counts, StepLoss


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


def summed(degrees: Degrees) -> tuple[Counts, StepLoss]:
    """Two data-parallel ranks: one row of 8 tokens in documents of 3 and 4 on the first, one of 8 on the second."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    place = degrees.place(world.rank)
    lengths = [[3, 4], [8]][place.data_parallel_rank(degrees)]
    rows = [[np.arange(length) for length in lengths]]
    batch = collate_rows(rows, seq_len=8, pad_id=0, max_documents_per_row=4)
    args = replace(TOY, n_layers=2, attention="sdpa_block_causal")
    # 10 and 7 by data-parallel rank; halves of it on context-parallel ranks, all of it on the last stage only.
    held = [10.0, 7.0][place.data_parallel_rank(degrees)] / degrees.cp * (place.pp == degrees.pp - 1)
    loss = StepLoss.over_ranks(torch.tensor(held), [batch], args, degrees, place)
    return Counts.of([batch], args).over_ranks(place, degrees), loss


@pytest.mark.parametrize(
    ("degrees", "imbalance"),
    [  # pairs in a layer: 6 + 10 and 36; under cp 2 the outer and inner quarters of the row:
        (Degrees(dp_shard=2), 36 / 26),
        # 1 + 2 of the first document, 4 of the second (and padding); 3, 1 + 2 + 3; 1 + 2 + 7 + 8; 3 + 4 + 5 + 6
        (Degrees(dp_shard=2, cp=2), 18 / (52 / 4)),
        (Degrees(dp_shard=2, tp=2), 36 / 26),
        (Degrees(dp_replicate=2, pp=2), 36 / 26),
    ],
)
def test_each_row_is_counted_once_in_every_layout(rank_pool, degrees, imbalance):
    for counts, loss in rank_pool.run(degrees.world_size, summed, degrees):
        assert counts == Counts(targets=2 + 3 + 7, tokens=15, documents=3, document_pairs=52, pairs=104)
        assert loss.mean == pytest.approx(17 / 12)
        assert loss.max == pytest.approx(10 / 5)
        assert loss.attention_imbalance == pytest.approx(imbalance)


def disagreeing() -> str:
    """Two tensor-parallel ranks that have read rows of one and of two documents."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    degrees = Degrees(tp=2)
    rows = [[[np.arange(7)]], [[np.arange(3), np.arange(4)]]][world.rank]
    batch = collate_rows(rows, seq_len=8, pad_id=0, max_documents_per_row=4)
    try:
        Counts.of([batch], TOY).over_ranks(degrees.place(world.rank), degrees)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_share_rows_and_read_others_are_told(rank_pool):
    assert all("have read different ones" in message for message in rank_pool.run(2, disagreeing))
