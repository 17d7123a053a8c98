"""Short texts from the model that is being trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.config.schema import Config
from torchtitan_lite.generation.generate import generate
from torchtitan_lite.generation.prompts import Prompts
from torchtitan_lite.generation.sampling import Sampling
from torchtitan_lite.models.llama3.model import Transformer


class Sample(NamedTuple):
    """A prompt as it was given, and what the model made of it."""

    prompt: str
    text: str


class SampleWriter:
    """Has the model go on with the prompts of the samples section.

    Args:
        model: whole on every rank, as FSDP leaves it. Ranks write the same text together.
        progress: called before each token.
    """

    def __init__(
        self, config: Config, model: Transformer, device: torch.device, progress: Callable[[], None] = lambda: None
    ) -> None:
        self.config, self.model, self.device, self.progress = config.samples, model, device, progress
        self.sampling = Sampling(self.config.temperature, top_p=self.config.top_p, seed=config.training.seed)
        self.prompts = Prompts.of(config)

    def write(self) -> list[Sample]:
        """One for each prompt. All ranks call this together."""
        training = self.model.training
        # A compiled block would be compiled anew for every length.
        with torch.compiler.set_stance("force_eager"):
            found = generate(
                self.model,
                self.prompts.tokens,
                max_new_tokens=self.config.max_new_tokens,
                sampling=self.sampling,
                stop_ids=self.prompts.stop_ids,
                agreed=self._as_rank_0,
                device=self.device,
            )
        self.model.train(training)
        continued = zip(self.config.prompts, self.prompts.tokens, found, strict=True)
        return [Sample(prompt, self._text(tokens, new)) for prompt, tokens, new in continued]

    def _text(self, tokens: list[int], new: list[int]) -> str:
        return self.prompts.side.decode(new) if self.config.chat else self.prompts.side.continued(tokens, new)

    def _as_rank_0(self, drawn: list[int]) -> list[int]:
        """Ranks that rounded differently would go different ways, and wait for each other for ever."""
        self.progress()
        tokens: Tensor = torch.tensor(drawn, device=self.device)
        dist.broadcast(tokens, src=0)
        return tokens.tolist()
