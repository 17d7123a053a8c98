"""Tensor parallelism: each rank holds some of the heads, hidden units and vocabulary, and between layers of the tokens.

Megatron's split (Shoeybi et al., 2019): the matrices that enter attention and feed-forward are split by their outputs,
those that leave by their inputs, so each of the two needs its input whole and leaves a sum over ranks. With sequence
parallelism (Korthikanti et al., 2022) that sum is reduce-scattered over the tokens and the next input gathered: norms
and residuals work on, and keep for backward, seq / tp tokens. Embedding and output are split by vocabulary; the loss
(``training/loss.py``) never gathers the logits.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.llama3.args import ModelArgs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_lite.models.llama3.model import Transformer


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, async_tp: bool = False) -> None:
    """Split ``model`` over the 1-D ``mesh``, in place: every parameter becomes a DTensor over it (norms Replicate).

    Tokens, labels, document ids and positions are whole on every rank; hidden states are local tensors
    [batch, seq / tp, dim], also those that enter or leave a pipeline stage; attention sees local tensors
    [batch, seq, heads / tp, head_dim]. Logits, where they are asked for, come out whole on every rank. Parts may be
    missing. Apply it before activation checkpointing, compilation and FSDP.

    async_tp: have the compiler cut the products beside a collective into pieces that overlap with it (CUDA only).
    """
    # Here, not above: seconds, which reading the rules below need not cost.
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def gather(*others: None) -> PrepareModuleInput:
        """The first input is gathered over the tokens; the ``others`` are whole or none of DTensor's business."""
        return PrepareModuleInput(input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others))

    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": gather(None, None, None),  # cos, sin, mask state
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": gather(),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    if model.tok_embeddings is not None:
        embedding = model.tok_embeddings
        embedding.weight = nn.Parameter(distribute_tensor(embedding.weight, mesh, [Shard(0)]))
        embedding.forward = functools.partial(_look_up, embedding, mesh)
    if model.norm is not None:
        parallelize_module(model.norm, mesh, SequenceParallel())
        model.register_forward_hook(lambda module, inputs, out: out.full_tensor() if isinstance(out, DTensor) else out)
    if model.output is not None:
        parallelize_module(model.output, mesh, ColwiseParallel())
    if async_tp:
        _enable_async(mesh)


def _look_up(embedding: nn.Embedding, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
    """The hidden states [batch, seq / tp, dim] of this rank's part of ``tokens`` [batch, seq]. Each rank looks up what
    is in its rows of the embedding, and gets a gradient for these; DTensor would compute one for all rows, and keep it.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    rows = embedding.weight.to_local()
    own = tokens - mesh.get_local_rank() * -(
        -embedding.num_embeddings // mesh.size()
    )  # DTensor's split: the last has less
    elsewhere = (own < 0) | (own >= len(rows))
    hidden = F.embedding(own.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere.unsqueeze(-1), 0)
    hidden = DTensor.from_local(hidden, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])
    # What comes out has its reduction still under way, as a subclass of Tensor. The backward of a compiled block hands
    # that no gradient: it fails, or the embedding silently learns nothing through it. The copy waits.
    return hidden.to_local().clone()


def _enable_async(mesh: DeviceMesh) -> None:
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 calls this deprecated and not needed, but its pass still leaves a group alone that was not enabled.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


def tensor_parallel_problems(
    args: ModelArgs, degree: int, local_seq_len: int, *, device_type: str, compile_model: bool, async_tp: bool
) -> list[str]:
    """Why a model cannot be split ``degree`` ways, one message a reason; empty if it can.

    local_seq_len: tokens of a row on one context-parallel rank.
    """
    setting = f"parallelism.tensor_parallel_degree={degree}"
    able = [str(n) for n in range(1, args.n_kv_heads + 1) if not _broken_rules(args, n, local_seq_len)]
    problems = [
        f"{setting}: {rule}; for this model and seq_len {' or '.join(able)} would do"
        for rule in _broken_rules(args, degree, local_seq_len)
    ]
    needs = {
        "a GPU": device_type == "cuda",
        'compile.enable with "model" among compile.components (the compiler makes the overlap)': compile_model,
        "a tensor_parallel_degree of at least 2": degree > 1,
    }
    if async_tp and (missing := [need for need, met in needs.items() if not met]):
        problems.append(f"parallelism.enable_async_tensor_parallel needs {' and '.join(missing)}; or leave it off")
    return problems


def _broken_rules(args: ModelArgs, degree: int, local_seq_len: int) -> list[str]:
    rules = []
    if args.n_heads % degree or args.n_kv_heads % degree:
        rules.append(
            f"attention is split by heads, so n_heads={args.n_heads} and n_kv_heads={args.n_kv_heads} must both be "
            "multiples of it"
        )
    if args.ffn_hidden_dim % degree:
        rules.append(
            f"the feed-forward is split by hidden units, so ffn_hidden_dim={args.ffn_hidden_dim} must be a multiple of "
            "it"
        )
    if local_seq_len % degree:
        rules.append(
            f"between layers the tokens are split, so the {local_seq_len} of a row on one context-parallel rank must "
            "be a multiple of it"
        )
    if args.vocab_size % degree:
        # The model and the loss can do with unequal shards, if none is empty. But of a shard that FSDP splits again
        # torch names the place in the whole as if all were equal: checkpoints would mix rows up.
        padded = -(-args.vocab_size // degree) * degree
        rules.append(
            f"embedding and output are split by vocabulary, so vocab_size={args.vocab_size} must be a multiple of it; "
            f"model.args.vocab_size={padded} adds rows that no token uses"
        )
    return rules
