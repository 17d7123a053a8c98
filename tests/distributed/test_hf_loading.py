"""Hugging Face weights go straight into whatever part of a parameter a rank holds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layouts import digest, layout_settings
from safetensors import safe_open
from tiny_hf import hf_model, saved
from toy_run import toy_config

from torchtitan_lite.config.schema import Config
from torchtitan_lite.convert import hf
from torchtitan_lite.convert.hf import HFWeights, hf_name
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.models.llama3.flavors import model_args

SHAPE = {"vocab_size": 97, "num_hidden_layers": 4, "head_dim": 20}  # 97: shards of unequal size


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The elements of each read from a file."""
    reads = []

    class Counted:
        def __init__(self, part):
            self.part = part

        def __getitem__(self, key):
            value = self.part[key]
            reads.append(value.numel())
            return value

    @contextmanager
    def opened(file: Path):
        with safe_open(file, framework="pt") as tensors:
            yield SimpleNamespace(get_slice=lambda name: Counted(tensors.get_slice(name)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "_opened", opened)
        yield reads


def loaded(folder: str, layouts: list[Degrees]) -> list[tuple[dict[str, str], int]]:
    """Of each layout, on this rank, the digests of the whole parameters, and the most elements read of one tensor."""
    from torchtitan_lite.training.parallelize import as_one, build_parts

    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    results = []
    for degrees in layouts:
        config = Config()
        config.training.mixed_precision_param = "float32"
        config.parallelism.pipeline_parallel_degree = degrees.pp
        args = model_args("hf", hf_assets_path=folder)
        parts = build_parts(config, args, Mesh("cpu", degrees, world.rank))
        for part in parts.values():
            part.to_empty(device="cpu")
        model = as_one(parts)
        weights = HFWeights(folder)
        with counted_reads() as reads:
            weights.load_into(model)
        results.append(({name: digest(parameter) for name, parameter in model.named_parameters()}, max(reads)))
    return results


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, [Degrees(dp_shard=2), Degrees(dp_replicate=2), Degrees(tp=2), Degrees(pp=2)]),
        (4, [Degrees(dp_shard=4), Degrees(dp_shard=2, tp=2), Degrees(pp=2, tp=2), Degrees(dp_shard=2, cp=2)]),
    ],
)
def test_every_layout_holds_the_weights_of_the_folder(rank_pool, tmp_path, ranks, layouts, tied):
    # Unequal shards of shards have no place that torch can tell; with tp the vocabulary is even.
    shape = {**SHAPE, "tie_word_embeddings": tied} | ({"vocab_size": 96} if ranks == 4 else {})
    if tied:
        layouts = [degrees for degrees in layouts if degrees.pp == 1]  # a tied model is not cut into stages
    folder = saved(tmp_path, shard="30KB", **shape)
    reference = dict(hf_model(**shape).named_parameters())
    by_rank = rank_pool.run(ranks, loaded, str(folder), layouts)
    for i, degrees in enumerate(layouts):
        held = [results[i] for results in by_rank]
        names = set().union(*(digests for digests, _ in held))
        for digests, largest in held:
            assert all(value == digest(reference[hf_name(name)]) for name, value in digests.items()), degrees
            # No rank reads more of a tensor than its shard; the largest is the embedding's.
            assert largest <= -(-97 * 48 // (degrees.dp_shard * degrees.cp * degrees.tp)) + 48, degrees
        assert {hf_name(name) for name in names} == set(reference), degrees


def finetuned(config: Config) -> dict[str, str]:
    from torchtitan_lite.training.trainer import Trainer

    trainer = Trainer(config)
    before = {name: digest(p) for name, p in trainer.model.named_parameters()}
    trainer.train()
    return before


def test_a_run_starts_from_a_folder_and_ends_in_one(rank_pool, documents, tmp_path):
    """One run on one rank, one over four: the same first weights, and the same folder at the end."""
    folder = saved(tmp_path / "hf", vocab_size=2048, num_hidden_layers=4, shard="100KB")
    reference = {name: digest(p) for name, p in hf_model(vocab_size=2048, num_hidden_layers=4).named_parameters()}
    folders = {}
    for name, degrees in {"one": Degrees(), "four": Degrees(pp=2, tp=2)}.items():
        config = toy_config(
            tmp_path / name,
            documents,
            **layout_settings(degrees),
            **{f"model.args.{field}": None for field in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden_dim")},
            **{
                "model.flavor": "hf_sdpa_block_causal",
                "model.hf_assets_path": str(folder),
                "training.global_batch_size": 4,
                "training.local_batch_size": 4 if name == "one" else 2,
                "checkpoint.enable": True,
                "checkpoint.initial_load_in_hf": True,
                "checkpoint.last_save_in_hf": True,
                "checkpoint.export_dtype": "bfloat16",
            },
        )
        copy_tokenizer(folder)
        held = rank_pool.run(degrees.world_size, finetuned, config)
        assert {hf_name(key): value for digests in held for key, value in digests.items()} == reference
        folders[name] = HFWeights(tmp_path / name / "hf" / "step-3")
    names = list(folders["one"].tensors)
    for name, tensor in folders["one"].read(names).items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(folders["four"].read([name])[name], tensor, rtol=1e-2, atol=1e-4)
        assert digest(tensor.float()) != reference[hf_name(name)]


def copy_tokenizer(folder: Path) -> None:
    for file in DEBUG_TOKENIZER.iterdir():
        shutil.copyfile(file, folder / file.name)
