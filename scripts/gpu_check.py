"""Check on a GPU what cannot be checked without one; one command, a table of results.

    python scripts/gpu_check.py --out docs/gpu_check.md

Every attention engine is held against naive attention in fp32: outputs, gradients, isolation of documents, sliding
windows, grouped heads, compiled without graph breaks or recompilation, no wait for the device in `prepare`; all but
isolation also with the queries of context-parallel ranks, one after another. Then the debug model is trained for some
steps under each attention, with each optimizer, with adapters beside plain and quantised weights and with samples of
text, eager and compiled. Exit code 1 if a check fails.
`--device cpu` runs what a CPU can do of it, to try the script itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchtitan_lite.attention.backends import build_backend, unsupported
from torchtitan_lite.attention.masks import Chunks, MaskSpec, dense_mask
from torchtitan_lite.distributed.context_parallel import head_tail_chunks

ROOT = Path(__file__).resolve().parent.parent
HEADS, KV_HEADS, HEAD_DIM, SEQ, MAX_DOCUMENTS = 8, 2, 64, 1024, 32
CP_DEGREE = 4
# Largest error allowed: rounding of the type, some times over.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """An attention, an engine of it, a window and a compute type."""

    attention: str
    engine: str
    window: int | None
    dtype: torch.dtype

    def __str__(self) -> str:
        engine = f" ({self.engine})" if self.attention == "sdpa_block_causal" else ""
        return f"{self.attention}{engine}, window {self.window}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def spec(self) -> MaskSpec:
        return MaskSpec(document=self.attention != "sdpa", sliding_window=self.window)

    def backend(self):
        return build_backend(self.attention, max_documents_per_row=MAX_DOCUMENTS, varlen_engine=self.engine)


def cases(device: str) -> Iterator[Case]:
    """Every combination that the table of supported ones allows on this device."""
    attentions = [("sdpa", "auto"), ("flex_block_causal", "auto")]
    attentions += [("sdpa_block_causal", engine) for engine in ("flash", "nested", "cpu")]
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    for (attention, engine), window, dtype in itertools.product(attentions, (None, 1, 100, 4096), dtypes):
        case = Case(attention, engine, window, dtype)
        if not unsupported(attention, device_type=device, dtype=dtype, spec=case.spec, engine=engine):
            yield case


def random_documents(batch: int, seed: int, device: str) -> Tensor:
    """document_ids [batch, SEQ]: up to MAX_DOCUMENTS of any length, one-token documents and padding among them; the
    first row is one document."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(batch, SEQ, dtype=torch.int32)
    for row in range(1, batch):
        cuts = torch.randperm(SEQ - 2, generator=generator)[: 1 + seed % (MAX_DOCUMENTS - 2)] + 1
        starts = torch.zeros(SEQ, dtype=torch.int32)
        starts[cuts] = 1
        ids[row] = starts.cumsum(0)
        ids[row, SEQ - 1 - seed % 50 :] = -1
    return ids.to(device)


