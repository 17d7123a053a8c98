from pathlib import Path

import pytest
from toy_data import save_character_tokenizer

from torchtitan_lite.config.schema import Config


@pytest.fixture
def character_folder(tmp_path: Path) -> Path:
    return save_character_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def make_config(tmp_path: Path):
    """Config of a small packed run over local files, its cache apart from the user's."""

    def make(dataset_path: Path | str, *, dataset: str = "pydocs", **settings) -> Config:
        config = Config()
        config.training.dataset = dataset
        config.training.dataset_path = str(dataset_path)
        config.training.seq_len = settings.pop("seq_len", 8)
        config.training.local_batch_size = settings.pop("local_batch_size", 1)
        config.training.global_batch_size = settings.pop("global_batch_size", -1)
        config.training.seed = settings.pop("seed", 42)
        config.training.steps = settings.pop("steps", 1000)
        config.data.cache_dir = str(tmp_path / "cache")
        for name, value in settings.items():
            assert hasattr(config.data, name)
            setattr(config.data, name, value)
        return config

    return make
