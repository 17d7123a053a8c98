"""Which tokens are supervised, against what was worked out by hand: the answer's text and one end-of-turn token."""

import json
import pickle

import numpy as np
import pytest
import tokenizers
from toy_chat import ANSWER, MARKED, TEMPLATES, TWO_TURNS, USER, save_chat_tokenizer
from toy_data import BOS, EOS, save_character_tokenizer
from transformers import PreTrainedTokenizerFast

from torchtitan_lite.data.chat.encoding import ChatEncoder, TextEncoder, encoder_of
from torchtitan_lite.data.chat.template import ChatTemplate, ChatTemplateError, load_chat_template
from torchtitan_lite.data.sources.document import Source
from torchtitan_lite.data.supervision import is_supervised, tokens_of
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

MINIMAL = TEMPLATES["chatml"].partition("{% if add_generation_prompt %}")[0]
UNMARKED = MARKED.replace("{%- generation %}{{ ", "{{- ").replace("{% endgeneration %}", "")


@pytest.fixture
def encoder(tmp_path):
    """Makes the encoder of a template, with one token per byte."""

    def make(template=None, *, format="messages", train_on="assistant") -> ChatEncoder:
        folder = save_chat_tokenizer(tmp_path / "tokenizer", template)
        return ChatEncoder(load_tokenizer(str(folder)), format, load_chat_template(folder, None), train_on)

    return make


def encode(encoder, messages=None, **chat):
    (encoded,) = encoder.encode_batch([json.dumps(chat if messages is None else {"messages": messages, **chat})])
    return encoded


def supervised(encoder, messages=None, **chat) -> list[str]:
    """Text of each stretch of supervised tokens."""
    encoded = encode(encoder, messages, **chat)
    assert encoded.problem is None
    stored = np.asarray(encoded.tokens)
    is_target = is_supervised(stored)
    stretches = np.split(tokens_of(stored), np.flatnonzero(np.diff(is_target)) + 1)
    return [encoder.tokenizer.decode(part.tolist()) for part in stretches[0 if is_target[0] else 1 :: 2]]


def problem(encoder, messages=None, **chat) -> str:
    encoded = encode(encoder, messages, **chat)
    assert encoded.problem is not None and len(encoded.tokens) == 0
    return encoded.problem


# -- answers -----------------------------------------------------------------------------------------------------------

EXPECTED = {
    "llama3": ["Yes.<|end|>", "Quite é sure.<|end|>"],
    "chatml": ["Yes.<|end|>", "Quite é sure.<|end|>"],
    "zephyr": ["Yes.<eos>", "Quite é sure.<eos>"],
    "inst": [" Yes. <eos>", " Quite é sure. <eos>"],
    "tools": ["Yes.<|end|>", "Quite é sure.<|end|>"],
    "marked": ["Yes.<|end|>", "Quite é sure.<|end|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_their_end_of_turn_are_supervised_and_nothing_else(encoder, name):
    encoder = encoder(TEMPLATES[name])
    assert supervised(encoder, TWO_TURNS) == EXPECTED[name]
    assert supervised(encoder, TWO_TURNS[:2]) == EXPECTED[name][:1]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_transformers(encoder, tmp_path, name):
    """So there is one BOS where the template writes one, though the tokenizer's post-processor adds one too."""
    encoder = encoder(TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "tokenizer"))
    ids = tokens_of(np.asarray(encode(encoder, TWO_TURNS).tokens)).tolist()
    assert ids == theirs.apply_chat_template(TWO_TURNS, chat_template=TEMPLATES[name], return_dict=False)
    assert ids.count(BOS) == {"chatml": 0, "zephyr": 0, "inst": 2}.get(name, 1)
    assert ids[0] != BOS or ids[1] != BOS
    assert ids[-1] != EOS or TEMPLATES[name].count("eos_token")


def test_the_markers_say_the_same_as_prefixes(encoder):
    messages = [{"role": "system", "content": "Be brief."}, *TWO_TURNS, USER]  # the last has no answer
    assert encode(encoder(MARKED), messages).tokens.tolist() == encode(encoder(UNMARKED), messages).tokens.tolist()


def test_tool_calls_are_answers_and_tool_results_are_not(encoder):
    call = {"function": {"name": "weather", "arguments": {"town": "Zürich"}}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "22"},
        ANSWER,
        {"role": "assistant", "content": "Or no."},
    ]
    encoder = encoder(TEMPLATES["tools"])
    text = '<|call|>weather{"town": "Zürich"}'
    expected = [f"{text}{text}<|end|>", f"{text}<|end|>", "Yes.<|end|>", "Or no.<|end|>"]
    assert supervised(encoder, messages, tools=[{"name": "weather"}]) == expected


