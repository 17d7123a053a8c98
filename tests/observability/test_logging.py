import io
import logging
import re
import sys

import pytest

from torchtitan_lite.observability.logging import info_once, init_logger, logger, paint, warn_once
from torchtitan_lite.observability.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fresh_logger(monkeypatch):
    """No rank, no colour setting, and the package's logger as it was afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOG_RANK", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, _, logger.propagate = before
    logger.setLevel(before[1])
    info_once.cache_clear()
    warn_once.cache_clear()


def start(monkeypatch, **env: str) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    init_logger()


def messages(capsys) -> list[str]:
    """Printed lines without their time, which each must have."""
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\[\d\d:\d\d:\d\d\] ", line) for line in lines)
    return [line[len("[HH:MM:SS] ") :] for line in lines]


def say_one_of_each() -> None:
    logger.debug("d")
    logger.info("i")
    logger.warning("w")
    logger.error("e")


def test_single_process(monkeypatch, capsys):
    start(monkeypatch)
    say_one_of_each()
    assert messages(capsys) == ["i", "WARNING: w", "ERROR: e"]


@pytest.mark.parametrize(
    ("rank", "log_rank", "expected"),
    [
        ("0", "0", ["i", "WARNING: w", "[rank 0] ERROR: e"]),
        ("1", "0", ["[rank 1] ERROR: e"]),
        ("3", "3", ["i", "WARNING: w", "[rank 3] ERROR: e"]),
        ("3", "0, 3", ["[rank 3] i", "[rank 3] WARNING: w", "[rank 3] ERROR: e"]),
    ],
)
def test_ranks(monkeypatch, capsys, rank, log_rank, expected):
    start(monkeypatch, RANK=rank, WORLD_SIZE="4", LOG_RANK=log_rank)
    say_one_of_each()
    assert messages(capsys) == expected


def test_wrong_log_rank_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"LOG_RANK='all' must be a rank"):
        start(monkeypatch, LOG_RANK="all")


def test_starting_twice_and_a_configured_root_logger_print_each_line_once(monkeypatch, capsys):
    root_handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(root_handler)
    try:
        start(monkeypatch)
        start(monkeypatch)
        logger.info("i")
    finally:
        logging.getLogger().removeHandler(root_handler)
    assert messages(capsys) == ["i"]


def test_once(monkeypatch, capsys):
    start(monkeypatch)
    for _ in range(3):
        warn_once("a")
        warn_once("b")
        info_once("a")
    assert messages(capsys) == ["WARNING: a", "WARNING: b", "a"]


def test_colour_only_on_a_terminal_and_without_no_color(monkeypatch):
    assert paint("x", "red") == "x"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert paint("x", "red") == "\033[31mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "")
    assert paint("x", "red") == "\033[31mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red") == "x"


def test_lines_stand_alone_beside_a_progress_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    start(monkeypatch)
    with ProgressBar(total_steps=10, start_step=0, main_rank=True) as bar:
        for _ in range(3):
            bar.step()
            logger.info("a line")
    shown = [line.rsplit("\r", 1)[-1] for line in terminal.getvalue().split("\n")]  # what stays on each row
    assert sum(bool(re.fullmatch(r"\[\d\d:\d\d:\d\d\] a line", line)) for line in shown) == 3
