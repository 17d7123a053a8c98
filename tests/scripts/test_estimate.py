"""The script's command line, report and errors."""

import json

import pytest

import scripts.estimate as script
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.estimate import estimate as estimate_module
from torchtitan_lite.estimate.rank import measure_rank

SMALL = ["train_configs/debug_model.toml", "--model.args.n_layers=2", "--training.seq_len=128"]


@pytest.fixture
def in_this_process(monkeypatch):
    """As fast as can be: without a process for each rank."""
    monkeypatch.setattr(
        estimate_module,
        "measure_ranks",
        lambda plan, ranks, settings, progress: [measure_rank(plan, rank, settings) for rank in ranks],
    )


def test_a_pipeline_for_machines(in_this_process, capsys):
    script.main([*SMALL, "--world-size=4", "--parallelism.pipeline_parallel_degree=2", "--json", "--gpu=A100"])
    found = json.loads(capsys.readouterr().out)
    assert found["degrees"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert [(rank["rank"], rank["stages"], rank["in_flight"]) for rank in found["ranks"]] == [(0, [0], 2), (2, [1], 1)]
    # One layer and the embedding, or the final norm and the output; fp32, over two ranks.
    layer, words, norm = 4 * 256 * 256 + 3 * 256 * 768 + 2 * 256, 2048 * 256, 256
    assert [rank["parameters"] for rank in found["ranks"]] == [2 * (layer + words), 2 * (layer + words + norm)]
    sent = {(s["collective"], s["dimension"]): s["bytes"] for s in found["ranks"][0]["sent"]}
    # Gathered once in bf16, and reduced once in fp32, of which half is another rank's; 4 hidden states of bf16.
    assert sent["all-gather", "fsdp"] == layer + words
    assert sent["reduce-scatter", "fsdp"] == 2 * (layer + words)
    assert sent["send", "pp"] == 4 * 128 * 256 * 2
    assert found["memory_budget"] == 80e9 and found["gpu"]["peak_flops"] == 312e12


def test_the_report(capsys):
    script.main([*SMALL, "--world-size=1"])
    out = capsys.readouterr().out
    for words in (
        "1 x NVIDIA H100 80GB HBM3, 1 node: one rank",
        "Activation checkpointing: none",
        "  parameters",
        "Fits in 80 GB.",
        "[none]",
        "Sent by a rank in a step: nothing",
        "MFU",
    ):
        assert words in out
    assert len({len(line) for line in out.splitlines() if line.startswith("  together")}) == 2


def test_what_does_not_fit_says_what_to_turn(in_this_process, capsys):
    script.main([*SMALL, "--world-size=1", "--model.args.ffn_hidden_dim=2000000", "--gpu=L40S"])
    out = capsys.readouterr().out
    assert "too much" in out and "Does not fit in 48 GB. What would help:" in out
    assert "parameters (" in out and "more ranks to shard over" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu=H1000"], "--gpu=H1000: known are A100-40GB, A100, H100"),
        (["--gpus-per-node=0"], "--gpus-per-node=0: must be at least 1"),
        (["--parallelism.tensor_parallel_degree=3"], "4 is no multiple of 3"),
        (["--document-length=129"], "--document-length=129: must be from 1 to training.seq_len=128"),
        (["--training.seq_length=5"], "training.seq_len"),
        (["--training.mixed_precision_param=float32", "--model.varlen_engine=flash"], "computes in bfloat16"),
    ],
)
def test_errors_are_those_of_a_run_on_gpus(words, message):
    with pytest.raises(ConfigError) as error:
        script.main([*SMALL, "--world-size=4", *words])
    assert message in str(error.value)


def test_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="--rank=4: there are ranks 0 to 3"):
        script.main([*SMALL, "--world-size=4", "--rank=4"])