def test_answers_behind_no_generation_prompt(encoder):
    """A call, and an answer of nothing, begin where a text in their place would."""
    calls = "{% if message.tool_calls %}{{ '<|call|>' + message.tool_calls[0].name + eos_token }}{% else %}{{ ' ' + "
    template = encoder(
        TEMPLATES["inst"].replace("{{ ' ' + ", calls).replace("eos_token }}{% endif", "eos_token }}{% endif %}{% endif")
    )
    call = {"role": "assistant", "tool_calls": [{"name": "weather"}]}
    assert supervised(template, [USER, call, USER, {"role": "assistant", "content": ""}]) == [
        "<|call|>weather<eos>",
        "  <eos>",
    ]


def test_answers_without_weight_are_not_supervised(encoder):
    first, second = ({**message, "weight": weight} for message, weight in zip(TWO_TURNS[1::2], (0, 1), strict=True))
    messages = [USER, first, TWO_TURNS[2], second]
    for template in (MARKED, UNMARKED):
        assert supervised(encoder(template), messages) == ["Quite é sure.<|end|>"]
        assert supervised(encoder(template), [USER, TWO_TURNS[1], USER, first]) == ["Yes.<|end|>"]
        assert "no message of role assistant to train on whose weight is above 0" in problem(
            encoder(template), [USER, first]
        )
    last = encoder(MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last"))
    assert "enclose 1 parts of it, but it has 2 messages" in problem(
        last, messages
    )  # of which one is not to be trained on


def test_all_of_a_chat(encoder):
    encoder = encoder(TEMPLATES["chatml"], train_on="all")
    (text,) = supervised(encoder, [*TWO_TURNS, USER])
    assert text.startswith("<|start|>user\nHi?<|end|>\n") and text.endswith("<|end|>\n")
    assert supervised(encoder, [USER]) == ["<|start|>user\nHi?<|end|>\n"]


def test_the_first_supervised_token_is_the_first_of_the_answer(encoder):
    """Of a real vocabulary, where tokens hold several characters."""
    encoder = ChatEncoder(load_tokenizer("debug"), "messages", debug_template(), "assistant")
    answer = "return the model's documents"
    assert supervised(encoder, [USER, {"role": "assistant", "content": answer}]) == [f"{answer}<|end_of_text|>"]
    ids = np.asarray(encode(encoder, [USER, {"role": "assistant", "content": answer}]).tokens)
    alone = encoder.tokenizer.encode(answer, add_bos=False)
    assert ids[is_supervised(ids)].tolist() == alone and len(alone) < len(answer) / 2


def debug_template():
    return encoder_of(Source("", "pychat"), load_tokenizer("debug"), "debug").template


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [[USER], [{"role": "system", "content": "Be brief."}, USER]])
@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_a_chat_without_an_answer(encoder, name, messages):
    roles = ", ".join(message["role"] for message in messages)
    assert f"no message of role assistant to train on, but only of {roles}; data.train_on=all would" in problem(
        encoder(TEMPLATES[name]), messages
    )


def test_a_template_without_generation_prompt_would_train_headers(encoder):
    found = problem(encoder(MINIMAL), TWO_TURNS)
    assert "adds no generation prompt, so that the header before the answer would be trained on" in found
    assert "messages[1]: " in found and "{% generation %}" in found and "data.train_on=all" in found
    assert len(supervised(encoder(MINIMAL, train_on="all"), TWO_TURNS)) == 1  # what it says would work
    headed = encoder("{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}")
    for content in ("Yes.", "", "a", "assistant"):  # of which some are how the header begins
        assert "adds no generation prompt" in problem(headed, [USER, {"role": "assistant", "content": content}])


def test_a_chat_that_begins_with_an_answer(encoder):
    assert supervised(encoder(TEMPLATES["chatml"]), [ANSWER, *TWO_TURNS]) == ["Yes.<|end|>", *EXPECTED["chatml"]]
    found = problem(encoder("{{ messages[0].role }}" + TEMPLATES["chatml"]), [ANSWER, *TWO_TURNS])
    assert "messages[0]: where this answer begins" in found and "the first 0 messages alone are not rendered: " in found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        # Thinking of earlier answers is taken out, as some templates do.
        (
            "{{ message.content.split('</think>')[-1] if not loop.last else message.content }}",
            "the messages up to it are rendered in another way alone",
        ),
        # A token ends the last message only.
        (
            "{{ message.content }}{% if loop.last %}{{ '<|call|>' }}{% endif %}",
            "the 1 messages before it are rendered in another way alone",
        ),
        # The whole begins with how many messages there are.
        (None, "the 1 messages before it are rendered in another way alone"),
    ],
)
def test_a_template_that_writes_earlier_turns_in_another_way(encoder, content, said):
    if content is None:
        template = "{{ messages | length }}" + TEMPLATES["chatml"]
    else:
        template = TEMPLATES["chatml"].replace(
            "+ message.content + '<|end|>' + '\n' }}", "}}" + content + "{{ '<|end|>\n' }}"
        )
    thinking = {"role": "assistant", "content": "<think>Hm.</think>Yes."}
    assert said in problem(encoder(template), [USER, thinking, USER, ANSWER])
    if "think" in template:  # the last one is written down as if it alone were asked for
        last = supervised(encoder(template), [USER, {**thinking, "weight": 0}, USER, thinking])
        assert last == ["<think>Hm.</think>Yes.<|end|>"]


