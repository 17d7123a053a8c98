"""The computed BlockMask against the one torch finds by evaluating every pair, and FlexAttention under it."""

import pytest
import torch
from naive import document_ids, naive_attention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchtitan_lite.attention.flex import BLOCK_SIZE, FlexAttention, block_mask
from torchtitan_lite.attention.masks import MaskSpec, dense_mask

FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
FIELDS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def random_ids(batch: int, seq: int, seed: int) -> torch.Tensor:
    """Documents of random lengths, some rows with padding, one a single document."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(batch):
        longest = [3, seq // 3, seq][(row + seed) % 3]
        lengths, room = [], seq - seed % 2 * 5
        while room > 0:
            lengths.append(min(room, int(torch.randint(1, longest + 1, (1,), generator=generator))))
            room -= lengths[-1]
        rows.append(lengths)
    return document_ids(rows, seq)


def searched(ids: torch.Tensor, spec: MaskSpec, block_size: int):
    def mask_mod(b, h, query, key):
        allowed = key <= query
        if spec.document:
            allowed = allowed & (ids[b, query] == ids[b, key])
        if spec.sliding_window is not None:
            allowed = allowed & (query - key < spec.sliding_window)
        return allowed

    batch, seq = ids.shape
    return create_block_mask(mask_mod, batch, None, seq, seq, device="cpu", BLOCK_SIZE=block_size)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 100, 128, 400])
@pytest.mark.parametrize(
    ("batch", "seq", "block_size"), [(1, 64, 16), (3, 64, 16), (3, 10, 1), (1, 384, 128), (3, 384, 128), (2, 128, 128)]
)
def test_block_mask_is_what_torch_finds(batch, seq, block_size, window, seed):
    ids = random_ids(batch, seq, seed)
    for documents in (True, False):
        spec = MaskSpec(document=documents, sliding_window=window)
        computed, found = block_mask(ids, spec, block_size), searched(ids, spec, block_size)
        assert computed.BLOCK_SIZE == found.BLOCK_SIZE and computed.seq_lengths == found.seq_lengths
        assert torch.equal(computed.to_dense(), found.to_dense())
        for field in FIELDS:
            ours, theirs = getattr(computed, field), getattr(found, field)
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field


def test_blocks_by_hand():
    # two documents of 6 and 10 in blocks of 4: query block 1 holds the seam, block 3 sees block 2 in full
    mask = block_mask(document_ids([[6, 10]], 16), MaskSpec(), block_size=4)
    assert mask.kv_num_blocks.tolist() == [[[1, 2, 2, 2]]]
    assert [mask.kv_indices[0, 0, row, :2].tolist() for row in (1, 2, 3)] == [[0, 1], [1, 2], [1, 3]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 0, 0, 1]]]
    assert mask.full_kv_indices[0, 0, 3, 0] == 2


def test_mask_mod_is_the_dense_mask():
    ids = random_ids(3, 32, seed=1)
    spec = MaskSpec(sliding_window=9)
    mask_mod = block_mask(ids, spec, block_size=16).mask_mod
    row, query, key = torch.meshgrid(torch.arange(3), torch.arange(32), torch.arange(32), indexing="ij")
    assert torch.equal(mask_mod(row, 0, query, key), dense_mask(ids, spec)[:, 0])


def test_microbatches_get_their_own_block_mask():
    ids = document_ids([[3, 5], [6, 2]], 8)
    whole = block_mask(ids, MaskSpec(), block_size=2).to_dense()
    parts = [block_mask(part, MaskSpec(), block_size=2).to_dense() for part in ids.split(1)]
    assert torch.equal(torch.cat(parts), whole) and not torch.equal(*parts)


def test_default_block_size():
    mask = block_mask(torch.zeros(1, 2 * BLOCK_SIZE, dtype=torch.int32), MaskSpec())
    assert mask.BLOCK_SIZE == (BLOCK_SIZE, BLOCK_SIZE) and mask.seq_lengths == (2 * BLOCK_SIZE, 2 * BLOCK_SIZE)


def test_seq_must_be_a_multiple_of_the_block_size():
    with pytest.raises(ValueError, match="seq_len 1025 is not a multiple of the block size 128"):
        block_mask(torch.zeros(1, 1025, dtype=torch.int32), MaskSpec())


def test_block_mask_lies_where_the_tokens_do():
    # the meta device stands for any that is not the default one
    mask = block_mask(torch.zeros(2, 256, dtype=torch.int32, device="meta"), MaskSpec(sliding_window=4))
    assert {getattr(mask, field).device.type for field in FIELDS} == {"meta"}
    assert block_mask(torch.zeros(2, 256, dtype=torch.int32), MaskSpec()).kv_indices.device.type == "cpu"


@pytest.mark.parametrize("window", [None, 1, 20, 200])
def test_flex_attention_under_it_equals_naive(window):
    ids = random_ids(3, 128, seed=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 128, heads, 8, generator=generator) for heads in (4, 2, 2))
    mask = block_mask(ids, MaskSpec(sliding_window=window), block_size=32)
    with torch.no_grad():
        out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2).double(), naive_attention(q, k, v, ids, window), rtol=0, atol=1e-5)


def test_block_mask_state_goes_to_flex_attention(monkeypatch):
    """The CUDA path, its kernel replaced by the uncompiled one."""
    monkeypatch.setattr("torchtitan_lite.attention.flex._flex_attention", flex_attention)
    ids = random_ids(2, 256, seed=0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 256, heads, 8, generator=generator) for heads in (4, 2, 2))
    spec = MaskSpec(sliding_window=50)
    with torch.no_grad():
        out = FlexAttention().forward(q, k, v, block_mask(ids, spec), spec)
        dense = FlexAttention().forward(q, k, v, dense_mask(ids, spec), spec)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-5)
