import json
import zlib
from types import SimpleNamespace

import pyarrow
import pytest
from toy_files import COMPRESS, text_array, write_arrow, write_parquet

from torchtitan_lite.data.sources import readers
from torchtitan_lite.data.sources.document import SourceError, TextOf
from torchtitan_lite.data.sources.files import read_documents
from torchtitan_lite.data.sources.readers import read_records

FORMATS = {".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}


@pytest.fixture
def read(tmp_path):
    """Call it with a file's name and content for its documents: texts, and problems without the path in front.

    Whatever the file, reading it from any record on must give the rest of the same documents.
    """

    def read(name, content=None, text_of=TextOf("text")):  # noqa: B008
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        format = FORMATS.get("." + name.split(".")[1], "json")
        documents = list(read_documents(format, str(path), text_of, "skip"))
        for start in {*range(min(len(documents), 12)), *range(max(len(documents) - 2, 0), len(documents) + 2)}:
            rest = list(read_documents(format, str(path), text_of, "skip", start))
            assert rest == documents[start:], f"from record {start} on"
        assert all((document.text is None) == (document.problem is not None) for document in documents)
        return [
            document.text if document.problem is None else document.problem.removeprefix(f"{path}: ")
            for document in documents
        ]

    return read


def jsonl(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_json_lines(read):
    content = '{"text": "été", "n": 1}\n\n  \t\r\n{"n": 2, "text": "b\\nc"}\r\n{"text": ""}'
    for name in ("a.jsonl", "a.ndjson", "a.json", "a.JSONL", "odd.name"):
        assert read(name, content) == ["été", "b\nc", ""]
    assert read("bom.jsonl", b"\xef\xbb\xbf" + jsonl("a").encode()) == ["a"]


def test_json_array(read):
    content = '\ufeff \n[\n {"text": "été", "n": [1, {"text": 2}]}\n,{"text": "b"} , {"text": "c,]"}]\n '
    assert read("a.json", content) == ["été", "b", "c,]"]
    assert read("a.json", "[]") == [] == read("a.json", " [ \n]\n")


def test_text_is_the_whole_file(read):
    assert read("a.txt", "été\n\n two\r\nthree\rfour") == ["été\n\n two\nthree\nfour"]
    assert read("a.txt", b"\xef\xbb\xbfa\xef\xbb\xbfb") == ["a\ufeffb"]
    assert read("a.txt", "") == [""]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed(read, suffix):
    texts = [f"document {i}" * 50 for i in range(300)]
    assert read(f"a.jsonl{suffix}", COMPRESS[suffix](jsonl(*texts[:3]).encode())) == texts[:3]
    array = json.dumps([{"text": text} for text in texts[:3]])
    assert read(f"a.json{suffix}", COMPRESS[suffix](array.encode())) == texts[:3]
    assert read(f"a.txt{suffix.upper()}", COMPRESS[suffix](b"\xef\xbb\xbfa\r\nb")) == ["a\nb"]
    two = COMPRESS[suffix](jsonl("a", "b").encode()) + COMPRESS[suffix](jsonl("c").encode())
    assert read(f"two.jsonl{suffix}", two) == ["a", "b", "c"]  # as parallel compressors write


def test_zstd_that_is_not_built_in_says_what_to_install(read, monkeypatch):
    monkeypatch.setattr(pyarrow, "Codec", SimpleNamespace(is_available=lambda name: name != "zstd"))
    with pytest.raises(SourceError, match=r"a\.jsonl\.zst: this pyarrow was built without zstd; pip install"):
        read("a.jsonl.zst", COMPRESS[".zst"](b""))


def test_parquet_and_arrow(read, tmp_path):
    texts = [f"é{i}" for i in range(2500)]
    columns = {"n": list(range(2500)), "text": texts, "meta": [{"a": i} for i in range(2500)]}
    few = {name: values[:10] for name, values in columns.items()}
    write_parquet(tmp_path / "a.parquet", rows_per_group=3, **few)
    write_arrow(tmp_path / "a.arrow", rows_per_batch=4, **few)
    write_arrow(tmp_path / "b.arrow", pyarrow.ipc.new_file, rows_per_batch=4, **few)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert read(name) == texts[:10]
        assert read(name, text_of=TextOf("", "{n}: {meta.a}")) == [f"{i}: {i}" for i in range(10)]
    write_parquet(tmp_path / "long.parquet", rows_per_group=2500, **columns)
    write_arrow(tmp_path / "long.arrow", rows_per_batch=2500, **columns)
    for name, format in [("long.parquet", "parquet"), ("long.arrow", "arrow")]:
        for start in (0, 999, 1000, 1001, 2499, 2500):
            records = read_records(format, str(tmp_path / name), ["text"], start)
            assert [(record.where, record.fields) for record in records] == [
                (f"row {i + 1}", {"text": texts[i]}) for i in range(start, 2500)
            ]


def test_types_of_text_columns(read, tmp_path):
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        write_parquet(tmp_path / "a.parquet", text=pyarrow.array(["a", "é", "a"]).cast(kind))
        assert read("a.parquet") == ["a", "é", "a"]
    for kind, name in [(pyarrow.int64(), "a number"), (pyarrow.bool_(), "a boolean"), (pyarrow.binary(), "bytes")]:
        write_arrow(tmp_path / "a.arrow", text=pyarrow.array(["1", "0"]).cast(kind))
        assert read("a.arrow") == [f"row {i}: field 'text' is {name}, not text (data.text_field)" for i in (1, 2)]
    write_parquet(tmp_path / "a.parquet", text=[["a"], ["b"]])
    assert read("a.parquet")[0] == "row 1: field 'text' is a list, not text (data.text_field)"
    write_arrow(tmp_path / "none.arrow", text=pyarrow.nulls(2))
    assert read("none.arrow") == [f"row {i}: field 'text' is null (data.text_field)" for i in (1, 2)]
    time = pyarrow.array([2**62], pyarrow.timestamp("us"))
    write_arrow(tmp_path / "time.arrow", text=time)
    assert "row 1: damaged: " in read("time.arrow")[0]  # a year that Python has no date for


def test_a_document_of_ten_megabytes_without_a_space(read):
    text = "é" * 5_000_000
    assert read("a.jsonl", jsonl("a", text, "b")) == ["a", text, "b"]
    assert read("a.txt", text) == [text]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": ', "broken JSON at column 10: Expecting value"),
        (b'{"text": "a"} {"text": "b"}', "broken JSON at column 15: Extra data"),
        (b"word", "broken JSON at column 1: Expecting value"),
        (b"[" * 100_000, "broken JSON: "),
        (b'{"text": ' + b"1" * 5000 + b"}", "broken JSON: "),
        (b'"a"', "the record is text, no object with fields"),
        (b'["text"]', "the record is a list, no object with fields"),
        (b"3", "the record is a number, no object with fields"),
        (b"null", "the record is null, no object with fields"),
        (b'{"text": "caf\xe9"}', "invalid UTF-8: byte 0xe9 at offset 13 of the line"),
        (b'{"text": null}', "field 'text' is null (data.text_field)"),
        (b'{"text": 12}', "field 'text' is a number, not text (data.text_field)"),
        (b'{"body": "b"}', "no field 'text' (data.text_field); it has body"),
        (b'{"text": "\\ud83d"}', "character 1 of its text is the lone surrogate"),
    ],
)
def test_a_bad_line_is_named_and_the_others_stay(read, line, problem):
    content = jsonl("a").encode() + b"\n" + line + b"\n" + jsonl("b").encode()
    first, bad, last = read("a.jsonl", content)
    assert (first, last) == ("a", "b")
    assert bad.startswith(f"line 3: {problem}")


