"""From file and command line to a Config: values, precedence, and what is said about wrong ones."""

import copy
import dataclasses
import random
import re
from pathlib import Path

import pytest

from torchtitan_lite.config.fields import KEYS, coerce, nearest_keys
from torchtitan_lite.config.help import field_docs, help_text, value_of
from torchtitan_lite.config.load import ConfigError, load_config, save_config
from torchtitan_lite.config.schema import Config

TRAIN_CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))


@pytest.fixture
def write(tmp_path):
    """Writes a TOML file and returns the option that names it."""

    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return f"--job.config_file={path}"

    return write


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


def only_problem(*argv: str) -> str:
    (problem,) = problems_of(*argv)
    return problem


# --- precedence and values -------------------------------------------------------------------------------------------


def test_defaults_are_the_schema():
    assert load_config([]) == Config()


def test_line_beats_file_beats_default(write):
    file = write("[training]\nsteps = 7\nseq_len = 64")
    config = load_config([file, "--training.steps=9"])
    assert (config.training.steps, config.training.seq_len, config.training.seed) == (9, 64, 42)


def test_place_of_the_file_option_does_not_matter(write):
    file = write("[training]\nsteps = 7")
    assert load_config(["--training.steps", "9", *file.split("=", 1)]).training.steps == 9


def test_last_of_a_repeated_key_wins():
    assert load_config(["--training.steps=1", "--training.steps=2", "--training.steps", "3"]).training.steps == 3


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=1e3"], "training.steps", 1000),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.seq-len=64"], "training.seq_len", 64),
        (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.implementation=for-loop"], "optimizer.implementation", "for-loop"),
        (["--job.description=a=b, c"], "job.description", "a=b, c"),
        (["--job.description="], "job.description", ""),
        (["--job.description=--odd"], "job.description", "--odd"),
        (["--compile.components", "loss", "model"], "compile.components", ["loss", "model"]),
        (["--compile.components=loss,model"], "compile.components", ["loss", "model"]),
        (["--compile.components="], "compile.components", []),
        (["--compile.components", "loss", "--training.steps=3"], "compile.components", ["loss"]),
        (["--model.args.sliding_window=256"], "model.args.sliding_window", 256),
        (["--model.args.sliding_window_pattern=true,False"], "model.args.sliding_window_pattern", [True, False]),
        (["--model.args.sliding_window_pattern", "true", "false"], "model.args.sliding_window_pattern", [True, False]),
        (["--model.args.sliding_window_pattern=[true, false]"], "model.args.sliding_window_pattern", [True, False]),
        (['--compile.components=["loss"]'], "compile.components", ["loss"]),
        (["--compile.components=[]"], "compile.components", []),
        (["--model.args.tie_embeddings"], "model.args.tie_embeddings", True),
        (["--model.args.no-tie-embeddings"], "model.args.tie_embeddings", False),
    ],
)
def test_spellings_of_values(argv, name, value):
    loaded = value_of(load_config(argv), name)
    assert loaded == value and type(loaded) is type(value)


@pytest.mark.parametrize("in_file", ["true", "false"])
@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--compile.enable", True),
        ("--compile.enable=true", True),
        ("--compile.enable=True", True),
        ("--compile.enable true", True),
        ("--compile.no-enable", False),
        ("--compile.no_enable", False),
        ("--no-compile.enable", False),
        ("--compile.enable=false", False),
        ("--compile.enable=False", False),
        ("--compile.enable false", False),
    ],
)
def test_every_spelling_of_a_switch_beats_the_file(write, in_file, words, value):
    file = write(f"[compile]\nenable = {in_file}")
    assert load_config([file, *words.split()]).compile.enable is value


def test_none_unsets_what_the_file_set(write):
    file = write('[training]\ndataset_path = "x"\n[lr_scheduler]\ndecay_ratio = 0.5')
    config = load_config([file, "--training.dataset_path=None", "--lr_scheduler.decay_ratio", "None"])
    assert config.training.dataset_path is None and config.lr_scheduler.decay_ratio is None


def test_file_numbers(write):
    config = load_config([write("[training]\nsteps = 1e3\nmax_norm = 1\n[optimizer]\nlr = 1e-3")])
    assert config.training.steps == 1000 and type(config.training.steps) is int
    assert config.training.max_norm == 1.0 and type(config.training.max_norm) is float
    assert config.optimizer.lr == 0.001


