import json
import logging
import pickle

import pytest
from tokenizers import Tokenizer as Backend
from toy_data import BOS, EOS, save_character_tokenizer

from torchtitan_lite.data.tokenizer import TokenizerError, load_tokenizer


def ids_of(folder, text):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return [backend.token_to_id(character) for character in text]


@pytest.mark.parametrize("text", ["abc", ""])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_bos_and_eos_once_when_asked_whatever_the_post_processor_does(character_folder, text, add_bos, add_eos):
    tokenizer = load_tokenizer(str(character_folder))
    expected = [BOS] * add_bos + ids_of(character_folder, text) + [EOS] * add_eos
    assert tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos) == expected
    assert tokenizer.encode_batch([text, text], add_bos=add_bos, add_eos=add_eos) == [expected, expected]


@pytest.mark.parametrize("called_special", [True, False])
def test_special_tokens_in_text_are_text(character_folder, called_special):
    file = character_folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] = called_special
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(character_folder))
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):  # worker processes get a pickled one
        assert copy.encode("a<eos>b") == [BOS, *ids_of(character_folder, "a<eos>b"), EOS]
        assert copy.decode(copy.encode("a<eos>b", add_bos=False, add_eos=False)) == "a<eos>b"


def test_saved_truncation_and_padding_are_ignored(character_folder):
    backend = Backend.from_file(str(character_folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=10)
    backend.save(str(character_folder / "tokenizer.json"))
    assert len(load_tokenizer(str(character_folder)).encode("abcde")) == 7


def test_vocab_size_is_largest_id_plus_one(character_folder):
    assert load_tokenizer(str(character_folder)).vocab_size == 2 + 256
    file = character_folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 258, "content": "<extra>"})
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(character_folder)).vocab_size == 259


CONFIG, MAP, MODEL, GENERATION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({CONFIG: {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}}, (0, 1)),
        ({CONFIG: {"bos_token": None, "eos_token": "<eos>"}, MODEL: {"bos_token_id": 0}}, (None, 1)),
        ({CONFIG: {}, MAP: NAMED}, (0, 1)),
        ({MODEL: {"bos_token_id": 0, "eos_token_id": [1, 0]}}, (0, 1)),
        ({MODEL: {"bos_token_id": None}, GENERATION: {"bos_token_id": 0, "eos_token_id": 1}}, (0, 1)),
        ({}, (None, None)),
    ],
)
def test_where_bos_and_eos_come_from(character_folder, files, expected, caplog):
    (character_folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (character_folder / name).write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, logger="torchtitan_lite"):
        tokenizer = load_tokenizer(str(character_folder))
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected
    assert ("has no EOS" in caplog.text) == (expected[1] is None)


def test_fingerprint_follows_what_changes_an_encoding(tmp_path):
    def fingerprint(name, config=None):
        return load_tokenizer(str(save_character_tokenizer(tmp_path / name, config=config))).fingerprint

    assert fingerprint("a") == fingerprint("b") == fingerprint("c", {**NAMED, "model_max_length": 5})
    assert fingerprint("a") != fingerprint("d", {"eos_token": "<eos>"})


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json is not a tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not valid JSON"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "holds a list"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}'),
            "eos_token '<end>' is not in the vocabulary",
        ),
        (
            lambda folder: (
                (folder / "tokenizer_config.json").unlink(),
                (folder / "config.json").write_text('{"eos_token_id": 999}'),
            ),
            "eos_token_id 999 is not in the vocabulary",
        ),
    ],
)
def test_broken_folders_say_what_is_wrong(character_folder, break_it, message):
    break_it(character_folder)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(character_folder))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("tokenizer_config.json", "eos_token", value) for value in (3, ["<eos>"], {})]
    + [("config.json", "eos_token_id", value) for value in ("1", 1.0, -1, 2**40, True, [{}])],
)
def test_ends_of_a_wrong_type_are_not_in_the_vocabulary(character_folder, file, key, value):
    (character_folder / "tokenizer_config.json").unlink()
    (character_folder / file).write_text(json.dumps({key: value}))
    with pytest.raises(TokenizerError, match=rf"{key} .* is not in the vocabulary"):
        load_tokenizer(str(character_folder))


def test_missing_folder():
    with pytest.raises(TokenizerError, match=r"hf_assets_path=meta-llama/Llama-3\.1-8B: no such folder"):
        load_tokenizer("meta-llama/Llama-3.1-8B")


def test_debug_tokenizer_is_complete():
    tokenizer = load_tokenizer("debug")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 0, 1)
    text = "def f(x):\n\treturn x + 1  # été, 漢字, \U0001f600\r\n"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False)) == text
