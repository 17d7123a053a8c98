"""Whole runs with adapters: what learns, what is saved, what others make of it."""

import json
import shutil
import sys

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from layouts import digest, layout_settings
from tiny_hf import LLAMA3_ROPE, saved
from toy_run import read_metrics, toy_config

from torchtitan_lite.config.checks import check_config
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.convert.adapters import Adapters, open_step, write_peft
from torchtitan_lite.convert.dcp import StepFolder, write_step
from torchtitan_lite.convert.hf import HFWeights, write_hf
from torchtitan_lite.convert.step_folder import CheckpointError
from torchtitan_lite.convert.weights import WeightsError
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER
from torchtitan_lite.distributed.mesh import Degrees
from torchtitan_lite.models.llama3.lora import is_adapter
from torchtitan_lite.models.llama3.shards import local_part
from torchtitan_lite.training.trainer import Trainer

SHAPE = {"vocab_size": 2048, "num_hidden_layers": 2, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
FIELDS = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden_dim")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model whose tokenizer is the package's."""
    folder = saved(tmp_path_factory.mktemp("hf"), **SHAPE)
    for file in DEBUG_TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def new_trainer(cpu_only, tmp_path, documents, folder):
    """One run after another, each in a process group of its own."""

    def make(dump: str = "run", **settings) -> Trainer:
        if dist.is_initialized():
            dist.destroy_process_group()
        return Trainer(lora_config(tmp_path / dump, documents, folder, **settings))

    return make


def lora_config(dump, documents, folder, **settings) -> Config:
    given = {
        **{f"model.args.{field}": None for field in FIELDS},
        "model.flavor": "hf_sdpa_block_causal",
        "model.hf_assets_path": str(folder),
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.interval": 2,
        "lora.rank": 4,
        "training.global_batch_size": 4,
        **settings,
    }
    return toy_config(dump, documents, **given)


def digests(model: torch.nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def test_only_adapters_change_and_only_they_are_saved(new_trainer, tmp_path):
    trainer = new_trainer(**{"training.steps": 4})
    before = digests(trainer.model)
    trainer.train()
    after = digests(trainer.model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if is_adapter(name)} and len(changed) == 28
    losses = [entry["loss"] for entry in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]
    stored = dcp.FileSystemReader(tmp_path / "run" / "checkpoint" / "step-4").read_metadata().state_dict_metadata
    assert {key for key in stored if key.startswith("model.")} == {f"model.{name}" for name in changed}
    assert all(is_adapter(key.rpartition(".")[0]) for key in stored if key.startswith("optimizer.state."))


RESUMES = {
    "dropout": {"lora.dropout": 0.3},
    "rslora": {"lora.rslora": True, "lora.target_modules": ["q_proj", "w2"]},
    "compiled": {"compile.enable": True, "compile.backend": "aot_eager", "lora.dropout": 0.3},
    "checkpointed": {"activation_checkpoint.mode": "full", "lora.dropout": 0.3},
    "quantised": {"lora.quantize_base": "nf4", "compile.enable": True, "compile.backend": "aot_eager"},
}


@pytest.mark.parametrize("variant", RESUMES)
def test_resume_is_bitwise(new_trainer, tmp_path, variant):
    def trained(dump: str, steps: int) -> Trainer:
        settings = {"training.steps": steps, "lr_scheduler.decay_ratio": 0.0, **RESUMES[variant]}
        trainer = new_trainer(dump, **settings)
        trainer.train()
        return trainer

    for steps in (2, 4, 6):  # two resumes
        parts = trained("parts", steps)
    whole = trained("whole", 6)
    assert digests(parts.model) == digests(whole.model)
    logged = ([(e["step"], e["loss"], e["grad_norm"]) for e in read_metrics(tmp_path / d)] for d in ("parts", "whole"))
    assert next(logged) == next(logged)
    names = dict(parts.model.named_parameters())
    assert {name for name in names if names[name].requires_grad} == {name for name in names if is_adapter(name)}


COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
RECOMPUTED = {"activation_checkpoint.mode": "full"}


def run(config: Config) -> None:
    Trainer(config).train()


@pytest.mark.parametrize(
    ("name", "degrees", "settings"),
    [
        ("cp", Degrees(cp=2), {}),
        ("tp_dp", Degrees(tp=2, dp_shard=2), {"training.local_batch_size": 2, **COMPILED, **RECOMPUTED}),
        ("pp_dp", Degrees(pp=2, dp_replicate=2), {"training.local_batch_size": 2}),
        ("nf4_pp_cp", Degrees(pp=2, cp=2), {"lora.quantize_base": "nf4"}),
        ("nf4_dp", Degrees(dp_shard=2), {"lora.quantize_base": "nf4", "training.local_batch_size": 2}),
    ],
)
def test_every_layout_trains_the_same(rank_pool, tmp_path, documents, folder, one_process, name, degrees, settings):
    config = lora_config(
        tmp_path / name,
        documents,
        folder,
        **{"training.local_batch_size": 4, **layout_settings(degrees), **settings},
    )
    rank_pool.run(degrees.world_size, run, config)
    reference = one_process[settings.get("lora.quantize_base", "none")]
    for got, expected in zip(read_metrics(tmp_path / name), reference, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6), name
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name


@pytest.fixture(scope="module")
def one_process(rank_pool, tmp_path_factory, documents, folder):
    found = {}
    for base in ("none", "nf4"):
        dump = tmp_path_factory.mktemp(base)
        settings = {"training.local_batch_size": 4, "lora.quantize_base": base}
        rank_pool.run(1, run, lora_config(dump, documents, folder, **settings))
        found[base] = read_metrics(dump)
    assert found["none"][0]["loss"] != pytest.approx(found["nf4"][0]["loss"], rel=1e-6)
    return found


TOKENS = torch.randint(2048, (2, 100), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", [["wq", "wk", "wv", "wo", "w1", "w2", "w3"], ["q_proj", "v_proj"]])
def test_peft_and_transformers_compute_the_same(new_trainer, tmp_path, folder, rslora, targets):
    settings = {"lora.rslora": rslora, "lora.target_modules": targets, "lora.alpha": 12.0, "optimizer.lr": 0.02}
    trainer = new_trainer(**settings, **{"checkpoint.last_save_in_hf": True})
    trainer.train()
    trainer.model.eval()
    with torch.no_grad():
        ours = trainer.model(TOKENS)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert (base(TOKENS).logits - ours).abs().max() > 0.1  # the adapters do something
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "peft" / "step-3")
        torch.testing.assert_close(adapted(TOKENS).logits, ours, rtol=0, atol=2e-5)
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "run" / "hf" / "step-3", attn_implementation="eager"
        )
        torch.testing.assert_close(whole(TOKENS).logits, ours, rtol=0, atol=2e-5)
    modules = {"q_proj", "v_proj"} if len(targets) == 2 else {"q_proj", "k_proj", "v_proj", "o_proj"}
    modules |= set() if len(targets) == 2 else {"gate_proj", "up_proj", "down_proj"}
    config = json.loads((tmp_path / "run" / "peft" / "step-3" / "adapter_config.json").read_text())
    assert (set(config["target_modules"]), config["use_rslora"]) == (modules, rslora)


def test_quantised_weights_are_merged_as_they_were_trained_beside(new_trainer, tmp_path, folder):
    settings = {"lora.quantize_base": "nf4", "lora.target_modules": ["wq", "w2"], "optimizer.lr": 0.02}
    trainer = new_trainer(**settings, **{"checkpoint.last_save_in_hf": True})
    trainer.train()
    with torch.no_grad():
        ours = trainer.model(TOKENS)
        whole, base = (
            transformers.AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")
            for place in (tmp_path / "run" / "hf" / "step-3", folder)
        )
        torch.testing.assert_close(whole(TOKENS).logits, ours, rtol=0, atol=2e-5)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "peft" / "step-3")
        assert (adapted(TOKENS).logits - ours).abs().max() > 1e-2  # beside weights that are not rounded


