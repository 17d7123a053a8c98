"""Trains the byte-level BPE of 2,048 entries that the debug model uses, on text of this project's own making.

    python scripts/train_tokenizer.py                       # refreshes torchtitan_lite/assets/debug_tokenizer
    python scripts/train_tokenizer.py --out DIR FILE ...    # the same kind of tokenizer from other text

The output is a Hugging Face tokenizer folder. The same text gives the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"  # ids 0 and 1: special tokens come first


def project_text() -> list[Path]:
    """The project's own sources and pages, in a fixed order."""
    folders = [ROOT / name for name in ("torchtitan_lite", "scripts", "tests", "docs")]
    files = [file for folder in folders for file in folder.rglob("*")] + list(ROOT.glob("*"))
    return sorted(file for file in files if file.suffix in {".py", ".md"})


def train(texts: list[str]) -> Tokenizer:
    """Trains on whole documents. Raises ValueError when they hold too few different pairs for the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"{sum(map(len, texts)):,} characters of text give {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}: "
            "no other pair of tokens occurs twice. Train on more text."
        )
    # For other users of the folder; this project places BOS and EOS itself.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which ``transformers.AutoTokenizer`` loads too."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text to train on (default: this project's own)")
    parser.add_argument("--out", type=Path, default=ROOT / "torchtitan_lite" / "assets" / "debug_tokenizer")
    arguments = parser.parse_args()
    files = arguments.files or project_text()
    try:
        save(train([file.read_text(encoding="utf-8") for file in files]), arguments.out)
    except (OSError, ValueError) as error:
        sys.exit(f"train_tokenizer: {error}")
    print(f"{arguments.out}: {VOCAB_SIZE} entries from {len(files)} files; {BOS} is 0, {EOS} is 1")


if __name__ == "__main__":
    main()
