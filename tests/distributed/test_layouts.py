"""Every parallelism and their products, as whole training runs, against the same run in one process.

The rows of a step differ in their documents and in their number of targets, and under pipeline parallelism each is a
microbatch of its own. ``-m every_layout`` runs the full product; its table is kept in docs/parallelism.md.
"""

import hashlib
import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from toy_run import read_metrics, toy_config

import torchtitan_lite
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import Batch
from torchtitan_lite.distributed.mesh import DEGREE_KEYS, Degrees

STEPS = 5
ATTENTIONS = ("sdpa", "sdpa_block_causal", "flex_block_causal")

# Of what is compared, the relative difference allowed in fp32.
TOLERANCE = 1e-5
CLIPPING, NO_CLIPPING = 0.1, 0.0  # norms here are about 1


class Case(NamedTuple):
    """One run. ``extra`` are settings that must not change the result."""

    degrees: Degrees
    attention: str
    ac: str = "none"  # a mode, or selective's option
    compiled: bool = False
    max_norm: float = CLIPPING
    window: bool = False  # every other layer sees 100 tokens
    rows: int = 4  # of a step
    layers: int = 3  # two pipeline stages share them unequally
    extra: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        parts = [f"{name}{degree}" for name, degree in vars(self.degrees).items() if degree > 1]
        parts += [self.attention, f"ac_{self.ac}" * (self.ac != "none"), "compiled" * self.compiled]
        parts += ["window" * self.window, "unclipped" * (self.max_norm == NO_CLIPPING)]
        parts += [str(value) for _, value in self.extra]
        return "-".join(filter(None, parts))

    @property
    def reference(self) -> "Case":
        same = {name: getattr(self, name) for name in ("attention", "max_norm", "window", "rows", "layers")}
        return Case(Degrees(), **same)

    def config(self, folder: Path, documents: Path) -> Config:
        settings = {
            "model.args.n_layers": self.layers,
            "model.flavor": f"debugmodel_{self.attention}" if self.attention != "sdpa" else "debugmodel",
            # FlexAttention needs a block of 128 tokens in each of the four parts that two ranks share a row in.
            "training.seq_len": 512 if self.attention == "flex_block_causal" else 256,
            "training.local_batch_size": min(2, self.rows // self.degrees.dp),
            "training.global_batch_size": self.rows,
            "training.steps": STEPS,
            "training.max_norm": self.max_norm,
            "data.packing": "greedy",
            "optimizer.lr": 1e-3,
            "activation_checkpoint.mode": self.ac if self.ac in ("none", "full") else "selective",
            "activation_checkpoint.selective_ac_option": self.ac if self.ac not in ("none", "full") else "op",
            "compile.enable": self.compiled,
            "compile.backend": "aot_eager",
        }
        if self.window:
            settings |= {"model.args.sliding_window": 100, "model.args.sliding_window_pattern": [False, True]}
        for name, degree in vars(self.degrees).items():
            settings[f"parallelism.{DEGREE_KEYS[name]}"] = degree
        return toy_config(folder, documents, **settings, **dict(self.extra))


def train(config: Config) -> None:
    from torchtitan_lite.training import trainer

    trainer.peak_flops = lambda device, dtype: (1e12, "not measured here: that takes as long as some of the runs")
    trainer.Trainer(config).train()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents of 1 to 200 words: rows hold a few or dozens, and are filled unevenly."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    words = random.Random(1)
    with path.open("w") as file:
        for _ in range(600):
            length = int(math.exp(words.uniform(0, math.log(200))))
            text = " ".join(words.choice(["the", "cat", "sat", "on", "a", "mat", "42"]) for _ in range(length))
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="module")
def logged(rank_pool, texts, tmp_path_factory):
    """Call it with a case for what its run logged, a dict a step."""
    runs: dict[Case, list[dict]] = {}

    def run(case: Case) -> list[dict]:
        if case not in runs:
            folder = tmp_path_factory.mktemp("run")
            rank_pool.run(case.degrees.world_size, train, case.config(folder, texts))
            runs[case] = read_metrics(folder)
        return runs[case]

    return run


