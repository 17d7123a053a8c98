import io
import sys

import pytest

from torchtitan_lite.observability.progress import ProgressBar, eta_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.6, "1s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (187, "3m07s"),
        (3600, "1h00m"),
        (2 * 3600 + 5 * 60 + 59, "2h05m"),
        (4 * 86400 + 3600, "4d01h"),
        (-3, "0s"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_eta_text(seconds, text):
    assert eta_text(seconds) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draw(monkeypatch, stream: io.StringIO, main_rank: bool) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar(total_steps=20, start_step=10, main_rank=main_rank) as bar:
        for _ in range(5):
            bar.step()
        bar.show(loss=2.34567, tps=12345.6)
    return stream.getvalue()


def test_resumed_run_starts_at_its_step(monkeypatch):
    drawn = draw(monkeypatch, Terminal(), main_rank=True)
    first, last = drawn.split("\r")[1], drawn.rstrip().split("\r")[-1]
    assert "10/20" in first
    assert "15/20" in last
    assert "loss 2.3457, 12,346 tokens/s" in last


def test_draws_nothing_off_a_terminal_or_on_other_ranks(monkeypatch):
    assert draw(monkeypatch, io.StringIO(), main_rank=True) == ""
    assert draw(monkeypatch, Terminal(), main_rank=False) == ""
