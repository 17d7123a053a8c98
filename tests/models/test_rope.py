"""Rotary embedding: published frequencies, rotation by complex numbers, precision whatever the model is cast to."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy_llama import packed_batch, tiny_model

from torchtitan_lite.models.llama3 import model as model_module
from torchtitan_lite.models.llama3.args import RopeScaling
from torchtitan_lite.models.llama3.flavors import SIZES
from torchtitan_lite.models.llama3.rope import apply_rope, rope_cos_sin, rope_frequencies


def unscaled(head_dim: int, theta: float = 500000.0) -> list[float]:
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


@pytest.mark.parametrize(
    ("size", "head_dim", "factor", "kept", "blended", "last"),
    [
        ("1B", 64, 32, 15, [1.29054793e-3, 4.29556797e-4, 9.70828780e-5], 9.418307e-8),
        (
            "8B",
            128,
            8,
            29,
            [2.16657076e-3, 1.37189357e-3, 8.56751413e-4, 5.24846161e-4, 3.12693750e-4, 1.78507813e-4],
            3.068926e-7,
        ),
    ],
)
def test_frequencies_of_llama_3(size, head_dim, factor, kept, blended, last):
    args = SIZES[size]
    assert (args.head_dim, args.rope_theta, args.rope_scaling.factor) == (head_dim, 500000.0, factor)
    frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    plain = unscaled(head_dim)
    stretched = kept + len(blended)
    expected = plain[:kept] + blended + [frequency / factor for frequency in plain[stretched:]]
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, torch.tensor(expected), rtol=2e-6, atol=0)
    assert frequencies[-1].item() == pytest.approx(last, rel=1e-6)


def test_frequencies_without_scaling():
    expected = torch.tensor(unscaled(16, theta=10000.0))
    torch.testing.assert_close(rope_frequencies(16, 10000.0, None), expected, rtol=1e-6, atol=0)


def test_rotation_is_complex_multiplication():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=generator)
    positions = torch.tensor([[0, 1, 2, 0, 1], [100, 5000, 70000, 7, 131071]])
    frequencies = rope_frequencies(8, 500000.0, RopeScaling(factor=8.0, original_max_seq_len=64))
    rotated = apply_rope(x, *rope_cos_sin(positions, frequencies))

    # channel i is the real and channel i + 4 the imaginary part of one number, turned by position x frequency
    angle = (positions[..., None] * frequencies).double()[:, :, None]  # fp32 product: the angle both sides mean
    numbers = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotated.double(), torch.cat((numbers.real, numbers.imag), -1), rtol=0, atol=1e-5)
    assert torch.equal(rotated[0, 0], x[0, 0])  # position 0 turns nothing


def test_scores_depend_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator)
    frequencies = rope_frequencies(16, 500000.0, None)

    def score(query_at: int, key_at: int) -> float:
        sides = [
            apply_rope(x, *rope_cos_sin(torch.tensor([[p]]), frequencies)) for x, p in ((q, query_at), (k, key_at))
        ]
        return (sides[0] * sides[1]).sum().item()

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-4)
    assert abs(score(7, 3) - score(3, 7)) > 0.1


def test_rotating_and_sharding_commute():
    # documents of 4 and 4; the shard of head and tail chunks holds places 0, 3, 4, 7 at positions 0, 3, 0, 3
    x = torch.randn(1, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    shard = [0, 3, 4, 7]
    frequencies = rope_frequencies(8, 500000.0, None)
    whole = apply_rope(x, *rope_cos_sin(positions, frequencies))
    assert torch.equal(whole[:, shard], apply_rope(x[:, shard], *rope_cos_sin(positions[:, shard], frequencies)))


def test_result_has_the_type_of_the_input_and_is_rounded_once():
    x = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = rope_cos_sin(torch.arange(1000, 1004)[None], rope_frequencies(8, 500000.0, None))
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin).bfloat16())


def test_positions_stay_distinct_under_a_bf16_default_type():
    positions = torch.arange(131072)[None]
    expected = rope_cos_sin(positions, rope_frequencies(64, 500000.0, None))
    torch.set_default_dtype(torch.bfloat16)
    try:
        cos, sin = rope_cos_sin(positions, rope_frequencies(64, 500000.0, None))
    finally:
        torch.set_default_dtype(torch.float32)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
    assert len(torch.unique(torch.stack((cos[0, :4096, 0, 0], sin[0, :4096, 0, 0])), dim=1)[0]) == 4096


@pytest.mark.parametrize("cast", ["to", "meta"])
def test_casting_the_model_leaves_the_tables_in_fp32(monkeypatch, cast):
    batch = packed_batch([[100, 90]], 200)
    seen = []

    def record(positions, frequencies):
        seen.append(rope_cos_sin(positions, frequencies))
        return seen[-1]

    monkeypatch.setattr(model_module, "rope_cos_sin", record)
    model = tiny_model(dim=16)
    model(batch.tokens, batch.document_ids, batch.positions)
    if cast == "to":
        model = model.to(torch.bfloat16)
    else:
        with torch.device("meta"):
            model = type(model)(model.args)
        model = model.to(torch.bfloat16).to_empty(device="cpu")
    model(batch.tokens, batch.document_ids, batch.positions)
    for before, after in zip(*seen, strict=True):
        assert after.dtype == torch.float32 and torch.equal(before, after)


def test_no_matrix_product():
    """One might run in TF32, which blurs positions beyond 2048."""

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Operators() as operators:
        apply_rope(
            torch.ones(1, 3, 1, 8),
            *rope_cos_sin(torch.arange(3)[None], rope_frequencies(8, 500000.0, SIZES["8B"].rope_scaling)),
        )
    assert {"cos", "sin", "mul"} <= operators.names
    assert not operators.names & {"mm", "bmm", "addmm", "matmul", "outer", "einsum", "linear"}
