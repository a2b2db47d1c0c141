"""What files and a command line say: how they are merged, and whom a mistake names."""

import os
from pathlib import Path

import pytest
import yaml

from lightning_app import fit
from lightning_app.config.config import Config, load_config, resolve
from lightning_app.config.identity import leaves
from lightning_app.config.sources import COMMON, FIELDS_OF, Written, merged, read_tree
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import cell_tree
from lightning_app.training.launcher import check_hosts, check_launcher
from tests.told import told

BASE = Path("ablations/base/synthetic.yaml")
BOTH = "first.yaml, second.yaml"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--seed_everything", "2"], "seed_everything", 2),
        (["--trainer.logger.class_path", "CSVLogger"], "trainer.logger.class_path", "CSVLogger"),
        (["--model.block.shaped_attention.alpha=0.5"], "model.block.shaped_attention.alpha", 0.5),
        (["--model.optimizer.betas", "[0.8,0.9]"], "model.optimizer.betas", [0.8, 0.9]),
        (["--model.block", "{preset: sas}"], "model.block.preset", "sas"),
        (["--model.block.preset=pre_lm", "--model.block.preset=sas"], "model.block.preset", "sas"),
        (["--data.root", "2024"], "data.root", "2024"),
        (["--data.root", "null"], "data.root", None),
        (["--data.document_separator", ""], "data.document_separator", ""),
        (["--trainer.max_time", "00:01:00:00"], "trainer.max_time", "00:01:00:00"),
        (["--trainer.devices", "2"], "trainer.devices", 2),
        (["--trainer.deterministic", "warn"], "trainer.deterministic", "warn"),
        (["--model.optimizer.lr", "5e-4"], "model.optimizer.lr", 5e-4),
    ],
)
def test_a_value_of_the_command_line(words: list[str], key: str, value: object) -> None:
    tree: object = Written(["-c", str(BASE), *words], FIELDS_OF["fit"]).typed(Config)
    for name in key.split("."):
        assert isinstance(tree, dict)
        tree = tree[name]
    assert (tree, type(tree)) == (value, type(value))


def test_common_keys_are_part_of_a_config_and_options_of_the_command_are_not() -> None:
    words = ["--ckpt_path", "7", "--print_config=skip_null", "--weights_only", "true"]
    written = Written(words, FIELDS_OF["fit"])
    assert written.fields == {"ckpt_path": "7", "weights_only": True}
    assert written.asked == {"print_config": "skip_null"}
    assert written.tree == {}
    keys = {key for key, _ in leaves(load_config(Written(["--config", str(BASE)])))}
    assert {*COMMON} < keys


def test_another_class_takes_the_place_of_a_class_not_of_a_section(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("trainer: {logger: {class_path: A, init_args: {x: 1}}}\n")
    same = Written(["-c", "a.yaml", "--trainer.logger.init_args.y=2"])
    assert same.tree["trainer"]["logger"] == {"class_path": "A", "init_args": {"x": 1, "y": 2}}
    other = Written(["-c", "a.yaml", "--trainer.logger", "{class_path: B}"])
    assert other.tree["trainer"]["logger"] == {"class_path": "B"}
    tree = {"model": {"block": {"preset": "sas"}}}
    for name, arguments in (("A", {"x": 1}), ("B", {"y": 2})):
        tree = merged(tree, {"model": {"class_path": name, "init_args": arguments}})
        own = {"class_path": name, "init_args": arguments}
        assert tree == {"model": {"block": {"preset": "sas"}, **own}}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--trainer.callbacks+=x", "trainer.callbacks+"),
        ("--trainer.max_steps", "trainer.max_steps"),
        ("max_steps", "max_steps"),
        ("--model.block={preset: a, preset: b}", "preset"),
        ("--ckpt_pth=last", "ckpt_path"),
    ],
)
def test_a_word_that_is_no_value(word: str, said: str) -> None:
    with pytest.raises(UserError, match=r"^command line: ") as error:
        Written([word], FIELDS_OF["fit"])
    assert said in str(error.value)


