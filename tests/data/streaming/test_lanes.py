import pickle
from collections import Counter
from itertools import cycle

import numpy as np
import pytest
from toy_stream import ToyShards, numbered

from torchtitan_lite.data.chat.encoding import TextEncoder
from torchtitan_lite.data.packing.plan import permutation
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.streaming.lanes import ChunkFeed, ChunkReader, Lane, Position, _Requests, largest_divisor
from torchtitan_lite.data.tokenizer import load_tokenizer


def lane_of(shards, consumer=0, consumers=1, epochs=0, position=Position(), key=(7, 2, 0)):  # noqa: B008
    return Lane(shards, position, epochs=epochs, consumer=consumer, consumers=consumers, key=key)


def epochs_of(lane, epochs):
    """Texts of a lane, a list for each of its first epochs."""
    texts = [[] for _ in range(epochs)]
    while lane.position.epoch < epochs:
        epoch = lane.position.epoch
        texts[epoch] += [placed.document.text for placed in lane.read()]
    return texts


@pytest.mark.parametrize("consumers", [1, 2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("sizes", [[200], [9, 0, 70, 3], [5] * 6, [3] * 7, [1] * 13, [100, 64, 128, 1, 2]])
def test_consumers_share_out_every_epoch_without_overlap_or_loss(sizes, consumers):
    shards = numbered(*sizes)
    lanes = [epochs_of(lane_of(shards, consumer, consumers), 3) for consumer in range(consumers)]
    for epoch in range(3):
        read = Counter(text for lane in lanes for text in lane[epoch])
        assert read == Counter(f"{number:04d}" for number in range(sum(sizes)))


@pytest.mark.parametrize(
    ("num_shards", "consumers", "shards_each", "readers_each"),
    [
        (6, 3, {2}, 1),
        (7, 3, {2, 3}, 1),
        (3, 3, {1}, 1),
        (3, 6, {1}, 2),
        (3, 8, {1, 2}, 4),
        (1, 5, {1}, 5),
        (20, 32, {1, 2}, 2),
        (5, 7, {5}, 7),
    ],
)
def test_shards_are_read_whole_or_by_few(num_shards, consumers, shards_each, readers_each):
    shards = numbered(*[consumers] * num_shards)
    readers = Counter()
    seen = set()
    for consumer in range(consumers):
        texts = epochs_of(lane_of(shards, consumer, consumers), 1)[0]
        own = {int(text) // consumers for text in texts}
        seen.add(len(own))
        readers.update(own)
    assert seen == shards_each
    assert set(readers.values()) == {readers_each}


def test_what_does_not_divide_evenly_goes_round():
    # 2 shards of 3 records for 2 groups of 2 lanes: in a group one gets 2 records, the other 1; then the reverse.
    lanes = [epochs_of(lane_of(numbered(*[3] * 2), consumer, 4), 2) for consumer in range(4)]
    assert sorted(len(lane[0]) for lane in lanes) == [1, 1, 2, 2]
    assert all(len(lane[0]) + len(lane[1]) == 3 for lane in lanes)
    # With 3 shards, one of the groups has two, and what one lane gets more of the first it gets less of the second.
    lanes = [epochs_of(lane_of(numbered(*[3] * 3), consumer, 4), 1) for consumer in range(4)]
    assert sorted(len(lane[0]) for lane in lanes) == [1, 2, 3, 3]


def test_order_by_hand():
    shards, key = numbered(2, 1, 3), (5, 2, 1)
    first, second = epochs_of(lane_of(shards, key=key), 2)
    for epoch, texts in enumerate((first, second)):
        order = permutation(3, *key, epoch)
        assert texts == [text for shard in order for text in shards.shards[shard]]
    # Two consumers of three shards: one takes the first and the third of the epoch's order.
    texts = epochs_of(lane_of(shards, 0, 2, key=key), 1)[0]
    assert texts == [text for shard in permutation(3, *key, 0)[[0, 2]] for text in shards.shards[shard]]
    orders = {str(epochs_of(lane_of(numbered(*[1] * 9), key=(seed,)), 1)) for seed in range(5)}
    assert len(orders) == 5
    orders = {str(texts) for texts in epochs_of(lane_of(numbered(*[1] * 9)), 5)}
    assert len(orders) == 5


@pytest.mark.parametrize(("sizes", "consumers"), [([150, 0, 3, 70], 1), ([150, 3, 80], 2), ([400], 3)])
def test_a_lane_goes_on_from_any_position(sizes, consumers):
    shards = numbered(*sizes)

    def chunks(position, count):
        lane = lane_of(shards, consumers - 1, consumers, position=position)
        return [([placed.document.text for placed in lane.read()], lane.position) for _ in range(count)]

    straight = chunks(Position(), 14)
    assert straight[-1][1].epoch >= 2
    for done, (_, position) in enumerate(straight, 1):
        assert chunks(position, 14 - done) == straight[done:]


def test_chunks_are_bounded():
    lane = lane_of(ToyShards([["x"] * 130]))
    assert [len(lane.read()) for _ in range(4)] == [64, 64, 2, 64]  # an epoch ends its chunk
    assert lane.position == Position(1, 0, 64)
    lane = lane_of(ToyShards([["x" * 400_000] * 7]))
    assert [len(lane.read()) for _ in range(3)] == [3, 3, 1]
    lane = lane_of(ToyShards([[None] * 100]))
    assert [len(lane.read()) for _ in range(2)] == [64, 36]  # bad records count


def test_epochs_end_a_lane():
    lane = lane_of(numbered(3), epochs=2)
    assert [len(lane.read()), lane.ended, len(lane.read()), lane.ended] == [3, False, 3, True]


def test_an_empty_epoch_returns():
    lane = lane_of(ToyShards([[], []]))
    assert lane.read() == [] and lane.position == Position(1)


# -- chunks and who reads them -----------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(character_folder):
    return load_tokenizer(str(character_folder))


@pytest.fixture
def feed_of(tokenizer):
    def make(sources, *, lanes, workers, epochs=0, positions=None, turns=None, prefetch_factor=2):
        reader = ChunkReader(
            [
                [
                    lane_of(
                        shards, lane, lanes, epochs, positions[number][lane] if positions else Position(), key=(number,)
                    )
                    for lane in range(lanes)
                ]
                for number, shards in enumerate(sources)
            ],
            turns or [0] * len(sources),
            [TextEncoder(tokenizer)] * len(sources),
        )
        assert pickle.loads(pickle.dumps(reader))  # as a worker gets it where processes are not forked
        return ChunkFeed(reader, sources=len(sources), lanes=lanes, workers=workers, prefetch_factor=prefetch_factor)

    return make


def plain(chunk):
    return (chunk.lane, chunk.position, chunk.tokens.tolist(), chunk.lengths.tolist(), chunk.places, chunk.problems)


def test_a_chunk_by_hand(feed_of, tokenizer):
    chunk = feed_of([ToyShards([["ab", None, " \n\t", "", "é"], []])], lanes=1, workers=0).take(0, 0)
    assert chunk.lengths.tolist() == [4, 0, 0, 4] and chunk.lengths.dtype == np.int64  # é is two bytes
    assert chunk.tokens.tolist() == [*tokenizer.encode("ab"), *tokenizer.encode("é")]
    assert chunk.tokens.dtype == np.int32
    assert chunk.places == [(0, 0), (0, 2), (0, 3), (0, 4)]
    assert chunk.problems == ["shard 0, record 1 is bad"]
    assert (chunk.lane, chunk.position, chunk.error) == (0, Position(1), None)


def test_a_reader_takes_its_lanes_in_turn_until_they_end(tokenizer):
    # Of 3 lanes, lane 0 has ended already; lane 1 has one more epoch of 64 + 6 records, lane 2 has 10 and two epochs.
    lanes = [
        lane_of(numbered(5), epochs=2, position=Position(2)),
        lane_of(numbered(70), epochs=2, position=Position(1)),
        lane_of(numbered(10), epochs=2),
    ]
    reader = ChunkReader([lanes, [lane_of(numbered(1), epochs=1)]], [2, 0], [TextEncoder(tokenizer)] * 2)
    chunks = [reader[0] for _ in range(4)]
    assert [(chunk.lane, len(chunk.lengths)) for chunk in chunks] == [(2, 10), (1, 64), (2, 10), (1, 6)]
    assert reader[0] is None and reader[0] is None
    assert len(reader[1].lengths) == 1 and reader[1] is None


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_workers_gives_the_same_chunks(feed_of):
    sources = [numbered(*[40] * 9), numbered(700), numbered(*[1] * 5)]
    # A demand in no order at all between sources; within each, the lanes in turn.
    draws = np.random.default_rng(0).choice(3, 100, p=[0.7, 0.25, 0.05])
    turns = [cycle(range(4)) for _ in sources]
    demand = [(source, next(turns[source])) for source in draws]
    expected = None
    for workers in (0, 1, 2, 4):
        feed = feed_of(sources, lanes=4, workers=workers)
        got = [plain(feed.take(source, lane)) for source, lane in demand]
        expected = expected or got
        assert got == expected, workers
    # Going on from the middle, with the turns where they are.
    for cut, workers in ((51, 2), (52, 0)):
        positions = [[Position()] * 4 for _ in sources]
        turns = [0] * 3
        for (source, lane), chunk in zip(demand[:cut], expected, strict=False):
            positions[source][lane] = chunk[1]
            turns[source] = (lane + 1) % 4
        feed = feed_of(sources, lanes=4, workers=workers, positions=positions, turns=turns)
        assert [plain(feed.take(source, lane)) for source, lane in demand[cut:]] == expected[cut:]


@pytest.mark.parametrize("workers", [0, 2])
def test_lanes_that_end_are_asked_no_more(feed_of, workers):
    feed = feed_of([numbered(10, 200, 3, 5), numbered(5, 6, 7, 8)], lanes=4, workers=workers, epochs=2)
    lengths = [[0] * 4, [0] * 4]
    for source in (0, 1):
        live = set(range(4))
        while live:
            for lane in sorted(live):
                chunk = feed.take(source, lane)
                lengths[source][lane] += len(chunk.lengths)
                if chunk.position.epoch == 2:
                    live.remove(lane)
    assert sum(lengths[0]) == 2 * 218 and sum(lengths[1]) == 2 * 26


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_is_told_in_its_place(feed_of, workers):
    texts = [*["a"] * 64, *["b"] * 10, SourceError("file x, line 7: broken")]
    feed = feed_of([ToyShards([texts])], lanes=1, workers=workers)
    assert len(feed.take(0, 0).lengths) == 64
    with pytest.raises(SourceError, match=r"^file x, line 7: broken$"):
        feed.take(0, 0)


def test_requests_follow_the_demand_and_stay_few():
    """The protocol without processes: answers come in the order of the questions, ``depth`` are under way."""
    workers, sources, depth = 3, 4, 6
    requests = _Requests(sources, workers)
    asked = iter(requests)
    under_way = [next(asked) for _ in range(depth)]
    waiting = Counter()
    rng = np.random.default_rng(1)
    for turn in range(2000):
        # First all of source 2, then mixed; lanes in turn.
        source = 2 if turn < 500 else int(rng.choice(sources, p=[0.9, 0.08, 0.01, 0.01]))
        lane = turn % workers
        answers = 0
        while not waiting[lane, source]:
            requests.wanted = source
            under_way.append(next(asked))  # the loader asks on before it hands over
            worker, answer = requests.answered()
            assert answer == under_way.pop(0)
            waiting[worker, answer] += 1
            answers += 1
            assert answers <= depth + workers * sources
        waiting[lane, source] -= 1
        requests.taken(source, lane)
        assert waiting.total() + len(under_way) <= sources * depth
    # A worker that has nothing more of a source is asked for the others.
    requests.close(0, 1)
    for _ in range(30):
        next(asked)
    answers = [requests.answered() for _ in range(depth + 30)][depth:]
    assert (0, 1) not in answers and {(0, 2), (1, 1), (2, 1)} < set(answers)


def test_largest_divisor():
    assert [largest_divisor(12, limit) for limit in (1, 2, 3, 4, 5, 7, 11, 12, 100)] == [1, 2, 3, 4, 4, 6, 6, 12, 12]
    assert largest_divisor(7, 6) == 1
