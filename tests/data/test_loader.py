import pickle
from itertools import islice

import numpy as np
import pytest
import torch
from toy_data import EOS, write_jsonl

from torchtitan_lite.config.schema import MixtureSource
from torchtitan_lite.data.collator import Batch
from torchtitan_lite.data.loader import RankSampler, RowLoader, build_loader
from torchtitan_lite.data.packing.row_order import RowOrder
from torchtitan_lite.data.prepared import prepare_sources
from torchtitan_lite.data.resume import ResumeError
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.tokenizer import load_tokenizer

TEXTS = [chr(ord("a") + i % 26) * (1 + i * 7 % 11) for i in range(13)]


@pytest.fixture
def loader_of(tmp_path, make_config, character_folder):
    """Loader over documents of 3 to 13 tokens in rows of 8, or over other texts and settings."""

    def make(texts=TEXTS, *, dp_rank=0, dp_degree=1, **settings):
        path = tmp_path / "documents.jsonl"
        if not path.exists():
            write_jsonl(path, texts)
        tokenizer = load_tokenizer(str(character_folder))
        config = make_config(path, **settings)
        return build_loader(config, tokenizer, dp_rank=dp_rank, dp_degree=dp_degree, device_type="cpu")

    return make


def take(loader, batches):
    return list(islice(iter(loader), batches))


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, sum(left, ()), sum(right, ())))


def rows(batches):
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


def test_an_epoch_holds_each_document_once(loader_of):
    loader = loader_of()
    batches = take(loader, loader.rows_per_epoch)
    read = sorted(token for batch in batches for token in batch.tokens[batch.document_ids >= 0].tolist())
    tokenizer_ids = [loader.sources[0].documents[i]["tokens"] for i in range(len(TEXTS))]
    assert read == sorted(token for ids in tokenizer_ids for token in ids)
    assert read.count(EOS) == len(TEXTS)
    whole = [batch.document_ids.max().item() + 1 for batch in batches]
    (report,) = loader.reports()
    assert sum(whole) == report.segments and report.documents == len(TEXTS)
    padding = sum((batch.document_ids < 0).sum().item() for batch in batches)
    assert report.padding_fraction == pytest.approx(padding / (8 * loader.rows_per_epoch))


def test_every_document_ends_in_its_own_terminator(loader_of):
    (batch,) = take(loader_of(["a", "bb", "c<eos>"], seq_len=32), 1)
    tokens, ids = batch.tokens[0], batch.document_ids[0]
    last_of_document = (ids >= 0) & (ids != ids.roll(-1))
    assert last_of_document.sum() == 3
    assert torch.equal((tokens == EOS) & (ids >= 0), last_of_document)


def test_epochs_differ_and_are_a_function_of_the_seed(loader_of):
    loader = loader_of()
    size = loader.rows_per_epoch
    first, second = (rows(take(loader, 2 * size))[part] for part in (slice(size), slice(size, None)))
    assert sorted(first) == sorted(second) and first != second
    assert rows(take(loader_of(), 2 * size)) == first + second
    assert rows(take(loader_of(seed=43), size)) != first


