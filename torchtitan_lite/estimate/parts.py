"""What one rank's part of a model costs, found by running a few of its layers on fake tensors.

All layers of a kind cost the same. A part is thinned to its first and last layer and one of each kind between, and for
the missing ones is added what their like did from one layer's start to the next one's, forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map_only

from torchtitan_lite.config.schema import ActivationCheckpoint, Optimizer
from torchtitan_lite.distributed.fsdp import expect_backward
from torchtitan_lite.estimate.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    KEYS_VALUES,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    PIPELINE,
    UNREDUCED,
    Ledger,
    Snapshot,
    Traffic,
)
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.models.llama3.nf4 import quantized_layers
from torchtitan_lite.training import loss
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.adamw8bit import make_tables, stored_parts
from torchtitan_lite.training.optimizer import optimizers_for

Bytes = Counter[str]
"""Of memory, by what it is for."""
Done = Counter["str | Traffic"]
"""As :attr:`Ledger.done`."""


@dataclass(frozen=True)
class State:
    """Bytes of what a rank keeps from step to step, by the elements of its shards; and of the gradients for them."""

    parameters: int
    gradients: int
    optimizer: int
    optimizer_step: Bytes  # the fullest moment of the update


@dataclass(frozen=True)
class Microbatch:
    """What a part has in memory, beside parameters and optimizer state, while one microbatch passes; and what is done.

    Attributes:
        saved: what the forward leaves for the backward.
        forward, backward: the fullest moment of each, all of this microbatch's included.
        after: what stays until the next microbatch.
    """

    saved: Bytes
    forward: Bytes
    backward: Bytes
    after: Bytes
    forward_done: Done
    backward_done: Done


@dataclass(frozen=True)
class Rows:
    """The shape of a microbatch.

    document_ids: int32 [rows, seq], real tensors of whole rows.
    tokens: how many of each row are this rank's.
    hidden: [rows, local seq, dim], of what goes from one pipeline stage to the next.
    dtype: that the model computes in.
    """

    document_ids: Tensor
    tokens: int
    hidden: tuple[int, int, int]
    dtype: torch.dtype


def count_state(model: nn.Module, config: Optimizer, ledger: Ledger) -> State:
    """Take one step of the optimizer, on the local shards, and forget it.

    Left out of its fullest moment are the matrices that Muon gathers, one or two at a time.
    """
    # As plain tensors: DTensors would have torch work out the step for the whole model first.
    named = {name: nn.Parameter(_local(p.detach()), p.requires_grad) for name, p in model.named_parameters()}
    trained = [shard for shard in named.values() if shard.requires_grad]
    quantized = [part for _, layer in quantized_layers(model) for part in stored_parts(layer.weight)]
    shards = [*named.values(), *quantized]
    for shard in trained:
        shard.grad = torch.empty_like(shard)
    gradients = [shard.grad for shard in trained]
    ledger.label(shards, PARAMETERS)
    ledger.label(gradients, GRADIENTS)
    compiled = config.name == "AdamW8bit" and config.implementation == "fused"
    if config.name == "AdamW8bit":
        config = replace(config, implementation="for-loop")  # fake tensors are not compiled
        with unset_fake_temporarily():
            make_tables()
    optimizer = optimizers_for(named, config)
    ledger.take_peak()
    optimizer.step()
    states = [part for state in optimizer.state.values() for value in state.values() for part in stored_parts(value)]
    ledger.label(states, OPTIMIZER)
    peak = ledger.take_peak().bytes()
    kept = [sum(t.nbytes for t in tensors) for tensors in (shards, gradients, states)]
    if compiled:  # into one kernel a tensor, without what lies between its operators
        peak = Counter(dict(zip((PARAMETERS, GRADIENTS, OPTIMIZER), kept, strict=True)))
    return State(*kept, peak)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Reading(NamedTuple):
    alive: Snapshot
    done: Done


class _Passage:
    """What was read while one microbatch went through the layers that are run, which are known by their places."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.start = self.read()
        self.before_forward: dict[int, _Reading] = {}
        self.between: _Reading
        self.before_backward: dict[int, _Reading] = {}
        self.end: _Reading
        self.peaks: dict[str, Snapshot] = {}
        ledger.take_peak()

    def read(self) -> _Reading:
        return _Reading(self._ledger.snapshot(), Counter(self._ledger.done))

    def take_peak(self, stretch: str) -> None:
        self.peaks[stretch] = self._ledger.take_peak()

    def at_forward(self, place: int) -> None:
        self.before_forward[place] = self.read()
        if place == 1:  # the missing layers lie behind the first: until here none of their memory is in use
            self.take_peak("head")

    def at_backward(self, place: int) -> None:
        self.before_backward[place] = self.read()
        if place == 0:
            self.take_peak("backward")

    def missing_memory(self, missing: Counter[int]) -> tuple[Bytes, Bytes]:
        """What the forward and the backward of missing layers would have added; ``missing``: how many are like that in
        a place."""
        forward, backward = Counter(), Counter()
        for place, times in missing.items():
            for total, readings, step in ((forward, self.before_forward, 1), (backward, self.before_backward, -1)):
                total.update(_less(readings[place + step].alive.bytes(), readings[place].alive.bytes(), times))
        return forward, backward

    def done(self, missing: Counter[int]) -> tuple[Done, Done]:
        """What forward and backward did, that of missing layers included."""
        forward = _less(self.between.done, self.start.done)
        backward = _less(self.end.done, self.between.done)
        for place, times in missing.items():
            for total, readings, step in ((forward, self.before_forward, 1), (backward, self.before_backward, -1)):
                total.update(_less(readings[place + step].done, readings[place].done, times))
        return forward, backward


