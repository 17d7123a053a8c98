"""Text to token ids and back, from the tokenizer folder of any Hugging Face model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

DEBUG_TOKENIZER = Path(__file__).parent.parent / "assets" / "debug_tokenizer"


class TokenizerError(ValueError):
    """A tokenizer folder is missing, incomplete or contradicts itself."""


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer for documents that nobody vouches for.

    BOS and EOS are placed here, once, and never by the tokenizer's own post-processor; text that spells a special
    token (``<|end_of_text|>`` in a web page) is encoded as the characters it is.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    """Changes with anything that could change an encoding; part of every cache key and of the resume check."""

    def __post_init__(self) -> None:
        self._prepare_backend()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare_backend()  # a pickled backend forgets encode_special_tokens

    def _prepare_backend(self) -> None:
        # Raw text never becomes a BOS or EOS, not even where tokenizer.json forgot to call those special.
        marks = [self.backend.id_to_token(mark) for mark in (self.bos_id, self.eos_id) if mark is not None]
        self.backend.add_special_tokens(marks)
        self.backend.encode_special_tokens = True
        # tokenizer.json may carry the limits of whoever saved it; documents are cut by the packer alone.
        self.backend.no_truncation()
        self.backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1, added tokens included: the least number of rows an embedding table needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of one document. A tokenizer without BOS (or EOS) adds none."""
        return self.encode_batch([text], add_bos=add_bos, add_eos=add_eos)[0]

    def encode_batch(self, texts: Sequence[str], *, add_bos: bool = True, add_eos: bool = True) -> list[list[int]]:
        """Token ids of each document, encoded in parallel threads (see TOKENIZERS_PARALLELISM)."""
        head = [self.bos_id] if add_bos and self.bos_id is not None else []
        tail = [self.eos_id] if add_eos and self.eos_id is not None else []
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [head + encoding.ids + tail for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens spelled out."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


def tokenizer_folder(hf_assets_path: str) -> Path:
    """The folder that ``model.hf_assets_path`` names, which need not exist."""
    return DEBUG_TOKENIZER if hf_assets_path == "debug" else Path(hf_assets_path).expanduser()


def load_tokenizer(hf_assets_path: str) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder, or the one shipped with the package for ``"debug"``.

    The folder needs ``tokenizer.json``. BOS and EOS are taken from the first of these that names them:
    ``tokenizer_config.json``, ``special_tokens_map.json`` (tokens), ``config.json``, ``generation_config.json`` (ids).
    A tokenizer with neither is accepted.

    Raises:
        TokenizerError: no such folder, no readable ``tokenizer.json``, or a BOS/EOS that is not in the vocabulary.
    """
    folder = tokenizer_folder(hf_assets_path)
    if not folder.is_dir():
        raise TokenizerError(
            f"model.hf_assets_path={hf_assets_path}: no such folder. Give a local folder that holds tokenizer.json "
            "(nothing is downloaded), or `debug` for the tokenizer of the package."
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"model.hf_assets_path={hf_assets_path}: the folder has no tokenizer.json. Other formats "
            "(tokenizer.model, vocab.json + merges.txt) must be converted first."
        )
    content = file.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception and ValueError
        raise TokenizerError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from error

    bos_id = _special_id(folder, backend, "bos")
    eos_id = _special_id(folder, backend, "eos")
    if eos_id is None:
        logger.warning("The tokenizer in %s has no EOS: documents will not end in a token of their own.", folder)
    identity = hashlib.sha256(content)
    identity.update(f"{bos_id} {eos_id}".encode())
    return Tokenizer(backend, bos_id, eos_id, identity.hexdigest()[:16])


def _special_id(folder: Path, backend: tokenizers.Tokenizer, name: str) -> int | None:
    """Id of BOS or EOS (``name``: bos or eos); None where the folder names none, or says null."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = _read_json(folder / file)
        if f"{name}_token" in settings:
            token = settings[f"{name}_token"]
            token = token.get("content", token) if isinstance(token, dict) else token
            if token is None:
                return None
            token_id = backend.token_to_id(token) if isinstance(token, str) else None
            if token_id is None:
                raise TokenizerError(f"{folder / file}: {name}_token {token!r} is not in the vocabulary.")
            return token_id
    for file in ("config.json", "generation_config.json"):
        token_id = _read_json(folder / file).get(f"{name}_token_id")
        if isinstance(token_id, list):  # several ways to stop generating; the first one ends a document
            token_id = token_id[0] if token_id else None
        if token_id is not None:
            if token_id not in backend.get_vocab(with_added_tokens=True).values() or type(token_id) is not int:
                raise TokenizerError(f"{folder / file}: {name}_token_id {token_id!r} is not in the vocabulary.")
            return token_id
    return None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} holds a {type(content).__name__} where a JSON object is expected.")
    return content
