"""From what a step held and lost to the numbers that are logged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import Batch
from torchtitan_lite.data.loader import RowLoader
from torchtitan_lite.data.streaming.stream_loader import StreamLoader
from torchtitan_lite.distributed.mesh import Degrees, Place
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.observability.flops import peak_flops, step_flops
from torchtitan_lite.observability.logging import logger
from torchtitan_lite.observability.metrics import StepMetrics, device_memory
from torchtitan_lite.observability.throughput import Throughput
from torchtitan_lite.training.counts import Counts, StepLoss


class StepMeter:
    """Counts every step, and measures those that are logged.

    Args:
        adapter_params: parameters of adapters, which then are all that is trained; 0 without any.
        param_dtype: the type that the model computes in.
    """

    def __init__(
        self,
        config: Config,
        args: ModelArgs,
        adapter_params: int,
        loader: RowLoader | StreamLoader,
        place: Place,
        degrees: Degrees,
        device: torch.device,
        param_dtype: torch.dtype,
    ) -> None:
        self.args, self.adapter_params, self.loader = args, adapter_params, loader
        self.place, self.degrees, self.device = place, degrees, device
        self.rows, self.seq_len = loader.global_batch_size, config.training.seq_len
        peak, source = peak_flops(device, param_dtype)
        logger.info(f"MFU is held against {peak / 1e12:,.3g} TFLOP/s per device: {source}")
        self.throughput = Throughput(world_size=dist.get_world_size(), peak_flops=peak)

    def count(self, total: Counts, data_wait: float) -> None:
        """One step is done. ``data_wait``: seconds that it waited for its rows."""
        tokens = self.rows * self.seq_len
        self.throughput.add(
            tokens=tokens,
            targets=total.targets,
            rows=self.rows,
            documents=total.documents,
            document_pairs=total.document_pairs,
            causal_pairs=tokens * (self.seq_len + 1) // 2,
            padding=tokens - total.tokens,
            flops=step_flops(
                matmul_params=self.args.matmul_params + self.adapter_params,
                frozen_params=self.args.matmul_params if self.adapter_params else 0,
                attention_width=self.args.n_heads * self.args.head_dim,
                tokens=total.tokens,
                pairs=total.pairs,
            ),
            data_wait_s=data_wait,
        )

    def shares(self) -> dict[str, float]:
        """Of the tokens trained on so far, by source; empty if there is but one."""
        shares = self.loader.shares()
        return shares if len(shares) > 1 else {}

    def measure(
        self, loss_sum: Tensor, grad_norm: Tensor, batches: list[Batch], *, step: int, lr: float, tokens_seen: int
    ) -> StepMetrics:
        """Metrics of this step, the same on every rank (but for memory, which is this rank's)."""
        loss = StepLoss.over_ranks(loss_sum, batches, self.args, self.degrees, self.place)
        memory_gib, memory_fraction = device_memory(self.device)
        return StepMetrics(
            step=step,
            loss=loss.mean,
            max_loss=loss.max,
            attention_imbalance=loss.attention_imbalance,
            grad_norm=grad_norm.item(),
            lr=lr,
            tokens_seen=tokens_seen,
            memory_gib=memory_gib,
            memory_fraction=memory_fraction,
            shares=self.shares(),
            **self.throughput.summary(),
        )
