"""A tokenizer of one token per byte, and files of documents small enough to work out by hand."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = 0, 1


def save_character_tokenizer(folder: Path, *, config: dict | None = None) -> Path:
    """Byte-level BPE without merges; ids 0 and 1 are <bos> and <eos>; its post-processor adds both on its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_jsonl(path: Path, texts: list) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