def inputs(batch: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, SEQ, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention from its definition, in fp32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value wanted where that is above 1 (with a window of one token the
    gradients of q and k are zero)."""
    return ((got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1)).item()


def shares_rows(case: Case, device: str) -> bool:
    settings = {"device_type": device, "dtype": case.dtype, "spec": case.spec, "engine": case.engine}
    return not unsupported(case.attention, **settings, context_parallel_degree=CP_DEGREE)


def attend(case: Case, ids: Tensor, q: Tensor, k: Tensor, v: Tensor, degree: int) -> Tensor:
    """Attention of whole rows, or of the chunks of each of ``degree`` ranks, put together again."""
    backend, spec = case.backend(), case.spec
    if degree == 1:
        return backend.forward(q, k, v, backend.prepare(ids, spec), spec)
    outs = {}
    for rank in range(degree):
        chunks = head_tail_chunks(SEQ, rank, degree)
        own = torch.cat([q[:, lo:hi] for lo, hi in chunks], dim=1)
        out = backend.forward(own, k, v, backend.prepare(ids, spec, chunks), spec)
        outs.update(zip(chunks, out.chunk(2, dim=1), strict=True))
    return torch.cat([outs[chunk] for chunk in sorted(outs)], dim=1)


def check_against_naive(case: Case, device: str, degree: int = 1) -> str:
    """Outputs and gradients."""
    ids, (q, k, v) = random_documents(3, 7, device), inputs(3, case.dtype, device)
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(device, case.dtype)
    out = attend(case, ids, q, k, v, degree)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    reference = naive(q, k, v, dense_mask(ids, case.spec))
    wanted = torch.autograd.grad(reference, (q, k, v), upstream.float())
    errors = [error_of(out, reference), *(error_of(g, w) for g, w in zip(grads, wanted, strict=True))]
    text = "errors of out, dq, dk, dv: " + ", ".join(f"{e:.1e}" for e in errors)
    assert max(errors) <= TOLERANCE[case.dtype], text
    return text


def check_context_parallel(case: Case, device: str) -> str:
    """Outputs and gradients of all ranks' queries."""
    return check_against_naive(case, device, CP_DEGREE) if shares_rows(case, device) else "not supported"


def check_isolation(case: Case, device: str) -> str:
    """Another document's values change nothing, not by a bit; under plain sdpa they do."""
    ids = torch.zeros(1, SEQ, dtype=torch.int32, device=device)
    ids[:, SEQ // 3 :] = 1
    backend = case.backend()
    state = backend.prepare(ids, case.spec)
    outs = []
    for seed in (0, 1):
        q, k, v = (x.detach() for x in inputs(1, case.dtype, device))
        other = [x.detach() for x in inputs(1, case.dtype, device, seed=seed)]
        for x, y in zip((q, k, v), other, strict=True):
            x[:, : SEQ // 3] = y[:, : SEQ // 3]
        outs.append(backend.forward(q, k, v, state, case.spec)[:, SEQ // 3 :])
    equal = torch.equal(*outs)
    assert equal == case.spec.document, f"equal: {equal}"
    return "equal bit for bit" if equal else "differ, as they must"


def check_compiled_context_parallel(case: Case, device: str) -> str:
    """The same for the queries of the second rank."""
    if not shares_rows(case, device):
        return "not supported"
    return check_compiled(case, device, head_tail_chunks(SEQ, 1, CP_DEGREE))


def check_compiled(case: Case, device: str, chunks: Chunks | None = None) -> str:
    """One full graph for ten batches with other documents each, forward and backward."""
    torch._dynamo.reset()
    backend, spec = case.backend(), case.spec
    own = torch.cat([torch.arange(lo, hi) for lo, hi in chunks or ((0, SEQ),)]).to(device)
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def block(q, k, v, state):
        return backend.forward(q * 1.0, k, v, state, spec)

    for seed in range(10):
        ids, (q, k, v) = random_documents(2, 3 * seed, device), inputs(2, case.dtype, device, seed)
        out = block(q[:, own], k, v, backend.prepare(ids, spec, chunks))
        out.float().square().sum().backward()
        error = error_of(out, naive(q, k, v, dense_mask(ids, spec))[:, own])
        assert error <= TOLERANCE[case.dtype], f"batch {seed}: error {error:.1e}"
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"
    return "one graph"


def check_no_sync(case: Case, device: str) -> str:
    """`prepare` never waits for the device."""
    if device != "cuda":
        return "needs CUDA"
    ids, backend = random_documents(3, 7, device), case.backend()
    masks = [None, head_tail_chunks(SEQ, 1, CP_DEGREE)] if shares_rows(case, device) else [None]
    for chunks in masks:
        backend.prepare(ids, case.spec, chunks)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for chunks in masks:
            backend.prepare(ids, case.spec, chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no wait"


# What the debug model is trained with, and whose losses those must be close to: those of another entry's eager run.
_ADAPTERS = ("--lora.rank=8", "--optimizer.lr=0.01")
TRAININGS: dict[str, tuple[tuple[str, ...], str]] = {
    "sdpa_block_causal": (("--model.flavor=debugmodel_sdpa_block_causal",), "sdpa_block_causal"),
    "flex_block_causal": (("--model.flavor=debugmodel_flex_block_causal",), "sdpa_block_causal"),
    "sdpa": (("--model.flavor=debugmodel",), "sdpa_block_causal"),
    "Muon": (("--optimizer.name=Muon",), "Muon"),
    "AdamW8bit": (("--optimizer.name=AdamW8bit",), "sdpa_block_causal"),
    "adapters": (_ADAPTERS, "adapters"),
    "adapters of quantised weights": ((*_ADAPTERS, "--lora.quantize_base=nf4"), "adapters"),
    "samples": (("--samples.prompts=The ", "--samples.freq=4", "--samples.temperature=1.0"), "sdpa_block_causal"),
}


def check_training(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Eight steps of the debug model, eager and compiled."""
    losses: dict[str, list[float]] = {}

    def run(name: str, reference: str, *arguments: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            command = [str(ROOT / "run_train.sh"), f"--job.dump_folder={folder}", "--training.steps=8", *arguments]
            environment = {**os.environ, "PYTHON": sys.executable, "NGPU": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            entries = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
        losses[name] = [entry["loss"] for entry in entries]
        difference = max(abs(a / b - 1) for a, b in zip(losses[name], losses[reference], strict=True))
        assert losses[name][-1] < losses[name][0], "the loss does not fall"
        assert difference < 2e-2, f"losses {difference:.1e} from those of {reference}"
        return (
            f"last loss {losses[name][-1]:.4f}, {difference:.1e} from {reference}, {entries[-1]['memory_gib']:.2f} GiB"
        )

    common = ("--metrics.log_freq=1", "--lr_scheduler.warmup_steps=2")
    for what, (settings, reference) in TRAININGS.items():
        for compiled in ((), ("--compile.enable",)):
            if device == "cpu" and compiled:
                continue
            name = what + (" compiled" if compiled else "")
            arguments = (*common, *settings, *compiled)
            yield f"train {name}", lambda name=name, ref=reference, args=arguments: run(name, ref, *args)


def all_checks(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    for case in cases(device):
        for check in (
            check_against_naive,
            check_context_parallel,
            check_isolation,
            check_compiled,
            check_compiled_context_parallel,
            check_no_sync,
        ):
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield f"{name}: {case}", lambda check=check, case=case: check(case, device)
    yield from check_training(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("No GPU is visible to torch. --device cpu runs what can be run without.")

    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    lines = [f"# {machine}, torch {torch.__version__}", "", "| check | result | |", "|---|---|---|"]
    failed = 0
    for name, check in all_checks(arguments.device):
        try:
            verdict, detail = "ok", check()
        except Exception as error:
            verdict, detail = "FAILED", f"{type(error).__name__}: {error}"
            traceback.print_exc()
            failed += 1
        print(f"{verdict:<7} {name}: {detail}", flush=True)
        lines.append(f"| {name} | {verdict} | {' '.join(detail.split())[:300]} |")
    print(f"{len(lines) - 4 - failed} passed, {failed} failed")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
