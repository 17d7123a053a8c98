"""The finetuning recipe as shipped, on fewer and shorter rows."""

import pytest
from runs import REPO, train


def test_debug_sft_as_shipped(tmp_path):
    """No download: the loss is of answers alone, and falls."""
    config = str(REPO / "train_configs" / "debug_sft.toml")
    small = ("--training.steps=10", "--training.local_batch_size=2", "--training.seq_len=256")
    run = train(tmp_path, *small, "--metrics.log_freq=3", CONFIG_FILE=config)
    assert [entry["step"] for entry in run] == [1, 3, 6, 9, 10]
    assert abs(run[0]["loss"] - 7.62) < 0.3  # ln(2048)
    assert run[-1]["loss"] < run[0]["loss"] - 0.3
    for entry in run:
        assert entry["documents_per_row"] > 1.2
        # About half of the tokens are questions, which are processed and not trained on.
        assert entry["supervised_tps"] / entry["tps"] == pytest.approx(0.5, abs=0.2)
