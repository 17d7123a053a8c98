"""Meta's own folders: ``params.json`` and ``consolidated.NN.pth``, one file a rank of its tensor parallelism.

Meta rotates neighbouring channels (2i, 2i + 1) of a head where Hugging Face, and this project, rotate i and
i + head_dim / 2. So the rows of wq and wk lie in another order; all else is the same but for the split over files.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.convert.folders import written_whole
from torchtitan_lite.convert.weights import (
    Stored,
    StoredWeights,
    WeightsError,
    cast,
    parameter_shapes,
    require_floating,
    require_same,
)
from torchtitan_lite.models.llama3.args import ModelArgs, RopeScaling
from torchtitan_lite.models.llama3.flavors import SIZES

# Dimension along which a tensor is split over files; norms are whole in each.
_SPLIT = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


def to_half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of wq or wk [heads * head_dim, dim] from Meta's order to this project's: 2i -> i, 2i + 1 -> i + head_dim / 2
    within each head. The number of heads is the tensor's own, so wk keeps its fewer."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of :func:`to_half_split`."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


class MetaWeights(StoredWeights):
    """The weights of a folder with ``params.json`` and ``consolidated.NN.pth``.

    Args:
        rope_factor: of Llama 3.1's scaling, which params.json does not tell. None: that of this project's size with the
            same dim and layers (32 for Llama 3.2's 1B and 3B), else 8, Llama 3.1's.
        max_seq_len: longest position, not told either. None: 131,072 with scaling, else 8,192 for a vocabulary of
            Llama 3, else 4,096.

    Raises:
        WeightsError: a file is missing or damaged, params.json asks for what is not supported, or the tensors are not
            those of the model.
    """

    def __init__(self, folder: str | Path, *, rope_factor: float | None = None, max_seq_len: int | None = None) -> None:
        self.place = Path(folder).expanduser()
        self._shards = _load_shards(self.place)
        names = [name for name in self._shards[0] if not name.endswith("rope.freqs")]  # Llama 1 has them in each layer
        for number, shard in enumerate(self._shards[1:], 1):
            if {name for name in shard if not name.endswith("rope.freqs")} != set(names):
                raise WeightsError(f"{self.place}: consolidated.{number:02}.pth has other tensors than the first file")
        require_floating({name: self._shards[0][name].dtype for name in names}, self.place)
        dim = self._shards[0]["norm.weight"].shape[0] if "norm.weight" in names else None
        found = {name: self._whole_shape(name, dim) for name in names}
        tied = "output.weight" not in names or (
            "tok_embeddings.weight" in names
            and found["output.weight"] == found["tok_embeddings.weight"]
            and torch.equal(self._joined("output.weight", dim), self._joined("tok_embeddings.weight", dim))
        )
        if tied:
            found.pop("output.weight", None)
        self.args = _args(self.place, found, tied=tied, rope_factor=rope_factor, max_seq_len=max_seq_len)
        expected = parameter_shapes(self.args)
        require_same(found, expected, self.place)
        self.tensors = {name: Stored(tuple(found[name]), self._shards[0][name].dtype) for name in expected}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        read = {}
        for name in names:
            tensor = self._joined(name, self.args.dim)
            if name.endswith((".wq.weight", ".wk.weight")):
                tensor = to_half_split(tensor, self.args.head_dim)
            read[name] = tensor
        return read

    def _split_dim(self, name: str, dim: int | None) -> int | None:
        if name == "tok_embeddings.weight":  # Llama 2 splits its columns, Llama 3 its rows
            return 0 if self._shards[0][name].shape[1] == dim else 1
        return _SPLIT.get(name.removesuffix(".weight").rpartition(".")[2])

    def _whole_shape(self, name: str, dim: int | None) -> tuple[int, ...]:
        shape = list(self._shards[0][name].shape)
        split = self._split_dim(name, dim)
        if split is not None and split < len(shape):
            shape[split] = sum(shard[name].shape[split] for shard in self._shards)
        return tuple(shape)

    def _joined(self, name: str, dim: int | None) -> Tensor:
        split = self._split_dim(name, dim)
        if split is None or len(self._shards) == 1:
            return self._shards[0][name]
        return torch.cat([shard[name] for shard in self._shards], dim=split)


def write_meta(
    weights: StoredWeights,
    folder: str | Path,
    dtype: str,
    assets: str | Path | None,
    *,
    progress: Callable[[int], Any] = lambda parameters: None,
) -> None:
    """Write ``params.json`` and one ``consolidated.00.pth``, which needs memory for all of it.

    Args:
        dtype: of all tensors: float32, bfloat16 or float16.
        assets: a folder whose ``tokenizer.model`` comes along, if it has one; None: none.

    Raises:
        WeightsError: the folder exists and is not empty; params.json cannot say what the model is; or a value does not
            fit into ``dtype``.
    """
    params = _params(weights.args)
    with written_whole(folder) as partial:
        tensors: dict[str, Tensor] = {}
        for name in weights.tensors:
            tensor = cast(name, weights.read([name])[name], dtype)
            if name.endswith((".wq.weight", ".wk.weight")):
                tensor = to_interleaved(tensor, weights.args.head_dim)
            tensors[name] = tensor.contiguous()
            progress(tensor.numel())
        if weights.args.tie_embeddings:  # Meta's files have both
            tensors["output.weight"] = tensors["tok_embeddings.weight"]
        torch.save(tensors, partial / "consolidated.00.pth")
        (partial / "params.json").write_text(json.dumps(params, indent=2) + "\n")
        source = None if assets is None else Path(assets).expanduser() / "tokenizer.model"
        if source is not None and source.is_file():
            shutil.copyfile(source, partial / source.name)


def ffn_width(dim: int, multiplier: float | None, multiple_of: int) -> int:
    """Width of the feed-forward layer as Meta's code derives it from params.json."""
    width = int(2 * 4 * dim / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


def _load_shards(folder: Path) -> list[dict[str, Tensor]]:
    files = sorted(folder.glob("consolidated.*.pth")) if folder.is_dir() else []
    if not files:
        raise WeightsError(f"{folder}: no consolidated.NN.pth")
    numbers = [int(match[1]) for file in files if (match := re.fullmatch(r"consolidated\.(\d+)\.pth", file.name))]
    if numbers != list(range(len(files))):
        raise WeightsError(f"{folder}: of consolidated.NN.pth it has {', '.join(file.name for file in files)}")
    shards = []
    for file in files:
        try:
            shards.append(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise WeightsError(f"{file} is damaged or no file of tensors: {error}") from error
    return shards


def _args(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    tied: bool,
    rope_factor: float | None,
    max_seq_len: int | None,
) -> ModelArgs:
    file = folder / "params.json"
    try:
        params = json.loads(file.read_text(encoding="utf-8"))
        dim, layers, heads = params["dim"], params["n_layers"], params["n_heads"]
    except OSError as error:
        raise WeightsError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file} does not say dim, n_layers and n_heads ({error!r})") from error
    if unsupported := sorted({"moe", "moe_args", "quantization_args", "lora_args", "vision_chunk_size"} & set(params)):
        raise WeightsError(f"{file}: {', '.join(unsupported)}: not a plain Llama")
    try:
        vocab, width = shapes["tok_embeddings.weight"][0], shapes["layers.0.feed_forward.w1.weight"][0]
    except KeyError as error:
        raise WeightsError(f"{folder} holds no {error.args[0]}") from error
    scaled = bool(params.get("use_scaled_rope"))
    if rope_factor is None:
        rope_factor = params.get("rope_scaling_factor")
    if scaled and rope_factor is None:
        known = [size.rope_scaling for size in SIZES.values() if (size.dim, size.n_layers) == (dim, layers)]
        rope_factor = known[0].factor if known and known[0] is not None else 8.0
    if max_seq_len is None:
        max_seq_len = 131072 if scaled else 8192 if vocab >= 128000 else 4096
    try:
        return ModelArgs(
            dim=dim,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=params.get("n_kv_heads") or heads,
            ffn_hidden_dim=width,
            vocab_size=vocab,
            max_seq_len=max_seq_len,
            rope_theta=float(params.get("rope_theta", 10000.0)),
            rope_scaling=RopeScaling(factor=float(rope_factor)) if scaled else None,
            norm_eps=float(params.get("norm_eps", 1e-5)),
            tie_embeddings=tied,
        )
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{file}: {error}") from error


def _params(args: ModelArgs) -> dict[str, Any]:
    scaling = args.rope_scaling
    problems = []
    if args.own_head_dim is not None and args.own_head_dim * args.n_heads != args.dim:
        problems.append(f"head_dim={args.head_dim} is not dim / n_heads = {args.dim} / {args.n_heads}")
    if scaling is not None and scaling != RopeScaling(factor=scaling.factor):
        problems.append(f"rope scaling {scaling} is not Llama 3.1's with its own constants")
    if args.sliding_window is not None:
        problems.append(f"sliding_window={args.sliding_window}")
    if problems:
        raise WeightsError(f"Meta's params.json cannot say this: {'; '.join(problems)}")
    multiple_of = math.gcd(args.ffn_hidden_dim, 4096)
    plain = int(2 * 4 * args.dim / 3)
    # The middle of those that are rounded up to the width; a quarter more, as a product of floats is cut to an integer.
    multiplier = (args.ffn_hidden_dim - (multiple_of - 1) / 2 + 0.25) / plain
    params = {
        "dim": args.dim,
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
        "ffn_dim_multiplier": multiplier,
        "multiple_of": multiple_of,
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "use_scaled_rope": scaling is not None,
    }
    return params if scaling is None else params | {"rope_scaling_factor": scaling.factor}
