"""What is to be estimated: a run's configuration as it is to be built on paper, and the shapes that follow from it."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.config.checks import check_config
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.config.schema import ActivationCheckpoint, Config
from torchtitan_lite.data.packing.plan import resolved_max_documents
from torchtitan_lite.distributed.context_parallel import attended_pairs_by_rank
from torchtitan_lite.distributed.mesh import Degrees, resolve_degrees
from torchtitan_lite.distributed.pipeline_plan import plan_stages
from torchtitan_lite.distributed.precision import resolve_param_dtype
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.flavors import model_args


@dataclass(frozen=True)
class Plan:
    """A run of ``world_size`` ranks with rows of documents of ``document_length`` tokens (the last may be shorter).

    Attributes:
        config: as given. ``warnings``: what the checks had to say of it.
        args: of the model; of ``attention`` only the masks matter, kernels are the same on paper.
        microbatches: that each rank runs in a step, of ``rows`` rows.
    """

    config: Config
    args: ModelArgs
    world_size: int
    device_type: str
    degrees: Degrees
    document_length: int
    microbatches: int
    rows: int
    warnings: list[str]

    @classmethod
    def of(
        cls, config: Config, world_size: int, *, document_length: int | None = None, device_type: str = "cuda"
    ) -> Plan:
        """Raises ConfigError with all that would keep the run from starting, but for its data, tokenizer and folders,
        which an estimate does not need.
        """
        warnings = check_config(config, world_size=world_size, device_type=device_type, outside=False)
        seq_len = config.training.seq_len
        document_length = seq_len if document_length is None else document_length
        if not 1 <= document_length <= seq_len:
            raise ConfigError([f"--document-length={document_length}: must be from 1 to training.seq_len={seq_len}"])
        training, parallelism = config.training, config.parallelism
        degrees = resolve_degrees(parallelism, world_size)
        rows_per_step = training.local_batch_size
        if training.global_batch_size != -1:
            rows_per_step = training.global_batch_size // degrees.dp
        rows = training.local_batch_size if degrees.pp == 1 else parallelism.pipeline_parallel_microbatch_size
        args = dataclasses.replace(
            model_args(config.model.flavor, dataclasses.asdict(config.model.args), config.model.hf_assets_path),
            max_documents_per_row=resolved_max_documents(config),
        )
        return cls(
            config=config,
            args=args,
            world_size=world_size,
            device_type=device_type,
            degrees=degrees,
            document_length=document_length,
            microbatches=rows_per_step // rows,
            rows=rows,
            warnings=warnings,
        )

    @cached_property
    def param_dtype(self) -> torch.dtype:
        return resolve_param_dtype(self.config.training.mixed_precision_param, self.device_type)

    @property
    def schedule(self) -> str | None:
        """The pipeline's schedule; None without a pipeline."""
        return self.config.parallelism.pipeline_parallel_schedule if self.degrees.pp > 1 else None

    @cached_property
    def stages(self) -> list[range]:
        """The layers of each pipeline stage."""
        if self.schedule is None:
            return [range(self.args.n_layers)]
        return plan_stages(self.args.n_layers, self.config.parallelism)

    @property
    def local_tokens(self) -> int:
        """Of each row, on one context-parallel rank."""
        return self.config.training.seq_len // self.degrees.cp

    @property
    def hidden(self) -> tuple[int, int, int]:
        """Shape of what one pipeline stage sends to the next for a microbatch."""
        return self.rows, self.local_tokens // self.degrees.tp, self.args.dim

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.rows * self.degrees.dp * self.config.training.seq_len

    @cached_property
    def document_ids(self) -> Tensor:
        """int32 [rows, seq] of a microbatch."""
        seq = torch.arange(self.config.training.seq_len, dtype=torch.int32)
        return (seq // self.document_length).expand(self.rows, -1).contiguous()

    def pairs(self, layers: range) -> int:
        """(query, key) pairs of a microbatch, in one head, summed over layers, on the context-parallel rank that has
        most."""
        by_spec: dict[MaskSpec, int] = {}
        for spec in {self.args.mask_spec(layer) for layer in layers}:
            by_spec[spec] = max(attended_pairs_by_rank(self.document_ids, spec, self.degrees.cp))
        return sum(by_spec[self.args.mask_spec(layer)] for layer in layers)

    def checkpoint_settings(self) -> dict[str, ActivationCheckpoint]:
        """Those to compare, by name, the run's own among them."""
        settings = [*(ActivationCheckpoint(*s) for s in _SETTINGS), self.config.activation_checkpoint]
        return {_setting_name(setting): setting for setting in settings}

    @property
    def own_setting(self) -> str:
        """The name of the run's own setting of activation checkpointing."""
        return _setting_name(self.config.activation_checkpoint)


_SETTINGS = (("none", "op"), ("selective", "op"), ("selective", "2"), ("full", "op"))


def _setting_name(setting: ActivationCheckpoint) -> str:
    return f"{setting.mode} {setting.selective_ac_option}" if setting.mode == "selective" else setting.mode


def paper_config(plan: Plan) -> Config:
    """The configuration that models are built from on paper, on fake CPU tensors: types are those of the real device,
    and what would start a compiler or copy to the host is left out."""
    config = copy.deepcopy(plan.config)
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    config.training.mixed_precision_param = names[plan.param_dtype]
    config.training.enable_cpu_offload = False
    config.compile.enable = False
    config.parallelism.enable_async_tensor_parallel = False
    config.activation_checkpoint = ActivationCheckpoint("none")
    return config


def paper_args(plan: Plan) -> ModelArgs:
    """With the one attention that is counted: flash kernels keep the same, whatever drives them. On the CPU that is the
    project's own operator."""
    one_document = plan.args.attention != "sdpa_block_causal"
    return dataclasses.replace(
        plan.args,
        attention="sdpa_block_causal",
        varlen_engine="flash" if plan.device_type == "cuda" else "cpu",
        max_documents_per_row=1 if one_document else plan.args.max_documents_per_row,
    )
