"""A hundred mistakes of a user and twenty attacks: one line each, and nothing is written."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.cli import main
from tests.attempt import measured
from tests.tables import changed
from tests.told import told

pytestmark = pytest.mark.xdist_group("planned")  # one fork server serves all

ABLATIONS = Path(__file__).parents[1] / "ablations"
BASE = yaml.safe_load((ABLATIONS / "base" / "synthetic.yaml").read_text())
MARK = Path("sprung")
TRAP = "import pathlib\npathlib.Path('sprung').touch()\nclass Trap: pass\n"
EVIL = {"class_path": "trap.Trap"}


def config(**fields: Any) -> str:
    """The demo's config with fields set, `a__b` for `a.b`."""
    return yaml.safe_dump(changed(BASE, **fields))


def grid(base: dict[str, Any] | str | None = None, **changes: Any) -> str:
    """A grid of two cells, changed."""
    tree = {
        "name": "mine",
        "base_config": yaml.safe_load(base) if isinstance(base, str) else base or BASE,
        "axes": {"model.block.preset": ["post_ln", "pre_ln"], "seed_everything": [1]},
        **changes,
    }
    return yaml.safe_dump(tree)


@dataclass(frozen=True)
class Case:
    """What is typed, the files that lie there, and a part of the line that comes."""

    words: str
    said: str
    files: dict[str, str | bytes] = field(default_factory=dict)


def of_grid(command: str, said: str, text: str) -> Case:
    return Case(f"{command} grid.yaml", said, {"grid.yaml": text})


def of_fit(said: str, **fields: Any) -> Case:
    return Case("fit --config run.yaml", said, {"run.yaml": config(**fields)})


CONFIG: dict[str, str | bytes] = {"run.yaml": config()}
RUN: dict[str, str | bytes] = {
    "experiments/mine/runs/one/config.yaml": config(),
    "experiments/mine/runs/one/checkpoints/best.ckpt": "",
}
STUDY = ABLATIONS / "results" / "iwslt14_bleu"
LINES = "a line\n" * 300
TAKEN = """
from lightning_app.blocks.presets import preset

@preset(equation="x' = x", paper="none", fixes="nothing")
def pre_ln(stack):
    return stack
"""

