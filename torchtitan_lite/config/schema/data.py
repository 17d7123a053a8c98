"""What is read, and how documents are packed into rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class MixtureSource:
    """One of several sources, a ``[[data.mix]]`` table."""

    dataset: str = "pydocs"
    """As training.dataset."""

    dataset_path: str | None = None
    """As training.dataset_path."""

    name: str | None = None
    """Name in logs and metrics. Unset: taken from dataset_path or dataset."""

    weight: float = 1.0
    """Share of the tokens trained on, relative to the other weights."""

    epochs: int = 0
    """Passes over this source before it drops out of the mixture, reshuffled each time. 0: no end."""

    subset: str | None = None
    """As data.subset, which holds where this is unset; likewise split, revision and all below."""

    split: str | None = None
    """As data.split."""

    revision: str | None = None
    """As data.revision."""

    text_field: str | None = None
    """As data.text_field."""

    template: str | None = None
    """As data.template."""

    format: Literal["text", "messages", "prompt_completion"] | None = None
    """As data.format."""

    messages_field: str | None = None
    """As data.messages_field."""

    chat_template: str | None = None
    """As data.chat_template."""

    train_on: Literal["assistant", "all"] | None = None
    """As data.train_on."""


@dataclass
class Data:
    text_field: str = "text"
    """Field that holds the document."""

    template: str | None = None
    """Text of a document made from several fields, as in "{title}\\n\\n{body}"; replaces text_field. {{ and }} stand
    for braces."""

    format: Literal["text", "messages", "prompt_completion"] = "text"
    """What a record is. text: a document; messages: a chat, a list of messages with role and content;
    prompt_completion: what is given and what is learned, in fields of these names, both text or both lists of messages.
    """

    messages_field: str = "messages"
    """Field that holds the list of messages, for format = "messages". Tools are read from the field tools."""

    chat_template: str | None = None
    """Jinja file that renders chats. Unset: the template in model.hf_assets_path."""

    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens of a chat that are trained on: the assistant's answers (of prompt and completion, the completion), each
    with its end-of-turn token, or all."""

    subset: str | None = None
    """Subset (its configuration name) of a Hugging Face data set."""

    split: str = "train"
    """Split of a Hugging Face data set; slices such as train[:1%] work unless streaming."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face data set on the hub."""

    mix: list[MixtureSource] = field(default_factory=list)
    """Several sources instead of training.dataset, a [[data.mix]] table each; on the command line as one TOML array,
    --data.mix='[{dataset="pydocs", weight=1}, ...]'."""

    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that cannot be read or has no text: stop and name it, or leave it out and count it."""

    packing: Literal["best_fit", "greedy", "split", "none"] = "best_fit"
    """Which documents share a row. best_fit: those that fill it best; greedy: the next ones that fit; split: documents
    end to end, cut at each row's end; none: one document a row."""

    oversize: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a document longer than a row: pieces, its beginning, nothing, or an error."""

    packing_window: int = 100_000
    """Documents among which best_fit chooses, and which greedy and split shuffle."""

    max_documents_per_row: int = 0
    """Most documents packed into one row; sizes the offset table of the variable-length kernel. 0: seq_len / 32, but at
    least 16."""

    streaming: bool = False
    """Tokenise while training, for sets too large to do so ahead; ties a run to its number of data-parallel ranks."""

    streaming_buffer: int = 1024
    """Documents that each rank holds while streaming, for best_fit to choose among."""

    num_workers: int = 0
    """Loader processes per rank. 0: the training process assembles rows (streaming: tokenises) itself."""

    prefetch_factor: int = 2
    """Microbatches (streaming: chunks of documents) that each loader process prepares ahead."""

    num_proc: int = 1
    """Processes that read and tokenise the data set, once, at the first start."""

    cache_dir: str | None = None
    """Folder for tokenised data. Unset: the data sets library's own (HF_DATASETS_CACHE)."""
