"""Llama 3 against transformers, split into parts, and its norms."""

import pytest
import torch
import torch.nn.functional as F
from toy_llama import packed_batch, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from torchtitan_lite.models.llama3.args import ModelArgs, RopeScaling
from torchtitan_lite.models.llama3.model import Transformer

LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def transformers_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in NAMES:
        return f"{NAMES[module]}.weight"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_block_causal", "flex_block_causal"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tied, attention):
    args = ModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=50, max_seq_len=256,
        rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32), tie_embeddings=tied, attention=attention,
    )  # fmt: skip
    # Keys of both spellings: transformers 5 reads rope_parameters, 4 the others.
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=50, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        rope_theta=500000.0, rope_scaling=rope, rope_parameters={**rope, "rope_theta": 500000.0},
        attn_implementation="eager", initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config).eval()
    weights = dict(reference.named_parameters())
    for name, weight in weights.items():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)

    model = Transformer(args)
    copied = {name: weights.pop(transformers_name(name)).detach() for name in model.state_dict()}
    assert not weights  # every weight there has a place here
    model.load_state_dict(copied)

    tokens = torch.randint(0, 50, (2, 100))
    with torch.no_grad():
        logits, expected = model(tokens), reference(tokens).logits
        unscaled = Transformer(ModelArgs(**{**vars(args), "rope_scaling": None}))
        unscaled.load_state_dict(copied)
        assert (unscaled(tokens) - expected).abs().max() > 0.1  # the scaling matters here
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def stage(first: int, last: int, *, head: bool = False, tail: bool = False) -> Transformer:
    """Layers [first, last) of the tiny four-layer model, as a pipeline would cut it. The mask state of its attention
    tells a window from none, so that a layer given another's mask shows."""
    model = tiny_model(
        n_layers=4, attention="flex_block_causal", sliding_window=3, sliding_window_pattern=(True, False, False)
    )
    for layer in list(model.layers):
        if not first <= int(layer) < last:
            del model.layers[layer]
    if not head:
        model.tok_embeddings = None
    if not tail:
        model.norm = model.output = None
    return model


def test_stages_compose_to_the_whole_model():
    batch = packed_batch([[7, 5, 3], [4, 12]], 16)
    h = batch.tokens
    with torch.no_grad():
        for part in (stage(0, 1, head=True), stage(1, 3), stage(3, 4, tail=True)):
            h = part(h, batch.document_ids, batch.positions)
        whole = stage(0, 4, head=True, tail=True)(batch.tokens, batch.document_ids, batch.positions)
    assert torch.equal(h, whole)


def test_a_stage_keeps_the_names_of_its_parameters():
    whole = dict(stage(0, 4, head=True, tail=True).named_parameters())
    parts = [dict(part.named_parameters()) for part in (stage(0, 2, head=True), stage(2, 4, tail=True))]
    assert [name for part in parts for name in part] == list(whole)
    assert all(torch.equal(weight, whole[name]) for part in parts for name, weight in part.items())


def test_a_stage_without_layers():
    part = stage(0, 0, head=True)
    tokens = torch.tensor([[3, 1]])
    assert torch.equal(part(tokens), part.tok_embeddings.weight[tokens])


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_function_gets_what_the_logits_are_made_of(tied):
    model = tiny_model(tie_embeddings=tied)
    batch = packed_batch([[5, 3]], 8)
    inputs = (batch.tokens, batch.document_ids, batch.positions)

    def loss_fn(h, weight, labels):
        assert labels is batch.labels
        return h @ weight.T

    torch.testing.assert_close(model(*inputs, labels=batch.labels, loss_fn=loss_fn), model(*inputs))


def test_tied_embeddings_stay_one_parameter_after_meta():
    args = tiny_model(tie_embeddings=True).args
    with torch.device("meta"):
        model = Transformer(args)
    model.to_empty(device="cpu")
    model.load_state_dict(tiny_model(tie_embeddings=True).state_dict())
    assert "output.weight" not in model.state_dict()

    # the gradient is the sum of both uses: as input, and as output of an untied twin with equal weights
    twin = Transformer(ModelArgs(**{**vars(args), "tie_embeddings": False}))
    twin.load_state_dict({**model.state_dict(), "output.weight": model.tok_embeddings.weight})
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    for m in (model, twin):
        F.cross_entropy(m(tokens)[0, :-1], tokens[0, 1:]).backward()
    both = twin.tok_embeddings.weight.grad + twin.output.weight.grad
    torch.testing.assert_close(model.tok_embeddings.weight.grad, both)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norm_keeps_the_type_of_its_input_and_rounds_once(weight_dtype):
    norm = tiny_model(dim=16).layers["0"].attention_norm.to(weight_dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    x32 = x.float()
    expected = x32 * (x32.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.float()
    assert torch.equal(out, expected.bfloat16())


def test_a_bf16_model_computes_in_bf16():
    model = tiny_model(dim=16).to(torch.bfloat16)
    assert model(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16
