from decimal import Decimal

import pytest

from torchtitan_lite.data.sources.document import (
    BadRecord,
    Document,
    Record,
    SourceError,
    TextOf,
    Undecodable,
    document_of,
    listed,
    parse_template,
)

FIELDS = {"title": "T", "n": 3, "x": 0.5, "yes": True, "meta": {"author": {"name": "A"}, "none": None}, "tags": ["a"]}


def text(template, fields=FIELDS):
    return TextOf("text", template)(Record("line 1", fields))


def problem(fields, text_of=TextOf("text"), names=None):  # noqa: B008
    with pytest.raises(BadRecord) as raised:
        text_of(Record("line 1", fields, names=names))
    return str(raised.value)


def test_text_field():
    assert TextOf("text")(Record("", {"text": "a\u00e9\n", "x": 1})) == "a\u00e9\n"
    assert TextOf("text")(Record("", {"text": ""})) == ""
    assert TextOf("a.b")(Record("", {"a.b": "dotted name"})) == "dotted name"


def test_template_is_filled_in():
    assert text("{title}\n\n{meta.author.name} {{n}}={n} {x} {yes}!") == "T\n\nA {n}=3 0.5 True!"
    assert text("{title}{title}") == "TT"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{title", "'}' before end of string"),
        ("title}", "Single '}'"),
        ("{}", "{} is no name of a field"),
        ("{0}", "{0} counts fields"),
        ("{a..b}", "{a..b} is no name"),
        ("{.a}", "{.a} is no name"),
        ("{a[0]}", "{a[0]} is no name"),
        ("{a!r}", "{a} has a format or conversion"),
        ("{a:>3}", "{a} has a format or conversion"),
        ("no field", "every document would be the same"),
        ("", "every document would be the same"),
    ],
)
def test_template_syntax(template, message):
    with pytest.raises(ValueError) as raised:
        parse_template(template)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"body": "x", "b": 1}, "no field 'text' (data.text_field); it has b, body"),
        ({}, "no field 'text' (data.text_field); it has no field at all"),
        ({"text": None}, "field 'text' is null (data.text_field)"),
        ({"text": 3}, "field 'text' is a number, not text (data.text_field)"),
        ({"text": 3.5}, "field 'text' is a number, not text (data.text_field)"),
        ({"text": True}, "field 'text' is a boolean, not text (data.text_field)"),
        ({"text": ["a"]}, "field 'text' is a list, not text (data.text_field)"),
        ({"text": {"a": 1}}, "field 'text' is an object, not text (data.text_field)"),
        ({"text": b"a"}, "field 'text' is bytes, not text (data.text_field)"),
        ({"text": Undecodable("invalid UTF-8")}, "field 'text': invalid UTF-8"),
        ({"text": "ab\ud83d"}, "character 3 of its text is the lone surrogate \\ud83d, which is half a character"),
    ],
)
def test_records_without_text(fields, message):
    assert problem(fields) == message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{title} {body}", "no field 'body' (data.template); it has meta, n, tags, title, x, yes"),
        ("{meta.year}", "no field 'meta.year' (data.template); it has author, none"),
        ("{title.name}", "no field 'title.name' (data.template): 'title' is text, no object"),
        ("{meta.none}", "field 'meta.none' is null (data.template)"),
        ("{tags}", "field 'tags' is a list, neither text nor a number (data.template)"),
        ("{meta.author}", "field 'meta.author' is an object, neither text nor a number (data.template)"),
    ],
)
def test_records_that_a_template_does_not_fit(template, message):
    assert problem(FIELDS, TextOf("text", template)) == message


def test_other_types_are_named():
    assert "is of type Decimal, neither" in problem({"a": Decimal(1)}, TextOf("text", "{a}"))


def test_names_stand_for_the_fields_that_were_not_read():
    assert problem({}, names=["z", "a"]) == "no field 'text' (data.text_field); it has a, z"
    assert listed((f"f{i:02d}" for i in range(23)), limit=3) == "f00, f01, f02 and 20 more"


def test_columns_are_what_is_read():
    assert TextOf("text").columns == ["text"]
    assert TextOf("text", "{b.x}{a}{b.y}").columns == ["b", "a"]


def test_document_or_problem():
    good, bad = Record("line 4", {"text": "x"}), Record("line 5", None, "broken")
    assert document_of(good, "f", TextOf("text"), "error") == Document("x", None)
    assert document_of(bad, "f", TextOf("text"), "skip") == Document(None, "f: line 5: broken")
    assert document_of(Record("", None, "broken"), "f", TextOf("text"), "skip") == Document(None, "f: broken")
    with pytest.raises(SourceError) as raised:
        document_of(bad, "f", TextOf("text"), "error")
    assert str(raised.value) == "f: line 5: broken. data.on_bad_record=skip would leave bad records out and count them."


@pytest.mark.parametrize("template", [r"{title}\n\n{body}", r"{title}\t{body}"])
def test_an_escape_that_no_shell_resolves(template):
    with pytest.raises(ValueError, match=r"is a backslash and a letter.*in double quotes in the file"):
        parse_template(template)
    assert parse_template("{title}\n\t{body}") == [("", ("title",)), ("\n\t", ("body",))]
