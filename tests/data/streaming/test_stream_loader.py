import json
import logging
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from toy_data import BOS, EOS, write_jsonl
from toy_stream import ToyShards, numbered

from torchtitan_lite.config.schema import Config, MixtureSource
from torchtitan_lite.data.chat.encoding import TextEncoder
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.resume import ResumeError
from torchtitan_lite.data.sources.document import Source, SourceError
from torchtitan_lite.data.streaming import stream_loader
from torchtitan_lite.data.streaming.stream_loader import StreamLoader, build_stream_loader
from torchtitan_lite.data.streaming.stream_packing import StreamCounts
from torchtitan_lite.data.tokenizer import load_tokenizer

STRATEGIES = ["best_fit", "greedy", "split", "none"]


ends = pytest.mark.timeout(30)
"""For tests of what might spin for ever."""


@pytest.fixture
def loader_of(character_folder):
    """Loader over documents in memory, one source for each ``shards``."""
    tokenizer = load_tokenizer(str(character_folder))

    def make(*shards, weights=None, epochs=0, dp_rank=0, dp_degree=1, training=None, **data):
        config = Config()
        config.training.seq_len, config.training.local_batch_size = 12, 1
        config.data.streaming_buffer = 6
        for section, settings in ((config.training, training or {}), (config.data, data)):
            for name, value in settings.items():
                assert hasattr(section, name)
                setattr(section, name, value)
        weights = weights or [1.0] * len(shards)
        sources = [
            Source(name=f"toy{number}", dataset="toy", weight=weight, epochs=epochs)
            for number, weight in enumerate(weights)
        ]
        return StreamLoader(
            list(shards),
            sources,
            tokenizer,
            [TextEncoder(tokenizer)] * len(sources),
            config=config,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
            pad_id=EOS,
            pin_memory=False,
        )

    return make


def words(*counts, salt=0):
    """Shards of documents of 3 to 15 tokens; no two alike."""
    rng = np.random.default_rng(salt)
    return ToyShards(
        [
            ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(1, 14))) for _ in range(count)]
            for count in counts
        ],
        identity=f"words{counts}{salt}",
    )


def contents(batch):
    return [field.tolist() for field in batch]


def documents(batch):
    """The documents of a batch of unsplit ones, as texts of a tokenizer that has a token for each letter."""
    texts = []
    for tokens, ids in zip(batch.tokens.tolist(), batch.document_ids.tolist(), strict=True):
        for document in range(max(ids) + 1):
            own = [token for token, i in zip(tokens, ids, strict=True) if i == document]
            assert own[0] == BOS and own[-1] == EOS
            texts.append(tuple(own[1:-1]))
    return texts


def steps(loader, count, accumulation=1):
    """Trains ``count`` steps; the batches of each."""
    reader = iter(loader)
    done = []
    for _ in range(count):
        done.append([contents(next(reader)) for _ in range(accumulation)])
        loader.mark_trained(loader.global_batch_size)
    return done