def test_the_last_preset_counts(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("model: {block: {preset: pre_lm}}\n")
    right.write_text("model: {block: {preset: sas}}\n")
    first = ["--config", str(BASE)]
    load_config(Written([*first, "--config", str(wrong), "--config", str(right)]))
    load_config(Written([*first, "--config", str(wrong), "--model.block.preset=sas"]))
    with pytest.raises(UserError, match=r"wrong\.yaml: model\.block\.preset: .* 'pre_lm'"):
        load_config(Written([*first, "--config", str(right), "--config", str(wrong)]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [\n", "mine.yaml: line 2: "),
        ("a: \x07\n", "mine.yaml: not valid YAML"),
        ("model: {block: {norm: layer}}\nmodel.block.norm: rms\n", "given twice"),
        ("data.name: text\ndata:\n  name: synthetic\n", "given twice"),
        ("5", "mine.yaml: … 5"),
        ("ckpt_pth: x\n", "mine.yaml: … 'ckpt_pth'; … 'ckpt_path'?"),
        ("data: {splits: {trian: x}}", "mine.yaml: … 'data.splits.trian'"),
    ],
)
def test_a_file_that_no_run_can_have(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(Written(["--config", str(path)], FIELDS_OF["fit"]))
    assert told(words).search(str(error.value))
    assert "mine.yaml: " in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_dotted_keys_of_a_file_are_mappings(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model.block.preset: sas\nmodel: {optimizer: {lr: 1}}\n")
    tree = Written(["--config", str(path)]).tree
    assert tree == {"model": {"block": {"preset": "sas"}, "optimizer": {"lr": 1}}}
    path.write_text("# nothing\n")
    assert read_tree(path) == {}
    path.write_text("{max_steps: 7}\n")
    assert Written(["--trainer", str(path)]).tree == {"trainer": {"max_steps": 7}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.seed", "7"], "command line: data.seed: set from seed_everything"),
        (["--data.task", "masked_lm"], "command line: data.task: set from model.objective.kind"),
        (["--config", "seed.yaml"], "seed.yaml: data.seed: set from seed_everything, so it is 1"),
        (["-c", "t.yaml"], "t.yaml: data.seed: set from seed_everything, so it is 1 and not True"),
        (["--config", "task.yaml"], "task.yaml: data.task: set from model.objective.kind"),
    ],
)
def test_a_derived_field_that_would_be_replaced(words, said: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seed.yaml").write_text("seed_everything: 1\ndata: {seed: 7}\n")
    Path("t.yaml").write_text("seed_everything: 1\ndata: {seed: true}\n")
    Path("task.yaml").write_text("data.task: masked_lm\n")
    with pytest.raises(UserError) as refused:
        Written(words)
    assert str(refused.value).startswith(said)


def test_what_a_field_is_derived_from_may_change_in_a_complete_config(tmp_path: Path) -> None:
    complete = resolve(read_tree(BASE), "base")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(complete))
    found = load_config(Written(["-c", str(file), "--seed_everything", "2"]))
    cell = resolve(cell_tree(complete, {"seed_everything": 2}), "cell")
    assert found["data"]["seed"] == 2
    assert found == cell
    with pytest.raises(UserError, match=r"data\.seed: set from seed_everything"):
        resolve(cell_tree(complete, {"data.seed": 2}), "cell")


@pytest.mark.parametrize(
    ("mistake", "words", "source"),
    [
        ("model.optimizer.lr: expected a number", [], "second.yaml"),
        ("model.optimizer.lr: expected a number", ["--model.optimizer.lr=x"], "command line"),
        ("unknown key 'data.nmae'", [], "first.yaml"),
        ("model.block.ff_skip: a gain", ["--model.block.ff_skip.vector", "1"], "command line"),
        ("model.optimizer: betas", [], "first.yaml"),
        ("model.optimizer: weight_decay", [], BOTH),
        ("model.optimizer: betas", ["--model.optimizer.lr", "1"], "first.yaml"),
        ("data.nmae: x", ["--data.nmae", "y", "--config", "first.yaml"], "first.yaml"),
        (
            "model.optimizer.lr: x",
            ["--model.optimizer.lr=1", "--config=second.yaml"],
            "second.yaml",
        ),
        ("data.window: 0", ["--data", "section.yaml"], "section.yaml"),
        ("model: a pair that is impossible", ["--model.block.norm", "x"], BOTH),
        ("model: betas 3 with lr 1", ["--model.optimizer.betas=3"], "second.yaml, command line"),
        ("model: betas 3 is no pair", ["--model.optimizer.betas=3"], "command line"),
        ("experiments/x: holds another run", [], BOTH),
    ],
)
def test_a_mistake_names_the_source_that_sets_the_value(
    mistake: str, words: list[str], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text("model: {optimizer: {lr: 1, betas: []}}\ndata: {nmae: x}\n")
    Path("second.yaml").write_text("model: {optimizer: {lr: fast}}\n")
    Path("section.yaml").write_text("window: 0\n")
    written = Written([])
    files = ["--config=first.yaml", "--config=second.yaml"]
    assert Written(files + words).source_of(mistake) == source
    assert written.source_of(mistake) == "command line"


TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"])
@pytest.mark.parametrize("value", ["0", "1", "x", ""])
def test_a_rank_that_no_launcher_has_set(name: str, value: str) -> None:
    """Such a run would train to its end and keep no result."""
    with pytest.raises(UserError, match=name):
        check_launcher({name: value, "MASTER_PORT": "1"})


def test_the_ranks_of_a_launcher_pass_and_several_hosts_need_one() -> None:
    """It would wait for the others for ever."""
    for alone in ({}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}):
        with pytest.raises(UserError, match=r"^trainer\.num_nodes: 2, but"):
            check_hosts(2, alone)
        check_hosts(1, alone)
    check_hosts(2, TORCHRUN)
    slurm = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    check_hosts(2, slurm)
    check_launcher(slurm)
    check_hosts(2, {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    with pytest.raises(UserError, match=r"trainer\.num_nodes: 2, but"):
        fit(BASE, {"trainer.num_nodes": 2, "trainer.accelerator": "cpu"})
    # Lightning does not read the RANK of Kubeflow: every host would be the first.
    kubeflow = {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "RANK": "0", "WORLD_SIZE": "2"}
    kubeflow |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    check_launcher(kubeflow)
    check_hosts(1, kubeflow)
    with pytest.raises(UserError, match=r"^trainer\.num_nodes: 2, but"):
        check_hosts(2, kubeflow)
    check_hosts(2, kubeflow | TORCHRUN)
    check_launcher({})
    check_launcher(TORCHRUN)
    check_launcher({name: TORCHRUN[name] for name in TORCHRUN if "ELASTIC" not in name})


def test_a_launcher_of_more_processes_than_the_trainer_has(monkeypatch, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="RANK=1") as found:
        fit(BASE, {"trainer.default_root_dir": str(folder), "trainer.accelerator": "cpu"})
    assert "\n" not in str(found.value)
    assert not folder.exists()
    assert set(TORCHRUN) <= os.environ.keys()
