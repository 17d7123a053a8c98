"""Generation with a cache, held against transformers and against the plain model."""

import pytest
import torch
from tiny_hf import LLAMA3_ROPE, hf_model, saved

from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.generation.generate import generate
from torchtitan_lite.generation.sampling import Sampler, Sampling, probabilities
from torchtitan_lite.models.llama3.flavors import model_args
from torchtitan_lite.models.llama3.model import Transformer

GREEDY = Sampling(temperature=0)
SHAPE = {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf"), **SHAPE)


def ours(folder) -> Transformer:
    model = Transformer(model_args("hf", hf_assets_path=str(folder)))
    HFWeights(folder).load_into(model)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]


def theirs(prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = hf_model(**SHAPE).generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("lengths", [(1,), (17,), (5, 20, 1, 11)])
def test_greedy_is_that_of_transformers_token_for_token(folder, lengths):
    batch = prompts(*lengths)
    new = generate(ours(folder), batch, max_new_tokens=50, sampling=GREEDY, stop_ids=())
    assert new == [theirs(prompt, 50) for prompt in batch]


def test_the_cache_changes_nothing(folder):
    """Against the model itself without a cache, one token at a time."""
    prompt, model = prompts(9)[0], ours(folder)
    row = list(prompt)
    with torch.no_grad():
        for _ in range(30):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    assert generate(model, [prompt], max_new_tokens=30, sampling=GREEDY, stop_ids=()) == [row[9:]]


def test_a_sliding_window(folder):
    args = model_args(
        "hf_sdpa_block_causal", {"sliding_window": 4, "sliding_window_pattern": [True, False]}, str(folder)
    )
    model = Transformer(args)
    HFWeights(folder).load_into(model)
    prompt = prompts(12)[0]
    row = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    assert generate(model, [prompt], max_new_tokens=12, sampling=GREEDY, stop_ids=()) == [row[12:]]


def test_rows_stop_for_themselves(folder):
    batch, told = prompts(5, 20), []
    free = generate(ours(folder), batch, max_new_tokens=20, sampling=GREEDY, stop_ids=())
    stop = free[0][4]
    new = generate(
        ours(folder), batch, max_new_tokens=20, sampling=GREEDY, stop_ids={stop}, on_token=lambda *t: told.append(t)
    )
    assert new[0] == free[0][: free[0].index(stop) + 1]
    assert new[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])
    assert [[token for row, token in told if row == number] for number in (0, 1)] == new


def test_a_row_draws_the_same_in_any_batch(folder):
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)
    batch = prompts(8, 30, 2)
    together = generate(ours(folder), batch, max_new_tokens=15, sampling=sampling, stop_ids=())
    assert generate(ours(folder), batch[:1], max_new_tokens=15, sampling=sampling, stop_ids=()) == together[:1]
    assert generate(ours(folder), batch, max_new_tokens=15, sampling=sampling, stop_ids=()) == together
    other = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=4)
    assert generate(ours(folder), batch, max_new_tokens=15, sampling=other, stop_ids=()) != together


# By hand, of probabilities 0.5, 0.25, 0.125, 0.125.
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_what_is_drawn_from(settings, expected, order):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[order][None]
    found = probabilities(logits, Sampling(**settings))[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32)[order])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_not_drawn_from(temperature):
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    with pytest.raises(ValueError, match="logits are not numbers"):
        Sampler(Sampling(temperature=temperature), 2).draw(logits)


def test_draws_follow_the_probabilities():
    sampler = Sampler(Sampling(seed=1), 1)
    logits = torch.tensor([[0.7, 0.3]]).log()
    drawn = [sampler.draw(logits)[0] for _ in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1: must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0}, "top_p=0: must be above 0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
    ],
)
def test_what_sampling_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_what_prompts_cannot_be(folder):
    def refused(batch, count=5) -> str:
        with pytest.raises(ValueError) as error:
            generate(ours(folder), batch, max_new_tokens=count, sampling=GREEDY, stop_ids=())
        return str(error.value)

    assert "prompt 2 is empty" in refused([[1], []])
    assert "token 96 is beyond the model's vocabulary of 96" in refused([[96]])
    assert "may take 258 tokens, more than the model's 256" in refused([[1] * 8], 250)
    assert refused([]) == "no prompt"