def test_configs_share_no_lists():
    load_config([]).compile.components.append("x")
    assert load_config([]) == Config()


# --- flavors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_file", "on_line", "resolved"),
    [
        (None, None, "debugmodel"),
        (None, "flex_block_causal", "debugmodel_flex_block_causal"),
        ("flex_block_causal", None, "debugmodel_flex_block_causal"),
        ("8B_sdpa_block_causal", None, "8B_sdpa_block_causal"),
        ("8B_sdpa_block_causal", "flex_block_causal", "8B_flex_block_causal"),
        ("8B_sdpa_block_causal", "sdpa", "8B"),
        ("8B_sdpa_block_causal", "1B", "1B"),
        ("8B_sdpa_block_causal", "1B_flex_block_causal", "1B_flex_block_causal"),
    ],
)
def test_flavor_of_line_over_file(write, in_file, on_line, resolved):
    file = [] if in_file is None else [write(f'[model]\nflavor = "{in_file}"')]
    line = [] if on_line is None else [f"--model.flavor={on_line}"]
    assert load_config([*file, *line]).model.flavor == resolved


def test_unknown_flavor_lists_the_choices(write):
    from_file, from_line = problems_of(write('[model]\nflavor = "9B"'), "--model.flavor=8B_flash")
    assert "run.toml: model.flavor" in from_file and "9B" in from_file and "405B" in from_file
    assert "command line: model.flavor" in from_line and "8B_flash" in from_line and "flex_block_causal" in from_line


# --- wrong names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "key", "suggestion"),
    [
        ("learning_rate = 1e-3", "learning_rate", "optimizer.lr (in section [optimizer])"),  # at the top level
        ("steps = 10", "steps", "training.steps (in section [training])"),
        ("[training]\nstepz = 10", "training.stepz", "training.steps (in section [training])"),  # a typo
        ("[training]\nseq-len = 10", "training.seq-len", "training.seq_len (in section [training])"),  # hyphen
        ("[training]\nnum-epochs = 1", "training.num-epochs", "training.steps (in section [training])"),
        ("[training]\nlr = 1.0", "training.lr", "optimizer.lr (in section [optimizer])"),  # wrong section
        ("[training]\nSteps = 1", "training.Steps", "training.steps (in section [training])"),
        ("[trainning]\nsteps = 1", "trainning.steps", "training.steps (in section [training])"),  # unknown section
        ("[model]\nsliding_window = 1", "model.sliding_window", "model.args.sliding_window (in section [model.args])"),
        ("[model.arg]\ndim = 1", "model.arg.dim", "model.args.dim (in section [model.args])"),  # nested
        ("[model.args]\nn_layer = 1", "model.args.n_layer", "model.args.n_layers (in section [model.args])"),
        ("[checkpoints]\nenable = true", "checkpoints.enable", "checkpoint.enable (in section [checkpoint])"),
        ("[activation_checkpoint]\nenable = true", "activation_checkpoint.enable", "compile.enable"),
    ],
)
def test_wrong_name_in_file(write, toml, key, suggestion):
    problem = only_problem(write(toml))
    assert f"run.toml: {key}: no such key" in problem
    assert suggestion in problem


@pytest.mark.parametrize(
    ("argv", "key", "suggestion"),
    [
        (["--learning_rate=1e-3"], "--learning_rate", "optimizer.lr"),
        (["--training.stepz", "10"], "--training.stepz", "training.steps"),
        (["--training.lr=1"], "--training.lr", "optimizer.lr"),
        (["--steps=1"], "--steps", "training.steps"),
        (["--compile.disable"], "--compile.disable", "compile.enable"),
        (["--compile.no-enabled"], "--compile.no-enabled", "compile.enable"),
        (["--training.no-steps"], "--training.no-steps", "training.steps"),
    ],
)
def test_wrong_name_on_line(argv, key, suggestion):
    problem = only_problem(*argv)
    assert problem.startswith(f"{key}: no such key; did you mean ") and suggestion in problem


def test_name_like_no_other_lists_what_there_is(write):
    assert "the keys of [comm] are init_timeout_seconds" in only_problem(write("[comm]\nqqqq = 1"))
    assert "the sections are job, profiling" in only_problem("--qqqq=1")


