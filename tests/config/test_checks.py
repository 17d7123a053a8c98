"""Rules over several settings: each is broken once, and the message must name what was given and what would work."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_hf import saved
from tokenizers import Tokenizer, models

from torchtitan_lite.config.checks import AT_LEAST, check_config, outside
from torchtitan_lite.config.fields import spell
from torchtitan_lite.config.help import value_of
from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.convert.dcp import write_step
from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER

GOOD = ("--model.flavor=debugmodel_sdpa_block_causal", "--training.mixed_precision_param=float32")


def check(*argv: str, world_size: int = 1, device_type: str = "cpu") -> list[str]:
    return check_config(load_config([*GOOD, *argv]), world_size=world_size, device_type=device_type)


def problems_of(*argv: str, **where) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(*argv, **where)
    return caught.value.problems


def only_problem(*argv: str, **where) -> str:
    (problem,) = problems_of(*argv, **where)
    return problem


def test_a_good_configuration_passes_without_warnings():
    assert check() == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("lr_scheduler.decay_ratio=1.1", "from 0 to 1"),
        ("lr_scheduler.min_lr_factor=-0.1", "from 0 to 1"),
        ("optimizer.beta1=1", "optimizer.beta1=1.0: must be at least 0 and below 1"),
        ("optimizer.beta2=-0.1", "optimizer.beta2=-0.1: must be at least 0 and below 1"),
        ("optimizer.lr=-1e-3", "optimizer.lr=-0.001: must be at least 0"),
        ("optimizer.eps=0", "optimizer.eps=0.0: must be above 0"),
        ("checkpoint.keep_latest_k=1", "at least 2, or 0"),
        ("activation_checkpoint.selective_ac_option=0", 'give "op", or a whole number'),
        ("activation_checkpoint.selective_ac_option=ops", 'give "op", or a whole number'),
    ],
)
def test_ranges(option, message):
    problem = only_problem(f"--{option}")
    assert problem.startswith(option.partition("=")[0]) and message in problem


@pytest.mark.parametrize("name", AT_LEAST)
def test_least_values(name):
    def broken(value) -> bool:
        try:
            check(f"--{name}={value}")
        except ConfigError as error:
            return any(problem.startswith(f"{name}={value}") and "at least" in problem for problem in error.problems)
        return False

    least = AT_LEAST[name]
    assert broken(float(least - 1) if isinstance(value_of(Config(), name), float) else least - 1)
    assert not broken(least)


def table(**values) -> str:
    """An option with one [[optimizer.groups]] table."""
    keys = ", ".join(f"{name}={spell(value)}" for name, value in values.items())
    return f"--optimizer.groups=[{{{keys}}}]"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (table(lr_factor=2), ["optimizer.groups: entry 1: pattern", "empty"]),
        (table(pattern="layers.["), ["entry 1: pattern", "layers.[", "not a regular expression"]),
        (table(pattern="wz"), ["entry 1: pattern", "wz", "no parameter", "layers.5.attention.wq.weight", "output"]),
        (table(pattern="wq", lr_factor=-1), ["entry 1: lr_factor=-1.0", "at least 0"]),
        (table(pattern="wq", weight_decay=-1), ["entry 1: weight_decay=-1.0", "at least 0"]),
        ("--optimizer.no_decay=norm,bias", ["optimizer.no_decay: entry 2", "bias", "no parameter"]),
        ("--optimizer.no_decay=(", ["optimizer.no_decay: entry 1", "not a regular expression"]),
        ("--optimizer.muon_momentum=1", ["optimizer.muon_momentum=1.0", "below 1"]),
    ],
)
def test_groups_of_parameters(option, words):
    problem = only_problem(option)
    assert all(word in problem for word in words), problem


def test_groups_of_what_is_frozen():
    lora = ("--lora.rank=2", "--lora.target_modules=wq")
    problem = only_problem(table(pattern="embeddings"), *lora)
    assert "no parameter that is trained" in problem and "there are layers.5.attention.wq.lora_a, layers.5" in problem
    assert "wk" in only_problem(table(pattern="wk"), *lora)
    assert not any("optimizer" in warning for warning in check(table(pattern="wq.lora_b", lr_factor=16), *lora))


def test_groups_that_work():
    assert check(table(pattern="wq", lr_factor=0), "--optimizer.no_decay=") == []
    assert check(table(pattern="layers.5.*wo"), '--optimizer.no_decay=["norm", "^tok"]') == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["Muon", "--training.enable_cpu_offload"], ["Muon", "enable_cpu_offload"]),
        (["AdamW8bit", "--training.enable_cpu_offload"], ["AdamW8bit", "enable_cpu_offload"]),
        (["AdamW8bit", "--optimizer.implementation=foreach"], ["AdamW8bit", "for-loop"]),
        (["AdamW8bit", "--checkpoint.enable", "--checkpoint.async_mode=async"], ["AdamW8bit", "async_mode=async"]),
    ],
)
def test_what_optimizers_do_not_go_with(options, words, monkeypatch):
    monkeypatch.setattr(outside.importlib.util, "find_spec", lambda name: name)
    problem = only_problem(f"--optimizer.name={options[0]}", *options[1:], device_type="cuda")
    assert all(word in problem for word in words), problem


def test_8_bits_need_their_package(monkeypatch):
    monkeypatch.setattr(outside.importlib.util, "find_spec", lambda name: None)
    assert "pip install torchao" in only_problem("--optimizer.name=AdamW8bit")


def test_settings_of_muon_without_it_are_a_warning():
    (warning,) = check("--optimizer.muon_momentum=0.9")
    assert warning.startswith("optimizer.muon_momentum: of no effect")
    assert check("--optimizer.muon_momentum=0.9", "--optimizer.name=Muon") == []


@pytest.mark.parametrize("option", ["1", "3", "op"])
def test_selective_options_that_work(option):
    assert check(f"--activation_checkpoint.selective_ac_option={option}") == []


def test_shard_degree_against_processes():
    problem = only_problem("--parallelism.data_parallel_shard_degree=3", world_size=4)
    assert "dp_shard 3 x" in problem and "that makes 3, not 4" in problem
    assert check("--parallelism.data_parallel_shard_degree=4", world_size=4) == []


def test_a_chat_template_is_tried_before_the_run(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}"
    )
    problem = only_problem("--training.dataset=pychat", f"--data.chat_template={template}")
    assert str(template) in problem and "the template adds no generation prompt" in problem
    assert check("--training.dataset=pychat") == []
    assert check("--training.dataset=pychat", f"--data.chat_template={template}", "--data.train_on=all") == []


TP, CP, PP = (
    f"--parallelism.{name}_parallel_degree=2" for name in ("tensor", "context", "pipeline")
)  # with two processes or a multiple


@pytest.mark.parametrize(
    ("options", "world_size", "words"),
    [
        ([TP, "--model.args.n_kv_heads=1"], 2, ["tensor_parallel_degree=2", "n_kv_heads=1"]),
        ([TP, "--training.seq_len=511"], 2, ["tensor_parallel_degree=2", "511"]),
        ([TP, "--parallelism.enable_async_tensor_parallel"], 2, ["enable_async_tensor_parallel"]),
        ([CP, "--training.seq_len=510"], 2, ["context_parallel_degree=2", "510", "multiple of 4"]),
        ([CP, "--model.flavor=flex_block_causal", "--training.seq_len=640"], 2, ["640", "512"]),
        ([PP, "--model.args.tie_embeddings"], 2, ["pipeline_parallel_degree=2", "tie"]),
        ([PP, "--model.args.n_layers=1"], 2, ["1 layer +", "without any"]),
        ([PP, "--training.local_batch_size=1"], 2, ["1F1B", "at least as many microbatches as stages", "2 rows"]),
        ([PP, "--parallelism.pipeline_parallel_microbatch_size=3"], 2, ["microbatch_size=3"]),
        (
            [PP, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--compile.enable"],
            2,
            ["ZBVZeroBubble", "compile"],
        ),
        ([TP, "--parallelism.data_parallel_shard_degree=2"], 2, ["dp_shard 2 x cp 1 x tp 2", "that makes 4, not 2"]),
        (["--training.enable_cpu_offload"], 1, ["enable_cpu_offload", "on the CPU"]),
    ],
)
def test_layouts_that_cannot_work(options, world_size, words):
    problem = only_problem("--activation_checkpoint.mode=none", *options, world_size=world_size)
    assert all(word in problem for word in words), problem


def test_all_that_is_wrong_with_a_layout_is_said_at_once():
    heads = "--model.args.dim=240", "--model.args.n_heads=12", "--model.args.n_kv_heads=3"
    problems = problems_of(TP, CP, PP, *heads, "--training.seq_len=510", "--model.args.tie_embeddings", world_size=8)
    for dimension in ("context", "tensor", "pipeline"):
        assert any(f"parallelism.{dimension}_parallel_degree=2" in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("options", "world_size"),
    [([TP], 4), ([CP, TP], 4), ([PP, CP, TP], 8), (["--parallelism.data_parallel_replicate_degree=2"], 4)],
)
def test_layouts_that_work(options, world_size):
    assert check(*options, world_size=world_size) == []


def test_the_batch_is_split_over_data_parallel_processes_only():
    assert check(TP, "--training.global_batch_size=16", world_size=4) == []  # 8 rows each of two
    problem = only_problem(TP, "--training.global_batch_size=24", world_size=4)
    assert "= 8 x 2 = 16" in problem and "16 or 32" in problem


@pytest.mark.parametrize("given", [8, 24, -1])
def test_global_batch_sizes_that_work(given):
    assert check(f"--training.global_batch_size={given}", "--training.local_batch_size=4", world_size=2) == []


@pytest.mark.parametrize(("given", "nearest"), [(12, "8 or 16"), (7, "8"), (0, "8"), (-2, "8")])
def test_global_batch_size_must_divide(given, nearest):
    problem = only_problem(f"--training.global_batch_size={given}", "--training.local_batch_size=4", world_size=2)
    assert f"global_batch_size={given}" in problem and "4 x 2 = 8" in problem and f"; {nearest} would do" in problem


def test_settings_of_a_pipeline_without_one_warn():
    settings = "--parallelism.pipeline_parallel_microbatch_size=2", "--parallelism.pipeline_parallel_schedule=GPipe"
    (warning,) = check(*settings)
    assert warning.startswith("parallelism.pipeline_parallel_schedule, pipeline_parallel_microbatch_size: of no effect")
    pipeline = "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=8"
    assert check(*settings, *pipeline, world_size=2) == []


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("1b", 1),
        ("3b", 8),
        ("8b", 8),
        ("70b", 128),
        ("405b", 512),
        ("405b", 1024),
        ("8b_sft", 8),
        ("8b_sft --training.enable_cpu_offload", 1),
        ("8b_lora --lora.quantize_base=nf4", 1),
        *((f"{size}_{kind}", gpus) for size in ("1b", "3b") for kind in ("sft", "lora") for gpus in (1, 8)),
        ("8b_lora", 1),
        ("8b_lora", 8),
    ],
)
def test_the_configurations_that_are_shipped_pass(name, gpus):
    name, *settings = name.split()
    path = Path(__file__).parents[2] / "train_configs" / f"llama3_{name}.toml"
    config = load_config([f"--job.config_file={path}", *settings])
    assert check_config(config, world_size=gpus, device_type="cuda", outside=False) == []


def test_what_lies_outside_is_left_alone_on_request():
    argv = "--model.hf_assets_path=/nowhere", "--training.dataset=json", "--job.dump_folder=/proc/version/x"
    assert len(problems_of(*argv)) == 3
    config = load_config([*GOOD, *argv])
    assert check_config(config, world_size=1, device_type="cpu", outside=False) == []
    config.training.seq_len = 1
    with pytest.raises(ConfigError, match="seq_len"):
        check_config(config, world_size=1, device_type="cpu", outside=False)


def test_warmup_longer_than_the_run_warns():
    (warning,) = check("--lr_scheduler.warmup_steps=11", "--training.steps=10")
    assert "warmup_steps=11" in warning and "training.steps=10" in warning
    assert check("--lr_scheduler.warmup_steps=10", "--training.steps=10") == []


def test_sequence_longer_than_the_rotary_table():
    problem = only_problem("--training.seq_len=8193")
    assert "8193" in problem and "8192" in problem
    assert check("--training.seq_len=8192") == []
    assert check("--training.seq_len=8193", "--model.args.max_seq_len=8193") == []


def test_flex_needs_whole_blocks():
    flex = "--model.flavor=flex_block_causal"
    problem = only_problem(flex, "--training.seq_len=1025")
    assert "1025" in problem and "1024 or 1152 would do" in problem
    assert "; 128 would do" in only_problem(flex, "--training.seq_len=64")
    assert check(flex, "--training.seq_len=1024") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["dim=250"], "dim=250"),
        (["n_heads=16", "n_kv_heads=3"], "n_kv_heads=3"),
        (["dim=48", "n_heads=16", "n_kv_heads=16"], "rotary"),  # heads of 3 channels
        (["sliding_window=0"], "sliding_window=0"),
        (["sliding_window_pattern=true,false"], "without a sliding_window"),
        (["n_layers=0"], "n_layers=0"),
    ],
)
def test_shapes_that_do_not_fit(options, message):
    problem = only_problem(*(f"--model.args.{option}" for option in options))
    assert problem.startswith("model.flavor=debugmodel_sdpa_block_causal with model.args: ") and message in problem


def test_sliding_window_needs_an_attention_that_has_it():
    window = "--model.args.sliding_window=64"
    assert check(window) == []
    assert check(window, "--model.flavor=flex_block_causal") == []
    problem = only_problem(window, "--model.flavor=sdpa")
    assert "sliding_window=64" in problem and "sdpa_block_causal" in problem and "flex_block_causal" in problem
    # A pattern makes two kinds of layers; only the sliding kind is at fault, and it is named once.
    only_problem(window, "--model.args.sliding_window_pattern=true,false", "--model.flavor=sdpa")


@pytest.mark.parametrize(
    ("engine", "device_type", "dtype", "message"),
    [
        ("flash", "cpu", "float32", "cpu"),
        ("nested", "cpu", "float32", "cpu"),
        ("cpu", "cuda", "bfloat16", "cuda"),
        ("flash", "cuda", "float32", "float32"),
    ],
)
def test_varlen_engines_refused(engine, device_type, dtype, message):
    argv = (f"--model.varlen_engine={engine}", f"--training.mixed_precision_param={dtype}")
    problems = problems_of(*argv, device_type=device_type)
    assert any(f"varlen_engine={engine}" in problem and message in problem for problem in problems)


def test_varlen_engines_that_work():
    assert check("--model.varlen_engine=cpu") == []
    for engine in ("auto", "flash", "nested"):
        argv = (f"--model.varlen_engine={engine}", "--training.mixed_precision_param=bfloat16")
        assert check(*argv, device_type="cuda") == []


def test_compile_backend():
    problem = only_problem("--compile.enable", "--compile.backend=inducter")
    assert "inducter" in problem and "inductor" in problem
    assert check("--compile.enable", "--compile.backend=aot_eager") == []  # listed only with debugging back-ends
    assert check("--compile.backend=inducter") == []  # not looked at


@pytest.fixture
def tokenizer_of(tmp_path):
    """Makes a tokenizer folder with that many ids, two of them added after training, as special tokens are."""

    def make(size: int) -> str:
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size - 2)}, unk_token="w0"))
        tokenizer.add_special_tokens(["<bos>", "<eos>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return f"--model.hf_assets_path={tmp_path}"

    return make


def test_tokenizer_larger_than_the_model(tokenizer_of):
    folder = tokenizer_of(300)
    problem = only_problem(folder, "--model.args.vocab_size=256")
    assert "299" in problem and "256" in problem and "300 or more" in problem
    assert "300 or more" in only_problem(folder, "--model.args.vocab_size=299")
    assert check(folder, "--model.args.vocab_size=300") == []
    assert check(folder, "--model.args.vocab_size=512") == []  # a padded vocabulary


def test_tokenizer_missing(tmp_path):
    assert "no such folder" in only_problem("--model.hf_assets_path=/no/such")
    assert "tokenizer.json" in only_problem(f"--model.hf_assets_path={tmp_path}")


def test_data_that_is_not_there(tmp_path):
    problem = only_problem("--training.dataset=pydoc")
    assert "pydoc" in problem and "pydocs" in problem
    assert "none.jsonl" in only_problem("--training.dataset=json", f"--training.dataset_path={tmp_path}/none.jsonl")


def test_initial_checkpoint(tmp_path):
    options = ("--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}/step-10")
    assert "no such folder" in only_problem(*options)
    (tmp_path / "step-10").mkdir()
    assert "not a complete checkpoint" in only_problem(*options)


def test_nothing_is_loaded_without_checkpointing(tmp_path):
    (tmp_path / ".metadata").touch()
    for option in ("checkpoint.load_step=0", f"checkpoint.initial_load_path={tmp_path}"):
        assert "without checkpoint.enable" in only_problem(f"--{option}")
        assert check(f"--{option}", "--checkpoint.enable") == []


def test_weights_in_a_folder_of_hugging_face(tmp_path):
    options = ("--checkpoint.enable", "--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={tmp_path}")
    assert "no model.safetensors" in only_problem(*options)
    saved(tmp_path, vocab_size=2048)  # of another shape than the debug model
    problem = only_problem(*options)
    assert "model.embed_tokens.weight: [2048, 48] there, [2048, 256] in this model" in problem
    without = only_problem("--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}")
    assert "a Hugging Face folder; checkpoint.initial_load_in_hf reads it" in without


def test_weights_of_a_model_that_computes_otherwise(tmp_path):
    shape = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    rope = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    folder = saved(tmp_path / "hf", **shape, **heads, **rope, rms_norm_eps=1e-5)
    here = ("--checkpoint.enable", "--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={folder}")
    (warning,) = check(*here)
    assert warning.startswith(
        f"The model differs from that of the weights in {folder}: rope_scaling RopeScaling(factor=2"
    )
    assert warning.endswith(" -> None")
    write_step(HFWeights(folder), tmp_path / "step-0")
    step = ("--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}/step-0")
    (warning,) = check(*step, "--model.args.rope_theta=10000", "--model.args.n_heads=8", "--model.args.n_kv_heads=8")
    assert f"{tmp_path}/step-0: n_heads 16 -> 8, n_kv_heads 16 -> 8, head_dim 16 -> 32, rope_theta 500000.0" in warning
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    (warning,) = check(*here)
    assert "of a model that is not built here" in warning and 'hidden_act="gelu"' in warning
    (folder / "config.json").unlink()
    assert check(*here) == []


def test_the_flavor_of_a_folder(tmp_path):
    for file in DEBUG_TOKENIZER.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    here = ("--model.flavor=hf_sdpa_block_causal", f"--model.hf_assets_path={tmp_path}", "--training.seq_len=64")
    assert "config.json: No such file" in only_problem(*here)
    saved(tmp_path, vocab_size=2048)
    assert check(*here, "--checkpoint.enable", "--checkpoint.initial_load_in_hf") == []
    assert "65 is more than the 64 positions" in only_problem(*here, "--training.seq_len=65")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"odd_field": 3}))
    (warning,) = check(*here)
    assert warning.endswith("config.json has fields that are not known here, and are passed over: odd_field")
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu", "mlp_bias": True}))
    problem = only_problem(*here)
    assert 'hidden_act="gelu"' in problem and "mlp_bias=true" in problem
    assert "name it there" in only_problem("--model.flavor=hf")


def test_what_is_written_last_needs_checkpoints():
    for option in ("last_save_in_hf", "last_save_model_only"):
        assert "nothing is saved without checkpoint.enable" in only_problem(f"--checkpoint.{option}")
    dtype = only_problem("--checkpoint.enable", "--checkpoint.export_dtype=bfloat16")
    assert "of no effect without checkpoint.last_save_in_hf" in dtype
    window = only_problem("--checkpoint.enable", "--checkpoint.last_save_in_hf", "--model.args.sliding_window=16")
    assert "sliding_window=16" in window


def test_output_folders_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "file/new"):
        assert f"{tmp_path}/file is a file" in only_problem(f"--job.dump_folder={tmp_path}/{folder}")
    checkpoints = (f"--job.dump_folder={tmp_path}", "--checkpoint.folder=file")
    assert f"{tmp_path}/file is a file" in only_problem(*checkpoints, "--checkpoint.enable")
    assert check(*checkpoints) == []
    assert check(f"--job.dump_folder={tmp_path}/new/newer", "--checkpoint.enable") == []
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_output_folders_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(outside.os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    assert f"no permission to write in {tmp_path}" in only_problem(f"--job.dump_folder={tmp_path}/new")


def test_wandb_must_be_installed(monkeypatch):
    monkeypatch.setattr(outside.importlib.util, "find_spec", lambda name, package=None: None)
    assert "wandb is not installed" in only_problem("--metrics.enable_wandb")


def test_all_problems_are_reported_together(tmp_path):
    problems = problems_of(
        "--optimizer.lr=-1",
        "--model.args.n_kv_heads=3",
        "--training.global_batch_size=3",
        "--checkpoint.keep_latest_k=1",
        "--training.dataset=nothing",
        "--model.hf_assets_path=/no/such",
    )
    assert len(problems) == 6


def test_plain_sdpa_warns_that_documents_see_each_other():
    (warning,) = check("--model.flavor=sdpa")
    assert "debugmodel_sdpa_block_causal" in warning and "debugmodel_flex_block_causal" in warning


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--activation_checkpoint.mode=selective", True),
        ("--compile.components=loss", True),
        ("--compile.no-enable", True),
        ("--compile.enable", False),
        ("--activation_checkpoint.mode=full", False),
        ("--activation_checkpoint.mode=none", False),
        ("--activation_checkpoint.selective_ac_option=2", False),
        ("--model.flavor=sdpa_block_causal", False),
    ],
)
def test_selective_checkpointing_around_uncompiled_flex_warns(option, expected):
    argv = ("--model.flavor=flex_block_causal", "--training.mixed_precision_param=bfloat16", option)
    warnings = check(*argv, device_type="cuda")
    assert [("FlexAttention" in warning) for warning in warnings] == [True] * expected
    assert check(*argv, device_type="cpu") == []
