"""Which rows are measured on."""

import pytest
from toy_data import write_jsonl

from torchtitan_lite.data.held_out import HeldOutRows
from torchtitan_lite.data.tokenizer import load_tokenizer

# With BOS and EOS a row of 64 tokens, and quarters of one.
TEXTS = [f"{number:062}" for number in range(20)] + [f"{number:014}" for number in range(380)]


@pytest.fixture
def held_out(tmp_path, make_config, character_folder):
    """20 rows of one document and 95 of four, to be measured on with these settings."""
    path = write_jsonl(tmp_path / "held.jsonl", TEXTS)

    def make(seed: int = 1, **validation) -> HeldOutRows:
        config = make_config(path, seq_len=64, local_batch_size=4, seed=seed)
        config.model.hf_assets_path = str(character_folder)
        for name, value in {"dataset_path": str(path), **validation}.items():
            setattr(config.validation, name, value)
        return HeldOutRows(config, load_tokenizer(str(character_folder)))

    return make


def rows_of(held_out: HeldOutRows, dp_degree: int = 1) -> list[list[int]]:
    """Token ids of all rows that are not padding, in an order that depends on no rank."""
    found = []
    for rank in range(dp_degree):
        batches = [batch for _, batch in held_out.batches(rank, dp_degree)]
        assert len(batches) == held_out.num_batches(dp_degree)
        found += [row.tolist() for batch in batches for row in batch.tokens[(batch.document_ids >= 0).any(1)]]
    return sorted(found)


@pytest.mark.parametrize("dp_degree", [1, 3, 64])
@pytest.mark.parametrize("steps", [-1, 5, 1000])
def test_ranks_share_the_same_rows(held_out, dp_degree, steps):
    rows = held_out(steps=steps)
    assert rows.rows == [20 if steps == 5 else 115]
    assert len(rows_of(rows, dp_degree)) == rows.rows[0]
    assert rows_of(rows, dp_degree) == rows_of(held_out(seed=2, steps=steps))


def test_some_rows_are_like_all(held_out):
    """The first rows of the plan are those of the long documents: 20 of 115."""
    few = held_out(steps=10)
    documents = [int(batch.document_ids[row].max()) + 1 for _, batch in few.batches(0, 1) for row in range(4)]
    assert len(documents) == 40
    assert documents.count(1) == pytest.approx(40 * 20 / 115, abs=4) and set(documents) == {1, 4}
