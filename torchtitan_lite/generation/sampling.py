"""The next token of each row, from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Raises ValueError, naming the number, for what cannot be.

    temperature: divides the logits; 0 takes the likeliest token.
    top_k: only the k likeliest tokens; 0: all.
    top_p: only the likeliest tokens that together reach this probability (Holtzman et al., 2020), at least one.
    seed: row i of a batch draws from a generator of its own, seeded by seed + i.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be at least 0, which takes the likeliest token")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be at least 0, which leaves all tokens in")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")


class Sampler:
    """Draws for a batch of ``rows``; what a row draws does not depend on the others."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self.sampling = sampling
        self._generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(rows)]

    def draw(self, logits: Tensor) -> list[int]:
        """A token for each row of logits [rows, vocab]. Raises ValueError where they are no numbers."""
        if logits.isnan().any():
            raise ValueError(
                "the model's logits are not numbers: some of its weights are none, or float16 is too narrow for it; "
                "--dtype float32 would tell"
            )
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1).tolist()
        chances = probabilities(logits.float().cpu(), self.sampling)
        return [
            int(torch.multinomial(row, 1, generator=generator))
            for row, generator in zip(chances, self._generators, strict=True)
        ]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is drawn from, [rows, vocab]: 0 for tokens that top_k or top_p leave out, the rest summing to 1."""
    ordered, tokens = (logits / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    chances = ordered.softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    if sampling.top_p < 1:
        chances = chances.where(before < sampling.top_p, 0)
    chances = chances / chances.sum(dim=-1, keepdim=True)
    return torch.zeros_like(chances).scatter(-1, tokens, chances)
