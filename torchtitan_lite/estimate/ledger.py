"""Books kept while a model runs, on real tensors or on fake ones: bytes alive, bytes sent, FLOPs of matrix products."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What memory is for. FSDP's buffers are told by the operators that touch them, perhaps long after they were made.
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
GATHERED, UNREDUCED = "gathered parameters", "gradients before reduction"
ACTIVATIONS, LOSS, KEYS_VALUES = "activations", "logits and loss", "gathered keys and values"
PIPELINE = "pipeline buffers"

MATMUL_FLOPS, ATTENTION_CALLS = "FLOPs of matrix products", "calls of attention"

# Of the n ranks of a ring, how often (n - 1) / n of the whole tensor is sent by each.
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all-gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 2),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", 1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 1),
    "_c10d_functional::all_reduce": ("all-reduce", 2),
    "_c10d_functional::all_to_all_single": ("all-to-all", 1),
}
_NOT_SENDING = {"c10d::recv_", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm"}
_ATTENTION = {"torchtitan_lite::varlen_attention", "torch_attn::_varlen_attn"}
_FLASH_BACKWARD = "torch_attn::_varlen_attn_backward"


class Traffic(NamedTuple):
    """A kind of communication: the collective, and the name of the process group whose ranks exchange."""

    collective: str
    group: str


@dataclass(eq=False)
class _Storage:
    bytes: int
    kind: str


class Snapshot:
    """What was alive at one moment. Kinds are looked up late, because FSDP's buffers are recognised late."""

    def __init__(self, alive: Iterable[_Storage] = ()) -> None:
        self._alive = [(storage, storage.bytes) for storage in alive]

    def bytes(self) -> Counter[str]:
        """By kind."""
        totals: Counter[str] = Counter()
        for storage, size in self._alive:
            totals[storage.kind] += size
        return totals