def _less(minuend: Counter, subtrahend: Counter, times: int = 1) -> Counter:
    """The difference, times a number; negative counts stay."""
    return Counter({key: times * (minuend[key] - subtrahend[key]) for key in {*minuend, *subtrahend}})


def _plus(*terms: Counter) -> Counter:
    total: Counter = Counter()
    for term in terms:
        total.update(term)
    return total


def _fullest(*moments: Bytes) -> Bytes:
    return max(moments, key=lambda moment: moment.total())


def _of_microbatch(memory: Bytes) -> Bytes:
    return Counter({k: v for k, v in memory.items() if v and k not in (PARAMETERS, OPTIMIZER, PIPELINE)})


class ThinnedPart:
    """A rank's part of a model, with FSDP and on the meta device before, of which only some layers are left to run.

    Args:
        settings: of activation checkpointing, under which it is going to run.
        reduce_each, reshard_each: as of :func:`expect_backward`; both False for the stages of a pipeline.
    """

    def __init__(
        self,
        part: Transformer,
        ledger: Ledger,
        rows: Rows,
        settings: Collection[ActivationCheckpoint],
        *,
        reduce_each: bool,
        reshard_each: bool,
    ) -> None:
        self.part, self.ledger, self.rows = part, ledger, rows
        self.reduce_each, self.reshard_each = reduce_each, reshard_each
        self.layers = dict(part.layers.items())
        kept = {name for setting in settings for name in _layers_to_run(self._kinds(setting))}
        for name in list(part.layers):
            if name not in kept:
                del part.layers[name]
        for place, layer in enumerate(part.layers.values()):
            self._watch(place, layer)
        _put_masks_on_paper(part, rows.document_ids)
        if gather := getattr(part.backend, "_whole_rows", None):
            part.backend._whole_rows = ledger.region(KEYS_VALUES)(gather)
        self._loss_fn = loss.LinearCrossEntropy()
        self._passage: _Passage

    def measure(
        self, settings: dict[str, ActivationCheckpoint], own: str, microbatches: int
    ) -> dict[str, list[Microbatch]]:
        """A step of so many ``microbatches``, by setting.

        Of the run's ``own`` one: the first, one of those between if there are any, and the last. Of each other one:
        one of those between, or, if it has neither beginning nor end, the only one.
        """
        others = [name for name in settings if name != own]
        if microbatches == 1:
            order = [(name, True) for name in (own, *others)]
        else:
            order = [(name, False) for name in (own, *([own] if microbatches > 2 else []), *others)] + [(own, True)]
        passages = []
        # All are read before any is looked at: what a tensor was for may come out at the end.
        for name, last in order:
            kinds = self._kinds(settings[name])
            passages.append((name, last, self._missing(kinds), self._pass(last=last)))

        found: dict[str, list[Microbatch]] = {name: [] for name in settings}
        left: Bytes = Counter()  # by the missing layers, when their earlier microbatches were through
        for name, last, missing, passage in passages:
            forward, backward = passage.missing_memory(missing)
            found[name].append(_microbatch(passage, missing, left))
            left = Counter() if last else _plus(left, forward, backward)
        return found

    def _missing(self, kinds: dict[str, bool]) -> Counter[int]:
        """How many of the missing layers are like the one in a place of those that are run."""
        run = list(self.part.layers)
        like = {kinds[name]: place for place, name in enumerate(run) if 1 < place < len(run) - 1}
        return Counter(like[kind] for name, kind in kinds.items() if name not in run)

    def _kinds(self, setting: ActivationCheckpoint) -> dict[str, bool]:
        """Apply ``setting`` to all layers; whether each is checkpointed, which is what makes it cost what it does."""
        for layer in self.layers.values():
            vars(layer).pop("forward", None)
        apply_activation_checkpoint(SimpleNamespace(layers=self.layers), setting)
        return {name: "forward" in vars(layer) for name, layer in self.layers.items()}

    def _watch(self, place: int, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda module, inputs: self._passage.at_forward(place))

        def when_done(module: nn.Module, inputs: Any, out: Tensor) -> None:
            out.register_hook(lambda grad: self._passage.at_backward(place))

        layer.register_forward_hook(when_done)

    def _pass(self, *, last: bool) -> _Passage:
        part, rows, ledger = self.part, self.rows, self.ledger
        expect_backward(part, last=last, reduce_each=self.reduce_each, reshard_each=self.reshard_each)
        tokens = torch.zeros(rows.document_ids.shape[0], rows.tokens, dtype=torch.int64)
        entering = tokens
        if part.tok_embeddings is None:
            entering = torch.empty(rows.hidden, dtype=rows.dtype, requires_grad=True)
            ledger.label([entering], PIPELINE)
        passage = self._passage = _Passage(ledger)

        out = part(
            entering,
            document_ids=torch.zeros(rows.document_ids.shape, dtype=torch.int32),
            positions=tokens.int(),
            labels=tokens,
            loss_fn=self._loss if part.norm is not None else None,
        )
        passage.peaks.setdefault("head", Snapshot())
        passage.take_peak("forward")
        passage.between = passage.read()
        if part.norm is not None:
            out.backward()
        else:
            grad = torch.empty_like(out)
            ledger.label([grad], PIPELINE)
            out.backward(grad)
        del out, entering
        passage.take_peak("tail")
        ledger.label(map(_local, part.parameters()), PARAMETERS)  # FSDP pads uneven shards anew at the first forward
        ledger.label((_local(p.grad) for p in part.parameters() if p.grad is not None), GRADIENTS)
        ledger.relabel(ACTIVATIONS, UNREDUCED)  # what outlives a microbatch has to do with its gradients
        passage.end = passage.read()
        if last:
            for parameter in part.parameters():
                parameter.grad = None
        return passage

    def _loss(self, *args: Tensor) -> Tensor:
        def offset(*of: Any) -> Any:  # worked out on tensors, which must not be fake
            with unset_fake_temporarily():
                return compute_local_shape_and_global_offset(*of)

        with self.ledger.region(LOSS), mock.patch.object(loss, "compute_local_shape_and_global_offset", offset):
            return self._loss_fn(*args) / 1  # as by the number of targets


