"""Every setting of a run: one dataclass a section, one docstring a field.

The docstring under a field is its ``--help`` text. The names are torchtitan's classic ones; a key that is accepted has
an effect. Files and command-line overrides are merged by :mod:`torchtitan_lite.config.load`; rules that span several
fields live in :mod:`torchtitan_lite.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Job:
    config_file: str | None = None
    """TOML file to read before the command line is applied."""

    dump_folder: str = "./outputs"
    """Folder for all that the run leaves behind: resolved config, metrics, TensorBoard files, checkpoints."""

    description: str = "torchtitan_lite run"
    """A line about the run, printed at its start and kept in the resolved config."""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Write a torch.profiler trace (Chrome format) every profile_freq steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for the traces, inside job.dump_folder."""

    profile_freq: int = 10
    """Steps between two traces. Each trace covers the last step of its interval, after three warm-up steps."""


@dataclass
class Metrics:
    log_freq: int = 10
    """Steps between two log lines (and metrics.jsonl and TensorBoard entries). The first and the last step are always
    logged."""

    enable_tensorboard: bool = False
    """Write TensorBoard events."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard events, inside job.dump_folder."""

    enable_wandb: bool = False
    """Send metrics to Weights & Biases (needs the wandb extra; WANDB_PROJECT and WANDB_RUN_NAME name the run)."""


@dataclass
class ModelArgsOverrides:
    """Single fields of the flavor, replaced. Unset ones keep the flavor's value."""

    dim: int | None = None
    """Width of the residual stream."""

    n_layers: int | None = None
    """Number of transformer blocks."""

    n_heads: int | None = None
    """Number of query heads; dim must be a multiple of it."""

    n_kv_heads: int | None = None
    """Number of key/value heads; n_heads must be a multiple of it."""

    ffn_hidden_dim: int | None = None
    """Width of the SwiGLU feed-forward layer."""

    vocab_size: int | None = None
    """Rows of the embedding table; may exceed the tokenizer's size (padded vocabulary)."""

    max_seq_len: int | None = None
    """Longest position the RoPE settings are meant for; training.seq_len may not exceed it."""

    rope_theta: float | None = None
    """Base of the rotary frequencies."""

    norm_eps: float | None = None
    """Epsilon of every RMSNorm."""

    tie_embeddings: bool | None = None
    """Use the embedding table as the output projection too."""

    sliding_window: int | None = None
    """Tokens that a token of a sliding-window layer attends, itself included. Needs a block-causal attention."""

    sliding_window_pattern: list[bool] | None = None
    """Which layers slide, repeated over the depth: [true, false] = every other layer, starting with the first.
    Unset with a sliding_window: all of them."""


@dataclass
class Model:
    name: Literal["llama3"] = "llama3"
    """Model family."""

    flavor: str = "debugmodel"
    """SIZE, SIZE_ATTENTION or ATTENTION: sizes debugmodel, 1B, 3B, 8B, 70B, 405B; attentions sdpa, sdpa_block_causal,
    flex_block_causal. A size alone means plain sdpa; an attention alone keeps the size of the file."""

    hf_assets_path: str = "debug"
    """Folder with a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json), or `debug` for the byte-level BPE
    of 2,048 entries that comes with the package."""

    varlen_engine: Literal["auto", "flash", "nested", "cpu"] = "auto"
    """What runs sdpa_block_causal: flash = torch.nn.attention.varlen (CUDA, bfloat16), nested = NestedTensor SDPA
    (CUDA), cpu = the project's CPU operator. auto takes cpu on the CPU, and on CUDA flash, or nested for float32."""

    args: ModelArgsOverrides = field(default_factory=ModelArgsOverrides)


@dataclass
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimizer class of torch.optim."""

    lr: float = 8e-4
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Term added to the denominator."""

    weight_decay: float = 0.1
    """Weight decay, applied to every parameter."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's kernels runs the update."""


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
class MixtureSource:
    """One of several sources, a ``[[data.mix]]`` table."""

    dataset: str = "pydocs"
    """As training.dataset."""

    dataset_path: str | None = None
    """As training.dataset_path."""

    name: str | None = None
    """Name in logs and metrics. Unset: taken from dataset_path or dataset."""

    weight: float = 1.0
    """Share of the tokens trained on, relative to the other weights."""

    epochs: int = 0
    """Passes over this source before it drops out of the mixture, reshuffled each time. 0: no end."""

    subset: str | None = None
    """As data.subset, which holds where this is unset; likewise split, revision, text_field, template."""

    split: str | None = None
    """As data.split."""

    revision: str | None = None
    """As data.revision."""

    text_field: str | None = None
    """As data.text_field."""

    template: str | None = None
    """As data.template."""


