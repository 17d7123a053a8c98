"""Documents of a packed row do not see each other: exactly, through a whole model, forward and backward."""

import numpy as np
import pytest
import torch
from toy_llama import packed_batch, tiny_model

from torchtitan_lite.data.collator import Batch, collate_rows, num_targets
from torchtitan_lite.training.loss import LinearCrossEntropy

ROWS = [[7, 5, 3], [4, 1, 10], [15]]  # rows of 16, each with a place of padding
CHANGED = (0, 0)  # row and document


def where(batch: Batch, row: int, document: int) -> torch.Tensor:
    mask = torch.zeros_like(batch.document_ids, dtype=torch.bool)
    mask[row] = batch.document_ids[row] == document
    return mask


def change(batch: Batch, changed: torch.Tensor) -> Batch:
    return batch._replace(tokens=torch.where(changed, (batch.tokens + 1) % 50, batch.tokens))


def logits(model, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return model(batch.tokens, batch.document_ids, batch.positions)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa_block_causal", "flex_block_causal"])
def test_changing_a_document_changes_no_other(attention, rows, window):
    model = tiny_model(attention=attention, sliding_window=window)
    batch = packed_batch(ROWS[:rows], 16)
    changed = where(batch, *CHANGED)
    before, after = logits(model, batch), logits(model, change(batch, changed))
    assert torch.equal(before[~changed], after[~changed])
    assert (before[changed] - after[changed]).abs().max() > 0.1


@pytest.mark.parametrize("rows", [1, 3])
def test_with_plain_sdpa_it_does(rows):
    model = tiny_model(attention="sdpa")
    batch = packed_batch(ROWS[:rows], 16)
    before, after = logits(model, batch), logits(model, change(batch, where(batch, *CHANGED)))
    assert (before - after)[where(batch, 0, 1)].abs().max() > 0.01
    assert torch.equal(before[1:], after[1:])  # rows never mix


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa_block_causal", "flex_block_causal"])
def test_no_gradient_reaches_another_document(attention, rows, window):
    model = tiny_model(attention=attention, sliding_window=window)
    batch = packed_batch(ROWS[:rows], 16)
    h = model.tok_embeddings(batch.tokens).detach().requires_grad_()
    model.tok_embeddings = None
    own = where(batch, 0, 1)
    model(h, batch.document_ids, batch.positions)[own].square().sum().backward()
    assert torch.equal(h.grad[~own], torch.zeros_like(h.grad[~own]))
    assert (h.grad[own].abs().amax(-1) > 0).all()


def test_padding_is_never_seen():
    model = tiny_model()
    batch = packed_batch([[9]], 16)
    padding = where(batch, 0, -1)
    before, after = logits(model, batch), logits(model, change(batch, padding))
    assert torch.equal(before[~padding], after[~padding])
    assert after.isfinite().all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ["sdpa_block_causal", "flex_block_causal"])
def test_a_packed_row_is_its_documents_one_by_one(attention, window):
    """Logits, loss weighted by tokens, and gradients."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 50, length) for length in (12, 1, 7, 9)]
    model = tiny_model(attention=attention, sliding_window=window)
    loss_fn = LinearCrossEntropy(chunk_logits=50 * 8)

    def loss_and_grads(batches: list[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        losses = [model(b.tokens, b.document_ids, b.positions, b.labels, loss_fn) for b in batches]
        loss = torch.stack(losses).sum() / sum(num_targets(b) for b in batches)
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]

    packed = collate_rows([documents], seq_len=32, pad_id=0, max_documents_per_row=4)
    apart = [collate_rows([[d]], seq_len=len(d), pad_id=0, max_documents_per_row=1) for d in documents]
    assert num_targets(packed) == 11 + 0 + 6 + 8

    one_by_one = torch.cat([logits(model, batch) for batch in apart], dim=1)
    torch.testing.assert_close(logits(model, packed)[:, :29], one_by_one, rtol=0, atol=1e-5)
    (loss, grads), (loss_apart, grads_apart) = loss_and_grads([packed]), loss_and_grads(apart)
    torch.testing.assert_close(loss, loss_apart, rtol=0, atol=1e-5)
    torch.testing.assert_close(grads, grads_apart, rtol=0, atol=1e-5)


def test_without_ids_each_row_is_one_document():
    model = tiny_model()
    tokens = packed_batch([[8], [8]], 8).tokens
    ids, positions = torch.zeros(2, 8, dtype=torch.int32), torch.arange(8).repeat(2, 1)
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens, ids, positions))
