"""Between text and tokens: prompts, chats, where an answer ends, and text that comes out bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from torchtitan_lite.data.chat.template import BEGIN, END, ChatTemplate, load_chat_template
from torchtitan_lite.data.sources.document import BadRecord
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER, Tokenizer, TokenizerError, load_tokenizer

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TextSide:
    """The tokenizer of a model, and its chat template if it has one.

    stop_ids: tokens that end a text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, assets: str, chat_template: str | None = None) -> TextSide:
        """From a tokenizer folder (``"debug"``: the package's). What ends a text is its EOS, and what
        ``generation_config.json``, or without one ``config.json``, calls so.

        Raises TokenizerError or ChatTemplateError.

        chat_template: a file, instead of the folder's own.
        """
        folder = DEBUG_TOKENIZER if assets == "debug" else Path(assets).expanduser()
        tokenizer = load_tokenizer(assets)
        return cls(tokenizer, load_chat_template(folder, chat_template), frozenset(_stop_ids(folder, tokenizer)))

    def prompt(self, text: str) -> list[int]:
        """A text to go on with, after a BOS if the tokenizer has one. Raises ValueError where that is no token."""
        ids = self.tokenizer.encode(text, add_eos=False)
        if not ids:
            raise ValueError("the prompt is empty, and the tokenizer has no BOS to begin with")
        return ids

    def chat(self, messages: Messages) -> list[int]:
        """A chat up to where the next answer begins.

        Raises:
            ValueError: there is no template, or it refuses the chat.
        """
        if self.template is None:
            raise ValueError("the tokenizer's folder has no chat template; --chat-template names a file with one")
        return self._special_seen(self._rendered(messages, generation_prompt=True))

    def chat_stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: those of a text, and the one that the template writes after an answer."""
        word = "fine"
        rendered = self._rendered([{"role": "user", "content": "How?"}, {"role": "assistant", "content": word}])
        after = self._special_seen(rendered.rpartition(word)[2])
        special = {token for token, added in self.tokenizer.backend.get_added_tokens_decoder().items() if added.special}
        return self.stop_ids | frozenset([token for token in after if token in special][:1])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer, without the token that ends it or other special ones."""
        return self.tokenizer.backend.decode(list(ids), skip_special_tokens=True)

    def continued(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """What ``ids`` add to the text of ``before``."""
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def _rendered(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        try:
            rendered = self.template.render(messages, generation_prompt=generation_prompt)
        except BadRecord as error:
            raise ValueError(str(error)) from None
        return rendered.replace(BEGIN, "").replace(END, "")

    def _special_seen(self, text: str) -> list[int]:
        """Tokens of a rendering: what spells a special token is one, and nothing is added."""
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        backend.encode_special_tokens = False
        return backend.encode(text, add_special_tokens=False).ids


class Streamed:
    """Text of tokens that come one at a time. A character of several tokens is held back until it is whole.

    before: tokens of a text that is gone on with; an answer has a text of its own. It matters where a word's token
        begins with its space, which tokenizers like Llama 2's leave out at the beginning of a text.
    """

    def __init__(self, side: TextSide, before: Sequence[int] = ()) -> None:
        self._side, self._ids = side, list(before)
        self._told = len(side.decode(self._ids))

    def add(self, token: int) -> str:
        """The text that this token has made certain."""
        self._ids.append(token)
        text = self._side.decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._tell(text)

    def rest(self) -> str:
        """What was held back."""
        return self._tell(self._side.decode(self._ids))

    def _tell(self, text: str) -> str:
        new, self._told = text[self._told :], len(text)
        return new


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> set[int]:
    found = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    files = [folder / name for name in ("generation_config.json", "config.json")]
    if file := next(filter(Path.is_file, files), None):  # the second counts where there is no first
        try:
            ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise TokenizerError(f"{file} is not valid JSON: {error}") from error
        found |= set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return found
