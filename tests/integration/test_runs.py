"""Whole runs: the three attentions, ranks, compilation."""

import functools

import pytest
from runs import TINY, train, write_documents

VARLEN, FLEX, PLAIN = "debugmodel_sdpa_block_causal", "debugmodel_flex_block_causal", "debugmodel"
STEPS = 20


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    documents = write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl", 300)
    return (*TINY, f"--training.dataset_path={documents}")


@pytest.fixture(scope="module")
def losses(settings, tmp_path_factory):
    """Losses of each step under a flavor; a run is made once."""

    @functools.cache
    def run(flavor: str, *more: str) -> list[float]:
        folder = tmp_path_factory.mktemp(flavor)
        entries = train(folder, *settings, f"--model.flavor={flavor}", f"--training.steps={STEPS}", *more)
        assert len(entries) == STEPS
        return [entry["loss"] for entry in entries]

    return run


def test_block_causal_attentions_agree_and_plain_differs(losses):
    assert losses(FLEX) == pytest.approx(losses(VARLEN), rel=1e-4)
    assert losses(PLAIN) != pytest.approx(losses(VARLEN), rel=1e-3)


@pytest.mark.parametrize("flavor", [VARLEN, FLEX])
def test_compiled_equals_eager(losses, flavor):
    """With selective activation checkpointing too, which changes nothing in eager mode."""
    compiled = losses(flavor, "--compile.enable", "--activation_checkpoint.mode=selective")
    assert compiled == pytest.approx(losses(flavor), rel=1e-4)


def test_ranks_agree(settings, tmp_path):
    """Two ranks of FSDP2 give the losses and norms of one process, whatever targets each of them holds."""
    settings = (*settings, "--training.steps=5", "--training.global_batch_size=8", "--training.max_norm=0.5")
    one = train(tmp_path / "1", *settings, "--training.local_batch_size=8")
    assert all(m["grad_norm"] > 0.5 for m in one)  # so that clipping is at work
    two = train(tmp_path / "2", *settings, "--training.local_batch_size=2", ngpu=2)
    for name in ("loss", "grad_norm"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=1e-5), name
    for name in ("tokens_seen", "lr", "padding_fraction", "documents_per_row"):
        assert [m[name] for m in two] == [m[name] for m in one], name
    assert any(m["max_loss"] > m["loss"] * 1.001 for m in two)  # the ranks' batches do differ
