"""Models that start from another run: weights, tokenizer, identity, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lightning_app.cli import main
from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.config.experiment import cell_id, identity_of
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import expand
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.parent import find_parent, is_finite, read_checkpoint
from lightning_app.runs.records import read_result
from lightning_app.training.checkpoint import WholeCheckpoints
from lightning_app.training.datamodule import TextDataModule
from tests import questions, tables
from tests.documents import run_tree, write_documents
from tests.records import reseal
from tests.tables import changed
from tests.tables import fitted as fit

pytestmark = pytest.mark.xdist_group("parents")  # what they share is made once
ARCHITECTURE = {"positions": "learned", "max_positions": 24, "embedding_norm": "layer_norm"}


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of masked language modelling with next sentences, and one without."""
    root = tmp_path_factory.mktemp("parents")
    tree = run_tree(write_documents(root / "documents", documents=9))
    tree = changed(tree, model__block__preset="post_ln")
    tree["model"]["architecture"] |= ARCHITECTURE
    alone = changed(tree, model__objective__next_sentence=False)
    return {"pairs": fit(tree, root / "pairs"), "windows": fit(alone, root / "windows")}


@pytest.fixture
def tree(tmp_path: Path, parents: dict[str, Path]) -> dict[str, Any]:
    tree = tables.fine_tuning(tables.write_table(tmp_path / "rte", "rte"), "rte")
    tree["model"]["architecture"] |= ARCHITECTURE
    return changed(tree, model__init_from=str(parents["pairs"]))


@pytest.fixture
def copy(tmp_path: Path, parents: dict[str, Path]) -> Path:
    return Path(shutil.copytree(parents["pairs"], tmp_path / "copy"))


