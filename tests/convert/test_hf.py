"""Hugging Face folders, held against transformers."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny_hf import LLAMA3_ROPE, hf_model, saved

from torchtitan_lite.convert import hf
from torchtitan_lite.convert.hf import INDEX, HFWeights, hf_name, write_hf
from torchtitan_lite.convert.weights import WeightsError, parameter_shapes
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER
from torchtitan_lite.models.llama3.flavors import model_args
from torchtitan_lite.models.llama3.model import Transformer

VARIANTS = {
    "gqa": {},
    "no_gqa": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_theta": 500000.0},
    "llama3_rope": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "wide_heads": {"head_dim": 32},
    "narrow_heads": {"head_dim": 6},
    "eps": {"rms_norm_eps": 0.1},
    "all": {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "head_dim": 20},
}


def ours(folder: Path, attention: str = "sdpa") -> Transformer:
    args = model_args(f"hf_{attention}", hf_assets_path=str(folder))
    model = Transformer(args)
    HFWeights(folder).load_into(model)
    return model


def tokens_of(seed: int, length: int, vocab: int = 96) -> torch.Tensor:
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(seed))


def equal_logits(model: Transformer, reference: torch.nn.Module, length: int) -> None:
    tokens = tokens_of(length, length)
    with torch.no_grad():
        expected = reference(tokens).logits
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [64, 200])  # 200: beyond max_position_embeddings, and beyond the original context
def test_logits_are_those_of_transformers(tmp_path, variant, length):
    folder = saved(tmp_path, **VARIANTS[variant])
    equal_logits(ours(folder), hf_model(**VARIANTS[variant]), length)


def test_variants_do_differ(tmp_path):
    # Else the test above would pass a setting that is ignored. eps and theta alone move the logits least.
    base = hf_model()(tokens_of(64, 64)).logits
    for variant in ("theta", "llama3_rope", "linear_rope", "eps"):
        other = hf_model(**VARIANTS[variant])(tokens_of(64, 64)).logits
        assert (other - base).abs().max() > 1e-2, variant


def digests(folder: Path) -> dict[str, str]:
    """Bytes, type and shape of every tensor in a folder, whatever file it lies in."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            found[name] = f"{hashlib.sha256(raw).hexdigest()} {tensor.dtype} {tuple(tensor.shape)}"
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["gqa", "all"])
@pytest.mark.parametrize("shard", ["5GB", "30KB"])
def test_there_and_back_is_byte_equal(tmp_path, dtype, variant, shard):
    source = saved(tmp_path / "in", dtype=getattr(torch, dtype), shard=shard, **VARIANTS[variant])
    write_hf(HFWeights(source), tmp_path / "out", dtype, source, file_bytes=5 * 2**30 if shard == "5GB" else 30_000)
    assert digests(tmp_path / "out") == digests(source)
    assert (tmp_path / "out" / INDEX).is_file() == (source / INDEX).is_file() == (shard == "30KB")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("variant", ["gqa", "all", "linear_rope"])
