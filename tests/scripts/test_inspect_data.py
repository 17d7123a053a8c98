"""The script that shows rows, on documents that can be told by their text; the tokenizer has one token per byte."""

import importlib.util
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import matplotlib.image
import pytest
from data.toy_chat import TEMPLATES, TWO_TURNS, save_chat_tokenizer, write_records
from data.toy_data import save_character_tokenizer, write_jsonl

import scripts.inspect_data as inspect_data
from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.data.loader import build_loader
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.streaming.stream_loader import build_stream_loader
from torchtitan_lite.data.tokenizer import load_tokenizer

SCRIPT = Path(inspect_data.__file__)
# 3 to 12 tokens each with BOS and EOS, and one longer than a row of 16.
TEXTS = [chr(ord("a") + number) * (1 + number * 3 % 10) for number in range(12)] + ["z" * 30]
DOCUMENT = re.compile(r"── document (\d+) · positions 0-(\d+) · (\d+) tokens? · (\d+) targets?(?: · (.*))?")


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    """The command line of a run over ``TEXTS`` in rows of 16."""
    monkeypatch.setenv("COLUMNS", "140")
    save_character_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "run.toml"
    path.write_text("[model]\nflavor = 'debugmodel_sdpa_block_causal'\n")
    return [
        str(path),
        f"--model.hf_assets_path={tmp_path}/tokenizer",
        f"--training.dataset_path={write_jsonl(tmp_path / 'texts.jsonl', TEXTS)}",
        "--training.seq_len=16",
        f"--data.cache_dir={tmp_path}/cache",
    ]


@pytest.fixture
def inspect(words, capsys):
    """Lines that the script prints for further words of its command line."""

    def call(*more, base=words) -> list[str]:
        inspect_data.main([*base, *more])
        return capsys.readouterr().out.splitlines()

    return call


def config_of(words):
    return load_config([f"--job.config_file={words[0]}", *words[1:]])


def shown_rows(lines: list[str]) -> list[list[str]]:
    """The lines of each row, its head first."""
    heads = [number for number, line in enumerate(lines) if re.match(r"row [\d,]+ ", line)]
    return [lines[start:end] for start, end in zip(heads, [*heads[1:], len(lines)], strict=True)]


def text_of(row: list[str]) -> str:
    return "".join(line.removeprefix("│ ") for line in row if line.startswith("│ ")).translate({0x27E6: "", 0x27E7: ""})


def expected_text(batch, tokenizer) -> str:
    return tokenizer.decode(batch.tokens[0][batch.document_ids[0] >= 0].tolist())


def test_rows_are_those_of_the_run_in_its_order(inspect, words):
    config = config_of(words)
    config.training.local_batch_size = 1
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    loader = build_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    expected = [expected_text(batch, tokenizer) for batch in islice(loader, loader.rows_per_epoch)]
    shown = shown_rows(inspect("--row=0", f"--rows={len(expected)}", "--no-report"))
    assert [text_of(row) for row in shown] == expected
    everything = "".join(expected).replace("<bos>", "").replace("<eos>", "")
    assert sorted(everything) == sorted("".join(TEXTS))
    (third,) = shown_rows(inspect("--row", "2", "--no-report"))
    assert third == shown[2][: len(third)]


def test_heads_tell_of_each_document_and_its_record(inspect):
    lines = inspect("--row=0", "--rows=100")
    found = {}
    for row in shown_rows(lines):
        assert re.match(r"row \d+ · epoch 0 of texts, row \d+ of \d+ · \d documents? · \d+ of 16 tokens · ", row[0])
        heads = [DOCUMENT.fullmatch(line) for line in row if line.startswith("── ")]
        assert [int(head[1]) for head in heads] == list(range(len(heads)))
        for head in heads:
            assert int(head[2]) + 1 == int(head[3]) == int(head[4]) + 1
            found[head[5]] = int(head[3])
    expected = {f"record {number} of texts": len(text) + 2 for number, text in enumerate(TEXTS[:-1], 1)}
    expected |= {"record 13 of texts, tokens 0-15 of 32": 16, "record 13 of texts, tokens 16-31 of 32": 16}
    assert found == expected
    assert "Packing of texts" in lines and any(line.split()[:2] == ["documents", "13"] for line in lines)
    assert not any(line.startswith("Packing") for line in inspect("--no-report"))


def test_a_chosen_row_has_several_documents(inspect):
    (row,) = shown_rows(inspect())
    assert sum(line.startswith("── ") for line in row) >= 2


