import pytest
from toy_data import write_jsonl

from torchtitan_lite.config.schema import Config, MixtureSource
from torchtitan_lite.data.sources.document import Source, SourceError
from torchtitan_lite.data.sources.resolve import check_sources, format_of, kind_of, sources_of


def config(*, mix=(), dataset="pydocs", dataset_path=None, **data) -> Config:
    config = Config()
    config.training.dataset = dataset
    config.training.dataset_path = None if dataset_path is None else str(dataset_path)
    config.data.mix = [MixtureSource(**table) for table in mix]
    for name, value in data.items():
        assert hasattr(config.data, name)
        setattr(config.data, name, value)
    return config


def problem(**settings) -> str | None:
    problems = check_sources(config(**settings))
    assert len(problems) <= 1, problems
    return problems[0] if problems else None


@pytest.fixture
def folder(tmp_path):
    """Files of every kind, and a folder laid out like a Hugging Face data set."""
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "corpus").mkdir()
    return tmp_path


def test_one_source_takes_all_from_training_and_data():
    plain = Source("pydocs", "pydocs", None, None, "train", None, "text", None, 1.0, 0)
    assert sources_of(config()) == [plain]
    given = config(
        dataset="json",
        dataset_path="data/a.jsonl",
        text_field="body",
        template="{a}",
        subset="s",
        split="test",
        revision="r",
    )
    assert sources_of(given) == [Source("a", "json", "data/a.jsonl", "s", "test", "r", "body", "{a}", 1.0, 0)]


def test_tables_inherit_what_they_do_not_set():
    tables = [
        {"dataset": "o/a", "weight": 3.0, "epochs": 2, "subset": "mine", "text_field": "body"},
        {"dataset": "o/b", "template": "{x}", "split": "test", "revision": "v1"},
        {"dataset": "o/c", "text_field": "t", "template": "{y}"},
    ]
    inherited = {"subset": "main", "split": "valid", "revision": "v0", "template": "{z}"}
    assert sources_of(config(mix=tables, **inherited)) == [
        # Its field would have no effect beside the template it would inherit.
        Source("a", "o/a", None, "mine", "valid", "v0", "body", None, 3.0, 2),
        Source("b", "o/b", None, "main", "test", "v1", "text", "{x}", 1.0, 0),
        Source("c", "o/c", None, "main", "valid", "v0", "t", "{y}", 1.0, 0),
    ]


@pytest.mark.parametrize(
    ("dataset", "dataset_path", "name"),
    [
        ("pydocs", None, "pydocs"),
        ("HuggingFaceFW/fineweb-edu", None, "fineweb-edu"),
        ("~/data/corpus/", None, "corpus"),
        ("json", "data/books.jsonl.zst", "books"),
        ("pydocs", "/data/web", "web"),
        ("pydocs", "/data/web.v1.5/", "web.v1.5"),
        ("pydocs", "/data/web/**/part-*.jsonl", "web"),
        ("pydocs", "~/*.jsonl", "files"),
        ("pydocs", "*.jsonl", "files"),
        ("pydocs", "../x.jsonl", "x"),
    ],
)
def test_names_are_made_of_paths(dataset, dataset_path, name):
    assert sources_of(config(dataset=dataset, dataset_path=dataset_path))[0].name == name


def test_names_differ():
    tables = [
        {"dataset_path": "x/a.jsonl"},
        {"dataset_path": "y/a.jsonl"},
        {"dataset_path": "z/a.jsonl", "name": "a-2"},
        {"dataset_path": "z/a.jsonl"},
        {"dataset_path": "z/b.jsonl", "name": "own"},
    ]
    assert [source.name for source in sources_of(config(mix=tables))] == ["a", "a-3", "a-2", "a-4", "own"]


def test_kinds(folder, monkeypatch):
    monkeypatch.chdir(folder)
    kinds = {
        ("pydocs", "a.jsonl"): "files",
        ("pydocs", None): "registered",
        ("owner/name", None): "hub",
        ("owner-1/na.me_2", None): "hub",
        (str(folder / "corpus"), None): "hub folder",
        ("corpus", None): "hub folder",
        ("./corpus", None): "hub folder",
    }
    assert {key: kind_of(Source("", *key)) for key in kinds} == kinds
    for dataset, message in [
        ("json", "dataset=json: needs dataset_path"),
        ("pydoc", r"dataset=pydoc: no such data set. Did you mean pydocs\?"),
        (
            "c4",
            "no such data set. Registered: pydocs, pychat; OWNER/NAME for one on the Hugging Face hub; or json, text, ",
        ),
        ("./nowhere", "no such folder, and a data set on the Hugging Face hub is OWNER/NAME"),
        ("a/b/c", "no such folder"),
        ("/nowhere", "no such folder"),
        ("a.jsonl", "dataset=a.jsonl: is a file; give it as dataset_path"),
    ]:
        with pytest.raises(SourceError, match=message):
            kind_of(Source("", dataset))


