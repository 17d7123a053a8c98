import json
import pickle

import datasets
import pytest
from toy_data import write_jsonl
from toy_files import COMPRESS, write_arrow, write_parquet

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.sources.document import Document, Source, SourceError
from torchtitan_lite.data.sources.reading import load_documents, open_shards, progress_on_terminal
from torchtitan_lite.data.sources.registered import DATASETS
from torchtitan_lite.data.sources.resolve import sources_of


@pytest.fixture
def load(tmp_path):
    """Map mode: the loaded rows of a source."""

    def load(source, on_bad_record="error", num_proc=1):
        documents = load_documents(
            source, on_bad_record=on_bad_record, num_proc=num_proc, cache_dir=str(tmp_path / "cache")
        )
        assert documents.column_names == ["text", "problem"]
        return documents

    return load


def stream(source, on_bad_record="error"):
    """Streaming mode: all documents of a source."""
    shards = pickle.loads(pickle.dumps(open_shards(source, on_bad_record=on_bad_record)))
    return [document for shard in range(shards.num_shards) for document in shards.read(shard)]


def files(path, dataset="pydocs", **settings):
    return Source("toy", dataset, str(path), **settings)


def test_each_kind_of_file_in_both_modes(tmp_path, load):
    texts = ["first", "second\nline", "été"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.json").write_text(json.dumps([{"text": text, "n": 1} for text in texts]))
    (tmp_path / "c.jsonl.zst").write_bytes(COMPRESS[".zst"]((tmp_path / "a.jsonl").read_bytes()))
    write_parquet(tmp_path / "d.parquet", text=texts, n=[1, 2, 3])
    write_arrow(tmp_path / "e.arrow", text=texts, n=[1, 2, 3])
    (tmp_path / "f").mkdir()
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / "f" / f"{name}.txt").write_text(text)
    for name in ("a.jsonl", "b.json", "c.jsonl.zst", "d.parquet", "e.arrow", "f"):
        source = files(tmp_path / name)
        assert load(source)[:] == {"text": texts, "problem": [None] * 3}
        assert stream(source) == [Document(text, None) for text in texts]