def built(tree: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    complete = resolve(tree, "child.yaml")
    data = data_module(complete["data"])
    data.setup()
    module = transformer_module(complete["model"])
    torch.manual_seed(complete["seed_everything"])
    module.build(data.vocab_size)
    assert module.model is not None
    return module.model.state_dict(), data


def weights(run: Path) -> dict[str, Tensor]:
    state = read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    return {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}


def test_a_child_begins_with_all_but_the_heads(tree: dict[str, Any], parents: Any) -> None:
    there, (here, data) = weights(parents["pairs"]), built(tree)
    taken = {k for k in here if k.startswith(("embedding.", "encoder."))}
    assert taken == {k for k in there if k.startswith(("embedding.", "encoder."))}
    assert len(taken) > 30
    for name in taken:
        assert torch.equal(here[name], there[name]), name
    for part in ("weight", "bias"):
        assert torch.equal(here[f"pooler.{part}"], there[f"next_sentence.pooler.{part}"])
    assert here["output.weight"].abs().max() <= 0.04
    assert not here["output.bias"].any()
    own = {f"{part}.{of}" for part in ("pooler", "output") for of in ("weight", "bias")}
    assert set(here) - taken == own
    tokenizer = (parents["pairs"] / "tokenizer.model").read_bytes()
    assert data.corpus.tokenizer_file.read_bytes() == tokenizer
    # Its seeds of values and its dropout may be others; new heads are drawn as the child says.
    architecture = {**tree["model"]["architecture"], "seeding": "name", "dropout": 0.1}
    other = built(changed(tree, model__architecture=architecture))[0]
    assert torch.equal(other["embedding.tokens.weight"], here["embedding.tokens.weight"])
    assert not torch.equal(other["output.weight"], here["output.weight"])


def test_a_model_without_a_pooler_leaves_it(tmp_path: Path, parents: dict[str, Path]) -> None:
    """SQuAD marks tokens: all of the encoder is the parent's, also its table of segments."""
    tree = questions.answering(questions.write_squad(tmp_path / "squad", "squad2"), "squad2")
    tree["model"]["architecture"] |= ARCHITECTURE
    there = weights(parents["pairs"])
    here, data = built(changed(tree, model__init_from=str(parents["pairs"])))
    own = {"output.weight", "output.bias"}
    for name in here.keys() - own:
        assert torch.equal(here[name], there[name]), name
    assert own < here.keys()
    assert not any("pooler" in name for name in here)
    tokenizer = (parents["pairs"] / "tokenizer.model").read_bytes()
    assert data.corpus.tokenizer_file.read_bytes() == tokenizer
    vocabulary = changed(tree, model__init_from=str(parents["pairs"]), data__tokenizer="char")
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        resolve(vocabulary, "child.yaml")


def test_without_segments_nothing_changes(tree: dict[str, Any], parents: dict[str, Path]) -> None:
    child = changed(tree, model__init_from=str(parents["windows"]))
    there, (here, _) = weights(parents["windows"]), built(child)
    assert not here["embedding.segments.weight"].any()
    assert not any("segments" in name for name in there)
    orphan = transformer_module(resolve(changed(child, model__init_from=None), "o")["model"])
    torch.manual_seed(child["seed_everything"])
    orphan.build(len(there["embedding.tokens.weight"]))
    assert orphan.model is not None
    fresh = orphan.model.state_dict()
    for name in ("pooler.weight", "output.weight"):
        assert torch.equal(here[name], fresh[name]), name
    for name in here:
        if name.startswith("encoder."):
            assert torch.equal(here[name], there[name]), name
    complete = resolve(yaml.safe_load((parents["windows"] / "config.yaml").read_text()), "p")
    parent = transformer_module(complete["model"])
    parent.build(len(there["embedding.tokens.weight"]))
    parent.model.load_state_dict(there)  # pyright: ignore[reportOptionalMemberAccess]
    module = transformer_module(resolve(child, "c")["model"])
    module.build(len(here["embedding.tokens.weight"]))
    tokens = torch.randint(5, 15, (2, 9))
    seen: list[Tensor] = []
    for model, inputs in (
        (parent.model, (tokens, torch.arange(3))),
        (module.model, (tokens, torch.ones_like(tokens))),
    ):
        assert model is not None
        model.eval()
        model.encoder.register_forward_hook(lambda _, __, out: seen.append(out))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        model(*inputs)
    torch.testing.assert_close(seen[0], seen[1])


def test_it_records_parents(tmp_path: Path, tree: dict[str, Any], parents: dict[str, Path]) -> None:
    """And goes on from its own checkpoint to the numbers of a run without interruption."""
    run = fit(tree, tmp_path / "whole", trainer__max_steps=8, trainer__val_check_interval=4)
    result = json.loads((run / "result.json").read_text())
    parent = find_parent(str(parents["pairs"]))
    record = json.loads((run / "identity.json").read_text())
    assert record["config"]["model.init_from"] == f"{parent.id}@{parent.digest[:16]}"
    assert "data.init_from" not in record["config"]
    assert parent.id == json.loads((parents["pairs"] / "result.json").read_text())["id"]
    assert result["provenance"]["parent"] == {
        "id": parent.id,
        "sha256": parent.digest,
        "checkpoint": str(parents["pairs"] / "checkpoints" / "last.ckpt"),
    }
    assert result["id"] == cell_id(resolve(yaml.safe_load((run / "config.yaml").read_text()), "x"))

    fields: dict[str, Any] = {"trainer__val_check_interval": 4}
    fit(tree, tmp_path / "parts", trainer__max_steps=4, **fields)
    again = fit(tree, tmp_path / "parts", "--ckpt_path", "last", trainer__max_steps=8, **fields)
    for name, value in weights(run).items():
        assert torch.equal(value, weights(again)[name]), name


def test_another_parent_or_child(tmp_path: Path, tree: dict[str, Any], parents: Any) -> None:
    """A moved parent is not."""
    ids = {"pairs": cell_id(resolve(tree, "a"))}
    moved = tmp_path / "moved"
    shutil.copytree(parents["pairs"], moved)
    assert cell_id(resolve(changed(tree, model__init_from=str(moved)), "a")) == ids["pairs"]
    file = moved / "checkpoints" / "last.ckpt"
    assert cell_id(resolve(changed(tree, model__init_from=str(file)), "a")) == ids["pairs"]
    ids["windows"] = cell_id(resolve(changed(tree, model__init_from=str(parents["windows"])), "a"))
    ids["none"] = cell_id(resolve(changed(tree, model__init_from=None), "a"))
    shutil.copyfile(parents["pairs"] / "checkpoints" / "best.ckpt", file)
    ids["changed"] = cell_id(resolve(changed(tree, model__init_from=str(moved)), "a"))
    assert len(set(ids.values())) == 4


def test_the_checkpoint_of_another_run_is_refused_in_a_parent(copy, tree, refuse: Any) -> None:
    """It would be fine-tuned as if it were the parent's: another seed has the same shapes."""
    identity = copy / "identity.json"
    identity.write_text(json.dumps({**json.loads(identity.read_text()), "id": "0" * 16}))
    for given in ("last", "best"):
        refuse(tree, "another run", model__init_from=str(copy / "checkpoints" / f"{given}.ckpt"))


def test_an_earlier_checkpoint_in_place_of_the_last_one_is_refused(copy, tree, refuse: Any) -> None:
    """It is of the same run and seed, and has done fewer steps. As a file it may be named."""
    last = copy / "checkpoints" / "last.ckpt"
    earlier = torch.load(last, weights_only=True)
    steps, earlier["global_step"] = earlier["global_step"], 1
    WholeCheckpoints().save_checkpoint(earlier, last)
    refuse(tree, f"is of step 1, but its run ended at step {steps}", model__init_from=str(copy))
    complete = resolve(changed(tree, model__init_from=str(last)), "child.yaml")
    assert complete["model"]["init_from"] == str(last)


def test_a_parent_cut_short_is_refused(copy: Path, tree: dict[str, Any], refuse: Any) -> None:
    """By `max_time`, say. Its checkpoint may be named."""
    asked = json.loads((copy / "result.json").read_text())["steps"] + 3
    reseal(copy / "result.json", status="cut_short", outcome="cut_short", steps_asked=asked)
    refuse(tree, f"cut short at {asked - 3} of {asked} steps", model__init_from=str(copy))
    last = str(copy / "checkpoints" / "last.ckpt")
    assert resolve(changed(tree, model__init_from=last), "child.yaml")["model"]["init_from"] == last


def test_a_parent_that_changes_while_its_child_begins_is_refused(
    tmp_path: Path, copy: Path, tree: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of the child has the digest of the weights: others would be a silent other parent."""
    file, setup = RunFolder(copy).checkpoint("last"), TextDataModule.setup

    def retrained(data: TextDataModule, stage: str | None = None) -> None:
        setup(data, stage)
        checkpoint = read_checkpoint(file)
        state = {key: value.clone() for key, value in checkpoint["state_dict"].items()}
        state["model.embedding.tokens.weight"] += 1.0
        WholeCheckpoints().save_checkpoint({**checkpoint, "state_dict": state}, file)

    monkeypatch.setattr(TextDataModule, "setup", retrained)
    path, run = tmp_path / "run.yaml", tmp_path / "run"
    child = changed(tree, model__init_from=str(copy), trainer__default_root_dir=str(run))
    path.write_text(yaml.safe_dump(child))
    assert main(["fit", "--config", str(path)]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "last.ckpt:" in said
    assert not (run / "result.json").exists()


def test_a_child_may_be_a_parent(tmp_path: Path, tree: dict[str, Any]) -> None:
    mnli = tables.write_table(tmp_path / "mnli", "mnli")
    run = fit(changed(tree, data__name="mnli", data__root=str(mnli)), tmp_path / "first")
    there, (here, _) = weights(run), built(changed(tree, model__init_from=str(run)))
    assert there["output.weight"].shape == (3, 12)
    assert here["output.weight"].shape == (2, 12)
    for name in here:
        if not name.startswith("output."):
            assert torch.equal(here[name], there[name]), name


REFUSED = [
    ({"model__block__preset": "pre_ln"}, "model.block.preset is post_ln … pre_ln in"),
    ({"model__block": {"preset": "post_ln", "residual_attention": "sum"}}, "residual_attention"),
    ({"model__architecture__ff_dim": 15}, "model.architecture.ff_dim is 14 … 15 in"),
    ({"model__architecture__max_positions": 25}, "max_positions is 24 … 25 in"),
    ({"data__tokenizer": "char"}, "data.tokenizer"),
    ({"data__vocab_size": 14}, "data.vocab_size is None … 14"),
    ({"data__window": 30}, "24 … data.window 30"),
    ({"model__init_from": "nowhere"}, "there is no"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_another_parent_is_refused(tree: Any, refuse: Any, fields: Any, said: str) -> None:
    refuse(tree, said, **fields)


LACKING = [
    *(("result.json", "result.json:"), ("tokenizer.model", "tokenizer.model is missing")),
    ("checkpoints/last.ckpt", "keeps no checkpoints/last.ckpt"),
    *(("config.yaml", "config.yaml is missing"), ("identity.json", "identity.json is missing")),
]
DAMAGED = [
    ("checkpoints/last.ckpt", "last.ckpt: damaged"),
    ("tokenizer.model", "not the tokenizer of last.ckpt"),
    ("config.yaml", "its seal is of another config.yaml"),
    ("identity.json", "it holds no id of a run"),
]


@pytest.mark.parametrize(("name", "said"), LACKING + DAMAGED)
def test_a_parent_with_a_damaged_or_missing_file_is_refused(
    copy: Path, tree, refuse: Any, name: str, said: str
) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    if (name, said) in LACKING:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(b"x" if name.endswith(("yaml", "json")) else bytes(content))
    refuse(tree, said, model__init_from=str(copy))


def test_residual_attention_may_be_turned_off(copy: Path, tree: dict[str, Any]) -> None:
    """It has no weights; another child, and only where the config says none."""
    file = RunFolder(copy).checkpoint("last")
    checkpoint = read_checkpoint(file)
    parameters = checkpoint["hyper_parameters"]
    block = {**parameters["block"], "residual_attention": "mean"}
    changes = {"hyper_parameters": {**parameters, "block": block}}
    WholeCheckpoints().save_checkpoint({**checkpoint, **changes}, file)
    child = changed(tree, model__init_from=str(copy))

    def carrying(kind: str | None) -> dict[str, Any]:
        child["model"]["block"]["residual_attention"] = kind
        return resolve(child, "child.yaml")

    ids = {kind: cell_id(carrying(kind)) for kind in ("mean", "none")}
    assert ids["mean"] != ids["none"]
    here, _ = built(carrying("none"))
    name = "encoder.blocks.0.self_attention.query.weight"
    assert torch.equal(here[name], weights(copy)[name])
    for kind in (None, "sum"):
        with pytest.raises(UserError, match=f"residual_attention.*{kind}"):
            carrying(kind)


def test_a_weight_too_many_or_too_few_is_refused(tmp_path, tree, parents: dict[str, Path]) -> None:
    def edited(name: str, edit: Any) -> dict[str, Any]:
        copy = tmp_path / name
        shutil.copytree(parents["pairs"], copy)
        file = RunFolder(copy).checkpoint("last")
        checkpoint = read_checkpoint(file)
        state = {key: value.clone() for key, value in checkpoint["state_dict"].items()}
        edit(state)
        whole = {**checkpoint, "state_dict": state, "finite": is_finite(state)}
        WholeCheckpoints().save_checkpoint(whole, file)
        return changed(tree, model__init_from=str(copy))

    table = "model.embedding.position_table.weight"
    extra = edited("extra", lambda state: state.update({"model.encoder.x": torch.ones(1)}))
    missing = edited("missing", lambda state: state.pop(table))
    shorter = edited("shorter", lambda state: state.update({table: torch.ones(9, 12)}))
    diverged = edited("diverged", lambda state: state[table].fill_(torch.nan))
    for child, said in (
        (diverged, "last.ckpt: holds weights that are not finite: its run diverged"),
        (extra, r"the model has no weight 'encoder\.x'"),
        (missing, r"the parent has no weight 'embedding\.position_table\.weight'"),
        (shorter, r"has the shape \(9, 12\) there and \(24, 12\) in the model"),
    ):
        with pytest.raises(UserError, match=said):
            built(child)


def test_only_a_task_with_labels_has_a_parent(tmp_path: Path, parents: Any, refuse: Any) -> None:
    tree = run_tree(write_documents(tmp_path / "documents", documents=9))
    said = "'masked_lm' trains from its own initial values"
    refuse(tree, said, model__init_from=str(parents["pairs"]))


def test_a_grid_may_name_a_parent(tmp_path: Path, tree: dict[str, Any], parents: Any) -> None:
    tree["trainer"] = {"max_steps": 4, "val_check_interval": 2}
    base = changed(tree, model__init_from=None)
    axes = {"model.init_from": [None, *map(str, parents.values())]}
    path = tmp_path / "children.yaml"
    grid = {"name": "children", "base_config": base, "axes": axes}
    path.write_text(yaml.safe_dump(grid))
    plan, _ = expand(read_spec(path), resolve, identity_of)
    assert len({cell.id for cell in plan.cells}) == 3


# Over 5 s: two parents and their children are trained.
@pytest.mark.parametrize("preset", ["admin", "prores"])
def test_a_first_step_sets_the_parents(tmp_path: Path, tree: dict[str, Any], preset: str) -> None:
    """A fresh run measures Admin's skips, and lets ProRes's branches rise from nearly nothing."""
    parent = run_tree(write_documents(tmp_path / "documents", documents=9))
    parent = changed(parent, model__block__preset=preset)
    parent["model"]["architecture"] |= {**ARCHITECTURE, "tie_embeddings": False}
    run = fit(parent, tmp_path / "parent")
    tree = changed(tree, model__architecture__tie_embeddings=False)
    child = changed(tree, model__block__preset=preset, model__init_from=str(run))
    child = changed(child, model__optimizer__lr=1e-12, trainer__max_steps=2)
    child = changed(child, model__schedule__warmup_steps=0)
    after = weights(fit(child, tmp_path / "child", trainer__val_check_interval=2))
    there = weights(run)
    assert "embedding.output.weight" in there.keys() - after.keys()
    for name, value in after.items():
        if name.startswith(("embedding.", "encoder.")):
            torch.testing.assert_close(value, there[name], rtol=0, atol=1e-9)


def test_nothing_is_fine_tuned_after_a_parent_that_is_not_finite(tmp_path, copy, tree) -> None:
    """It is a result without a step, with or without a checkpoint of the parent; no crash."""
    path = copy / "result.json"
    failure = {"step": 3, "rule": "the training loss is not finite", "last_finite_loss": 4.0}
    reseal(path, **{"status": "diverged", "outcome": "non_finite", "diverged": failure})
    child = changed(tree, model__init_from=str(copy))
    identity = cell_id(resolve(child, "a"))
    assert identity != cell_id(resolve(tree, "a"))
    RunFolder(copy).checkpoint("last").unlink()
    assert identity == cell_id(resolve(child, "a"))
    run = fit(child, tmp_path / "child")
    found = read_result(run / "result.json", identity, "val/accuracy")
    assert found is not None
    assert (found["outcome"], found["status"], found["steps"]) == ("non_finite", "diverged", 0)
    said = f"nothing to fine-tune: the parent {copy} ended non-finite"
    assert found["outcome_rule"] == found["diverged"]["rule"] == said
    assert found["provenance"]["parent"]["sha256"] is None
    assert found["provenance"]["data"] == found["data"]["digest"]
    assert {"cpu", "gpus", "matmul", "threads"} < found["provenance"].keys()
    assert found["unigram_entropy"] > 0
    assert not RunFolder(run).checkpoint("last").exists()