def test_a_quantised_base_from_a_checkpoint(new_trainer, tmp_path, folder):
    write_step(HFWeights(folder), tmp_path / "base")
    losses = []
    for dump, place in (("hf", {}), ("dcp", {"checkpoint.initial_load_path": str(tmp_path / "base")})):
        settings = {"lora.quantize_base": "nf4", "checkpoint.initial_load_in_hf": dump == "hf", **place}
        new_trainer(dump, **settings).train()
        losses.append([entry["loss"] for entry in read_metrics(tmp_path / dump)])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    with pytest.raises(CheckpointError, match=r"feed_forward\.w1\.weight: \[80, 48\] in .*, \[64, 48\] here"):
        settings |= {"model.args.ffn_hidden_dim": 64}
        new_trainer("other", **settings)


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_compiled_layers_share_their_graphs(new_trainer, base):
    """More of them than torch compiles one function for."""
    compiled = {"compile.enable": True, "compile.backend": "eager", "compile.components": ["model"]}
    model = {"checkpoint.initial_load_in_hf": False, "model.args.n_layers": 10}
    trainer = new_trainer(**{**compiled, **model, "training.steps": 1, "lora.quantize_base": base})
    trainer.train()


@pytest.mark.parametrize(
    "settings",
    [
        {"compile.enable": False},
        {
            "compile.enable": True,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
    ],
)
def test_no_matrix_is_kept_unpacked_for_the_backward_pass(new_trainer, settings):
    compiled = {"compile.backend": "aot_eager", "compile.components": ["model"]}
    trainer = new_trainer(**{"lora.quantize_base": "nf4", **compiled, **settings})
    parameters = {local_part(name, p)[0].data_ptr() for name, p in trainer.model.named_parameters()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        trainer.model(TOKENS[:1, :4])
    floats = [x for x in kept if type(x) is torch.Tensor and x.is_floating_point() and x.data_ptr() not in parameters]
    assert 4 * 80 <= max(x.numel() for x in floats) < 24 * 48  # activations, and not the matrix of two heads of keys


def test_adapters_are_merged_from_where_the_base_lies_now(new_trainer, tmp_path, folder):
    new_trainer(**{"optimizer.lr": 0.1}).train()
    step = tmp_path / "run" / "checkpoint" / "step-3"
    moved = tmp_path / "moved"
    write_hf(HFWeights(folder), moved, "bfloat16", folder)
    here, there = open_step(step), open_step(step, moved)
    name = "layers.1.attention.wk.weight"
    adapters = Adapters(StepFolder(step))
    a, b = (adapters.tensors[f"layers.1.attention.wk.lora_{x}"] for x in "ab")
    base = HFWeights(folder).read([name])[name]
    torch.testing.assert_close(here.read([name])[name], base + 16 / 4 * b @ a)
    torch.testing.assert_close(there.read([name])[name], base.bfloat16().float() + 16 / 4 * b @ a)
    with pytest.raises(WeightsError, match="--base names them"):
        open_step(step, tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="exists already"):
        write_peft(adapters, moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora.alpha": 8.0}, r"alpha 16\.0 -> 8\.0"),
        ({"lora.rslora": True}, "rslora False -> True"),
        ({"lora.rank": 2}, "rank 4 -> 2"),
        ({"lora.target_modules": ["wq"]}, r"targets \[.*\] -> \['wq'\]"),
        ({"lora.rank": 0}, "rank 4 -> None"),
    ],
)
def test_other_adapters_do_not_resume(new_trainer, change, message):
    new_trainer().train()
    with pytest.raises(CheckpointError, match=message):
        new_trainer(**{"training.steps": 5}, **change)


def test_the_base_may_move_but_not_go(new_trainer, tmp_path, folder, caplog):
    new_trainer(**{"training.steps": 2}).train()
    new_trainer("whole", **{"training.steps": 3}).train()
    moved = shutil.copytree(folder, tmp_path / "moved")
    with caplog.at_level("WARNING", "torchtitan_lite"):
        new_trainer(**{"model.hf_assets_path": str(moved)}).train()
    assert "trained beside other weights" in caplog.text and str(moved) in caplog.text
    losses = [[entry["loss"] for entry in read_metrics(tmp_path / dump)] for dump in ("run", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    with pytest.raises(
        CheckpointError, match=r"beside the weights of .*, and not beside random ones; set checkpoint\.init"
    ):
        new_trainer("whole", **{"training.steps": 4, "checkpoint.initial_load_in_hf": False})


def test_rules(tmp_path, documents, folder, monkeypatch):
    def check(**settings):
        return check_config(lora_config(tmp_path, documents, folder, **settings), world_size=1, device_type="cpu")

    assert check() == []
    (warning,) = check(**{"checkpoint.initial_load_in_hf": False})
    assert "the adapters are trained beside random weights" in warning
    (warning,) = check(**{"lora.rank": 0, "lora.rslora": True, "lora.alpha": 3.0})
    assert warning == "lora.alpha, rslora: of no effect without lora.rank"
    with pytest.raises(ConfigError) as error:
        check(
            **{
                "lora.target_modules": ["wx"],
                "checkpoint.initial_load_in_hf": False,
                "checkpoint.last_save_in_hf": True,
            }
        )
    assert len(error.value.problems) == 2
    nf4 = {"lora.quantize_base": "nf4"}
    assert check(**nf4) == []
    (warning,) = check(**nf4, **{"lora.rank": 0})
    assert warning == "lora.quantize_base: of no effect without lora.rank"
    monkeypatch.setitem(sys.modules, "torchao.quantization.quantize_.workflows.nf4", None)
    for settings, message in (
        ({"parallelism.tensor_parallel_degree": 2}, "nf4 with parallelism.tensor_parallel_degree"),
        (
            {"model.args.ffn_hidden_dim": 49},
            "49 x 48 numbers, not a multiple of the 64",
        ),
        ({}, "nf4: NF4 needs the package torchao, 0.18 or newer .*pip install -U torchao"),
    ):
        config = lora_config(tmp_path, documents, folder, **nf4, **settings)
        with pytest.raises(ConfigError, match=message):
            check_config(config, world_size=2, device_type="cpu")
    assert "wx: no such layer" in str(error.value) and "cannot be merged into random weights" in str(error.value)