def test_key_in_several_sections_names_them_all():
    assert set(nearest_keys("enable")) == {"checkpoint.enable", "compile.enable", "validation.enable"}


@pytest.mark.parametrize("toml", ["training = 5", "[[training]]\nsteps = 5"])
def test_section_that_is_no_table(write, toml):
    assert "training: is a section, not a key" in only_problem(write(toml))


def test_empty_sections(write):
    assert load_config([write("[training]\n[model.args]")]).training == Config().training
    assert "no such key" in only_problem(write("[nonsense]"))


def test_file_cannot_name_a_file(write):
    assert "cannot name another file" in only_problem(write('[job]\nconfig_file = "x.toml"'))


# --- wrong values ----------------------------------------------------------------------------------------------------

WRONG_VALUES = [
    # TOML value, command-line word, dotted key, part of the message
    ('"ten"', "ten", "training.steps", 'expected an integer, got "ten"'),
    ("1.5", "1.5", "training.steps", "expected an integer, got 1.5"),
    ("true", "true", "training.steps", "expected an integer, got "),
    ('"fast"', "fast", "optimizer.lr", 'expected a finite number, got "fast"'),
    ("nan", "nan", "optimizer.lr", "expected a finite number, got NaN"),
    ("inf", "1e999", "optimizer.lr", "expected a finite number, got Infinity"),
    ("9" * 400, "9" * 400, "optimizer.lr", "expected a finite number, got 999"),
    ("true", "true", "optimizer.lr", "expected a finite number, got "),
    ("1", "1", "compile.enable", "expected true or false, got "),
    ('"yes"', "yes", "compile.enable", 'expected true or false, got "yes"'),
    ('"SGD"', "SGD", "optimizer.name", '"SGD" is not one of AdamW, Adam'),
    ('["model", "optimizer"]', '["model", "optimizer"]', "compile.components", '"optimizer" is not one of model, loss'),
    ('["model", "optimizer"]', "model,optimizer", "compile.components", '"optimizer" is not one of model, loss'),
    ("[true, 2]", "true,2", "model.args.sliding_window_pattern", "expected true or false, got "),
]


@pytest.mark.parametrize(("in_file", "word", "key", "message"), WRONG_VALUES)
def test_wrong_value_in_file_and_on_line(write, in_file, word, key, message):
    section, _, leaf = key.rpartition(".")
    problem = only_problem(write(f"[{section}]\n{leaf} = {in_file}"))
    assert f"run.toml: {key}: " in problem and message in problem
    problem = only_problem(f"--{key}={word}")
    assert problem.startswith(f"--{key}: ") and message in problem


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[compile]\ncomponents = 'model'", 'compile.components: expected a list, got "model"'),
        ("[activation_checkpoint]\nselective_ac_option = 2", "expected text in quotes, got 2"),
        ("[training.steps]\nx = 1", "training.steps: expected an integer, got a table"),
        ("[training]\nsteps = 1979-05-27", "training.steps: expected an integer, got 1979-05-27"),
        ("[training]\nsteps = [1]", "training.steps: expected an integer, got [1]"),
    ],
)
def test_wrong_kind_in_file(write, toml, message):
    assert message in only_problem(write(toml))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["stray"], "stray: a value without a key"),
        (["--training.steps=5", "6"], "6: a value without a key"),
        (["--training.steps", "5", "6"], "6: a value without a key"),
        (["-x"], "-x: a value without a key"),
        (["--"], "--: a value without a key"),
        (["--training.steps"], "--training.steps: needs a value"),
        (["--training.steps", "--compile.enable"], "--training.steps: needs a value"),
        (["--training.steps=None"], 'expected an integer, got "None"'),
        (["--compile.enable", "stray"], 'expected true or false, got "stray"'),
        (["--compile.no-enable=true"], "--compile.no-enable: takes no value"),
        (["--training=5"], "--training: is a section, not a key; its keys are dataset, dataset_path"),
    ],
)
def test_wrong_command_lines(argv, message):
    assert message in only_problem(*argv)


# --- files that cannot be read, and everything at once ---------------------------------------------------------------


