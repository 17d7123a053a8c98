import math

import pytest

from torchtitan_lite.config.schema import LRScheduler
from torchtitan_lite.training.lr_schedule import lr_factor


def factors(steps: int, **settings) -> list[float]:
    return [lr_factor(step, steps, LRScheduler(**settings)) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (10, {"warmup_steps": 2, "decay_ratio": 0.8}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (10, {"warmup_steps": 2}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (10, {"warmup_steps": 4, "decay_ratio": 0.4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (4, {"warmup_steps": 0}, [1, 0.75, 0.5, 0.25]),
        (4, {"warmup_steps": 0, "decay_ratio": 0.0}, [1, 1, 1, 1]),
        (4, {"warmup_steps": 2, "decay_ratio": 0.0}, [0.5, 1, 1, 1]),
        (4, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1]),
        (4, {"warmup_steps": 4, "decay_ratio": 0.5}, [0.25, 0.5, 0.75, 1]),  # no room is left to decay
        (5, {"warmup_steps": 3, "decay_ratio": 1.0}, [1 / 3, 2 / 3, 1, 1, 0.5]),  # the decay is cut to 2 steps
        (1, {"warmup_steps": 0}, [1]),
        (1, {"warmup_steps": 1}, [1]),
    ],
)
def test_linear_by_hand(steps, settings, expected):
    assert factors(steps, **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("decay_type", "shape"),
    [
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("sqrt", [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_shapes_and_floor(decay_type, shape):
    assert factors(4, warmup_steps=0, decay_type=decay_type) == pytest.approx(shape)
    with_floor = factors(4, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.2)
    assert with_floor == pytest.approx([0.2 + 0.8 * x for x in shape])


def test_the_floor_is_for_the_decay_alone():
    assert factors(4, warmup_steps=4, min_lr_factor=0.5) == pytest.approx([0.25, 0.5, 0.75, 1])
    assert factors(2, warmup_steps=0, min_lr_factor=1.0) == pytest.approx([1, 1])


def test_a_longer_run_ends_later_but_warms_up_alike():
    assert factors(4, warmup_steps=2)[:2] == factors(400, warmup_steps=2)[:2]
    assert lr_factor(5, 4, LRScheduler(warmup_steps=0)) == 0  # one step past the end