def test_markers_that_enclose_other_parts_than_the_answers(encoder):
    last = encoder(MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last"))
    assert supervised(last, TWO_TURNS) == ["Quite é sure.<|end|>"]  # which the template may want
    assert "enclose 1 parts of it, but it has 2 messages of role" in problem(
        last, prompt=TWO_TURNS[:3], completion=TWO_TURNS[3:]
    )
    none = encoder(MARKED.replace("message.role == 'assistant'", "message.role == 'nobody'"))
    assert "enclose 0 parts of it, but it has 2 messages" in problem(none, TWO_TURNS)
    all_of_it = encoder(MARKED.replace("message.role == 'assistant'", "true"))
    assert "enclose 4 parts of it, but it has 2 messages" in problem(all_of_it, TWO_TURNS)
    nested = "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}"
    assert "markers into each other" in problem(encoder(nested), TWO_TURNS)
    cut = "{% set answer %}{% generation %}Yes.{{ eos_token }}{% endgeneration %}{% endset %}{{ answer[1:] }}" + MARKED
    assert "or cuts them off" in problem(encoder(cut), TWO_TURNS)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "no special token ends it ('Yes.')"),
        ("### End", "no special token ends it ('Yes.### End')"),
        ("<|end|> and more", "no special token ends it"),
        ("<|end|><|end|>", "several special tokens end it ('<|end|><|end|>'), and one must"),
        ("<|end|>\n<eos>", "several special tokens end it"),
    ],
)
def test_an_answer_ends_in_one_special_token(encoder, end, said):
    marked = MARKED.replace("'<|end|>' }}{% end", f"{end!r} }}}}{{% end")
    assert said in problem(encoder(marked), TWO_TURNS[:2])
    prefix = UNMARKED.replace("message.content + '<|end|>' }}\n", f"message.content + {end!r} }}}}\n")
    assert said.partition(" (")[0] in problem(encoder(prefix), TWO_TURNS[:2])


