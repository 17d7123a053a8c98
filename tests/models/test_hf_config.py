"""config.json to model arguments and back. What transformers makes of them is held in tests/convert/test_hf.py."""

import json

import pytest
import transformers

from torchtitan_lite.models.llama3.args import ModelArgs, RopeScaling, args_from_json
from torchtitan_lite.models.llama3.flavors import SIZES, model_args
from torchtitan_lite.models.llama3.hf_config import HFConfigError, args_from_hf, hf_config, unknown_fields

# As published.
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_2_1B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_published_configs():
    assert args_from_hf(LLAMA_3_2_1B) == SIZES["1B"]
    assert SIZES["1B"].parameters == 1_235_814_400
    assert args_from_hf(SMOLLM2_135M).parameters == 134_515_008
    llama_2 = args_from_hf(LLAMA_2_7B)
    assert llama_2.parameters == 6_738_415_616
    assert (llama_2.rope_theta, llama_2.rope_scaling, llama_2.max_seq_len) == (10000.0, None, 4096)


def test_what_a_file_leaves_out_is_what_transformers_takes():
    expected = args_from_hf(json.loads(transformers.LlamaConfig().to_json_string()))
    assert args_from_hf({"model_type": "llama"}) == expected
    assert expected.norm_eps == 1e-6


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_both_spellings_of_the_kind_of_scaling(kind):
    args = args_from_hf(LLAMA_2_7B | {"rope_scaling": {kind: "linear", "factor": 2.0}})
    assert args.rope_scaling == RopeScaling(factor=2.0, kind="linear")
    other = "type" if kind == "rope_type" else "rope_type"
    assert args_from_hf(LLAMA_2_7B | {"rope_scaling": {kind: "linear", other: None, "factor": 2.0}}) == args
    assert args_from_hf(LLAMA_2_7B | {"rope_scaling": {kind: "default"}}).rope_scaling is None


