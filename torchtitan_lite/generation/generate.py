"""Tokens after tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.generation.cache import cached
from torchtitan_lite.generation.sampling import Sampler, Sampling
from torchtitan_lite.models.llama3.model import Transformer


@torch.no_grad()  # and not in inference mode, whose tensors FSDP may keep for the next step of training
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    on_token: Callable[[int, int], None] = lambda row, token: None,
    agreed: Callable[[list[int]], list[int]] = lambda drawn: drawn,
    device: torch.device | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to one of ``stop_ids``, which is the last if it comes.

    Args:
        model: whole, and in evaluation mode afterwards.
        prompts: of any length from 1 on; they run as one batch, padded on the left.
        on_token: told of each token as it is drawn, by the number of its prompt.
        agreed: given the tokens of a step, what they are to be: ranks that write together must write the same.
        device: that the model computes on; None: where its parameters are.

    Raises:
        ValueError: a prompt is empty, or has no room for as many tokens, or one that the model does not know.
    """
    longest = max(map(len, prompts), default=0)
    _check(model, prompts, longest + max_new_tokens)
    device = next(model.parameters()).device if device is None else device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    columns = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    sampler = Sampler(sampling, len(prompts))
    model.eval()

    new: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    with cached(model, padding, longest + max_new_tokens) as mask:
        for _ in range(max_new_tokens):
            positions = torch.arange(mask.filled, mask.filled + columns.shape[1], device=device) - padding[:, None]
            logits = model(columns, positions=positions.clamp(min=0), loss_fn=_last_logits)
            mask.filled += columns.shape[1]
            drawn = agreed(sampler.draw(logits))
            for row in sorted(running):
                new[row].append(drawn[row])
                on_token(row, drawn[row])
                if drawn[row] in stop_ids:
                    running.remove(row)
            if not running:
                break
            columns = torch.tensor(drawn, device=device)[:, None]
    return new


def _last_logits(h: Tensor, weight: Tensor, _: None) -> Tensor:
    """Of the last column alone: [batch, vocab]."""
    return F.linear(h[:, -1], weight)


def _check(model: Transformer, prompts: Sequence[Sequence[int]], length: int) -> None:
    problems = [f"prompt {i} is empty" for i, prompt in enumerate(prompts, 1) if not prompt]
    vocab, most = model.args.vocab_size, model.args.max_seq_len
    problems += [
        f"prompt {i}: token {max(prompt)} is beyond the model's vocabulary of {vocab}"
        for i, prompt in enumerate(prompts, 1)
        if prompt and max(prompt) >= vocab
    ]
    if not prompts:
        problems.append("no prompt")
    if length > most:
        problems.append(
            f"the longest prompt and its answer may take {length} tokens, more than the model's {most}; shorten the "
            "prompt, or ask for fewer new tokens"
        )
    if problems:
        raise ValueError("; ".join(problems))