AT_ONCE = [
    # commands
    Case("pln demo", "did you mean 'plan'?"),
    Case("run demo --worker 2", "did you mean '--workers'?"),
    Case("run demo --workers 0", "--workers"),
    Case("run demo --max-time soon", "HH:MM"),
    Case("plan demoo", "did you mean 'demo'?"),
    Case("plan nowhere.yaml", "nowhere.yaml: there is no such file"),
    Case("plan a/b", "a/b: is a folder; expected a file", {"a/b/grid.yaml": ""}),
    Case("plan grod.yaml", "no such file; did you mean 'grid.yaml'?", {"grid.yaml": ""}),
    Case("fit --lr 1e-3", "unknown key 'lr'; did you mean 'model.optimizer.lr'?"),
    Case("fit --batch_size 3", "did you mean 'data.tokens_per_batch'?"),
    Case("run run.yaml", "is a config, not a grid; ablate fit", CONFIG),
    Case("status demo", "holds no plan yet"),
    Case("report joint", "results/joint` shows published runs"),
    Case("report demo --port 80", "--port: needs --serve"),
    Case("doctor demo --fix", "no longer a command; ablate run moves damaged runs aside"),
    Case("prepare --data iwslt", "did you mean 'iwslt14'?"),
    Case("prepare --data text --root nowhere", "nowhere"),
    Case("prepare --config run.yaml", "run.yaml: line 2", {"run.yaml": "a: ["}),
    Case("translate --run nowhere", "nowhere"),
    Case("probe", "--config FILE is needed, or --run RUN"),
    Case("trian --config run.yaml", "did you mean 'fit'?"),
    Case("compare a b", "did you mean 'diff'?"),
    Case("show", "RUN"),
    Case("show nowhere", "RUN nowhere: there is no such folder"),
    Case("show mine/one --jsn", "did you mean '--json'?"),
    Case("show run.yaml", "is a file; expected the folder of a run", CONFIG),
    Case("diff mine/one", "RUN"),
    Case("diff mine/one mine/two", "no folder experiments/mine/runs/one"),
    Case("completion bash", "use ablate --print-completion SHELL"),
    Case("test --run nowhere", "--run nowhere: there is no such folder"),
    Case("validate --run grid/name", "no folder experiments/grid/runs/name"),
    Case("predict --checkpoint last", "--checkpoint last: needs --run RUN"),
    Case("fit --run mine/one", "unknown key 'run'"),
    Case("fit --threads none", "invalid int value: 'none'"),
    Case("run demo --threads 0", "--threads 0: expected at least 1"),
    Case("generate --run nowhere --tokens 3", "generate: --run nowhere"),
    Case("generate --prompt x", "--run"),
    Case("translate --run . --beam 2", "has neither config.yaml nor checkpoints"),
    Case("probe --run nowhere", "--run nowhere"),
    Case("report demo --serve --port 99999", "--port: expected 0 to 65535"),
    Case("submit demo", "slurm_array.sh"),
    Case("", "the following arguments are required: COMMAND"),
    Case("tarin", "did you mean 'fit'?"),
    Case("init", "init: the following arguments are required: DIR"),
    Case("plan demo --worker 2", "plan: unknown argument '--worker'"),
    # runs
    Case("show mine/on", "did you mean 'one'?", RUN),
    Case("show mne/one", "did you mean 'mine'?", RUN),
    Case("show experiments/mine/runs/on", "did you mean 'one'?", RUN),
    Case("show mine", "is a grid; expected one of its runs", RUN),
    Case("translate --run experiments/mine --beam 2", "is a grid; expected one of its", RUN),
    Case("test --run mine/one --checkpoint worst", "last, best or the file", RUN),
    Case("test --run mine/one --trainer.max_steps 3", "only evaluation flags", RUN),
    Case("predict --run mine/one --config a.yaml", "--run names the config already", RUN),
    # results of a published study
    Case(f"results {STUDY} --query varaint=='sas'", "no column 'varaint'; did you mean 'variant'?"),
    Case(f"results {STUDY} --query variant='sas'", "expected a condition, such as variant =="),
    Case(f"results {STUDY} --compare warmup", "expected AXIS=BASELINE"),
    Case(f"results {STUDY} --compare warmupp=0", "no axis 'warmupp'; the axes are model.block."),
    Case(f"results {STUDY} --compare model.block.preset=pre_lm", "one of its values (post_ln, "),
    Case(f"results {STUDY} --metric val/nll", "--metric and --mode: need --compare"),
    Case("results demo", "`ablate run demo` makes one"),
    # plug-ins and the file of a project
    Case("--plugin nowhere.py blocks", "nowhere.py: the plug-in cannot be read: No such file"),
    Case("--plugin a.py blocks", "a.py, line 1: syntax error", {"a.py": "def f(:\n"}),
    Case("blocks --plugin a.py", "belongs before the command", {"a.py": ""}),
    Case("--plugin", "expected a file NAME.py or a module, found nothing"),
    Case("status demo", "did you mean 'plugins'?", {"ablate.yaml": "plugin: [a.py]\n"}),
    Case("status demo", "plugins: expected a list", {"ablate.yaml": "plugins: a.py\n"}),
    Case("status demo", "ablate.yaml: ", {"ablate.yaml": "plugins: [a.py]\n"}),
    Case("status demo", "ablate.yaml: line 2", {"ablate.yaml": "plugins: [\n"}),
    # a new project
    Case("init .", "config.yaml exists already; nothing was written", {"config.yaml": ""}),
    Case("init p", "p is a file; expected a folder", {"p": ""}),
    Case("init p --data a.de b.en c.fr", "expected one or two files, found 3", {}),
    Case("init p --data a.de a.en", "have 300 and 1 lines;", {"a.de": LINES, "a.en": "a\n"}),
    Case("init p --data a.de a.en", "a.en: 0 lines with text", {"a.de": "", "a.en": ""}),
    Case("init p --data a.txt b.txt", "end in the same language", {"a.txt": LINES, "b.txt": LINES}),
    Case("init p --data a.de b.en", "b.en: cannot be read: No such file", {"a.de": LINES}),
    Case("init p --data a.de a.en", "UTF-8 at byte 0", {"a.de": b"\xff\xfe", "a.en": LINES}),
    Case("init p --data a b", "a name that ends in its language", {"a": LINES, "b": LINES}),
]
"""Mistakes that need no model, as a user of each command makes them."""