def differences(got: list[dict], expected: list[dict]) -> dict[str, float]:
    """Largest relative difference of each number over the steps."""
    assert [entry["step"] for entry in got] == [entry["step"] for entry in expected] == list(range(1, STEPS + 1))
    return {
        name: max(abs(a[name] / b[name] - 1) for a, b in zip(got, expected, strict=True))
        for name in ("loss", "grad_norm")
    }


LAYOUTS = {
    "dp2": Degrees(dp_shard=2),
    "dp4": Degrees(dp_shard=4),
    "hsdp2x2": Degrees(dp_replicate=2, dp_shard=2),
    "tp2": Degrees(tp=2),
    "cp2": Degrees(cp=2),
    "pp2": Degrees(pp=2),
    "dp2tp2": Degrees(dp_shard=2, tp=2),
    "dp2cp2": Degrees(dp_shard=2, cp=2),
    "dp2pp2": Degrees(dp_shard=2, pp=2),
    "tp2cp2": Degrees(tp=2, cp=2),
    "tp2pp2": Degrees(tp=2, pp=2),
    "cp2pp2": Degrees(cp=2, pp=2),
}
# Modes dealt out over the cases, so that each meets several layouts and attentions.
_MODES = itertools.cycle(
    [
        ("none", False, CLIPPING, False),
        ("op", False, CLIPPING, True),
        ("full", True, CLIPPING, False),
        ("2", False, NO_CLIPPING, True),
        ("full", False, CLIPPING, False),
        ("op", True, NO_CLIPPING, True),
        ("none", False, CLIPPING, True),
        ("2", False, CLIPPING, False),
        ("op", False, NO_CLIPPING, False),
        ("full", False, CLIPPING, True),
    ]
)


def _rows(degrees: Degrees) -> int:
    """Four for each pipeline, to which each is a microbatch."""
    return 4 * degrees.dp if degrees.pp > 1 else 4


def _case(degrees: Degrees, attention: str) -> Case:
    ac, compiled, max_norm, window = next(_MODES)
    return Case(degrees, attention, ac, compiled, max_norm, window and attention != "sdpa", _rows(degrees))


def _schedule(name: str, **settings) -> tuple[tuple[str, object], ...]:
    return (("parallelism.pipeline_parallel_schedule", name), *settings.items())


