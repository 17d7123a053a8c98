"""Processes that run a function as the ranks of a gloo group, again and again."""

import contextlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import TCPStore

_TIMEOUT_S = 300


class RankPool:
    """``run(n, function, *args)`` calls a function of some test module on ranks 0 to n - 1, each with the environment
    that torchrun would give it, and returns what they return, in rank order. It ends the process group they start.

    An exception on any rank fails the call with that rank's traceback. The other ranks may then hang in a collective,
    so the processes are replaced.
    """

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Any]] = []  # (process, pipe)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def run(self, ranks: int, function: Callable, *args: Any) -> list[Any]:
        self._start(ranks - len(self._ranks))
        # Kept here, as torchrun's agent does: one in rank 0 would end with it, while others are still setting up.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [pipe for _, pipe in self._ranks[:ranks]]
        for rank, pipe in enumerate(pipes):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": store.port}
            pipe.send((function, args, {name: str(value) for name, value in environment.items()}))
        results = {}
        for _ in range(ranks):
            ready = wait([p for p in pipes if p not in results], timeout=_TIMEOUT_S)
            if not ready:
                self._stop()
                raise TimeoutError(f"{function.__name__}: no answer from ranks within {_TIMEOUT_S} s")
            pipe = ready[0]
            failure, results[pipe] = pickle.loads(pipe.recv_bytes())
            if failure:
                self._stop()
                raise AssertionError(f"{function.__name__} on rank {pipes.index(pipe)} of {ranks}:\n{failure}")
        return [results[pipe] for pipe in pipes]

    def _start(self, missing: int) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(missing):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []


def _forget_meshes() -> None:
    """DTensor remembers results by mesh, and a mesh of other groups over the same ranks is the same to it."""
    from torch.distributed.tensor import debug

    for which in ("", "python_", "fast_path_"):
        getattr(debug, f"_clear_{which}sharding_prop_cache", lambda: None)()


def _serve(pipe: Any) -> None:
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", LOG_RANK=""
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            function, args, environment = pipe.recv()
            os.environ.update(environment)
            try:
                answer = (None, function(*args))
            except BaseException:  # checkpoint failures are not Exceptions
                answer = (traceback.format_exc(), None)
            else:
                if dist.is_initialized():
                    dist.destroy_process_group()
            torch._dynamo.reset()
            _forget_meshes()
            # As bytes: sent as they are, tensors would be shared memory that ends with this process.
            pipe.send_bytes(pickle.dumps(answer))
