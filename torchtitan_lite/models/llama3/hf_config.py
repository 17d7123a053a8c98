"""``config.json`` of a Hugging Face Llama folder: to the arguments of a model and back.

A field that would change what the model computes, and that this model cannot do, is an error by name; nothing that
matters is passed over in silence.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torchtitan_lite.models.llama3.args import ModelArgs, RopeScaling

# What transformers' LlamaConfig takes for a field that the file does not have.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

# Fields with the one value that this model computes by; null counts as it.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}

_HONOURED = {*_DEFAULTS, "num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "model_type"}

# Fields that change nothing in the logits of a forward pass, or say what tokenizer and generation are told otherwise.
_WITHOUT_EFFECT = {
    "_name_or_path",
    "_attn_implementation_autoset",
    "_model_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


class HFConfigError(ValueError):
    """A ``config.json`` that this model cannot be built from; says every field at fault."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's ``config.json``. Raises HFConfigError where there is none that can be read."""
    file = Path(folder).expanduser() / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HFConfigError(
            f"{file}: {error.strerror}. A Hugging Face model folder with config.json is needed; give it by "
            "model.hf_assets_path (nothing is downloaded)"
        ) from error
    except ValueError as error:
        raise HFConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise HFConfigError(f"{file} holds a {type(content).__name__} where a JSON object is expected")
    return content


