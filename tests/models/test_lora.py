"""Adapters beside the linear layers, held against hand-made sums and peft."""

import pytest
import torch
from toy_run import TOY

from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.lora import (
    LoraSpec,
    adapter_shapes,
    apply_lora,
    is_adapter,
    lora_spec,
    merged,
)
from torchtitan_lite.models.llama3.model import Transformer

SPEC = LoraSpec(rank=4, alpha=8.0)


def adapted(spec: LoraSpec = SPEC, *, learnt: bool = True) -> Transformer:
    model = Transformer(TOY)
    apply_lora(model, spec)
    init_weights(model, TOY, seed=0)
    if learnt:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def plain(seed: int = 0) -> Transformer:
    model = Transformer(TOY)
    init_weights(model, TOY, seed)
    return model


TOKENS = torch.arange(40).view(2, 20) % TOY.vocab_size


def test_untrained_adapters_change_nothing():
    torch.testing.assert_close(adapted(learnt=False)(TOKENS), plain()(TOKENS), rtol=0, atol=0)
    assert not torch.allclose(adapted()(TOKENS), plain()(TOKENS), atol=1e-3)


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"), [(16, 16, False, 1.0), (16, 16, True, 4.0), (8, 16, False, 2.0)]
)
def test_scale_by_hand(rank, alpha, rslora, scale):
    assert LoraSpec(rank, alpha, rslora=rslora).scale == scale


def test_one_layer_by_hand():
    model = adapted()
    layer = model.layers["1"].feed_forward.w2
    x = torch.randn(3, TOY.ffn_hidden_dim, generator=torch.Generator().manual_seed(2))
    w, a, b = (p.detach().double() for p in (layer.weight, layer.lora_a, layer.lora_b))
    expected = x.double() @ w.T + (8 / 4) * ((x.double() @ a.T) @ b.T)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_merged_model_computes_the_same():
    model, whole = adapted(), plain()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_a" in tensors:
                parameter.copy_(merged(parameter, tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"], SPEC.scale))
    torch.testing.assert_close(whole(TOKENS), model(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("targets", [["wq", "wv"], ["q_proj", "v_proj"], ["v_proj", "wq", "wq"]])
def test_only_adapters_of_the_targets_learn(targets):
    spec = lora_spec(2, 4.0, 0.0, targets)
    assert spec.targets == ("wq", "wv")
    model = adapted(spec)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in plain().named_parameters()}
    assert trained == adapter_shapes(shapes, spec)
    assert trained["layers.0.attention.wv.lora_b"] == (16, 2)  # two kv heads of 8 channels
    assert len(trained) == 2 * 2 * 2 and all(is_adapter(name) for name in trained)
    model(TOKENS).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(trained)


def test_dropout_drops_inputs_of_the_adapter_alone_and_only_in_training():
    model = adapted(LoraSpec(4, 8.0, dropout=0.5))
    layer = model.layers["0"].attention.wq
    x = torch.ones(1, TOY.dim)
    torch.manual_seed(3)
    kept = torch.nn.functional.dropout(x, 0.5)
    assert set(kept.flatten().tolist()) == {0.0, 2.0}
    expected = x @ layer.weight.T + 2 * (kept @ layer.lora_a.T) @ layer.lora_b.T
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), expected)
    model.eval()
    torch.testing.assert_close(layer(x), x @ layer.weight.T + 2 * (x @ layer.lora_a.T) @ layer.lora_b.T)


def test_of_what_is_loaded_only_adapters_are_drawn():
    model = Transformer(TOY)
    apply_lora(model, SPEC)
    drawn = {name: p.clone() for name, p in adapted(learnt=False).named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    init_weights(model, TOY, seed=0, only=is_adapter)
    for name, parameter in model.named_parameters():
        assert parameter.equal(drawn[name]) if is_adapter(name) else bool((parameter == 7).all()), name


def test_initial_values():
    model = adapted(learnt=False)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            assert not parameter.any()
    wide = LoraSpec(64, 64.0)
    model = adapted(wide, learnt=False)
    values = torch.cat([p.flatten() * p.shape[1] ** 0.5 for n, p in model.named_parameters() if n.endswith("lora_a")])
    assert values.std().item() == pytest.approx(3**-0.5, rel=0.02)  # that of a uniform +- 1 / sqrt(in)
    assert abs(values.mean().item()) < 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["wq", "lm_head"]}, r"lora\.target_modules: lm_head: no such layer; .*wq \(q_proj\)"),
        ({"targets": []}, "names no layer"),
        ({"rank": -1}, r"lora\.rank=-1"),
        ({"alpha": 0.0}, r"lora\.alpha=0\.0: must be above 0"),
        ({"dropout": 1.0}, r"lora\.dropout=1\.0: must be at least 0 and below 1"),
    ],
)
def test_what_cannot_be(settings, message):
    values = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["wq"], **settings}
    with pytest.raises(ValueError, match=message):
        lora_spec(values["rank"], values["alpha"], values["dropout"], values["targets"])


def test_rank_zero_is_no_adapters():
    assert lora_spec(0, 16.0, 0.0, ["wq"]) is None
