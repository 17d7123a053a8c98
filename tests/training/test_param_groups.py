import pytest

from torchtitan_lite.config.schema import Optimizer, OptimizerGroup
from torchtitan_lite.training.param_groups import ParamGroup, group_parameters

SHAPES = {
    "tok_embeddings.weight": (50, 8),
    "layers.0.attention.wq.weight": (8, 8),
    "layers.0.attention_norm.weight": (8,),
    "layers.1.attention.wq.weight": (8, 8),
    "norm.weight": (8,),
    "output.weight": (50, 8),
}


def rules(config: Optimizer) -> dict[str, tuple[str, float, float]]:
    """Algorithm, factor and decay by parameter; each is in one group."""
    groups = group_parameters(SHAPES, config)
    assert sum(len(group.names) for group in groups) == len(SHAPES)
    return {name: (group.algorithm, group.lr_factor, group.weight_decay) for group in groups for name in group.names}


def test_norms_do_not_decay():
    assert group_parameters(SHAPES, Optimizer(weight_decay=0.3)) == [
        ParamGroup(
            "AdamW",
            1.0,
            0.3,
            (
                "tok_embeddings.weight",
                "layers.0.attention.wq.weight",
                "layers.1.attention.wq.weight",
                "output.weight",
            ),
        ),
        ParamGroup("AdamW", 1.0, 0.0, ("layers.0.attention_norm.weight", "norm.weight")),
    ]


def test_no_decay_is_what_the_patterns_say():
    assert {decay for *_, decay in rules(Optimizer(weight_decay=0.3, no_decay=[])).values()} == {0.3}
    found = rules(Optimizer(weight_decay=0.3, no_decay=["^norm", "embed"]))
    assert [name for name, rule in found.items() if rule[2] == 0] == ["tok_embeddings.weight", "norm.weight"]


def test_muon_takes_the_matrices_of_the_layers():
    found = rules(Optimizer("Muon", weight_decay=0.3))
    assert {name: rule[0] for name, rule in found.items()} == {
        "tok_embeddings.weight": "AdamW",
        "layers.0.attention.wq.weight": "Muon",
        "layers.0.attention_norm.weight": "AdamW",
        "layers.1.attention.wq.weight": "Muon",
        "norm.weight": "AdamW",
        "output.weight": "AdamW",
    }


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_the_first_table_that_matches_decides(name):
    groups = [
        OptimizerGroup(r"layers\.0\.", lr_factor=0.5),
        OptimizerGroup("attention", lr_factor=2.0, weight_decay=0.7),
        OptimizerGroup("^norm", lr_factor=0.0, weight_decay=0.1),
    ]
    assert rules(Optimizer(name, weight_decay=0.3, groups=groups)) == {
        "tok_embeddings.weight": (name, 1.0, 0.3),
        "layers.0.attention.wq.weight": (name, 0.5, 0.3),
        "layers.0.attention_norm.weight": (name, 0.5, 0.0),  # no_decay goes on where the table says nothing
        "layers.1.attention.wq.weight": (name, 2.0, 0.7),
        "norm.weight": (name, 0.0, 0.1),  # a table's decay goes before no_decay
        "output.weight": (name, 1.0, 0.3),
    }
