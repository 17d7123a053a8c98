"""The order of a pipeline's work, and how long its ranks wait."""

import pytest

from torchtitan_lite.estimate.rank import fake_ranks
from torchtitan_lite.estimate.schedule import Action, schedule_order, simulate

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def order_of(schedule: str | None, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    with fake_ranks(ranks, 0):
        return schedule_order(schedule, ranks, stages, microbatches)


def most_alive(order: list[Action]) -> int:
    alive = [sum({"F": 1, "B": -1, "I": 0, "W": -1}[a.kind] for a in order[: i + 1]) for i in range(len(order))]
    return max(alive)


def test_without_a_pipeline_microbatches_follow_each_other():
    (order,) = order_of(None, 1, 1, 2)
    assert "".join(a.kind for a in order) == "FBFB"


def test_1f1b_written_out():
    """Three stages, four microbatches, by hand."""
    orders = order_of("1F1B", 3, 3, 4)
    assert [" ".join(f"{a.kind}{a.microbatch}" for a in order) for order in orders] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 16)])
def test_the_known_bubble(schedule, ranks, microbatches):
    """(ranks - 1) / (microbatches + ranks - 1), of either schedule; 1F1B holds as many as there are stages to come."""
    orders = order_of(schedule, ranks, ranks, microbatches)
    timing = simulate(orders, ranks, lambda action: SECONDS[action.kind])
    assert timing.seconds == 3 * (microbatches + ranks - 1)
    assert timing.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    held = [ranks - rank for rank in range(ranks)] if schedule == "1F1B" else [microbatches] * ranks
    assert [most_alive(order) for order in orders] == held


def test_two_stages_a_rank_halve_the_bubble():
    """Interleaved (Narayanan et al., 2021): (ranks - 1) / stages-per-rank of a microbatch's time, in all."""
    orders = order_of("Interleaved1F1B", 4, 8, 8)
    timing = simulate(orders, 8, lambda action: SECONDS[action.kind] / 2)
    assert timing.seconds == pytest.approx(3 * (8 + 3 / 2))


@pytest.mark.parametrize("schedule", ["LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_every_schedule_does_all_of_the_work(schedule):
    orders = order_of(schedule, 2, 4, 4)
    actions = [action for order in orders for action in order]
    assert len(set(actions)) == len(actions)
    for stage in range(4):
        for microbatch in range(4):
            kinds = {a.kind for a in actions if (a.stage, a.microbatch) == (stage, microbatch)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
    timing = simulate(orders, 4, lambda action: SECONDS[action.kind])
    assert timing.seconds >= 2 * 4 * 3 and 0 <= timing.bubble < 0.5


def test_an_uneven_stage_sets_the_pace():
    """The second of two stages takes twice as long: 4 x 6 s behind the first forward, and a last backward of 2 s."""
    orders = order_of("1F1B", 2, 2, 4)
    timing = simulate(orders, 2, lambda action: SECONDS[action.kind] * (1 + action.stage))
    assert timing.seconds == 1 + 4 * 6 + 2


def test_ranks_that_wait_for_each_other():
    with pytest.raises(ValueError, match=r"ranks \[0\] of the pipeline would wait"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)]], 1, lambda action: 1.0)
