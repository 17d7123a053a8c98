import json
import shutil

import pytest
import tokenizers
import transformers
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER
from torchtitan_lite.generation.text import Streamed, TextSide

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence."},
    {"role": "user", "content": "And a tuple?"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chatml(tmp_path):
    """The package's tokenizer with two special tokens more, of which none is its EOS."""
    folder = shutil.copytree(DEBUG_TOKENIZER, tmp_path / "chatml")
    content = json.loads((folder / "tokenizer.json").read_text())
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = 1 + max(content["model"]["vocab"].values())
    content["added_tokens"] += [
        {"id": first + i, "content": token, **form} for i, token in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.mark.parametrize("which", ["debug", "chatml"])
def test_a_chat_is_that_of_transformers(chatml, which):
    folder = DEBUG_TOKENIZER if which == "debug" else chatml
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert TextSide.of(str(folder)).chat(MESSAGES) == expected


def test_what_ends_an_answer(chatml):
    side = TextSide.of(str(chatml))
    eos, end = side.tokenizer.eos_id, side.tokenizer.backend.token_to_id("<|im_end|>")
    assert side.stop_ids == {eos}
    assert side.chat_stop_ids() == {eos, end}
    (chatml / "config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert TextSide.of(str(chatml)).stop_ids == {eos, 3, 5}
    (chatml / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert TextSide.of(str(chatml)).stop_ids == {eos, 7, 9}
    (chatml / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert TextSide.of(str(chatml)).stop_ids == {eos, 7}
    (chatml / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        TextSide.of(str(chatml))
    debug = TextSide.of("debug")
    assert debug.chat_stop_ids() == debug.stop_ids == {debug.tokenizer.eos_id}


def test_a_text_begins_as_documents_do():
    side = TextSide.of("debug")
    assert side.prompt("a b") == side.tokenizer.encode("a b")[:-1]


def test_what_is_not_there_is_named(chatml):
    (chatml / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template; --chat-template names a file"):
        TextSide.of(str(chatml)).chat(MESSAGES)
    own = chatml / "other.jinja"
    own.write_text("{{ raise_exception('no system message here') }}")
    with pytest.raises(ValueError, match="no system message here"):
        TextSide.of(str(chatml), str(own)).chat(MESSAGES)


@pytest.mark.parametrize("text", ["plain words, and more", "été 漢字 🙂 end", "🙂", ""])
def test_text_comes_out_whole(text):
    side = TextSide.of("debug")
    ids = side.tokenizer.encode(text, add_bos=False, add_eos=False)
    streamed = Streamed(side)
    pieces = [streamed.add(token) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + streamed.rest() == text


def test_a_text_goes_on_with_the_space_of_its_next_word(tmp_path):
    """A tokenizer like Llama 2's: a word begins with its space, and the first of a text goes without one."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", "▁", "a", "b", "▁a", "▁b"])}
    backend = tokenizers.Tokenizer(BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    side = TextSide.of(str(tmp_path))
    before, new = side.prompt("a b"), [backend.token_to_id(token) for token in ("▁b", "a", "▁a", "</s>")]
    assert side.continued(before, new) == " ba a"
    streamed = Streamed(side, before)
    assert [streamed.add(token) for token in new] == [" b", "a", " a", ""]
    assert side.decode(new) == "ba a"
