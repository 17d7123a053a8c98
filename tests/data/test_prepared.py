import logging
import pickle
import shutil
import threading
import time

import numpy as np
import pytest
from toy_data import BOS, EOS, write_jsonl

from torchtitan_lite.data import prepared as module
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.prepared import prepare_sources
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def prepare(tmp_path, make_config, character_folder):
    def prepare(texts=None, **settings):
        path = tmp_path / "documents.jsonl"
        if texts is not None:
            write_jsonl(path, texts)
        (source,) = prepare_sources(make_config(path, **settings), load_tokenizer(str(character_folder)))
        return source

    return prepare


def test_rows_are_the_documents_tokens(prepare, character_folder):
    source = prepare(["abc", "", "de"], packing="greedy")
    tokenizer = load_tokenizer(str(character_folder))
    documents = {tuple(tokenizer.encode(text)) for text in ("abc", "de")}  # 5 and 4 tokens: a row of 8 each
    read = [tuple(document.tolist()) for row in range(source.plan.num_rows) for document in source.row(row)]
    assert sorted(read) == sorted(documents) and all(ids[0] == BOS and ids[-1] == EOS for ids in read)
    report = source.report()
    assert (report.name, report.documents, report.empty_documents, report.tokens) == ("documents", 2, 1, 9)


def test_a_plan_is_made_once_and_mapped(prepare, monkeypatch):
    first = prepare(["abc", "de"] * 50)
    monkeypatch.setattr(module, "pack", lambda *_: pytest.fail("planned again"))
    second = prepare()
    assert isinstance(second.plan.document, np.memmap)
    assert all(np.array_equal(a, b) for a, b in zip(vars(first.plan).values(), vars(second.plan).values(), strict=True))
    unpickled = pickle.loads(pickle.dumps(second))
    assert [row.tolist() for row in unpickled.row(3)] == [row.tolist() for row in first.row(3)]
    for changed in ({"seq_len": 16}, {"packing": "none"}, {"seed": 1}, {"oversize": "drop"}, {"packing_window": 5}):
        with pytest.raises(pytest.fail.Exception, match="planned again"):
            prepare(**changed)
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        prepare(["abc", "de"] * 49)


def test_a_plan_half_written_is_no_plan(prepare, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.np, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(["abc", "de"])
    monkeypatch.undo()
    assert prepare().plan.num_rows == 2


def test_a_cache_folder_that_does_not_serve(prepare, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "save", full)
    with pytest.raises(SourceError, match=rf"No space left on device\. .* {tmp_path}/cache; data\.cache_dir names"):
        prepare(["abc"])
    monkeypatch.undo()
    prepare()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(SourceError, match=r"cache/torchtitan_lite: Not a directory\..*data\.cache_dir names another"):
        prepare()


@pytest.mark.parametrize(
    ("pattern", "left", "message"),
    [
        ("torchtitan_lite/*.arrow", 0, "The cache in .*/cache is damaged .*Delete it, and all is read and tokenised"),
        ("torchtitan_lite/*.arrow", 0.5, "The cache in .*/cache is damaged"),
        ("generator/**/*.arrow", 0, "The cache in .*/cache is damaged"),
        ("generator/**/*.arrow", 0.5, "The cache in .*/cache is damaged"),
        ("generator/**/dataset_info.json", 0.5, "The cache in .*/cache is damaged"),
        (
            "torchtitan_lite/*.plan/document.npy",
            0,
            r"\.plan: the packing plan is damaged .*Delete it",
        ),
        ("torchtitan_lite/*.plan/document.npy", 0.5, "packing plan is damaged"),
        ("torchtitan_lite/*.plan/document.npy", None, "packing plan is damaged"),
        ("torchtitan_lite/*.plan/counts.json", 0.5, "packing plan is damaged"),
        ("torchtitan_lite/*.plan/counts.json", None, "packing plan is damaged"),
    ],
)
def test_a_damaged_cache_is_named(prepare, tmp_path, pattern, left, message):
    prepare(["abc", "de"] * 50)
    (path,) = (tmp_path / "cache").glob(pattern)
    if left is None:
        path.unlink()
    else:
        content = path.read_bytes()
        path.unlink()  # not cut in place: the file may be mapped
        path.write_bytes(content[: int(len(content) * left)])
    with pytest.raises(SourceError, match=message):
        prepare()


@pytest.mark.timeout(60)
def test_several_at_once_find_one_build(prepare, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "documents.jsonl", ["abc"] * 20)
    sources, tokenized, planned = [], [], []
    encode, pack = Tokenizer.encode_batch, module.pack

    def encode_slowly(self, texts, **options):
        time.sleep(0.3)
        tokenized.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_slowly)
    monkeypatch.setattr(module, "pack", lambda *args: (planned.append(1), pack(*args))[1])
    threads = [threading.Thread(target=lambda: sources.append(prepare())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({source.fingerprint for source in sources}) == 1 and len(sources) == 4
    assert tokenized == ["abc"] * 20 and planned == [1]


def test_bad_records_are_an_error_or_counted(prepare, tmp_path, caplog):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "abc"}\n{"text": 5}\n{"text": "de"}\n{"tex": "de"}\n{\n{}\n')
    with pytest.raises(SourceError, match=r"documents\.jsonl: line 2: field 'text' is a number.*and 3 more"):
        prepare()
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            source = prepare(on_bad_record="skip")
        assert source.bad_records == 4 and source.report().documents == 2
        assert "documents: 4 bad records left out: " in caplog.text and "line 2: " in caplog.text
        assert "and 1 more" in caplog.text


def test_nothing_left_to_train_on(prepare):
    with pytest.raises(SourceError, match="no samples, all of its 2 documents are empty"):
        prepare(["", " "])
    with pytest.raises(SourceError, match="oversize=drop leaves out all 2 documents"):
        prepare(["a" * 20, "b" * 30], oversize="drop")
    with pytest.raises(PackingError):
        prepare(["a" * 20], oversize="error")
