"""Hugging Face folders: safetensors with ``config.json`` and tokenizer files.

The model keeps Hugging Face's half-split rotary order, so names map one to one and no tensor is changed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan_lite.convert.folders import written_whole
from torchtitan_lite.convert.weights import (
    DTYPES,
    Stored,
    StoredWeights,
    WeightsError,
    cast,
    parameter_shapes,
    require_floating,
    require_same,
)
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER, load_tokenizer
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.hf_config import args_from_hf, hf_config, read_hf_config
from torchtitan_lite.models.llama3.nf4 import fill_quantized
from torchtitan_lite.models.llama3.shards import local_part

INDEX = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

CHAT_TEMPLATES = "additional_chat_templates"  # a folder, beside chat_template.jinja

_FILE_BYTES = 4 * 2**30

_LFS_POINTER = b"version https://git-lfs"

_FILE_DTYPES = {  # of safetensors; those that are not read are here to be named
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}

_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_AT_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LM_HEAD = "lm_head.weight"


def hf_name(name: str) -> str:
    """A parameter's name, such as ``layers.3.attention.wq.weight``, as transformers' LlamaForCausalLM has it."""
    module = name.removesuffix(".weight")
    if module in _AT_TOP:
        return f"{_AT_TOP[module]}.weight"
    layer, part = re.fullmatch(r"layers\.(\d+)\.(.+)", module).groups()
    return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"


class HFWeights(StoredWeights):
    """The safetensors of a Hugging Face folder, in one file or in several with an index.

    Args:
        folder: with the weights, and with config.json where ``args`` are not given.
        args: of the model that the weights are for.

    Raises:
        HFConfigError: config.json is not that of a model that can be built.
        WeightsError: a file is missing or damaged, or the tensors are not those of the model.
    """

    def __init__(self, folder: str | Path, args: ModelArgs | None = None) -> None:
        self.place = Path(folder).expanduser()
        self.args = args_from_hf(read_hf_config(self.place)) if args is None else args
        self._files: dict[str, Path] = {}  # by Hugging Face's name
        found: dict[str, Stored] = {}
        for file, wanted in _files(self.place).items():
            with _opened(file) as tensors:
                for name in tensors.keys() if wanted is None else wanted:
                    found[name] = _header(tensors, name, file)
                    self._files[name] = file
        shapes = parameter_shapes(self.args)
        found = {name: stored for name, stored in found.items() if not name.endswith(".rotary_emb.inv_freq")}
        self._drop_copy_of_embedding(found)
        expected = {hf_name(name): shape for name, shape in shapes.items()}
        hint = ""
        if not self.args.tie_embeddings and set(expected) - set(found) == {_LM_HEAD}:
            hint = ", which has an output projection of its own (tie_word_embeddings is false)"
        require_same({name: stored.shape for name, stored in found.items()}, expected, self.place, hint)
        require_floating({name: stored.dtype for name, stored in found.items()}, self.place)
        self.tensors = {name: found[hf_name(name)] for name in shapes}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[hf_name(name)], []).append(name)
        read = {}
        for file, own in by_file.items():
            with _opened(file) as tensors:
                read.update({name: tensors.get_tensor(hf_name(name)) for name in own})
        return {name: read[name] for name in names}

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Fill the parameters of ``model``, plain or sharded, reading of each only what this rank holds; and quantised
        layers.

        ``model`` may be a pipeline stage; parameters that the folder has no tensor for are left alone.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, parameter in model.named_parameters():
                if name not in self.tensors:
                    continue
                local, offset = local_part(name, parameter)
                if not local.numel():
                    continue
                file = self._files[hf_name(name)]
                if file not in opened:
                    opened[file] = stack.enter_context(_opened(file))
                part = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
                local.copy_(opened[file].get_slice(hf_name(name))[part])
        fill_quantized(model, lambda name, shape: self.read([name])[name])

    def _drop_copy_of_embedding(self, found: dict[str, Stored]) -> None:
        """Some tools write the output projection of a tied model, too. It has to be what it is tied to."""
        if not (self.args.tie_embeddings and _LM_HEAD in found and "model.embed_tokens.weight" in found):
            return
        values = []
        for name in (_LM_HEAD, "model.embed_tokens.weight"):
            with _opened(self._files[name]) as tensors:
                values.append(tensors.get_tensor(name))
        if not torch.equal(*values):
            raise WeightsError(
                f"{self.place}: {_LM_HEAD} differs from model.embed_tokens.weight, but the embeddings are tied "
                "(tie_word_embeddings is true); one of the two is wrong"
            )
        del found[_LM_HEAD]


def write_hf(
    weights: StoredWeights,
    folder: str | Path,
    dtype: str,
    assets: str | Path | None,
    *,
    file_bytes: int = _FILE_BYTES,
    progress: Callable[[int], Any] = lambda parameters: None,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads as it is.

    Args:
        dtype: of all tensors: float32, bfloat16 or float16.
        assets: the folder whose tokenizer files, and config.json as far as it still holds, come along; None: none.
        file_bytes: the most that goes into one file of tensors, more of which get an index.
        progress: told of the elements written.

    Raises:
        WeightsError: the folder exists and is not empty; or a value does not fit into ``dtype``.
    """
    with written_whole(folder) as partial:
        write_hf_assets(weights.args, partial, dtype, assets)  # first, as it takes no time to be refused
        write_hf_tensors(weights, partial, dtype, file_bytes=file_bytes, progress=progress)


