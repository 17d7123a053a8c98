"""The debug model as shipped."""

from runs import train


def test_debug_model_as_shipped(tmp_path):
    """The README's first command, cut short: real text, near ln(2048) = 7.62 at first, at least 1.5 lower at last."""
    run = train(tmp_path, "--training.steps=25", OMP_NUM_THREADS="2")
    assert [m["step"] for m in run] == [1, *range(5, 26, 5)]
    assert abs(run[0]["loss"] - 7.62) < 0.3
    assert run[-1]["loss"] < run[0]["loss"] - 1.5
    assert (tmp_path / "config.toml").is_file()
