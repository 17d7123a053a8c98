"""Rules on the data to validate on, which is read, packed and split over ranks as the training data is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.schema import MixtureSource, Validation
from torchtitan_lite.data.chat.encoding import check_chats
from torchtitan_lite.data.held_out import validation_config
from torchtitan_lite.data.sources.resolve import check_sources

Rule = Callable[[Run], Iterator[str]]


def validation_rules(run: Run, of_rows: tuple[Rule, ...]) -> Iterator[str]:
    """``of_rows``: rules on seq_len, which hold for rows of validation too."""
    validation, parallelism = run.config.validation, run.config.parallelism
    if not validation.enable:
        return
    if validation.dataset is None and validation.dataset_path is None and not validation.mix:
        yield "validation.enable: no data; name it by validation.dataset, validation.dataset_path or [[validation.mix]]"
    if validation.mix and (validation.dataset is not None or validation.dataset_path is not None):
        yield "validation.dataset beside validation.mix: nothing would read it; make it a table there, or leave it out"
    for name in ("local_batch_size", "seq_len", "steps"):
        value = getattr(validation, name)
        if value != -1 and value < (2 if name == "seq_len" else 1):
            yield f"validation.{name}={value}: must be at least {2 if name == 'seq_len' else 1}, or -1"
    if validation.keep_best and not run.config.checkpoint.enable:
        yield "validation.keep_best: nothing is saved without checkpoint.enable; set it too"
    if validation.seq_len > 1 and validation.seq_len != run.config.training.seq_len:
        if parallelism.pipeline_parallel_degree > 1:
            yield (
                f"validation.seq_len={validation.seq_len}: a pipeline's stages exchange rows of training.seq_len="
                f"{run.config.training.seq_len}; leave it out"
            )
        own = replace(run, config=validation_config(run.config))
        for rule in of_rows:
            yield from (problem.replace("training.seq_len", "validation.seq_len") for problem in rule(own))
    rows, size = validation.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    rows = run.config.training.local_batch_size if rows == -1 else rows
    if parallelism.pipeline_parallel_degree > 1 and rows > 0 and size > 0 and rows % size:
        yield (
            f"validation.local_batch_size={validation.local_batch_size}, which means {rows} rows: must be a multiple "
            f"of parallelism.pipeline_parallel_microbatch_size={size}"
        )
    for number, table in enumerate(validation.mix, 1):
        if (table.weight, table.epochs) != (MixtureSource().weight, MixtureSource().epochs):
            yield (
                f"validation.mix, table {number}: weight and epochs say how much is trained on; every row is measured "
                "once, so leave them out"
            )


def validation_sources(run: Run) -> Iterator[str]:
    """What is wrong with the data and shows without reading a document."""
    validation = run.config.validation
    named = validation.dataset is not None or validation.dataset_path is not None
    if not validation.enable or named == bool(validation.mix):  # the latter is said by validation_rules
        return
    own = validation_config(run.config)
    for problem in check_sources(own):
        section, _, rest = problem.partition(".")
        of_training = section == "data" and not rest.startswith("mix")  # what training makes use of, and this does not
        if not of_training or (rest.startswith("split") and validation.split is not None):
            yield f"validation.{rest}"
    yield from (f"validation: {problem}" for problem in check_chats(own))


def validation_warnings(validation: Validation) -> Iterator[str]:
    given, defaults = asdict(validation), asdict(Validation())
    unused = [name for name in given if given[name] != defaults[name]]
    if unused and not validation.enable:
        yield f"validation.{', '.join(unused)}: of no effect without validation.enable"
