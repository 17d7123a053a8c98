"""What a run would need, before any GPU is there: memory of a rank, what it sends, and the least time of a step.

    python scripts/estimate.py train_configs/llama3_8b.toml --world-size 8
    python scripts/estimate.py train_configs/llama3_405b.toml --world-size 512 --gpu H100 \\
        --parallelism.context_parallel_degree=2

The model is built by the trainer's own code for one rank at a time, on tensors that have shapes but no memory, and some
of its layers are run. Neither data nor tokenizer is read. docs/estimate.md says how exact each number is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for environments without the package installed

from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.data.inspection.command_line import argument_parser

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> None:
    options, words = own_options().parse_known_args(argv)
    config = load_config([f"--job.config_file={config_file(words)}", *words])

    # Imported here: torch's distributed parts take seconds, which --help and a wrong key need not wait for.
    from torchtitan_lite.estimate.estimate import estimate
    from torchtitan_lite.estimate.hardware import GPUS
    from torchtitan_lite.estimate.plan import Plan
    from torchtitan_lite.estimate.report import as_data, lines

    if options.gpu not in GPUS:
        raise ConfigError([f"--gpu={options.gpu}: known are {', '.join(GPUS)}"])
    for name in ("world_size", "gpus_per_node"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError([f"--{name.replace('_', '-')}={value}: must be at least 1"])
    plan = Plan.of(config, options.world_size, document_length=options.document_length)
    for warning in plan.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    found = estimate(plan, GPUS[options.gpu], per_node=options.gpus_per_node, rank=options.rank, progress=show_progress)
    show_progress("")
    print(json.dumps(as_data(found), indent=2) if options.json else "\n".join(lines(found)))


def own_options() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="GPUs, all nodes together")
    parser.add_argument("--gpu", default="H100", help="A100, A100-40GB, H100 (default), H200, B200, GB200 or L40S")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: as the GPU is sold, mostly 8")
    parser.add_argument("--rank", type=int, metavar="N", help="look at this rank (default: those that differ most)")
    parser.add_argument(
        "--document-length", type=int, metavar="TOKENS", help="of the documents in a row (default: one fills it)"
    )
    parser.add_argument("--json", action="store_true", help="bytes, seconds and FLOPs for machines")
    return parser


def config_file(words: list[str]) -> Path | str:
    """Takes the training file off the command line; looked for here and then in the repository."""
    given = words.pop(0) if words and not words[0].startswith("-") else "train_configs/debug_model.toml"
    return next((path for path in (Path(given).expanduser(), ROOT / given) if path.is_file()), given)


def show_progress(line: str) -> None:
    """One line that each call replaces, where someone looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:  # ConfigError is one
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
