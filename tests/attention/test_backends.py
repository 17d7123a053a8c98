"""Every back-end against attention written as loops: outputs and gradients; and the table of what each supports."""

import pytest
import torch
from naive import document_ids, naive_attention

from torchtitan_lite.attention.backends import ATTENTIONS, SUPPORT, build_backend, masks_documents, unsupported
from torchtitan_lite.attention.masks import MaskSpec

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

ROWS = {
    "one row": ([[5, 1, 1, 9, 4]], 24),  # with padding
    "three rows": ([[24], [1, 7, 1, 6, 9], [3, 2]], 24),  # a full row, 1-token documents, padding
    "ids that continue over rows": ([[6], [6]], 6),
    "several tiles of a window": ([[200, 1, 79]], 300),
}
CASES = [(name, window) for name in list(ROWS)[:3] for window in (None, 1, 2, 5, 9, 24, 100)] + [
    ("several tiles of a window", window) for window in (None, 3, 64, 70, 199)
]


def qkv(batch: int, seq: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, seq, heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def assert_equals_naive(attention: str, ids: torch.Tensor, spec: MaskSpec) -> None:
    inputs = qkv(*ids.shape)
    backend = build_backend(attention, max_documents_per_row=None, varlen_engine="auto")
    out = backend.forward(*inputs, backend.prepare(ids, spec), spec)
    reference = naive_attention(*inputs, ids, spec.sliding_window)
    assert out.dtype == torch.float32 and out.shape == inputs[0].shape
    torch.testing.assert_close(out.double(), reference, rtol=0, atol=1e-5)

    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    expected = torch.autograd.grad((reference * weights).sum(), inputs)
    for grad, reference_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference_grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "window"), CASES)
@pytest.mark.parametrize("attention", ["sdpa_block_causal", "flex_block_causal"])
def test_block_causal_equals_naive(attention, rows, window):
    assert_equals_naive(attention, document_ids(*ROWS[rows]), MaskSpec(sliding_window=window))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_without_documents_equals_naive_over_whole_rows(attention, batch):
    assert_equals_naive(attention, document_ids([[24]] * batch, 24), MaskSpec(document=False))


