"""Compiled blocks, through aot_eager: the same tracing and the same joint graphs as inductor's, without its minutes."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from toy_run import TOY

from torchtitan_lite.attention.backends import ATTENTIONS
from torchtitan_lite.config.schema import ActivationCheckpoint
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy

LAYERS, STEPS, SEQ = 4, 10, 128


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(mode: str = "none", **changes) -> Transformer:
    args = replace(TOY, n_layers=LAYERS, **changes)
    model = Transformer(args)
    init_weights(model, args, seed=0)
    apply_activation_checkpoint(model, ActivationCheckpoint(mode))
    return model


def train(model: Transformer, steps: int = STEPS) -> list[float]:
    """Losses of steps whose batches have 1 to ``steps`` documents a row, of other lengths every time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_fn = LinearCrossEntropy()
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        tokens, labels = torch.randint(0, TOY.vocab_size, (2, 2, SEQ), generator=generator)
        document_ids = torch.randint(0, step + 1, (2, SEQ), generator=generator, dtype=torch.int32).sort().values
        loss = model(tokens, document_ids, labels=labels, loss_fn=loss_fn) / labels.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("attention", "mode", "window", "graphs"),
    [
        *((attention, "none", None, 1) for attention in ATTENTIONS),
        ("sdpa_block_causal", "selective", None, 1),
        ("sdpa_block_causal", "none", 8, 2),  # every other layer slides
    ],
)
def test_one_graph_for_each_mask_and_the_losses_of_eager(attention, mode, window, graphs):
    changes = {"attention": attention}
    if window is not None:
        changes |= {"sliding_window": window, "sliding_window_pattern": (True, False)}
    expected = train(build(mode, **changes))
    counter = CompileCounterWithBackend("aot_eager")
    model = build(mode, **changes)
    compile_blocks(model, counter)
    assert train(model) == pytest.approx(expected, rel=1e-4)
    assert counter.frame_count == graphs
    assert expected[-1] < expected[0] - 0.05  # it did learn


def test_too_many_shapes_raise_instead_of_running_uncompiled():
    model = build()
    compile_blocks(model, "eager")
    with (
        torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False),
        torch.no_grad(),
    ):
        for seq in (16, 24):
            model(torch.zeros(1, seq, dtype=torch.int64))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            model(torch.zeros(1, 32, dtype=torch.int64))


def test_a_graph_break_raises():
    model = build()
    plain = model.layers["0"].feed_forward.forward

    def broken(x):
        torch._dynamo.graph_break()
        return plain(x)

    model.layers["0"].feed_forward.forward = broken
    compile_blocks(model, "eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.zeros(1, 16, dtype=torch.int64))
