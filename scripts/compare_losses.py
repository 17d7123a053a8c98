"""Train the same model under each attention on the same rows, and draw the losses.

    python scripts/compare_losses.py --out docs/images/losses.png

The documents are the functions and classes of the standard library, short enough that many share a row. The two
block-causal attentions must agree: it ends with exit code 1 where they differ by more than 1e-4 (relative) in one of
the first 20 steps, or by more than 1% in any. It needs matplotlib (the `plot` extra) and about ten minutes on two
cores; runs that already ended in --folder are not run again.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FLAVORS = {
    "debugmodel_sdpa_block_causal": ("sdpa_block_causal", "#3b6fb6", "-"),
    "debugmodel_flex_block_causal": ("flex_block_causal", "#e08a1e", "--"),
    "debugmodel": ("sdpa (documents see each other)", "#9aa1ab", "-"),
}
SETTINGS = (
    "--model.args.dim=128",
    "--model.args.n_layers=4",
    "--model.args.n_heads=8",
    "--model.args.n_kv_heads=4",
    "--model.args.ffn_hidden_dim=384",
    "--training.mixed_precision_param=float32",
    "--training.seq_len=512",
    "--training.local_batch_size=4",
    "--lr_scheduler.warmup_steps=20",
    "--metrics.log_freq=1",
)
EARLY_STEPS, EARLY_LIMIT, LIMIT = 20, 1e-4, 1e-2


def write_functions(path: Path) -> None:
    """Each top-level function and class of the standard library's modules as a document."""
    with path.open("w", encoding="utf-8") as file:
        for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            source = module.read_text(encoding="utf-8", errors="replace")
            for node in ast.parse(source).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    file.write(json.dumps({"text": ast.get_source_segment(source, node)}) + "\n")


def train(flavor: str, folder: Path, documents: Path, steps: int) -> np.ndarray:
    """Losses of a run, [steps]; read back if the run is there already."""
    if len(losses(folder)) != steps:
        arguments = [
            *SETTINGS,
            f"--model.flavor={flavor}",
            f"--training.dataset_path={documents}",
            f"--training.steps={steps}",
            f"--job.dump_folder={folder}",
        ]
        environment = {**os.environ, "PYTHON": sys.executable, "NGPU": "1"}
        subprocess.run([str(ROOT / "run_train.sh"), *arguments], env=environment, check=True)
    return losses(folder)


def losses(folder: Path) -> np.ndarray:
    path = folder / "metrics.jsonl"
    return np.array([json.loads(line)["loss"] for line in path.open()] if path.exists() else [])


def draw(runs: dict[str, np.ndarray], out: Path) -> None:
    steps = np.arange(1, len(runs["debugmodel"]) + 1)
    reference = runs["debugmodel_sdpa_block_causal"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    for flavor, (label, colour, style) in reversed(FLAVORS.items()):  # plain sdpa lies below the others
        top.plot(steps, runs[flavor], style, color=colour, label=label, linewidth=1.4)
        if runs[flavor] is not reference:
            difference = np.abs(runs[flavor] / reference - 1)
            bottom.semilogy(steps, np.maximum(difference, 1e-9), style, color=colour, linewidth=1.2)
    top.set_ylabel("training loss")
    top.legend(frameon=False)
    bottom.set_ylabel("relative difference\nto sdpa_block_causal")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("losses.png"), help="the picture to write")
    parser.add_argument("--folder", type=Path, default=Path("outputs/compare_losses"), help="where the runs go")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()

    arguments.folder.mkdir(parents=True, exist_ok=True)
    documents = arguments.folder / "functions.jsonl"
    write_functions(documents)
    runs = {flavor: train(flavor, arguments.folder / flavor, documents, arguments.steps) for flavor in FLAVORS}
    draw(runs, arguments.out)

    reference = runs["debugmodel_sdpa_block_causal"]
    print(f"{'relative difference to sdpa_block_causal':<44}{'first 20 steps':>16}{'all steps':>12}{'last loss':>12}")
    for flavor, (label, _, _) in FLAVORS.items():
        difference = np.abs(runs[flavor] / reference - 1)
        print(f"{label:<44}{difference[:EARLY_STEPS].max():>16.1e}{difference.max():>12.1e}{runs[flavor][-1]:>12.4f}")
    flex = np.abs(runs["debugmodel_flex_block_causal"] / reference - 1)
    if flex[:EARLY_STEPS].max() > EARLY_LIMIT or flex.max() > LIMIT:
        sys.exit(f"The block-causal attentions differ by more than {EARLY_LIMIT} early or {LIMIT} at all.")


if __name__ == "__main__":
    main()
