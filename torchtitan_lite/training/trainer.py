"""The training loop: data, model, optimizer and bookkeeping wired together."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.config.checks import check_config
from torchtitan_lite.config.load import save_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import Batch
from torchtitan_lite.data.loader import RowLoader, build_loader
from torchtitan_lite.data.packing.plan import resolved_max_documents
from torchtitan_lite.data.streaming.stream_loader import StreamLoader, build_stream_loader
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.distributed.context_parallel import shard_batch
from torchtitan_lite.distributed.fsdp import expect_backward
from torchtitan_lite.distributed.mesh import (
    Mesh,
    data_parallel_place,
    init_distributed,
    resolve_degrees,
    world_from_environment,
)
from torchtitan_lite.distributed.precision import resolve_param_dtype
from torchtitan_lite.distributed.shared_folder import check_shared_folder
from torchtitan_lite.distributed.timeouts import set_collective_timeouts
from torchtitan_lite.models.llama3.flavors import model_args
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.lora import lora_spec
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.observability.flops import peak_flops, step_flops
from torchtitan_lite.observability.garbage_collection import GarbageCollection
from torchtitan_lite.observability.logging import info_once, logger
from torchtitan_lite.observability.metrics import MetricsLogger, StepMetrics, device_memory
from torchtitan_lite.observability.profiler import maybe_profile
from torchtitan_lite.observability.progress import ProgressBar
from torchtitan_lite.observability.throughput import Throughput
from torchtitan_lite.observability.watchdog import StepWatchdog
from torchtitan_lite.training.adapters import adapter_params, base_of, require_same_adapters
from torchtitan_lite.training.checkpoint import CheckpointManager
from torchtitan_lite.training.clipping import clip_grad_norm
from torchtitan_lite.training.counts import Counts, StepLoss
from torchtitan_lite.training.divergence import DivergenceCheck
from torchtitan_lite.training.export import export_hf
from torchtitan_lite.training.loss import LinearCrossEntropy
from torchtitan_lite.training.lr_schedule import lr_factor
from torchtitan_lite.training.machine import set_determinism, sole_run_in
from torchtitan_lite.training.optimizer import build_optimizer, log_groups
from torchtitan_lite.training.parallelize import as_one, build_parts, build_pipeline, reshards


class Trainer:
    """One run, from its configuration to its last checkpoint.

    Building one checks the configuration (ConfigError lists all that is wrong) before it starts anything, then loads
    the newest checkpoint if there is one. :meth:`train` does the rest. ``watchdog``: is told where the run stands.
    """

    def __init__(self, config: Config, watchdog: StepWatchdog | None = None) -> None:
        self.config = config
        self.watchdog = watchdog
        self.world = world_from_environment()
        self.device = self.world.device
        self.main_rank = self.world.rank == 0
        warnings = check_config(config, world_size=self.world.size, device_type=self.device.type)
        self.degrees = resolve_degrees(config.parallelism, self.world.size)
        self.place = self.degrees.place(self.world.rank)
        self.dp = data_parallel_place(self.world.rank, self.degrees)
        self.dump_folder = Path(config.job.dump_folder)
        processes = "process" if self.world.size == 1 else "processes"
        logger.info(f"{config.job.description}: {self.world.size} {processes} on {self.device.type}")
        for warning in warnings:
            logger.warning(warning)

        set_determinism(config.training.deterministic)
        init_distributed(self.world, config.comm.init_timeout_seconds)
        if self.main_rank:
            self.dump_folder.mkdir(parents=True, exist_ok=True)
            with sole_run_in(self.dump_folder):  # held from train() on; here for its error, before the work
                pass
        dist.barrier()  # the folder is there
        check_shared_folder(self.dump_folder, "job.dump_folder")

        self._now("reading the data", "data_timeout_seconds")
        self.loader = self._build_loader()
        self.accumulation = self.loader.global_batch_size // (config.training.local_batch_size * self.dp.degree)
        self.args = replace(
            model_args(config.model.flavor, asdict(config.model.args), config.model.hf_assets_path),
            varlen_engine=config.model.varlen_engine,
            max_documents_per_row=resolved_max_documents(config),
        )
        self.lora = lora_spec(**asdict(config.lora))
        self.param_dtype = resolve_param_dtype(config.training.mixed_precision_param, self.device.type)
        self._now("building the model")
        self.mesh = Mesh(self.device.type, self.degrees, self.world.rank)
        set_collective_timeouts(config.comm.init_timeout_seconds)  # torch gives the groups of a mesh half an hour
        self.parts = self._build_parts()
        self.model = as_one(self.parts)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        log_groups(self.optimizer, self.mesh.pp.get_group())
        compile_loss = config.compile.enable and "loss" in config.compile.components
        self.loss_fn = LinearCrossEntropy(config.compile.backend if compile_loss else None)
        self.pipeline = build_pipeline(config, self.args, self.mesh, self.parts, self.loss_fn, self.device)

        self.step = 0
        self.tokens_seen = 0
        self.checkpoint = CheckpointManager(
            config.checkpoint,
            self.dump_folder / config.checkpoint.folder,
            self.model,
            self.optimizer,
            pp_group=self.mesh.pp.get_group(),
        )
        self.divergence = DivergenceCheck(self.device, self.checkpoint if config.checkpoint.enable else None)
        self._now("loading a checkpoint")
        self._load_checkpoint()

    def _now(self, place: str, setting: str | None = None) -> None:
        """Tell the watchdog what begins, and which time limit of the comm section holds for it."""
        if self.watchdog is not None:
            self.watchdog.phase(place, setting)

    # -- building ------------------------------------------------------------------------------------------------------

    def _build_loader(self) -> RowLoader | StreamLoader:
        tokenizer = load_tokenizer(self.config.model.hf_assets_path)
        build = build_stream_loader if self.config.data.streaming else build_loader
        loader = build(
            self.config, tokenizer, dp_rank=self.dp.rank, dp_degree=self.dp.degree, device_type=self.device.type
        )
        # A group with the time limit of the data: another node may still be tokenising.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.comm.data_timeout_seconds))
        fingerprints = [None] * self.world.size
        dist.all_gather_object(fingerprints, loader.fingerprint, group=group)
        dist.destroy_process_group(group)
        if differing := [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]:
            raise RuntimeError(
                f"Rank 0 has packed other data than rank(s) {differing}: {fingerprints[0]} is not "
                f"{fingerprints[differing[0]]}. Do all nodes read the same files with the same software?"
            )
        self.reports = loader.reports() if self.main_rank else []
        for report in self.reports:
            for line in report.lines():
                logger.info(line)
        return loader

    def _build_parts(self) -> dict[int, Transformer]:
        config = self.config
        parts = build_parts(config, self.args, self.mesh)
        model = as_one(parts)
        for part in parts.values():
            part.to_empty(device="cpu" if config.training.enable_cpu_offload else self.device)
        init_weights(model, self.args, config.training.seed)
        local = sum(p.to_local().numel() for p in model.parameters())
        self.adapter_params = adapter_params(self.args, self.lora)
        dtype = str(self.param_dtype).removeprefix("torch.")
        logger.info(
            f"Model: {config.model.name} {config.model.flavor}, {self.args.parameters:,} parameters, "
            f"computing in {dtype}"
        )
        if self.lora is not None:
            share = self.adapter_params / (self.args.parameters + self.adapter_params)
            logger.info(
                f"LoRA: {self.adapter_params:,} parameters of adapters are trained ({share:.2%} of all), beside "
                f"{', '.join(self.lora.targets)}"
            )
        if self.world.size > 1:
            split = " x ".join(f"{name} {degree}" for name, degree in asdict(self.degrees).items() if degree > 1)
            logger.info(f"Mesh: {split}; {local:,} parameters on this rank")
        if config.compile.enable and "model" in config.compile.components:
            logger.info("Compiling: the first step will take a minute or more")
        if self.args.attention == "flex_block_causal" and self.device.type == "cpu":
            info_once("FlexAttention has no CPU backward: its mask is applied through a dense-mask SDPA instead")
        return parts

    def _load_checkpoint(self) -> None:
        if not self.config.checkpoint.enable:
            return
        adapted = self.lora is not None  # then checkpoints hold the adapters alone
        if adapted:
            self.checkpoint.load_initial(self.args, self.config.model.hf_assets_path)
        state = self.checkpoint.load(partial(require_same_adapters, self._adapter_state()))
        if state is None and not adapted:
            self.checkpoint.load_initial(self.args, self.config.model.hf_assets_path)
        if state is not None:
            self.step, self.tokens_seen = state["step"], state["tokens_seen"]
            self.loader.load_state_dict(state["data"])
            if isinstance(self.loader, StreamLoader):
                self.loader.load_rank_state(self.checkpoint.load_data_state(self.step, self.dp.rank))
            was, now = state["model"], self.args.as_json()
            changed = [f"{name} {was.get(name)} -> {value}" for name, value in now.items() if was.get(name) != value]
            if changed:  # the weights fit all the same
                logger.warning(f"The model differs from the checkpoint's: {', '.join(changed)}")
            logger.info(f"Resuming after step {self.step}")
        self.divergence.finite_step = self.step

    def _state(self) -> dict:
        """Plain data that, with model and optimizer, determines the rest of the run. The learning rate follows from the
        step and all randomness of a step from (seed, step, rank), the seed being part of the data's fingerprint."""
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "seed": self.config.training.seed,
            "data": self.loader.state_dict(),
            "model": self.args.as_json(),
            **self._adapter_state(),
        }

    def _adapter_state(self) -> dict:
        """What the adapters of this run mean something by; empty without any."""
        return {} if self.lora is None else {"lora": self.lora.as_json(), "base": base_of(self.config)}

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train until ``training.steps``."""
        total = self.config.training.steps
        if self.step >= total:
            logger.info(f"Nothing to do: step {self.step} of training.steps={total} is done")
        peak, source = peak_flops(self.device, self.param_dtype)
        logger.info(f"MFU is held against {peak / 1e12:,.3g} TFLOP/s per device: {source}")
        self.throughput = Throughput(world_size=self.world.size, peak_flops=peak)
        with ExitStack() as stack:
            if self.main_rank:
                stack.enter_context(sole_run_in(self.dump_folder))
                save_config(self.config, self.dump_folder / "config.toml")
            collector = stack.enter_context(GarbageCollection(self.config.training.gc_freq))
            bar = stack.enter_context(ProgressBar(total, self.step, self.main_rank))
            metrics = stack.enter_context(MetricsLogger(self.config, self.step)) if self.main_rank else None
            profiler = stack.enter_context(
                maybe_profile(self.config.profiling, self.dump_folder, self.world.rank, self.step)
            )
            if metrics is not None:
                for report in self.reports:
                    metrics.note(report.scalars(), self.step)
            self.batches = iter(self.loader)
            first = self.step + 1
            while self.step < total:
                if self.step == first:  # one step is done: from here on nothing compiles or connects for the first time
                    set_collective_timeouts(self.config.comm.train_timeout_seconds, keep=self.checkpoint.groups)
                measured = self.train_step()
                if measured is not None:
                    bar.show(loss=measured.loss, tps=measured.tps)
                    if metrics is not None:
                        metrics.log(measured)
                        metrics.note(self.loader.counters(), self.step)
                self._save_if_due()
                bar.step()
                profiler.step()
                collector.step(self.step)
            self.checkpoint.wait()
            if self.config.checkpoint.last_save_in_hf:
                self._now("writing the Hugging Face folder", "data_timeout_seconds")
                export_hf(
                    self.checkpoint.folder / f"step-{self.step}",
                    self.dump_folder / "hf" / f"step-{self.step}",
                    self.config,
                )
        if counters := self.loader.counters():
            names = (name.removeprefix("packing/").replace("_", " ") for name in counters)
            counted = ", ".join(f"{value:,} {name}" for name, value in zip(names, counters.values(), strict=True))
            logger.info(f"Read by rank 0 so far, with what its buffers hold: {counted}")
        if shares := self._shares():
            logger.info(f"Tokens by source: {', '.join(f'{name} {share:.2%}' for name, share in shares.items())}")
        logger.info(f"Done: {self.step} steps, {self.tokens_seen:,} tokens")

    def train_step(self) -> StepMetrics | None:
        """One optimizer step. Returns its metrics if it is one to log."""
        self.step += 1
        if self.watchdog is not None:
            self.watchdog.step(self.step)
        began = time.perf_counter()
        batches = [next(self.batches) for _ in range(self.accumulation)]
        data_wait = time.perf_counter() - began
        total = Counts.of(batches, self.args).over_ranks(self.place, self.degrees)
        lr = self._set_lr()
        torch.manual_seed(self._step_seed())

        result = None
        if total.targets == 0:
            logger.warning(f"Step {self.step}: the global batch has no target token; the update is skipped")
        else:
            loss_sum = self._forward_backward(batches, total.targets)
            grad_norm = clip_grad_norm(
                self.model.parameters(), self.config.training.max_norm, pp_group=self.mesh.pp.get_group()
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.divergence.add(grad_norm)
            result = (loss_sum, grad_norm)

        self.loader.mark_trained(self.loader.global_batch_size)
        self._count(total, data_wait)
        if self._is_log_step() or self._is_save_step():
            self.divergence.require_finite(self.step)
        if result is None or not self._is_log_step():
            return None
        return self._measure(*result, batches, lr)

    def _forward_backward(self, batches: list[Batch], global_targets: int) -> Tensor:
        """Accumulate the gradients of (sum of token losses / target tokens of all ranks). Returns this rank's sum."""
        loss_sum = torch.zeros((), device=self.device)
        if self.pipeline is not None:  # accumulation is more microbatches of the schedule
            own = [self._own_tokens(batch) for batch in batches]
            whole = Batch(*(torch.cat(fields) for fields in zip(*own, strict=True)))
            return self.pipeline.forward_backward(whole, global_targets)
        reduce_each = self.config.parallelism.fsdp_gradient_reduction == "microbatch"
        for i, batch in enumerate(batches):
            batch = self._own_tokens(batch)
            last = i == len(batches) - 1
            expect_backward(self.model, last=last, reduce_each=reduce_each, reshard_each=reshards(self.config))
            loss = self.model(
                batch.tokens, batch.document_ids, batch.positions, labels=batch.labels, loss_fn=self.loss_fn
            )
            (loss / global_targets).backward()
            loss_sum += loss.detach()
        return loss_sum

    def _own_tokens(self, batch: Batch) -> Batch:
        """The part of a batch's rows that is this rank's under context parallelism, on its device."""
        # Moved before it is cut: what comes out of that is not pinned, and copying it would wait for the GPU.
        batch = Batch(*(field.to(self.device, non_blocking=True) for field in batch))
        return shard_batch(batch, self.place.cp, self.degrees.cp)

    def _step_seed(self) -> int:
        """Seed of all randomness (dropout, say) of this step on the tokens of this rank. Ranks that differ in tp or pp
        alone share it: what they compute twice must come out the same."""
        tokens = self.dp.rank * self.degrees.cp + self.place.cp
        return ((self.config.training.seed * 1_000_003 + self.step) * 1_000_003 + tokens) % 2**63

    def _set_lr(self) -> float:
        config = self.config
        lr = config.optimizer.lr * lr_factor(self.step, config.training.steps, config.lr_scheduler)
        self.optimizer.set_lr(lr)
        return lr

    def _is_save_step(self) -> bool:
        checkpoint = self.config.checkpoint
        last = self.step == self.config.training.steps
        return checkpoint.enable and (last or self.step % checkpoint.interval == 0)

    def _save_if_due(self) -> None:
        if self._is_save_step():
            self._now(f"saving after step {self.step}")
            streamed = isinstance(self.loader, StreamLoader)
            data_state = {self.dp.rank: self.loader.rank_state()} if streamed and self.place.counts_rows else None
            last = self.step == self.config.training.steps
            model_only = last and self.config.checkpoint.last_save_model_only
            self.checkpoint.save(self.step, self._state(), data_state, model_only=model_only)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _is_log_step(self) -> bool:
        return self.step in (1, self.config.training.steps) or self.step % self.config.metrics.log_freq == 0

    def _count(self, total: Counts, data_wait: float) -> None:
        rows, seq_len = self.loader.global_batch_size, self.config.training.seq_len
        causal_pairs = rows * seq_len * (seq_len + 1) // 2
        self.tokens_seen += rows * seq_len
        self.throughput.add(
            tokens=rows * seq_len,
            targets=total.targets,
            rows=rows,
            documents=total.documents,
            document_pairs=total.document_pairs,
            causal_pairs=causal_pairs,
            padding=rows * seq_len - total.tokens,
            flops=step_flops(
                matmul_params=self.args.matmul_params + self.adapter_params,
                frozen_params=0 if self.lora is None else self.args.matmul_params,
                attention_width=self.args.n_heads * self.args.head_dim,
                tokens=total.tokens,
                pairs=total.pairs,
            ),
            data_wait_s=data_wait,
        )

    def _shares(self) -> dict[str, float]:
        """Of the tokens trained on so far, by source; empty if there is but one."""
        shares = self.loader.shares()
        return shares if len(shares) > 1 else {}

    def _measure(self, loss_sum: Tensor, grad_norm: Tensor, batches: list[Batch], lr: float) -> StepMetrics:
        """Metrics of this step, the same on every rank (but for memory, which is this rank's)."""
        loss = StepLoss.over_ranks(loss_sum, batches, self.args, self.degrees, self.place)
        memory_gib, memory_fraction = device_memory(self.device)
        return StepMetrics(
            step=self.step,
            loss=loss.mean,
            max_loss=loss.max,
            attention_imbalance=loss.attention_imbalance,
            grad_norm=grad_norm.item(),
            lr=lr,
            tokens_seen=self.tokens_seen,
            memory_gib=memory_gib,
            memory_fraction=memory_fraction,
            shares=self._shares(),
            **self.throughput.summary(),
        )
