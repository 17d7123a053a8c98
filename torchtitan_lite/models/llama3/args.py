"""The shape of a Llama 3 model as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from torchtitan_lite.attention.backends import masks_documents
from torchtitan_lite.attention.masks import MaskSpec


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary frequencies beyond the context a model was first trained on.

    llama3: Llama 3.1's, which depends on the wavelength; linear: all by the same factor (Chen et al., 2023), which is
    all that it looks at.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: Literal["llama3", "linear"] = "llama3"


@dataclass(frozen=True)
class ModelArgs:
    """Shape and attention of one model. Raises ValueError, naming the numbers, if they do not fit together."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden_dim: int
    vocab_size: int = 128256
    max_seq_len: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention: str = "sdpa"
    sliding_window: int | None = None
    sliding_window_pattern: tuple[bool, ...] | None = None
    varlen_engine: str = "auto"
    max_documents_per_row: int | None = None
    own_head_dim: int | None = None  # None: dim / n_heads

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in (
                "dim",
                "n_layers",
                "n_heads",
                "n_kv_heads",
                "ffn_hidden_dim",
                "vocab_size",
                "max_seq_len",
            )
            if getattr(self, name) < 1
        ]
        if self.own_head_dim is not None:
            if self.own_head_dim < 2 or self.own_head_dim % 2:
                problems.append(f"head_dim={self.own_head_dim} must be even (rotary embedding pairs channels)")
        elif not problems and self.dim % (2 * self.n_heads):
            problems.append(
                f"dim={self.dim} must be a multiple of 2 x n_heads={self.n_heads} (rotary embedding pairs channels)"
            )
        if not problems and self.n_heads % self.n_kv_heads:
            problems.append(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            problems.append(f"rope_theta={self.rope_theta} and norm_eps={self.norm_eps} must be above 0")
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.append(f"sliding_window={self.sliding_window} must be at least 1 (the token itself counts)")
        if self.sliding_window_pattern is not None and self.sliding_window is None:
            problems.append("sliding_window_pattern is set without a sliding_window")
        if self.sliding_window_pattern is not None and not any(self.sliding_window_pattern):
            problems.append("sliding_window_pattern names no sliding layer: leave out sliding_window instead")
        if problems:
            raise ValueError("; ".join(problems))

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON gives them back (tuples as lists); :func:`args_from_json` is the inverse."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.n_heads if self.own_head_dim is None else self.own_head_dim

    @property
    def matmul_params(self) -> int:
        """Weights that take part in a matrix product with every token: linear layers and output projection."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.dim * self.ffn_hidden_dim) + self.dim * self.vocab_size

    @property
    def parameters(self) -> int:
        """All weights; a tied output projection is none of its own."""
        embedding = 0 if self.tie_embeddings else self.dim * self.vocab_size
        return self.matmul_params + embedding + (2 * self.n_layers + 1) * self.dim

    @property
    def parameter_names(self) -> list[str]:
        """Of the whole model, as it has them, without building one."""
        names = ["tok_embeddings"]
        for layer in range(self.n_layers):
            names += [f"layers.{layer}.attention.w{matrix}" for matrix in "qkvo"]
            names += [f"layers.{layer}.feed_forward.w{matrix}" for matrix in "123"]
            names += [f"layers.{layer}.attention_norm", f"layers.{layer}.ffn_norm"]
        names += ["norm"] if self.tie_embeddings else ["norm", "output"]
        return [f"{name}.weight" for name in names]

    def mask_spec(self, layer: int) -> MaskSpec:
        """The mask of one layer, counted from 0 over the whole model."""
        pattern = self.sliding_window_pattern or (True,)
        slides = pattern[layer % len(pattern)]
        return MaskSpec(
            document=masks_documents(self.attention), sliding_window=self.sliding_window if slides else None
        )

    @property
    def mask_specs(self) -> list[MaskSpec]:
        """The mask of each layer."""
        return [self.mask_spec(layer) for layer in range(self.n_layers)]


def args_from_json(values: dict[str, Any]) -> ModelArgs:
    """The arguments that :meth:`ModelArgs.as_json` wrote, whatever fields have come since."""
    known = {field.name for field in fields(ModelArgs)}
    given = {name: value for name, value in values.items() if name in known}
    if given.get("rope_scaling") is not None:
        given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
    if given.get("sliding_window_pattern") is not None:
        given["sliding_window_pattern"] = tuple(given["sliding_window_pattern"])
    return ModelArgs(**given)
