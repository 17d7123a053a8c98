import logging

import torch
from torch.profiler import record_function

from torchtitan_lite.config.schema import Profiling
from torchtitan_lite.observability.profiler import maybe_profile


def run_steps(profiling: Profiling, folder, first: int, last: int) -> None:
    with maybe_profile(profiling, folder, rank=3, start_step=first - 1) as profiler:
        for step in range(first, last + 1):
            with record_function(f"training_step_{step}."):
                torch.ones(2) + 1
            profiler.step()


def test_each_trace_shows_the_step_it_is_named_after(tmp_path, caplog):
    """Resumed after step 100, tracing every third step; the interval of step 109 is not completed."""
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        run_steps(Profiling(enable_profiling=True, profile_freq=3), tmp_path, first=101, last=108)
    traces = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.json")}
    assert set(traces) == {f"profile_traces/step-{step}/rank3_trace.json" for step in (103, 106)}
    for step in (103, 106):
        trace = traces[f"profile_traces/step-{step}/rank3_trace.json"]
        assert [other for other in range(101, 109) if f"training_step_{other}." in trace] == [step]
    assert sum("profiler trace" in message for message in caplog.messages) == 2


def test_every_step_can_be_traced(tmp_path):
    run_steps(Profiling(enable_profiling=True, profile_freq=1), tmp_path, first=1, last=2)
    assert {path.name for path in (tmp_path / "profile_traces").iterdir()} == {"step-1", "step-2"}


def test_disabled_writes_nothing(tmp_path):
    run_steps(Profiling(enable_profiling=False), tmp_path, first=1, last=20)
    assert list(tmp_path.iterdir()) == []
