"""Initial weights: a function of seed and parameter name, however they are sharded."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy_llama import TINY

from torchtitan_lite.models.llama3 import init
from torchtitan_lite.models.llama3.flavors import model_args
from torchtitan_lite.models.llama3.init import init_std, init_weights
from torchtitan_lite.models.llama3.model import Transformer


def drawn(args=TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    model = Transformer(args)
    init_weights(model, args, seed)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_same_seed_same_weights_whatever_was_drawn_before():
    first = drawn()
    torch.manual_seed(123)
    torch.randn(7)
    second = drawn()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_another_seed_or_name_gives_other_weights():
    weights, others = drawn(seed=0), drawn(seed=1)
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]) == ("norm" in name), name
    assert not torch.equal(weights["layers.0.attention.wq.weight"], weights["layers.1.attention.wq.weight"])
    assert not torch.equal(weights["layers.0.feed_forward.w1.weight"], weights["layers.0.feed_forward.w3.weight"])


def test_weights_of_a_seed_never_change():
    """Runs that are to be compared start alike: these three numbers hold for every version."""
    values = drawn(seed=42)["layers.1.feed_forward.w2.weight"].flatten()[[0, 1, -1]]
    torch.testing.assert_close(
        values, torch.tensor([-5.96947176e-03, 1.67598035e-02, -7.49233179e-04]), rtol=1e-5, atol=0
    )


def test_a_part_of_the_model_draws_what_the_whole_does():
    whole = drawn()
    model = Transformer(TINY)
    del model.layers["0"]
    model.tok_embeddings = None
    init_weights(model, TINY, seed=0)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("block_elements", [1 << 20, 40, 7])  # one block; blocks of 4 rows; of 1 row
def test_any_piece_equals_the_same_piece_of_the_whole(monkeypatch, block_elements):
    monkeypatch.setattr(init, "_BLOCK_ELEMENTS", block_elements)
    full = torch.Size((23, 10))
    whole = init._draw("0/name", full, (23, 10), (0, 0), 0.02)
    for start, rows in ((0, 4), (4, 4), (3, 2), (1, 21), (22, 1), (7, 13)):
        assert torch.equal(init._draw("0/name", full, (rows, 10), (start, 0), 0.02), whole[start : start + rows])
    assert torch.equal(init._draw("0/name", full, (9, 5), (6, 5), 0.02), whole[6:15, 5:10])


def test_blocks_differ(monkeypatch):
    monkeypatch.setattr(init, "_BLOCK_ELEMENTS", 40)
    whole = init._draw("0/name", torch.Size((12, 10)), (12, 10), (0, 0), 0.02)
    assert not torch.equal(whole[0:4], whole[4:8]) and not torch.equal(whole[4:8], whole[8:12])


@pytest.fixture
def fake_rank():
    """Makes this process believe that it is one rank of several."""

    def join(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield join
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(6))
def test_sharded_parameters_hold_their_part_of_the_whole(fake_rank, monkeypatch, rank):
    """Rows over three ranks (11 rows: 4, 4, 3), columns over two; norms as well; blocks of two rows."""
    monkeypatch.setattr(init, "_BLOCK_ELEMENTS", 12)
    args = TINY

    def model() -> nn.Module:
        module = nn.Module()
        module.weight, module.norm, module.copy = (nn.Parameter(torch.empty(11, 6)) for _ in range(3))
        return module

    plain = model()
    init_weights(plain, args, seed=0)

    fake_rank(rank, 6)
    # Torch remembers results by mesh, this process's place in it included: the name keeps the ranks apart.
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=(f"dp_shard_of_rank_{rank}", "tp"))
    sharded = model()
    for name, placements in {
        "weight": (Shard(0), Shard(1)),
        "norm": (Shard(0), Replicate()),
        "copy": (Replicate(), Shard(0)),
    }.items():
        shape, _ = compute_local_shape_and_global_offset((11, 6), mesh, placements)
        local = torch.empty(shape)
        parameter = DTensor.from_local(local, mesh, placements, run_check=False, shape=(11, 6), stride=(6, 1))
        setattr(sharded, name, nn.Parameter(parameter))
    init_weights(sharded, args, seed=0)

    data, tp = divmod(rank, 2)
    rows, columns = slice(4 * data, 4 * data + 4), slice(3 * tp, 3 * tp + 3)
    assert torch.equal(sharded.weight.to_local(), plain.weight[rows, columns])
    assert torch.equal(sharded.norm.to_local(), torch.ones(3 if data == 2 else 4, 6))
    assert torch.equal(sharded.copy.to_local(), plain.copy[6 * tp : 6 * tp + 6])


def test_a_rank_without_rows(fake_rank):
    fake_rank(3, 4)
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Module()
    model.weight = nn.Parameter(
        DTensor.from_local(torch.empty(0, 6), mesh, (Shard(0),), run_check=False, shape=(3, 6), stride=(6, 1))
    )
    init_weights(model, TINY, seed=0)
    assert model.weight.to_local().shape == (0, 6)


def split_twice(whole: torch.Tensor, tp: int, tp_rank: int, fsdp: int, fsdp_rank: int) -> torch.Tensor:
    """The rows that FSDP leaves of a tensor-parallel shard."""
    for ranks, rank in ((tp, tp_rank), (fsdp, fsdp_rank)):
        parts = whole.chunk(ranks)
        whole = parts[rank] if rank < len(parts) else whole[:0]
    return whole


@pytest.mark.parametrize(("rows", "right"), [(22, True), (17, False)])  # shards of 11 and 11 rows; of 9 and 8
@pytest.mark.parametrize("rank", [0, 3, 6, 7])
def test_a_shard_of_a_shard_is_right_or_refused(fake_rank, rank, rows, right):
    plain = nn.Module()
    plain.weight = nn.Parameter(torch.empty(rows, 6))
    init_weights(plain, TINY, seed=0)
    fsdp_rank, tp_rank = divmod(rank, 2)
    expected = split_twice(plain.weight.detach(), 2, tp_rank, 4, fsdp_rank)

    fake_rank(rank, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=(f"fsdp_of_rank_{rank}", "tp"))
    model = nn.Module()
    placements = (_StridedShard(0, split_factor=2), Shard(0))  # what FSDP makes of a tensor-parallel (Shard(0),)
    local = torch.zeros_like(expected)
    model.weight = nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=(rows, 6), stride=(6, 1))
    )
    if right or fsdp_rank < 3:
        init_weights(model, TINY, seed=0)
        assert torch.equal(model.weight.to_local(), expected)
    else:  # FSDP cuts 9 rows into 3, 3, 3, 0 and 8 into 2, 2, 2, 2; torch reckons 5, 5, 5, 2 of the whole, halved
        with pytest.raises(ValueError, match=r"weight \(17, 6\): this rank's shard is .* divides its rows"):
            init_weights(model, TINY, seed=0)


def test_standard_deviations():
    args = model_args("debugmodel")
    for name, weight in drawn(args).items():
        std = init_std(args, name)
        if std is None:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        # cut at three deviations a normal keeps 0.9975 of its own
        assert weight.std().item() == pytest.approx(0.9975 * std, rel=0.02), name
        assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5
        assert weight.abs().max() <= 3 * std * (1 + 1e-6)


def test_depth_and_ties_set_the_scale():
    args = model_args("debugmodel")
    tied = model_args("debugmodel", {"tie_embeddings": True})
    assert init_std(args, "layers.0.attention.wo.weight") == pytest.approx(0.02 / 2**0.5)
    assert init_std(args, "layers.3.feed_forward.w2.weight") == pytest.approx(0.02 / 8**0.5)
    assert init_std(args, "layers.3.attention.wq.weight") == 0.02
    assert init_std(args, "layers.3.attention_norm.weight") is None
    assert init_std(args, "tok_embeddings.weight") == 1.0
    assert init_std(args, "output.weight") == init_std(tied, "tok_embeddings.weight") == 0.5 / 16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [{}, {"dim": 512, "n_layers": 2}])
def test_training_starts_near_the_logarithm_of_the_vocabulary(shape, tied):
    args = model_args("debugmodel", {**shape, "tie_embeddings": tied})
    model = Transformer(args)
    init_weights(model, args, seed=0)
    tokens = torch.randint(0, args.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
    assert abs(loss.item() - math.log(args.vocab_size)) < 0.3
