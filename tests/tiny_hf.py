"""Tiny random models of transformers, saved as they save."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def hf_model(seed: int = 0, **changes: object) -> transformers.LlamaForCausalLM:
    """A model whose errors show: attention is far from uniform, norms are not one, logits are of order one."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SHAPE, **changes})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1, 0.2)
            else:
                parameter.normal_(0, 0.2 if "q_proj" in name or "k_proj" in name else 0.12)
    return model


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: object) -> Path:
    """The folder of such a model."""
    hf_model(**changes).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder
