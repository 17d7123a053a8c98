"""Whether this Python has what pyproject.toml asks for: prints what it lacks and exits with 1 if that is anything.

    python scripts/check_env.py [dev]     dev: the packages for tests as well

It runs before there is an environment: the standard library alone.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(table):
    """(name, least version) of each entry of a list in pyproject.toml; 3.10 has no TOML reader of its own."""
    block = re.search(rf"^{table} = \[(.*?)^\]", PYPROJECT.read_text(), re.M | re.S).group(1)
    return re.findall(r'^ *"([\w.-]+)>=([\d.]+)",$', block, re.M)


def lacking(name, least):
    """What to say of a requirement that is not met; None if it is."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return name
    wanted = [int(part) for part in least.split(".")]
    if [int(part) for part in re.findall(r"\d+", version)][: len(wanted)] < wanted:
        return f"{name}>={least} (it has {version})"
    return None


def main():
    wanted = requirements("dependencies") + (requirements("dev") if "dev" in sys.argv[1:] else [])
    missing = [text for text in (lacking(*requirement) for requirement in wanted) if text]
    if missing:
        sys.exit(", ".join(missing))


if __name__ == "__main__":
    main()