@pytest.mark.parametrize("attention", ["sdpa_block_causal", "flex_block_causal"])
def test_documents_ignored_when_the_rule_says_so(attention):
    inputs = qkv(2, 12)
    backend = build_backend(attention, max_documents_per_row=None, varlen_engine="auto")
    spec = MaskSpec(document=False, sliding_window=4)
    packed, whole = document_ids([[3, 4], [5, 7]], 12), document_ids([[12], [12]], 12)
    out = backend.forward(*inputs, backend.prepare(packed, spec), spec)
    torch.testing.assert_close(out.double(), naive_attention(*inputs, whole, 4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_mask_state_lies_where_the_tokens_do(attention):
    ids = torch.zeros(1, 128, dtype=torch.int32, device="cpu")
    backend = build_backend(attention, max_documents_per_row=4, varlen_engine="auto")
    state = backend.prepare(ids, MaskSpec(document=masks_documents(attention)))
    tensors = [] if state is None else [state] if isinstance(state, torch.Tensor) else list(state)
    assert all(tensor.device == ids.device for tensor in tensors)


def test_sdpa_refuses_a_mask_it_would_not_apply():
    backend = build_backend("sdpa", max_documents_per_row=None, varlen_engine="auto")
    ids = torch.zeros(1, 4, dtype=torch.int32)
    for spec in (MaskSpec(document=True), MaskSpec(document=False, sliding_window=2)):
        with pytest.raises(ValueError, match="no mask but the causal one"):
            backend.prepare(ids, spec)


def test_unknown_attention_lists_the_known():
    with pytest.raises(ValueError, match=r"'flash'.*sdpa, sdpa_block_causal, flex_block_causal"):
        build_backend("flash", max_documents_per_row=None, varlen_engine="auto")


def test_every_attention_is_in_the_table():
    assert {name for name, _ in SUPPORT} == set(ATTENTIONS)
    assert [masks_documents(attention) for attention in ATTENTIONS] == [False, True, True]


FULL, WINDOW = MaskSpec(), MaskSpec(sliding_window=64)


@pytest.mark.parametrize(
    ("attention", "device", "dtype", "spec", "engine"),
    [
        ("sdpa", "cpu", torch.float32, MaskSpec(document=False), "auto"),
        ("sdpa", "cuda", torch.bfloat16, MaskSpec(document=False), "auto"),
        ("sdpa_block_causal", "cpu", torch.float32, WINDOW, "auto"),
        ("sdpa_block_causal", "cpu", torch.bfloat16, WINDOW, "cpu"),
        ("sdpa_block_causal", "cuda", torch.bfloat16, WINDOW, "auto"),  # flash
        ("sdpa_block_causal", "cuda", torch.float32, FULL, "auto"),  # nested
        ("sdpa_block_causal", "cuda", torch.bfloat16, FULL, "nested"),
        ("flex_block_causal", "cpu", torch.float32, WINDOW, "auto"),
        ("flex_block_causal", "cuda", torch.float32, WINDOW, "auto"),
    ],
)
def test_supported(attention, device, dtype, spec, engine):
    assert unsupported(attention, device_type=device, dtype=dtype, spec=spec, engine=engine) == []


@pytest.mark.parametrize(
    ("attention", "device", "dtype", "spec", "engine", "message"),
    [
        (
            "sdpa",
            "cpu",
            torch.float32,
            MaskSpec(document=False, sliding_window=64),
            "auto",
            "model.args.sliding_window=64: sdpa has no sliding window; these have: "
            "sdpa_block_causal (model.varlen_engine=cpu), flex_block_causal",
        ),
        (
            "sdpa_block_causal",
            "cuda",
            torch.float32,
            FULL,
            "flash",
            "sdpa_block_causal with model.varlen_engine=flash computes in bfloat16, not in float32 "
            "(training.mixed_precision_param); in float32 these do: "
            "sdpa_block_causal (model.varlen_engine=nested), flex_block_causal",
        ),
        (
            "sdpa_block_causal",
            "cuda",
            torch.float32,
            WINDOW,
            "auto",
            "model.args.sliding_window=64: sdpa_block_causal with model.varlen_engine=nested has no sliding window; "
            "these have: flex_block_causal",
        ),
        (
            "sdpa_block_causal",
            "cpu",
            torch.bfloat16,
            FULL,
            "flash",
            "sdpa_block_causal with model.varlen_engine=flash does not run on cpu; these do: "
            "sdpa_block_causal (model.varlen_engine=cpu), flex_block_causal",
        ),
        (
            "sdpa_block_causal",
            "cuda",
            torch.bfloat16,
            FULL,
            "cpu",
            "sdpa_block_causal with model.varlen_engine=cpu does not run on cuda; these do: "
            "sdpa_block_causal (model.varlen_engine=flash), sdpa_block_causal (model.varlen_engine=nested), "
            "flex_block_causal",
        ),
    ],
)
def test_unsupported_says_why_and_what_works(attention, device, dtype, spec, engine, message):
    assert unsupported(attention, device_type=device, dtype=dtype, spec=spec, engine=engine) == [message]


def test_every_reason_is_given():
    problems = unsupported("sdpa_block_causal", device_type="cpu", dtype=torch.float16, spec=WINDOW, engine="nested")
    assert len(problems) == 3 and all("nothing here" in problem for problem in problems)


def unsupported_on_two_ranks(attention: str, dtype: torch.dtype, engine: str, spec: MaskSpec = FULL) -> list[str]:
    return unsupported(attention, device_type="cuda", dtype=dtype, spec=spec, engine=engine, context_parallel_degree=2)


def test_what_context_parallelism_can_use():
    assert unsupported_on_two_ranks("sdpa", torch.float32, "auto", MaskSpec(document=False)) == []
    assert unsupported_on_two_ranks("sdpa_block_causal", torch.bfloat16, "auto", WINDOW) == []
    assert unsupported_on_two_ranks("flex_block_causal", torch.float32, "auto", WINDOW) == []
    assert unsupported_on_two_ranks("sdpa_block_causal", torch.bfloat16, "nested") == [
        "parallelism.context_parallel_degree=2: sdpa_block_causal with model.varlen_engine=nested cannot attend a "
        "part of a row's queries; these can: sdpa_block_causal (model.varlen_engine=flash), flex_block_causal"
    ]
    # what is named in place of another must be able to, too: not nested
    assert unsupported_on_two_ranks("sdpa_block_causal", torch.float32, "flash") == [
        "sdpa_block_causal with model.varlen_engine=flash computes in bfloat16, not in float32 "
        "(training.mixed_precision_param); in float32 these do: flex_block_causal"
    ]