def write_hf_tensors(
    weights: StoredWeights,
    folder: Path,
    dtype: str,
    *,
    file_bytes: int = _FILE_BYTES,
    turn: tuple[int, int] = (0, 1),
    progress: Callable[[int], Any] = lambda parameters: None,
) -> None:
    """The tensors' part of :func:`write_hf`, into a folder that exists.

    Args:
        turn: (rank, ranks) where several processes share the work: each writes every n-th file, the first the index.
    """
    rank, ranks = turn
    groups = list(weights.groups(DTYPES[dtype], file_bytes))
    places = {}
    for number, names in enumerate(groups):
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        places.update({hf_name(name): file for name in names})
        if number % ranks == rank:
            tensors = {hf_name(name): cast(name, t, dtype) for name, t in weights.read(names).items()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            progress(sum(tensor.numel() for tensor in tensors.values()))
    if rank == 0 and len(groups) > 1:
        elements = sum(torch.Size(stored.shape).numel() for stored in weights.tensors.values())
        index = {"metadata": {"total_size": elements * DTYPES[dtype].itemsize}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_hf_assets(args: ModelArgs, folder: Path, dtype: str, assets: str | Path | None) -> None:
    """``config.json``, ``generation_config.json`` and the tokenizer's files."""
    base: dict[str, Any] = {}
    special: dict[str, int | None] = {}
    generation = None
    if assets is not None:
        source = DEBUG_TOKENIZER if str(assets) == "debug" else Path(assets).expanduser()
        if (source / "config.json").is_file():
            base = read_hf_config(source)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / CHAT_TEMPLATES).is_dir():
            shutil.copytree(source / CHAT_TEMPLATES, folder / CHAT_TEMPLATES, dirs_exist_ok=True)
        if (source / "generation_config.json").is_file():
            generation = (source / "generation_config.json").read_text(encoding="utf-8")
        if (source / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(str(assets))
            # null, too, is said: for what is left out, transformers takes 1 and 2.
            special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config = special | hf_config(args, dtype, base)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if generation is None:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        own = {name: config[name] for name in keys if config.get(name) is not None}
        generation = json.dumps({"_from_model_config": True, **own}, indent=2) + "\n"
    (folder / "generation_config.json").write_text(generation, encoding="utf-8")


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The files that hold the weights, with the names that an index puts there, None for all in them."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    if (folder / "model.safetensors").is_file():  # before an index, as transformers has it
        return {folder / "model.safetensors": None}
    if (folder / INDEX).is_file():
        try:
            places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files: dict[Path, list[str] | None] = {}
            for name, file in places.items():
                files.setdefault(folder / file, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{folder / INDEX} is no index of safetensors: {error!r}") from error
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise WeightsError(f"{folder}: {INDEX} names files that are not there: {', '.join(missing)}")
        return files
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pth", ".gguf"))
    there = f"; it has {', '.join(others[:5])}, which is not read" if others else ""
    raise WeightsError(f"{folder}: no model.safetensors and no {INDEX}{there}")


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        if file.is_file() and file.open("rb").read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise WeightsError(
                f"{file} is Git LFS's pointer to a file; `git lfs pull` fetches the file itself"
            ) from error
        raise WeightsError(f"{file} is damaged and cannot be read: {error}") from error


def _header(tensors: Any, name: str, file: Path) -> Stored:
    try:
        part = tensors.get_slice(name)
    except SafetensorError as error:
        raise WeightsError(f"{file} does not hold {name}, which {INDEX} puts there") from error
    return Stored(tuple(part.get_shape()), _FILE_DTYPES.get(part.get_dtype(), torch.uint8))
