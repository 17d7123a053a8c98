"""What is said when a saved data position meets a run that it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ResumeError(ValueError):
    """A saved data position does not fit the data, packing or batch of this run."""


def refuse_changes(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], global_batch_size: int, advice: Mapping[str, str]
) -> None:
    """Holds a saved position, which has a ``fingerprint`` and a ``global_batch_size``, against those of this run.

    Raises:
        ResumeError: they differ; says in what, with the advice for it.
    """
    size = state["global_batch_size"]
    changes = differences(
        {**state["fingerprint"], "global_batch_size": size},
        {**fingerprint, "global_batch_size": global_batch_size},
        {"global_batch_size": f"set training.global_batch_size={size}", **advice},
    )
    if changes:
        raise ResumeError(
            f"The data position of the checkpoint does not fit this run: {'; '.join(changes)}. Go back to what it was, "
            "or start anew with another job.dump_folder (checkpoint.initial_load_path takes the weights along)."
        )


def differences(was: Mapping[str, Any], now: Mapping[str, Any], advice: Mapping[str, str] | None = None) -> list[str]:
    """Words every entry that two fingerprints do not share, as ``name was A, is now B``.

    Args:
        was: fingerprint of the saved position.
        now: fingerprint of this run.
        advice: for some entries, what to do about a difference; put behind it in brackets.
    """
    advice = advice or {}
    changes = []
    for name in dict.fromkeys((*now, *was)):
        if name in was and name in now and was[name] == now[name]:
            continue
        before = f"was {was[name]}" if name in was else "was not there"
        after = f"is now {now[name]}" if name in now else "is gone now"
        hint = f" ({advice[name]})" if name in advice else ""
        changes.append(f"{name} {before}, {after}{hint}")
    return changes
