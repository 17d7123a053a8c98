"""Cross-entropy of the output projection, in chunks of tokens, so that the logits of a whole batch never exist.

At a vocabulary of 128,256 the fp32 logits of 16,384 tokens take 8.4 GB, and so do their gradients. Here each chunk's
logits are turned into gradients of hidden states and weight at once, in the forward pass, and dropped; backward only
scales by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan_lite.data.collator import IGNORE_INDEX

# Logits of one chunk: 2^27 fp32 numbers are 512 MB. Each chunk also reads and writes the whole weight gradient, so it
# must not be small.
_CHUNK_LOGITS = 1 << 27


def chunk_loss(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy over labelled tokens, fp32. h [tokens, dim], weight [vocab, dim], labels [tokens]."""
    _, _, losses, labelled, _ = _losses(h, weight, labels)
    return (losses * labelled).sum()


def chunk_loss_and_grads(h: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`chunk_loss` with its gradients: towards h, in h's type, and towards weight, fp32."""
    logits, lse, losses, labelled, target = _losses(h, weight, labels)
    # The gradient, softmax minus one at the target, takes the logits' place: a copy more at a large vocabulary is felt.
    grad = logits.sub_(lse).exp_().scatter_(-1, target, torch.expm1(-losses)).mul_(labelled).to(h.dtype)
    return (losses * labelled).sum(), grad @ weight, (grad.T @ h).float()


def _losses(h: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Logits fp32 [tokens, vocab], and as columns [tokens, 1] each: their log-sum-exp, the loss (of whatever target
    where there is none), whether there is a target, and the target."""
    logits = (h @ weight.T).float()
    labels = labels[:, None]
    labelled = labels != IGNORE_INDEX
    target = labels.where(labelled, 0)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    return logits, lse, lse - logits.gather(-1, target), labelled, target


class LinearCrossEntropy:
    """Callable as ``loss_fn(h, weight, labels)``: the *sum* of token losses, fp32, differentiable in h and weight.

    Divide by the number of labels of the whole global batch. A batch without labels gives 0 and zero gradients.

    compile_backend: compile the work on one chunk with this back-end of torch.compile.
    chunk_logits: about how many logits exist at a time.
    """

    def __init__(self, compile_backend: str | None = None, chunk_logits: int = _CHUNK_LOGITS) -> None:
        self.chunk_logits = chunk_logits
        self.chunk_loss: Callable[..., Tensor] = chunk_loss
        self.chunk_loss_and_grads: Callable[..., tuple[Tensor, Tensor, Tensor]] = chunk_loss_and_grads
        if compile_backend is not None:
            self.chunk_loss, self.chunk_loss_and_grads = (
                torch.compile(f, backend=compile_backend, fullgraph=True) for f in (chunk_loss, chunk_loss_and_grads)
            )

    def __call__(self, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """h [batch, seq, dim], weight [vocab, dim], labels int64 [batch, seq] with -100 where there is no target."""
        h, labels = h.flatten(0, -2), labels.flatten()
        size = chunk_size(h.shape[0], weight.shape[0], self.chunk_logits)
        if torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad):
            return _ChunkedLinearCrossEntropy.apply(h, weight, labels, size, self.chunk_loss_and_grads)
        chunks = zip(h.split(size), labels.split(size), strict=True)
        return torch.stack([self.chunk_loss(hc, weight, lc) for hc, lc in chunks]).sum()


def chunk_size(tokens: int, vocab: int, chunk_logits: int) -> int:
    """Tokens per chunk: equal chunks if the number of tokens allows (one shape to compile), near ``chunk_logits``."""
    chunks = -(-tokens * vocab // chunk_logits)
    even = next((n for n in range(chunks, 4 * chunks) if tokens % n == 0), chunks)
    return -(-tokens // even)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, labels, size, chunk_loss_and_grads):
        grad_h = torch.empty_like(h)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        losses = []
        for start in range(0, h.shape[0], size):
            tokens = slice(start, start + size)
            loss, grad_h[tokens], chunk_grad = chunk_loss_and_grads(h[tokens], weight, labels[tokens])
            grad_weight += chunk_grad
            losses.append(loss)
        ctx.save_for_backward(grad_h, grad_weight)
        ctx.weight_dtype = weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        grad_h, grad_weight = ctx.saved_tensors
        return grad_h * grad_loss, (grad_weight * grad_loss).to(ctx.weight_dtype), None, None, None
