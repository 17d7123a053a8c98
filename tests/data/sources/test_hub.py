import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
import toy_hub
from toy_files import text_array, write_arrow, write_parquet

from torchtitan_lite.data.sources import hub
from torchtitan_lite.data.sources.document import Source, SourceError
from torchtitan_lite.data.sources.hub import load_hub, open_hub


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Laid out like a data set on the hub: two subsets, of which one has two splits."""
    folder = tmp_path_factory.mktemp("hub") / "corpus"
    (folder / "data").mkdir(parents=True)
    for part, texts in enumerate([["a", "b", "c"], ["d", "e"]]):
        path = folder / "data" / f"train-0000{part}-of-00002.parquet"
        write_parquet(path, rows_per_group=2, text=texts, n=list(range(len(texts))), meta=[{"k": t} for t in texts])
    write_parquet(folder / "data" / "validation-00000-of-00001.parquet", text=["v"], n=[0], meta=[{"k": "v"}])
    (folder / "extra").mkdir()
    write_parquet(folder / "extra" / "x.parquet", body=["x", None, "z"])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "  - split: validation\n    path: data/validation-*\n"
        "- config_name: extra\n  data_files: extra/*.parquet\n---\n# A corpus\n"
    )
    return folder


@pytest.fixture
def lines(tmp_path):
    """A data set without a card, of lines of JSON."""
    folder = tmp_path / "lines"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b", "n": 2}\n{"text": null, "n": 3}\n')
    (folder / "test.jsonl").write_text('{"text": "t", "n": 1}\n')
    return folder


@pytest.fixture
def load(tmp_path):
    def load(folder, num_proc=1, **settings):
        source = Source("toy", str(folder), **settings)
        documents = load_hub(source, num_proc=num_proc, cache_dir=str(tmp_path / "cache"))
        return list(zip(documents["text"][:], documents["problem"][:], strict=True))

    return load


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def opened(folder, on_bad_record="error", **settings):
    return open_hub(Source("toy", str(folder), **settings), on_bad_record=on_bad_record)


def texts(shards):
    return [[document.text for document in shards.read(shard)] for shard in range(shards.num_shards)]


def test_subset_and_split(corpus, load):
    assert load(corpus, subset="main") == [(text, None) for text in "abcde"]
    assert load(corpus, subset="main", num_proc=3) == [(text, None) for text in "abcde"]
    assert load(corpus, subset="main", split="validation") == [("v", None)]
    assert load(corpus, subset="main", split="train[:60%]+validation") == [(text, None) for text in "abcv"]
    assert texts(opened(corpus, subset="main")) == [["a", "b", "c"], ["d", "e"]]
    assert texts(opened(corpus, subset="main", split="validation")) == [["v"]]


def test_a_data_set_without_a_card(lines, load):
    assert load(lines, split="test") == [("t", None)]
    assert texts(opened(lines, split="test")) == [["t"]]


def test_template(corpus, load):
    settings = {"subset": "main", "template": "{text}{n}-{meta.k}"}
    assert [text for text, _ in load(corpus, **settings)] == ["a0-a", "b1-b", "c2-c", "d0-d", "e1-e"]
    assert texts(opened(corpus, **settings)) == [["a0-a", "b1-b", "c2-c"], ["d0-d", "e1-e"]]


def test_bad_records_keep_their_place(corpus, load):
    problem = f"{corpus}, subset extra, split train: row 2: field 'body' is null (data.text_field)"
    assert load(corpus, subset="extra", text_field="body") == [("x", None), ("", problem), ("z", None)]
    shards = opened(corpus, "skip", subset="extra", text_field="body")
    documents = list(shards.read(0))
    assert [document.text for document in documents] == ["x", None, "z"]
    assert documents[1].problem == problem.replace("train:", "train, shard 0:")
    with pytest.raises(SourceError, match=r"shard 0: row 2: field 'body' is null .*on_bad_record=skip"):
        list(opened(corpus, subset="extra", text_field="body").read(0))


def test_rows_are_numbered_through_whatever_reads_them(tmp_path, load):
    column = text_array([b"x"] * 250 + [b"\xff"] + [b"x"] * 249)
    folder = tmp_path / "long"
    folder.mkdir()
    write_parquet(folder / "train.parquet", text=column)
    expected = ("", f"{folder}, split train: row 251: field 'text': invalid UTF-8: byte 0xff at offset 0 of the value")
    for num_proc in (1, 2):
        documents = load(folder, num_proc=num_proc)
        assert documents[250] == expected
        assert documents[:250] + documents[251:] == [("x", None)] * 499
        shutil.rmtree(tmp_path / "cache")
    shards = opened(folder, "skip")
    whole = list(shards.read(0))
    for start in (0, 99, 100, 101, 250, 251, 499, 500):
        assert list(shards.read(0, start)) == whole[start:]


def test_text_is_checked_once_and_not_copied(corpus, load, tmp_path, monkeypatch):
    load(corpus, subset="main")
    size = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("cache-*.arrow"))
    assert 0 < size < 5000
    monkeypatch.setattr(hub, "table_records", None)
    assert load(corpus, subset="main") == [(text, None) for text in "abcde"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"corpus: has several subsets and none is given \(data.subset\); there are extra, main"),
        ({"subset": "mian"}, r"corpus: no subset 'mian' \(data.subset\); there are extra, main"),
        ({"subset": "main", "split": "test"}, r"no split 'test' \(data.split\); there are train, validation"),
        ({"subset": "main", "split": "train[:1%]+dev"}, r"no split 'dev' \(data.split\)"),
        ({"subset": "main", "split": "train[:"}, "corpus, subset main, split train\\[:: "),
        ({"subset": "main", "text_field": "body"}, r"no field 'body' \(data.text_field\); there are meta, n, text"),
        ({"subset": "main", "template": "{text}{b}"}, r"no field 'b' \(data.template\); there are meta, n, text"),
        ({"subset": "main", "text_field": "n"}, r"field 'n' \(data.text_field\) is not text, but of type int64"),
        ({"subset": "main", "text_field": "meta"}, r"field 'meta' \(data.text_field\) is not text, but of type "),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(corpus, load, settings, message):
    for run in (load, opened):
        with pytest.raises(SourceError, match=message):
            run(corpus, **settings)


def test_folders_and_files_that_cannot_be_read(tmp_path, load):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "train.parquet").write_bytes(b"PAR1 this is not parquet")
    for name, message in [("empty", "doesn't contain any data files"), ("damaged", "damaged, split train: .*Parquet")]:
        for run in (load, opened):
            with pytest.raises(SourceError, match=message):
                run(tmp_path / name)


@pytest.mark.timeout(60)
def test_damage_in_the_middle_ends_a_stream_even_where_bad_records_are_skipped(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "copy")
    path = tmp_path / "copy" / "data" / "train-00000-of-00002.parquet"
    whole = path.read_bytes()
    place = whole.index(b"\x01\x00\x00\x00c")
    path.write_bytes(whole[:place] + b"\xff\xff\xff\x7f" + whole[place + 4 :])
    with pytest.raises(SourceError, match="copy, subset main, split train, shard 0: cannot be read on after row"):
        list(opened(tmp_path / "copy", "skip", subset="main").read(0))


def test_an_empty_split(tmp_path, load):
    folder = tmp_path / "none"
    folder.mkdir()
    write_arrow(folder / "train.arrow", text=pyarrow.array([], pyarrow.string()))
    with pytest.raises(SourceError, match='none, split train: Instruction "train" corresponds to no data'):
        load(folder)
    assert texts(opened(folder)) == [[]]


def test_identity_goes_with_what_is_read_and_not_with_where_it_lies(corpus, tmp_path):
    identity = opened(corpus, subset="main").identity
    shutil.copytree(corpus, tmp_path / "copy")
    assert opened(tmp_path / "copy", subset="main").identity == identity
    others = [{"split": "validation"}, {"text_field": "text", "template": "{text}"}]
    assert identity not in [opened(corpus, subset="main", **other).identity for other in others]
    write_parquet(tmp_path / "copy" / "data" / "train-00001-of-00002.parquet", text=["d", "longer"], n=[0, 1])
    assert opened(tmp_path / "copy", subset="main").identity != identity


class Rows(torch.utils.data.IterableDataset):
    """All shards, read by each worker."""

    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        return iter(sum(texts(self.shards), []))  # noqa: RUF017


def test_loader_workers_do_not_divide_the_rows_again(corpus):
    shards = pickle.loads(pickle.dumps(opened(corpus, subset="main")))
    loader = torch.utils.data.DataLoader(Rows(shards), batch_size=None, num_workers=2)
    assert sorted(loader) == sorted("abcde" * 2)


def test_no_network(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(SourceError, match=r"owner/name: the hub cannot be reached \(Couldn't reach .*no local folder"):
        opened("owner/name")


def read_hub(home, settings, **environment):
    """What comes of reading the toy hub, loaded and streamed, in a process of its own."""
    command = [sys.executable, toy_hub.__file__, str(home), json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | environment
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return results[::2], results[1::2]


@pytest.mark.timeout(120)
def test_a_data_set_on_a_hub(tmp_path):
    settings = [
        {},
        {"revision": "v1"},
        {"subset": "other"},
        {"subset": "none"},
        {"split": "none"},
        {"revision": "none"},
        {"dataset": "toy/none"},
        {"revision": toy_hub.COMMITS["v1"]},
    ]
    loaded, streamed = read_hub(tmp_path, settings)
    assert loaded[0] == ["main 0", "main 1", "main 2"] and streamed[0][1] == [["main 0", "main 1"], ["main 2"]]
    assert loaded[1] == ["v1 0", "v1 1", "v1 2"] and streamed[1][1] == [["v1 0", "v1 1"], ["v1 2"]]
    assert loaded[2] == ["main other"] and streamed[2][1] == [["main other"]]
    for results in (loaded, streamed):
        assert results[3] == "SourceError: toy/corpus: no subset 'none' (data.subset); there are main, other."
        assert results[4] == "SourceError: toy/corpus: no split 'none' (data.split); there are train."
        assert results[5].startswith("SourceError: toy/corpus: ") and "none" in results[5]
        assert results[6].startswith("SourceError: toy/none: Dataset 'toy/none' doesn't exist")
    assert streamed[1] == streamed[7]  # a tag is its commit
    assert len({identity for identity, _ in streamed[:3]}) == 3


@pytest.mark.timeout(120)
def test_without_network_only_the_revision_that_was_asked_for(tmp_path):
    main = ["main 0", "main 1", "main 2"]
    assert read_hub(tmp_path, [{}])[0] == [main]
    settings = [{}, {"revision": toy_hub.COMMITS["main"]}, {"revision": "v1"}, {"revision": toy_hub.COMMITS["v1"]}]
    loaded, streamed = read_hub(tmp_path, settings, HF_HUB_OFFLINE="1")
    assert loaded[:2] == [main, main] and [shards for _, shards in streamed[:2]] == [[main], [main]]
    for results in (loaded, streamed):
        for refused in results[2:]:
            assert "(data.revision) cannot be looked up on the hub" in refused and toy_hub.COMMITS["main"] in refused
