"""Pipeline parallelism: a model cut into stages, run by a schedule of torch.distributed.pipelining.

``document_ids`` is split with the tokens, row by row, and given to every stage, which prepares the masks of each
microbatch for itself: no mask is ever made for other rows than those it is used on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan_lite.data.collator import Batch
from torchtitan_lite.distributed.pipeline_plan import SCHEDULES
from torchtitan_lite.models.llama3.model import Transformer

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def cut_stage(model: Transformer, layers: range, *, first: bool, last: bool) -> None:
    """Remove from a whole model, in place, what a stage does not hold: all layers but ``layers``, the embedding unless
    it is the ``first`` stage, final norm and output unless it is the ``last``. What stays keeps its name."""
    for name in list(model.layers):
        if int(name) not in layers:
            del model.layers[name]
    if not first:
        model.tok_embeddings = None
    if not last:
        model.norm = model.output = None


class Pipeline:
    """The stages of this rank, and the schedules that run them in step with those of the other ranks.

    Building one is a collective over ``group``.

    Args:
        stages: this rank's stages by their number in the whole pipeline, as FSDP roots on ``device``.
        num_stages: of the whole pipeline.
        group: the ranks of the pipeline.
        schedule: a name in :data:`~torchtitan_lite.distributed.pipeline_plan.SCHEDULES`.
        microbatch_size: rows of a microbatch.
        hidden_shape: [microbatch, local seq, dim], of what this rank sends on for a microbatch.
        hidden_dtype: the type that the model computes in.
        loss_fn: sum of token losses from (hidden states, output weight, labels).
    """

    def __init__(
        self,
        stages: Mapping[int, Transformer],
        *,
        num_stages: int,
        group: dist.ProcessGroup,
        schedule: str,
        microbatch_size: int,
        hidden_shape: tuple[int, int, int],
        hidden_dtype: torch.dtype,
        device: torch.device,
        loss_fn: LossFunction,
    ) -> None:
        self.stages = dict(sorted(stages.items()))
        self.num_stages, self.group, self.schedule, self.device = num_stages, group, schedule, device
        self.microbatch_size, self.loss_fn = microbatch_size, loss_fn
        self.hidden = torch.empty(hidden_shape, dtype=hidden_dtype, device="meta", requires_grad=True)
        self._schedules = {}  # by (name, rows): its buffers fit one number of microbatches
        self._losses: list[Tensor] = []  # of the microbatches of the running step, undivided
        self._global_targets = 1
        if SCHEDULES[schedule].splits_backward:
            # A split backward goes through a part of the graph twice. Compiled code (FlexAttention on CUDA is always
            # compiled) would have given its saved tensors away the first time.
            functorch_config.donated_buffer = False
        # NCCL sets a group's communicator up at its first use and needs all of its ranks for that: here, and not in the
        # middle of a schedule.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the last stage, and with it the loss."""
        return self.num_stages - 1 in self.stages

    def forward_backward(self, batch: Batch, global_targets: int) -> Tensor:
        """Run all rows of an optimizer step, adding the gradients of (sum of token losses / ``global_targets``).

        Returns this rank's sum of token losses, fp32: zero where there is no last stage.

        batch: on this device. ``rows`` is a multiple of the microbatch size, the same on all ranks of the pipeline.
        """
        self._global_targets = global_targets
        return self._run(self._prepared(self.schedule, batch).step, batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The sum of token losses of ``batch``, without gradients; zero where there is no last stage.

        Any multiple of the microbatch size will do as the number of rows, whatever the schedule asks for.
        """
        schedule = SCHEDULES[self.schedule].for_evaluation
        loss = self._run(self._prepared(schedule, batch).eval, batch)
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return loss

    def _run(self, step: Callable[..., None], batch: Batch) -> Tensor:
        tokens, labels, document_ids, positions = batch
        self._losses.clear()
        try:
            # Only the first stage looks at tokens, and only the last at labels. As ``target`` they are a formality: the
            # model itself computes the loss, where the output weight is gathered.
            step(
                *((tokens,) if 0 in self.stages else ()),
                document_ids=document_ids,
                positions=positions,
                labels=labels,
                target=labels,
                return_outputs=False,
            )
        except BaseException:
            # The others wait for what this rank was to send, and it may wait for its own messages on the way out. NCCL
            # drops them all; gloo does nothing here, and its peers learn of it when this process ends.
            dist.distributed_c10d._abort_process_group()
            raise
        if not self._losses:
            return torch.zeros((), device=self.device)
        return torch.stack(self._losses).sum()

    def _divided(self, loss: Tensor, _: Tensor) -> Tensor:
        self._losses.append(loss.detach())
        return loss / self._global_targets

    def _prepared(self, schedule: str, batch: Batch):
        """The schedule for as many rows as ``batch`` has."""
        rows = batch.tokens.shape[0]
        if rows % self.microbatch_size:
            raise ValueError(
                f"{rows} rows are no multiple of parallelism.pipeline_parallel_microbatch_size={self.microbatch_size}"
            )
        if (schedule, rows) not in self._schedules:
            tokens = torch.empty_like(batch.tokens[: self.microbatch_size], device="meta")
            stages = [
                # Shapes are given, or torch would run the model an extra time to find them.
                _Stage(
                    stage,
                    number,
                    self.num_stages,
                    self.device,
                    input_args=tokens if number == 0 else self.hidden,
                    output_args=self.hidden[0, 0, 0].float() if number == self.num_stages - 1 else self.hidden,
                    group=self.group,
                )
                for number, stage in self.stages.items()
            ]
            for stage in stages:
                stage.loss_fn = self.loss_fn
            kind = get_schedule_class(schedule)
            self._schedules[schedule, rows] = kind(
                stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
                rows // self.microbatch_size,
                loss_fn=self._divided,
                scale_grads=False,
            )
        return self._schedules[schedule, rows]


class _Stage(PipelineStage):
    """torch's stage, with the loss, and without what schedules ask of it for a backward when they only evaluate."""

    loss_fn: LossFunction

    def forward_maybe_with_nosync(self, *args, **kwargs):
        # Not one of the schedule's arguments: torch 2.11 takes them all for tensors when it splits a backward.
        return super().forward_maybe_with_nosync(*args, loss_fn=self.loss_fn, **kwargs)

    def _get_init_p2p_neighbors_ops(self):
        # The group is warm. torch 2.11 would send to this rank itself where it holds neighbours, which gloo cannot.
        return []

    def get_local_bwd_output(self, mb_index):
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor):
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)
