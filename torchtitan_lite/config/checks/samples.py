"""Rules on the texts that the model is to write while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.schema import Samples
from torchtitan_lite.data.chat.template import ChatTemplateError
from torchtitan_lite.data.tokenizer import TokenizerError
from torchtitan_lite.generation.prompts import Prompts
from torchtitan_lite.generation.sampling import Sampling


def samples_rules(run: Run) -> Iterator[str]:
    samples = run.config.samples
    if not samples.prompts:
        return
    try:
        Sampling(samples.temperature, top_p=samples.top_p)
    except ValueError as error:
        yield f"samples.{error}"
    if run.degrees is not None and (split := [name for name in ("tp", "cp", "pp") if getattr(run.degrees, name) > 1]):
        yield (
            f"samples.prompts under {', '.join(split)}: texts are written under data parallelism alone; leave them "
            "out, and have scripts/generate.py write from checkpoints"
        )


def samples_prompts(run: Run) -> Iterator[str]:
    """What the tokenizer and the chat template make of the prompts."""
    samples = run.config.samples
    if not samples.prompts:
        return
    try:
        longest = max(map(len, Prompts.of(run.config).tokens))
    except TokenizerError:
        return  # told by another rule
    except (ValueError, ChatTemplateError) as error:
        yield f"samples.prompts: {error}"
        return
    if run.args is not None and longest + samples.max_new_tokens > run.args.max_seq_len:
        yield (
            f"samples.max_new_tokens={samples.max_new_tokens}: with the longest prompt's {longest} tokens that is more "
            f"than the model's {run.args.max_seq_len}; ask for fewer, or shorten the prompt"
        )


def samples_warnings(samples: Samples) -> Iterator[str]:
    given, defaults = asdict(samples), asdict(Samples())
    if not samples.prompts and (unused := [name for name in given if given[name] != defaults[name]]):
        yield f"samples.{', '.join(unused)}: of no effect without samples.prompts"
