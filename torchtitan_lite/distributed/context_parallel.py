"""Context parallelism: the ranks of a group share the tokens of each row.

As for Llama 3 (Grattafiori et al., 2024, section 3.3.2), a row is cut into 2 x degree equal chunks, and a rank takes
one from the head and its mirror image from the tail: the later a query, the more it costs under a causal mask, and this
evens it out. Every layer gathers the keys and values of whole rows and attends them with the rank's own queries. The
``document_ids`` are whole on every rank, so masks are made as ever.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.attention.backends import BLOCK_SIZE, AttentionBackend
from torchtitan_lite.attention.masks import Chunks, MaskSpec, first_keys
from torchtitan_lite.data.collator import PADDING_ID, Batch

if TYPE_CHECKING:
    from torchtitan_lite.models.llama3.args import ModelArgs
    from torchtitan_lite.models.llama3.model import Transformer

# [n, ...] -> [ranks x n, ...], differentiable. torch 2.13 gave it another name and warns of the old one.
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def head_tail_chunks(seq: int, rank: int, degree: int) -> Chunks:
    """The two stretches of a row that a rank holds, in the order in which it holds them; all of it on one rank.

    Raises ValueError when ``seq`` is not a multiple of 2 x degree.
    """
    if degree == 1:
        return ((0, seq),)
    if seq % (2 * degree):
        raise ValueError(f"context parallelism of degree {degree} cuts rows into {2 * degree} chunks, not {seq} tokens")
    length = seq // (2 * degree)
    return tuple((chunk * length, (chunk + 1) * length) for chunk in (rank, 2 * degree - 1 - rank))


def shard_batch(batch: Batch, rank: int, degree: int) -> Batch:
    """The part of a batch that a rank computes: tokens, labels and positions [batch, seq / degree] of its two chunks,
    and ``document_ids`` [batch, seq] whole.

    Raises ValueError when ``seq`` is not a multiple of 2 x degree.
    """
    if degree == 1:
        return batch
    chunks = head_tail_chunks(batch.tokens.shape[1], rank, degree)

    def own(field: Tensor) -> Tensor:
        return torch.cat([field[:, lo:hi] for lo, hi in chunks], dim=1)

    return Batch(own(batch.tokens), own(batch.labels), batch.document_ids, own(batch.positions))


def attended_pairs_by_rank(document_ids: Tensor, spec: MaskSpec, degree: int) -> list[int]:
    """Number of (query, key) pairs that the non-padding queries of each rank attend, in one head of one layer.

    document_ids: [batch, seq] integers on the CPU, whole.
    """
    attended = torch.arange(1, document_ids.shape[1] + 1) - first_keys(document_ids, spec)  # keys of each query
    attended = attended.masked_fill(document_ids == PADDING_ID, 0).sum(dim=0)  # [seq]
    return [
        sum(int(attended[lo:hi].sum()) for lo, hi in head_tail_chunks(len(attended), rank, degree))
        for rank in range(degree)
    ]


class ContextParallelAttention:
    """A back-end for the queries of one rank: it gathers keys and values and hands them to the ``inner`` one.

    Ranks must call it in step, also where activation checkpointing repeats a forward.
    """

    def __init__(self, inner: AttentionBackend, mesh: DeviceMesh) -> None:
        self.inner = inner
        self.rank, self.degree = mesh.get_local_rank(), mesh.size()
        self.group_name = mesh.get_group().group_name  # a string: compiled code guards on it and nothing else

    def prepare(self, document_ids: Tensor, spec: MaskSpec) -> Any:
        """document_ids [batch, seq], whole -> the inner back-end's mask state for the queries of this rank."""
        return self.inner.prepare(document_ids, spec, head_tail_chunks(document_ids.shape[1], self.rank, self.degree))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: Any, spec: MaskSpec) -> Tensor:
        """q [batch, seq / degree, heads, head_dim], k and v [batch, seq / degree, kv_heads, head_dim] -> like q."""
        return self.inner.forward(q, *self._whole_rows(k, v), state, spec)

    def _whole_rows(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """k and v of the whole rows, in their natural order, by one collective. Its backward sums the gradients of all
        ranks' queries and leaves each rank those of its own tokens."""
        gathered = _all_gather(torch.stack((k, v)), 0, self.group_name)  # [degree x 2, batch, seq / degree, ...]
        ranks = [pair.chunk(2, dim=2) for pair in gathered.chunk(self.degree)]  # (head, tail), k and v in each
        pairs = torch.cat([head for head, _ in ranks] + [tail for _, tail in reversed(ranks)], dim=2)
        return list(pairs.unbind())


def apply_context_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Let the model's layers attend whole rows from the tokens of this rank alone, in place. One rank: nothing changes.

    The model then wants what :func:`shard_batch` returns, and says so when it gets anything else. Apply it before
    activation checkpointing and compilation. mesh: 1-D, over the ranks that share rows.
    """
    if mesh.size() == 1:
        return
    model.backend = ContextParallelAttention(model.backend, mesh)
    for layer in model.layers.values():
        layer.attention.backend = model.backend
    signature = inspect.signature(model.forward)

    def check(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = signature.bind(*args, **kwargs).arguments
        ids, positions = given.get("document_ids"), given.get("positions")
        if ids is None or positions is None or ids.shape[1] != positions.shape[1] * mesh.size():
            shapes = {"document_ids": ids, "positions": positions}
            given = ", ".join(f"{name} {None if x is None else list(x.shape)}" for name, x in shapes.items())
            raise ValueError(
                f"context parallelism of degree {mesh.size()} was given {given}; it needs the document_ids of whole "
                "rows and the positions of this rank's tokens: cut batches with shard_batch"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


def context_parallel_problems(args: ModelArgs, degree: int, seq_len: int) -> list[str]:
    """Why rows of ``seq_len`` tokens cannot be shared by ``degree`` ranks; empty if they can.

    What a back-end cannot do under context parallelism, ``unsupported`` of :mod:`torchtitan_lite.attention.backends`
    says.
    """
    flex = args.attention == "flex_block_causal"
    unit = 2 * degree * (BLOCK_SIZE if flex else 1)
    if degree == 1 or seq_len % unit == 0:
        return []
    below = seq_len // unit * unit
    blocks = f", each of whole blocks of {BLOCK_SIZE} tokens for flex_block_causal" if flex else ""
    return [
        f"training.seq_len={seq_len}: parallelism.context_parallel_degree={degree} cuts each row into {2 * degree} "
        f"equal chunks{blocks}, so it must be a multiple of {unit}; "
        f"{f'{below} or ' if below else ''}{below + unit} would do"
    ]
