"""Text that needs no file and no download: what every CPython brings along about itself."""

from __future__ import annotations

import contextlib
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def pydocs() -> Iterator[str]:
    """Documentation topics and standard-library sources of the running CPython; each topic and each file a document.

    Tests and installed packages are left out, so the text is the same in every environment of one interpreter.
    """
    with contextlib.suppress(ImportError):  # some distributions package pydoc's topics apart
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    for name in sorted(paths):
        if name == "pydoc_data/topics.py" or _NOT_LIBRARY.intersection(name.split("/")):
            continue
        # Sources that do not follow their own coding line, or are links to nowhere, are nobody's training text.
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(paths[name]) as file:
            yield file.read()
