"""Rows as text, against what they should look like, written by hand. One token is one byte, <bos> is 0 and <eos> 1."""

import numpy as np
import pytest
import tokenizers
import torch
from toy_data import EOS

from torchtitan_lite.data.collator import PADDING_ID, Batch, collate_rows
from torchtitan_lite.data.inspection.rows import (
    Row,
    Span,
    legend,
    plan_of,
    row_lines,
    show_value,
    token_table,
    token_text,
    visible,
)
from torchtitan_lite.data.packing.plan import PackingPlan
from torchtitan_lite.data.packing.report import packing_report
from torchtitan_lite.data.supervision import mark
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

RESET = "\033[0m"


@pytest.fixture
def tokenizer(character_folder) -> Tokenizer:
    return load_tokenizer(str(character_folder))


@pytest.fixture
def row_of(tokenizer):
    """A row of documents given as text; the tokens of ``masked`` documents, up to a place, are not supervised."""

    def make(*texts, seq_len=None, masked=(), origins=()) -> Row:
        documents = [np.array(tokenizer.encode(text), dtype=np.int32) for text in texts]
        for document, places in masked:
            documents[document] = mark(documents[document], np.arange(len(documents[document])) >= places)
        seq_len = sum(map(len, documents)) if seq_len is None else seq_len
        batch = collate_rows([documents], seq_len=seq_len, pad_id=EOS, max_documents_per_row=seq_len)
        return Row.of(batch, 0, "row 5", origins)

    return make


def test_a_row_without_colour(row_of, tokenizer):
    row = row_of("ab", "two\nlines\n", seq_len=20, origins=["record 8", "record 3"])
    # Documents of 4 and 12 tokens attend 10 + 78 pairs, and plain causal attention has 210 of them.
    assert row_lines(row, tokenizer, width=100, colour=False) == [
        "row 5 · 2 documents · 16 of 20 tokens · 14 targets · mask 42% of plain causal attention's pairs",
        "── document 0 · positions 0-3 · 4 tokens · 3 targets · record 8",
        "│ ⟦<bos>⟧ab<eos>",
        "── document 1 · positions 0-11 · 12 tokens · 11 targets · record 3",
        "│ ⟦<bos>⟧two↵",
        "│ lines↵",
        "│ <eos>",
        "... 4 padding",
    ]


def test_a_row_in_colour(row_of, tokenizer):
    row = row_of("a", "b\nc", "d", "e", "f", seq_len=18)
    lines = row_lines(row, tokenizer, width=100, colour=True)
    assert lines[0].startswith("\033[1mrow 5 · ") and lines[0].endswith(RESET)
    assert lines[1:6] == [
        f"\033[1;36m── document 0 · positions 0-2 · 3 tokens · 2 targets{RESET}",
        f"\033[36m│ {RESET}\033[36;2;7m<bos>{RESET}\033[36ma{RESET}\033[36;7m<eos>{RESET}",
        f"\033[1;33m── document 1 · positions 0-4 · 5 tokens · 4 targets{RESET}",
        f"\033[33m│ {RESET}\033[33;2;7m<bos>{RESET}\033[33mb↵{RESET}",
        f"\033[33m│ {RESET}\033[33mc{RESET}\033[33;7m<eos>{RESET}",
    ]
    codes = [line.split("m", 1)[0] for line in lines if "── document" in line]
    assert codes == ["\033[1;36", "\033[1;33", "\033[1;32", "\033[1;35", "\033[1;36"]  # neighbours differ
    assert lines[-1] == "... 1 padding"
    assert legend(colour=True) == "↵ newline, → tab, dim: not trained on, reversed: special token"
    assert legend(colour=False) == "↵ newline, → tab, ⟦ ⟧ not trained on"


def test_a_masked_prompt_is_dim_or_in_brackets(row_of, tokenizer):
    row = row_of("Q? A.", masked=[(0, 4)])  # <bos>, Q, ? and the space
    head, text = row_lines(row, tokenizer, width=100, colour=False)[1:]
    assert head == "── document 0 · positions 0-6 · 7 tokens · 3 targets"
    assert text == "│ ⟦<bos>Q? ⟧A.<eos>"
    text = row_lines(row, tokenizer, width=100, colour=True)[2]
    dim, plain, last = f"\033[36;2mQ? {RESET}", f"\033[36mA.{RESET}", f"\033[36;7m<eos>{RESET}"
    assert text == f"\033[36m│ {RESET}\033[36;2;7m<bos>{RESET}{dim}{plain}{last}"


@pytest.mark.parametrize("places", [2, 3, 4, 5])
def test_a_mask_that_ends_within_a_character(row_of, tokenizer, places):
    """é has two tokens and 語 three; a cut inside of one is shown before it, and nothing is lost or garbled."""
    row = row_of("é語", masked=[(0, places)])
    text = row_lines(row, tokenizer, width=100, colour=False)[2]
    expected = {2: "⟦<bos>⟧é語", 3: "⟦<bos>é⟧語", 4: "⟦<bos>é⟧語", 5: "⟦<bos>é⟧語"}[places]
    assert text == f"│ {expected}<eos>"


