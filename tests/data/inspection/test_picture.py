import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from toy_data import EOS

from torchtitan_lite.data.collator import collate_rows
from torchtitan_lite.data.inspection.picture import (
    LEGEND_LINES,
    PADDING,
    PALETTE,
    UNSEEN,
    draw_row,
    mask_image,
    save_figure,
    suffixes,
)
from torchtitan_lite.data.inspection.rows import Row, plan_of
from torchtitan_lite.data.packing.report import packing_report
from torchtitan_lite.data.tokenizer import load_tokenizer


@pytest.fixture
def tokenizer(character_folder):
    return load_tokenizer(str(character_folder))


@pytest.fixture
def figure_of(tokenizer):
    def make(*texts, seq_len, title="A row"):
        documents = [np.array(tokenizer.encode(text)) for text in texts]
        batch = collate_rows([documents], seq_len=seq_len, pad_id=EOS, max_documents_per_row=seq_len)
        row = Row.of(batch, 0, "row 0")
        plan = plan_of([row], seq_len)
        return draw_row(row, tokenizer, packing_report(plan, plan.length, "toys"), title=title)

    return make


def texts(figure) -> list[str]:
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
    return [text for text in found if text]


def naive_mask(document_ids) -> np.ndarray:
    size = len(document_ids)
    image = np.zeros((size, size, 3))
    for query in range(size):
        for key in range(size):
            document = document_ids[query]
            if key > query:
                colour = "white"
            elif document_ids[key] != document:
                colour = UNSEEN
            else:
                colour = PADDING if document < 0 else PALETTE[document % len(PALETTE)]
            image[query, key] = to_rgb(colour)
    return image


def test_the_mask_is_the_one_that_document_ids_stand_for():
    ids = np.array([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8, -1, -1])
    np.testing.assert_array_equal(mask_image(ids), naive_mask(ids))
    np.testing.assert_array_equal(mask_image(ids, pixels=8), naive_mask(ids)[::2, ::2])


def test_a_long_row_needs_no_square_of_its_length():
    ids = np.repeat(np.arange(8), 16_384)
    assert mask_image(ids).shape == (1024, 1024, 3)


def test_what_is_written(figure_of):
    found = texts(figure_of("hello world", "a", seq_len=20, title="Row 7: 2 documents in 20 tokens"))
    # Documents of 13 and 3 tokens attend 91 + 6 of 210 pairs.
    for text in (
        "Row 7: 2 documents in 20 tokens",
        "block-causal mask: 46% of plain causal attention's pairs",
        "document 0, 13 tokens",
        "hello world",
        "document 1, 3 tokens",
        "padding, 4 tokens",
        "tokens in a document of toys",
    ):
        assert text in found
    bars = {text.get_text(): count.get_text() for text, count in histogram(figure_of("hello world", "a", seq_len=20))}
    assert bars == {"2+": "1", "4+": "0", "8+": "1"}


def histogram(figure):
    axes = figure.axes[-1]
    return zip(axes.get_xticklabels(), axes.texts, strict=True)


def test_documents_beyond_the_legend_are_counted(figure_of):
    found = texts(figure_of(*"abcdefghijklmn", seq_len=50))
    listed = [text for text in found if text.startswith("document ")]
    assert len(listed) == LEGEND_LINES - 1
    assert f"and {15 - len(listed)} more" in found  # 14 documents and the padding


@pytest.mark.parametrize("text", ["$x^{2$ costs 5", "語 \x1b[31m", "_{", "\\frac{"])
def test_any_text_can_be_drawn(figure_of, tmp_path, text):
    save_figure(figure_of(text, "b", seq_len=40, title=text), tmp_path / "new" / "row.png")
    assert (tmp_path / "new" / "row.png").stat().st_size > 10_000


def test_a_picture_of_sane_size(figure_of, tmp_path):
    assert ".png" in suffixes() and ".txt" not in suffixes()
    path = tmp_path / "row.png"
    save_figure(figure_of("hello", "world", seq_len=16), path)
    image = matplotlib.image.imread(path)
    height, width, _ = image.shape
    assert 800 <= width <= 1600 and 800 <= height <= 1600
    blue = np.isclose(image[:, :, :3], to_rgb(PALETTE[0]), atol=0.02).all(axis=-1)
    assert blue.mean() > 0.02  # the first document's triangle and bar
    assert path.stat().st_size < 300_000
