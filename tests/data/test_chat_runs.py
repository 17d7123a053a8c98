"""Chats through the whole data engine: what is supervised is what it was when the chat was tokenised."""

import itertools
import json

import pytest
from toy_chat import MARKED, TEMPLATES, save_chat_tokenizer, write_records
from toy_data import write_jsonl

from torchtitan_lite.config.schema import Config, MixtureSource
from torchtitan_lite.data.chat.encoding import check_chats
from torchtitan_lite.data.collator import IGNORE_INDEX, num_targets
from torchtitan_lite.data.loader import build_loader
from torchtitan_lite.data.prepared import prepare_sources
from torchtitan_lite.data.resume import ResumeError
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.data.streaming.stream_loader import build_stream_loader
from torchtitan_lite.data.tokenizer import load_tokenizer

ANSWERS = [chr(ord("a") + number) * (1 + number * 5 % 9) for number in range(20)]


def chat(answer: str) -> dict:
    messages = [{"role": "user", "content": "?" * len(answer)}, {"role": "assistant", "content": answer}]
    return {"messages": [*messages, *messages] if len(answer) == 3 else messages}


@pytest.fixture
def config_of(tmp_path):
    """A run over one chat for each answer, each of 30 to 64 tokens, in rows of 128."""
    folder = save_chat_tokenizer(tmp_path / "tokenizer", MARKED)
    chats = write_records(tmp_path / "chats.jsonl", [chat(answer) for answer in ANSWERS])

    def make(path=chats, seq_len=128, **data) -> Config:
        config = Config()
        config.model.hf_assets_path = str(folder)
        config.training.dataset_path = str(path)
        config.training.seq_len, config.training.local_batch_size = seq_len, 1
        config.data.cache_dir = str(tmp_path / "cache")
        for name, value in {"format": "messages", "streaming_buffer": 4, **data}.items():
            assert hasattr(config.data, name)
            setattr(config.data, name, value)
        return config

    return make


def loader_of(config):
    build = build_stream_loader if config.data.streaming else build_loader
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    return build(config, tokenizer, dp_rank=0, dp_degree=1, device_type="cpu")


def answers_of(batch, tokenizer) -> list[str]:
    """Text of the labels of each stretch that has any, document by document."""
    found = []
    labels, documents = batch.labels[0].tolist(), batch.document_ids[0].tolist()
    for (_, supervised), places in itertools.groupby(
        range(len(labels)), lambda place: (documents[place], labels[place] != IGNORE_INDEX)
    ):
        if supervised:
            found.append(tokenizer.decode([labels[place] for place in places]))
    return found


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["best_fit", "greedy", "none"])
def test_each_answer_once_with_one_end(config_of, streaming, packing):
    config = config_of(packing=packing, streaming=streaming)
    if streaming:
        config.training.dataset_path, table = None, MixtureSource(dataset_path=config.training.dataset_path, epochs=1)
        config.data.mix = [table]
    tokenizer, loader = load_tokenizer(config.model.hf_assets_path), loader_of(config)
    found = []
    with pytest.raises(SourceError) if streaming else pytest.MonkeyPatch.context():  # a stream ends by saying so
        for batch in loader if streaming else itertools.islice(loader, loader.rows_per_epoch):
            found += answers_of(batch, tokenizer)
    expected = [f"{answer}<|end|>" for answer in ANSWERS for _ in range(1 + (len(answer) == 3))]
    assert sorted(found) == sorted(expected)


def test_pieces_of_a_chat_keep_their_marks(config_of):
    """Cut at any place, the labels are those of the whole chat but for the first token of each piece."""
    config = config_of(seq_len=16, packing="split")
    loader = loader_of(config)
    labels = sum(num_targets(batch) for batch in itertools.islice(loader, loader.rows_per_epoch))
    (report,) = loader.reports()
    whole = sum((len(answer) + 1) * (1 + (len(answer) == 3)) for answer in ANSWERS)
    assert labels == report.targets and 0 < whole - labels < report.segments


