"""Short texts from the model while it trains."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Samples:
    prompts: list[str] = field(default_factory=list)
    """Texts that the model goes on with before the first step, every freq steps, and after the last; what it writes
    goes to the log, samples.jsonl and TensorBoard. Not under tensor, context or pipeline parallelism."""

    freq: int = 100
    """Steps between two samples."""

    max_new_tokens: int = 64
    """Tokens that each prompt is gone on with, at most."""

    temperature: float = 0.0
    """0: always the likeliest token. Above it, draws are seeded by training.seed, the same at every step."""

    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability are drawn from."""

    chat: bool = False
    """Take each prompt for what a user says, and have the model answer by the chat template."""