@dataclass
class Data:
    text_field: str = "text"
    """Field that holds the document."""

    template: str | None = None
    """Text of a document made from several fields, as in "{title}\\n\\n{body}"; replaces text_field. {{ and }} stand
    for braces."""

    subset: str | None = None
    """Subset (its configuration name) of a Hugging Face data set."""

    split: str = "train"
    """Split of a Hugging Face data set; slices such as train[:1%] work unless streaming."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face data set on the hub."""

    mix: list[MixtureSource] = field(default_factory=list)
    """Several sources instead of training.dataset, a [[data.mix]] table each; on the command line as one TOML array,
    --data.mix='[{dataset="pydocs", weight=1}, ...]'."""

    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that cannot be read or has no text: stop and name it, or leave it out and count it."""

    packing: Literal["best_fit", "greedy", "split", "none"] = "best_fit"
    """Which documents share a row. best_fit: those that fill it best; greedy: the next ones that fit; split: documents
    end to end, cut at each row's end; none: one document a row."""

    oversize: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a document longer than a row: pieces, its beginning, nothing, or an error."""

    packing_window: int = 100_000
    """Documents among which best_fit chooses, and which greedy and split shuffle."""

    max_documents_per_row: int = 0
    """Most documents packed into one row; sizes the offset table of the variable-length kernel. 0: seq_len / 32, but at
    least 16."""

    streaming: bool = False
    """Tokenise while training, for sets too large to do so ahead; ties a run to its number of data-parallel ranks."""

    streaming_buffer: int = 1024
    """Documents that each rank holds while streaming, for best_fit to choose among."""

    num_workers: int = 0
    """Loader processes per rank. 0: the training process assembles rows (streaming: tokenises) itself."""

    prefetch_factor: int = 2
    """Microbatches (streaming: chunks of documents) that each loader process prepares ahead."""

    num_proc: int = 1
    """Processes that read and tokenise the data set, once, at the first start."""

    cache_dir: str | None = None
    """Folder for tokenised data. Unset: the data sets library's own (HF_DATASETS_CACHE)."""


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP): each is sharded over data_parallel_shard_degree ranks and reads rows of its
    own; gradients are summed over all."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP2). -1: all that the other degrees
    leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a block's gathered parameters are freed after its forward and gathered again for its backward. default:
    yes, but not under pipeline parallelism, which would gather them for each microbatch."""

    fsdp_gradient_reduction: Literal["microbatch", "step"] = "microbatch"
    """When gradients are reduced under accumulation. microbatch: after each backward, so that only shards are kept
    (copies of HSDP are summed once a step all the same); step: after the last, which saves communication and keeps
    whole gradients meanwhile. Pipeline schedules always reduce once a step."""

    tensor_parallel_degree: int = 1
    """Ranks that split each layer's heads and hidden units, the vocabulary, and, between layers, the sequence."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matrix products (CUDA, with compile.enable)."""

    pipeline_parallel_degree: int = 1
    """Ranks that split the layers."""

    pipeline_parallel_schedule: Literal[
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """Order of the microbatches' forwards and backwards, as torch.distributed.pipelining names them. 1F1B and GPipe
    have one stage a rank, the others two or more."""

    pipeline_parallel_microbatch_size: int = 1
    """Rows of one microbatch of the pipeline."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers of a stage, the embedding and the output counted by the two settings below. Unset: one stage a rank, two
    for schedules that loop."""

    pipeline_parallel_first_stage_less_layers: int = 1
    """How many layers the embedding counts as when layers are dealt out to stages."""

    pipeline_parallel_last_stage_less_layers: int = 1
    """How many layers the output projection and the loss count as when layers are dealt out to stages."""

    context_parallel_degree: int = 1
    """Ranks that split the tokens of each row."""


@dataclass
class Checkpoint:
    enable: bool = False
    """Save checkpoints and resume from the newest complete one."""

    folder: str = "checkpoint"
    """Folder for checkpoints, inside job.dump_folder; each lies in step-N."""

    interval: int = 500
    """Steps between two checkpoints. The last step is always saved."""

    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write in the background while training goes on."""

    keep_latest_k: int = 10
    """How many checkpoints to keep, at least 2 (one may be being written). 0: all."""

    load_step: int = -1
    """Step to resume from. -1: the newest complete one."""

    initial_load_path: str | None = None
    """A checkpoint (a step-N folder of another run) whose weights start this run when its own folder is empty."""


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


@dataclass
class Comm:
    init_timeout_seconds: int = 600
    """Time limit of a collective up to the end of the first step, which compiles and warms up."""

    train_timeout_seconds: int = 600
    """Time limit of a collective from the second step on."""

    data_timeout_seconds: int = 14_400
    """How long a process waits for the one that reads and tokenises the data for all."""


@dataclass
class Config:
    """A TOML-driven trainer for Llama 3. Values come from the command line, then the TOML file, then the defaults."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
