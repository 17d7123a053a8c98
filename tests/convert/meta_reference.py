"""Llama as Meta defines it, naively: complex rotation of neighbouring channels, straight from a state dict."""

import math

import torch
import torch.nn.functional as F


def meta_logits(weights: dict[str, torch.Tensor], params: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [seq, vocab] of one row of tokens [seq]."""
    heads, kv_heads, dim = params["n_heads"], params["n_kv_heads"], params["dim"]
    head_dim, seq = dim // heads, len(tokens)
    frequencies = torch.tensor([params["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    if params.get("use_scaled_rope"):
        frequencies = torch.tensor([scaled(float(f), params["rope_scaling_factor"]) for f in frequencies])
    turns = torch.polar(torch.ones(seq, head_dim // 2), torch.arange(seq)[:, None] * frequencies)

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weight

    def rotated(x):
        pairs = torch.view_as_complex(x.reshape(seq, -1, head_dim // 2, 2))
        return torch.view_as_real(pairs * turns[:, None]).flatten(2)

    h = weights["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        w = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = norm(h, w["attention_norm.weight"])
        q = rotated((x @ w["attention.wq.weight"].T).reshape(seq, heads, head_dim))
        k = rotated((x @ w["attention.wk.weight"].T).reshape(seq, kv_heads, head_dim))
        v = (x @ w["attention.wv.weight"].T).reshape(seq, kv_heads, head_dim)
        out = torch.empty(seq, heads, head_dim)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv].T / math.sqrt(head_dim)
            scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), -math.inf)
            out[:, head] = scores.softmax(-1) @ v[:, kv]
        h = h + out.flatten(1) @ w["attention.wo.weight"].T
        x = norm(h, w["ffn_norm.weight"])
        gate = F.silu(x @ w["feed_forward.w1.weight"].T) * (x @ w["feed_forward.w3.weight"].T)
        h = h + gate @ w["feed_forward.w2.weight"].T
    return norm(h, weights["norm.weight"]) @ weights["output.weight"].T


def scaled(frequency: float, factor: float) -> float:
    """One frequency of Llama 3.1: kept, divided, or in between by its wavelength."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192:
        return frequency / factor
    smooth = (8192 / wavelength - 1) / 3
    return (1 - smooth) * frequency / factor + smooth * frequency
