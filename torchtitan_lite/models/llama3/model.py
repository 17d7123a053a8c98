"""Llama 3 (Grattafiori et al., 2024) as one short module that knows nothing of parallelism, checkpointing or compiling.

Module names follow torchtitan. Any part may be missing: a pipeline stage is the same class with fewer parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.attention.backends import AttentionBackend, build_backend
from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.rope import apply_rope, rope_cos_sin, rope_frequencies


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over a pluggable back-end."""

    def __init__(self, args: ModelArgs, spec: MaskSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.head_dim, self.spec, self.backend = args.head_dim, spec, backend
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask_state: Any) -> Tensor:
        # [batch, seq, heads, head_dim]; the head count follows from the weights, which may be a shard of all heads
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = self.backend.forward(q, k, v, mask_state, self.spec)
        return self.wo(out.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_hidden_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """One layer. ``spec`` is the mask it wants; the model prepares the state for it."""

    def __init__(self, args: ModelArgs, spec: MaskSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.attention = Attention(args, spec, backend)
        self.feed_forward = FeedForward(args)
        # Normalised and weighted in fp32 inside the kernel, then cast once to the type of the input. Transformers
        # casts before the weight: in bf16 the two differ by one rounding.
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask_state: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask_state)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Llama 3. ``layers`` are keyed by their number in the whole model, so a stage keeps the names of its layers."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.backend = build_backend(
            args.attention, max_documents_per_row=args.max_documents_per_row, varlen_engine=args.varlen_engine
        )
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(args, spec, self.backend) for i, spec in enumerate(args.mask_specs)}
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        # With tied embeddings there is no second parameter that could come apart from the first.
        self.output: nn.Linear | None = (
            None if args.tie_embeddings else nn.Linear(args.dim, args.vocab_size, bias=False)
        )

    def forward(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        loss_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits, or the loss when ``labels`` and ``loss_fn`` are given.

        tokens: int [batch, seq], or hidden states [batch, seq, dim] where there is no embedding.
        document_ids: int [batch, seq]; None: each row is one document.
        positions: int [batch, seq], counted inside each document; None: counted along the row.
        labels: int [batch, seq], -100 where there is none.
        loss_fn: called with (hidden states [batch, seq, dim], output weight [vocab, dim], labels), so that the logits
            of the whole batch need never exist.
        """
        batch, seq = tokens.shape[:2]
        if document_ids is None:
            document_ids = torch.zeros(batch, seq, dtype=torch.int32, device=tokens.device)
        if positions is None:
            positions = torch.arange(seq, device=tokens.device).expand(batch, seq)
        frequencies = rope_frequencies(
            self.args.head_dim, self.args.rope_theta, self.args.rope_scaling, device=tokens.device
        )
        cos, sin = rope_cos_sin(positions, frequencies)
        specs = [self.args.mask_spec(int(i)) for i in self.layers]
        mask_states = {spec: self.backend.prepare(document_ids, spec) for spec in set(specs)}

        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer, spec in zip(self.layers.values(), specs, strict=True):
            h = layer(h, cos, sin, mask_states[spec])
        if self.norm is None:
            return h
        h = self.norm(h)
        weight = self.tok_embeddings.weight if self.args.tie_embeddings else self.output.weight
        return F.linear(h, weight) if loss_fn is None else loss_fn(h, weight, labels)
