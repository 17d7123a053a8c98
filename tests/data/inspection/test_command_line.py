"""The command line of scripts about data: what is theirs, what is the run's, and how they end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.data.inspection.command_line import argument_parser, read_command_line, run_script
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.tokenizer import TokenizerError
from torchtitan_lite.observability.logging import logger

REPOSITORY = Path(__file__).parents[3]


def read(*argv):
    parser = argument_parser("A script.")
    parser.add_argument("--row", type=int)
    return read_command_line(parser, argv, REPOSITORY)


@pytest.mark.parametrize(
    "argv",
    [
        ("run.toml", "--row", "3", "--training.seq_len", "64"),
        ("--row=3", "run.toml", "--training.seq_len=64"),
        ("run.toml", "--training.seq-len=64", "--row=3"),
    ],
)
def test_own_options_and_overrides_in_any_order(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[training]\nseq_len = 32\nseed = 7\n")
    options, config, words = read(*argv)
    assert options.row == 3
    assert (config.training.seq_len, config.training.seed) == (64, 7)
    assert words[0] == "--job.config_file=run.toml" and "--row" not in " ".join(words)


@pytest.mark.parametrize("argv", [(), ("train_configs/debug_model.toml",)])
def test_the_debug_model_is_found_from_anywhere(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, config, words = read(*argv)
    assert config.job.description == "Llama 3 debug model"
    assert words == [f"--job.config_file={REPOSITORY / 'train_configs' / 'debug_model.toml'}"]


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (["nowhere.toml"], ["job.config_file=nowhere.toml: No such file"]),
        (["--data.tamplate=x"], ["did you mean data.template"]),
        (["--rows=3"], ["--rows"]),
        (["--training.dataset=pydoc"], ["Did you mean pydocs"]),
        (
            ["--data.packing_window=0", "--training.seq_len=1", "--training.seed=-1", "--data.num_proc=0"],
            [
                "data.packing_window=0: must be at least 1",
                "training.seq_len=1: must be at least 2",
                "training.seed=-1: must be at least 0",
                "data.num_proc=0: must be at least 1",
            ],
        ),
    ],
)
def test_every_problem_of_the_data_is_said(argv, problems):
    with pytest.raises(ConfigError) as error:
        read(*argv)
    assert len(error.value.problems) == len(problems)
    assert all(problem in str(error.value) for problem in problems)


@pytest.mark.parametrize("argv", [["--training.steps=0"], ["--parallelism.data_parallel_shard_degree=8"]])
def test_what_is_not_about_data_does_not_matter(argv):
    _, config, words = read(*argv)
    assert words[1:] == argv and config.training.dataset == "pydocs"


@pytest.fixture
def end_of(monkeypatch):
    """How a script ends: the value of its SystemExit."""
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(sys, "argv", ["script", "a", "b"])

    def call(main):
        with pytest.raises(SystemExit) as error:
            run_script(main)
        return error.value.code

    return call


def raising(error):
    def main(argv):
        assert argv == ["a", "b"]
        raise error

    return main


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["data: wrong"]),
        SourceError("no such file"),
        TokenizerError("no tokenizer"),
        PackingError("too long"),
        TimeoutError("another process"),
        PermissionError(13, "Permission denied", "/cache"),
    ],
)
def test_what_the_user_can_mend_is_a_message(end_of, error):
    assert end_of(raising(error)) == str(error)


def test_other_ends(end_of, monkeypatch):
    assert end_of(raising(KeyboardInterrupt())) == "Interrupted."
    with pytest.raises(ValueError, match="a fault of ours"):
        run_script(raising(ValueError("a fault of ours")))
    monkeypatch.setenv("LOG_RANK", "first")
    assert "LOG_RANK='first' must be" in end_of(raising(AssertionError))


def test_a_reader_that_has_seen_enough():
    """As in `script | true`: neither a traceback nor anything else on stderr."""
    code = (
        "import sys; from torchtitan_lite.data.inspection.command_line import run_script\n"
        "run_script(lambda argv: print(sys.stdin.read()))"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", code], env=buffered, **pipes) as process:
        process.stdout.close()
        process.stdin.close()  # only now it prints
        assert process.stderr.read() == b""
    assert process.returncode == 1
