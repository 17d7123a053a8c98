"""The training loop: data, model, optimizer and bookkeeping wired together."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.config.checks import check_config
from torchtitan_lite.config.load import save_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.collator import Batch
from torchtitan_lite.data.held_out import HeldOutRows
from torchtitan_lite.data.loader import RowLoader
from torchtitan_lite.data.packing.plan import resolved_max_documents
from torchtitan_lite.data.streaming.stream_loader import StreamLoader
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
from torchtitan_lite.models.llama3.lora import is_adapter, lora_spec
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.models.llama3.shards import local_part
from torchtitan_lite.observability.garbage_collection import GarbageCollection
from torchtitan_lite.observability.logging import info_once, logger
from torchtitan_lite.observability.metrics import MetricsLogger, StepMetrics
from torchtitan_lite.observability.profiler import maybe_profile
from torchtitan_lite.observability.progress import ProgressBar
from torchtitan_lite.observability.watchdog import StepWatchdog
from torchtitan_lite.training.adapters import adapter_params, base_of, require_same_adapters
from torchtitan_lite.training.checkpoint import CheckpointManager
from torchtitan_lite.training.clipping import clip_grad_norm
from torchtitan_lite.training.counts import Counts
from torchtitan_lite.training.divergence import DivergenceCheck
from torchtitan_lite.training.evaluation import Evaluation
from torchtitan_lite.training.export import export_hf
from torchtitan_lite.training.loss import LinearCrossEntropy
from torchtitan_lite.training.lr_schedule import lr_factor
from torchtitan_lite.training.machine import set_determinism, sole_run_in
from torchtitan_lite.training.meter import StepMeter
from torchtitan_lite.training.optimizer import build_optimizer, log_groups
from torchtitan_lite.training.parallelize import as_one, build_parts, build_pipeline, reshards
from torchtitan_lite.training.rows import build_rows
from torchtitan_lite.training.samples import SampleWriter
from torchtitan_lite.training.validate import Validator


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
        self.loader, held_out = self._build_rows()
        self.accumulation = self.loader.global_batch_size // (config.training.local_batch_size * self.dp.degree)
        self.args = replace(
            model_args(config.model.flavor, asdict(config.model.args), config.model.hf_assets_path),
            varlen_engine=config.model.varlen_engine,
            max_documents_per_row=resolved_max_documents(config),
        )
        self.lora = lora_spec(**asdict(config.lora))
        self.param_dtype = resolve_param_dtype(config.training.mixed_precision_param, self.device.type)
        self.base = base_of(config, self.param_dtype)
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

        self.evaluation = self._build_evaluation(held_out)
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

    def _build_rows(self) -> tuple[RowLoader | StreamLoader, HeldOutRows | None]:
        loader, held_out = build_rows(self.config, self.dp, self.device)
        self.reports = loader.reports() if self.main_rank else []
        for report in self.reports:
            for line in report.lines():
                logger.info(line)
        if held_out is not None:
            logger.info(f"Validation: {sum(held_out.rows):,} rows of {', '.join(held_out.names)}")
        return loader, held_out

    def _build_parts(self) -> dict[int, Transformer]:
        config = self.config
        parts = build_parts(config, self.args, self.mesh)
        model = as_one(parts)
        for part in parts.values():
            part.to_empty(device="cpu" if config.training.enable_cpu_offload else self.device)
        # What is sure to be loaded need not be drawn first, which takes minutes for a large model.
        init_weights(model, self.args, config.training.seed, only=None if self.base is None else is_adapter)
        local = sum(local_part(name, p)[0].numel() for name, p in model.named_parameters())
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
                f"{', the matrices of the blocks being kept in NF4' if config.lora.quantize_base == 'nf4' else ''}"
            )
        if self.world.size > 1:
            split = " x ".join(f"{name} {degree}" for name, degree in asdict(self.degrees).items() if degree > 1)
            logger.info(f"Mesh: {split}; {local:,} parameters on this rank")
        if config.compile.enable and "model" in config.compile.components:
            logger.info("Compiling: the first step will take a minute or more")
        if self.args.attention == "flex_block_causal" and self.device.type == "cpu":
            info_once("FlexAttention has no CPU backward: its mask is applied through a dense-mask SDPA instead")
        return parts

    def _build_evaluation(self, held_out: HeldOutRows | None) -> Evaluation:
        validator = samples = None
        if held_out is not None:
            validator = Validator(
                held_out,
                self.model,
                self._loss_sum,
                place=self.place,
                degrees=self.degrees,
                device=self.device,
                progress=lambda: self._now(f"validating after step {self.step}"),
            )
        if self.config.samples.prompts:
            progress = partial(self._now, "writing samples")
            samples = SampleWriter(self.config, self.model, self.device, progress)
        return Evaluation(self.config, validator, samples)

    def _load_checkpoint(self) -> None:
        if not self.config.checkpoint.enable:
            return
        state = self.checkpoint.load(partial(require_same_adapters, self._adapter_state()))
        if state is None or self.lora is not None:  # of an adapted model, checkpoints hold the adapters alone
            self.checkpoint.load_initial(self.args, self.config.model.hf_assets_path)
        if state is not None:
            self.step, self.tokens_seen = state["step"], state["tokens_seen"]
            self.evaluation.load_state_dict(state)
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
            **self.evaluation.state_dict(),
            "seed": self.config.training.seed,
            "data": self.loader.state_dict(),
            "model": self.args.as_json(),
            **self._adapter_state(),
        }

    def _adapter_state(self) -> dict:
        """What the adapters of this run mean something by; empty without any."""
        return {} if self.lora is None else {"lora": self.lora.as_json(), "base": self.base}

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train until ``training.steps``."""
        total = self.config.training.steps
        if self.step >= total:
            logger.info(f"Nothing to do: step {self.step} of training.steps={total} is done")
        self.meter = StepMeter(
            self.config,
            self.args,
            self.adapter_params,
            self.loader,
            self.place,
            self.degrees,
            self.device,
            self.param_dtype,
        )
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
            if self.step == 0:
                self.evaluation.after(0, metrics)
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
                self._save_if_due(is_best=self.evaluation.after(self.step, metrics))
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
        if shares := self.meter.shares():
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
        self.tokens_seen += self.loader.global_batch_size * self.config.training.seq_len
        self.meter.count(total, data_wait)
        if self._is_log_step() or self._is_save_step() or self.evaluation.is_due(self.step):
            self.divergence.require_finite(self.step)
        if result is None or not self._is_log_step():
            return None
        loss_sum, grad_norm = result
        return self.meter.measure(loss_sum, grad_norm, batches, step=self.step, lr=lr, tokens_seen=self.tokens_seen)

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

    def _loss_sum(self, batch: Batch) -> Tensor:
        """The sum of the token losses of a batch, of this rank's tokens, without gradients."""
        own = self._own_tokens(batch)
        if self.pipeline is not None:
            return self.pipeline.evaluate(own)
        return self.model(own.tokens, own.document_ids, own.positions, labels=own.labels, loss_fn=self.loss_fn)

    def _save_if_due(self, is_best: bool) -> None:
        if self._is_save_step() or is_best:
            self._now(f"saving after step {self.step}")
            streamed = isinstance(self.loader, StreamLoader)
            data_state = {self.dp.rank: self.loader.rank_state()} if streamed and self.place.counts_rows else None
            last = self.step == self.config.training.steps
            model_only = last and self.config.checkpoint.last_save_model_only
            self.checkpoint.save(self.step, self._state(), data_state, model_only=model_only, best=self.evaluation.best)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _is_log_step(self) -> bool:
        return self.step in (1, self.config.training.steps) or self.step % self.config.metrics.log_freq == 0
