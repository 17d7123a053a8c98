"""What the batches of a step hold: the sums that its loss and its metrics are divided by."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.data.collator import PADDING_ID, Batch, num_targets
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

    def over_ranks(self) -> Counts:
        """The sum over all data-parallel ranks; through gloo, so that a GPU is not waited for."""
        counts = torch.tensor(astuple(self))
        dist.all_reduce(counts)
        return Counts(*counts.tolist())
