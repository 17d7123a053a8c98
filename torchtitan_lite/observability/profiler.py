"""Traces of single steps, one every ``profiling.profile_freq`` steps, to open in Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity

from torchtitan_lite.config.schema import Profiling
from torchtitan_lite.observability.logging import logger


class StepProfiler(Protocol):
    """What :func:`maybe_profile` hands out."""

    def step(self) -> None:
        """Mark the end of a training step."""


class _NoProfiler:
    def step(self) -> None:
        pass


@contextmanager
def maybe_profile(profiling: Profiling, dump_folder: Path, rank: int, start_step: int) -> Iterator[StepProfiler]:
    """Profile the body if ``profiling.enable_profiling``; its ``.step()`` must be called after every training step.

    Every ``profile_freq``-th step from ``start_step`` on is recorded, after up to three warm-up steps, and written to
    ``dump_folder / save_traces_folder / step-N / rankR_trace.json``, N being the step that the trace shows.

    Args:
        profiling: the run's profiling section.
        dump_folder: folder of the run.
        rank: this process, named in the file.
        start_step: steps done before this process started.
    """
    if not profiling.enable_profiling:
        yield _NoProfiler()
        return

    freq = profiling.profile_freq
    warmup = min(3, freq - 1)

    def write_trace(profiler: torch.profiler.profile) -> None:
        if profiler.step_num % freq:  # leaving the body inside a recorded step: not a whole one
            return
        path = dump_folder / profiling.save_traces_folder / f"step-{start_step + profiler.step_num}"
        path.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path / f"rank{rank}_trace.json"))
        logger.info(f"Wrote a profiler trace to {path}")

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=freq - 1 - warmup, warmup=warmup, active=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write_trace, record_shapes=True
    ) as profiler:
        yield profiler
