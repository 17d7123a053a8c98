"""How fast the run goes: counts of each step in, rates since the last log line out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable


class Throughput:
    """Rates over the interval since it was made or last asked for its :meth:`summary`.

    All counts are totals over the whole job, each token counted once: ranks that share a row (tensor, context and
    pipeline parallel) must not add it again.

    Args:
        world_size: devices of the job, whatever they do; rates are per device.
        peak_flops: FLOP/s that one device can reach (:func:`torchtitan_lite.observability.flops.peak_flops`).
        clock: returns seconds, from any origin.
    """

    def __init__(self, *, world_size: int, peak_flops: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._world_size = world_size
        self._peak_flops = peak_flops
        self._clock = clock
        self._restart()

    def _restart(self) -> None:
        self._began = self._clock()
        self._totals: Counter[str] = Counter()

    def add(
        self,
        *,
        tokens: int,
        targets: int,
        rows: int,
        documents: int,
        document_pairs: int,
        causal_pairs: int,
        padding: int,
        flops: int,
        data_wait_s: float,
    ) -> None:
        """Count one optimizer step.

        Args:
            tokens: tokens processed, padding included (rows * seq_len).
            targets: tokens with a label, i.e. those the loss is over.
            rows: rows of the global batch.
            documents: documents in them; padding is none.
            document_pairs: (query, key) pairs within a document, causal.
            causal_pairs: those that plain causal attention has in as many rows, rows * seq_len * (seq_len + 1) / 2.
            padding: tokens that are padding.
            flops: model FLOPs (:func:`torchtitan_lite.observability.flops.step_flops`).
            data_wait_s: seconds for which this process waited for its batches.
        """
        self._totals.update(
            steps=1,
            tokens=tokens,
            targets=targets,
            rows=rows,
            documents=documents,
            document_pairs=document_pairs,
            causal_pairs=causal_pairs,
            padding=padding,
            flops=flops,
            data_wait_s=data_wait_s,
        )

    def summary(self) -> dict[str, float]:
        """The interval in the fields of :class:`torchtitan_lite.observability.metrics.StepMetrics`; starts a new one.

        Raises:
            ValueError: no step was added.
        """
        total = self._totals
        if not total["steps"]:
            raise ValueError("Throughput.summary() needs at least one step since the last summary")
        seconds = self._clock() - self._began
        device_seconds = seconds * self._world_size
        self._restart()
        return {
            "tps": total["tokens"] / device_seconds,
            "supervised_tps": total["targets"] / device_seconds,
            "tflops": total["flops"] / device_seconds / 1e12,
            "mfu": total["flops"] / device_seconds / self._peak_flops,
            "padding_fraction": total["padding"] / total["tokens"],
            "documents_per_row": total["documents"] / total["rows"],
            "mask_density": total["document_pairs"] / total["causal_pairs"],
            "data_wait_fraction": total["data_wait_s"] / seconds,
            "time_s": seconds / total["steps"],
        }