def test_rows_of_a_mixture_name_their_source(inspect, words, tmp_path):
    write_jsonl(tmp_path / "ones.jsonl", ["1" * 14] * 4)  # a row each
    write_jsonl(tmp_path / "twos.jsonl", ["2" * 6] * 8)  # two a row
    mixture = f'[{{dataset_path="{tmp_path}/ones.jsonl"}}, {{dataset_path="{tmp_path}/twos.jsonl", weight=3}}]'
    base = [word for word in words if "dataset_path" not in word] + [f"--data.mix={mixture}"]
    lines = inspect("--row=0", "--rows=8", base=base)
    assert [line for line in lines if line.startswith("Packing of")] == ["Packing of ones", "Packing of twos"]
    names = []
    for row in shown_rows(lines):
        name = re.search(r"epoch \d of (\w+), row \d of 4", row[0])[1]
        names.append(name)
        assert set(text_of(row)) - set("<bose>") == {"1" if name == "ones" else "2"}
    assert names.count("twos") == 6 and names.count("ones") == 2  # by weight: 3 to 1
    second_epoch = [row[0] for row in shown_rows(lines) if "epoch 1 of twos" in row[0]]
    assert len(second_epoch) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--row=-1"], "--row -1: rows are counted from 0"),
        (["--rows", "0"], "--rows 0: show at least 1"),
        (["--row", "500"], r"--row 500: there are (\d+) rows, 0 to \d+"),
        (["--save=row.txt"], r"--save row.txt: the suffix names no format of a picture; there are .*\.png"),
        (["--save=row"], "--save row: the suffix"),
    ],
)
def test_options_that_make_no_sense(words, more, message):
    with pytest.raises(SystemExit) as error:
        inspect_data.main([*words, *more])
    assert re.match(message, error.value.code)


def test_fewer_rows_than_asked_for(inspect):
    total = len(shown_rows(inspect("--row=0", "--rows=100")))
    lines = inspect(f"--row={total - 2}", "--rows=5")
    assert len(shown_rows(lines)) == 2
    assert f"The last row is {total - 1}: 2 of 5 are left." in lines


def test_a_run_that_would_not_start_can_be_looked_at(inspect):
    """Neither batches nor steps decide about rows."""
    assert shown_rows(inspect("--training.global_batch_size=7", "--training.local_batch_size=2"))


@pytest.mark.parametrize(
    ("option", "terminal", "environment", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_when_there_is_colour(monkeypatch, option, terminal, environment, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert inspect_data.in_colour(option) is expected


def test_colour_changes_how_it_looks_and_not_what_it_says(inspect):
    plain, coloured = inspect("--row=1", "--no-color"), inspect("--row=1", "--color=always")
    assert not any("\033" in line for line in plain) and any("\033[36m" in line for line in coloured)
    (stripped,) = shown_rows([re.sub(r"\033\[[\d;]*m", "", line) for line in coloured])
    (unmarked,) = shown_rows([re.sub("[⟦⟧]", "", line) for line in plain])
    assert stripped == unmarked


def test_the_table_of_tokens_follows(inspect):
    lines = inspect("--row=1", "--ids", "--no-report")
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["place", "token"])
    table = [line.split() for line in lines[head + 1 :]]
    assert [cells[0] for cells in table[:16] if cells[0] != "..."] == [
        str(place) for place in range(16 - sum(int(cells[1]) for cells in table if cells[0] == "..."))
    ]
    assert table[0][:3] == ["0", "0", "<bos>"]


@pytest.fixture
def chat_words(words, tmp_path):
    """The command line of a run over chats."""
    save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"])
    path = write_records(tmp_path / "chats.jsonl", [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[:2]}])
    base = [word for word in words if "dataset_path" not in word and "seq_len" not in word]
    return [*base, f"--training.dataset_path={path}", "--training.seq_len=128", "--data.format=messages"]


def test_what_is_trained_on_of_chats_is_told_from_the_rest(inspect, chat_words):
    lines = inspect("--row=0", base=chat_words)
    assert "↵ newline, → tab, ⟦ ⟧ not trained on" in lines
    (row,) = shown_rows(lines)
    assert "⟧Quite é sure.<|end|>" in "".join(row) and "⟧Yes.<|end|>⟦" in "".join(row)
    answers = len("Yes.") + len("Quite é sure.".encode()) + len("Yes.") + 3
    assert any(line.split()[:2] == ["targets", str(answers)] for line in lines)
    coloured = "".join(inspect("--row=0", "--color=always", base=chat_words))
    assert re.search(r"\033\[(\d+)mYes\.\033\[0m\033\[\1;7m<\|end\|>\033\[0m\033\[\1;2", coloured)


def test_a_record_alone_and_whole(inspect, chat_words):
    lines = inspect("--record=1", "--training.seq_len=16", "--data.oversize=truncate", base=chat_words)
    assert lines == [
        "↵ newline, → tab, ⟦ ⟧ not trained on",
        "",
        "record 1 of chats · 1 document · 73 of 73 tokens · 20 targets · mask 100% of plain causal attention's pairs",
        "── document 0 · positions 0-72 · 73 tokens · 20 targets",
        "│ ⟦<bos><|header|>user<|/header|>↵",
        "│ ↵",
        "│ Hi?<|end|><|header|>assistant<|/header|>↵",
        "│ ↵",
        "│ ⟧Yes.<|end|>⟦<|header|>user<|/header|>↵",
        "│ ↵",
        "│ Sure?<|end|><|header|>assistant<|/header|>↵",
        "│ ↵",
        "│ ⟧Quite é sure.<|end|>",
    ]
    assert any(line.startswith("record 2 of chats") for line in inspect("--record=chats:2", "--ids", base=chat_words))
    for record in ("0", "3", "x", "texts:1"):
        with pytest.raises(SystemExit, match=f"--record {record}: "):
            inspect("--record", record, base=chat_words)
    with pytest.raises(SystemExit, match="a stream cannot be asked for a record"):
        inspect("--record=1", "--data.streaming", base=chat_words)


def test_streamed_chats_report_what_is_trained_on(inspect, chat_words):
    lines = inspect("--data.streaming", "--rows=3", base=chat_words)
    (targets,) = [int(line.split()[1]) for line in lines if line.split()[:1] == ["targets"]]
    heads = [re.search(r"(\d+) targets?", row[0])[1] for row in shown_rows(lines)]
    assert targets == sum(map(int, heads))


def test_a_template_that_does_not_serve_is_said_before_anything_is_read(chat_words, tmp_path):
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="tried on a chat of two messages: messages\\[1\\]: where this answer begins"):
        inspect_data.main(chat_words)


