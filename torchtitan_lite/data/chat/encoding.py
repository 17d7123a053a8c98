"""From a document's text to its tokens as they are stored: of plain text, and of chats with what is supervised."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.chat.answers import WHAT_WORKS, Rendering, render, render_answers
from torchtitan_lite.data.chat.template import (
    BEGIN,
    END,
    ChatTemplate,
    ChatTemplateError,
    RefusedByTemplate,
    load_chat_template,
)
from torchtitan_lite.data.sources.document import BadRecord, Source, SourceError
from torchtitan_lite.data.sources.resolve import format_of, sources_of
from torchtitan_lite.data.supervision import mark
from torchtitan_lite.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer, tokenizer_folder

CHAT_VERSION = 2
"""Raised whenever the same chat, template and tokenizer would give other tokens, or others of them supervised."""

_SAMPLE = (
    {"role": "user", "content": "What is one and one?"},
    {"role": "assistant", "content": "It is two."},
)


_NO_TOKENS = np.empty(0, dtype=np.int32)  # of the same type as those of its neighbours in a batch


class Encoded(NamedTuple):
    """The tokens of a document as they are stored (:mod:`torchtitan_lite.data.supervision`), or why it has none."""

    tokens: Sequence[int] | np.ndarray
    problem: str | None = None


class Encoder(Protocol):
    """Makes tokens of a source's documents. Pickles, so that it can travel to other processes."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that could change an encoding; part of the cache's key."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What a position in the data depends on beside text and tokenizer, each under a name to be told by."""

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """One for each text."""


@dataclass(frozen=True)
class TextEncoder:
    """Text between BOS and EOS; of nothing but white space, no tokens."""

    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint

    @property
    def settings(self) -> Mapping[str, str]:
        return {}

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        encoded = self.tokenizer.encode_batch(texts)
        return [Encoded(ids if text.strip() else []) for text, ids in zip(texts, encoded, strict=True)]