@pytest.mark.parametrize("with_source", [True, False])
def test_transformers_loads_what_is_written(tmp_path, variant, with_source):
    source = saved(tmp_path / "in", **VARIANTS[variant])
    model = ours(source)
    write_hf(HFWeights(source), tmp_path / "out", "float32", source if with_source else None, file_bytes=30_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert loaded.dtype == torch.float32
    equal_logits(model, loaded, 200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_is_exported_in_the_type_asked_for(tmp_path, dtype):
    source = saved(tmp_path / "in")
    write_hf(HFWeights(source), tmp_path / "out", dtype, None)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        kinds = {tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    assert kinds == {getattr(torch, dtype)}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)


def test_values_beyond_float16_are_not_turned_into_infinity(tmp_path):
    source = saved(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightsError, match=r"^norm\.weight has values beyond float16's range"):
        write_hf(HFWeights(source), tmp_path / "out", "float16", None)
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())  # nothing half-written is left


def test_ranks_that_take_turns_write_the_same_folder(tmp_path):
    weights = HFWeights(saved(tmp_path / "in"))
    write_hf(weights, tmp_path / "alone", "bfloat16", None, file_bytes=20_000)
    (tmp_path / "turns").mkdir()
    for rank in range(3):
        hf.write_hf_tensors(weights, tmp_path / "turns", "bfloat16", file_bytes=20_000, turn=(rank, 3))
    alone, turns = ({p.name: p.read_bytes() for p in (tmp_path / name).glob("model*")} for name in ("alone", "turns"))
    assert len(alone) > 4 and turns == alone


def test_what_a_killed_conversion_left_is_not_kept(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model-00001-of-00009.safetensors").write_text("half")
    write_hf(HFWeights(saved(tmp_path / "in")), tmp_path / "out", "float32", None)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def test_names_of_every_parameter():
    theirs = {name for name, _ in hf_model().named_parameters()}
    assert {hf_name(name) for name in parameter_shapes(model_args("debugmodel", {"n_layers": 3}))} == theirs


def test_assets_come_along(tmp_path):
    source = saved(tmp_path / "in")
    (source / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (source / "README.md").write_text("not a model's part")
    write_hf(HFWeights(source), tmp_path / "out", "float32", source)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.6, "eos_token_id": [1, 2]}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "out" / "README.md").exists()


# Of folders that a tokenizer may come from, each with what would keep transformers from reading a Llama beside it.
OTHER_MODELS = {
    "another architecture": {
        "model_type": "qwen2",
        "auto_map": {"AutoModelForCausalLM": "modeling.Other"},
        "layer_types": ["full_attention"] * 28,
        "tie_word_embeddings": True,
        "eos_token_id": 7,
    },
    "quantised": {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
    "another rotation": {
        "model_type": "llama",
        "partial_rotary_factor": 0.5,
        "rope_interleaved": True,
        "original_max_position_embeddings": 8192,
    },
    "nested": {"model_type": "mllama", "text_config": {"hidden_size": 8}},
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_a_tokenizer_of_another_model_leaves_the_model_as_it_is(tmp_path, other):
    source = saved(tmp_path / "in", **VARIANTS["llama3_rope"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(OTHER_MODELS[other]))
    write_hf(HFWeights(source), tmp_path / "out", "float32", tmp_path / "other")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    equal_logits(ours(source), loaded, 200)
    assert loaded.config.eos_token_id == OTHER_MODELS[other].get("eos_token_id", 2)


def test_a_tokenizer_without_bos_is_not_given_one(tmp_path):
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "tokenizer.json").write_bytes((DEBUG_TOKENIZER / "tokenizer.json").read_bytes())
    write_hf(HFWeights(saved(tmp_path / "in")), tmp_path / "out", "float32", assets)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for config in (loaded.config, loaded.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (None, None)


def test_the_tokenizer_of_the_package_comes_along_and_loads(tmp_path):
    write_hf(HFWeights(saved(tmp_path / "in")), tmp_path / "out", "float32", "debug")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("def f(x): return x", add_special_tokens=False)) == "def f(x): return x"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id is not None


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path):
    weights = HFWeights(saved(tmp_path / "in"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(WeightsError, match="exists already"):
        write_hf(weights, tmp_path / "out", "float32", None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_a_link_to_an_empty_folder_is_written_through(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    write_hf(HFWeights(saved(tmp_path / "in")), tmp_path / "link", "float32", None)
    assert (tmp_path / "disk" / "model.safetensors").is_file() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_disk_that_is_full_is_said(tmp_path, monkeypatch, error):
    def full(*_, **__):
        raise error

    weights = HFWeights(saved(tmp_path / "in"))
    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(WeightsError, match=r"out cannot be written: .*No space left"):
        write_hf(weights, tmp_path / "out", "float32", None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    folder = saved(tmp_path, shard="30KB")
    hf_model(seed=1).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(folder / "model.safetensors")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    equal_logits(ours(folder), reference, 20)


def broken(tmp_path: Path, change) -> Path:
    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
        tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(12, 48)

    with pytest.raises(WeightsError) as error:
        HFWeights(broken(tmp_path, change))
    assert str(error.value).splitlines()[1:] == [
        "  model.layers.1.mlp.up_proj.weight: missing",
        "  model.norm.weight: missing",
        "  model.layers.0.self_attn.q_proj.bias: not a tensor of this model",
        "  model.layers.2.self_attn.k_proj.weight: [12, 48] there, [24, 48] in this model",
    ]


def test_an_output_projection_that_is_missing_points_to_tying(tmp_path):
    folder = broken(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"tie_word_embeddings is false.*\n +lm_head\.weight: missing$"):
        HFWeights(folder)


def test_a_tied_model_may_have_its_embedding_twice_if_they_are_equal(tmp_path):
    folder = saved(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    equal_logits(ours(folder), hf_model(tie_word_embeddings=True), 20)
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"differs from model\.embed_tokens\.weight, but the embeddings are tied"):
        HFWeights(folder)


def test_stored_frequencies_of_old_folders_are_not_weights(tmp_path):
    folder = broken(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    equal_logits(ours(folder), hf_model(), 20)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_weights_are_refused(tmp_path, dtype):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(getattr(torch, dtype))

    message = rf"tensors of type {dtype} \(model\.norm\.weight\); quantised weights are not read"
    with pytest.raises(WeightsError, match=message):
        HFWeights(broken(tmp_path, change))


def test_files_that_are_not_there_or_damaged_are_named(tmp_path):
    with pytest.raises(WeightsError, match="no such folder"):
        HFWeights(tmp_path / "nowhere", model_args("debugmodel"))
    folder = saved(tmp_path / "a", shard="30KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(WeightsError, match=f"names files that are not there: {re.escape(lost.name)}"):
        HFWeights(folder)
    lost.write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match=f"{re.escape(lost.name)} is damaged"):
        HFWeights(folder)
    lost.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(WeightsError, match=f"{re.escape(lost.name)} is Git LFS's pointer"):
        HFWeights(folder)
    old = tmp_path / "old"
    old.mkdir()
    (old / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"no model\.safetensors .*pytorch_model\.bin, which is not read"):
        HFWeights(old, model_args("debugmodel"))