def test_good_sources_have_no_problem(folder):
    assert problem() is None
    assert problem(dataset="json", dataset_path=folder / "a.jsonl", text_field="body") is None
    assert problem(dataset="text", dataset_path=folder / "a.csv") is None  # the format is said, whatever the suffix
    assert problem(dataset="owner/name", subset="s", split="train[:1%]+test", revision="v1", template="{a}") is None
    tables = [{}, {"dataset": "owner/name"}, {"dataset_path": f"{folder}/a.jsonl", "text_field": "body"}]
    assert problem(mix=tables, subset="only for the second", streaming=True) is None


def test_names_of_sources_that_are_wrong(folder):
    assert problem(dataset="pydoc").startswith("training.dataset=pydoc: no such data set. Did you mean pydocs?")
    assert problem(dataset="json").startswith("training.dataset=json: needs dataset_path")
    assert "must be one of json, text, parquet, arrow" in problem(dataset="c4", dataset_path=folder)
    missing = problem(dataset_path=folder / "missing.jsonl")
    assert missing.startswith(f"training.dataset_path={folder}/missing.jsonl: no such file")
    assert "several kinds" in problem(dataset_path=folder)
    second = problem(mix=[{}, {"dataset": "pydoc", "subset": "nothing follows from this"}])
    assert second.startswith("data.mix, table 2: dataset=pydoc: no such data set")


def test_empty_files_are_a_problem_where_bad_records_are(folder):
    (folder / "zero.jsonl").touch()
    assert f"{folder}/zero.jsonl is empty, which no json file can be" in problem(dataset="json", dataset_path=folder)
    assert problem(dataset="json", dataset_path=folder, on_bad_record="skip") is None
    (folder / "zero.txt").touch()
    assert problem(dataset="text", dataset_path=folder) is None


@pytest.mark.parametrize(("name", "value"), [("subset", "s"), ("split", "test"), ("revision", "v1")])
def test_settings_of_hugging_face_data_sets_alone(folder, name, value):
    said = f"{name}={value!r}: nothing would use it; only "
    for settings in ({}, {"dataset_path": folder / "a.jsonl"}):
        assert problem(**settings, **{name: value}).startswith("data." + said)
    assert problem(dataset="owner/name", **{name: value}) is None
    assert problem(mix=[{}, {"dataset": "owner/name"}], **{name: value}) is None
    assert problem(mix=[{"dataset": "owner/name"}, {name: value}]).startswith("data.mix, table 2: " + said)
    local = problem(dataset=str(folder / "corpus"), **{name: value})
    assert (local is None) == (name != "revision")


@pytest.mark.parametrize(("name", "value"), [("text_field", "body"), ("template", "{a}")])
def test_settings_of_sources_with_fields_alone(folder, name, value):
    said = f"{name}={value!r}: nothing would use it; text files and registered data sets have no fields"
    for settings in ({}, {"dataset_path": folder / "a.txt"}):
        assert problem(**settings, **{name: value}) == "data." + said
    assert problem(dataset_path=folder / "a.jsonl", **{name: value}) is None
    assert problem(mix=[{"dataset_path": f"{folder}/a.txt", name: value}]) == "data.mix, table 1: " + said


CHAT = {"messages_field": "talk", "chat_template": "x.jinja", "train_on": "all"}


