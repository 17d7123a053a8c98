"""Where a run's numbers go: metrics.jsonl, the console line, TensorBoard, Weights & Biases.

What each number means is said in docs/metrics.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.observability.logging import logger, paint
from torchtitan_lite.observability.progress import eta_text

_GIB = 2**30


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one logged step. Rates and shares are over the interval since the step logged before.

    Fractions lie in [0, 1], rates are per device. See docs/metrics.md for each formula.
    """

    step: int
    loss: float  # mean over the step's target tokens, of all ranks
    max_loss: float  # largest mean of a data-parallel rank
    grad_norm: float  # before clipping
    lr: float  # used by this step
    tokens_seen: int  # since the very start of the run, all ranks
    tps: float
    supervised_tps: float
    tflops: float
    mfu: float
    padding_fraction: float
    documents_per_row: float
    mask_density: float  # pairs within a document, of those of plain causal attention
    attention_imbalance: float  # attended pairs of the rank that has most, over the mean of all
    data_wait_fraction: float
    memory_gib: float
    memory_fraction: float
    time_s: float  # seconds per step
    shares: dict[str, float] = field(default_factory=dict)  # of the tokens so far, by source; empty if there is one


_NOT_IN_JSONL = {"tflops", "memory_fraction"}  # each follows from its neighbour and a constant of the machine


def json_line(metrics: StepMetrics) -> str:
    """``metrics`` as one line of JSON: floats to full precision, those that JSON lacks as "nan", "inf", "-inf".

    Python's ``float()`` reads all of these values back, bit for bit.
    """
    fields = {name: value for name, value in dataclasses.asdict(metrics).items() if name not in _NOT_IN_JSONL}
    if not metrics.shares:
        del fields["shares"]
    return json.dumps({name: _as_json(value) for name, value in fields.items()})


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def tags(metrics: StepMetrics) -> dict[str, float]:
    """``metrics`` under torchtitan's tag names, for TensorBoard and Weights & Biases."""
    return {
        "loss_metrics/global_avg_loss": metrics.loss,
        "loss_metrics/global_max_loss": metrics.max_loss,
        "grad_norm": metrics.grad_norm,
        "lr": metrics.lr,
        "n_tokens_seen": metrics.tokens_seen,
        "throughput(tps)": metrics.tps,
        "tflops": metrics.tflops,
        "mfu(%)": 100 * metrics.mfu,
        "time_metrics/end_to_end(s)": metrics.time_s,
        "time_metrics/data_loading(s)": metrics.time_s * metrics.data_wait_fraction,
        "time_metrics/data_loading(%)": 100 * metrics.data_wait_fraction,
        "memory/max_reserved(GiB)": metrics.memory_gib,
        "memory/max_reserved(%)": 100 * metrics.memory_fraction,
        "packing/supervised_tps": metrics.supervised_tps,
        "packing/padding(%)": 100 * metrics.padding_fraction,
        "packing/documents_per_row": metrics.documents_per_row,
        "packing/mask_density(%)": 100 * metrics.mask_density,
        "parallel/attention_imbalance": metrics.attention_imbalance,
        **{f"packing/share_of_{name}(%)": 100 * share for name, share in metrics.shares.items()},
    }


def console_line(metrics: StepMetrics, total_steps: int) -> str:
    """``metrics`` as the line of the log, coloured on a terminal."""
    eta = eta_text((total_steps - metrics.step) * metrics.time_s)
    return "  ".join(
        [
            paint(f"step: {metrics.step:2}", "red"),
            paint(f"loss: {metrics.loss:7.4f}", "green"),
            paint(f"grad_norm: {metrics.grad_norm:7.4f}", "yellow"),
            paint(f"memory: {metrics.memory_gib:5.2f}GiB({100 * metrics.memory_fraction:.2f}%)", "cyan"),
            paint(f"tps: {metrics.tps:,.0f}", "blue"),
            paint(f"tflops: {metrics.tflops:,.2f}", "cyan"),
            paint(f"mfu: {100 * metrics.mfu:.2f}%", "magenta"),
            f"eta: {eta}",
        ]
    )


def device_memory(device: torch.device) -> tuple[float, float]:
    """Peak memory so far in GiB, and as a share of what there is.

    CUDA: bytes reserved by torch's allocator, of the GPU's memory. CPU: resident size of this process, of the machine's
    memory.
    """
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
        peak, total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, psutil.virtual_memory().total
    return peak / _GIB, peak / total


