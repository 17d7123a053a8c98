"""Weights in 4 bits, held against the format's definition worked out by hand."""

import math
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from toy_run import TOY

from torchtitan_lite.config.schema import ActivationCheckpoint
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.lora import LoraSpec, apply_lora, block_linears
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.models.llama3.nf4 import quantize, quantized_layers, rounded, take_weights_out
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint

TOKENS = torch.arange(40).view(2, 20) % TOY.vocab_size


def normal_float() -> torch.Tensor:
    """The 16 values: quantiles of a normal distribution (appendix E of the paper), eight above 0 and seven below."""
    edge = 0.9677083
    above = torch.special.ndtri(torch.linspace(edge, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(edge, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([above, torch.zeros(1, dtype=torch.float64), below]).sort().values
    return values / values.max()


@pytest.mark.parametrize("shape", [(48, 64), (192, 576), (512, 256)])  # 576: 27 scales to a factor, not 256
def test_the_format_by_hand(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    blocks = weight.double().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    values = normal_float()
    nearest = values[(blocks / scales).unsqueeze(-1).sub(values).abs().argmin(-1)]
    # A scale is its distance from the mean in 8 bits, in 128ths of the largest of some: it errs by half of one, but
    # the largest itself by a whole one, 127 being the last above 0.
    distance = (scales - scales.mean()).view(-1, math.gcd(256, len(scales)))
    slack = (distance.abs().amax(1, keepdim=True) / 128).expand_as(distance).reshape(-1, 1)
    got = rounded(weight, torch.float32).double().view(-1, 64)
    # Halfway between two values either will do; torchao has them to four digits.
    farther = (got - blocks).abs() - (nearest * scales - blocks).abs()
    assert (farther <= slack * nearest.abs() + 2e-4 * scales).all()
    assert 0.05 < ((got - blocks).norm() / blocks.norm()).item() < 0.15


def test_blocks_of_zeros_stay_zero():
    """Whatever their neighbours make of the scale that they have."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[3], weight[5, 1], weight[7, ::2] = 0, 500, 0
    got = rounded(weight, torch.float32)
    assert not got[weight == 0].any() and got[weight != 0].any()
    assert not rounded(torch.zeros(64, 64), torch.float32).any()


def test_bytes_of_a_weight():
    packed = quantize(torch.randn(512, 256))
    names, _ = packed.__tensor_flatten__()
    sizes = {name: getattr(packed, name).nbytes for name in names}
    elements = 512 * 256
    assert sizes["quantized_data"] == elements // 2
    assert sizes["quantized_scalers"] == elements // 64
    assert sum(sizes.values()) - elements // 2 - elements // 64 == 4 * (elements // 64 // 256) + 4 + 16 * 4


def adapted(*, nf4: bool) -> Transformer:
    """With adapters that have learnt something. Without ``nf4``: on plain weights that are rounded in the same way."""
    model = Transformer(TOY)
    apply_lora(model, LoraSpec(rank=4, alpha=8.0))
    if nf4:
        take_weights_out(model)
    init_weights(model, TOY, seed=0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1)
    if not nf4:
        for block in model.layers.values():
            for _, linear in block_linears(block):
                linear.weight.data = rounded(linear.weight, torch.float32)
    return model


def loss_and_gradients(model: Transformer) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(-1, 1).flatten())
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_quantised_model_computes_with_the_rounded_weights():
    plain, packed = loss_and_gradients(adapted(nf4=False)), loss_and_gradients(adapted(nf4=True))
    assert len(packed) == 1 + 2 * 7 * TOY.n_layers
    for name in plain.keys() | packed.keys():
        torch.testing.assert_close(packed[name], plain[name], rtol=0, atol=0, msg=name)


def test_names_and_what_is_left():
    model = adapted(nf4=True)
    names = {name for name, _ in quantized_layers(model)}
    plain = {name for name, p in Transformer(TOY).named_parameters() if name.startswith("layers.") and p.dim() == 2}
    assert names == plain
    assert not names & {*dict(model.named_parameters()), *model.state_dict()}
    assert list(quantized_layers(adapted(nf4=False))) == []


@pytest.mark.parametrize("setting", [("full", "op"), ("selective", "op")])
def test_recomputed_to_the_bit(setting):
    expected = loss_and_gradients(adapted(nf4=True))
    model = adapted(nf4=True)
    apply_activation_checkpoint(model, ActivationCheckpoint(*setting))
    for name, value in loss_and_gradients(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("nf4", [False, True])
def test_compiled_blocks_share_a_graph(nf4, monkeypatch):
    """But the first, whose input needs no gradient."""
    monkeypatch.setattr(sys.modules[__name__], "TOY", replace(TOY, n_layers=4))
    graphs = Counter()

    def backend(graph, inputs):
        graphs["n"] += 1
        return graph.forward

    torch.compiler.reset()
    expected = loss_and_gradients(adapted(nf4=nf4))
    model = adapted(nf4=nf4)
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    for name, value in loss_and_gradients(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
    assert graphs["n"] == 2
