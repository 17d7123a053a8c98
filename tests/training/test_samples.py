"""Texts from the model while it trains."""

import json

import pytest
import torch
import torch.distributed as dist
from layouts import layout_settings
from toy_run import read_metrics, toy_config

from torchtitan_lite.config.checks import check_config
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.distributed.mesh import Degrees
from torchtitan_lite.training.trainer import Trainer

PROMPTS = ["the cat sat", "on"]


def sampled(dump, documents, **settings):
    given = {
        "samples.prompts": PROMPTS,
        "samples.freq": 2,
        "samples.max_new_tokens": 9,
        "optimizer.lr": 0.02,
        "training.global_batch_size": 4,
        **settings,
    }
    return toy_config(dump, documents, **given)


@pytest.fixture
def new_trainer(cpu_only, tmp_path, documents):
    def make(dump: str = "run", **settings) -> Trainer:
        if dist.is_initialized():
            dist.destroy_process_group()
        return Trainer(sampled(tmp_path / dump, documents, **settings))

    return make


def found(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def naively(model: torch.nn.Module, prompt: str) -> str:
    """The likeliest next token nine times, the whole text each time anew."""
    tokenizer = load_tokenizer("debug")
    start = tokenizer.encode(prompt, add_eos=False)
    ids = list(start)
    with torch.no_grad():
        for _ in range(9):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_id:
                break
    return tokenizer.backend.decode(ids)[len(tokenizer.backend.decode(start)) :]


@pytest.mark.parametrize("attention", ["sdpa_block_causal", "flex_block_causal"])
def test_texts_of_the_model_as_it_is(new_trainer, tmp_path, attention):
    trainer = new_trainer(**{"training.steps": 5, "model.flavor": f"debugmodel_{attention}", "training.seq_len": 128})
    first = [naively(trainer.model, prompt) for prompt in PROMPTS]
    trainer.train()
    last = [naively(trainer.model, prompt) for prompt in PROMPTS]
    entries = found(tmp_path / "run")
    assert [(e["step"], e["prompt"]) for e in entries] == [(s, p) for s in (0, 2, 4, 5) for p in PROMPTS]
    assert [e["text"] for e in entries[:2]] == first and [e["text"] for e in entries[-2:]] == last
    assert first != last and all(first)


def test_shards_may_lie_elsewhere(new_trainer, monkeypatch):
    """As those that are kept in CPU memory do: the model computes on the trainer's device."""
    trainer = new_trainer()
    expected = trainer.evaluation.samples.write()
    monkeypatch.setattr(trainer.model, "parameters", lambda: iter([torch.empty(1, device="meta")]))
    assert trainer.evaluation.samples.write() == expected


def test_training_is_not_disturbed(new_trainer, tmp_path):
    """Not by draws, nor by what compiled or recomputed blocks and dropout make of it."""
    settings = {
        "training.steps": 4,
        "compile.enable": True,
        "compile.backend": "aot_eager",
        "activation_checkpoint.mode": "full",
        "lora.rank": 4,
        "lora.dropout": 0.3,
        "lora.quantize_base": "nf4",
        "samples.temperature": 1.0,
        "samples.top_p": 0.9,
    }
    for dump, more in (("with", {}), ("again", {}), ("without", {"samples.prompts": []})):
        new_trainer(dump, **settings, **more).train()
    losses = [[(e["loss"], e["grad_norm"]) for e in read_metrics(tmp_path / d)] for d in ("with", "again", "without")]
    assert losses[0] == losses[1] == losses[2]
    assert found(tmp_path / "with") == found(tmp_path / "again")
    assert not (tmp_path / "without" / "samples.jsonl").exists()


def run(config) -> None:
    Trainer(config).train()


@pytest.mark.parametrize("degrees", [Degrees(dp_shard=2), Degrees(dp_replicate=2)])
def test_ranks_write_the_same(rank_pool, tmp_path, documents, degrees):
    for dump, world, layout in (("one", 1, {}), ("two", 2, layout_settings(degrees))):
        batch = {"training.local_batch_size": 4 // world, "samples.freq": 1}
        rank_pool.run(world, run, sampled(tmp_path / dump, documents, **layout, **batch))
    assert found(tmp_path / "one") == found(tmp_path / "two") and len(found(tmp_path / "one")) == 8


def test_chats_in_tensorboard(new_trainer, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    settings = {"samples.chat": True, "data.chat_template": str(template), "metrics.enable_tensorboard": True}
    trainer = new_trainer(**settings, **{"training.steps": 1})
    prompts = trainer.evaluation.samples.prompts
    assert prompts.side.tokenizer.backend.decode(prompts.tokens[1], skip_special_tokens=False) == "user: on!assistant: "
    trainer.train()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tb"))
    events.Reload()
    entries = events.Tensors("samples/prompt_2/text_summary")
    texts = [entry.tensor_proto.string_val[0].decode() for entry in entries]
    assert [entry.step for entry in entries] == [0, 1]
    expected = [f"{e['prompt']}\n\n{e['text']}" for e in found(tmp_path / "run") if e["prompt"] == "on"]
    assert texts == ["".join(f"    {line}\n" for line in text.split("\n")) for text in expected]


def test_rules(tmp_path, documents):
    def check(world_size=1, **settings):
        return check_config(sampled(tmp_path, documents, **settings), world_size=world_size, device_type="cpu")

    assert check() == []
    (warning,) = check(**{"samples.prompts": []})
    assert warning == "samples.freq, max_new_tokens: of no effect without samples.prompts"
    for world, settings, message in (
        (2, layout_settings(Degrees(pp=2)), "samples.prompts under pp: texts are written under data parallelism alone"),
        (4, layout_settings(Degrees(tp=2, cp=2)), "samples.prompts under tp, cp"),
        (
            1,
            {"samples.max_new_tokens": 500000},
            r"samples\.max_new_tokens=500000: with the longest prompt's \d+",
        ),
        (1, {"samples.freq": 0}, r"samples\.freq=0: must be at least 1"),
        (1, {"samples.temperature": -1.0}, r"samples\.temperature=-1\.0: must be at least 0"),
        (1, {"samples.top_p": 0.0}, r"samples\.top_p=0\.0: must be above 0"),
        (1, {"samples.chat": True, "data.chat_template": "nowhere.jinja"}, "nowhere.jinja"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(world, **settings)


def test_a_diverged_run_is_told_so(new_trainer):
    trainer = new_trainer(**{"training.steps": 5, "optimizer.lr": 1e30, "metrics.log_freq": 10})
    with pytest.raises(FloatingPointError, match=r"Training diverged: .* in step 2"):
        trainer.train()