def passed_on(loader, new):
    """A new loader at the position of another, by way of what a checkpoint holds."""
    shared, own = json.loads(json.dumps(loader.state_dict())), bytes(loader.rank_state())
    loader = new()
    loader.load_state_dict(shared)
    loader.load_rank_state(own)
    return loader


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("packing", STRATEGIES)
def test_resume_is_exact_at_every_step_twice(loader_of, packing, sources):
    total, accumulation = 14, 2
    shards = [words(9, 4, salt=1), words(30, 2, 1, salt=2)][:sources]

    def new():
        return loader_of(
            *shards,
            weights=[3.0, 1.0][:sources],
            packing=packing,
            dp_rank=1,
            dp_degree=2,
            training={"local_batch_size": 2, "global_batch_size": 8},
        )

    loader = new()
    straight = steps(loader, total, accumulation)
    assert min(position.epoch for position in loader._streams[0].positions) >= 2  # so epochs end on the way
    assert straight[0] != straight[1]
    for step in range(1, total):
        loader = new()
        batches = steps(loader, step, accumulation)
        for until in ((step + total) // 2, total):
            loader = passed_on(loader, new)
            batches += steps(loader, until - len(batches), accumulation)
            assert loader.rows_trained == until * 8
        assert batches == straight, step


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_come_and_go(loader_of):
    """Four lanes from the start; resumed with other numbers of processes, twice with none and with too many."""

    def new(workers):
        shards = [words(*[20] * 7, salt=1), words(90, salt=2), words(*[1] * 12, salt=3)]
        return loader_of(*shards, weights=[5.0, 2.0, 1.0], num_workers=workers, training={"seq_len": 40})

    straight = new(4)
    expected = steps(straight, 60)
    assert [max(position.epoch for position in stream.positions) for stream in straight._streams] >= [1, 0, 2]
    loader = new(4)
    assert loader.lanes == 4
    batches = steps(loader, 7)
    for workers, count in [(0, 9), (2, 11), (8, 10), (1, 6), (3, 8), (0, 9)]:
        loader = passed_on(loader, lambda workers=workers: new(workers))
        batches += steps(loader, count)
        assert loader.lanes == 4
    assert batches == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_processes_are_a_divisor_of_the_lanes(loader_of, caplog):
    """Else some would be asked more often than their chunks are taken."""
    loader = loader_of(numbered(900), num_workers=4)
    steps(loader, 1)
    caplog.set_level(logging.INFO)
    for num_workers, used in ((3, 2), (8, 4)):
        loader = passed_on(loader, lambda num_workers=num_workers: loader_of(numbered(900), num_workers=num_workers))
        iter(loader)
        assert f"Streaming in {used} of {num_workers} loader processes: the run was started with 4" in caplog.text


def test_a_run_without_workers_has_one_lane_for_ever(loader_of):
    expected = steps(loader_of(words(50, 50)), 20)
    loader = loader_of(words(50, 50))
    batches = steps(loader, 5)
    loader = passed_on(loader, lambda: loader_of(words(50, 50), num_workers=2))
    assert batches + steps(loader, 15) == expected


def test_resume_keeps_counts_and_shares(loader_of):
    def new():
        return loader_of(words(20, salt=1), words(20, salt=2), weights=[1.0, 2.0], oversize="truncate")

    straight, loader = new(), new()
    steps(straight, 40)
    steps(loader, 17)
    loader = passed_on(loader, new)
    steps(loader, 23)
    assert loader.counts == straight.counts and loader.counts.truncated > 0
    assert loader.shares() == straight.shares()


# -- who reads what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[40], [3] * 14, [30, 1, 20], [10] * 4])
@pytest.mark.parametrize(("dp_degree", "num_workers"), [(1, 0), (1, 2), (2, 2), (3, 0)])
@ends
def test_ranks_and_workers_share_out_an_epoch(loader_of, sizes, dp_degree, num_workers):
    shards = numbered(*sizes)
    read = Counter()
    for rank in range(dp_degree):
        loader = loader_of(shards, epochs=1, dp_rank=rank, dp_degree=dp_degree, num_workers=num_workers)
        with pytest.raises(SourceError, match="The data ended after"):
            for batch in loader:
                read.update(documents(batch))
    tokenizer = loader._tokenizer
    assert read == Counter(tuple(tokenizer.encode(f"{i:04d}")[1:-1]) for i in range(sum(sizes)))


def test_ranks_draw_different_lots(loader_of):
    """Both read the same documents in the same order."""
    shards = ToyShards([["a" * n for n in (3, 5, 6, 9)]] * 2)
    ranks = [loader_of(shards, dp_rank=rank, dp_degree=2) for rank in range(2)]
    assert steps(ranks[0], 20) != steps(ranks[1], 20)


def test_sources_draw_different_lots_and_orders(loader_of):
    one_shard, many = ToyShards([["a" * n for n in (3, 5, 6, 9)]]), numbered(*[1] * 8)
    for shards, packing in ((one_shard, "best_fit"), (many, "none")):
        loader = loader_of(shards, shards, packing=packing)
        rows = [[], []]
        reader = iter(loader)
        for _ in range(40):
            before = [stream.packer.rows for stream in loader._streams]
            batch = next(reader)
            for number, stream in enumerate(loader._streams):
                if stream.packer.rows > before[number]:
                    rows[number].append(contents(batch))
        least = min(map(len, rows))
        assert least > 10 and rows[0][:least] != rows[1][:least]


def test_packing_is_never_ahead_of_training(loader_of):
    loader = loader_of(numbered(1000), packing="none", training={"local_batch_size": 2, "global_batch_size": 4})
    reader = iter(loader)
    assert loader.counts.documents == 0
    for step in range(1, 40):
        for micro in range(2):
            next(reader)
            rows = (step - 1) * 4 + micro * 2 + 2
            assert loader._streams[0].packer.rows == rows
            assert loader.counts.documents <= rows + 64  # no further than the end of a chunk
        loader.mark_trained(4)


def test_batches_are_pinned_for_a_gpu(loader_of, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor + 0)
    loader = loader_of(numbered(50))
    loader._pin_memory = True
    batch = next(iter(loader))
    assert len(pinned) == 4 and all(torch.equal(a, b) and a is not b for a, b in zip(batch, pinned, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_runs_rng_alone(loader_of, num_workers):
    before = torch.get_rng_state()
    next(iter(loader_of(words(50), num_workers=num_workers)))
    assert torch.equal(torch.get_rng_state(), before)


# -- mixtures ----------------------------------------------------------------------------------------------------------


def test_shares_are_of_tokens(loader_of):
    """1,000 rows of very long and very short documents, weighted 1 : 2 : 5."""
    rng = np.random.default_rng(0)
    sources = [
        ToyShards([["x" * int(length) for length in rng.integers(low, high, 300)]], identity=str(low))
        for low, high in [(200, 900), (1, 6), (20, 60)]
    ]
    for packing in ("best_fit", "none"):
        loader = loader_of(*sources, weights=[0.5, 1.0, 2.5], packing=packing, training={"seq_len": 128})
        counted = Counter()
        tokens = 0
        for batch in islice(iter(loader), 1000):
            used = int((batch.document_ids >= 0).sum())
            # Rows do not mix sources, and these can be told by the lengths of their documents.
            first = int((batch.document_ids == 0).sum())
            counted[first] += used
            tokens += used
        shares = loader.shares()
        assert list(shares) == ["toy0", "toy1", "toy2"] and sum(shares.values()) == pytest.approx(1)
        for share, expected in zip(shares.values(), (0.125, 0.25, 0.625), strict=True):
            assert share == pytest.approx(expected, abs=0.01)
        short = sum(count for length, count in counted.items() if length <= 7)
        assert short / tokens == pytest.approx(0.25, abs=0.01)


def test_rows_follow_the_rule_of_fewest_tokens(loader_of):
    sources = [words(40, salt=salt) for salt in (1, 2, 3)]
    loader = loader_of(*sources, weights=[1.0, 3.0, 2.0])
    given, tokens = [], [0, 0, 0]
    reader = iter(loader)
    for _ in range(60):
        due = min(range(3), key=lambda i: tokens[i] / [1.0, 3.0, 2.0][i])
        batch = next(reader)
        before = list(tokens)
        tokens = [stream.tokens for stream in loader._streams]
        given.append([now - then for now, then in zip(tokens, before, strict=True)])
        assert given[-1][due] == int((batch.document_ids >= 0).sum())
        assert sum(given[-1]) == given[-1][due]


@ends
def test_a_finite_source_drops_out(loader_of):
    sources = [numbered(10), ToyShards([["abc", "de"]])]
    loader = loader_of(*sources, weights=[1.0, 1.0], packing="none")
    object.__setattr__(loader._sources[0], "epochs", 2)
    read = Counter(text for batch in islice(iter(loader), 200) for text in documents(batch))
    tokenizer = loader._tokenizer
    assert all(read[tuple(tokenizer.encode(f"{i:04d}")[1:-1])] == 2 for i in range(10))
    assert sum(read.values()) == 200


@pytest.mark.parametrize("num_workers", [0, 2])
@ends
def test_the_end_of_all_data(loader_of, num_workers):
    training = {"local_batch_size": 2}
    loader = loader_of(numbered(7), numbered(4), epochs=3, packing="none", num_workers=num_workers, training=training)
    reader = iter(loader)
    for _ in range(16):
        next(reader)
        loader.mark_trained(2)
    with pytest.raises(SourceError, match=r"after 33 rows of rank 0: .*Fewer training.steps, more epochs, or a source"):
        next(reader)
    with pytest.raises(RuntimeError, match="2 rows were handed out"):  # the last row is of no step
        loader.state_dict()


# -- records that are no documents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("shards", "settings", "message"),
    [
        (ToyShards([["", " \n"], ["\t"]]), {}, r"toy0: no samples for rank 0 of 1: of the 3 records .* 3 empty\.$"),
        (ToyShards([[None] * 3]), {}, r"of the 3 records that it has read 3 bad and left out\.$"),
        (
            ToyShards([["x" * 100, ""]]),
            {"oversize": "drop"},
            r"of the 2 records that it has read 1 empty, 1 longer than",
        ),
        (ToyShards([[], []]), {}, r"too few records for 1 ranks to share them out\. Fewer ranks"),
        (ToyShards([]), {}, r"toy0: no samples, it has no shards"),
    ],
)
@ends
def test_a_source_without_documents_ends_at_once(loader_of, shards, settings, message, num_workers):
    with pytest.raises(SourceError, match=message):
        next(iter(loader_of(shards, num_workers=num_workers, **settings)))


@ends
def test_fewer_records_than_ranks(loader_of):
    ranks = [loader_of(numbered(3), dp_rank=rank, dp_degree=8) for rank in range(8)]
    failed = []
    for rank, loader in enumerate(ranks):
        try:
            next(iter(loader))
        except SourceError as error:
            assert f"rank {rank} of 8: the source has too few records for 8 ranks" in str(error)
            failed.append(rank)
    assert len(failed) == 5


@ends
def test_a_rank_outlives_an_epoch_without_documents(loader_of):
    """Of two shards one is empty; dealt out anew each epoch, a rank has now this one, now that."""
    shards = ToyShards([["a", "b"], ["", ""]])
    alive = 0
    for rank in range(2):
        loader = loader_of(shards, dp_rank=rank, dp_degree=2)
        try:
            steps(loader, 50)
            alive += 1
        except SourceError as error:  # the one that has had none so far
            assert "2 records that it has read 2 empty" in str(error)
    assert alive == 1


@ends
def test_a_source_that_dries_up_is_noticed(loader_of):
    texts = [["abc", "def"]]
    loader = loader_of(ToyShards(texts), packing="none")
    reader = iter(loader)
    next(reader)
    texts[0][:] = ["", ""]
    with pytest.raises(SourceError, match=r"2 records that .* but none any more|no samples"):
        for _ in range(1000):
            next(reader)


def test_bad_records_are_logged_and_counted(loader_of, caplog):
    texts = ["abc", None, None] * 10 + [""]
    with caplog.at_level(logging.WARNING):
        loader = loader_of(ToyShards([texts]), epochs=1, packing="none", oversize="truncate")
        with pytest.raises(SourceError):
            list(loader)
    told = [record.getMessage() for record in caplog.records if "bad record" in record.getMessage()]
    assert told == [
        *(f"toy0: bad record left out: shard 0, record {number} is bad" for number in (1, 2, 4)),
        "toy0: 10 bad records left out so far",
    ]
    assert loader.counts == StreamCounts(documents=10, empty=1, skipped=20)
    assert loader.counters()["packing/skipped"] == 20


def test_a_document_too_long_is_named(loader_of):
    texts = ["abc"] * 70 + ["x" * 11]
    loader = loader_of(ToyShards([["y"], texts]), oversize="error", packing="none")
    with pytest.raises(
        PackingError, match=r"^toy0, record 70 of shard 1: a document of 13 tokens is longer than .*=12"
    ):
        list(islice(iter(loader), 200))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"training": {"seq_len": 16}}, "seq_len was 12, is now 16"),
        ({"training": {"seed": 1}}, "seed was 42, is now 1"),
        ({"packing": "greedy"}, "packing was best_fit, is now greedy"),
        ({"oversize": "drop"}, "oversize was split, is now drop"),
        ({"streaming_buffer": 7}, "streaming_buffer was 6, is now 7"),
        ({"max_documents_per_row": 2}, "max_documents_per_row was 12, is now 2"),
        ({"weights": [1.0, 2.0]}, "weight of source 2 was 1.0, is now 2.0"),
        ({"epochs": 3}, "epochs of source 1 was 0, is now 3; epochs of source 2 was 0, is now 3"),
        ({"dp_degree": 2}, r"dp_degree was 1, is now 2 \(a streaming run keeps .*data.streaming=false"),
        (
            {"training": {"global_batch_size": 2}},
            r"global_batch_size was 1, is now 2 \(set training.global_batch_size=1\)",
        ),
    ],
)
def test_resume_refuses_another_run_and_names_the_change(loader_of, changed, message):
    sources = [words(20, salt=1), words(20, salt=2)]
    state = loader_of(*sources).state_dict()
    with pytest.raises(ResumeError, match=message):
        loader_of(*sources, **changed).load_state_dict(state)


