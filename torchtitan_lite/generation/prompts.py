"""The prompts of a configuration, as tokens."""

from __future__ import annotations

from typing import NamedTuple

from torchtitan_lite.config.schema import Config
from torchtitan_lite.generation.text import TextSide


class Prompts(NamedTuple):
    """What texts begin with, and what ends them."""

    side: TextSide
    tokens: list[list[int]]
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, config: Config) -> Prompts:
        """Those of a configuration. Raises ValueError for one that is empty, or cannot be rendered as a chat; and what
        :meth:`TextSide.of` raises."""
        samples = config.samples
        side = TextSide.of(config.model.hf_assets_path, config.data.chat_template)
        if not samples.chat:
            return cls(side, [side.prompt(text) for text in samples.prompts], side.stop_ids)
        tokens = [side.chat([{"role": "user", "content": text}]) for text in samples.prompts]
        return cls(side, tokens, side.chat_stop_ids())
