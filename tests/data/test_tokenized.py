import os
import threading
import time
from dataclasses import dataclass

import datasets
import pytest
from toy_data import BOS, EOS

from torchtitan_lite.data import tokenized
from torchtitan_lite.data.chat.encoding import TextEncoder
from torchtitan_lite.data.tokenized import (
    bad_records,
    cache_folder,
    document_lengths,
    text_fingerprint,
    tokenize_documents,
)
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["abc", "", "d", " \n", "a<eos>b"]


@dataclass(frozen=True)
class CountingTokenizer(Tokenizer):
    """Counts documents; fails or dawdles on demand."""

    seen: list
    fail: bool = False
    seconds: float = 0.0

    def encode_batch(self, texts, **options):
        if self.fail:
            raise RuntimeError("out of luck")
        time.sleep(self.seconds)
        self.seen.extend(texts)
        return super().encode_batch(texts, **options)


def counting(folder, **options):
    base = load_tokenizer(str(folder))
    return CountingTokenizer(base.backend, base.bos_id, base.eos_id, base.fingerprint, [], **options)


def tokenize(texts, tokenizer, cache, num_proc=1, problems=None):
    columns = {"text": texts, "problem": problems or [None] * len(texts)}
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    documents = datasets.Dataset.from_dict(columns, features=features)
    folder = cache_folder(str(cache))
    return tokenize_documents(documents, TextEncoder(tokenizer), num_proc=num_proc, folder=folder, timeout_seconds=60)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_one_row_a_document_with_one_terminator(character_folder, tmp_path, num_proc):
    tokenizer = load_tokenizer(str(character_folder))
    tokenized = tokenize(TEXTS, tokenizer, tmp_path / "cache", num_proc)
    tokens = tokenized["tokens"][:]
    assert document_lengths(tokenized).tolist() == [5, 0, 3, 0, 9] == [len(ids) for ids in tokens]
    for ids, text in zip(tokens, TEXTS, strict=True):
        assert ids == ([BOS, *tokenizer.encode(text, add_bos=False, add_eos=False), EOS] if text.strip() else [])
        assert ids.count(EOS) == bool(text.strip())
    assert tokenized.features["tokens"].feature.dtype == "int32"


def test_second_start_reads_the_cache_with_any_number_of_processes(character_folder, tmp_path):
    tokenizer = counting(character_folder)
    first = tokenize(TEXTS, tokenizer, tmp_path / "cache")
    assert tokenizer.seen == TEXTS
    for num_proc in (1, 2):
        assert tokenize(TEXTS, tokenizer, tmp_path / "cache", num_proc)["tokens"][:] == first["tokens"][:]
    assert tokenizer.seen == TEXTS


def test_other_text_or_tokenizer_is_another_cache_entry(character_folder, tmp_path):
    tokenizer = counting(character_folder)
    tokenize(["a"], tokenizer, tmp_path / "cache")
    assert tokenize(["b"], tokenizer, tmp_path / "cache")["tokens"][0] == tokenizer.encode("b")
    (character_folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert tokenize(["a"], counting(character_folder), tmp_path / "cache")["tokens"][0][0] != BOS


@pytest.mark.timeout(60)
def test_one_builds_and_the_others_wait(character_folder, tmp_path):
    tokenizer = counting(character_folder, seconds=0.5)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(tokenize(TEXTS, tokenizer, tmp_path / "cache")["tokens"][:]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and results[0] == results[1] == results[2]
    assert tokenizer.seen == TEXTS


@pytest.mark.timeout(60)
def test_a_failed_build_neither_blocks_nor_poisons_the_next(character_folder, tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        tokenize(TEXTS, counting(character_folder, fail=True), tmp_path / "cache")
    assert document_lengths(tokenize(TEXTS, counting(character_folder), tmp_path / "cache")).tolist() == [5, 0, 3, 0, 9]


def test_users_choice_of_tokenizer_threads_comes_back(character_folder, tmp_path, monkeypatch):
    for index, (before, after) in enumerate([("true", "true"), (None, "false")]):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        tokenize([f"text {index}"], load_tokenizer(str(character_folder)), tmp_path / "cache")
        assert os.environ["TOKENIZERS_PARALLELISM"] == after


def test_the_text_has_a_fingerprint_of_its_own(character_folder, tmp_path):
    tokenizer = load_tokenizer(str(character_folder))
    first = text_fingerprint(tokenize(["abc", "de"], tokenizer, tmp_path / "a"))
    assert text_fingerprint(tokenize(["abc", "de"], tokenizer, tmp_path / "b", num_proc=2)) == first
    for other in (["abd", "de"], ["de", "abc"], ["abc", "de", ""]):  # an edit of the same length shows, too
        assert text_fingerprint(tokenize(other, tokenizer, tmp_path / "a")) != first
    (character_folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert text_fingerprint(tokenize(["abc", "de"], load_tokenizer(str(character_folder)), tmp_path / "a")) == first


def test_bad_records_are_counted_from_the_cache(character_folder, tmp_path):
    texts, problems = ["a", "", "b", "", ""], [None, "line 2", None, "line 4", "line 5"]
    for _ in range(2):
        tokenized = tokenize(texts, load_tokenizer(str(character_folder)), tmp_path, problems=problems)
        assert bad_records(tokenized, most=2) == (3, ["line 2", "line 4"])
    assert bad_records(tokenize(["a"], load_tokenizer(str(character_folder)), tmp_path), most=2) == (0, [])


@pytest.mark.timeout(120)
def test_ten_megabytes_without_a_space(tmp_path):
    text = "x" * 10_000_000
    tokenized = tokenize([text], load_tokenizer("debug"), tmp_path)
    assert 2 < document_lengths(tokenized)[0] <= len(text) + 2


def test_batches_are_by_the_size_of_documents():
    sizes = [
        tokenized._batch_size(datasets.Dataset.from_dict({"text": ["x" * length] * count}))
        for length, count in ((10, 100), (100_000, 10), (20_000_000, 1))
    ]
    assert sizes == [1000, 79, 1]  # 8 MB, each text with the four or so bytes of its offset
