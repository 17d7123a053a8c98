from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from toy_run import TOY

from torchtitan_lite.attention.backends import ATTENTIONS
from torchtitan_lite.config.schema import ActivationCheckpoint
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import FeedForward, Transformer
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy

MODES = {
    "none": ActivationCheckpoint("none"),
    "full": ActivationCheckpoint("full"),
    "op": ActivationCheckpoint("selective", "op"),
    "every second": ActivationCheckpoint("selective", "2"),
}
LAYERS = 3


def build(attention: str, mode: str) -> Transformer:
    args = replace(TOY, n_layers=LAYERS, attention=attention)
    model = Transformer(args)
    init_weights(model, args, seed=0)
    apply_activation_checkpoint(model, MODES[mode])
    return model


def loss_of(model: Transformer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, TOY.vocab_size, (2, 2, 128), generator=generator)
    document_ids = torch.randint(0, 4, (2, 128), generator=generator, dtype=torch.int32).sort().values
    torch.manual_seed(2)  # of dropout, where a test adds it
    return model(tokens, document_ids, labels=labels, loss_fn=LinearCrossEntropy())


def loss_and_grads(model: Transformer) -> dict[str, torch.Tensor]:
    loss = loss_of(model)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.fixture(params=[False, True], ids=["", "dropout"])
def dropout(request, monkeypatch):
    if request.param:
        plain = FeedForward.forward
        monkeypatch.setattr(FeedForward, "forward", lambda self, x: F.dropout(plain(self, x), 0.3))
    return request.param


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_loss_and_gradients_are_equal_to_the_bit(attention, dropout):
    expected = loss_and_grads(build(attention, "none"))
    if dropout:
        torch.manual_seed(0)
        assert not torch.equal(F.dropout(torch.ones(99), 0.3), F.dropout(torch.ones(99), 0.3))
    for mode in MODES:
        got = loss_and_grads(build(attention, mode))
        unequal = [name for name, value in expected.items() if not torch.equal(value, got[name])]
        assert got.keys() == expected.keys() and not unequal, (mode, unequal)


class CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "aten::mm":
            self.count["mm"] += 1
        elif "attention" in name and "backward" not in name:
            self.count["attention"] += 1
        return func(*args, **(kwargs or {}))


# A block has seven projections, each with two products in backward. The last one need never be done again.
@pytest.mark.parametrize(
    ("mode", "matmuls", "attentions"),
    [("none", 14 * LAYERS, 0), ("full", 20 * LAYERS, LAYERS), ("op", 17 * LAYERS, 0), ("every second", 54, 2)],
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_backward_computes_again(attention, mode, matmuls, attentions):
    loss = loss_of(build(attention, mode))
    with CountedOps() as ops:
        loss.backward()
    assert (ops.count["mm"], ops.count["attention"]) == (matmuls, attentions)


class MadeStorages(TorchDispatchMode):
    """What the operations under it have made and is still alive: bytes by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self.made[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        return out

    def alive(self) -> int:
        return sum(nbytes for storage, nbytes in self.made.values() if not storage.expired())


def test_what_forward_keeps():
    alive = {}
    for mode in ("none", "op", "full"):
        model = build("sdpa_block_causal", mode)
        with MadeStorages() as storages:
            loss = loss_of(model)  # noqa: F841  (holds the graph)
        alive[mode] = storages.alive()
    dim, kv, heads, ffn = TOY.dim, TOY.n_kv_heads * TOY.head_dim, TOY.n_heads, TOY.ffn_hidden_dim
    # Beside the blocks' inputs, which full keeps too: attention's output and log-sum-exp, wk, wo and w3; all fp32.
    per_token = dim + heads + kv + dim + ffn
    assert alive["op"] - alive["full"] == 4 * 2 * 128 * LAYERS * per_token
    assert alive["op"] < alive["none"] / 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_parameter_names_never_change(mode, compiled):
    with torch.device("meta"):
        expected = Transformer(replace(TOY, n_layers=LAYERS)).state_dict().keys()
    model = build("sdpa", mode)
    if compiled:
        compile_blocks(model, "eager")
    assert model.state_dict().keys() == expected
    assert dict(model.named_parameters()).keys() == expected