def _step_of(line: str) -> int | None:
    """Step of a line of metrics.jsonl; None for what a killed process left unfinished."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None


class Validation(Protocol):
    """What a validation found; see torchtitan_lite/training/validate.py."""

    step: int

    def as_json(self) -> dict[str, Any]: ...

    def tags(self) -> dict[str, float]: ...

    def console_line(self) -> str: ...


def _drop_steps_after(path: Path, step: int) -> None:
    """Take the entries of later steps (and broken lines) out of a file of metrics, so that it reads as one run.

    A new run (step 0) moves the whole file of the earlier one aside instead.
    """
    if not path.exists():
        return
    if step == 0:
        others = (path.with_suffix(f".{number}.jsonl") for number in itertools.count(1))
        aside = next(other for other in others if not other.exists())
        os.replace(path, aside)
        logger.warning(f"{path.parent} holds an earlier run; its metrics are now in {aside.name}")
        return
    text = path.read_text(encoding="utf-8", errors="replace")  # a killed run may have cut a character in two
    lines = text.removesuffix("\n").split("\n")  # and not at what else ends lines: texts of the model may hold it
    kept = [line for line in lines if (of := _step_of(line)) is not None and of <= step]
    if len(kept) == len(lines) and text.endswith("\n"):  # else the next entry would join a last line cut at its end
        return
    logger.info(f"{path}: dropped what an earlier run logged after step {step} ({len(lines) - len(kept)} lines)")
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(rewritten, path)


class _Sink(NamedTuple):
    log: Callable[[dict[str, float], int], None]  # numbers by their tags, of a step
    log_text: Callable[[dict[str, str], int], None]
    close: Callable[[], None]


def _tensorboard(config: Config, start_step: int) -> _Sink:
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    folder = Path(config.job.dump_folder) / config.metrics.save_tb_folder
    # purge_step makes TensorBoard hide the entries of later steps that a killed run left in this folder.
    writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        writer.flush()  # or a killed run would lose the last two minutes

    def log_text(texts: dict[str, str], step: int) -> None:
        for tag, text in texts.items():
            # TensorBoard reads Markdown, in which four spaces and more leave a text as it is.
            writer.add_text(tag, "".join(f"    {line}\n" for line in text.split("\n")), step)
        writer.flush()

    return _Sink(log, log_text, writer.close)


def _wandb(config: Config) -> _Sink:
    try:
        import wandb
    except ImportError as error:
        raise ImportError('metrics.enable_wandb needs wandb: pip install "torchtitan_lite[wandb]"') from error

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "torchtitan_lite"),
        name=os.environ.get("WANDB_RUN_NAME"),
        dir=config.job.dump_folder,
        config=dataclasses.asdict(config),
        resume="allow",  # with WANDB_RUN_ID set, a resumed run continues the same page
    )

    def log(values: dict[str, Any], step: int) -> None:
        run.log(values, step=step)

    return _Sink(log, log, run.finish)


class MetricsLogger:
    """Writes each logged step to the console, metrics.jsonl and whatever else the run's ``metrics`` section names.

    Make one on the main rank only, and close it (it is a context manager). Entries after ``start_step`` that an
    earlier run left in the same folder are dropped; before a new run its file is moved aside.

    Args:
        config: the resolved configuration.
        start_step: steps done before this process started; 0 for a new run.

    Raises:
        ImportError: metrics.enable_wandb without wandb installed.
    """

    def __init__(self, config: Config, start_step: int) -> None:
        folder = Path(config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._total_steps = config.training.steps
        self._sinks: list[_Sink] = []
        if config.metrics.enable_tensorboard:
            self._sinks.append(_tensorboard(config, start_step))
        if config.metrics.enable_wandb:
            self._sinks.append(_wandb(config))
        path = folder / "metrics.jsonl"
        _drop_steps_after(path, start_step)
        self._validations = folder / "validation.jsonl"
        self._samples = folder / "samples.jsonl"
        for file in (self._validations, self._samples):
            _drop_steps_after(file, start_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # line-buffered: a killed run keeps every entry

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def log(self, metrics: StepMetrics) -> None:
        """Write one step everywhere."""
        self._file.write(json_line(metrics) + "\n")
        for sink in self._sinks:
            sink.log(tags(metrics), metrics.step)
        logger.info(console_line(metrics, self._total_steps))

    def log_validation(self, result: Validation) -> None:
        """Write what a validation found everywhere."""
        fields = {name: _as_json(value) for name, value in result.as_json().items()}
        with self._validations.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
        for sink in self._sinks:
            sink.log(result.tags(), result.step)
        logger.info(paint(result.console_line(), "green"))

    def log_samples(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        """Write texts everywhere, each beside the prompt that it goes on with."""
        with self._samples.open("a", encoding="utf-8") as file:
            for number, (prompt, text) in enumerate(samples, 1):
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
                logger.info(f"sample {number} after step {step}: {prompt!r} -> {text!r}")
        texts = {f"samples/prompt_{i}": f"{prompt}\n\n{text}" for i, (prompt, text) in enumerate(samples, 1)}
        for sink in self._sinks:
            sink.log_text(texts, step)

    def note(self, values: dict[str, float], step: int) -> None:
        """Write numbers that belong to the run and not to a step, for TensorBoard and Weights & Biases alone."""
        for sink in self._sinks:
            sink.log(values, step)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        for sink in self._sinks:
            sink.close()