def test_text_field_and_template(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": "y", "meta": {"n": 1}}\n')
    for settings, text in [
        ({}, "y"),
        ({"text_field": "body"}, "x"),
        ({"template": "{body}-{meta.n}"}, "x-1"),
    ]:
        source = files(path, **settings)
        assert load(source)["text"][:] == [text] == [document.text for document in stream(source)]


def test_text_files_have_no_fields(tmp_path, load):
    (tmp_path / "a.txt").write_text("x")
    source = files(tmp_path / "a.txt", text_field="body", template="{body}")  # meant for others of the mixture
    assert load(source)["text"][:] == ["x"] == [document.text for document in stream(source)]


def test_files_with_other_columns_beside_the_text_go_together(tmp_path, load):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "score": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b", "score": "high", "source": "web"}\n')
    assert load(files(tmp_path, "json"))["text"][:] == ["a", "b"]


def test_numbers_do_not_become_text(tmp_path, load):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.jsonl").write_text('{"text": 3}\n{"text": 4}\n')
    with pytest.raises(SourceError, match=r"b\.jsonl: line 1: field 'text' is a number, not text .*and 1 more bad"):
        load(files(tmp_path, "json"))


def broken_parquet(tmp_path):
    return write_parquet(tmp_path / "x.parquet", text=["a"]).read_bytes()[:-4]


@pytest.mark.parametrize(
    ("name", "content", "texts", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n{"text": "b"}', ["a", None, "b"], "line 3: broken JSON"),
        ("x.jsonl", b'{"text": "a"}\n[1]', ["a", None], "line 2: the record is a list, no object"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}', ["a", None], "line 2: no field 'text' .*; it has body"),
        ("x.jsonl", b'{"text": "a"}\n{"text": null}', ["a", None], "line 2: field 'text' is null"),
        ("x.jsonl", b'{"text": "a"}\n{"text": 3}', ["a", None], "line 2: field 'text' is a number, not text"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', ["a", None], "line 2: invalid UTF-8: byte 0xff at offset 10"),
        ("x.json", b'[{"text": "a"}, {"text": 3}]', ["a", None], "record 2: field 'text' is a number"),
        ("x.txt", b"a\xff", [None], "invalid UTF-8: byte 0xff at offset 1 of the file"),
        (
            "x.jsonl.gz",
            COMPRESS[".gz"](b'{"text": "a"}\n' * 3)[:-6],
            ["a"] * 3 + [None],
            "after line 3: truncated or d",
        ),
        ("x.parquet", broken_parquet, [None], "truncated or damaged: "),
        ("x.arrow", b"nonsense", [None], "after row 0: truncated or damaged: "),
        ("x.jsonl", b"", [None], "the file is empty"),
        ("x.parquet", b"", [None], "the file is empty"),
    ],
)
@pytest.mark.timeout(60)
def test_bad_records_in_both_modes(tmp_path, load, name, content, texts, message):
    good = {".txt": b"good", ".parquet": None, ".arrow": None}.get("." + name.split(".")[1], b'{"text": "good"}')
    folder = tmp_path / "files"
    folder.mkdir()
    first = folder / f"a{name[1:]}"
    if good is None:
        (write_parquet if "parquet" in name else write_arrow)(first, text=["good"])
    else:
        first.write_bytes(COMPRESS[".gz"](good) if name.endswith(".gz") else good)
    (folder / name).write_bytes(content(tmp_path) if callable(content) else content)
    source = files(folder)

    documents, streamed = load(source, "skip"), stream(source, "skip")
    assert documents["text"][:] == ["good", *(text or "" for text in texts)]
    assert [document.text for document in streamed] == ["good", *texts]
    assert documents["problem"][:] == [document.problem for document in streamed]
    problem = next(problem for problem in documents["problem"] if problem is not None)
    assert problem.startswith(f"{folder / name}: ")

    for run in (load, stream):
        with pytest.raises(SourceError, match=rf"{name}: {message}.*\. data.on_bad_record=skip would leave"):
            run(source, "error")


def test_fields_missing_from_a_template_in_both_modes(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "A", "body": "a"}\n{"title": "B"}\n{"title": null, "body": "c"}\n')
    source = files(path, template="{title}: {body}")
    problems = [
        None,
        f"{path}: line 2: no field 'body' (data.template); it has title",
        f"{path}: line 3: field 'title' is null (data.template)",
    ]
    assert load(source, "skip")[:] == {"text": ["A: a", "", ""], "problem": problems}
    assert [document.problem for document in stream(source, "skip")] == problems
    for run in (load, stream):
        with pytest.raises(SourceError, match=r"a\.jsonl: line 2: no field 'body'"):
            run(source)


def test_skipping_or_not_reads_the_files_once(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(SourceError):
        load(files(path))
    cached = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.arrow")}
    assert load(files(path), "skip")["text"][:] == ["a", ""]
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.arrow")} == cached


@pytest.mark.timeout(60)
def test_without_any_document_it_says_so(tmp_path, load, monkeypatch):
    monkeypatch.setitem(DATASETS, "pydocs", lambda: iter(()))
    with pytest.raises(SourceError, match=r"^toy: no samples, it is empty"):
        load(Source("toy", "pydocs"))
    write_parquet(tmp_path / "a.parquet", text=datasets.Dataset.from_dict({"text": ["a"]}).data.table["text"][:0])
    with pytest.raises(SourceError, match=r"^toy: no samples, it is empty"):
        load(files(tmp_path / "a.parquet"))
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(SourceError, match=r"no samples, all of its 2 records are bad, the first one for .*a\.jsonl: l"):
        load(files(tmp_path / "a.jsonl", text_field="content"), "skip")


def test_registered_data_set(load, monkeypatch):
    monkeypatch.setitem(DATASETS, "pydocs", lambda: iter(["one", "two"]))
    source = sources_of(Config())[0]
    assert load(source)[:] == {"text": ["one", "two"], "problem": [None, None]}
    assert stream(source) == [Document("one", None), Document("two", None)]


def test_what_is_no_source_at_all(load):
    for run in (load, stream):
        with pytest.raises(SourceError, match="Did you mean pydocs"):
            run(Source("toy", "pydoc"))
        with pytest.raises(SourceError, match="no such file"):
            run(files("/nowhere.jsonl"))


def test_progress_bars_only_on_a_terminal():
    with progress_on_terminal():
        assert datasets.are_progress_bars_disabled()
    assert not datasets.are_progress_bars_disabled()


def test_a_cache_folder_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    documents = load_documents(files(path), on_bad_record="error", num_proc=1, cache_dir="~/cache")
    assert documents.cache_files[0]["filename"].startswith(str(tmp_path / "cache"))