MISTAKES = [
    *AT_ONCE,
    # parts of a model
    Case("fit --model.schedule.warmup 3", "did you mean 'warmup_steps' or 'warmup_of'?"),
    Case("fit --model.lr 1e-3", "did you mean 'model.optimizer.lr'?"),
    Case("fit --model.block.preset postln", "unknown name 'postln'; did you mean 'post_ln'?"),
    Case("validate --config run.yaml", "--ckpt_path is needed", CONFIG),
    Case("test --config run.yaml --ckpt_path best", "best.ckpt", CONFIG),
    Case("predict --config run.yaml --ckpt_path x.ckpt", "x.ckpt", CONFIG),
    Case("blocks pre_lm", "did you mean 'pre_ln'?"),
    Case("blocks sas --encoder-depth -1", "depth"),
    Case("fit --config run.yaml --model.block.nrom x", "command line: unknown key", CONFIG),
    Case("bench --peers", "benchmarks/bench.py"),
    Case("probe --theory", "benchmarks/theory/run.py"),
    Case("--plugin a.py blocks", "give the new part another name", {"a.py": TAKEN}),
    # one run
    of_fit("did you mean 'max_steps'?", trainer__max_stepz=3),
    of_fit("trainer.max_steps: 0 trains nothing", trainer__max_steps=0),
    of_fit("trainer.limit_val_batches: expected batches from 1", trainer__limit_val_batches=0),
    of_fit("trainer.fast_dev_run: True", trainer__fast_dev_run=True),
    of_fit("seed_everything: expected a whole number", seed_everything=True),
    of_fit("model.optimizer.eps: nan is not a finite", model__optimizer__eps=float("nan")),
    of_fit(
        "trainer.callbacks.init_args: missing a required … argument: 'monitor'",
        trainer__callbacks=[{"class_path": "lightning.pytorch.callbacks.EarlyStopping"}],
    ),
    # grids
    of_grid("plan", "did you mean 'axes'?", grid(axess={})),
    of_grid("run", "did you mean 'pre_ln'?", grid(axes={"model.block.preset": ["pre_lm"]})),
    of_grid("plan", "expected a whole number from 0", grid(axes={"seed_everything": [1, "2"]})),
    of_grid("run", "max_epochs: 0 trains nothing", grid(axes={"trainer.max_epochs": [0, 1]})),
    of_grid("plan", "only with model.objective.evaluate_test", grid(metric={"name": "test/nll"})),
    of_grid("plan", "only with model.objective.validation_bleu", grid(metric={"name": "val/bleu"})),
    of_grid("status", "value 1 is given twice", grid(axes={"seed_everything": [1, 1]})),
    of_grid("status", "is not on the axis", grid(sensitivity={"baseline": "sas"})),
    of_grid("plan", "inf is not a finite number", grid(config(model__optimizer__lr=1e999))),
]

ATTACKS = [
    of_grid("plan", "may only name", grid(config(trainer__callbacks=[EVIL]))),
    of_grid("run", "found 'evil.yaml'", grid(config(trainer__callbacks="evil.yaml"))),
    of_grid("status", "whole number of about 401 digits", f"axes: {{a.b: [{10**400}]}}\n"),
    of_grid("plan", r"unknown key '\x1b[2J", '"\\e[2J\\e]0;x\\a": 1\n'),
    Case(
        "test --config run.yaml --ckpt_path x.ckpt",
        "torn or damaged: not a complete checkpoint",
        {"run.yaml": config(), "x.ckpt": b"cos\nsystem\n(S'touch sprung'\ntR."},
    ),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module that must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ABLATE_STORAGE", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(TRAP)
    (tmp_path / "evil.yaml").write_text("class_path: trap.Trap\n")
    yield tmp_path
    assert not MARK.exists()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_no_case_stands_twice() -> None:
    given = [(case.words, case.said) for case in [*MISTAKES, *ATTACKS]]
    assert len(set(given)) == len(given)


def check(case: Case, code: int, out: str, err: str) -> None:
    assert (code, out) == (2, ""), (case.words, err)
    [line] = err.splitlines()
    assert line.startswith("ablate: "), line
    assert line.isprintable(), line
    assert told(case.said).search(line), line
    assert "secret" not in line, line


def write(case: Case, folder: Path) -> None:
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mistake_that_needs_no_model_is_answered_at_once(folder: Path, part: int) -> None:
    """Each in a process that has imported nothing, so that what it imports is seen."""
    some = [case for number, case in enumerate(AT_ONCE) if (number % 4 == 0) == (part == 0)]
    folders = [folder / str(number) for number in range(len(some))]
    for case, place in zip(some, folders, strict=True):
        place.mkdir()
        write(case, place)
    before = files(folder)
    calls = [(case.words.split(), place) for case, place in zip(some, folders, strict=True)]
    answers = measured(calls, os.environ)
    for case, answer in zip(some, answers, strict=True):
        check(case, answer.code, answer.out, answer.err)
        assert not answer.imported, (case.words, answer.imported)
    assert files(folder) == before


OTHERS = [*MISTAKES, *ATTACKS]
NAMES = [f"{case.words[:40]}, {case.said[:30]}" for case in OTHERS]


@pytest.mark.parametrize("case", OTHERS, ids=NAMES)
def test_it_is_one_line(capsys, folder: Path, case: Case) -> None:
    write(case, folder)
    before = files(folder)
    code = main(case.words.split())
    said = capsys.readouterr()
    check(case, code, said.out, said.err)
    assert files(folder) == before