def _microbatch(passage: _Passage, missing: Counter[int], left: Bytes) -> Microbatch:
    forward, backward = passage.missing_memory(missing)
    peaks = {stretch: _plus(peak.bytes(), left) for stretch, peak in passage.peaks.items()}
    saved = _plus(_less(passage.between.alive.bytes(), passage.start.alive.bytes()), forward)
    forward_done, backward_done = passage.done(missing)
    return Microbatch(
        saved=_of_microbatch(Counter({kind: saved[kind] for kind in (ACTIVATIONS, LOSS, KEYS_VALUES)})),
        forward=_of_microbatch(_fullest(peaks["head"], _plus(peaks["forward"], forward))),
        backward=_of_microbatch(_fullest(_plus(peaks["backward"], forward), _plus(peaks["tail"], forward, backward))),
        after=_of_microbatch(_plus(passage.end.alive.bytes(), left, forward, backward)),
        forward_done=forward_done,
        backward_done=backward_done,
    )


def _layers_to_run(kinds: dict[str, bool]) -> set[str]:
    """The first two layers and the last, and of each kind one between: FSDP gathers one layer ahead of the backward, so
    that the layer behind the first, too, finds other things in memory than those that follow."""
    names = list(kinds)
    of_each_kind = {kinds[name]: name for name in reversed(names[2:-1])}
    return {*names[:2], names[-1], *of_each_kind.values()}


def _put_masks_on_paper(part: Transformer, document_ids: Tensor) -> None:
    """Let the mask states be made from real ``document_ids``, which must be looked at, and be faked afterwards."""
    backend = getattr(part.backend, "inner", part.backend)  # under context parallelism there is one inside
    prepare = backend.prepare

    def on_paper(ids: Tensor, *args: Any) -> Any:
        mode = ids.fake_mode
        with unset_fake_temporarily():
            state = prepare(document_ids, *args)
        return tree_map_only(Tensor, mode.from_tensor, state)

    backend.prepare = on_paper