@pytest.mark.parametrize(
    ("array", "documents", "problem"),
    [
        ('[{"text": "a"}, 3, {"text": "b"}]', ["a", None, "b"], "record 2: the record is a number"),
        ('[{"text": "a"}, {"text": "b"', ["a", None], "record 2: broken JSON from here on: Expecting ',' delimiter"),
        ('[{"text": "a"}', ["a", None], "record 2: broken JSON from here on: neither ',' nor ']'"),
        ('[{"text": "a"} {"text": "b"}]', ["a", None], "record 2: broken JSON from here on: neither"),
        ('[{"text": "a"}, ]', ["a", None], "record 2: broken JSON from here on: "),
        ('[{"text": "a"}] {"text": "b"}', ["a", None], "record 2: broken JSON from here on: more after the end"),
        ("[", [None], "record 1: broken JSON from here on: Expecting value"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', ["a", None], "record 2: invalid UTF-8: byte 0xff at offset 26 of the"),
        (b'[{"text": "a"}] \xff', ["a", None], "record 2: invalid UTF-8: byte 0xff at offset 16 of the file"),
    ],
)
def test_what_follows_something_broken_in_an_array_is_one_bad_record(read, array, documents, problem):
    result = read("a.json", array)
    bad = documents.index(None)
    assert result[bad].startswith(problem)
    assert [None if i == bad else text for i, text in enumerate(result)] == documents


def test_an_array_in_a_file_of_lines_is_a_line(read):
    assert read("a.jsonl", '[{"text": "a"}]') == ["line 1: the record is a list, no object with fields"]


def test_text_that_is_not_utf8(read):
    assert read("a.txt", b"caf\xe9!") == ["invalid UTF-8: byte 0xe9 at offset 3 of the file"]
    assert read("a.txt", "ab".encode("utf-16")) == ["invalid UTF-8: byte 0xff at offset 0 of the file"]


def test_files_without_a_record(read):
    for name in ("a.jsonl", "a.json", "a.parquet", "a.arrow"):
        assert read(name, b"") == ["the file is empty"]
    for content in ("\n\n", " \n"):
        assert read("a.jsonl", content) == ["the file is empty"] == read("a.json", content)
    for suffix, compress in COMPRESS.items():
        assert read(f"a.jsonl{suffix}", compress(b"")) == ["the file is empty"]


def test_tables_without_a_row_say_so_themselves(read, tmp_path):
    write_parquet(tmp_path / "a.parquet", text=pyarrow.array([], pyarrow.string()))
    write_arrow(tmp_path / "a.arrow", text=pyarrow.array([], pyarrow.string()))
    assert read("a.parquet") == [] == read("a.arrow")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.timeout(60)
def test_a_truncated_archive_keeps_what_was_read(read, suffix):
    texts = [f"document {zlib.crc32(bytes([i % 256, i // 256])) ** 8}" for i in range(3000)]
    for name, content in [("a.jsonl", jsonl(*texts)), ("a.json", json.dumps([{"text": text} for text in texts]))]:
        whole = COMPRESS[suffix](content.encode())
        documents = read(f"{name}{suffix}", whole[: len(whole) * 2 // 3])
        kept = len(documents) - 1
        # Block-wise formats lose up to a block: of bzip2 900 kB, which is all of this.
        assert kept > (500 if suffix in (".gz", ".xz", ".zst") else -1)
        assert documents[:kept] == texts[:kept]
        where = f"record {kept + 1}" if name == "a.json" and kept else f"after line {kept}"
        assert documents[-1].startswith(f"{where}: truncated or damaged: ")
    assert read(f"a.txt{suffix}", COMPRESS[suffix](b"text" * 100)[:-6])[0].startswith("truncated or damaged: ")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_is_not_compressed_at_all(read, suffix):
    documents = read(f"a.jsonl{suffix}", jsonl("a"))
    assert len(documents) == 1 and documents[0].startswith("after line 0: truncated or damaged: ")


def test_damaged_parquet_loses_the_rows_of_the_damaged_group_only(read, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", rows_per_group=2, text=[f"text {i}" for i in range(6)])
    whole = path.read_bytes()
    place = whole.index(b"\x06\x00\x00\x00text 2")  # its length and the text, as Parquet's plain encoding has it
    documents = read("a.parquet", whole[:place] + b"\xff\xff\xff\x7f" + whole[place + 4 :])
    assert documents[:2] + documents[4:] == ["text 0", "text 1", "text 4", "text 5"]
    for row in (3, 4):
        assert documents[row - 1].startswith(f"row {row}: truncated or damaged: ")


def test_parquet_without_its_footer_is_one_bad_record(read, tmp_path):
    whole = write_parquet(tmp_path / "a.parquet", text=["a", "b"]).read_bytes()
    for content in (whole[:-10], whole[: len(whole) // 2], b"PAR1 this is not parquet"):
        (document,) = read("a.parquet", content)
        assert document.startswith("truncated or damaged: ")


@pytest.mark.timeout(60)
def test_a_footer_that_contradicts_itself_does_not_make_up_rows(read, tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", text=["a", "b"])
    original = pyarrow.parquet.ParquetFile

    class Lying(original):
        @property
        def metadata(self):
            return Metadata(self.reader.metadata)

    class Metadata:
        def __init__(self, metadata):
            self.num_rows, self.row_group = metadata.num_rows, lambda group: Group

    class Group:
        num_rows = 10**15

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", Lying)
    assert read("a.parquet") == ["truncated or damaged: its footer contradicts itself"]


def test_truncated_arrow_keeps_what_was_read(read, tmp_path):
    texts = [f"text {i}" for i in range(6)]
    whole = write_arrow(tmp_path / "a.arrow", rows_per_batch=2, text=texts).read_bytes()
    for cut in (whole.index(b"text 4"), whole.index(b"text 5") + 2):
        documents = read("a.arrow", whole[:cut])
        assert documents[:4] == texts[:4] and len(documents) == 5
        assert documents[4].startswith("after row 4: truncated or damaged: ")
    (document,) = read("a.arrow", b"no arrow file at all")
    assert document.startswith("after row 0: truncated or damaged: ")
    whole = write_arrow(tmp_path / "b.arrow", pyarrow.ipc.new_file, text=texts).read_bytes()
    (document,) = read("b.arrow", whole[: len(whole) - 20])  # the file kind begins at its end
    assert document.startswith("after row 0: truncated or damaged: ")


def test_arrow_whose_offsets_are_damaged_loses_the_rows_of_that_batch(read, tmp_path):
    texts = ["aaa", "bbb", "ccc", "ddd", "eee", "fff"]
    whole = write_arrow(tmp_path / "a.arrow", rows_per_batch=2, text=texts).read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (3, 6))
    place = whole.index(offsets, whole.index(b"aaabbb"))  # of the second batch
    documents = read("a.arrow", whole[:place] + b"\xff\xff\xff\x7f" + whole[place + 4 :])
    assert documents[:2] + documents[4:] == ["aaa", "bbb", "eee", "fff"]
    assert all(
        document.startswith(f"row {row}: damaged: ") for row, document in zip((3, 4), documents[2:4], strict=True)
    )


def test_invalid_utf8_in_a_table_is_the_matter_of_its_row(read, tmp_path):
    column = text_array([b"a", b"caf\xe9", None, "é".encode()])
    write_parquet(tmp_path / "a.parquet", text=column)
    write_arrow(tmp_path / "a.arrow", text=column)
    write_arrow(
        tmp_path / "b.arrow", text=column.cast(pyarrow.binary()).cast(pyarrow.large_binary()).view("large_string")
    )
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert read(name) == [
            "a",
            "row 2: field 'text': invalid UTF-8: byte 0xe9 at offset 3 of the value",
            "row 3: field 'text' is null (data.text_field)",
            "é",
        ]


def test_a_field_that_a_table_has_not(read, tmp_path):
    write_parquet(tmp_path / "a.parquet", rows_per_group=2, body=["a", "b", "c"], n=[1, 2, 3])
    write_arrow(tmp_path / "a.arrow", body=["a", "b", "c"], n=[1, 2, 3])
    for name in ("a.parquet", "a.arrow"):
        assert read(name) == [f"row {i}: no field 'text' (data.text_field); it has body, n" for i in (1, 2, 3)]


def test_a_failing_disk_is_no_bad_record(read, tmp_path, monkeypatch):
    class Failing:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def __iter__(self):
            yield b'{"text": "a"}\n'
            raise OSError(5, "Input/output error")

        def read1(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(readers, "_open", lambda path: Failing())
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(SourceError, match=rf"{name}: .*Input/output error"):
            read(name, "x")
    with pytest.raises(SourceError, match=r"none\.parquet: .*No such file"):
        read("none.parquet")
