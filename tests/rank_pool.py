"""Processes that run a function as the ranks of a gloo group."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import TCPStore

_TIMEOUT_S = 300
# What takes seconds to import, and is then there for all.
_IMPORTED = [
    "pytest",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.select_algorithm",
    "torch._inductor.lowering",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.experimental._attention",
    "torch.export._trace",
    "torchtitan_lite.attention.flex",
    "torchtitan_lite.training.trainer",
]


class RankPool:
    """``run(n, function, *args)`` calls a function of some test module on ranks 0 to n - 1, each with the environment
    that torchrun would give it, and returns what they return, in rank order.

    Each call forks its ranks off one server that has imported everything: in milliseconds, and with nothing left from
    the call before. (Ranks used again keep the process groups of every mesh that a cache remembers, each with three
    threads that wake a hundred times a second.)

    An exception on any rank fails the call with that rank's traceback.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)

    def run(self, ranks: int, function: Callable, *args: Any) -> list[Any]:
        # Kept here, as torchrun's agent does: one in rank 0 would end with it, while others are still setting up.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, pipes = [], []
        limit = 0  # for the others may hang in a collective
        try:
            for rank in range(ranks):
                ours, theirs = self._context.Pipe(duplex=False)
                environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": store.port}
                given = (theirs, function, args, environment)
                process = self._context.Process(target=_run_rank, args=given, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = _answers(pipes, function.__name__)
            limit = 30
            return results
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.join(limit)
                process.kill()
                process.join()
                pipe.close()


def _answers(pipes: list[Any], name: str) -> list[Any]:
    results = {}
    while len(results) < len(pipes):
        ready = wait([p for p in pipes if p not in results], timeout=_TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"{name}: no answer from ranks within {_TIMEOUT_S} s")
        pipe = ready[0]
        try:
            failure, results[pipe] = pickle.loads(pipe.recv_bytes())
        except EOFError:
            failure = "It ended without an answer."
        if failure:
            raise AssertionError(f"{name} on rank {pipes.index(pipe)} of {len(pipes)}:\n{failure}")
    return [results[pipe] for pipe in pipes]


def _run_rank(pipe: Any, function: Callable, args: tuple, environment: dict[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(CUDA_VISIBLE_DEVICES="", LOG_RANK="")
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        answer = (None, function(*args))
    except BaseException:  # checkpoint failures are not Exceptions
        answer = (traceback.format_exc(), None)
    # As bytes: sent as they are, tensors would be shared memory that ends with this process.
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0] is None and dist.is_initialized():
        dist.destroy_process_group()
