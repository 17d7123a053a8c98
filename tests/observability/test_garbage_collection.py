import gc
import weakref

import pytest

from torchtitan_lite.observability.garbage_collection import GarbageCollection


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_collects_at_its_steps_and_not_between():
    with GarbageCollection(freq=3) as collection:
        alive = weakref.ref(Cycle())
        collection.step(1)
        collection.step(2)
        _ = [[] for _ in range(100_000)]  # would set off an automatic collection
        assert alive() is not None
        collection.step(3)
        assert alive() is None


def test_leaves_the_collector_as_it_was():
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="step failed"), GarbageCollection(freq=1):
        assert not gc.isenabled()
        raise RuntimeError("step failed")
    assert gc.isenabled()
    gc.disable()
    try:
        with GarbageCollection(freq=1):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