def test_processes_and_workers_change_nothing(config_of):
    def batches(**data):
        loader = loader_of(config_of(**data))
        return [tuple(field.tolist() for field in batch) for batch in itertools.islice(loader, 8)]

    assert batches(num_workers=2) == batches()
    streamed = batches(streaming=True, num_workers=1)
    assert batches(streaming=True, num_workers=0) == streamed


def test_tokenised_in_processes_it_is_the_same(config_of, tmp_path):
    one = prepare_sources(config_of(), load_tokenizer(str(tmp_path / "tokenizer")))[0].documents["tokens"][:]
    config = config_of(num_proc=2)
    config.data.cache_dir = str(tmp_path / "other")
    (source,) = prepare_sources(config, load_tokenizer(str(tmp_path / "tokenizer")))
    assert source.documents["tokens"][:] == one


def test_the_report_counts_what_is_supervised_and_what_truncation_left_untrained(config_of):
    (report,) = loader_of(config_of()).reports()
    assert report.targets == sum((len(answer) + 1) * (1 + (len(answer) == 3)) for answer in ANSWERS)
    assert report.supervised_fraction == report.targets / report.tokens
    assert report.untrained_documents == 0
    # BOS, <|start|>, "user\n", the question, <|end|>, "\n", <|start|>, "assistant\n": 20 tokens and the question.
    config = config_of(seq_len=24, oversize="truncate")
    loader = loader_of(config)
    (report,) = loader.reports()
    assert report.untrained_documents == sum(20 + len(answer) >= 24 for answer in ANSWERS) > 0
    assert report.targets == sum(max(0, min(len(answer) + 1, 24 - 20 - len(answer))) for answer in ANSWERS)
    assert f"{report.untrained_documents} without a target left" in report.summary()
    assert report.targets == sum(num_targets(batch) for batch in itertools.islice(loader, loader.rows_per_epoch))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_of_text_and_chats(config_of, tmp_path, streaming):
    text = write_jsonl(tmp_path / "text.jsonl", ["plain text, all of it"] * 5)
    config = config_of(streaming=streaming, format="text")
    chats, config.training.dataset_path = config.training.dataset_path, None
    config.data.mix = [MixtureSource(dataset_path=str(text)), MixtureSource(dataset_path=chats, format="messages")]
    tokenizer, loader = load_tokenizer(config.model.hf_assets_path), loader_of(config)
    found = {answer for batch in itertools.islice(loader, 10) for answer in answers_of(batch, tokenizer)}
    assert "plain text, all of it<eos>" in found
    assert len(found) > 3 and found - {"plain text, all of it<eos>"} <= {f"{answer}<|end|>" for answer in ANSWERS}
    assert {name for name in loader.fingerprint if "train_on" in name} == {"train_on of source 2"}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_resume_goes_on_with_the_same_labels_and_refuses_another_template(config_of, tmp_path, streaming):
    config = config_of(streaming=streaming)
    straight = list(itertools.islice(loader_of(config), 8))
    first = loader_of(config)
    for _ in zip(range(3), first, strict=False):
        first.mark_trained(1)
    state, rank_state = first.state_dict(), first.rank_state() if streaming else None
    second = loader_of(config)
    second.load_state_dict(json.loads(json.dumps(state)))
    if streaming:
        second.load_rank_state(rank_state)
    for expected, batch in zip(straight[3:], second, strict=False):
        assert all(a.equal(b) for a, b in zip(expected, batch, strict=True))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(MARKED + "{# another #}")
    with pytest.raises(ResumeError, match=r"chat_template was .*, is now "):
        loader_of(config).load_state_dict(state)
    config.data.train_on = "all"
    with pytest.raises(ResumeError, match="train_on was assistant, is now all; chat_template was"):
        loader_of(config).load_state_dict(state)


