"""Small models and packed rows for the tests here."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from torchtitan_lite.data.collator import Batch, collate_rows
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer

TINY = ModelArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=50, max_seq_len=256,
    attention="sdpa_block_causal",
)  # fmt: skip


def tiny_model(seed: int = 0, **changes) -> Transformer:
    """A model of two layers (more by ``changes``) whose weights are large enough for its parts to matter."""
    args = dataclasses.replace(TINY, **changes)
    model = Transformer(args)
    init_weights(model, args, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and "norm" not in name:
                parameter.mul_(8)
    return model


def packed_batch(rows: list[list[int]], seq: int, seed: int = 0, vocab: int = 50) -> Batch:
    """Rows of documents of random tokens, given their lengths."""
    generator = np.random.default_rng(seed)
    documents = [[generator.integers(0, vocab, length) for length in lengths] for lengths in rows]
    return collate_rows(documents, seq_len=seq, pad_id=0, max_documents_per_row=seq)