@pytest.mark.parametrize("packing", ["best_fit", "greedy", "split", "none"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_is_exact_at_every_step_twice(loader_of, num_workers, packing):
    steps, accumulation = 15, 4

    def new(num_workers=num_workers):
        return loader_of(
            local_batch_size=1,
            global_batch_size=accumulation,
            num_workers=num_workers,
            packing=packing,
            oversize="drop",
        )

    straight = take(new(num_workers=0), steps * accumulation)
    assert 2 * new().rows_per_epoch < steps * accumulation and new().rows_per_epoch % accumulation
    for step in range(1, steps) if num_workers == 0 else (1, 8, 14):
        batches, loader = [], new()
        for until in (step, (step + steps) // 2, steps):  # one run and two resumes
            reader = iter(loader)
            while loader.rows_trained < until * accumulation:
                batches += [next(reader) for _ in range(accumulation)]
                loader.mark_trained(accumulation)
            next(reader)  # read ahead, never trained on
            assert loader.state_dict()["rows_trained"] == until * accumulation
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            loader = new()
            loader.load_state_dict(state)
        assert equal(batches, straight), step


def test_ranks_share_out_the_same_global_batches(loader_of):
    steps, size = 6, 4
    expected = rows(take(loader_of(local_batch_size=1, global_batch_size=size), steps * size))
    for degree, local in [(1, 4), (1, 2), (2, 2), (2, 1), (4, 1)]:
        microbatches = size // (degree * local)
        ranks = [
            rows(
                take(
                    loader_of(dp_rank=rank, dp_degree=degree, local_batch_size=local, global_batch_size=size),
                    steps * microbatches,
                )
            )
            for rank in range(degree)
        ]
        together = []
        for micro in range(steps * microbatches):
            for rank in ranks:
                together += rank[micro * local : (micro + 1) * local]
        assert together == expected, (degree, local)


@pytest.mark.parametrize(("before", "after"), [((4, 0), (2, 2)), ((1, 2), (4, 0)), ((2, 0), (1, 0))])
def test_resume_with_other_ranks_and_workers(loader_of, before, after):
    size, steps = 4, 5

    def loaders(degree, num_workers):
        return [
            loader_of(dp_rank=rank, dp_degree=degree, global_batch_size=size, num_workers=num_workers)
            for rank in range(degree)
        ]

    def one_step(readers):
        return [row for _ in range(size // len(readers)) for reader in readers for row in rows([next(reader)])]

    expected = rows(take(loader_of(global_batch_size=size), 2 * steps * size))
    got = []
    state = None
    for degree, num_workers in (before, after):
        group = loaders(degree, num_workers)
        for loader in group if state else []:
            loader.load_state_dict(state)
        readers = [iter(loader) for loader in group]
        for _ in range(steps):
            got += one_step(readers)
            for loader in group:
                loader.mark_trained(size)
        states = [loader.state_dict() for loader in group]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert got == expected
    assert state["rows_trained"] == 2 * steps * size
    assert state["epoch"] == {"documents": 2 * steps * size // loader_of().rows_per_epoch}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len": 16}, "seq_len was 8, is now 16"),
        ({"seed": 1}, "seed was 42, is now 1"),
        ({"max_documents_per_row": 2}, "max_documents_per_row was 8, is now 2"),
        ({"packing": "greedy"}, "packing was best_fit, is now greedy"),
        ({"oversize": "truncate"}, "oversize was split, is now truncate"),
        ({"packing_window": 3}, "packing_window was 100000, is now 3"),
        ({"global_batch_size": 2}, r"global_batch_size was 1, is now 2 \(set training.global_batch_size=1\)"),
    ],
)
def test_resume_refuses_another_run_and_names_the_change(loader_of, changed, message):
    state = loader_of().state_dict()
    loader = loader_of(**changed)
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(state)
    assert loader.rows_trained == 0


def test_resume_refuses_other_documents_or_tokenizer(loader_of, tmp_path, character_folder):
    state = loader_of().state_dict()
    write_jsonl(tmp_path / "documents.jsonl", [*TEXTS, "one more"])
    with pytest.raises(ResumeError, match="text was"):
        loader_of().load_state_dict(state)
    write_jsonl(tmp_path / "documents.jsonl", [*TEXTS[:-1], TEXTS[-1].upper()])  # of the same length
    with pytest.raises(ResumeError, match="text was"):
        loader_of().load_state_dict(state)
    write_jsonl(tmp_path / "documents.jsonl", TEXTS)
    loader_of().load_state_dict(state)
    (character_folder / "tokenizer_config.json").write_text('{"bos_token": "<eos>", "eos_token": "<bos>"}')
    with pytest.raises(ResumeError, match="tokenizer was") as error:
        loader_of().load_state_dict(state)
    assert "text was" not in str(error.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_runs_rng_alone(loader_of, num_workers):
    loader = loader_of(num_workers=num_workers)
    before = torch.get_rng_state()
    take(loader, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("texts", [[""], ["", "  ", "\n\t"]])
def test_documents_without_text_end_at_once(loader_of, texts):
    with pytest.raises(SourceError, match=f"no samples, all of its {len(texts)} documents are empty"):
        loader_of(texts)


@pytest.mark.timeout(60)
def test_fewer_rows_than_ranks(loader_of):
    ranks = [loader_of(["abc"], dp_rank=rank, dp_degree=4) for rank in range(4)]
    assert [loader.rows_per_epoch for loader in ranks] == [1] * 4
    first = rows(take(ranks[0], 3))
    assert len(set(first)) == 1 and all(rows(take(loader, 3)) == first for loader in ranks)


def test_oversize_document_is_split_into_documents_of_their_own(loader_of):
    loader = loader_of(["x" * 19], seq_len=8)  # 21 tokens with BOS and EOS: 8 + 8 + 5
    batches = take(loader, 3)
    assert sorted((batch.document_ids >= 0).sum().item() for batch in batches) == [5, 8, 8]
    for batch in batches:
        used = int((batch.document_ids >= 0).sum())
        assert batch.positions[0, :used].tolist() == list(range(used))
        assert batch.labels[0, used - 1 :].tolist() == [-100] * (9 - used)
    assert loader.reports()[0].split_documents == 1


def test_rows_pickle_without_their_tokens_and_cannot_be_written(loader_of):
    dataset = loader_of(["abcdef" * 2000] * 30, seq_len=64).dataset
    data = pickle.dumps(dataset)
    assert len(data) < dataset.sources[0].documents.data.nbytes / 2
    row = pickle.loads(data)[0, 3]
    assert all(np.array_equal(a, b) for a, b in zip(row, dataset[0, 3], strict=True))
    assert not row[0].flags.writeable


def test_sampler_by_hand():
    # 4 rows an epoch, 2 ranks with 2 rows each: the second rank has positions 2, 3 of each run of 4.
    order = RowOrder([np.full(4, 8)], [1], [0], 7)
    ranks = [
        list(islice(RankSampler(order, start=4, local_batch_size=2, dp_rank=rank, dp_degree=2), 2)) for rank in (0, 1)
    ]
    for step in (0, 1):
        assert sorted(ranks[0][step] + ranks[1][step]) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_misuse(loader_of):
    loader = loader_of(global_batch_size=4)
    with pytest.raises(ValueError, match="3 rows are not a whole number of global batches of 4"):
        loader.mark_trained(3)
    with pytest.raises(ValueError, match="must be a multiple of local_batch_size x data-parallel degree = 3 x 1 = 3"):
        loader_of(global_batch_size=4, local_batch_size=3)


@pytest.fixture
def mixture_of(tmp_path, make_config, character_folder):
    """Loader over three sources whose documents are of one letter each, of which the last one ends after two epochs."""
    counts = {"a": (12, 5), "b": (7, 12), "c": (8, 3)}
    for letter, (count, length) in counts.items():
        write_jsonl(tmp_path / f"{letter}.jsonl", [letter * (length + i % 3) for i in range(count)])

    prepared = {}

    def make(*, dp_rank=0, dp_degree=1, weights=(1, 2, 1), **settings):
        key = (weights, *settings.items())
        config = make_config("unused", steps=settings.pop("steps", 30), **settings)
        config.training.dataset_path = None
        config.data.mix = [
            MixtureSource(dataset_path=str(tmp_path / f"{letter}.jsonl"), weight=weight, epochs=2 * (letter == "c"))
            for letter, weight in zip(counts, weights, strict=True)
        ]
        tokenizer = load_tokenizer(str(character_folder))
        if key not in prepared:
            prepared[key] = prepare_sources(config, tokenizer)
        return RowLoader(
            prepared[key], tokenizer, config=config, dp_rank=dp_rank, dp_degree=dp_degree, pin_memory=False
        )

    return make


def letters(batches, tokenizer_folder):
    """Tokens of each source in the batches, BOS and EOS of its documents included; checks that no row mixes them."""
    tokenizer = load_tokenizer(str(tokenizer_folder))
    counts = dict.fromkeys("abc", 0)
    for batch in batches:
        for tokens, ids in zip(batch.tokens, batch.document_ids, strict=True):
            (letter,) = set(tokenizer.decode(tokens[ids >= 0].tolist()).replace("<bos>", "").replace("<eos>", ""))
            counts[letter] += int((ids >= 0).sum())
    return counts


@pytest.mark.parametrize("packing", ["best_fit", "greedy", "split", "none"])
def test_shares_of_a_mixture_are_true_in_tokens(mixture_of, character_folder, packing):
    loader = mixture_of(seq_len=16, packing=packing, global_batch_size=1000, local_batch_size=10, weights=(1, 2, 1e-9))
    counts = letters(take(loader, 100), character_folder)
    total = sum(counts.values())
    assert counts["a"] / total == pytest.approx(1 / 3, abs=0.01) and counts["b"] / total == pytest.approx(
        2 / 3, abs=0.01
    )
    loader.mark_trained(1000)
    assert loader.shares() == pytest.approx({name: count / total for name, count in counts.items()})


def test_a_mixture_resumes_exactly_on_other_ranks_twice(mixture_of):
    size, steps = 4, 24
    expected = rows(take(mixture_of(global_batch_size=size), steps * size))
    for first in range(1, steps):
        got, state, done = [], None, 0
        for degree, until in ((1, first), (4, (first + steps) // 2), (2, steps)):
            ranks = [mixture_of(dp_rank=rank, dp_degree=degree, global_batch_size=size) for rank in range(degree)]
            for loader in ranks if state else []:
                loader.load_state_dict(state)
            readers = [iter(loader) for loader in ranks]
            while done < until:
                for _ in range(size // degree):
                    got += [row for reader in readers for row in rows([next(reader)])]
                for loader in ranks:
                    loader.mark_trained(size)
                done += 1
            state = ranks[-1].state_dict()
        assert got == expected, first
    assert state["epoch"]["c"] == 2 and min(state["epoch"].values()) >= 1


def test_a_changed_mixture_is_refused(mixture_of):
    state = mixture_of().state_dict()
    with pytest.raises(ResumeError, match=r"weight of source 2 was 2(\.0)?, is now 3"):
        mixture_of(weights=(1, 3, 1)).load_state_dict(state)


def test_sources_that_all_end_too_early_are_refused_ahead(tmp_path, make_config, character_folder):
    config = make_config(write_jsonl(tmp_path / "a.jsonl", ["abcd"] * 5), steps=4, global_batch_size=3)
    config.data.mix = [MixtureSource(dataset_path=config.training.dataset_path, epochs=2)]
    config.training.dataset_path = None
    tokenizer = load_tokenizer(str(character_folder))
    with pytest.raises(
        SourceError, match=r"steps=4 of 3 rows need 12 rows, .* after 10 rows in all: train for 3 steps"
    ):
        build_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    config.training.steps = 3
    loader = build_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")
    assert len(rows(islice(iter(loader), 9))) == 9


def test_the_position_of_a_stream_is_refused(loader_of):
    state = {**loader_of().state_dict(), "lanes": 1}
    with pytest.raises(ResumeError, match=r"data\.streaming=true continues it"):
        loader_of().load_state_dict(state)
