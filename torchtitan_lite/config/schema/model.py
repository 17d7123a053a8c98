"""The model and its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ModelArgsOverrides:
    """Single fields of the flavor, replaced. Unset ones keep the flavor's value."""

    dim: int | None = None
    """Width of the residual stream."""

    n_layers: int | None = None
    """Number of transformer blocks."""

    n_heads: int | None = None
    """Number of query heads; dim must be a multiple of it."""

    n_kv_heads: int | None = None
    """Number of key/value heads; n_heads must be a multiple of it."""

    head_dim: int | None = None
    """Channels of one head, an even number; dim / n_heads in most models."""

    ffn_hidden_dim: int | None = None
    """Width of the SwiGLU feed-forward layer."""

    vocab_size: int | None = None
    """Rows of the embedding table; may exceed the tokenizer's size (padded vocabulary)."""

    max_seq_len: int | None = None
    """Longest position the RoPE settings are meant for; training.seq_len may not exceed it."""

    rope_theta: float | None = None
    """Base of the rotary frequencies."""

    norm_eps: float | None = None
    """Epsilon of every RMSNorm."""

    tie_embeddings: bool | None = None
    """Use the embedding table as the output projection too."""

    sliding_window: int | None = None
    """Tokens that a token of a sliding-window layer attends, itself included. Needs a block-causal attention."""

    sliding_window_pattern: list[bool] | None = None
    """Which layers slide, repeated over the depth: [true, false] = every other layer, starting with the first.
    Unset with a sliding_window: all of them."""


@dataclass
class Model:
    name: Literal["llama3"] = "llama3"
    """Model family."""

    flavor: str = "debugmodel"
    """SIZE, SIZE_ATTENTION or ATTENTION: sizes debugmodel, 1B, 3B, 8B, 70B, 405B, and hf, which reads config.json of a
    Llama-architecture model in hf_assets_path; attentions sdpa, sdpa_block_causal, flex_block_causal. A size alone is
    plain sdpa; an attention alone keeps the size of the file."""

    hf_assets_path: str = "debug"
    """Folder with a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json), or `debug` for the byte-level BPE
    of 2,048 entries that comes with the package. The flavor hf reads the model's config.json there too."""

    varlen_engine: Literal["auto", "flash", "nested", "cpu"] = "auto"
    """What runs sdpa_block_causal: flash = torch.nn.attention.varlen (CUDA, bfloat16), nested = NestedTensor SDPA
    (CUDA), cpu = the project's CPU operator. auto takes cpu on the CPU, and on CUDA flash, or nested for float32."""

    args: ModelArgsOverrides = field(default_factory=ModelArgsOverrides)
