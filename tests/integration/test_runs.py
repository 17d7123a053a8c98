"""Whole runs: the debug model as shipped, the three attentions, ranks, compilation."""

import pytest
from runs import REPO, TINY, train, write_documents

BLOCK_CAUSAL = ("debugmodel_sdpa_block_causal", "debugmodel_flex_block_causal")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    documents = write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl", 300)
    return (*TINY, f"--training.dataset_path={documents}")


def losses(run):
    return [m["loss"] for m in run]


def test_block_causal_attentions_agree_and_plain_differs(settings, tmp_path):
    varlen, flex, plain = (
        train(tmp_path / flavor, *settings, f"--model.flavor={flavor}", "--training.steps=20")
        for flavor in (*BLOCK_CAUSAL, "debugmodel")
    )
    assert losses(flex) == pytest.approx(losses(varlen), rel=1e-4)
    assert losses(plain)[1:] != pytest.approx(losses(varlen)[1:], rel=1e-4)


@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_ranks_agree(settings, tmp_path, max_norm):
    """Two and four ranks of FSDP2 give the losses and norms of one process, whatever targets each of them holds."""
    settings = (
        *settings,
        "--training.steps=5",
        "--training.global_batch_size=8",
        f"--training.max_norm={max_norm}",
    )
    one = train(tmp_path / "1", *settings, "--training.local_batch_size=8")
    for ranks, local in ((2, 2), (4, 2)):
        run = train(tmp_path / str(ranks), *settings, f"--training.local_batch_size={local}", ngpu=ranks)
        for name in ("loss", "grad_norm"):
            assert [m[name] for m in run] == pytest.approx([m[name] for m in one], rel=1e-5), (ranks, name)
        assert [m["tokens_seen"] for m in run] == [m["tokens_seen"] for m in one]
        assert any(m["max_loss"] > m["loss"] * 1.001 for m in run)  # the ranks' batches do differ


@pytest.mark.parametrize("flavor", [*BLOCK_CAUSAL, "debugmodel"])
def test_compiled_equals_eager(settings, tmp_path, flavor):
    settings = (
        *settings,
        f"--model.flavor={flavor}",
        "--training.steps=5",
        "--activation_checkpoint.mode=selective",
    )
    eager = train(tmp_path / "eager", *settings)
    compiled = train(tmp_path / "compiled", *settings, "--compile.enable")
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)


def test_debug_model_as_shipped(tmp_path):
    """What the README's first command does, cut to its first steps: real text, near ln(2048) = 7.62, falling."""
    run = train(tmp_path, "--training.steps=8", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=2")
    assert abs(run[0]["loss"] - 7.62) < 0.3
    assert run[-1]["loss"] < run[0]["loss"] - 0.5
    assert (tmp_path / "config.toml").is_file()
    assert REPO not in tmp_path.parents