def test_spelled_special_tokens_are_told_from_real_ones(row_of, tokenizer):
    row = row_of("<eos>")
    text = row_lines(row, tokenizer, width=100, colour=True)[2]
    assert f"\033[36m<eos>{RESET}\033[36;7m<eos>{RESET}" in text


def test_lines_are_as_wide_as_the_terminal_at_most(row_of, tokenizer):
    row = row_of("x" * 30 + "\n" + "語" * 10, origins=["a record with a long name, " * 3])
    lines = row_lines(row, tokenizer, width=20, colour=False)
    text = [line for line in lines if line.startswith("│ ")]
    assert text == [
        "│ ⟦<bos>⟧" + "x" * 11,
        "│ " + "x" * 18,
        "│ x↵",
        "│ " + "語" * 9,  # two columns each
        "│ 語<eos>",
    ]
    assert all(len(line) <= 20 for line in lines)
    assert " ".join(" ".join(line.split()) for line in lines[: lines.index(text[0])]).endswith("a long name,")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n", "a→b↵"),
        ("\033[31mred\r\a", "\\x1b[31mred\\r\\x07"),  # would colour the terminal, return, ring
        ("\u202egnp.exe\u200b\u2028", "\\u202egnp.exe\\u200b\\u2028"),  # would reverse, hide, break the line
        ("é語 👋 \\n", "é語 👋 \\n"),
    ],
)
def test_nothing_moves_the_cursor(text, shown):
    assert visible(text) == shown


def test_the_table_of_tokens(row_of, tokenizer):
    table = [line.split() for line in token_table(row_of("a", "é\n", seq_len=10), tokenizer)]
    a, high, low, newline = tokenizer.encode("aé\n", add_bos=False, add_eos=False)
    assert table == [
        ["place", "token", "text", "label", "document_id", "position"],
        ["0", "0", "<bos>", str(a), "0", "0"],
        ["1", str(a), "a", "1", "0", "1"],
        ["2", "1", "<eos>", "-100", "0", "2"],
        ["3", "0", "<bos>", str(high), "1", "0"],
        ["4", str(high), "Ã", str(low), "1", "1"],  # half a character: the vocabulary's own name of the byte
        ["5", str(low), "©", str(newline), "1", "2"],
        ["6", str(newline), "↵", "1", "1", "3"],
        ["7", "1", "<eos>", "-100", "1", "4"],
        ["...", "2", "padding"],
    ]
    widths = {len(line) for line in token_table(row_of("a" * 30, seq_len=40), tokenizer)[:-1]}
    assert len(widths) == 1


def test_the_text_of_a_token_keeps_its_space():
    """Tokenizers that mark spaces drop the one in front of whatever is decoded first."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, "?"))
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend, None, None, "")
    assert tokenizer.decode([1]) == "b"
    assert token_text(1, 0, tokenizer) == " b"


def test_spans_of_a_row():
    ids = torch.tensor([[0, 0, 1, 2, PADDING_ID, PADDING_ID]], dtype=torch.int32)
    row = Row.of(Batch(ids.long(), ids.long(), ids, ids), 0, "")
    assert row.spans == [Span(0, 0, 2), Span(1, 2, 3), Span(2, 3, 4), Span(PADDING_ID, 4, 6)]
    assert row.mask_density == pytest.approx((3 + 1 + 1) / 21)
    padding = torch.full_like(ids, PADDING_ID)
    empty = Row.of(Batch(ids.long(), ids.long(), padding, ids), 0, "")
    assert empty.spans == [Span(PADDING_ID, 0, 6)] and empty.mask_density == 0


def test_rows_as_a_plan(row_of):
    plan = plan_of([row_of("a", "bcd", seq_len=10), row_of("", seq_len=10)], 10)
    report = packing_report(plan, plan.length)
    assert (report.rows, report.segments, report.tokens) == (2, 3, 3 + 5 + 2)
    assert report.padding_fraction == 0.5
    assert report.attended_pairs == 6 + 15 + 3


def test_rows_of_several_documents_of_like_length_show_most():
    def plan(*rows):
        lengths = np.array([length for row in rows for length in row], dtype=np.int32)
        offsets = np.cumsum([0, *map(len, rows)])
        return PackingPlan(100, offsets, np.arange(len(lengths)), np.zeros_like(lengths), lengths, 0)

    rows = plan([100], [90, 10], [34, 33, 33], [30, 30], [25, 25, 25, 25], [20] * 5)
    value = show_value(rows, most_documents=4)
    assert value.argsort().tolist()[:2] == [4, 2]
    assert value[5] == np.inf and value[0] == 1.0
    assert value[1] == pytest.approx(0.81 + 0.01) and value[3] == pytest.approx(0.18 + 0.4)