def test_another_template_is_tokenised_anew(config_of, tmp_path):
    config = config_of()
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    tokens = [prepare_sources(config, tokenizer)[0].documents["tokens"][0]]
    for template in ("chatml", "llama3"):
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATES[template])
        tokens.append(prepare_sources(config, tokenizer)[0].documents["tokens"][0])
    config.data.train_on = "all"
    tokens.append(prepare_sources(config, tokenizer)[0].documents["tokens"][0])
    assert len({tuple(ids) for ids in tokens}) == 4
    assert [~token if token < 0 else token for token in tokens[2]] == tokens[3]


def test_chats_that_the_encoder_refuses_are_bad_records(config_of, tmp_path):
    bad = {"messages": [{"role": "user", "content": "<eos>"}, {"role": "assistant", "content": "x"}]}
    unanswered = {"messages": [{"role": "user", "content": "x"}]}
    path = write_records(tmp_path / "bad.jsonl", [chat("a"), bad, chat("b"), {"messages": []}, unanswered])
    config = config_of(path)
    with pytest.raises(SourceError, match=r"bad\.jsonl: line 4: field 'messages' is an empty list"):
        loader_of(config)
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"messages": []' not in line))
    with pytest.raises(SourceError, match=r"bad: record 2: its text spells '<eos>'.* \(and 1 more bad records among 4"):
        loader_of(config)
    config.data.on_bad_record = "skip"
    source = loader_of(config).sources[0]
    assert source.bad_records == 2 and source.report().documents == 2
    with pytest.raises(SourceError, match="no samples, all of its 1 records are bad, the first one for record 1: it h"):
        loader_of(config_of(write_records(tmp_path / "none.jsonl", [unanswered]), on_bad_record="skip"))


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_bad_chats(config_of, tmp_path, workers):
    bad = {"messages": [{"role": "user", "content": "<eos>"}, {"role": "assistant", "content": "x"}]}
    path = write_records(tmp_path / "bad.jsonl", [chat("a"), bad, chat("b")])
    with pytest.raises(SourceError, match=r"record 2 of shard 0: its text spells '<eos>'.*on_bad_record=skip"):
        next(iter(loader_of(config_of(path, streaming=True, num_workers=workers))))
    loader = loader_of(config_of(path, streaming=True, num_workers=workers, on_bad_record="skip"))
    next(iter(loader))
    assert loader.counts.skipped >= 1 and loader.counts.documents >= 2


# -- before any data is read -------------------------------------------------------------------------------------------


def test_templates_are_tried_before_the_data_is_read(config_of, tmp_path):
    config = config_of()
    assert check_chats(config) == []
    file = tmp_path / "tokenizer" / "chat_template.jinja"
    headless = TEMPLATES["chatml"].partition("{% if add_generation_prompt %}")[0]
    for template, said in [
        (headless, "tried on a chat of two messages: messages[1]: where this answer begins"),
        (MARKED.replace("+ '<|end|>' }}{% end", "}}{% end"), "no special token ends it"),
        ("{% for", "is broken at its line 1"),
        ("{{ messages[0].text + 'x' }}", "fails on it"),
    ]:
        file.write_text(template)
        (problem,) = check_chats(config)
        assert said in problem and str(file) in problem
    file.write_text("{{ raise_exception('tools only') }}")  # which may be what the data has
    assert check_chats(config) == []
    file.write_text(headless)
    config.data.format = "prompt_completion"  # which may be text, and need no template
    assert check_chats(config) == []
    config.data.format, config.data.train_on = "messages", "all"
    assert check_chats(config) == []
    file.unlink()
    (problem,) = check_chats(config)
    assert problem.startswith("chats: chats need a chat template, but model.hf_assets_path has none")
    config.data.chat_template = str(tmp_path / "none.jinja")
    assert check_chats(config) == [f"{tmp_path}/none.jinja: no such file; give a Jinja file with a chat template"]
    config.data.format = "text"
    assert check_chats(config) == []
