import json
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from toy_data import write_jsonl

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import sources
from torchtitan_lite.data.sources import DATASETS, SourceError, check_source, find_files, load_documents, pydocs


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture(scope="module")
def python_documents():
    return list(pydocs())


def test_pydocs_is_topics_and_library_sources(python_documents):
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "argparse.py").read_text() in python_documents
    assert (library / "json" / "decoder.py").read_text() in python_documents
    assert any(document.startswith('The "assert" statement') for document in python_documents)
    assert 500 < len(python_documents) < 5000
    assert python_documents == list(pydocs())
    assert pytest.__file__ and Path(pytest.__file__).read_text() not in python_documents


def test_pydocs_leaves_out_tests_packages_and_broken_files(tmp_path, monkeypatch):
    left_out = [
        "test/a.py",
        "unittest/tests/a.py",
        "idlelib/idle_test/a.py",
        "site-packages/a.py",
        "dist-packages/a.py",
    ]
    for name in ["b.py", "a.py", "json/tool.py", "pydoc_data/topics.py", "notes.txt", *left_out]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9t\xe9")
    (tmp_path / "bad_bytes.py").write_bytes(b"# \xff\xfe")
    (tmp_path / "bad_coding.py").write_bytes(b"# coding: no-such-code\n")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    files = [document for document in pydocs() if document.startswith("#")]
    assert files == ["# a.py", "# b.py", "# json/tool.py", "# coding: latin-1\n# été"]


def test_an_empty_registered_data_set_says_so(monkeypatch):
    monkeypatch.setitem(DATASETS, "pydocs", lambda: iter(()))
    with pytest.raises(SourceError, match="pydocs: no samples"):
        load_documents(Config())


def test_registered_data_set_loads(monkeypatch):
    monkeypatch.setitem(DATASETS, "pydocs", lambda: iter(["one", "two"]))
    assert load_documents(Config())["text"][:] == ["one", "two"]


def test_each_format(tmp_path, make_config):
    texts = ["first", "second\nline", "été"]
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    array = tmp_path / "a.json"
    array.write_text(json.dumps([{"text": text, "n": 1} for text in texts]))
    parquet = write_parquet(tmp_path / "a.parquet", text=texts, n=[1, 2, 3])
    for path in (jsonl, array, parquet):
        documents = load_documents(make_config(path))
        assert documents.column_names == ["text"] and documents["text"][:] == texts
    for name, text in zip(["2.txt", "1.md", "sub/3.txt"], texts, strict=True):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    assert load_documents(make_config(tmp_path / "texts"))["text"][:] == ["second\nline", "first", "été"]


def test_text_field(tmp_path, make_config):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": "y"}\n')
    assert load_documents(make_config(path, text_field="body"))["text"][:] == ["x"]
    with pytest.raises(SourceError, match=r"a\.jsonl: no field 'content' \(data.text_field\); it has body, text"):
        load_documents(make_config(path, text_field="content"))


def test_folder_glob_home_and_odd_names(tmp_path, make_config, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("data/b.jsonl", "data/sub/a[1].jsonl", "data/.hidden/c.jsonl", "data/.d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    (tmp_path / "data" / "README").write_text("not data")
    for path, expected in [
        ("~/data", ["data/b.jsonl", "data/sub/a[1].jsonl"]),
        ("~/data/**/*.jsonl", ["data/b.jsonl", "data/sub/a[1].jsonl"]),
        ("~/data/sub/a[1].jsonl", ["data/sub/a[1].jsonl"]),
    ]:
        assert load_documents(make_config(path))["text"][:] == expected


def test_files_with_other_columns_beside_the_text_go_together(tmp_path, make_config):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "score": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b", "source": "web"}\n')
    assert load_documents(make_config(tmp_path, dataset="json"))["text"][:] == ["a", "b"]


def test_changed_files_are_read_again(tmp_path, make_config):
    path = write_jsonl(tmp_path / "a.jsonl", ["old"])
    assert load_documents(make_config(path))["text"][:] == ["old"]
    write_jsonl(path, ["newer"])
    assert load_documents(make_config(path))["text"][:] == ["newer"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": 3}\n', "must hold strings only, but its type is"),
        ('{"text": 3}\n', "must hold strings only, but its type is Value.'int64'"),
        ('{"text": ["a"]}\n', "must hold strings only, but its type is List"),
        ('{"text": "a"}\n{"body": "b"}\n', "record 2 has no 'text'"),
        ('{"text": "a"}\n{"text": null}\n', "record 2 has no 'text'"),
        ('{"text": "a"}\n{"text": \n', "bad.jsonl: "),
        ("\n\n", "bad.jsonl: "),
    ],
)
@pytest.mark.timeout(60)
def test_bad_records_name_the_file(tmp_path, make_config, content, message):
    write_jsonl(tmp_path / "a.jsonl", ["good"])
    (tmp_path / "bad.jsonl").write_text(content)
    for path in (tmp_path / "bad.jsonl", tmp_path):
        if path == tmp_path and content == '{"text": 3}\n':
            continue  # a number among files of strings is read as its digits
        with pytest.raises(SourceError, match=rf"bad\.jsonl: .*{message.removeprefix('bad.jsonl: ')}"):
            load_documents(make_config(path, dataset="json"))


@pytest.mark.timeout(60)
def test_broken_parquet_and_undecodable_text_name_the_file(tmp_path, make_config):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(SourceError, match=r"a\.parquet: .*Parquet"):
        load_documents(make_config(tmp_path / "a.parquet"))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match=r"a\.txt: .*decode byte 0xff"):
        load_documents(make_config(tmp_path / "a.txt"))


def problem(dataset, path=None):
    config = Config()
    config.training.dataset, config.training.dataset_path = dataset, None if path is None else str(path)
    problems = check_source(config)
    return problems[0] if problems else None


def test_check_source_finds_what_needs_no_reading(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.jsonl").touch()
    assert problem("pydocs") is None
    assert problem("json", tmp_path / "a.jsonl") is None
    assert problem("text", tmp_path / "a.csv") is None  # the format is said, so the suffix does not matter
    assert "Did you mean pydocs?" in problem("pydoc") and "json, text, parquet" in problem("pydoc")
    assert "needs training.dataset_path" in problem("json")
    assert "must be one of json, text, parquet" in problem("c4", tmp_path)
    assert "no such file" in problem("pydocs", tmp_path / "missing.jsonl")
    assert "no such file" in problem("pydocs", tmp_path / "*.parquet")
    assert "no .parquet file" in problem("parquet", tmp_path)
    assert ".jsonl" in problem("pydocs", tmp_path / "empty")
    assert "several kinds (json, text)" in problem("pydocs", tmp_path)
    assert "cannot tell the format of" in problem("pydocs", tmp_path / "a.csv")
    assert "zero.jsonl is empty" in problem("json", tmp_path)


def test_format_is_inferred(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    write_jsonl(tmp_path / "a.JSON", ["x"])
    found = find_files("pydocs", str(tmp_path))
    assert found.format == "json" and [Path(path).name for path in found.paths] == ["a.JSON", "b.jsonl"]
