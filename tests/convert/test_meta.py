"""Meta's folders, held against a naive forward of their own definition."""

import json
from pathlib import Path

import pytest
import torch
from meta_reference import meta_logits
from tiny_hf import saved

from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.convert.meta import MetaWeights, ffn_width, to_half_split, to_interleaved, write_meta
from torchtitan_lite.convert.weights import WeightsError
from torchtitan_lite.models.llama3.args import ModelArgs, RopeScaling
from torchtitan_lite.models.llama3.flavors import SIZES
from torchtitan_lite.models.llama3.model import Transformer

PARAMS = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 64,
    "multiple_of": 16,
    "ffn_dim_multiplier": 0.5,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def meta_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {
        "attention.wq": (48, 48),
        "attention.wk": (24, 48),
        "attention.wv": (24, 48),
        "attention.wo": (48, 48),
        "feed_forward.w1": (64, 48),
        "feed_forward.w2": (48, 64),
        "feed_forward.w3": (64, 48),
    }
    weights = {"tok_embeddings.weight": torch.randn(64, 48), "output.weight": torch.randn(64, 48) / 7}
    for layer in range(2):
        weights |= {f"layers.{layer}.{name}.weight": torch.randn(shape) / 5 for name, shape in shapes.items()}
        weights |= {f"layers.{layer}.{name}.weight": 1 + torch.randn(48) / 5 for name in ("attention_norm", "ffn_norm")}
    return weights | {"norm.weight": 1 + torch.randn(48) / 5, "rope.freqs": torch.ones(6)}


# Along which dimension Meta's model-parallel files split a tensor: Llama 3's; Llama 2 splits the embedding's columns.
def split(name: str, embedding_dim: int) -> int | None:
    if "tok_embeddings" in name:
        return embedding_dim
    return next((dim for part, dim in (("wo", 1), ("w2", 1), ("w", 0), ("output", 0)) if f"{part}" in name), None)


def meta_folder(folder: Path, weights: dict, *, files: int = 1, embedding_dim: int = 0, **params: object) -> Path:
    folder.mkdir()
    for rank in range(files):
        own = {}
        for name, tensor in weights.items():
            dim = None if "norm" in name or "rope" in name else split(name.removesuffix(".weight"), embedding_dim)
            own[name] = tensor if dim is None else tensor.chunk(files, dim)[rank].clone()
        torch.save(own, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    return folder


def logits(weights, tokens: torch.Tensor) -> torch.Tensor:
    model = Transformer(weights.args)
    model.load_state_dict(weights.read(list(weights.tensors)))
    with torch.no_grad():
        return model(tokens[None])[0]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("files", "embedding_dim"), [(1, 0), (2, 0), (2, 1)])
def test_logits_are_metas(tmp_path, files, embedding_dim, scaled):
    weights = meta_weights()
    rope = {"use_scaled_rope": True, "rope_scaling_factor": 4.0} if scaled else {}
    read = MetaWeights(meta_folder(tmp_path / "m", weights, files=files, embedding_dim=embedding_dim, **rope))
    tokens = torch.randint(64, (3000,), generator=torch.Generator().manual_seed(1))
    expected = meta_logits(weights, PARAMS | rope, tokens)
    torch.testing.assert_close(logits(read, tokens), expected, rtol=0, atol=3e-4)
    short = tokens[:64]
    torch.testing.assert_close(logits(read, short), meta_logits(weights, PARAMS | rope, short), rtol=0, atol=1e-5)


