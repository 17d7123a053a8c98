"""Compiled blocks: one graph for each distinct mask at most, whatever the documents of a batch."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from toy_llama import packed_batch, tiny_model

from torchtitan_lite.attention.flex import block_mask
from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.training.compile import compile_blocks

BATCHES = [packed_batch([[count] * (24 // count), [24 - count, count]], 24, seed=count) for count in range(1, 11)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("attention", "graphs"), [("sdpa_block_causal", 2), ("flex_block_causal", 1)])
def test_one_graph_for_each_distinct_mask(attention, graphs):
    """To flex_block_causal the window is part of the mask, which is data: layers with and without share a graph."""
    counter = CompileCounter()
    model = tiny_model(attention=attention, n_layers=4, sliding_window=5, sliding_window_pattern=(True, False))
    compile_blocks(model, counter)
    for batch in BATCHES:
        logits = model(batch.tokens, batch.document_ids, batch.positions)
        logits.square().mean().backward()
    assert counter.frame_count == graphs


def test_three_masks_three_graphs():
    counter = CompileCounter()
    model = tiny_model(n_layers=6)
    specs = [MaskSpec(sliding_window=window) for window in (3, 7, None)] * 2
    for block, spec in zip(model.layers.values(), specs, strict=True):
        block.attention.spec = spec
    compile_blocks(model, counter)
    for batch in BATCHES:
        states = {spec: model.backend.prepare(batch.document_ids, spec) for spec in specs}
        h, cos, sin = model.tok_embeddings(batch.tokens), torch.ones(2, 24, 1, 8), torch.zeros(2, 24, 1, 8)
        for block, spec in zip(model.layers.values(), specs, strict=True):
            h = block(h, cos, sin, states[spec])
    assert counter.frame_count == 3


def test_block_mask_of_every_batch_fits_the_same_graph(monkeypatch):
    """The mask function closes over a new tensor with each batch. FlexAttention has no CPU backward: forward alone."""
    changes = {"sliding_window": 50, "sliding_window_pattern": (True, False)}
    model = tiny_model(attention="flex_block_causal", n_layers=4, **changes)
    batches = [packed_batch([[200, 56], [n, 256 - n]], 256, seed=n) for n in range(1, 201, 20)]
    with torch.no_grad():
        expected = [model(batch.tokens, batch.document_ids, batch.positions) for batch in batches]
        monkeypatch.setattr(type(model.backend), "prepare", lambda self, ids, spec: block_mask(ids, spec))
        counter = CompileCounter()
        compile_blocks(model, counter)
        for batch, dense in zip(batches, expected, strict=True):
            logits = model(batch.tokens, batch.document_ids, batch.positions)
            torch.testing.assert_close(logits, dense, rtol=0, atol=1e-5)
    assert counter.frame_count == 1
