"""What the scripts that look at a run's data share: their command line, its checks, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite.config.checks import AT_LEAST
from torchtitan_lite.config.help import value_of
from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.chat.encoding import check_chats
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.sources.resolve import check_sources
from torchtitan_lite.data.tokenizer import TokenizerError
from torchtitan_lite.observability.logging import init_logger

OF_DATA = ("data.", "training.seq_len", "training.seed", "comm.data_timeout_seconds")
"""What the settings begin with that decide about the data, beside where it comes from."""

_USAGE = "%(prog)s [CONFIG] [options] [--section.key=value ...]"
_EPILOG = """\
CONFIG is the training file, looked for here and then in the repository (default:
train_configs/debug_model.toml). --section.key=value overrides its settings, as it
does for run_train.sh, whose --help lists them."""


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser to which a script adds the options of its own."""
    return argparse.ArgumentParser(
        usage=_USAGE,
        description=description,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # settings that begin like an option are not short for it
    )


def read_command_line(
    parser: argparse.ArgumentParser, argv: Sequence[str], repository: Path
) -> tuple[argparse.Namespace, Config, list[str]]:
    """The script's own options, the run's configuration, and the words that make it: the file and the overrides.

    Raises:
        ConfigError: file or overrides are wrong, or a setting that decides about the data is.
    """
    options, words = parser.parse_known_args(argv)
    given = words.pop(0) if words and not words[0].startswith("-") else "train_configs/debug_model.toml"
    found = [path for path in (Path(given).expanduser(), repository / given) if path.is_file()]
    words = [f"--job.config_file={found[0] if found else given}", *words]
    config = load_config(words)
    problems = [
        f"{name}={value_of(config, name)}: must be at least {least}"
        for name, least in AT_LEAST.items()
        if name.startswith(OF_DATA) and value_of(config, name) < least
    ]
    problems += check_sources(config) + check_chats(config)
    if problems:
        raise ConfigError(problems)
    return options, config, words


def run_script(main: Callable[[Sequence[str]], None]) -> None:
    """Runs ``main`` on the command line. What the user can mend ends it with its message alone, and exit code 1."""
    sys.stdout.reconfigure(errors="backslashreplace")  # text of any script goes to a terminal of whatever encoding
    try:
        init_logger()
    except ValueError as error:
        sys.exit(str(error))
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(1)
    except (ConfigError, SourceError, TokenizerError, PackingError, TimeoutError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
