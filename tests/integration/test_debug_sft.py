"""The finetuning recipe as shipped, cut short."""

import pytest
from runs import REPO, train


def test_debug_sft_as_shipped(tmp_path):
    """No download: the loss is of answers alone, and falls."""
    config = str(REPO / "train_configs" / "debug_sft.toml")
    run = train(tmp_path, "--training.steps=20", CONFIG_FILE=config, OMP_NUM_THREADS="2")
    assert [entry["step"] for entry in run] == [1, 5, 10, 15, 20]
    assert abs(run[0]["loss"] - 7.62) < 0.3  # ln(2048)
    assert run[-1]["loss"] < run[0]["loss"] - 1.0
    for entry in run:
        assert entry["documents_per_row"] > 2
        # About half of the tokens are questions, which are processed and not trained on.
        assert entry["supervised_tps"] / entry["tps"] == pytest.approx(0.52, abs=0.12)
