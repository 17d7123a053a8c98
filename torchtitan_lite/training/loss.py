"""Cross-entropy of the output projection, in chunks of tokens, so that the logits of a whole batch never exist.

At a vocabulary of 128,256 the fp32 logits of 16,384 tokens take 8.4 GB, and so do their gradients. Here each chunk's
logits are turned into gradients of hidden states and weight at once, in the forward pass, and dropped; backward only
scales by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_lite.data.collator import IGNORE_INDEX

# Logits of one chunk: 2^27 fp32 numbers are 512 MB. Each chunk also reads and writes the whole weight gradient, so it
# must not be small.
_CHUNK_LOGITS = 1 << 27


class VocabShard(NamedTuple):
    """Which rows of the output weight a rank holds: those from ``offset`` on; the ranks of ``group`` hold them all."""

    offset: int
    group: str


def chunk_loss(h: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard | None) -> Tensor:
    """Sum of the cross-entropy over labelled tokens, fp32. h [tokens, dim], weight [vocab, dim], labels [tokens].

    shard: None where the weight is whole. Otherwise the ranks of the group work on the same tokens and all return the
    loss over the whole vocabulary.
    """
    _, _, losses, labelled, _, _ = _losses(h, weight, labels, shard)
    return (losses * labelled).sum()


def chunk_loss_and_grads(
    h: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard | None, weight_learns: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`chunk_loss` with its gradients: towards h, in h's type, and, if it learns, towards weight, fp32. Where the
    weight is a shard, that of h is what its rows add to the sum over ranks."""
    logits, lse, losses, labelled, here, target = _losses(h, weight, labels, shard)
    # The gradient, softmax minus one at the target, takes the logits' place: a copy more at a large vocabulary is felt.
    grad = logits.sub_(lse).exp_()
    at_target = torch.expm1(-losses)
    if shard is not None:
        at_target = at_target.where(here, grad.gather(-1, target))
    grad = grad.scatter_(-1, target, at_target).mul_(labelled).to(h.dtype)
    return (losses * labelled).sum(), grad @ weight, (grad.T @ h).float() if weight_learns else None


def _losses(h: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, ...]:
    """Logits fp32 [tokens, vocab], and as columns [tokens, 1] each: their log-sum-exp (of the whole vocabulary's), the
    loss (of whatever target where there is none), whether there is a target, whether it is among these rows of the
    weight, and which of them (0 if none)."""
    logits = (h @ weight.T).float()
    labels = labels[:, None]
    labelled = here = labels != IGNORE_INDEX
    if shard is not None:
        labels = labels - shard.offset
        here = labelled & (labels >= 0) & (labels < weight.shape[0])
    target = labels.where(here, 0)
    lse, score = logits.logsumexp(dim=-1, keepdim=True), logits.gather(-1, target)
    if shard is not None:
        largest = all_reduce(lse, "max", shard.group)
        sums = all_reduce(torch.cat(((lse - largest).exp(), score.where(here, 0)), dim=-1), "sum", shard.group)
        lse, score = largest + sums[:, :1].log(), sums[:, 1:]
    return logits, lse, lse - score, labelled, here, target


class LinearCrossEntropy:
    """Callable as ``loss_fn(h, weight, labels)``: the *sum* of token losses, fp32, differentiable in h and weight.

    Divide by the number of labels of the whole global batch. A batch without labels gives 0 and zero gradients.

    compile_backend: compile the work on one chunk with this back-end of torch.compile.
    chunk_logits: about how many logits exist at a time.
    """

    def __init__(self, compile_backend: str | None = None, chunk_logits: int = _CHUNK_LOGITS) -> None:
        self.chunk_logits = chunk_logits
        self.chunk_loss: Callable[..., Tensor] = chunk_loss
        self.chunk_loss_and_grads: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = chunk_loss_and_grads
        if compile_backend is not None:
            self.chunk_loss, self.chunk_loss_and_grads = (
                torch.compile(f, backend=compile_backend, fullgraph=True) for f in (chunk_loss, chunk_loss_and_grads)
            )

    def __call__(self, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """h [batch, seq, dim], weight [vocab, dim], labels int64 [batch, seq] with -100 where there is no target.

        Under tensor parallelism the weight is a DTensor with its vocabulary sharded over a 1-D mesh. All ranks of the
        mesh must work on the same h (a DTensor over the mesh, sharded or not, or a plain tensor) and labels; all return
        the same loss. Raises ValueError for a weight sharded in another way.
        """
        shard, vocab = None, weight.shape[0]
        if isinstance(weight, DTensor):
            vocab = -(-vocab // weight.device_mesh.size())  # the largest shard's: all ranks must cut the same chunks
            h, weight, shard = _vocab_shard(h, weight)
        h, labels = h.flatten(0, -2), labels.flatten()
        size = chunk_size(h.shape[0], vocab, self.chunk_logits)
        if torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad):
            return _ChunkedLinearCrossEntropy.apply(h, weight, labels, shard, size, self.chunk_loss_and_grads)
        chunks = zip(h.split(size), labels.split(size), strict=True)
        return torch.stack([self.chunk_loss(hc, weight, lc, shard) for hc, lc in chunks]).sum()


def _vocab_shard(h: Tensor, weight: DTensor) -> tuple[Tensor, Tensor, VocabShard]:
    """All of h, and this rank's rows of the weight, as plain tensors."""
    mesh = weight.device_mesh
    if weight.placements != (Shard(0),):
        raise ValueError(
            f"output weight with placements {weight.placements}: the loss wants its vocabulary sharded over one mesh "
            "dimension, (Shard(0),)"
        )
    if not isinstance(h, DTensor):
        h = DTensor.from_local(h, mesh, [Replicate()], run_check=False)
    # A rank's gradient of h comes from its own rows of the weight; declared partial, it is summed over ranks and
    # sharded as h was in one reduce-scatter.
    h = h.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    _, (offset, _) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    return h, weight.to_local(), VocabShard(offset, mesh.get_group().group_name)


def chunk_size(tokens: int, vocab: int, chunk_logits: int) -> int:
    """Tokens per chunk: equal chunks if the number of tokens allows (one shape to compile), near ``chunk_logits``."""
    chunks = -(-tokens * vocab // chunk_logits)
    even = next((n for n in range(chunks, 4 * chunks) if tokens % n == 0), chunks)
    return -(-tokens // even)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, labels, shard, size, chunk_loss_and_grads):
        grad_h = torch.empty_like(h)
        weight_learns = ctx.needs_input_grad[1]  # not where adapters alone do: its gradient is gigabytes
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight_learns else None
        losses = []
        for start in range(0, h.shape[0], size):
            tokens = slice(start, start + size)
            loss, grad_h[tokens], chunk_grad = chunk_loss_and_grads(
                h[tokens], weight, labels[tokens], shard, weight_learns
            )
            if weight_learns:
                grad_weight += chunk_grad
            losses.append(loss)
        ctx.save_for_backward(grad_h, grad_weight)
        ctx.weight_dtype = weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        grad_h, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_h * grad_loss, grad_weight, None, None, None, None