def test_resume_refuses_other_documents_or_tokenizer_or_mode(loader_of, make_config, tmp_path, character_folder):
    path = write_jsonl(tmp_path / "documents.jsonl", ["one", "two"])
    config = make_config(path, streaming=True)

    def new():
        tokenizer = load_tokenizer(str(character_folder))
        return build_stream_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")

    state = new().state_dict()
    new().load_state_dict(state)
    write_jsonl(path, ["one", "two", "three"])
    with pytest.raises(ResumeError, match="documents was"):
        new().load_state_dict(state)
    write_jsonl(path, ["one", "two"])
    (character_folder / "tokenizer_config.json").write_text('{"bos_token": "<eos>", "eos_token": "<bos>"}')
    with pytest.raises(ResumeError, match="tokenizer was") as error:
        new().load_state_dict(state)
    assert "documents was" not in str(error.value)
    with pytest.raises(ResumeError, match=r"a run that did not stream; data\.streaming=false continues it"):
        new().load_state_dict({"rows_trained": 0, "global_batch_size": 1, "fingerprint": {}})


def test_a_position_of_another_rank_or_step_is_refused(loader_of):
    def new(rank):
        return loader_of(numbered(50, 50), dp_rank=rank, dp_degree=2)

    loader = new(0)
    steps(loader, 2)
    shared, own = loader.state_dict(), loader.rank_state()
    other = new(1)
    steps(other, 2)
    assert other.state_dict() == shared
    other.load_state_dict(shared)
    with pytest.raises(ResumeError, match="not the data position of this rank: rank was 0, is now 1"):
        other.load_rank_state(own)
    steps(loader, 1)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match="rows_trained was 4, is now 6"):
        loader.load_rank_state(own)
    another_run = loader_of(numbered(50, 50), dp_degree=2, training={"seed": 1})
    steps(another_run, 3)
    with pytest.raises(ResumeError, match="seed was 1, is now 42"):
        loader.load_rank_state(another_run.rank_state())
    for damaged in (own[:-300], b"", b"nonsense", own[:200] + bytes([own[200] ^ 1]) + own[201:]):
        with pytest.raises(ResumeError, match="is damaged"):
            loader.load_rank_state(damaged)


