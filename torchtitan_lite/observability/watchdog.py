"""Says where a rank stands when it has stopped moving, and gives time-outs of collectives a rank, a step and a setting.

gloo raises in Python when a collective runs into its limit, but names neither; NCCL ends the process from C++.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from torchtitan_lite.config.schema import Comm
from torchtitan_lite.distributed.failures import FailureBoard, PeerFailure, is_peer_failure, is_timeout
from torchtitan_lite.distributed.mesh import World
from torchtitan_lite.observability.logging import logger

# Of the time limit. Before the first rank meets it and ends, which ends the others too, they all are to have reported.
_REPORT_AT = 0.9
# For the launcher of a rank that was killed to say so.
_BOARD_SECONDS = 2.0
_PACKAGE = Path(__file__).resolve().parents[1]
_INNERMOST = 4


class StepWatchdog:
    """Watches the thread that enters it, from a thread of its own.

    Where that thread stays in one place (a step, or a phase between steps) for nearly as long as a collective may take
    there, its place and traceback are logged as an error, once. What would leave the ``with`` block as a time-out or a
    broken connection of a collective leaves it as TimeoutError or PeerFailure, with rank, place and limit.

        with StepWatchdog(config.comm, world) as watchdog:
            watchdog.phase("building")
            watchdog.step(1)

    Args:
        comm: the limits: init_timeout_seconds up to the end of the first step, train_timeout_seconds after it.
        world: this rank.
        board: where other nodes tell of their failures.
    """

    def __init__(self, comm: Comm, world: World, board: FailureBoard | None = None) -> None:
        self._comm = comm
        self._world = world
        self._board = board
        self._steps = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watched = threading.current_thread()
        self.phase("the start")
        self._reported = True  # nothing to report before the first step or phase

    def __enter__(self) -> StepWatchdog:
        self._watched = threading.current_thread()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if error is None:
            return
        if is_timeout(error):
            raise TimeoutError(
                f"Rank {self._world.rank}: a collective ran into its time limit in {self.place}, of "
                f"{self._limit()} s ({self._setting_and_value()}): some rank did not come to it, and its own output "
                f"tells where it stood. If all of them were only slow, raise the limit. ({_first_line(error)})"
            ) from error
        if is_peer_failure(error):
            raise PeerFailure(
                f"Rank {self._world.rank}: another rank has ended, and this one with it, in {self.place}. "
                f"{self._what_the_board_says()}"
            ) from error

    def step(self, number: int) -> None:
        """The step of this number begins."""
        self._steps += 1
        self.phase(f"step {number}")

    def phase(self, place: str, setting: str | None = None) -> None:
        """Something other than a step begins.

        Args:
            place: what the messages call it: "building", "saving after step 12".
            setting: of the comm section, which limits it; None for the usual.
        """
        self.place = place
        self._setting = setting or ("init_timeout_seconds" if self._steps < 2 else "train_timeout_seconds")
        self._reported = False
        self._since = time.monotonic()

    def _limit(self) -> int:
        return getattr(self._comm, self._setting)

    def _setting_and_value(self) -> str:
        return f"comm.{self._setting}={self._limit()}"

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._limit() / 20)):
            if not self._reported and time.monotonic() - self._since >= _REPORT_AT * self._limit():
                self._reported = True
                self._report()

    def _report(self) -> None:
        logger.error(
            f"Rank {self._world.rank} has been in {self.place} for {time.monotonic() - self._since:,.0f} s, and a "
            f"collective may take {self._limit()} s ({self._setting_and_value()}). It stands at:\n{self._where()}\n"
            "Compare the ranks' reports: those that wait stand in a collective, and the one that stands elsewhere, or "
            "says nothing, is the one they wait for."
        )

    def _where(self) -> str:
        """The watched thread's calls that are the project's own, and the innermost; outermost first."""
        frame = sys._current_frames().get(self._watched.ident)
        if frame is None:
            return "  (the thread has ended)"
        calls = traceback.extract_stack(frame)
        own = [call for call in calls[:-_INNERMOST] if _PACKAGE in Path(call.filename).parents]
        return "\n".join(
            f"  {'/'.join(Path(call.filename).parts[-3:])}:{call.lineno} {call.name}: {call.line}"
            for call in [*own, *calls[-_INNERMOST:]]
        )

    def _what_the_board_says(self) -> str:
        deadline = time.monotonic() + _BOARD_SECONDS
        while self._board is not None and time.monotonic() < deadline:
            try:
                if message := self._board.read():
                    return message
            except ConnectionError as error:
                return f"{error}."
            time.sleep(_BOARD_SECONDS / 10)
        return "What that one said tells why."


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
