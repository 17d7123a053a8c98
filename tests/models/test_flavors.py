"""Flavors: published shapes and parameter counts, names taken apart, overrides, and the mask of each layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.flavors import SIZES, join_flavor, model_args, split_flavor
from torchtitan_lite.models.llama3.model import Transformer


def on_meta(args: ModelArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


@pytest.mark.parametrize(
    ("flavor", "overrides", "parameters"),
    [
        ("1B", {}, 1_235_814_400),
        ("1B", {"tie_embeddings": False}, 1_498_482_688),
        ("3B", {}, 3_212_749_824),
        ("8B", {}, 8_030_261_248),
        ("70B", {}, 70_553_706_496),
        ("405B", {}, 405_853_388_800),
    ],
)
def test_published_parameter_counts(flavor, overrides, parameters):
    model = on_meta(model_args(flavor, overrides))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_names_are_those_of_the_model(tie_embeddings):
    args = replace(SIZES["debugmodel"], tie_embeddings=tie_embeddings)
    assert sorted(args.parameter_names) == sorted(name for name, _ in on_meta(args).named_parameters())


@pytest.mark.parametrize("size", SIZES)
def test_matmul_params_are_the_linear_weights(size):
    args = SIZES[size]
    model = on_meta(args)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    tied_output = model.tok_embeddings.weight.numel() if args.tie_embeddings else 0
    assert args.matmul_params == linear + tied_output


def test_debug_model():
    args = model_args("debugmodel")
    assert (args.dim, args.n_layers, args.n_heads, args.vocab_size) == (256, 6, 16, 2048)


@pytest.mark.parametrize(
    ("flavor", "size", "attention"),
    [
        ("8B", "8B", None),
        ("debugmodel_sdpa_block_causal", "debugmodel", "sdpa_block_causal"),
        ("405B_flex_block_causal", "405B", "flex_block_causal"),
        ("1B_sdpa", "1B", "sdpa"),
        ("flex_block_causal", None, "flex_block_causal"),
        ("sdpa", None, "sdpa"),
    ],
)
def test_split_flavor(flavor, size, attention):
    assert split_flavor(flavor) == (size, attention)


@pytest.mark.parametrize("flavor", ["", "7B", "8B_", "8B_flash", "8b", "_sdpa", "sdpa_8B", "8B_flex", "8B_sdpa_sdpa"])
def test_unknown_flavors_list_the_choices(flavor):
    for function in (split_flavor, model_args):
        with pytest.raises(ValueError) as error:
            function(flavor)
        message = str(error.value)
        assert repr(flavor) in message
        assert all(choice in message for choice in [*SIZES, "sdpa_block_causal", "flex_block_causal"])


@pytest.mark.parametrize(
    ("size", "attention", "flavor"),
    [("8B", None, "8B"), ("8B", "sdpa", "8B"), ("8B", "flex_block_causal", "8B_flex_block_causal")],
)
def test_join_flavor(size, attention, flavor):
    assert join_flavor(size, attention) == flavor
    assert model_args(flavor).attention == (attention or "sdpa")


def test_overrides():
    args = model_args("8B_flex_block_causal", {"n_layers": 2, "dim": None, "rope_theta": 10000.0})
    assert (args.n_layers, args.dim, args.rope_theta, args.attention) == (2, 4096, 10000.0, "flex_block_causal")
    assert SIZES["8B"].n_layers == 32


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dim": 100}, "dim=100 must be a multiple of 2 x n_heads=16"),
        ({"n_kv_heads": 3}, "n_heads=16 must be a multiple of n_kv_heads=3"),
        ({"n_layers": 0}, "n_layers=0 must be at least 1"),
        ({"n_heads": 0}, "n_heads=0 must be at least 1"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"sliding_window_pattern": [True]}, "without a sliding_window"),
        ({"sliding_window": 4, "sliding_window_pattern": [False]}, "names no sliding layer"),
        ({"sliding_window": 4, "sliding_window_pattern": []}, "names no sliding layer"),
    ],
)
def test_shapes_that_do_not_fit(overrides, message):
    with pytest.raises(ValueError, match=message):
        model_args("debugmodel", overrides)


FULL, SLIDING = MaskSpec(), MaskSpec(sliding_window=64)


@pytest.mark.parametrize(
    ("overrides", "specs"),
    [
        ({}, [FULL] * 6),
        ({"sliding_window": 64}, [SLIDING] * 6),
        ({"sliding_window": 64, "sliding_window_pattern": [True, False]}, [SLIDING, FULL] * 3),
        (
            {"sliding_window": 64, "sliding_window_pattern": [True, True, True, False]},
            [SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING],
        ),
    ],
)
def test_mask_of_each_layer(overrides, specs):
    args = model_args("sdpa_block_causal", overrides)
    assert args.mask_specs == specs
    assert [block.attention.spec for block in on_meta(args).layers.values()] == specs


def test_plain_sdpa_masks_no_documents():
    assert set(model_args("debugmodel").mask_specs) == {MaskSpec(document=False)}
