import numpy as np
import pytest
import torch

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.data.collator import collate_rows, num_targets
from torchtitan_lite.data.packing.plan import STRATEGIES, PackingSettings, pack
from torchtitan_lite.data.packing.report import packing_report
from torchtitan_lite.observability.flops import attended_pairs


def report_of(lengths, seq_len, cap=16, name="", **settings):
    lengths = np.array(lengths, dtype=np.int64)
    return packing_report(pack(lengths, PackingSettings(seq_len, cap, 0, **settings)), lengths, name)


def test_split_worked_out_by_hand():
    # 121 tokens in rows of 60: pieces of 60, 60, 1; the document of 2 joins the last.
    report = report_of([121, 0, 2], 60)
    assert (report.documents, report.empty_documents, report.split_documents) == (2, 1, 1)
    assert (report.rows, report.segments, report.max_documents_in_row, report.tokens) == (3, 4, 2, 123)
    assert report.documents_per_row == pytest.approx(4 / 3)
    assert report.padding_fraction == pytest.approx(57 / 180)
    assert report.target_fraction == pytest.approx((59 + 59 + 0 + 1) / 180)
    assert report.mask_density == pytest.approx((1830 + 1830 + 1 + 3) / (3 * 1830))
    assert report.lost_fraction == 0
    assert report.length_bins == ((2, 1), (4, 0), (8, 0), (16, 0), (32, 0), (64, 1))


def test_lost_tokens_worked_out_by_hand():
    truncated = report_of([8, 10, 25, 4], 10, oversize="truncate")
    assert (truncated.documents, truncated.truncated_documents, truncated.tokens, truncated.tokens_lost) == (
        4,
        1,
        32,
        15,
    )
    assert truncated.lost_fraction == pytest.approx(15 / 47) and truncated.split_documents == 0
    dropped = report_of([8, 10, 25, 4], 10, oversize="drop")
    assert (dropped.documents, dropped.dropped_documents, dropped.tokens, dropped.tokens_lost) == (3, 1, 22, 25)
    assert dropped.length_bins == ((4, 1), (8, 2), (16, 1))  # of the documents as they came


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_agrees_with_the_batches_of_the_plan(strategy):
    seq_len, lengths = 32, np.arange(120) * 37 % 71
    plan = pack(lengths, PackingSettings(seq_len, 5, 3, strategy))
    report = packing_report(plan, lengths)
    rows = [[np.full(n, document) for document, _, n in plan.row(index)] for index in range(plan.num_rows)]
    batch = collate_rows(rows, seq_len=seq_len, pad_id=-1, max_documents_per_row=5)
    positions = batch.tokens.numel()
    assert report.padding_fraction == pytest.approx((batch.document_ids < 0).sum().item() / positions)
    assert report.target_fraction == pytest.approx(num_targets(batch) / positions)
    plain = torch.zeros(len(rows), seq_len, dtype=torch.int32)
    pairs = [
        attended_pairs(ids, MaskSpec(document=document))
        for ids, document in ((batch.document_ids, True), (plain, False))
    ]
    assert report.mask_density == pytest.approx(pairs[0] / pairs[1])
    documents = batch.document_ids.max(dim=1).values + 1
    assert (report.segments, report.max_documents_in_row) == (documents.sum(), documents.max())
    in_rows = [{document for document, *_ in plan.row(index)} for index in range(plan.num_rows)]
    split = sum(sum(document in row for row in in_rows) > 1 for document in range(len(lengths)))
    assert report.split_documents == split
    assert report.documents == len(set().union(*in_rows)) == (lengths > 0).sum()


def test_bins_are_exact_at_powers_of_two():
    lengths = [1, 2, 3, 4, 7, 8, 2**30 - 1, 2**30, 2**31 - 1]
    bins = dict(report_of(lengths, 2**31 - 1).length_bins)
    assert {n: count for n, count in bins.items() if count} == {1: 1, 2: 2, 4: 2, 8: 1, 2**29: 1, 2**30: 2}
    assert list(bins) == [2**i for i in range(31)]


def test_summary_is_one_line():
    assert report_of([1, 0, 1, 1, 0, 1, 1], 100, cap=2).summary() == (
        "5 documents (0 split; 2 empty), 5 tokens in 3 rows: 1.67 documents per row, 98.33% padding"
    )
    assert report_of([30, 4, 8], 10, name="web", oversize="truncate").summary() == (
        "web: 3 documents (0 split; 0 empty; 1 truncated), 22 tokens in 3 rows: 1.00 documents per row, "
        "26.67% padding, 20 tokens (47.62%) lost"
    )


def test_lines_hold_every_number_and_stay_narrow():
    report = report_of([1, 2, 3, 5, 5, 5, 5, 0, 40, 41], 8, name="web", oversize="drop")
    lines = report.lines()
    assert lines[0] == "Packing of web"
    found = {line[2:21].strip(): line[21:].split()[0] for line in lines[1:15]}
    assert found == {
        "documents": "7",
        "split": "0",
        "truncated": "0",
        "untrained": "0",
        "dropped documents": "2",
        "empty documents": "1",
        "bad records": "0",
        "tokens": "26",
        "tokens lost": "81",
        "rows": "4",
        "documents per row": "1.75",
        "padding": "18.75%",
        "targets": "19",
        "mask density": f"{(1 + 3 + 6 + 4 * 15) / (4 * 36):.2%}",
    }
    bars = {line.split()[0]: line.count("#") for line in lines[16:]}
    assert bars == {"1": 13, "2": 25, "4": 50, "8": 0, "16": 0, "32": 25}  # 1, 2, 4, 0, 0 and 2 documents
    assert all(len(line) <= 100 and line.isascii() and line == line.rstrip() for line in lines)


def test_huge_documents():
    lengths = np.repeat([2**31 - 1, 7], [1, 3])
    plan = pack(lengths, PackingSettings(2**31 - 1, 4, 0))
    report = packing_report(plan, lengths, "x" * 300)
    assert report.attended_pairs == (2**31 - 1) * 2**30 + 3 * 28
    assert all(len(line) <= 100 for line in report.lines())


def test_scalars():
    report = report_of([30, 4, 8], 10, oversize="truncate")
    assert report.scalars() == pytest.approx(
        {
            "packing/padding(%)": 100 * 8 / 30,
            "packing/documents_per_row": 1.0,
            "packing/tokens_lost(%)": 100 * 20 / 42,
            "packing/mask_density(%)": 100 * (55 + 10 + 36) / 165,
            "packing/supervised(%)": 100 * (22 - 3) / 22,
        }
    )
    assert "packing/web/padding(%)" in report_of([4], 10, name="web").scalars()


@pytest.mark.parametrize("lengths", [[], [0, 0], [50]])
def test_a_plan_without_rows(lengths):
    report = report_of(lengths, 10, oversize="drop")
    assert report.rows == report.documents == 0
    assert (report.padding_fraction, report.documents_per_row, report.mask_density) == (0, 0, 0)
    assert report.lost_fraction == (1 if sum(lengths) else 0)
    assert report.summary() and report.lines() and report.scalars()
