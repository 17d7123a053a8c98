import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_hf import saved

import scripts.convert_checkpoint as script
from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.convert.weights import WeightsError
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER


def same_weights(a: Path, b: Path) -> bool:
    read = [weights.read(list(weights.tensors)) for weights in (HFWeights(a), HFWeights(b))]
    return read[0].keys() == read[1].keys() and all(read[0][name].equal(read[1][name]) for name in read[0])


def test_every_way(tmp_path, capsys):
    source = saved(tmp_path / "hf", rope_theta=500000.0)
    for given, written, kind in (("hf", "step-0", "dcp"), ("step-0", "meta", "meta"), ("meta", "back", "hf")):
        script.main([str(tmp_path / given), str(tmp_path / written), "--to", kind, "--max-seq-len", "64"])
    assert same_weights(tmp_path / "back", source)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["max_position_embeddings"]) == (500000.0, 1e-6, 64)
    assert "No tokenizer comes along" in capsys.readouterr().err


def test_a_tokenizer_comes_from_assets_or_from_the_run(tmp_path):
    source = saved(tmp_path / "hf", vocab_size=2048)
    script.main([str(source), str(tmp_path / "a"), "--to", "hf", "--assets", str(DEBUG_TOKENIZER)])
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (DEBUG_TOKENIZER / "tokenizer.json").read_bytes()
    script.main([str(source), str(tmp_path / "run" / "checkpoint" / "step-0"), "--to", "dcp"])
    (tmp_path / "run" / "config.toml").write_text(f'[model]\nhf_assets_path = "{DEBUG_TOKENIZER}"\n')
    script.main([str(tmp_path / "run" / "checkpoint" / "step-0"), str(tmp_path / "b"), "--to", "hf"])
    assert (tmp_path / "b" / "tokenizer.json").is_file()


def test_the_type_asked_for(tmp_path):
    script.main([str(saved(tmp_path / "hf")), str(tmp_path / "out"), "--to", "hf", "--export-dtype", "bfloat16"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    kinds = {str(stored.dtype) for stored in HFWeights(tmp_path / "out").tensors.values()}
    assert kinds == {"torch.bfloat16"}


def test_errors(tmp_path):
    with pytest.raises(WeightsError, match="holds no weights"):
        script.main([str(tmp_path), str(tmp_path / "out"), "--to", "hf"])
    ended = subprocess.run(
        [sys.executable, script.__file__, tmp_path / "nowhere", tmp_path / "out", "--to", "hf"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stderr) == (1, f"{tmp_path}/nowhere: no such folder\n")
