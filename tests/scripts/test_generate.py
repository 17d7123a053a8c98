import io
import re
import subprocess
import sys

import pytest
from tiny_hf import saved
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import scripts.generate as script
from torchtitan_lite.convert.formats import open_weights, write_weights
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("hf"), vocab_size=2048, max_position_embeddings=256)
    for file in DEBUG_TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def said(capsys, *words: object) -> str:
    script.main([*map(str, words), "--max-new-tokens", "12", "--device", "cpu"])
    return capsys.readouterr().out


def test_a_prompt_goes_on_the_same_from_every_format(folder, tmp_path, capsys):
    text = said(capsys, folder, "def f(", "--temperature", "0")
    assert text.startswith("def f(") and len(text) > 12
    write_weights(open_weights(folder), tmp_path / "run" / "checkpoint" / "step-0", "dcp")
    (tmp_path / "run" / "config.toml").write_text(f'[model]\nhf_assets_path = "{folder}"\n')
    assert said(capsys, tmp_path / "run" / "checkpoint" / "step-0", "def f(", "--temperature", "0") == text
    write_weights(open_weights(folder), tmp_path / "meta", "meta")
    meta = (tmp_path / "meta", "def f(", "--temperature", "0", "--assets", folder)
    assert said(capsys, *meta).startswith("def f(")  # its params.json does not tell eps and length as they are


def test_a_batch_is_its_prompts_alone(folder, capsys):
    both = said(capsys, folder, "import os", "a", "--temperature", "0")
    alone = [said(capsys, folder, text, "--temperature", "0") for text in ("import os", "a")]
    assert both == f"--- 1\n{alone[0]}--- 2\n{alone[1]}"


def test_the_seed_decides(folder, capsys):
    draws = [said(capsys, folder, "x", "--seed", seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_words_that_begin_with_their_space(tmp_path, capsys):
    folder = saved(tmp_path, max_position_embeddings=256)
    backend = Tokenizer(models.WordLevel({f"▁w{i}": i for i in range(96)}, unk_token="▁w0"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": null}')
    alone = said(capsys, folder, "w7 w8", "--temperature", "0")
    assert re.fullmatch(r"w7 w8( w\d+)+\n", alone)
    assert said(capsys, folder, "w7 w8", "w7 w8", "--temperature", "0") == f"--- 1\n{alone}--- 2\n{alone}"


def test_a_conversation(folder, capsys, monkeypatch):
    asked = said(capsys, folder, "--chat", "--temperature", "0", "--system", "Be brief.", "Hello", "More")
    assert asked.startswith("you> Hello\n") and "you> More\n" in asked
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nMore\n"))
    piped = said(capsys, folder, "--chat", "--temperature", "0", "--system", "Be brief.")
    assert piped == asked.replace("you> Hello\n", "").replace("you> More\n", "")


def test_lines_of_a_pipe_are_prompts(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\ny\n"))
    alone = "".join(said(capsys, folder, text, "--temperature", "0") for text in ("x", "y"))
    assert said(capsys, folder, "--temperature", "0") == alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "0"], "top_p=0.0: must be above 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0: must be at least 1"),
        (["--assets", "/nowhere"], "no such folder"),
    ],
)
def test_errors(folder, words, message):
    with pytest.raises(ValueError, match=message):
        script.main([str(folder), "x", "--device", "cpu", *words])


def test_an_error_ends_the_script_in_one_line(tmp_path):
    ended = subprocess.run(
        [sys.executable, script.__file__, tmp_path / "no", "x"], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (1, f"{tmp_path}/no: no such folder\n")
