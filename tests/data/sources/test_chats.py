import json

import pyarrow
import pytest
from toy_chat import ANSWER, TWO_TURNS, USER, write_records
from toy_files import write_parquet

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.sources.chats import ChatOf
from torchtitan_lite.data.sources.document import BadRecord, Record, SourceError, TextOf
from torchtitan_lite.data.sources.reading import load_documents, open_shards
from torchtitan_lite.data.sources.resolve import sources_of

CHAT, PAIR = ChatOf("messages"), ChatOf("prompt_completion")


def made(fields, chat_of=CHAT):
    return json.loads(chat_of(Record("line 1", fields)))


def problem(fields, chat_of=CHAT) -> str:
    with pytest.raises(BadRecord) as caught:
        chat_of(Record("line 1", fields))
    return str(caught.value)


def test_a_chat_is_kept_whole_and_in_its_order():
    call = {"id": "1", "function": {"name": "f", "arguments": {"b": 1, "a": ["x", None]}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "é", "name": "f"}]
    fields = {"id": 7, "messages": messages, "tools": [{"z": 1, "a": {"type": "object"}}]}
    assert made(fields) == {"messages": messages, "tools": fields["tools"]}
    text = CHAT(Record("", fields))
    assert "é" in text and text.index('"z"') < text.index('"a":{') and '"b":1,"a"' in text
    assert made({"messages": [USER], "tools": None}) == made({"messages": [USER], "tools": []}) == {"messages": [USER]}
    assert made({"messages": [USER], "tools": '[{"name": "f"}]'})["tools"] == [{"name": "f"}]
    assert made({"talk": [USER]}, ChatOf("messages", "talk")) == {"messages": [USER]}


def test_keys_without_a_value_are_left_out():
    padded = [
        {"role": "user", "content": "Hi?", "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": None}}, "id": None}],
        },
    ]
    assert made({"messages": padded})["messages"] == [
        USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conversations": []}, "no field 'messages' (data.messages_field); it has conversations"),
        ({"messages": None}, "field 'messages' is null (data.messages_field)"),
        ({"messages": "Hi"}, "field 'messages' is text, not a list of messages (data.messages_field)"),
        ({"messages": []}, "field 'messages' is an empty list (data.messages_field); a chat has messages"),
        ({"messages": [USER, "Hi"]}, "messages[1] is text, no object with role and content"),
        ({"messages": [{"content": "x"}]}, "messages[0]: it has no role; its keys are content"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0]: its role is a number, not text; its keys are "),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1] (assistant) has neither content nor tool_calls"),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
            "messages[1] (assistant) has neither content nor tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            "messages[0] (user): its content is a list, not text",
        ),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            "messages[0] has the keys from and value, as ShareGPT data do; rename them to role and content",
        ),
        (
            {"messages": [{**ANSWER, "weight": 0.5}]},
            "messages[0] (assistant): its weight is 0.5; 1 trains on an answer",
        ),
        ({"messages": [USER], "tools": [1]}, "field 'tools' is a list, not a list of objects"),
        ({"messages": [USER], "tools": "none"}, "field 'tools' is text, but no JSON: "),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "is the lone surrogate \\ud800"),
        ({"messages": [{"role": "user", "content": "x", "image": b"x"}]}, "its chat cannot be written as JSON: "),
    ],
)
def test_records_that_are_no_chat(fields, said):
    assert said in problem(fields)


def test_prompt_and_completion():
    assert made({"prompt": "", "completion": " x", "id": 1}, PAIR) == {"prompt": "", "completion": " x"}
    assert made({"prompt": [USER], "completion": [ANSWER], "tools": [{}]}, PAIR) == {
        "prompt": [USER],
        "completion": [ANSWER],
        "tools": [{}],
    }
    assert "no field 'completion' (data.format=prompt_completion)" in problem({"prompt": "x"}, PAIR)
    assert "'completion' is empty" in problem({"prompt": "x", "completion": ""}, PAIR)
    assert "field 'prompt' is text and 'completion' a list; both must be" in problem(
        {"prompt": "x", "completion": [ANSWER]}, PAIR
    )
    assert "completion[0]: it has no role" in problem({"prompt": [USER], "completion": [{}]}, PAIR)


def test_fields_that_are_read():
    assert (CHAT.required, CHAT.columns) == (["messages"], ["messages", "tools"])
    assert (PAIR.required, PAIR.columns) == (["prompt", "completion"], ["prompt", "completion", "tools"])
    assert TextOf("text").identity == ["text", None] != ChatOf("messages", "text").identity


# -- out of files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def source_of(tmp_path):
    def make(path, **data):
        config = Config()
        config.training.dataset_path = str(path)
        for name, value in {"format": "messages", **data}.items():
            setattr(config.data, name, value)
        return sources_of(config)[0]

    return make


def load(source, tmp_path, on_bad_record="error", num_proc=1):
    return load_documents(source, on_bad_record=on_bad_record, num_proc=num_proc, cache_dir=str(tmp_path / "cache"))


def test_every_kind_of_file_gives_the_same_text(tmp_path, source_of):
    """Tables have every key in every row; lines have not. A data set in a folder is read by its library."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": null}'}}]}
    records = [{"messages": TWO_TURNS}, {"messages": [USER, call, {"role": "tool", "content": "1"}, ANSWER]}]
    lines = write_records(tmp_path / "a.jsonl", records)
    table = pyarrow.Table.from_pylist(records)
    (tmp_path / "hub").mkdir()
    for path in (tmp_path / "a.parquet", tmp_path / "hub" / "train.parquet"):
        write_parquet(path, **{name: table[name] for name in table.column_names})
    expected = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records]
    config = Config()
    config.training.dataset, config.data.format = str(tmp_path / "hub"), "messages"
    for source in (source_of(lines), source_of(tmp_path / "a.parquet"), *sources_of(config)):
        documents = load(source, tmp_path)
        assert documents["text"][:] == expected and documents["problem"][:] == [None, None]
        assert [document.text for document in open_shards(source, on_bad_record="error").read(0)] == expected


def test_bad_chats_are_named_by_their_place(tmp_path, source_of):
    source = source_of(write_records(tmp_path / "a.jsonl", [{"messages": [USER]}, {"messages": []}, {"text": "x"}]))
    with pytest.raises(SourceError, match=r"a\.jsonl: line 2: field 'messages' is an empty list .*and 1 more"):
        load(source, tmp_path)
    missing = "line 3: no field 'messages' (data.messages_field); it has text"
    assert load(source, tmp_path, "skip")["problem"][2].endswith(missing)
    with pytest.raises(SourceError, match=r"no field 'messages' \(data\.messages_field\)"):
        list(open_shards(source, on_bad_record="error").read(0, 2))


def test_another_format_or_field_is_another_entry_of_the_cache(tmp_path, source_of):
    record = {"messages": [USER], "talk": [ANSWER], "prompt": "a", "completion": "b", "text": "x"}
    path = write_records(tmp_path / "a.jsonl", [record])
    texts = [
        load(source_of(path, **data), tmp_path)["text"][0]
        for data in ({}, {"messages_field": "talk"}, {"format": "prompt_completion"}, {"format": "text"}, {})
    ]
    assert texts[0] == texts[4] and len(set(texts)) == 4
    shards = [open_shards(source_of(path, **data), on_bad_record="error") for data in ({}, {"messages_field": "talk"})]
    assert shards[0].identity != shards[1].identity
