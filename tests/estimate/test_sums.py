"""Memory and time put together from what parts cost, against sums by hand."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.mesh import Degrees
from torchtitan_lite.estimate.hardware import GPUS
from torchtitan_lite.estimate.ledger import (
    ACTIVATIONS,
    ATTENTION_CALLS,
    GATHERED,
    GRADIENTS,
    MATMUL_FLOPS,
    OPTIMIZER,
    PARAMETERS,
    PIPELINE,
    Traffic,
)
from torchtitan_lite.estimate.memory import fullest_moment
from torchtitan_lite.estimate.parts import Microbatch, State
from torchtitan_lite.estimate.plan import Plan
from torchtitan_lite.estimate.rank import RankCosts
from torchtitan_lite.estimate.schedule import Action
from torchtitan_lite.estimate.timing import StepTimes, model_flops, step_traffic

MICROBATCH = Microbatch(
    saved=Counter({ACTIVATIONS: 10}),
    forward=Counter({ACTIVATIONS: 12, GATHERED: 3}),
    backward=Counter({ACTIVATIONS: 15, GATHERED: 3}),
    after=Counter({GATHERED: 3}),
    forward_done=Counter({MATMUL_FLOPS: 1e12, ATTENTION_CALLS: 2, Traffic("all-gather", "tp"): 450e6}),
    backward_done=Counter({MATMUL_FLOPS: 3e12, ATTENTION_CALLS: 2, Traffic("reduce-scatter", "fsdp"): 900e6}),
)
STEP = Counter({PARAMETERS: 100, OPTIMIZER: 200, GRADIENTS: 20})
STATE = State(parameters=100, gradients=100, optimizer=200, optimizer_step=STEP)


def actions(text: str) -> list[Action]:
    """ "F00 B10": kind, stage, microbatch."""
    return [Action(word[0], int(word[1]), int(word[2])) for word in text.split()]


def stub_plan(schedule: str | None, stages: int = 1, offload: bool = False) -> SimpleNamespace:
    config = Config()
    config.training.enable_cpu_offload = offload
    return SimpleNamespace(
        schedule=schedule,
        config=config,
        stages=[None] * stages,
        microbatches=3,
        hidden=(1, 2, 5),
        param_dtype=torch.bfloat16,
    )


def costs(stages: tuple[int, ...]) -> RankCosts:
    return RankCosts(0, stages, STATE, {"none": [[MICROBATCH] * 3 for _ in stages]})


def test_one_microbatch_at_a_time():
    """100 + 200 kept, and 15 + 3 in the backward; less than the update with its 20 of gradients."""
    order = actions("F00 B00 F01 B01")
    assert fullest_moment(stub_plan(None), costs((0,)), "none", order) == STEP
    offloaded = fullest_moment(stub_plan(None, offload=True), costs((0,)), "none", order)
    assert offloaded == {ACTIVATIONS: 15, GATHERED: 3}


def test_microbatches_in_flight():
    """At B00 one other is in flight. 3 buffers of 10 bf16 numbers for gradients, none for inputs of the first stage."""
    order = actions("F00 F01 F02 B00 B01 B02")
    moment = fullest_moment(stub_plan("GPipe", 2), costs((0,)), "none", order)
    assert moment == {PARAMETERS: 100, OPTIMIZER: 200, ACTIVATIONS: 15 + 2 * 10, GATHERED: 3, PIPELINE: 3 * 10 * 2}
    order = actions("F00 F01 B00 F02 B01 B02")
    moment = fullest_moment(stub_plan("1F1B", 2), costs((0,)), "none", order)
    assert moment[ACTIVATIONS] == 15 + 10


def test_two_stages_of_a_rank():
    """While one stage works the other keeps its gathered parameters and what is in flight there."""
    order = actions("F00 F01 F20 F21 B20 B21 B00 B01")
    moment = fullest_moment(stub_plan("Interleaved1F1B", 4), costs((0, 2)), "none", order)
    assert moment[ACTIVATIONS] == 2 * 10 + 10 + 15 and moment[GATHERED] == 2 * 3
    assert moment[PIPELINE] == (1 + 2) * 3 * 10 * 2  # stage 2 receives from both sides


def test_a_split_backward_holds_until_the_weights_are_done():
    order = actions("F00 I00 F01 W00 I01 W01")
    moment = fullest_moment(stub_plan("ZBVZeroBubble", 2), costs((0,)), "none", order)
    assert moment[ACTIVATIONS] == 15 + 10


def debug_plan(**changes) -> Plan:
    config = Config()
    config.training.local_batch_size, config.training.global_batch_size = 1, 24
    config.training.seq_len = 512
    for name, value in changes.items():
        setattr(config.parallelism, name, value)
    return Plan.of(config, 8, document_length=256)


def test_shapes_that_follow_from_the_settings():
    plan = debug_plan(tensor_parallel_degree=2, context_parallel_degree=2)
    assert plan.degrees == Degrees(dp_shard=2, cp=2, tp=2)
    assert (plan.microbatches, plan.rows, plan.local_tokens) == (12, 1, 256)
    assert plan.hidden == (1, 128, 256) and plan.tokens_per_step == 24 * 512
    # Plain sdpa: every token attends all before it, whatever documents there are. Head and tail chunks share evenly.
    assert plan.pairs(range(6)) == 6 * 512 * 513 // 4
    assert model_flops(plan) == 6 * plan.args.matmul_params * 24 * 512 + 12 * 256 * 6 * 24 * 512 * 513 // 2


def test_a_step_in_seconds():
    """Three microbatches at 989.5 TFLOP/s: forward 1e12 FLOPs and attention's, backward 3e12 and attention's with one
    recomputation; 1 ms of tensor parallelism each; 2 ms of FSDP each, hidden behind all that."""
    plan = debug_plan()
    times = StepTimes(plan, GPUS["H100"], 8, [[Action(kind, 0, i) for i in range(3) for kind in "FB"]])
    attention = 4 * 256 * 6 * 512 * 513 // 2
    found = times.step([costs((0,))], "none")
    assert found.compute == pytest.approx(3 * (4e12 + 4 * attention) / 989.5e12)
    assert found.in_the_way == pytest.approx(3 * 0.001)
    assert found.behind == pytest.approx(3 * 0.002) and found.exposed == 0 and found.bubble == 0
    assert found.seconds == pytest.approx(found.compute + found.in_the_way)
    assert found.hardware_flops == pytest.approx(3 * 8 * (4e12 + 4 * attention))


def test_what_is_sent_in_a_step():
    """Of 3 microbatches all, the middle one of 3 standing for those between: here 3. A hidden state of 10 bf16 numbers
    goes on from stage 0, and a gradient back from stage 1."""
    plan = stub_plan("1F1B", 2)
    sent = step_traffic(plan, costs((0,)), "none")
    assert sent == {
        Traffic("all-gather", "tp"): 3 * 450e6,
        Traffic("reduce-scatter", "fsdp"): 3 * 900e6,
        Traffic("send", "pp"): 3 * 10 * 2,
    }
    assert step_traffic(stub_plan("ZBVZeroBubble", 4), costs((1, 2)), "none")[Traffic("send", "pp")] == 2 * 3 * 10 * 2