def test_the_position_is_told_behind_a_step_only(loader_of):
    loader = loader_of(numbered(50), training={"global_batch_size": 2})
    reader = iter(loader)
    for _ in range(2):
        next(reader)
        for ask in (loader.state_dict, loader.rank_state, lambda: iter(loader)):
            with pytest.raises(RuntimeError, match="handed out and not reported by mark_trained"):
                ask()
    loader.mark_trained(2)
    state = loader.state_dict()
    assert state["rows_trained"] == 2 and state == json.loads(json.dumps(state))
    with pytest.raises(ValueError, match="1 rows are not a whole number of global batches of 2"):
        loader.mark_trained(1)
    with pytest.raises(ValueError, match="2 rows are more than were handed out"):
        loader.mark_trained(2)
    iter(loader)
    with pytest.raises(RuntimeError, match="this iterator is one from before"):
        next(reader)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"not followed by load_rank_state"):
        iter(loader)
    with pytest.raises(ValueError, match="must be a multiple of local_batch_size"):
        loader_of(numbered(5), training={"global_batch_size": 4, "local_batch_size": 3})


# -- from a configuration ----------------------------------------------------------------------------------------------


@ends
def test_files_as_configured(make_config, tmp_path, character_folder):
    """Two sources of files, with a bad record, over two ranks: everything once."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number}")
    lines = write_jsonl(tmp_path / "lines.jsonl", [f"line {number}" for number in range(9)] + [7])
    config = make_config("unused", streaming=True, seq_len=32, on_bad_record="skip", streaming_buffer=4)
    config.training.dataset_path = None
    config.data.mix = [
        MixtureSource(dataset="text", dataset_path=str(folder), name="texts", epochs=2),
        MixtureSource(dataset="json", dataset_path=str(lines), weight=2.0, epochs=1),
    ]
    tokenizer = load_tokenizer(str(character_folder))
    read, skipped = Counter(), 0
    for rank in range(2):
        loader = build_stream_loader(config, tokenizer, dp_rank=rank, dp_degree=2, device_type="cpu")
        assert list(loader.shares()) == ["texts", "lines"] and loader.reports() == []
        with pytest.raises(SourceError, match="The data ended"):
            for batch in loader:
                read.update(tokenizer.decode(document) for document in documents(batch))
        skipped += loader.counts.skipped
    expected = Counter({f"text {number}": 2 for number in range(5)}) + Counter(f"line {number}" for number in range(9))
    assert read == expected and skipped == 1


@pytest.mark.parametrize(
    ("shards", "lanes", "readers", "warned"),
    [(8, 4, 1, False), (4, 4, 1, False), (1, 4, 4, False), (2, 8, 4, False), (10, 11, 11, True), (3, 4, 2, False)],
)
def test_who_reads_a_shard_is_said(caplog, shards, lanes, readers, warned):
    with caplog.at_level(logging.INFO):
        stream_loader._say_who_reads("web", shards, lanes)
    assert f"web: {shards} shard(s), each read by {readers} of {lanes} lanes" in caplog.text
    assert (f"read {readers} times over" in caplog.text) == warned