def test_the_picture(inspect, tmp_path, monkeypatch):
    path = tmp_path / "pictures" / "row.png"
    lines = inspect("--save", str(path), "--row=1", "--no-report")
    assert lines[-1].startswith(f"{path}: row 1 ")
    height, width, _ = matplotlib.image.imread(path).shape
    assert 800 <= width <= 1600 and 800 <= height <= 1600


@pytest.mark.parametrize(("flavor", "ignoring"), [("debugmodel", True), ("flex_block_causal", False)])
def test_plain_attention_is_said_to_ignore_the_mask(inspect, tmp_path, monkeypatch, flavor, ignoring):
    titles = []
    monkeypatch.setattr(
        "torchtitan_lite.data.inspection.picture.save_figure", lambda figure, path: titles.append(figure.get_suptitle())
    )
    lines = inspect(f"--model.flavor={flavor}", f"--save={tmp_path}/row.png", "--row=0")
    assert any("sdpa, ignores document_ids" in line for line in lines) is ignoring
    assert ("sdpa, ignores this mask" in titles[0]) is ignoring
    assert re.match(r"row 0 · epoch 0 of texts, row \d+ of \d+: \d+ documents? in 16 tokens", titles[0])


def test_without_matplotlib(words, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(SystemExit, match=r"--save draws with matplotlib, which is not installed.*`plot` extra"):
        inspect_data.main([*words, "--save=row.png"])


def test_streaming_shows_the_first_rows_of_the_stream(inspect, words):
    config = config_of([*words, "--data.streaming"])
    config.training.local_batch_size = 1
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    stream = build_stream_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    expected = [expected_text(batch, tokenizer) for batch in islice(stream, 6)]
    lines = inspect("--data.streaming", "--row=2", "--rows=4")
    assert [text_of(row) for row in shown_rows(lines)] == expected[2:]
    assert "Packing of 6 rows of rank 0's stream" in lines
    assert any(line.startswith("Rows of rank 0's stream, as a run on one rank reads it") for line in lines)
    tokens = sum(len(text.replace("<bos>", "B").replace("<eos>", "E")) for text in expected)
    assert any(line.split() == ["tokens", str(tokens)] for line in lines)
    lines = inspect("--data.streaming")
    assert "Packing of 64 rows of rank 0's stream" in lines and len(shown_rows(lines)) == 1


def test_a_stream_that_breaks_off(words, tmp_path, capsys):
    """What could be read is shown, and then what stopped it."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(texts.read_text() * 10 + '{"text": 7}\n')
    line = len(TEXTS) * 10 + 1
    arguments = [*words, "--data.streaming", "--data.packing=greedy", "--rows=1000"]
    with pytest.raises(SourceError, match=f"texts.jsonl: line {line}: field 'text' is a number"):
        inspect_data.main(arguments)
    output = capsys.readouterr().out
    rows = shown_rows(output.splitlines())
    assert len(rows) > 20 and f"Of 1,000 rows only {len(rows)} could be read" in output
    with pytest.raises(SourceError, match="field 'text' is a number"):
        inspect_data.main([*arguments, "--row=500"])
    assert capsys.readouterr().out == ""


def test_as_a_script_from_another_folder(words, tmp_path):
    command = [sys.executable, str(SCRIPT), *words, "--row=0", "--no-report"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, timeout=120, env={"PATH": "", "PYTHONIOENCODING": "ascii"}
    )
    assert result.returncode == 0, result.stderr
    assert b"\\u2500\\u2500 document 0 \\xb7 positions 0-" in result.stdout
