import dataclasses
import json
import logging
import math
import struct
import sys
import types

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lite.config.schema import Config
from torchtitan_lite.observability.metrics import MetricsLogger, StepMetrics, console_line, device_memory, json_line

METRICS = StepMetrics(
    step=1,
    loss=8.04912,
    max_loss=8.5,
    grad_norm=1.23449,
    lr=0.1 + 0.2,
    tokens_seen=16384,
    tps=12345.4,
    supervised_tps=12000.25,
    tflops=1.234,
    mfu=0.00123,
    padding_fraction=0.0625,
    documents_per_row=3.5,
    mask_density=0.125,
    attention_imbalance=1.5,
    data_wait_fraction=0.25,
    memory_gib=1.234,
    memory_fraction=0.013,
    time_s=2.0,
)

JSONL_KEYS = [
    "step",
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "tokens_seen",
    "tps",
    "supervised_tps",
    "mfu",
    "padding_fraction",
    "documents_per_row",
    "mask_density",
    "attention_imbalance",
    "data_wait_fraction",
    "memory_gib",
    "time_s",
]


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config()
    config.job.dump_folder = str(tmp_path / "run")
    config.training.steps = 100
    return config


def at(step: int, **changes) -> StepMetrics:
    return dataclasses.replace(METRICS, step=step, **changes)


def write(config: Config, start_step: int, steps: list[int], **changes) -> None:
    with MetricsLogger(config, start_step) as metrics_logger:
        for step in steps:
            metrics_logger.log(at(step, **changes))


def entries(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_json_line_has_the_documented_keys_at_full_precision():
    read = json.loads(json_line(METRICS))
    assert list(read) == JSONL_KEYS
    for key in JSONL_KEYS:
        assert struct.pack("d", read[key]) == struct.pack("d", getattr(METRICS, key))


def test_values_that_json_lacks_are_read_back_by_float():
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    line = json_line(at(1, loss=math.nan, max_loss=math.inf, grad_norm=-math.inf))
    read = json.loads(line, parse_constant=refuse)
    assert math.isnan(float(read["loss"]))
    assert (float(read["max_loss"]), float(read["grad_norm"])) == (math.inf, -math.inf)


def test_console_line():
    assert console_line(METRICS, total_steps=100) == (
        "step:  1  loss:  8.0491  grad_norm:  1.2345  memory:  1.23GiB(1.30%)  "
        "tps: 12,345  tflops: 1.23  mfu: 0.12%  eta: 3m18s"
    )


def test_each_entry_is_on_disk_at_once(config, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "torchtitan_lite"), MetricsLogger(config, start_step=0) as metrics_logger:
        metrics_logger.log(at(1))
        assert [entry["step"] for entry in entries(tmp_path)] == [1]
        assert console_line(METRICS, total_steps=100) in caplog.messages


def test_resumed_twice_reads_as_one_run(config, tmp_path):
    write(config, 0, [1, 2, 3], loss=1.0)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    write(config, 2, [3, 4, 5], loss=2.0)
    write(config, 4, [5, 6], loss=3.0)
    assert [(entry["step"], entry["loss"]) for entry in entries(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 3.0),
        (6, 3.0),
    ]


def test_a_last_line_without_its_end_is_not_written_on(config, tmp_path):
    write(config, 0, [1, 2])
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    write(config, 2, [3])
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("text", ["one\u2028two", "\x85", "\x0b \x1c\r\n"])
def test_texts_with_ends_of_lines_of_their_own_stay(config, tmp_path, text):
    with MetricsLogger(config, 0) as metrics_logger:
        for step in (0, 2, 4):
            metrics_logger.log_samples([("say", text), ("é", "")], step)
    path = tmp_path / "run" / "samples.jsonl"
    with path.open("ab") as file:
        file.write('{"step": 5, "prompt": "é'.encode()[:-1])  # killed within a character
    MetricsLogger(config, 2).close()
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    assert [(e["step"], e["prompt"], e["text"]) for e in kept] == [
        (step, *sample) for step in (0, 2) for sample in (("say", text), ("é", ""))
    ]


def test_new_run_in_an_old_folder_starts_anew_and_keeps_what_was_there(config, tmp_path):
    for steps in ([1, 2, 3], [1, 2], [1]):
        write(config, 0, steps)
    lines = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "run").glob("*.jsonl")}
    assert lines == {"metrics.1.jsonl": 3, "metrics.2.jsonl": 2, "metrics.jsonl": 1}


