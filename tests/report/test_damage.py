"""Whatever lies in the place of a grid's files, a report ends with pages or with one line."""

import csv
import html
import io
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.commands.grid import report_command
from lightning_app.core.errors import UserError
from lightning_app.core.files import sha256_of, with_seal
from lightning_app.report.comparisons import metrics_document
from lightning_app.report.facts import facts, state_counts
from lightning_app.report.figures.sheet import read_log
from lightning_app.report.figures.stable import read_probes
from lightning_app.report.headline import answer
from lightning_app.report.limits import limits
from lightning_app.report.page import Report
from lightning_app.report.results import damaged_files, read_results
from lightning_app.report.tasks import bleu_scores
from lightning_app.report.tensorboard import write_index
from lightning_app.report.terminal import headline_document
from lightning_app.report.verdicts import verdict_document, verdicts
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.report.write import write_exports
from tests.records import reseal
from tests.report.conftest import PRESET, SEED, WARMUP, write_report

AXES = {SEED: [1, 2], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
OF_A_RUN = ("result.json", "metrics.csv", "probes.csv", "block.json", "env.json", "hypotheses.txt")
OF_A_RUN += ("references.txt", "config.yaml")
STRANGE = (None, [], {}, "x", "", True, -1, 1e308, 10**30, float("nan"), float("inf"), [[[1]]])
STRANGE += ({"a": {"b": 1}}, "\ud800".encode("utf-8", "replace").decode(), 10**400, 0, 0.5)


@pytest.fixture
def whole(make_grid, outcome) -> Path:
    """A small grid whose runs have left every file that a report reads."""
    fake = make_grid(outcome, AXES, metrics={"test/bleu": 20.0})
    for cell in fake.cells:
        run = fake.run(cell)
        block = {"encoder": {"final_norm": "layer", "blocks": [{"norm": "post"}, {"norm": "post"}]}}
        (run / "block.json").write_text(json.dumps(block))
        (run / "env.json").write_text(json.dumps({"python": "3.12", "slot": None}))
        (run / "hypotheses.txt").write_text("ein haus\nzwei\n")
        (run / "references.txt").write_text("ein haus\ndrei\n")
        lines = ["step,quantity,stack,layer,head,value"]
        lines += [f"{s},token_cosine,encoder,{layer},,0.{s}" for s in (1, 5) for layer in (0, 1)]
        lines += [f"{s},attention_entropy,encoder,1,0,1.{s}" for s in (1, 5)]
        (run / "probes.csv").write_text("\n".join(lines) + "\n")
        reseal(run / "result.json")
    plan, digests = fake.folder / "plan.json", {"grid.yaml": ""}
    digests["grid.yaml"] = sha256_of((fake.folder / "grid.yaml").read_bytes())
    plan.write_text(json.dumps(with_seal({**json.loads(plan.read_text()), "schema": 3}, digests)))
    return fake.folder


def look(folder: Path) -> list[str]:
    """Read all that a report reads, short of drawing; the damaged files."""
    grid = read_results(folder)
    found = [*sensitivity_scores(grid), *bleu_scores(grid)]
    write_exports(Report(grid, found, folder.parent / "out"))
    texts = [state_counts(grid), *facts(grid).values(), *limits(grid), answer(grid, found)]
    assert all(isinstance(text, str) for text in texts)
    judged = [verdict_document(verdict) for verdict in verdicts(grid, found)]
    json.dumps([judged, headline_document(found), metrics_document(grid)], default=str)
    for cell in grid.finished:
        read_log(cell)
        read_probes(cell)
    write_index(folder)
    return damaged_files(grid)


def leaves(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from leaves(value, (*path, key))
    for key, value in enumerate(tree) if isinstance(tree, list) else ():
        yield from leaves(value, (*path, key))


def spoil_a_field(path: Path, chance: random.Random) -> None:
    """Put a strange value in the place of a field, or take a field away."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        rows = list(csv.reader(text.splitlines()))
        row = chance.choice(rows)
        strange = (*STRANGE, '"', ",", "1e999", "9" * 99)
        row[chance.randrange(len(row))] = str(chance.choice(strange))
        out = io.StringIO()
        csv.writer(out).writerows(rows)
        path.write_text(out.getvalue())
        return
    tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    *above, last = chance.choice(list(leaves(tree)))
    holder = tree
    for key in above:
        holder = holder[key]
    if chance.random() < 0.2:
        del holder[last]
    else:
        holder[last] = chance.choice(STRANGE)
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


def spoil(path: Path, chance: random.Random) -> str:
    """Damage a file as disks, editors and people do; say what was done."""
    data = bytearray(path.read_bytes())
    kinds = ["truncate", "garbage", "flip", "empty", "folder", "latin"]
    kinds += ["deep"] * (path.suffix in (".json", ".csv"))  # YAML that deep is not defended
    kinds += ["field"] * 6 * (path.suffix != ".txt")
    kind = chance.choice(kinds)
    if kind == "truncate":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "garbage":
        path.write_bytes(chance.randbytes(chance.randrange(1, 300)))
    elif kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000 + b"\n")
    elif kind == "latin":
        path.write_bytes(bytes(data) + "ä\n".encode("latin-1"))
    else:
        spoil_a_field(path, chance)
    return f"{kind} {path.name}"


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("seed", range(4))
def test_damage_ends_in_pages_or_in_one_line(whole: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        copy = tmp_path / "copy" / whole.name
        shutil.copytree(whole, copy)
        run = chance.choice(sorted((copy / "runs").iterdir()))
        of_grid = [copy / "plan.json", copy / "grid.yaml"]
        path = chance.choice([*(run / name for name in OF_A_RUN), *of_grid])
        done = spoil(path, chance)
        damaged, refused = [], ""
        try:
            damaged = look(copy)
        except UserError as error:
            refused = str(error)
        except Exception as error:
            raise AssertionError(done) from error
        if refused:
            assert path.name in ("plan.json", "grid.yaml", "config.yaml") or "newer" in refused
            assert str(copy) in refused
        else:
            assert len(damaged) <= 1, done
            assert all(line.startswith(str(path.parent)) for line in damaged), done
            assert all(path.name in line for line in damaged), done
            if done.startswith(("folder", "deep")) and path.suffix in (".json", ".csv"):
                assert damaged, done
        shutil.rmtree(copy.parent)


def test_a_report_goes_on_without_what_is_damaged(whole: Path, capsys) -> None:
    first, second, *_ = sorted((whole / "runs").iterdir())
    (first / "result.json").write_text("{")
    (second / "metrics.csv").write_text("step,val/nll\n1,x\n")
    assert report_command(whole, whole.parent) == 1
    out, err = capsys.readouterr()
    told = err.splitlines()
    named = [line.split(":")[0] for line in told]
    assert named == [f"{first}/result.json", f"{second}/result.json"]
    assert "another metrics.csv" in told[1]
    assert "6 of 8" in out
    page = (whole / "report.html").read_text(encoding="utf-8")
    cautions = page.partition("What may not be concluded")[2].partition("</aside>")[0]
    assert all(line.removeprefix(f"{whole}/") in html.unescape(cautions) for line in told)
    assert "damaged result" in page.partition("Failed and missing cells")[2]


def test_huge_numbers_of_sound_runs_are_drawn(whole: Path) -> None:
    for run in (whole / "runs").iterdir():
        result = json.loads((run / "result.json").read_text())
        result |= {"status": "ok", "diverged": None, "outcome": "not_yet_learned"}
        result["metrics"] |= {"val/nll": 700.0, "val/perplexity": 1e308}
        (run / "result.json").write_text(json.dumps(result))
        reseal(run / "result.json")
    page = write_report(whole).read_text(encoding="utf-8")
    assert "8 of 8 planned cells finished: of them 8 not yet learned." in page
    assert "Not yet learned: 8 of 8 runs." in page
