import json
import os
import pickle
import shutil
from pathlib import Path

import datasets
import pytest
from toy_data import write_jsonl
from toy_files import COMPRESS, write_arrow, write_parquet

from torchtitan_lite.data.sources import files as module
from torchtitan_lite.data.sources.document import Document, SourceError, TextOf
from torchtitan_lite.data.sources.files import Files, FileShards, find_files, load_files, stem


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"text": "x"}\n')


def found(path, dataset="pydocs", below=None):
    format, paths = find_files(dataset, str(path))
    return format, [os.path.relpath(file, below or path) for file in paths]


@pytest.mark.parametrize("name", ["a.json", "a.JSONL", "a.ndjson", "a.txt", "a.md", "a.parquet", "a.arrow"])
def test_format_by_suffix(tmp_path, name):
    formats = {"md": "text", "txt": "text", "parquet": "parquet", "arrow": "arrow"}
    write(tmp_path, name)
    assert find_files("pydocs", str(tmp_path / name)).format == formats.get(name.split(".")[1], "json")


def test_compressed_files_have_the_format_below(tmp_path):
    write(tmp_path, "a.json.gz", "b.jsonl.zst", "c.ndjson.bz2", "d.json.XZ", "e.parquet.gz", "f.gz")
    assert found(tmp_path) == ("json", ["a.json.gz", "b.jsonl.zst", "c.ndjson.bz2", "d.json.XZ"])
    write(tmp_path / "texts", "a.txt.gz", "b.md.zst")
    assert found(tmp_path / "texts") == ("text", ["a.txt.gz", "b.md.zst"])


def test_folder_glob_home_and_odd_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data", "b.jsonl", "sub/a[1].jsonl", ".hidden/c.jsonl", ".d.jsonl", "README")
    for path, expected in [
        ("~/data", ["b.jsonl", "sub/a[1].jsonl"]),
        ("~/data/**/*.jsonl", ["b.jsonl", "sub/a[1].jsonl"]),
        ("~/data/sub/a[1].jsonl", ["sub/a[1].jsonl"]),
    ]:
        assert found(path, below=tmp_path / "data") == ("json", expected)


@pytest.mark.timeout(20)
def test_links_are_followed_and_may_run_in_circles(tmp_path):
    write(tmp_path, "data/b.jsonl", "data/sub/a.jsonl", "elsewhere/c.jsonl", "elsewhere/deep/d.jsonl")
    for link, target in [("data/one", "."), ("data/sub/two", ".."), ("data/sub/three", "../../elsewhere")]:
        (tmp_path / link).symlink_to(target)
    (tmp_path / "data/gone").symlink_to("nowhere")
    expected = ["b.jsonl", "sub/a.jsonl", "sub/three/c.jsonl", "sub/three/deep/d.jsonl"]
    for path in ("data", "data/**/*.jsonl", "da*/**", "data/**/**/*.jsonl"):
        assert found(tmp_path / path, below=tmp_path / "data") == ("json", expected)


def test_an_unreadable_folder_is_no_empty_one(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl", "locked/b.jsonl")
    scandir = os.scandir

    def refusing(path):  # root may read everything
        if os.path.basename(path) == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for path in (tmp_path, tmp_path / "**/*.jsonl", tmp_path / "locked"):
        with pytest.raises(SourceError, match=r"/locked: .*cannot be read: Permission denied"):
            find_files("json", str(path))


def test_a_format_picks_its_files_from_a_folder(tmp_path):
    write(tmp_path, "a.jsonl", "b.txt", "c.parquet")
    assert found(tmp_path, "text") == ("text", ["b.txt"])
    assert find_files("text", str(tmp_path / "a.jsonl")) == ("text", [str(tmp_path / "a.jsonl")])


def test_a_saved_data_set_is_its_arrow_files(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["a", "b"]})
    saved.save_to_disk(str(tmp_path / "saved"))
    format, paths = find_files("pydocs", str(tmp_path / "saved"))
    assert format == "arrow"
    assert list(FileShards(Files(format, paths), TextOf("text"), "error").read(0)) == [
        Document("a", None),
        Document("b", None),
    ]
    write(tmp_path, "plain/state.json")
    assert found(tmp_path / "plain") == ("json", ["state.json"])


def test_what_cannot_be_found_or_told_apart(tmp_path):
    write(tmp_path, "mixed/a.txt", "mixed/b.jsonl", "a.csv", "json/a.json")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for dataset, path, message in [
        ("pydocs", "missing.jsonl", "dataset_path=.*missing.jsonl: no such file, and no .json, .jsonl"),
        ("pydocs", "*.parquet", "no such file"),
        ("pydocs", "empty", "no such file, and no .json, .jsonl, .ndjson, .txt, .md, .parquet, .arrow file in a"),
        ("parquet", "json", "no .parquet file in a folder"),
        ("pydocs", "mixed", r"several kinds \(json, text\).*training.dataset=json or text"),
        ("pydocs", "a.csv", "cannot tell the format of .*a.csv by its suffix .*followed by .gz, .bz2, .xz, .zst too"),
        ("c4", "json", "dataset=c4: with a dataset_path, this must be one of json, text, parquet, arrow"),
        ("json", "pipe", "pipe: neither a file nor a folder"),
    ]:
        with pytest.raises(SourceError, match=message):
            find_files(dataset, str(tmp_path / path))


