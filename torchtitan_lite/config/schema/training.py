"""The loop: batches, optimizer, schedule, and what saves memory or time in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class OptimizerGroup:
    """Parameters that are trained apart from the rest, an ``[[optimizer.groups]]`` table."""

    pattern: str = ""
    """Regular expression found somewhere in the names, such as ^tok_embeddings or layers.[01].attention; a parameter
    belongs to the first table that matches."""

    lr_factor: float = 1.0
    """Times the learning rate of the step. 0: they stay as they are, though gradients and state are kept for them."""

    weight_decay: float | None = None
    """Unset: as optimizer.no_decay and optimizer.weight_decay have it."""


@dataclass
class Optimizer:
    name: Literal["AdamW", "Adam", "Muon", "AdamW8bit"] = "AdamW"
    """Algorithm. Muon: for the matrices of the layers, and AdamW for embedding, norms and output. AdamW8bit: with both
    moments in 8 bits (needs the package torchao)."""

    lr: float = 8e-4
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Term added to the denominator."""

    weight_decay: float = 0.1
    """Weight decay, of all parameters that no_decay does not name."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's kernels runs the update. AdamW8bit: fused is compiled (a minute or more at the first step),
    for-loop runs operator by operator. Muon has one of its own; this is for the AdamW beside it."""

    no_decay: list[str] = field(default_factory=lambda: ["norm"])
    """Regular expressions; parameters in whose names one is found have no weight decay. Empty: all have it."""

    groups: list[OptimizerGroup] = field(default_factory=list)
    """Parameters with a learning rate or weight decay of their own, an [[optimizer.groups]] table each."""

    muon_momentum: float = 0.95
    """Muon: decay of the momentum (Nesterov's)."""

    muon_ns_steps: int = 5
    """Muon: Newton-Schulz iterations that orthogonalise an update."""

    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: size of a matrix's update. match_rms_adamw: lr x 0.2 sqrt(larger side), as large as AdamW's usually is, so
    that lr and weight_decay of AdamW serve; original: lr x sqrt(rows / columns), at least lr."""


@dataclass
class LRScheduler:
    warmup_steps: int = 200
    """Steps of linear warm-up from lr / warmup_steps to lr."""

    decay_ratio: float | None = None
    """Share of training.steps spent decaying at the end. Unset: all steps after the warm-up; 0: none."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """Floor of the decay, as a share of lr."""


@dataclass
class Training:
    dataset: str = "pydocs"
    """Registered data set (pydocs: documentation and standard library of the running CPython); a Hugging Face data set,
    OWNER/NAME on the hub or a local folder laid out like one; or the format of the files in dataset_path: json, text,
    parquet, arrow."""

    dataset_path: str | None = None
    """Local file, folder or glob to read instead of a registered data set."""

    local_batch_size: int = 8
    """Rows per device and forward pass."""

    global_batch_size: int = -1
    """Rows per optimizer step over all devices; a multiple of local_batch_size x data-parallel degree (the rest is
    gradient accumulation). -1: no accumulation."""

    seq_len: int = 2048
    """Tokens per row."""

    max_norm: float = 1.0
    """Gradients are clipped to this global norm. 0: no clipping."""

    steps: int = 1000
    """Optimizer steps of the run, counted from the very start (a resumed run ends at the same step)."""

    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of parameters and activations in forward and backward; the master weights are always fp32. auto: bfloat16,
    but float32 on a CPU without bf16 instructions (there bf16 is slower)."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced over data-parallel ranks."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory and update them there; the GPU holds what a block
    needs while it runs."""

    gc_freq: int = 50
    """Python's garbage collector runs every gc_freq steps, at the same step on every rank, and not in between."""

    seed: int = 42
    """Seed of initial weights, data order and any randomness of a step."""

    deterministic: bool = False
    """Use only deterministic kernels (slower): bitwise-equal runs on the same machine and layout."""


@dataclass
class Lora:
    rank: int = 0
    """Rank of the adapters; only they are trained. 0: no adapters, all weights are trained."""

    alpha: float = 16.0
    """The adapters' output counts alpha / rank times."""

    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""

    target_modules: list[str] = field(default_factory=lambda: ["wq", "wk", "wv", "wo", "w1", "w2", "w3"])
    """Layers with an adapter: wq, wk, wv, wo of attention, w1, w2, w3 of the feed-forward; Hugging Face's names q_proj,
    k_proj, v_proj, o_proj, gate_proj, down_proj, up_proj mean the same."""

    rslora: bool = False
    """Rank-stabilised: the adapters' output counts alpha / sqrt(rank) times."""

    quantize_base: Literal["none", "nf4"] = "none"
    """nf4 (QLoRA): keep the frozen matrices of the blocks in 4-bit NormalFloat, whole on every rank that has the layer.
    Needs torchao."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "selective"
    """What the backward pass recomputes: nothing, what selective_ac_option says, or whole blocks."""

    selective_ac_option: str = "op"
    """op: save attention and every second matrix product, recompute the rest. A number n: recompute each n-th block."""


@dataclass
class Compile:
    enable: bool = False
    """Compile with torch.compile."""

    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What to compile: each transformer block (full graph), the inner part of the loss."""

    backend: str = "inductor"
    """Back-end of torch.compile."""
