"""What a step holds and loses: the sums over ranks that its gradients and metrics are made of.

Ranks that differ in pp, cp or tp alone work on the same rows, so that each sum takes a number from one of them only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.data.collator import PADDING_ID, Batch, num_targets
from torchtitan_lite.distributed.context_parallel import attended_pairs_by_rank
from torchtitan_lite.distributed.mesh import Degrees, Place
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.observability.flops import attended_pairs


@dataclass(frozen=True)
class Counts:
    """What the batches of one step hold, counted on the CPU; sums over the microbatches, and over ranks."""

    targets: int
    tokens: int  # without padding
    documents: int
    document_pairs: int  # (query, key) pairs within a document
    pairs: int  # pairs attended, summed over layers

    @classmethod
    def of(cls, batches: list[Batch], args: ModelArgs) -> Counts:
        specs = args.mask_specs
        within = MaskSpec(document=True)
        pairs = {spec: sum(attended_pairs(batch.document_ids, spec) for batch in batches) for spec in {*specs, within}}
        return cls(
            targets=sum(num_targets(batch) for batch in batches),
            tokens=sum(int((batch.document_ids != PADDING_ID).sum()) for batch in batches),
            documents=sum(int((batch.document_ids.amax(dim=1) + 1).sum()) for batch in batches),
            document_pairs=pairs[within],
            pairs=sum(pairs[spec] for spec in specs),
        )

    def over_ranks(self, place: Place, degrees: Degrees) -> Counts:
        """The sum over all data-parallel ranks; through gloo, so that a GPU is not waited for.

        Raises RuntimeError where ranks that share rows were seen to have read different ones.
        """
        own = torch.tensor(astuple(self))
        sums = torch.stack((own * place.counts_rows, own))
        dist.all_reduce(sums)
        if not torch.equal(sums[0] * (degrees.world_size // degrees.dp), sums[1]):
            raise RuntimeError(
                "Ranks that share rows (they differ in pp, cp or tp alone) have read different ones. Do all nodes read "
                "the same files with the same software?"
            )
        return Counts(*sums[0].tolist())


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step, and how evenly its attention fell on the ranks."""

    mean: float  # over the targets of all ranks
    max: float  # largest mean of a data-parallel rank; one without targets has lost nothing
    attention_imbalance: float  # attended pairs of the rank that has most, over the mean of all ranks

    @classmethod
    def over_ranks(
        cls, loss_sum: Tensor, batches: list[Batch], args: ModelArgs, degrees: Degrees, place: Place
    ) -> StepLoss:
        """The same on every rank, whichever of them has the last pipeline stage. Waits for the device.

        Args:
            loss_sum: scalar, the token losses that this rank has summed: those of its own tokens under context
                parallelism, 0 where the last stage is elsewhere.
            batches: the step's whole rows, of this rank's data-parallel rank.
        """
        # Of each data-parallel rank: its loss, its targets, and the pairs of each of its context-parallel ranks.
        table = torch.zeros(degrees.dp, 2 + degrees.cp, dtype=torch.float64, device=loss_sum.device)
        row = table[place.data_parallel_rank(degrees)]
        if place.tp == 0:
            row[0] = loss_sum
        if place.counts_rows:
            row[1] = sum(num_targets(batch) for batch in batches)
            for spec, layers in Counter(args.mask_specs).items():
                for batch in batches:
                    pairs = attended_pairs_by_rank(batch.document_ids, spec, degrees.cp)
                    row[2:] += layers * torch.tensor(pairs, dtype=row.dtype, device=row.device)
        dist.all_reduce(table)
        losses, targets, pairs = table[:, 0], table[:, 1], table[:, 2:]
        return cls(
            mean=(losses.sum() / targets.sum()).item(),
            max=(losses / targets.clamp(min=1)).max().item(),
            attention_imbalance=(pairs.max() / pairs.mean()).item(),
        )
