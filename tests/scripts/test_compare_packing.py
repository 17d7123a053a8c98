"""The table that compares packing strategies."""

import pytest
from data.toy_data import save_character_tokenizer, write_jsonl

import scripts.compare_packing as compare_packing


def table(capsys, *argv: str) -> list[list[str]]:
    compare_packing.main(argv)
    head, rule, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert tuple(head) == compare_packing.COLUMNS and len(rule) == len(head)
    return rows


def test_documents_of_a_file(tmp_path, capsys):
    """Documents of 5, 3 and 4 tokens, BOS and EOS included, in rows of 8: 5 + 3 and 4, or end to end 8 and 4."""
    save_character_tokenizer(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "a.jsonl", ["abc", "d", "ef"])
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\nhf_assets_path = "{tmp_path}/tokenizer"\n[training]\ndataset_path = "{tmp_path}/a.jsonl"\n'
        f'[data]\ncache_dir = "{tmp_path}/cache"\n'
    )
    rows = {row[2]: row for row in table(capsys, "--config", str(config), "--seq-len", "8")}
    assert all(row[:2] == ["8", "3 of a"] for row in rows.values())
    # 12 of 16 positions; attended pairs 15 + 6 + 10 = 31 of 2 x 36.
    assert rows["best_fit"][3:7] == ["25.000%", "0.0%", "1.50", "43.1%"]
    assert rows["none"][3:7] == ["50.000%", "0.0%", "1.00", "28.7%"]
    assert rows["fewest rows"][3] == "25.000%"
    assert rows["split"][3] == "25.000%"


def test_made_up_documents(capsys):
    rows = table(capsys, "--documents", "50", "1000", "--seq-len", "512", "--mean", "100")
    assert [row[1] for row in rows] == ["50"] * 5 + ["1,000"] * 5
    padding = {row[2]: float(row[3].rstrip("%")) for row in rows[5:]}
    assert padding["fewest rows"] == padding["split"] <= padding["best_fit"] < padding["greedy"] < padding["none"]


@pytest.mark.parametrize("option", [("--documents", "0"), ("--mean", "0"), ("--sigma", "-1")])
def test_nonsense(option, capsys):
    with pytest.raises(SystemExit):
        compare_packing.main(option)
    assert "must be at least 1" in capsys.readouterr().err