def test_the_form_of_transformers_5():
    rope = dict(LLAMA_3_2_1B["rope_scaling"], rope_theta=500000.0)
    new = {name: value for name, value in LLAMA_3_2_1B.items() if name not in ("rope_scaling", "rope_theta")}
    assert args_from_hf(new | {"rope_parameters": rope}) == SIZES["1B"]
    assert args_from_hf(LLAMA_3_2_1B | {"rope_parameters": rope}) == SIZES["1B"]  # in both forms, for every reader


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, 'model_type="qwen2": only llama is built here'),
        ({"model_type": None}, "model_type=null"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu": only "silu" is supported'),
        ({"attention_bias": True}, "attention_bias=true: only false is supported"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: only 0 is supported"),
        ({"rope_interleaved": True}, "rope_interleaved=true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, r'quantization_config=\{"bits": 4\}: only null'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, 'rope_type="yarn": only default, linear and llama3'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 'rope_type="dynamic"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=null: rope_type linear needs a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"low_freq_factor=null.*original_max_position"),
        ({"rope_scaling": 8}, "rope_scaling=8: must be an object"),
        ({"rope_scaling": {"factor": 8.0}}, r'rope_scaling=\{"factor": 8.0\}: names no rope_type for its factor'),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "full_attention=.*: all layers have one rotation",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5: only 1",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"factor": 4}}, "say different things"),
        ({"hidden_size": "4096"}, 'hidden_size="4096": must be a whole number'),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta=Infinity: must be a number above 0"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false": must be true or false'),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be a whole number"),
        ({"head_dim": "128"}, 'head_dim="128": must be a whole number'),
        ({"num_key_value_heads": 5}, "n_heads=32 must be a multiple of n_kv_heads=5"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
    ],
)
def test_what_cannot_be_honoured_is_named(change, message):
    with pytest.raises(HFConfigError, match=message):
        args_from_hf(LLAMA_2_7B | change)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(HFConfigError) as error:
        args_from_hf(LLAMA_2_7B | {"mlp_bias": True, "hidden_act": "relu", "rope_scaling": {"type": "longrope"}})
    assert str(error.value).count("; ") == 2


def test_fields_that_nobody_knows_are_listed():
    odd = {"sparsity": 0.5, "auto_map": None, "use_odd_norm": False, "layer_scale": [1, 2]}
    assert unknown_fields(LLAMA_3_2_1B | SMOLLM2_135M | odd) == ["layer_scale", "sparsity"]
    assert unknown_fields(json.loads(transformers.LlamaConfig().to_json_string())) == []


@pytest.mark.parametrize("size", SIZES)
def test_every_size_survives_its_config(size):
    written = hf_config(SIZES[size], "bfloat16")
    assert args_from_hf(json.loads(json.dumps(written))) == SIZES[size]
    assert written["torch_dtype"] == "bfloat16"


def test_what_the_source_says_is_kept_where_it_still_holds():
    base = LLAMA_3_2_1B | {"eos_token_id": [1, 2], "house_rule": 7}
    assert hf_config(SIZES["1B"], "float32", base) == base | {"torch_dtype": "float32"}
    grown = hf_config(model_args("1B", {"vocab_size": 128300, "rope_theta": 1e6}), "float32", base)
    assert (grown["vocab_size"], grown["rope_theta"], grown["eos_token_id"]) == (128300, 1e6, [1, 2])
    assert args_from_hf(grown).rope_scaling == SIZES["1B"].rope_scaling
    assert hf_config(SIZES["1B"], "float32", base | {"dtype": "x", "torch_dtype": "y"}) == base | {"dtype": "float32"}


def test_what_transformers_cannot_be_told_is_refused():
    with pytest.raises(HFConfigError, match="cannot say sliding_window=64"):
        hf_config(model_args("1B_sdpa_block_causal", {"sliding_window": 64}), "float32")
    odd = {"dim": 50, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    with pytest.raises(Exception, match="not a multiple of the number of attention"):
        transformers.LlamaConfig(hidden_size=50, num_attention_heads=4, head_dim=16)
    with pytest.raises(HFConfigError, match="dim=50 is no multiple of n_heads=4"):
        hf_config(model_args("debugmodel", odd), "float32")


@pytest.mark.parametrize("size", SIZES)
def test_arguments_survive_json(size):
    assert args_from_json(json.loads(json.dumps(SIZES[size].as_json()))) == SIZES[size]


def test_arguments_written_before_a_field_was_there():
    values = model_args("debugmodel_sdpa_block_causal", {"sliding_window": 8, "sliding_window_pattern": [True, False]})
    written = values.as_json()
    del written["own_head_dim"]
    assert args_from_json(written | {"field_of_the_past": 1}) == values


@pytest.mark.parametrize("flavor", ["hf", "hf_flex_block_causal"])
def test_the_flavor_hf_reads_the_folder(tmp_path, flavor):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    args = model_args(flavor, {"n_layers": 2, "head_dim": 32}, str(tmp_path))
    assert (args.dim, args.n_layers, args.head_dim, args.rope_theta) == (576, 2, 32, 100000.0)
    assert args.attention == ("flex_block_causal" if "flex" in flavor else "sdpa")


@pytest.mark.parametrize("path", [None, "debug", "/nowhere"])
def test_the_flavor_hf_needs_a_folder(path):
    with pytest.raises(HFConfigError, match=r"hf_assets_path"):
        model_args("hf", {}, path)


def test_heads_of_a_width_of_their_own():
    args = ModelArgs(dim=12, n_layers=1, n_heads=2, n_kv_heads=1, ffn_hidden_dim=4, vocab_size=5, own_head_dim=10)
    # wq and wo 12 x 20, wk and wv 12 x 10, feed-forward 3 x 12 x 4, norms 3 x 12, embedding and output 5 x 12
    assert args.parameters == 2 * 240 + 2 * 120 + 144 + 36 + 2 * 60
