"""Weights from one format to another: hf (a Hugging Face folder), dcp (a run's step-N folder) and meta (Meta's own).

    python scripts/convert_checkpoint.py outputs/checkpoint/step-1000 my-model --to hf --export-dtype bfloat16
    python scripts/convert_checkpoint.py ~/Llama-3.2-1B-from-meta llama-1b --to hf --assets ~/Llama-3.2-1B
    python scripts/convert_checkpoint.py ~/Llama-3.2-1B outputs/initial/step-0 --to dcp

What the source holds is seen from its files. A folder written with --to hf loads as it is by transformers'
AutoModelForCausalLM.from_pretrained; a tokenizer comes along from --assets, from the source folder where it has one, or
from the run that wrote the step. A step of a run with adapters is written merged; --to peft writes the adapters alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for environments without the package installed

from tqdm import tqdm


def main(argv: Sequence[str]) -> None:
    options = own_options().parse_args(argv)

    # Imported here: torch takes seconds, which --help need not wait for.
    from torchtitan_lite.convert.adapters import Adapters, write_peft
    from torchtitan_lite.convert.dcp import StepFolder
    from torchtitan_lite.convert.formats import assets_of, format_of, open_weights, write_weights

    source_format = options.source_format or format_of(options.source)
    if options.target_format == "peft":
        if source_format != "dcp":
            raise ValueError(f"--to peft: {options.source} is no step-N folder of a run with adapters")
        write_peft(Adapters(StepFolder(options.source)), options.target, options.export_dtype or "float32")
        print(f"Wrote {options.target} (peft)")
        return
    weights = open_weights(
        options.source,
        source_format,
        rope_factor=options.rope_factor,
        max_seq_len=options.max_seq_len,
        base=options.base,
    )
    assets = options.assets or assets_of(options.source, source_format)
    print(f"{options.source} ({source_format}): {weights.args.parameters:,} parameters")
    if options.target_format != "dcp" and not has_tokenizer(assets, options.target_format):
        print("No tokenizer comes along; --assets names the folder of one", file=sys.stderr)
    with tqdm(
        total=weights.args.parameters, unit=" parameters", unit_scale=True, disable=not sys.stderr.isatty()
    ) as bar:
        write_weights(
            weights,
            options.target,
            options.target_format,
            dtype=options.export_dtype,
            assets=assets,
            progress=bar.update,
        )
    print(f"Wrote {options.target} ({options.target_format})")


def has_tokenizer(assets: str | None, target_format: str) -> bool:
    if assets == "debug":
        return target_format == "hf"
    file = "tokenizer.json" if target_format == "hf" else "tokenizer.model"
    return assets is not None and (Path(assets).expanduser() / file).is_file()


def own_options() -> argparse.ArgumentParser:
    formats, dtypes = ("hf", "dcp", "meta"), ("float32", "bfloat16", "float16")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder with the weights")
    parser.add_argument("target", help="folder to write, which must not exist")
    parser.add_argument("--to", dest="target_format", choices=(*formats, "peft"), required=True, help="format to write")
    parser.add_argument("--from", dest="source_format", choices=formats, help="format to read (default: seen)")
    parser.add_argument("--export-dtype", choices=dtypes, help="type of every tensor (default: as stored)")
    parser.add_argument("--assets", metavar="FOLDER", help="tokenizer files, config.json and generation_config.json")
    parser.add_argument(
        "--rope-factor",
        type=float,
        metavar="X",
        help="of a meta source's scaled RoPE (default: 32 for 1B and 3B, or 8)",
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        help="weights that the adapters of a dcp source were trained beside (default: the run's)",
    )
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="longest position of a meta source")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:  # WeightsError, HFConfigError, ConfigError
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