def test_tensorboard_has_torchtitans_tags_and_reads_as_one_run(config, tmp_path):
    config.metrics.enable_tensorboard = True
    write(config, 0, [1, 2, 3], loss=1.0)
    write(config, 2, [3, 4], loss=2.0)
    events = EventAccumulator(str(tmp_path / "run" / "tb"))
    events.Reload()
    written = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert written == pytest.approx(
        {
            "loss_metrics/global_avg_loss": 2.0,
            "loss_metrics/global_max_loss": 8.5,
            "grad_norm": 1.23449,
            "lr": 0.3,
            "n_tokens_seen": 16384,
            "throughput(tps)": 12345.4,
            "tflops": 1.234,
            "mfu(%)": 0.123,
            "time_metrics/end_to_end(s)": 2.0,
            "time_metrics/data_loading(s)": 0.5,
            "time_metrics/data_loading(%)": 25.0,
            "memory/max_reserved(GiB)": 1.234,
            "memory/max_reserved(%)": 1.3,
            "packing/supervised_tps": 12000.25,
            "packing/padding(%)": 6.25,
            "packing/documents_per_row": 3.5,
            "packing/mask_density(%)": 12.5,
            "parallel/attention_imbalance": 1.5,
        },
        rel=1e-6,
    )
    losses = [(event.step, event.value) for event in events.Scalars("loss_metrics/global_avg_loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_shares_of_sources(config, tmp_path):
    config.metrics.enable_tensorboard = True
    with MetricsLogger(config, 0) as metrics_logger:
        metrics_logger.note({"packing/books/padding(%)": 0.5}, 0)
        metrics_logger.log(at(1, shares={"books": 0.75, "code": 0.25}))
    assert entries(tmp_path)[0]["shares"] == {"books": 0.75, "code": 0.25}
    events = EventAccumulator(str(tmp_path / "run" / "tb"))
    events.Reload()
    assert [events.Scalars(f"packing/share_of_{name}(%)")[0].value for name in ("books", "code")] == [75, 25]
    assert [(event.step, event.value) for event in events.Scalars("packing/books/padding(%)")] == [(0, 0.5)]


def test_nothing_but_metrics_jsonl_by_default(config, tmp_path):
    write(config, 0, [1])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_wandb_gets_the_same_tags(config, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values["loss_metrics/global_avg_loss"])),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: run))
    config.metrics.enable_wandb = True
    write(config, 0, [1, 2], loss=4.0)
    assert calls == [(1, 4.0), (2, 4.0), "finished"]


def test_missing_wandb_is_explained_before_anything_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config.metrics.enable_wandb = True
    with pytest.raises(ImportError, match=r"torchtitan_lite\[wandb\]"):
        MetricsLogger(config, start_step=0)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_cpu_memory_is_the_peak_not_the_present():
    cpu, mib = torch.device("cpu"), 2**20
    process = psutil.Process()
    peak_before = device_memory(cpu)[0] * 2**30
    block = torch.ones(int(peak_before - process.memory_info().rss + 64 * mib) // 4)
    del block
    gib, fraction = device_memory(cpu)
    assert gib * 2**30 >= peak_before + 48 * mib
    assert gib * 2**30 >= process.memory_info().rss + 48 * mib
    assert fraction == pytest.approx(gib * 2**30 / psutil.virtual_memory().total)
