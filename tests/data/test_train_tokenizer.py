import importlib.util
import subprocess
import sys
from pathlib import Path

import transformers

from torchtitan_lite.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_same_text_same_files_and_transformers_agrees(tmp_path):
    spec = importlib.util.spec_from_file_location("train_tokenizer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("a", "b"):
        module.save(module.train([file.read_text(encoding="utf-8") for file in module.project_text()]), tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()

    ours, theirs = load_tokenizer(str(tmp_path / "a")), transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert (ours.vocab_size, len(theirs)) == (2048, 2048)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id) == (0, 1)
    text = "for row in rows:\n    print(row)  # naïve, 漢字\n"
    assert theirs(text)["input_ids"] == ours.encode(text, add_eos=False)
    assert ours.decode(ours.encode(text, add_bos=False, add_eos=False)) == text


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "small.txt").write_text("a few words")
    result = run("--out", tmp_path / "out", tmp_path / "small.txt")
    assert result.returncode == 1 and "Train on more text" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
