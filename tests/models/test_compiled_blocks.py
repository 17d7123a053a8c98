"""Compiled blocks: one graph for each distinct mask at most, whatever the documents of a batch."""

import pytest
import torch
from toy_llama import packed_batch, tiny_model

from torchtitan_lite.attention.flex import block_mask
from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.training.compile import compile_blocks

BATCHES = [packed_batch([[count] * (24 // count), [24 - count, count]], 24, seed=count) for count in range(1, 11)]


class CountingBackend:
    """A back-end of torch.compile that runs the captured graph as it is and counts the captures."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(backend, **changes):
    model = tiny_model(**changes)
    compile_blocks(model, backend)
    return model


def train_on_all(model) -> None:
    for batch in BATCHES:
        logits = model(batch.tokens, batch.document_ids, batch.positions)
        logits.square().mean().backward()


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_block_causal", "flex_block_causal"])
def test_one_graph_for_all_layers_and_batches(attention):
    backend = CountingBackend()
    train_on_all(compiled(backend, attention=attention, n_layers=4))
    assert backend.graphs == 1


@pytest.mark.parametrize(("attention", "graphs"), [("sdpa_block_causal", 2), ("flex_block_causal", 1)])
def test_one_graph_for_each_distinct_mask(attention, graphs):
    """To flex_block_causal the window is part of the mask, which is data: layers with and without share a graph."""
    backend = CountingBackend()
    train_on_all(
        compiled(backend, attention=attention, n_layers=4, sliding_window=5, sliding_window_pattern=(True, False))
    )
    assert backend.graphs == graphs


def test_three_masks_three_graphs():
    backend = CountingBackend()
    model = tiny_model(n_layers=6)
    specs = [MaskSpec(sliding_window=window) for window in (3, 7, None)] * 2
    for block, spec in zip(model.layers.values(), specs, strict=True):
        block.attention.spec = spec
    compile_blocks(model, backend)
    for batch in BATCHES:
        states = {spec: model.backend.prepare(batch.document_ids, spec) for spec in specs}
        h, cos, sin = model.tok_embeddings(batch.tokens), torch.ones(2, 24, 1, 8), torch.zeros(2, 24, 1, 8)
        for block, spec in zip(model.layers.values(), specs, strict=True):
            h = block(h, cos, sin, states[spec])
    assert backend.graphs == 3


def test_block_mask_of_every_batch_fits_the_same_graph(monkeypatch):
    """The mask function closes over a new tensor with each batch. FlexAttention has no CPU backward: forward alone."""
    changes = {"sliding_window": 50, "sliding_window_pattern": (True, False)}
    model = tiny_model(attention="flex_block_causal", n_layers=4, **changes)
    batches = [packed_batch([[200, 56], [n, 256 - n]], 256, seed=n) for n in range(1, 201, 20)]
    with torch.no_grad():
        expected = [model(batch.tokens, batch.document_ids, batch.positions) for batch in batches]
        monkeypatch.setattr(type(model.backend), "prepare", lambda self, ids, spec: block_mask(ids, spec))
        backend = CountingBackend()
        compile_blocks(model, backend)
        for batch, dense in zip(batches, expected, strict=True):
            logits = model(batch.tokens, batch.document_ids, batch.positions)
            torch.testing.assert_close(logits, dense, rtol=0, atol=1e-5)
    assert backend.graphs == 1


def test_compiled_equals_eager():
    """Through AOTAutograd, which needs the CPU operator's fake and backward rules."""
    changes = {"sliding_window": 5, "sliding_window_pattern": (True, False)}
    eager, model = tiny_model(**changes), compiled("aot_eager", **changes)
    for batch in BATCHES[:2]:
        logits = [m(batch.tokens, batch.document_ids, batch.positions) for m in (eager, model)]
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
        for out in logits:
            out.square().mean().backward()
    for (name, parameter), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            other.grad, parameter.grad, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_parameter_names_do_not_change():
    model = compiled("eager")
    assert list(dict(model.named_parameters())) == list(dict(tiny_model().named_parameters()))


def test_too_many_shapes_fail_instead_of_falling_back():
    model = compiled("eager")
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False), torch.no_grad():
        for seq in (8, 9):
            model(torch.zeros(1, seq, dtype=torch.int64))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            for seq in (10, 11):
                model(torch.zeros(1, seq, dtype=torch.int64))
