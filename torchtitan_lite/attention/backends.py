"""The attention back-ends by name, and what each supports.

A back-end has two steps. ``prepare(document_ids, spec)`` runs once per microbatch and distinct :class:`MaskSpec`, in
the model's forward but outside the compiled blocks. ``forward(q, k, v, state, spec)`` runs inside them. The spec comes
from the layer and not with the state so that a window is a constant of the compiled graph.

Queries may be a part of the row, over the keys of all of it: ``prepare`` is then told which part, as chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_lite.attention.masks import Chunks, MaskSpec

BLOCK_SIZE = 128
"""Tokens of a block of FlexAttention's mask; rows must be a multiple of it."""


class AttentionBackend(Protocol):
    """What every back-end offers; tensors are [batch, seq, heads, head_dim].

    With ``chunks``, ``document_ids``, k and v are those of whole rows, and q holds the queries of the chunks only.
    """

    def prepare(self, document_ids: Tensor, spec: MaskSpec, chunks: Chunks | None = None) -> Any: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: Any, spec: MaskSpec) -> Tensor: ...


def attend_chunks(q: Tensor, states: tuple[Any, ...], attend: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """One kernel call a chunk: ``attend(queries, state)`` for each chunk of q [batch, queries, heads, head_dim]."""
    parts = q.chunk(len(states), dim=1)
    return torch.cat([attend(part, state) for part, state in zip(parts, states, strict=True)], dim=1)


@dataclass(frozen=True)
class Support:
    """What a back-end (or one engine of it) can do."""

    documents: bool
    sliding_window: bool
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    context_parallel: bool = True


# One row a back-end, or an engine of sdpa_block_causal. Configuration checks read this table before a model is built.
SUPPORT: dict[tuple[str, str | None], Support] = {
    ("sdpa", None): Support(documents=False, sliding_window=False, devices=("cpu", "cuda")),
    ("sdpa_block_causal", "flash"): Support(True, True, devices=("cuda",), dtypes=("bfloat16",)),
    # Jagged SDPA has no causal rule for documents whose queries are fewer than their keys.
    ("sdpa_block_causal", "nested"): Support(True, False, devices=("cuda",), context_parallel=False),
    ("sdpa_block_causal", "cpu"): Support(True, True, devices=("cpu",)),
    ("flex_block_causal", None): Support(True, True, devices=("cpu", "cuda")),
}

ATTENTIONS = tuple(dict.fromkeys(attention for attention, _ in SUPPORT))


def masks_documents(attention: str) -> bool:
    """Whether documents packed into a row are kept apart."""
    return any(support.documents for (name, _), support in SUPPORT.items() if name == attention)


def resolve_engine(engine: str, device_type: str, dtype: torch.dtype) -> str:
    """The engine that ``auto`` stands for on a device: cpu there, else flash for 16-bit types and nested for fp32."""
    if engine != "auto":
        return engine
    if device_type != "cuda":
        return "cpu"
    return "flash" if dtype in (torch.float16, torch.bfloat16) else "nested"


def build_backend(attention: str, *, max_documents_per_row: int | None, varlen_engine: str) -> AttentionBackend:
    """The back-end of a flavor's attention. Raises ValueError for an unknown name."""
    # Imported here: the kernels bring torch's compiler along, seconds that reading the table above need not cost.
    from torchtitan_lite.attention.flex import FlexAttention
    from torchtitan_lite.attention.sdpa import SdpaAttention
    from torchtitan_lite.attention.varlen import VarlenAttention

    if attention == "sdpa":
        return SdpaAttention()
    if attention == "sdpa_block_causal":
        return VarlenAttention(max_documents_per_row, varlen_engine)
    if attention == "flex_block_causal":
        return FlexAttention()
    raise ValueError(f"unknown attention {attention!r}; there are {', '.join(ATTENTIONS)}")


def unsupported(
    attention: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    spec: MaskSpec,
    engine: str,
    context_parallel_degree: int = 1,
) -> list[str]:
    """Why this combination cannot run, one message a reason; empty if it can.

    ``engine`` is the setting model.varlen_engine, ``dtype`` the compute type of the run.
    """
    resolved = resolve_engine(engine, device_type, dtype) if attention == "sdpa_block_causal" else None
    support = SUPPORT[attention, resolved]
    name = attention if resolved is None else f"{attention} with model.varlen_engine={resolved}"
    dtype_name = str(dtype).removeprefix("torch.")

    windowed, split = spec.sliding_window is not None, context_parallel_degree > 1
    able = [  # what could stand in: it does at least what is asked of this one
        other if other_engine is None else f"{other} (model.varlen_engine={other_engine})"
        for (other, other_engine), s in SUPPORT.items()
        if device_type in s.devices
        and dtype_name in s.dtypes
        and s.documents >= support.documents
        and s.sliding_window >= windowed
        and s.context_parallel >= split
    ]
    alternatives = ", ".join(able) or "nothing here"

    problems = []
    if windowed and not support.sliding_window:
        problems.append(
            f"model.args.sliding_window={spec.sliding_window}: {name} has no sliding window; these have: {alternatives}"
        )
    if device_type not in support.devices:
        problems.append(f"{name} does not run on {device_type}; these do: {alternatives}")
    if dtype_name not in support.dtypes:
        problems.append(
            f"{name} computes in {' or '.join(support.dtypes)}, not in {dtype_name} (training.mixed_precision_param); "
            f"in {dtype_name} these do: {alternatives}"
        )
    if split and not support.context_parallel:
        problems.append(
            f"parallelism.context_parallel_degree={context_parallel_degree}: {name} cannot attend a part of a row's "
            f"queries; these can: {alternatives}"
        )
    return problems