_PLAIN_TOO = ("dp2", "tp2cp2", "dp2pp2")  # plain attention knows no documents, and little can happen to it
CASES = [
    _case(degrees, attention)
    for name, degrees in LAYOUTS.items()
    for attention in ATTENTIONS
    if attention != "sdpa" or name in _PLAIN_TOO
]
CASES += [
    Case(Degrees(pp=2, dp_shard=2, tp=2), "sdpa_block_causal", "op", rows=8),
    Case(Degrees(pp=2, tp=2), "sdpa_block_causal", layers=4, extra=_schedule("Interleaved1F1B")),
    Case(Degrees(pp=2, dp_replicate=2), "flex_block_causal", rows=8, extra=_schedule("GPipe")),
    Case(Degrees(dp_replicate=2, tp=2), "sdpa_block_causal", "op"),
    Case(Degrees(dp_shard=2, cp=2), "sdpa_block_causal", extra=(("parallelism.fsdp_gradient_reduction", "step"),)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_trains_as_one_process_does(logged, case):
    got, expected = logged(case), logged(case.reference)
    worst = differences(got, expected)
    assert max(worst.values()) < TOLERANCE, worst
    for name in ("tokens_seen", "padding_fraction", "documents_per_row", "mask_density", "lr"):
        assert [entry[name] for entry in got] == [entry[name] for entry in expected], name
    assert all((entry["grad_norm"] > CLIPPING) for entry in got)
    if case.degrees.dp > 1:
        assert all(entry["max_loss"] > entry["loss"] for entry in got)


def test_the_rows_are_as_different_as_the_cases_need(logged, texts, tmp_path):
    from torchtitan_lite.data.loader import build_loader
    from torchtitan_lite.data.tokenizer import load_tokenizer

    config = CASES[0].reference.config(tmp_path, texts)
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    loader = iter(build_loader(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu"))
    for _ in range(2 * STEPS):
        rows = [row for _ in range(2) for row in zip(*next(loader), strict=True)]  # two batches of two
        layouts = {tuple(row.document_ids.tolist()) for row in map(Batch._make, rows)}
        targets = {int((row.labels != -100).sum()) for row in map(Batch._make, rows)}
        assert len(rows) == len(layouts) == 4 and len(targets) > 1


# -- the full product --------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
TABLE = re.compile(r"(?<=<!-- from test_layouts.py -->\n)(.*)(?=<!-- end of table -->)", re.S)
WIDE_LAYOUTS = {**LAYOUTS, "dp2tp2pp2": Degrees(dp_shard=2, tp=2, pp=2)}


class Table:
    """Worst differences by layout and attention, written into the page once every cell is there. The runs take an hour
    and can be broken off: what was measured with the same sources is kept, in pytest's cache."""

    def __init__(self, cache: pytest.Cache) -> None:
        sources = sorted(Path(torchtitan_lite.__file__).parent.rglob("*.py"))
        content = [path.read_bytes() for path in (*sources, Path(__file__))]
        self._sources = hashlib.sha256(b"".join([*content, torch.__version__.encode()])).hexdigest()
        self._cache = cache
        kept = cache.get("layouts", {})
        self.cells = kept["cells"] if kept.get("sources") == self._sources else {}

    def add(self, name: str, cell: dict[str, float]) -> None:
        self.cells[name] = cell
        self._cache.set("layouts", {"sources": self._sources, "cells": self.cells})

    def write(self) -> None:
        lines = [f"| layout | ranks | {' | '.join(f'`{name}`' for name in ATTENTIONS)} |", "|---|---|" + "---|" * 3]
        for layout, degrees in WIDE_LAYOUTS.items():
            named = " x ".join(f"{name} {degree}" for name, degree in vars(degrees).items() if degree > 1)
            values = (self.cells[f"{layout} {attention}"] for attention in ATTENTIONS)
            texts = " | ".join(f"{value['loss']:.1e} / {value['grad_norm']:.1e}" for value in values)
            lines.append(f"| {named} | {degrees.world_size} | {texts} |")
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda _: "\n".join(lines) + "\n", text), encoding="utf-8")


@pytest.fixture(scope="module")
def table(request):
    table = Table(request.config.cache)
    yield table
    if len(table.cells) == len(WIDE_LAYOUTS) * len(ATTENTIONS):
        table.write()


@pytest.mark.every_layout
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("layout", WIDE_LAYOUTS)
def test_every_product(logged, table, layout, attention):
    """Each layout and attention under each mode of activation checkpointing, eager and compiled."""
    name = f"{layout} {attention}"
    if name in table.cells:
        pytest.skip("measured before, with the same sources")
    worst = {"loss": 0.0, "grad_norm": 0.0}
    for number, (ac, compiled) in enumerate(itertools.product(("none", "op", "2", "full"), (False, True))):
        window = attention != "sdpa" and number % 4 in (1, 2)  # every other case, eager and compiled by turns
        degrees = WIDE_LAYOUTS[layout]
        case = Case(degrees, attention, ac, compiled, window=window, rows=_rows(degrees))
        got = differences(logged(case), logged(case.reference))
        assert max(got.values()) < TOLERANCE, (str(case), got)
        worst = {name: max(value, got[name]) for name, value in worst.items()}
    table.add(name, worst)
