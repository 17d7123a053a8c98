"""What makes a folder of torch.distributed.checkpoint a checkpoint that counts, and what it says when it is damaged.

``{dump_folder}/{folder}/step-N`` counts only once ``complete.json`` lies in it, which rank 0 writes after all ranks
have written everything else. Whatever a killed run leaves half-done is therefore never resumed from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.distributed.failures import is_peer_failure, is_timeout

MARKER = "complete.json"


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, or does not fit the run; says which and what there is."""


def is_complete(path: Path) -> bool:
    """Whether a checkpoint folder was written to its end."""
    return (path / MARKER).is_file()


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in ``folder``, rising."""
    if not folder.is_dir():
        return []
    matches = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.iterdir())
    return sorted(int(match[1]) for match, path in matches if match and is_complete(path))


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn whatever reading a damaged checkpoint raises, DCP's collected tracebacks included, into CheckpointError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if is_timeout(error) or is_peer_failure(error):  # nothing is wrong with the files
            raise
        causes = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        reasons = "; ".join(dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause, _ in causes))
        raise CheckpointError(
            f"{path} is damaged and cannot be read ({reasons}). Remove it, or name another step by checkpoint.load_step"
        ) from error