def test_rows_of_q_and_k_by_hand():
    # Two heads of four channels: Meta's (0 1)(2 3) pair up, ours (0 2)(1 3).
    rows = torch.arange(8)[:, None].float()
    assert to_half_split(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert to_interleaved(to_half_split(rows, 4), 4).equal(rows)


def test_the_same_weights_from_meta_and_from_hugging_face(tmp_path):
    """A pair made without this project's conversion: the rows of q and k are put in Meta's order one by one."""
    folder = saved(tmp_path / "hf", vocab_size=64, num_hidden_layers=2, intermediate_size=64, rope_theta=500000.0)
    from_hf = HFWeights(folder)
    weights = {}
    for name, tensor in from_hf.read(list(from_hf.tensors)).items():
        if ".wq." in name or ".wk." in name:
            meta = torch.empty_like(tensor)
            for row in range(len(tensor)):
                head, channel = divmod(row, 12)
                meta[head * 12 + (2 * channel if channel < 6 else 2 * (channel - 6) + 1)] = tensor[row]
            tensor = meta
        weights[name] = tensor
    from_meta = MetaWeights(meta_folder(tmp_path / "m", weights, norm_eps=1e-6), max_seq_len=64)
    assert from_meta.args == from_hf.args
    ours, theirs = (each.read(list(each.tensors)) for each in (from_meta, from_hf))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].equal(theirs[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_written_and_read_back(tmp_path, tied):
    rope = {"rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    rope["rope_scaling"]["original_max_position_embeddings"] = 8192
    source = HFWeights(saved(tmp_path / "hf", tie_word_embeddings=tied, rope_theta=500000.0, **rope))
    write_meta(source, tmp_path / "m", "float32", None)
    tokens = torch.randint(96, (64,), generator=torch.Generator().manual_seed(2))
    params = json.loads((tmp_path / "m" / "params.json").read_text())
    written = torch.load(tmp_path / "m" / "consolidated.00.pth")
    torch.testing.assert_close(meta_logits(written, params, tokens), logits(source, tokens), rtol=0, atol=1e-5)
    back = MetaWeights(tmp_path / "m", max_seq_len=64)
    assert back.args == source.args
    assert all(tensor.equal(source.read([name])[name]) for name, tensor in back.read(list(back.tensors)).items())


# Published: (dim, ffn_dim_multiplier, multiple_of) -> width.
@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple_of", "width"),
    [(4096, None, 256, 11008), (4096, 1.3, 1024, 14336), (8192, 1.3, 4096, 28672), (2048, 1.5, 256, 8192)],
)
def test_width_of_the_feed_forward_layer(dim, multiplier, multiple_of, width):
    assert ffn_width(dim, multiplier, multiple_of) == width


@pytest.mark.parametrize("width", [1, 7, 96, 1000, 1536, 8192, 14336, 28672, 53248])
def test_params_give_the_width_back(tmp_path, width):
    from torchtitan_lite.convert.meta import _params

    for dim in (8, 48, 576, 4096, 16384):
        args = ModelArgs(dim=dim, n_layers=1, n_heads=2, n_kv_heads=1, ffn_hidden_dim=width)
        params = _params(args)
        assert ffn_width(dim, params["ffn_dim_multiplier"], params["multiple_of"]) == width


def test_scaling_that_params_does_not_tell(tmp_path):
    weights = meta_weights()
    folder = meta_folder(tmp_path / "m", weights, use_scaled_rope=True)
    assert MetaWeights(folder).args.rope_scaling == RopeScaling(factor=8.0)
    assert MetaWeights(folder, rope_factor=32.0).args.rope_scaling == SIZES["1B"].rope_scaling
    assert MetaWeights(folder).args.max_seq_len == 131072
    assert MetaWeights(folder, max_seq_len=77).args.max_seq_len == 77


def test_an_output_equal_to_the_embedding_is_tied(tmp_path):
    weights = meta_weights()
    weights["output.weight"] = weights["tok_embeddings.weight"]
    assert MetaWeights(meta_folder(tmp_path / "m", weights)).args.tie_embeddings


def test_frequencies_are_not_weights(tmp_path):
    weights = meta_weights()
    of_llama_1 = {"layers.1.attention.inner_attention.rope.freqs": torch.ones(6)}
    read = MetaWeights(meta_folder(tmp_path / "m", weights | of_llama_1, files=2))
    assert set(read.tensors) == set(weights) - {"rope.freqs"}


def test_values_beyond_float16_are_not_turned_into_infinity(tmp_path):
    weights = meta_weights()
    weights["norm.weight"][3] = 1e6
    with pytest.raises(WeightsError, match=r"^norm\.weight has values beyond float16's range"):
        write_meta(MetaWeights(meta_folder(tmp_path / "m", weights)), tmp_path / "out", "float16", None)


def test_what_is_wrong_is_named(tmp_path):
    weights = meta_weights()
    del weights["layers.1.feed_forward.w3.weight"]
    weights["extra.bias"] = torch.ones(3)
    with pytest.raises(WeightsError, match=r"(?s)layers\.1\.feed_forward\.w3\.weight: missing.*extra\.bias: not a"):
        MetaWeights(meta_folder(tmp_path / "a", weights))
    with pytest.raises(WeightsError, match=r"no consolidated\.NN\.pth"):
        MetaWeights(tmp_path)
    with pytest.raises(WeightsError, match=r"moe_args: not a plain Llama"):
        MetaWeights(meta_folder(tmp_path / "b", meta_weights(), moe_args={}))
    gap = meta_folder(tmp_path / "c", meta_weights(), files=2)
    (gap / "consolidated.00.pth").rename(gap / "consolidated.02.pth")
    with pytest.raises(WeightsError, match=r"it has consolidated\.01\.pth, consolidated\.02\.pth"):
        MetaWeights(gap)
    (gap / "consolidated.02.pth").rename(gap / "consolidated.00.pth")
    (gap / "consolidated.01.pth").write_bytes(b"broken")
    with pytest.raises(WeightsError, match=r"consolidated\.01\.pth is damaged"):
        MetaWeights(gap)


def test_what_params_cannot_say_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"head_dim=32 is not dim / n_heads.*rope scaling"):
        linear = {"rope_type": "linear", "factor": 2.0}
        write_meta(HFWeights(saved(tmp_path / "a", head_dim=32, rope_scaling=linear)), tmp_path / "m", "float32", None)
