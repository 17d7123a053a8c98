import pytest

from torchtitan_lite.observability.throughput import Throughput

# A row of one document, but for its tokens.
PLAIN = dict(rows=1, documents=1, document_pairs=1, causal_pairs=2, padding=0, flops=0, data_wait_s=0.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_summary_by_hand():
    clock = Clock()
    throughput = Throughput(world_size=2, peak_flops=5e12, clock=clock)
    # Two steps of 4 rows of 100 tokens: 20 then 60 of padding, 300 then 100 targets, 7 then 3 documents.
    throughput.add(
        tokens=400,
        targets=300,
        rows=4,
        documents=7,
        document_pairs=3000,
        causal_pairs=20200,
        padding=20,
        flops=10**13,
        data_wait_s=0.5,
    )
    throughput.add(
        tokens=400,
        targets=100,
        rows=4,
        documents=3,
        document_pairs=7100,
        causal_pairs=20200,
        padding=60,
        flops=2 * 10**13,
        data_wait_s=1.5,
    )
    clock.now += 8
    assert throughput.summary() == {
        "tps": 50.0,  # 800 / 8 s / 2 devices
        "supervised_tps": 25.0,  # 400 / 8 / 2
        "tflops": 1.875,  # 30 / 8 / 2
        "mfu": 0.375,  # 1.875 of 5
        "padding_fraction": 0.1,  # 80 / 800
        "documents_per_row": 1.25,  # 10 / 8
        "mask_density": 0.25,  # 10100 / 40400
        "data_wait_fraction": 0.25,  # 2 s of 8
        "time_s": 4.0,
    }


def test_each_summary_covers_its_own_interval():
    clock = Clock()
    throughput = Throughput(world_size=1, peak_flops=1e12, clock=clock)
    step = {**PLAIN, "tokens": 10, "targets": 10}
    throughput.add(**step)
    clock.now += 100
    assert throughput.summary()["tps"] == 0.1
    throughput.add(**step)
    clock.now += 1
    assert throughput.summary()["tps"] == 10


def test_half_masked_batch_shows_in_supervised_tps_only():
    clock = Clock()
    throughput = Throughput(world_size=1, peak_flops=1e12, clock=clock)
    throughput.add(**PLAIN, tokens=64, targets=32)
    clock.now += 1
    summary = throughput.summary()
    assert (summary["tps"], summary["supervised_tps"]) == (64, 32)


def test_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one step"):
        Throughput(world_size=1, peak_flops=1e12).summary()