def test_missing_file_and_folder(tmp_path):
    assert "nope.toml: No such file" in only_problem("--job.config_file=nope.toml")
    assert "Is a directory" in only_problem(f"--job.config_file={tmp_path}")


def test_syntax_error_names_file_and_line(write):
    problem = only_problem(write("[training]\nsteps = \n"))
    assert "run.toml: not valid TOML" in problem and "line 2" in problem


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in only_problem(f"--job.config_file={path}")


def test_file_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_config([f"--job.config_file={path}"]).training.steps == 7


def test_all_problems_are_reported_together(write):
    file = write('learning_rate = 1\n[training]\nsteps = "a"\nstep = 1\n[model]\nflavor = "x"')
    with pytest.raises(ConfigError) as caught:
        load_config([file, "--foo.bar=1", "--optimizer.lr=x"])
    assert len(caught.value.problems) == 6
    text = str(caught.value)
    assert text.startswith("The configuration has 6 problems:\n  - ")
    assert text.count("\n  - ") == 6


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_saved_file_reads_back_equal(path, tmp_path):
    config = load_config([f"--job.config_file={path}", "--optimizer.eps=1e-9", "--model.args.sliding_window=7"])
    saved = tmp_path / "new" / "config.toml"
    save_config(config, saved)
    again = load_config([f"--job.config_file={saved}"])
    assert dataclasses.replace(again.job, config_file=str(path)) == config.job
    again.job = config.job
    assert again == config


def test_saving_and_reading_any_values(tmp_path):
    """Random valid values for every key, the awkward ones of each type among them."""
    random_ = random.Random(0)
    pool = {
        bool: [True, False],
        int: [0, -1, 2**40],
        float: [0.0, 1e-30, 3.0, 0.1 + 0.2],
        str: ["", "a\"b'\\", "new\nline", "ünï", "None"],
    }
    for _ in range(20):
        config = Config()
        for key in KEYS.values():
            if key.name not in ("job.config_file", "model.flavor") and key.kind in pool:
                section, _, leaf = key.name.rpartition(".")
                setattr(value_of(config, section), leaf, random_.choice(pool[key.kind]))
        config.model.args.sliding_window_pattern = random_.choice([None, [], [True, False]])
        before = copy.deepcopy(config)
        save_config(config, tmp_path / "config.toml")
        loaded = load_config([f"--job.config_file={tmp_path / 'config.toml'}"])
        loaded.job.config_file = None
        assert loaded == config == before


# --- help and schema -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_exits_well_and_shows_the_values_of_the_file(write, capsys, flag):
    with pytest.raises(SystemExit) as caught:
        load_config([write("[training]\nsteps = 1234"), flag, "--wrong.key=1"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--training.steps  (integer; now 1234)" in text
    assert "\033" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_help_fits_the_terminal_and_misses_no_key(width):
    text = help_text(Config(), width)
    assert max(map(len, text.splitlines())) <= min(max(width, 80), 120)
    for key in KEYS:
        assert re.search(rf"^  --{re.escape(key)}$|^  --{re.escape(key)}  \(", text, re.M), key


def test_every_key_has_a_docstring_and_a_valid_default():
    docs = field_docs()
    for key in KEYS.values():
        assert re.search(r"\w{3}", docs[key.name]), key.name
        default = value_of(Config(), key.name)
        assert coerce(default, key) == default
        # None cannot be written in TOML: a saved file leaves it out, so it has to be the default.
        assert not key.optional or default is None


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_files_of_the_repository_load(path):
    kind, _, rest = path.stem.partition("_")
    size = {"debug": "debugmodel", "finetune": "hf"}.get(kind) or rest.partition("_")[0].upper()
    assert load_config([f"--job.config_file={path}"]).model.flavor.startswith(f"{size}_")


def test_files_for_every_size_exist():
    names = {path.stem for path in TRAIN_CONFIGS}
    assert names >= {"debug_model", *(f"llama3_{size}" for size in ("1b", "3b", "8b", "70b", "405b"))}


def test_home_is_expanded_where_no_shell_did(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config(["--job.dump_folder=~/runs", "--checkpoint.initial_load_path=~/seed/step-0"])
    assert config.job.dump_folder == "/home/someone/runs"
    assert config.checkpoint.initial_load_path == "/home/someone/seed/step-0"