@dataclass(frozen=True)
class ChatEncoder:
    """Chats as :mod:`torchtitan_lite.data.sources.chats` writes them down.

    A list of messages is rendered by the template. The rendering is tokenised once, with the special tokens it spells
    and nothing added. What is supervised of an answer is all up to its end-of-turn token, which must be one special
    token with nothing but white space behind it. Prompt and completion that are text are tokenised as text is, BOS
    first; the completion and the EOS behind it are supervised.
    """

    tokenizer: Tokenizer
    format: str
    template: ChatTemplate | None  # None serves prompts and completions that are text
    train_on: str

    @cached_property
    def fingerprint(self) -> str:
        identity = [CHAT_VERSION, self.tokenizer.fingerprint, *self.settings.values()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    @cached_property
    def settings(self) -> Mapping[str, str]:
        template = "none" if self.template is None else json.dumps(self.template.identity)
        return {
            "format": self.format,
            "train_on": self.train_on,
            "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16],
        }

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """One for each text; "", which stands for a bad record, has no tokens."""
        laid_out: list[Rendering | tuple[str, str] | BadRecord | None] = [self._laid_out(text) for text in texts]
        renderings = [one for one in laid_out if isinstance(one, Rendering)]
        pairs = [one for one in laid_out if type(one) is tuple]
        rendered = self._encode_renderings(renderings)
        paired = self._encode_pairs(pairs)
        encoded = []
        for one in laid_out:
            if one is None:
                encoded.append(Encoded(_NO_TOKENS))
            elif isinstance(one, BadRecord):
                encoded.append(Encoded(_NO_TOKENS, str(one)))
            else:
                encoded.append(next(rendered if isinstance(one, Rendering) else paired))
        return encoded

    def _laid_out(self, text: str) -> Rendering | tuple[str, str] | BadRecord | None:
        """What is to be tokenised of a chat: its rendering, or its prompt and completion."""
        if not text:
            return None
        chat = json.loads(text)
        if isinstance(chat.get("prompt"), str):
            return chat["prompt"], chat["completion"]
        try:
            return self._rendered(chat)
        except BadRecord as bad:
            return bad

    def _rendered(self, chat: dict[str, Any]) -> Rendering:
        if self.template is None:
            raise BadRecord(f"its messages need a chat template, but {_NO_TEMPLATE}")
        prompt = chat.get("prompt", [])
        messages, tools = [*prompt, *chat.get("completion", chat.get("messages"))], chat.get("tools", [])
        for value in _texts([messages, tools]):
            if found := self._spells_special.search(value):
                raise BadRecord(
                    f"its text spells {found[0]!r}, which would become that special token; leave it out, or write it "
                    "in another way"
                )
        if self.train_on == "all":
            return Rendering(render(self.template, messages, tools), [])
        return render_answers(self.template, messages, tools, len(prompt))

    # -- rendered chats ------------------------------------------------------------------------------------------------

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """Recognises special tokens, and adds nothing. Offsets are as the characters lie, no white space left out."""
        settings = json.loads(self.tokenizer.backend.to_str())
        return tokenizers.Tokenizer.from_str(json.dumps({**settings, "post_processor": None}))

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return {token: content.content for token, content in added.items() if content.special}

    @cached_property
    def _spells_special(self) -> re.Pattern[str]:
        longest_first = sorted([*self._special.values(), BEGIN, END], key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _encode_renderings(self, renderings: list[Rendering]) -> Iterator[Encoded]:
        encodings = self._backend.encode_batch([one.text for one in renderings], add_special_tokens=False)
        alone = functools.cache(lambda text: self._backend.encode(text, add_special_tokens=False).ids)
        for rendering, encoding in zip(renderings, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            supervised = np.full(len(ids), self.train_on == "all")
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            special = self._spelled_special(rendering.text, ids, offsets)
            try:
                for number in range(len(rendering.answers)):
                    supervised[self._answer_tokens(rendering, number, ids, offsets, special, alone)] = True
            except BadRecord as bad:
                yield Encoded(_NO_TOKENS, str(bad))
            else:
                yield Encoded(mark(ids, supervised))

    def _spelled_special(self, text: str, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Places of the special tokens, rising. One that stands for text it does not spell, as <unk> may, is none."""
        places = np.flatnonzero(np.isin(ids, list(self._special))).tolist()
        spelled = [place for place in places if self._special[ids[place]] in text[slice(*offsets[place])]]
        return np.array(spelled, dtype=np.int64)

    def _answer_tokens(
        self,
        rendering: Rendering,
        number: int,
        ids: np.ndarray,
        offsets: np.ndarray,
        special: np.ndarray,
        alone: Any,
    ) -> slice:
        """The tokens of an answer, its end-of-turn token the last.

        Raises:
            BadRecord: its tokens are not those that follow the prompt's, or no end-of-turn token ends it.
        """
        begin, end = rendering.answers[number]
        text, (starts, ends) = rendering.text, offsets.T
        first, stop = np.searchsorted(starts, [begin, end]).tolist()
        before, marks = special[special < first], special[(special >= first) & (special < stop)]
        # Special tokens cut the text before it is tokenised, so that only what follows the last one can merge.
        since = int(before[-1]) if len(before) else 0
        prompt = text[starts[since] if len(before) else 0 : begin]
        if alone(prompt) != ids[since:first].tolist():
            raise BadRecord(
                f"answer {number + 1}: {_seam(text, begin)} are tokenised together, so that the prompt alone would end "
                "in other tokens; what works: an answer that begins without white space, or a template that trims it"
            )
        last = int(marks[-1]) if len(marks) else stop - 1
        if not len(marks) or text[ends[last] : end].strip():
            raise BadRecord(
                f"answer {number + 1}: no special token ends it ({text[begin:end][-20:]!r}), so that the model would "
                f"not learn to stop; what works: {WHAT_WORKS}"
            )
        if len(marks) > 1 and not text[ends[marks[-2]] : starts[last]].strip():
            raise BadRecord(
                f"answer {number + 1}: several special tokens end it ({text[starts[marks[-2]] : end]!r}), and one "
                f"must; what works: {WHAT_WORKS}"
            )
        return slice(first, last + 1)

    # -- prompts and completions that are text -------------------------------------------------------------------------

    def _encode_pairs(self, pairs: list[tuple[str, str]]) -> Iterator[Encoded]:
        prompts = self.tokenizer.encode_batch([prompt for prompt, _ in pairs], add_eos=False)
        wholes = self.tokenizer.encode_batch([prompt + completion for prompt, completion in pairs])
        for (prompt, completion), prompt_ids, ids in zip(pairs, prompts, wholes, strict=True):
            if self.tokenizer.eos_id is None:
                yield Encoded(_NO_TOKENS, "the tokenizer has no EOS, so that the model would not learn to stop")
            elif ids[: len(prompt_ids)] != prompt_ids:
                seam = _seam(prompt + completion, len(prompt))
                yield Encoded(
                    _NO_TOKENS,
                    f"{seam} are tokenised together, so that the prompt alone would end in other tokens; what works: "
                    "move white space from the end of the prompt to the beginning of the completion, or the other way "
                    "round",
                )
            else:
                yield Encoded(mark(ids, (np.arange(len(ids)) >= len(prompt_ids)) | (self.train_on == "all")))


_NO_TEMPLATE = (
    "model.hf_assets_path has none (chat_template.jinja, or chat_template in tokenizer_config.json); "
    "data.chat_template names a file with one"
)


def encoder_of(source: Source, tokenizer: Tokenizer, hf_assets_path: str) -> Encoder:
    """What makes tokens of a source's documents.

    Raises:
        ChatTemplateError: there is no chat template where it needs one, or it is broken.
    """
    format = format_of(source)
    if format == "text":
        return TextEncoder(tokenizer)
    template = load_chat_template(tokenizer_folder(hf_assets_path), source.chat_template)
    if template is None and format == "messages":
        raise ChatTemplateError(f"{source.name}: chats need a chat template, but {_NO_TEMPLATE}")
    return ChatEncoder(tokenizer, format, template, source.train_on)


def check_chats(config: Config) -> list[str]:
    """What is wrong with the chat templates of a run, as far as it shows on a small chat before any data is read."""
    problems = []
    try:
        sources = [source for source in sources_of(config) if format_of(source) != "text"]
        tokenizer = load_tokenizer(config.model.hf_assets_path) if sources else None
    except (SourceError, TokenizerError):  # said by the checks of these
        return []
    for source in sources:
        try:
            encoder = encoder_of(source, tokenizer, config.model.hf_assets_path)
        except ChatTemplateError as error:
            problems.append(str(error))
            continue
        if problem := _problem_of_template(encoder):
            problems.append(problem)
    return list(dict.fromkeys(problems))


def _problem_of_template(encoder: ChatEncoder) -> str | None:
    if encoder.format != "messages":  # prompts and completions may be text, which no template has a say in
        return None
    try:
        encoder.template.render(_SAMPLE)
    except RefusedByTemplate:  # the data may be what it wants
        return None
    except BadRecord as bad:
        return str(bad)
    (encoded,) = encoder.encode_batch([json.dumps({"messages": _SAMPLE})])
    if encoded.problem is None:
        return None
    return f"The chat template ({encoder.template.where}), tried on a chat of two messages: {encoded.problem}"


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value out of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _seam(text: str, place: int) -> str:
    """The characters on both sides of a place."""
    return f"{text[max(place - 8, 0) : place]!r} and {text[place : place + 8]!r}"