@pytest.mark.parametrize("name", CHAT)
def test_settings_of_chats_alone(folder, name):
    said, path = f"{name}={CHAT[name]!r}: nothing would use it; ", folder / "a.jsonl"
    setting = {name: CHAT[name]}
    assert problem(dataset_path=path, format="messages", **setting) is None
    assert problem(mix=[{"dataset_path": str(path), "format": "messages", **setting}]) is None
    assert problem(mix=[{"dataset_path": str(path), "format": "messages"}, {}], **setting) is None  # inherited by one
    assert problem(dataset="owner/name", format="messages", **setting) is None
    readers = "messages" if name == "messages_field" else "messages and prompt_completion"
    assert problem(dataset_path=path, **setting) == f"data.{said}only format={readers} does"
    assert problem(**setting).startswith(f"data.{said}")
    of_registered = problem(dataset="pychat", **setting)
    of_pairs = problem(dataset_path=path, format="prompt_completion", **setting)
    if name == "messages_field":
        assert of_registered == f"data.{said}text files and registered data sets have no fields"
        assert of_pairs == f"data.{said}only format=messages does"
    else:
        assert of_registered is None and of_pairs is None


def test_formats(folder):
    path = folder / "a.jsonl"
    for name, value in (("text_field", "body"), ("template", "{a}")):
        said = f"data.{name}={value!r}: nothing would use it; only format=text does"
        assert problem(dataset_path=path, format="messages", **{name: value}) == said
    of_its_own = "nothing would use it; text files and registered data sets have a format of their own"
    for settings in ({}, {"dataset": "pychat"}, {"dataset_path": folder / "a.txt"}):
        assert problem(format="messages", **settings) == f"data.format='messages': {of_its_own}"
    tables = [{}, {"dataset": "pychat"}, {"dataset_path": f"{folder}/a.txt"}, {"dataset_path": str(path)}]
    tables.append({"dataset_path": str(path), "format": "text"})
    sources = sources_of(config(mix=tables, format="prompt_completion"))
    assert [format_of(source) for source in sources] == ["text", "messages", "text", "prompt_completion", "text"]
    said = problem(dataset="pychat", dataset_path=path)
    assert "dataset=pychat: with a dataset_path, this must be one of json, text, parquet, arrow" in said


def test_templates(folder):
    path = folder / "a.jsonl"
    assert problem(dataset_path=path, template="{a").startswith("data.template='{a': ")
    assert "{0} counts fields" in problem(dataset_path=path, template="{0}")
    table = {"dataset_path": str(path), "template": "a}"}
    assert problem(mix=[table]).startswith("data.mix, table 1: template='a}': Single '}'")
    assert "data.template replaces it" in problem(dataset_path=path, template="{a}", text_field="body")
    assert "its template replaces it" in problem(mix=[table | {"template": "{a}", "text_field": "body"}])


def test_tables_of_a_mixture():
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        assert problem(mix=[{"weight": weight}]).startswith(f"data.mix, table 1: weight={weight}: must be a number abo")
    for weight in (1e-16, 1e16):
        assert problem(mix=[{}, {"weight": weight}]).startswith(f"data.mix, table 2: weight={weight}: must lie between")
    assert problem(mix=[{"weight": 1e-15}, {"weight": 1e15}]) is None
    assert problem(mix=[{}, {"epochs": -1}]).startswith("data.mix, table 2: epochs=-1: must be at least 0")
    assert problem(mix=[{"name": " "}]).startswith("data.mix, table 1: name is empty")
    twice = problem(mix=[{"name": "a"}, {"name": "b"}, {"name": "a"}])
    assert twice == "data.mix: 2 tables are named a; names must differ, or be left out"


def test_a_mixture_beside_a_source(folder):
    assert problem(mix=[{}], dataset_path=folder).startswith(f"training.dataset_path={folder}: nothing would read it")
    assert problem(mix=[{}], dataset="owner/name").startswith("training.dataset=owner/name: nothing would read it")
    assert len(check_sources(config(mix=[{}], dataset="owner/name", dataset_path=folder))) == 2


def test_streaming_takes_whole_splits(folder):
    for split in ("train[:1%]", "train+test"):
        said = f"split={split}: streaming reads one whole split; data.streaming=false takes this too"
        assert problem(dataset="owner/name", split=split, streaming=True) == "data." + said
        assert problem(dataset="owner/name", split=split) is None
        table = {"dataset": str(folder / "corpus"), "split": split}
        assert problem(mix=[table], streaming=True) == "data.mix, table 1: " + said


def test_all_problems_are_found_together(folder):
    tables = [{"weight": 0.0, "epochs": -1}, {"dataset": "pydoc"}, {"dataset_path": f"{folder}/none.jsonl"}]
    assert len(check_sources(config(mix=tables, template="{"))) == 5