def test_a_character_that_the_tokenizer_does_not_know_ends_no_answer():
    """Its token, <unk>, is a special one."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, [], unk_token="<unk>")
    )
    backend.add_special_tokens(["<unk>", "<eos>"])
    encoder = ChatEncoder(Tokenizer(backend, None, 1, "few"), "messages", ChatTemplate("t", MERGING), "assistant")
    messages = [{"role": "user", "content": "éb"}, {"role": "assistant", "content": "aé"}]
    assert encode(encoder, messages).tokens.tolist() == [~0, ~3, ~0, 2, 0, 1]  # é, b, the colon; a, é, <eos>
    unended = ChatEncoder(encoder.tokenizer, "messages", ChatTemplate("t", MERGING.replace("<eos>", "")), "assistant")
    assert "no special token ends it" in problem(unended, messages)


def test_text_that_spells_a_special_token(encoder):
    encoder = encoder(TEMPLATES["tools"])
    for messages in (
        [{"role": "user", "content": "What is <|end|>?"}, ANSWER],
        [USER, {"role": "assistant", "content": "a<eos>"}],
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": {"<|call|>": 1}}}]}],
        [USER, {"role": "assistant", "content": "\ufdd0"}],
    ):
        assert "its text spells " in problem(encoder, messages)
    assert "its text spells '<eos>'" in problem(encoder, TWO_TURNS, tools=[{"name": "<eos>"}])


def test_an_answer_that_merges_with_the_text_before_it():
    """ "b:" is [b, :], but ": " is one token: what follows is not what the model would be asked for."""
    encoder = ChatEncoder(merging_tokenizer(), "messages", ChatTemplate("t", MERGING), "assistant")
    good = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
    assert supervised(encoder, good) == ["a<eos>"]
    merged = [good[0], {"role": "assistant", "content": " a"}]
    assert problem(encoder, merged).startswith("answer 1: 'b:' and ' a<eos>' are tokenised together")
    last = [*good, good[0], merged[1]]
    assert problem(encoder, last).startswith("answer 2: ")


MERGING = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content + ':' }}"
    "{% else %}{{ message.content + '<eos>' }}{% endif %}{% endfor %}"
)


def merging_tokenizer() -> Tokenizer:
    vocab = {"<eos>": 0, "b": 1, ":": 2, " ": 3, "a": 4, "b:": 5, ": ": 6, "b: ": 7}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [(":", " "), ("b", ": "), ("b", ":")]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, None, 0, "merging")


# -- prompt and completion ---------------------------------------------------------------------------------------------


def test_prompt_and_completion_that_are_text(encoder):
    encoder = encoder(format="prompt_completion")
    stored = np.asarray(encode(encoder, prompt="2+2=", completion="4").tokens)
    assert tokens_of(stored).tolist() == [BOS, *encoder.tokenizer.encode("2+2=4", add_bos=False, add_eos=False), EOS]
    assert is_supervised(stored).tolist() == [False] * 5 + [True] * 2
    # Text that spells a special token is text, as in documents.
    assert supervised(encoder, prompt="", completion="a<eos>") == ["a<eos><eos>"]
    stored = np.asarray(encode(encoder, prompt="<eos>", completion="a").tokens)
    assert tokens_of(stored).tolist().count(EOS) == 1


def test_a_completion_that_merges_with_its_prompt():
    encoder = ChatEncoder(merging_tokenizer(), "prompt_completion", None, "assistant")
    assert encoder.tokenizer.encode("b:", add_eos=False) == [5]
    assert encoder.tokenizer.encode("b: a", add_eos=False) == [7, 4]
    assert problem(encoder, prompt="b:", completion=" a").startswith("'b:' and ' a' are tokenised together")
    stored = np.asarray(encode(encoder, prompt="b: ", completion="a").tokens)
    assert stored.tolist() == [~7, 4, 0]
    everything = ChatEncoder(merging_tokenizer(), "prompt_completion", None, "all")
    assert np.asarray(encode(everything, prompt="b: ", completion="a").tokens).tolist() == [7, 4, 0]


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_of_prompt_and_completion_in_messages_the_completion_is_supervised(encoder, name):
    encoder = encoder(TEMPLATES[name], format="prompt_completion")
    assert supervised(encoder, prompt=TWO_TURNS[:3], completion=TWO_TURNS[3:]) == ["Quite é sure.<|end|>"]
    assert supervised(encoder, prompt=TWO_TURNS[:1], completion=TWO_TURNS[1:]) == EXPECTED[name]
    assert "its completion has no message of role assistant" in problem(
        encoder, prompt=TWO_TURNS[:2], completion=TWO_TURNS[2:3]
    )


def test_messages_need_a_template_and_text_does_not(encoder, tmp_path):
    assert "its messages need a chat template" in problem(
        encoder(format="prompt_completion"), prompt=[USER], completion=[ANSWER]
    )
    source = Source("chats", "OWNER/NAME", format="messages")
    with pytest.raises(ChatTemplateError, match=r"chats need a chat template, but model\.hf_assets_path has none"):
        encoder_of(source, encoder().tokenizer, str(tmp_path / "tokenizer"))


def test_a_completion_needs_an_end(tmp_path):
    folder = save_character_tokenizer(tmp_path, config={"bos_token": "<bos>", "eos_token": None})
    encoder = ChatEncoder(load_tokenizer(str(folder)), "prompt_completion", None, "assistant")
    assert "no EOS" in problem(encoder, prompt="a", completion="b")


# -- batches -----------------------------------------------------------------------------------------------------------


def test_each_document_of_a_batch_is_its_own(encoder):
    encoder = encoder(TEMPLATES["chatml"])
    texts = [
        json.dumps(chat)
        for chat in (
            {"messages": TWO_TURNS},
            {"prompt": "a", "completion": "b"},
            {"messages": [USER]},
            {"messages": [USER, ANSWER]},
        )
    ]
    texts.insert(1, "")  # a record that was bad before
    for copy in (encoder, pickle.loads(pickle.dumps(encoder))):
        together = copy.encode_batch(texts)
        for text, one in zip(texts, together, strict=True):
            (alone,) = copy.encode_batch([text])
            assert np.array_equal(one.tokens, alone.tokens) and one.problem == alone.problem
        assert [len(one.tokens) > 0 for one in together] == [True, False, True, False, True]
        assert [one.problem is None for one in together] == [True, True, True, False, True]


def test_the_fingerprint_follows_what_changes_an_encoding(encoder, tmp_path):
    def fingerprints(*args, **options):
        made = encoder(*args, **options)
        return made.fingerprint, tuple(made.settings.values())

    first = fingerprints(TEMPLATES["chatml"])
    assert fingerprints(TEMPLATES["chatml"]) == first
    others = [
        fingerprints(TEMPLATES["chatml"] + " "),
        fingerprints(TEMPLATES["chatml"], train_on="all"),
        fingerprints(TEMPLATES["chatml"], format="prompt_completion"),
    ]
    assert len({first, *others}) == 4 and len({first[0], *(other[0] for other in others)}) == 4
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert TextEncoder(tokenizer).fingerprint == tokenizer.fingerprint != first[0]