def test_no_permission(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl")
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(SourceError, match=r"no permission to read .*a\.jsonl"):
        find_files("json", str(tmp_path))


def test_stem():
    names = ["a.jsonl", "a.b.txt.gz", "a.parquet", "a.csv", "a.gz", "fineweb-edu-1.2"]
    assert [stem(name) for name in names] == ["a", "a.b", "a", "a.csv", "a", "fineweb-edu-1.2"]


def load(tmp_path, *names, num_proc=1, text_of=TextOf("text")):  # noqa: B008
    format = {".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}.get(Path(names[0]).suffix, "json")
    paths = [str(tmp_path / name) for name in names]
    return load_files(Files(format, paths), text_of, num_proc=num_proc, cache_dir=str(tmp_path / "cache"))


def test_loaded_files_are_in_order_whatever_the_number_of_processes(tmp_path):
    texts = [[f"{file}-{i}" for i in range(file)] for file in (3, 1, 4)]
    names = [write_jsonl(tmp_path / f"{file}.jsonl", lines).name for file, lines in enumerate(texts)]
    expected = sum(texts, [])  # noqa: RUF017
    one = load(tmp_path, *names)
    assert one["text"][:] == expected and one["problem"][:] == [None] * 8
    for num_proc in (2, 9):
        shutil.rmtree(tmp_path / "cache")
        again = load(tmp_path, *names, num_proc=num_proc)
        assert again["text"][:] == expected
        assert again._fingerprint == one._fingerprint


def test_files_are_read_once_until_they_change(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["old"])
    opened = []
    original = module.read_documents
    monkeypatch.setattr(module, "read_documents", lambda *args: opened.append(args) or original(*args))
    for _ in range(2):
        assert load(tmp_path, "a.jsonl")["text"][:] == ["old"]
    assert len(opened) == 1
    stat = path.stat()
    write_jsonl(path, ["new"])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # a clock may be coarser than this test
    assert load(tmp_path, "a.jsonl")["text"][:] == ["new"]
    assert load(tmp_path, "a.jsonl", text_of=TextOf("text", "<{text}>"))["text"][:] == ["<new>"]


def test_bad_records_stay_where_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n{"text": "b"}\n')
    documents = load(tmp_path, "a.jsonl")
    assert documents["text"][:] == ["a", "", "b"]
    assert documents["problem"][:] == [
        None,
        f"{tmp_path}/a.jsonl: line 2: field 'text' is a number, not text (data.text_field)",
        None,
    ]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_failing_disk_ends_the_reading_and_leaves_no_cache(tmp_path, monkeypatch, num_proc):
    names = [write_jsonl(tmp_path / name, ["x"]).name for name in ("a.jsonl", "b.jsonl")]

    def failing(format, path, *rest):
        raise OSError(5, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_records", failing)
        with pytest.raises(SourceError, match=r"Input/output error"):
            load(tmp_path, *names, num_proc=num_proc)
    assert load(tmp_path, *names)["text"][:] == ["x", "x"]


def test_much_text_in_one_batch(tmp_path):
    text = "x" * 12_000_000
    for name in range(9):
        (tmp_path / f"{name}.txt").write_text(text)
    documents = load(tmp_path, *(f"{name}.txt" for name in range(9)))
    assert all(document["text"] == text for document in documents)


def shards(folder, *names, text_of=TextOf("text")):  # noqa: B008
    return FileShards(Files("json", [str(folder / name) for name in names]), text_of, "skip")


def test_each_file_is_a_shard(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    (tmp_path / "b.json").write_text(json.dumps([{"text": "d"}, {}, {"text": "e"}]))
    (tmp_path / "c.jsonl.gz").write_bytes(COMPRESS[".gz"](b'{"text": "f"}'))
    both = pickle.loads(pickle.dumps(shards(tmp_path, "a.jsonl", "b.json", "c.jsonl.gz")))
    assert both.num_shards == 3
    assert [document.text for document in both.read(0)] == ["a", "b", "c"]
    assert [document.text for document in both.read(1)] == ["d", None, "e"]
    assert list(both.read(1, 2)) == [Document("e", None)]
    assert list(both.read(2)) == [Document("f", None)]


def test_a_bad_record_is_an_error_where_it_is_reached(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n')
    documents = FileShards(Files("json", [str(tmp_path / "a.jsonl")]), TextOf("text"), "error").read(0)
    assert next(documents) == Document("a", None)
    with pytest.raises(
        SourceError,
        match=r"a\.jsonl: line 2: broken JSON at .*on_bad_record=skip would leave",
    ):
        next(documents)


def test_identity_goes_with_what_is_read_and_not_with_where_it_lies(tmp_path):
    for folder in ("one", "two/deeper"):
        write(tmp_path / folder, "a.jsonl", "sub/b.jsonl")
    names = ["a.jsonl", "sub/b.jsonl"]
    identity = shards(tmp_path / "one", *names).identity
    assert shards(tmp_path / "two/deeper", *names).identity == identity
    assert shards(tmp_path / "one", *names, text_of=TextOf("body")).identity != identity
    assert shards(tmp_path / "one", *names, text_of=TextOf("text", "{text}")).identity != identity
    assert shards(tmp_path / "one", *names[:1]).identity != identity
    with (tmp_path / "two/deeper/a.jsonl").open("a") as file:
        file.write("\n")
    assert shards(tmp_path / "two/deeper", *names).identity != identity


def test_tables_stream_from_any_row(tmp_path):
    texts = [f"text {i}" for i in range(7)]
    write_parquet(tmp_path / "a.parquet", rows_per_group=2, text=texts)
    write_arrow(tmp_path / "a.arrow", rows_per_batch=2, text=texts)
    for format in ("parquet", "arrow"):
        streamed = FileShards(Files(format, [str(tmp_path / f"a.{format}")]), TextOf("text"), "error")
        for start in range(8):
            assert [document.text for document in streamed.read(0, start)] == texts[start:]
