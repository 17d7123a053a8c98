import pickle
import sysconfig
from pathlib import Path

import pytest

from torchtitan_lite.data.sources import pydocs as module
from torchtitan_lite.data.sources.document import Document
from torchtitan_lite.data.sources.pydocs import pydocs
from torchtitan_lite.data.sources.registered import DATASETS, RegisteredShards, load_registered


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
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    files = [document for document in pydocs() if document.startswith("#")]
    assert files == ["# a.py", "# b.py", "# json/tool.py", "# coding: latin-1\n# été"]


def test_loaded_it_is_text_without_problems(monkeypatch):
    monkeypatch.setitem(DATASETS, "pydocs", lambda: iter(["one", "two"]))
    assert load_registered("pydocs")[:] == {"text": ["one", "two"], "problem": [None, None]}


def test_streamed_it_is_one_shard(monkeypatch):
    monkeypatch.setitem(DATASETS, "pydocs", lambda: iter(["one", "two", "three"]))
    shards = pickle.loads(pickle.dumps(RegisteredShards("pydocs")))
    assert shards.num_shards == 1
    assert list(shards.read(0)) == [Document("one", None), Document("two", None), Document("three", None)]
    assert list(shards.read(0, 2)) == [Document("three", None)]
    assert list(shards.read(0, 3)) == []


def test_identity_is_of_the_texts(monkeypatch):
    identities = []
    for texts in (["one", "two"], ["one", "two"], ["onet", "wo"], ["one"]):
        monkeypatch.setitem(DATASETS, "pydocs", lambda texts=texts: iter(texts))
        identities.append(RegisteredShards("pydocs").identity)
    assert identities[0] == identities[1] and len(set(identities)) == 3
