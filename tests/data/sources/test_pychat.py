import inspect
import json
import textwrap

import pytest

from torchtitan_lite.data.chat.encoding import encoder_of
from torchtitan_lite.data.sources.chats import ChatOf
from torchtitan_lite.data.sources.document import Record, Source
from torchtitan_lite.data.sources.pychat import pychat
from torchtitan_lite.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def chats():
    return [json.loads(text) for text in pychat()]


def test_questions_are_answered_by_docstrings(chats):
    expected = [
        {"role": "user", "content": "What does textwrap.dedent do?"},
        {
            "role": "assistant",
            "content": " ".join(inspect.getdoc(textwrap.dedent).split("\n\n")[0].split()),
        },
        {"role": "user", "content": "How is it called?"},
        {"role": "assistant", "content": "textwrap.dedent(text)"},
    ]
    assert expected in [[m for m in chat["messages"] if m["role"] != "system"] for chat in chats]


def test_it_has_chats_of_every_shape_and_always_the_same(chats):
    assert [json.loads(text) for text in pychat()] == chats
    assert 300 < len(chats) < 3000
    roles = {"-".join(message["role"][0] for message in chat["messages"]) for chat in chats}
    assert roles == {"u-a", "s-u-a", "u-a-u-a", "s-u-a-u-a"}
    assert len({json.dumps(chat) for chat in chats}) == len(chats)


def test_every_chat_is_one_and_its_answers_can_be_told(chats):
    """The text is that which the same chats would have as records of a file."""
    texts = list(pychat())
    assert [ChatOf("messages")(Record("", chat)) for chat in chats] == texts
    encoded = encoder_of(Source("", "pychat"), load_tokenizer("debug"), "debug").encode_batch(texts)
    assert not any(one.problem for one in encoded)
