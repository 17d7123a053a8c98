import logging
import multiprocessing
import os
import threading

import pytest

from torchtitan_lite.data import build_lock as module
from torchtitan_lite.data.build_lock import build_lock, built_once


@pytest.mark.timeout(60)
def test_one_at_a_time_and_who_waits_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_REPORT_SECONDS", 0.05)
    events, inside = [], threading.Event()

    def second():
        with build_lock(tmp_path / "lock", "the books", timeout_seconds=30):
            events.append("second")

    waiter = threading.Thread(target=second)
    with caplog.at_level(logging.INFO), build_lock(tmp_path / "lock", "the books", timeout_seconds=30):
        waiter.start()
        inside.wait(0.5)
        events.append("first")
    waiter.join()
    assert events == ["first", "second"]
    assert "Waiting for another process to prepare the books" in caplog.text


@pytest.mark.timeout(60)
def test_waiting_ends(tmp_path):
    failures = []

    def second():
        try:
            with build_lock(tmp_path / "lock", "the books", timeout_seconds=0.2):
                pass
        except TimeoutError as error:
            failures.append(str(error))

    with build_lock(tmp_path / "lock", "the books", timeout_seconds=30):
        waiter = threading.Thread(target=second)
        waiter.start()
        waiter.join()
    (failure,) = failures
    assert "at work on the books" in failure and "comm.data_timeout_seconds" in failure and "lock" in failure


def die_inside(path):
    with build_lock(path, "the books", timeout_seconds=30):
        os._exit(1)


@pytest.mark.timeout(60)
def test_who_dies_or_fails_frees_it(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=die_inside, args=(tmp_path / "lock",))
    process.start()
    process.join()
    with (
        pytest.raises(RuntimeError, match="out of luck"),
        build_lock(tmp_path / "lock", "the books", timeout_seconds=5),
    ):
        raise RuntimeError("out of luck")
    with build_lock(tmp_path / "lock", "the books", timeout_seconds=5):
        pass


@pytest.mark.timeout(60)
def test_nobody_waits_for_what_is_built(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(RuntimeError), built_once(path, "the books", timeout_seconds=5):
        raise RuntimeError("half-way")
    with build_lock(path, "the books", timeout_seconds=5):  # so it is still to be built, and another one is at it
        failures = []

        def second():
            try:
                with built_once(path, "the books", timeout_seconds=0.1):
                    pass
            except TimeoutError:
                failures.append(True)

        waiter = threading.Thread(target=second)
        waiter.start()
        waiter.join()
        assert failures == [True]
    with built_once(path, "the books", timeout_seconds=5):
        pass
    with build_lock(path, "other books", timeout_seconds=5), built_once(path, "the books", timeout_seconds=0):
        pass  # within somebody's lock