class Ledger(TorchDispatchMode):
    """Sees every operator of the code under it, on all devices together.

    Memory is counted by storages, from the operator that makes or first meets one until the last tensor over it is
    gone. An operator's own scratch space is not seen, but that of FlashAttention's backward is known and added.

    Attributes:
        done: sums since the beginning, recomputation included: bytes that this rank sends, by :class:`Traffic` and as
            ring algorithms send them, FLOPs of matrix products and calls of attention's forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._alive = 0
        self._region = ACTIVATIONS
        self._looks_away = False
        self._peak, self._peak_bytes = Snapshot(), 0
        self._at_peak = False  # and it is still to be written down: before anything goes, which is seldom enough
        self.done: Counter[str | Traffic] = Counter()

    def __enter__(self) -> Ledger:
        # FSDP frees and restores gathered parameters by resizing their storages, which no operator shows.
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if known := self._storages.get(storage._cdata):
                self._write_peak_down()
                self._alive += storage.nbytes() - known.bytes
                known.bytes, known.kind = storage.nbytes(), GATHERED
                self._note_peak()
            return result

        # DTensor tries each operator that is new to it on fake tensors of global shape, which are not there.
        try_out = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any) -> Any:
            self._looks_away = True
            try:
                return try_out(*args)
            finally:
                self._looks_away = False

        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        self._patches.enter_context(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._patches.close()
        super().__exit__(*exc_info)

    def snapshot(self) -> Snapshot:
        # A copy: quantised moments are cycles, and are collected, and struck off, at any time.
        return Snapshot(list(self._storages.values()))

    def take_peak(self) -> Snapshot:
        """The fullest moment since the last call."""
        self._write_peak_down()
        peak = self._peak
        self._peak_bytes, self._at_peak = self._alive, True
        return peak

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            self._storage(tensor).kind = kind

    def relabel(self, before: str, after: str) -> None:
        """Of all that is alive."""
        for storage in list(self._storages.values()):
            if storage.kind == before:
                storage.kind = after

    @contextmanager
    def region(self, kind: str) -> Iterator[None]:
        """What is made in this block is of ``kind``, unless it proves to be one of FSDP's buffers."""
        before, self._region = self._region, kind
        try:
            yield
        finally:
            self._region = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensors and quantised tensors: comes again as operators on what they are made of
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._looks_away:
            return out
        for tensor in _tensors(out):
            self._storage(tensor)
        name = _name(func)
        if name.startswith("fsdp::"):
            self._fsdp_buffers(name, args, kwargs)
        elif name.startswith(("c10d::", "_c10d_functional::")):
            self._communication(func._schema, args, kwargs, out)
        elif name in _MATMULS:
            a, b = args[1:3] if name == "aten::addmm" else args[:2]
            self.done[MATMUL_FLOPS] += 2 * a.numel() * b.shape[-1]
        elif name in _ATTENTION:
            self.done[ATTENTION_CALLS] += 1
        elif name == _FLASH_BACKWARD:
            q, cu_q = args[1], args[6]
            self._note_peak(scratch=flash_backward_scratch(q.shape, cu_q.shape[0] - 1))
        return out

    def _storage(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = _Storage(storage.nbytes(), self._region)
            self._alive += storage.nbytes()
            weakref.finalize(storage, self._gone, key).atexit = False
            self._note_peak()
        return self._storages[key]

    def _gone(self, key: int) -> None:
        self._write_peak_down()
        self._alive -= self._storages.pop(key).bytes

    def _note_peak(self, scratch: int = 0) -> None:
        if self._alive + scratch > self._peak_bytes:
            self._peak_bytes, self._at_peak = self._alive + scratch, True
            if scratch:
                self._peak = Snapshot([*self._storages.values(), _Storage(scratch, ACTIVATIONS)])
                self._at_peak = False

    def _write_peak_down(self) -> None:
        if self._at_peak:
            self._peak, self._at_peak = self.snapshot(), False

    def _fsdp_buffers(self, name: str, args: tuple, kwargs: dict) -> None:
        if name == "fsdp::chunk_cat":
            self.label([*args[0], kwargs["out"]], UNREDUCED)
        else:
            self.label([t for t in _tensors((args, kwargs)) if self._storage(t).kind != PARAMETERS], GATHERED)

    def _communication(self, schema: torch.FunctionSchema, args: tuple, kwargs: dict, out: Any) -> None:
        if schema.name in _NOT_SENDING:
            return
        if schema.name not in _COLLECTIVES and schema.name != "c10d::send":
            raise NotImplementedError(f"the ledger does not know how many bytes {schema.name} sends")
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        group = _process_group(given["process_group"] if "process_group" in given else given["group_name"])
        if schema.name == "c10d::_reduce_scatter_base_":  # FSDP's; what comes out is the gradient
            self.label([given["output_tensor"]], GRADIENTS)
        whole = max(tensor.nbytes for tensor in _tensors((args, kwargs, out)))
        if schema.name == "c10d::send":
            self.done[Traffic("send", group.group_name)] += whole
            return
        collective, times = _COLLECTIVES[schema.name]
        ranks = group.size()
        self.done[Traffic(collective, group.group_name)] += times * whole * (ranks - 1) // ranks


def _process_group(argument: Any) -> ProcessGroup:
    """From whatever an operator was given: the group, boxed or not, or its name."""
    if isinstance(argument, str):
        return torch.distributed.distributed_c10d._resolve_process_group(argument)
    return argument if isinstance(argument, ProcessGroup) else ProcessGroup.unbox(argument)


@functools.cache
def _name(func: torch._ops.OpOverload) -> str:
    return func._schema.name


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def flash_backward_scratch(q: tuple[int, ...], documents: int) -> int:
    """Bytes that FlashAttention's variable-length backward takes to add up dq, in fp32 and with 128 tokens more for
    each document. q: [tokens, heads, head_dim]."""
    tokens, heads, head_dim = q
    return (tokens + 128 * documents) * heads * head_dim * 4
