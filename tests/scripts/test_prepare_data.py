"""The script that prepares data, on files small enough to count by hand; the tokenizer has one token per byte."""

import subprocess
import sys
from pathlib import Path

import pytest
from data.toy_data import save_character_tokenizer, write_jsonl

import scripts.prepare_data as prepare_data
from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.data.loader import build_loader
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

SCRIPT = Path(prepare_data.__file__)
# With BOS and EOS 5, 4, 0 (nothing but white space) and 12 tokens: in rows of 8 one of 8, one of 5, and one of 4 + 4.
TEXTS = ["abc", "de", "  ", "0123456789"]


@pytest.fixture
def run_file(tmp_path) -> Path:
    """The configuration of a run over two files, the second of which has a bad record."""
    save_character_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text" / "a.jsonl", TEXTS)
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "xyz"}\n{"text": 7}\n')
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [model]
        hf_assets_path = "{tmp_path}/tokenizer"
        [training]
        dataset_path = "{tmp_path}/text"
        seq_len = 8
        [data]
        cache_dir = "{tmp_path}/cache"
        on_bad_record = "skip"
        """
    )
    return path


@pytest.fixture
def no_tokenizing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("tokenised again")

    return lambda: monkeypatch.setattr(Tokenizer, "encode_batch", refuse)


def test_prepares_what_a_run_then_finds(run_file, capsys, monkeypatch, no_tokenizing):
    monkeypatch.setattr(prepare_data, "available_cores", lambda: 2)
    prepare_data.main([str(run_file)])
    report = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in report.splitlines()]
    for expected in (
        "Packing of text",
        "documents 4",  # abc, de, 0123456789, xyz
        "empty documents 1 left out",
        "bad records 1 left out",
        "tokens 26 ",  # 5 + 4 + 12 + 5
        "tokenised now",
    ):
        assert any(f"{line} ".startswith(expected) for line in lines), expected
    assert "Ready after" in report and "with data.num_proc=2." in report
    cache = run_file.parent / "cache"
    assert f"in {cache / 'torchtitan_lite'}\n" in report and f"in {cache}\n" in report
    assert f"data.cache_dir={cache}\n" in report and f"--job.config_file={run_file}" in report

    no_tokenizing()
    for processes in ("1", "2"):
        prepare_data.main([str(run_file), "--data.num_proc", processes])
        report = capsys.readouterr().out
        assert "tokens were in the cache" in report and "Everything was there" in report
    config = load_config([f"--job.config_file={run_file}"])
    loader = build_loader(
        config, load_tokenizer(config.model.hf_assets_path), dp_rank=0, dp_degree=1, device_type="cpu"
    )
    assert sum(report.tokens for report in loader.reports()) == 26


def test_another_row_length_is_planned_and_not_tokenised(run_file, capsys, no_tokenizing):
    prepare_data.main([str(run_file), "--data.num_proc=1"])
    capsys.readouterr()
    no_tokenizing()
    prepare_data.main([str(run_file), "--data.num_proc=1", "--training.seq_len=16"])
    report = capsys.readouterr().out
    assert "tokens were in the cache" in report and "Ready after" in report and "Everything" not in report


def test_sizes_are_those_of_the_files(run_file, capsys):
    prepare_data.main([str(run_file), "--data.num_proc=1"])
    report = capsys.readouterr().out
    cache = run_file.parent / "cache"
    tokens = sum(file.stat().st_size for file in (cache / "torchtitan_lite").glob("*.arrow"))
    plan = 128 * 4  # of each .npy file the head
    plan = sum(file.stat().st_size for file in (cache / "torchtitan_lite").rglob("*.npy")) - plan
    assert f"Tokens and plans: {prepare_data.size_text(tokens + plan)} in" in report
    texts = sum(file.stat().st_size for file in cache.rglob("generator/**/*.arrow"))
    assert texts > 0 and f"The text they come from: {prepare_data.size_text(texts)} in" in report


def test_every_source_of_a_mixture(run_file, tmp_path, capsys):
    mixture = f'--data.mix=[{{dataset_path="{tmp_path}/text/a.jsonl"}}, {{dataset_path="{tmp_path}/text/b.jsonl"}}]'
    run_file.write_text(run_file.read_text().replace("dataset_path", "# dataset_path"))
    prepare_data.main([str(run_file), mixture])
    report = capsys.readouterr().out
    assert report.index("Packing of a") < report.index("Packing of b")
    assert report.count("tokenised now") == 2 and report.count("bad records") == 2


@pytest.mark.parametrize(
    ("in_file", "words", "given"),
    [
        ("", [], False),
        ("", ["--data.num_proc=4"], True),
        ("", ["--data.num-proc", "4"], True),
        ("num_proc = 1", [], True),
        ("num_workers = 1", ["--data.num_workers=2"], False),
    ],
)
def test_processes_given_or_not(tmp_path, in_file, words, given):
    path = tmp_path / "run.toml"
    path.write_text(f"[data]\n{in_file}\n")
    assert prepare_data.num_proc_given(str(path), words) is given


def test_streaming_is_told_that_there_is_nothing_to_do(run_file):
    with pytest.raises(ConfigError, match="there is nothing to prepare"):
        prepare_data.main([str(run_file), "--data.streaming"])
    assert not (run_file.parent / "cache").exists()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2.34e9, "2.3 GB"), (5e15, "5000.0 TB")]
)
def test_sizes_are_told_in_their_unit(count, text):
    assert prepare_data.size_text(count) == text


def test_as_a_script_from_another_folder(run_file, tmp_path):
    command = [sys.executable, str(SCRIPT), str(run_file), "--data.num_proc=1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Ready after" in result.stdout, result.stderr
    assert "WARNING: text: 1 bad records left out" in result.stdout