def args_from_hf(config: dict[str, Any]) -> ModelArgs:
    """The arguments of the model that a ``config.json`` describes, with plain attention.

    Raises:
        HFConfigError: lists every field that is missing, wrong, or asks for what this model does not do.
    """
    problems = []
    if config.get("model_type") != "llama":
        problems.append(f"model_type={json.dumps(config.get('model_type'))}: only llama is built here")
    for name, value in _FIXED.items():
        if config.get(name) is not None and config[name] != value:
            problems.append(f"{name}={_shown(config[name])}: only {json.dumps(value)} is supported")
    fields = {name: default if config.get(name) is None else config[name] for name, default in _DEFAULTS.items()}
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    counts = {name: fields[name] for name in _COUNTS} | {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            problems.append(f"{name}={_shown(value)}: must be a whole number from 1 on")
    if type(fields["tie_word_embeddings"]) is not bool:
        problems.append(f"tie_word_embeddings={_shown(fields['tie_word_embeddings'])}: must be true or false")
    rope = _rope(config, problems)
    for name, value in (("rms_norm_eps", fields["rms_norm_eps"]), ("rope_theta", rope["theta"])):
        if not _is_positive(value):
            problems.append(f"{name}={_shown(value)}: must be a number above 0")
    if problems:
        raise HFConfigError("config.json: " + "; ".join(problems))
    heads = fields["num_attention_heads"]
    if head_dim is not None and head_dim * heads == fields["hidden_size"]:
        head_dim = None
    try:
        return ModelArgs(
            dim=fields["hidden_size"],
            n_layers=fields["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=heads if kv_heads is None else kv_heads,
            ffn_hidden_dim=fields["intermediate_size"],
            vocab_size=fields["vocab_size"],
            max_seq_len=fields["max_position_embeddings"],
            rope_theta=float(rope["theta"]),
            rope_scaling=rope["scaling"],
            norm_eps=float(fields["rms_norm_eps"]),
            tie_embeddings=fields["tie_word_embeddings"],
            own_head_dim=head_dim,
        )
    except ValueError as error:
        raise HFConfigError(f"config.json: {error}") from error


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Fields that are neither honoured nor known to be without effect, where they are set to anything at all."""
    known = _HONOURED | _WITHOUT_EFFECT | set(_FIXED)
    return sorted(name for name, value in config.items() if name not in known and value not in (None, False))


def hf_config(args: ModelArgs, dtype: str, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """The ``config.json`` of a model, in the form that every transformers from 4.43 on reads.

    Args:
        dtype: of the tensors beside it: float32, bfloat16 or float16.
        base: what the folder that the tokenizer came from says. Of the same model all is kept, of another one what
            has no effect on the model.

    Raises:
        HFConfigError: the model is none that a Llama folder can describe.
    """
    if args.sliding_window is not None:
        raise HFConfigError(f"a Llama folder of Hugging Face cannot say sliding_window={args.sliding_window}")
    if args.dim % args.n_heads:  # whatever head_dim is
        raise HFConfigError(
            f"transformers takes no Llama whose dim={args.dim} is no multiple of n_heads={args.n_heads}"
        )
    kept = dict(base or {})
    written = "dtype" if "dtype" in kept else "torch_dtype"
    kept.pop("torch_dtype", None)
    if _same_model(args, kept):
        return kept | {written: dtype}
    kept = {name: value for name, value in kept.items() if name in _WITHOUT_EFFECT}
    return kept | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": _scaling_as_json(args.rope_scaling),
        "tie_word_embeddings": args.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": kept.get("initializer_range", 0.02),
        "use_cache": True,
        written: dtype,
    }


def _same_model(args: ModelArgs, config: dict[str, Any]) -> bool:
    try:
        other = args_from_hf(config)
    except HFConfigError:
        return False
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden_dim", "vocab_size", "max_seq_len", "head_dim")
    names += ("rope_theta", "rope_scaling", "norm_eps", "tie_embeddings")
    return all(getattr(args, name) == getattr(other, name) for name in names)


def _rope(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Base and scaling of the rotary frequencies. Transformers 5 writes both as rope_parameters; before, they were
    rope_theta and rope_scaling, whose kind was first called type."""
    given: dict[str, Any] = {}
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    for spelling in ("rope_scaling", "rope_parameters"):
        content = config.get(spelling)
        if not isinstance(content, dict | None):
            problems.append(f"{spelling}={_shown(content)}: must be an object")
            continue
        content = {key: value for key, value in (content or {}).items() if value is not None}
        if any(given.get(key, value) != value for key, value in content.items()):
            problems.append("rope_scaling and rope_parameters say different things")
        given |= content
    theta = given.get("rope_theta", config.get("rope_theta"))
    return {
        "theta": _DEFAULTS["rope_theta"] if theta is None else theta,
        "scaling": _rope_scaling(name, given, config, problems),
    }


def _rope_scaling(name: str, given: dict[str, Any], config: dict[str, Any], problems: list[str]) -> RopeScaling | None:
    problems += [
        f"{name}.{key}={_shown(value)}: all layers have one rotation here"
        for key, value in given.items()
        if isinstance(value, dict)
    ]
    if given.get("partial_rotary_factor", 1) != 1:
        problems.append(f"{name}.partial_rotary_factor={_shown(given['partial_rotary_factor'])}: only 1 is supported")
    kind = given.get("rope_type", given.get("type"))
    if kind is None and "factor" in given:
        problems.append(f"{name}={_shown(given)}: names no rope_type for its factor")
    if kind in (None, "default"):
        return None
    needed = {
        "linear": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    }.get(kind)
    if needed is None:
        problems.append(f"{name}.rope_type={_shown(kind)}: only default, linear and llama3 are supported")
        return None
    values = {key: given.get(key, config.get(key)) for key in needed}
    wrong = [key for key, value in values.items() if not _is_positive(value)]
    if wrong:
        problems += [f"{name}.{key}={_shown(values[key])}: rope_type {kind} needs a number above 0" for key in wrong]
        return None
    if kind == "linear":
        return RopeScaling(factor=float(values["factor"]), kind="linear")
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        problems.append(
            f"{name}: high_freq_factor={values['high_freq_factor']} must be above low_freq_factor="
            f"{values['low_freq_factor']}"
        )
    return RopeScaling(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_seq_len=int(values["original_max_position_embeddings"]),
    )


def _scaling_as_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
