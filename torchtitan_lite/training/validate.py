"""The loss on data that is not trained on: token by token, whatever batch size, ranks and layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from torchtitan_lite.data.collator import Batch, num_targets
from torchtitan_lite.data.held_out import HeldOutRows
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.distributed.mesh import Degrees, Place


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found, the same on every rank."""

    step: int
    loss: float  # mean over all target tokens
    targets: int
    sources: dict[str, float]  # mean of each source's, where it has any

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def as_json(self) -> dict:
        fields = {"step": self.step, "loss": self.loss, "perplexity": self.perplexity, "targets": self.targets}
        return fields | ({"sources": self.sources} if len(self.sources) > 1 else {})

    def tags(self) -> dict[str, float]:
        """Under the names of TensorBoard."""
        found = {"validation_metrics/global_avg_loss": self.loss, "validation_metrics/perplexity": self.perplexity}
        if len(self.sources) > 1:
            found |= {f"validation_metrics/loss_of_{name}": loss for name, loss in self.sources.items()}
        return found

    def console_line(self) -> str:
        line = f"validation after step {self.step}:  loss: {self.loss:7.4f}  perplexity: {self.perplexity:,.3f}"
        if len(self.sources) > 1:
            line += "  " + "  ".join(f"{name}: {loss:.4f}" for name, loss in self.sources.items())
        return line


class Validator:
    """Measures a model on held-out rows.

    Args:
        rows: the same on every rank.
        model: all that this rank holds; dropout is off while it is measured.
        loss_sum: of a batch as :class:`HeldOutRows` gives it, on this rank: the sum of the token losses of its part of
            the tokens, 0 where the last pipeline stage is elsewhere.
        progress: called before each batch.
    """

    def __init__(
        self,
        rows: HeldOutRows,
        model: nn.Module,
        loss_sum: Callable[[Batch], Tensor],
        *,
        place: Place,
        degrees: Degrees,
        device: torch.device,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows, self.model, self.loss_sum, self.progress = rows, model, loss_sum, progress
        self.place, self.degrees, self.device = place, degrees, device

    @torch.no_grad()
    def run(self, step: int) -> ValidationResult:
        """All ranks call this together. Waits for the device."""
        # Of each source: the losses and targets of all ranks.
        sums = torch.zeros(len(self.rows.sources), 2, dtype=torch.float64, device=self.device)
        dp_rank, dp = self.place.data_parallel_rank(self.degrees), self.degrees.dp
        batches = tqdm(
            self.rows.batches(dp_rank, dp),
            total=self.rows.num_batches(dp),
            desc="Validating",
            leave=False,
            dynamic_ncols=True,
            disable=None if dist.get_rank() == 0 else True,  # None: tqdm looks whether stderr is a terminal
        )
        training = self.model.training
        self.model.eval()
        try:
            for source, batch in batches:
                self.progress()
                loss = self.loss_sum(batch)
                if self.place.tp == 0:
                    sums[source, 0] += loss
                if self.place.counts_rows:
                    sums[source, 1] += num_targets(batch)
        finally:
            self.model.train(training)
        dist.all_reduce(sums)
        losses, targets = sums.unbind(1)
        if not targets.sum():
            raise SourceError("validation: no row has a target token, so that there is no loss to measure")
        means = (losses / targets).tolist()
        return ValidationResult(
            step=step,
            loss=(losses.sum() / targets.sum()).item(),
            targets=int(targets.sum().item()),
            sources={name: mean for name, mean in zip(self.rows.names, means, strict=True) if mean == mean},
        )
