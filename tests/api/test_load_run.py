"""`load_run`: the model of a finished run, and what can be done with it."""

import inspect
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_app import RunResult, UserError, fit, load_run
from lightning_app.api.trained import TrainedRun
from lightning_app.cli import main, parse_arguments
from lightning_app.commands.run import input_lines
from lightning_app.data.tokenizer import EOS
from tests.api.conftest import TEXT, causal_config
from tests.small import ENGLISH, GERMAN


def test_scores_of_pairs_are_the_loss_of_an_evaluation(translation: RunResult) -> None:
    """The last weights over the validation split give `val/nll`, which is that of the last step."""
    run = translation.load("last")
    assert not run.model.training
    scores = run.score(GERMAN * 10, ENGLISH * 10)
    nll, tokens = sum(s.nll for s in scores), sum(s.tokens for s in scores)
    assert nll / tokens == pytest.approx(translation.metrics["val/nll"], rel=1e-6)
    assert [s.tokens for s in scores[:3]] == [len(line.split()) + 1 for line in ENGLISH]
    one, other = run.score(GERMAN[:2], ENGLISH[:2])[1], run.score([GERMAN[1]], [ENGLISH[1]])[0]
    assert one.nll == pytest.approx(other.nll, rel=1e-6)
    (strange,) = run.score(GERMAN[:1], ["the zebra sees ."])
    assert (strange.tokens, strange.unknown) == (5, 1)
    assert run.score([], []) == []
    assert run.score(iter(GERMAN * 10), iter(ENGLISH * 10)) == scores


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"evaluation_stride": None, "tokenizer": "byte"},
        {"order": "streams", "evaluation_stride": None},
        {"intra_document_masking": True, "document_separator": TEXT.splitlines()[0]},
    ],
    ids=["overlap", "bytes", "streams", "documents"],
)
def test_the_score_of_a_text_is_its_loss(data: dict, causal: RunResult, tmp_path: Path) -> None:
    result = causal if not data else fit(causal_config(tmp_path, **data))
    (score,) = result.load("last").score([TEXT * 3])
    assert score.nll_per_token == pytest.approx(result.metrics["val/nll"], rel=1e-6)
    assert score.perplexity == pytest.approx(result.metrics["val/perplexity"], rel=1e-5)
    assert score.unknown == 0
    size = len((TEXT * 3).encode()) if data.get("tokenizer") == "byte" else len(TEXT * 3)
    assert score.tokens == size


def test_texts_are_scored_alone_and_as_their_files(causal: RunResult, tmp_path: Path) -> None:
    run = causal.load("last")
    lines = ["the dog", "sees\nthe cat", "ß!"]
    both = run.score(lines)
    assert both == [run.score([line])[0] for line in lines] == run.score(iter(lines))
    assert [score.tokens for score in both] == [8, 13, 3]
    assert [score.unknown for score in both] == [0, 0, 1]
    # By hand: a text shorter than a window, after the end of a line.
    ids = run.tokenizer.encode("the dog")
    tokens = torch.tensor([[EOS, *ids]])
    with torch.no_grad():
        logits = run.model(tokens)[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([*ids, EOS]), reduction="sum")
    assert both[0].nll == pytest.approx(float(expected), rel=1e-5)

    lines, file = ["the dog", "sees", "", "the cat"], tmp_path / "valid.txt"
    file.write_text("".join(f" {line} \r\n" for line in lines), encoding="utf-8-sig", newline="")
    spaced = "\n".join(f" {line} " for line in lines)
    assert run.score([file.read_bytes().decode()]) == run.score([spaced])
    assert [*input_lines(file)] == lines


def test_it_translates_and_generates_as_the_commands_do(translation, causal, capsys, monkeypatch):
    lines = [*GERMAN, "", GERMAN[0]]
    found = translation.load().translate(lines, beam=2)
    assert translation.load().translate(iter(lines), beam=2) == found
    text = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    capsys.readouterr()
    assert main(["translate", "--run", str(translation.folder), "--beam", "2"]) == 0
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in found)
    assert found[3] == ""
    texts = causal.load("last").generate("the", tokens=5, texts=2)
    words = ["--prompt", "the", "--tokens", "5", "--texts", "2", "--checkpoint", "last"]
    assert main(["generate", "--run", str(causal.folder), *words]) == 0
    assert capsys.readouterr().out == f"\n{'-' * 20}\n".join(texts) + "\n"
    assert [len(text) for text in texts] == [8, 8]
    given = parse_arguments(["generate", "--run", "x"])
    for name, parameter in inspect.signature(TrainedRun.generate).parameters.items():
        assert name == "self" or getattr(given, name) == parameter.default, name


def test_what_a_run_holds(translation: RunResult) -> None:
    run = load_run(translation.folder)
    assert run.config["model"]["architecture"]["model_dim"] == 8
    assert run.metrics == json.loads((translation.folder / "result.json").read_text())["metrics"]
    by_file = load_run(translation.folder, translation.folder / "checkpoints" / "best.ckpt")
    state = run.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in by_file.model.state_dict().items())


def test_another_task_and_wrong_arguments_are_refused(translation: RunResult, causal: RunResult):
    text, pairs = causal.load("last"), translation.load()
    theirs = translation.folder / "checkpoints" / "best.ckpt"
    for call, said in [
        (lambda: pairs.generate("x"), "for translation, not for causal language modelling"),
        (lambda: text.translate(["x"]), "for causal language modelling, not for translation"),
        (lambda: pairs.score(["x"]), "targets: expected a line for each of 1, found none"),
        (lambda: pairs.score(["x"], ["x", "y"]), "expected a line for each of 1, found 2"),
        (lambda: pairs.score(["x\ny"], ["x"]), "lines: .* line break"),
        (lambda: pairs.score("x", ["x"]), "lines: expected a list of texts, found one text"),
        (lambda: pairs.translate("x"), "lines: expected a list of texts, found one text"),
        (lambda: pairs.translate(["x", "y\nz"]), "lines: one of them has a line break"),
        (lambda: pairs.translate(["x"], beam=0), "beam 0: expected at least 1"),
        (lambda: text.score(["x"], ["x"]), "targets: only a model for translation"),
        (lambda: text.generate(tokens=0), "tokens 0: expected at least 1"),
        (lambda: load_run(causal.folder, "lst"), "lst is missing"),
        (lambda: load_run(causal.folder / "nowhere"), "best.ckpt is missing"),
        (lambda: load_run(causal.folder, theirs), "best.ckpt: is of another run"),
        (lambda: pairs.translate([1]), "lines: expected texts, found 1"),  # pyright: ignore[reportArgumentType]
        (lambda: pairs.translate(3), "lines: expected a list"),  # pyright: ignore[reportArgumentType]
        (lambda: pairs.translate(["a"], beam=1.5), "beam: "),  # pyright: ignore[reportArgumentType]
        (lambda: text.generate(tokens=5.0), "tokens: "),  # pyright: ignore[reportArgumentType]
        (lambda: text.generate(temperature="1"), "temperature: "),  # pyright: ignore[reportArgumentType]
        (lambda: text.generate(seed=2**70), "seed "),
        (lambda: text.generate(None), "prompt: "),  # pyright: ignore[reportArgumentType]
    ]:
        with pytest.raises(UserError, match=said) as found:
            call()
        assert "\n" not in str(found.value)
