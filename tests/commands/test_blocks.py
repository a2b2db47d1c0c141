"""`ablate blocks`: the table, one preset, the files it writes, and what it costs to ask."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.catalogue.presets import (
    parameter_ratios,
    resolve_preset,
    specification_lines,
    stack_parameters,
    table_rows,
)
from lightning_app.catalogue.svg import picture
from lightning_app.cli import main
from lightning_app.config.config import read_config
from lightning_app.models.heads import ArchitectureConfig
from tests.catalogue.variants import drawn, stacks


@pytest.mark.parametrize("columns", [80, 170])
def test_the_table_has_every_preset(printed, monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = printed("blocks")
    assert max(map(len, shown.splitlines())) <= columns
    words = shown.split()
    for preset in PRESETS.values():
        assert preset.name in words
        said = f"{preset.equation} {preset.difference}"
        assert [word for word in said.split() if word not in words] == []
    assert "without embeddings" in " ".join(words)


def test_parameters_are_those_of_the_stacks_and_ratios_are_over_pre_ln() -> None:
    """Two roads: pre_ln by hand, sas by what it lacks."""
    d, f = 512, 1024
    attention, feed, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    encoder = 6 * (attention + feed + 2 * norm) + norm
    decoder = 6 * (2 * attention + feed + 3 * norm) + norm
    assert stack_parameters(resolve_preset("pre_ln", 6, 6)) == encoder + decoder
    lacking = 12 * 2 * (d * d + d) - 2 * d * d  # V and P, except for dW of two first layers
    gained = 12 * (3 * 4 + 2)  # alpha, beta, gamma a head, and two branches' gains
    assert stack_parameters(resolve_preset("sas", 6, 6)) == encoder + decoder - lacking + gained
    # A shared gain counts once.
    one, each = (stack_parameters(resolve_preset(name, 6, 0)) for name in ("rezero", "skipinit"))
    assert each - one == 6

    shares = parameter_ratios(PRESETS, 6, 6)
    assert shares["pre_ln"] == 1.0
    assert shares["sas"] == pytest.approx(0.817, abs=5e-4)
    # mHC projects all four states of a token onto the 24 weights of each sub-layer.
    assert 1.03 < shares.pop("mhc") < 1.1
    assert 1.14 < shares.pop("gated_attention") < 1.2  # three more matrices of attention in 16
    assert all(0.8 < share < 1.01 for share in shares.values())


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("name", PRESETS)
def test_one_preset(printed, name: str) -> None:
    lines = printed("blocks", name).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    preset = PRESETS[name]
    for said in (preset.equation, preset.fixes, preset.paper, "of pre_ln's", "-- FF --"):
        assert said in text
    assert preset.difference in text
    assert ("differs:" in text) == bool(preset.difference)
    assert (preset.build.__doc__ or "").split()[0].strip("`") in text


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("columns", [30, 48, 79, 200])
@pytest.mark.parametrize("name", ["sas", "dual_stream", "v_skipinit"])
def test_words_fit_a_narrow_terminal(printed, monkeypatch, name: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide = printed("blocks", name)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = printed("blocks", name)
    assert shown.split() == wide.split()
    # Drawings keep their width.
    words = [line for line in shown.splitlines() if "--" not in line and " |" not in line]
    assert max(map(len, words)) <= min(columns, 80)


LM = str(Path("ablations/base/lm.yaml").resolve())
ALONE = ["--encoder-depth", "0", "--decoder-depth", "4"]


def test_an_encoder_or_decoder_alone_has_constants_of_its_own_depth(printed) -> None:
    shown = printed("blocks", "realformer", "--encoder-depth", "4", "--decoder-depth", "0")
    assert "decoder:" not in shown
    assert "softmax(Z_n / n)" not in shown.split("encoder:")[1]  # the running sum
    assert "at depth 4," in shown
    shown = printed("blocks", "deepnorm", *ALONE)
    assert "decoder only:" in shown
    assert "encoder:" not in shown
    assert "cross" not in shown.split("specification")[1]
    assert "at depth 4," in shown
    (block, *_) = json.loads(printed("blocks", "deepnorm", *ALONE, "--json"))["decoder"]["blocks"]
    # Wang et al. 2022, table of section 3: alpha = (2N)^(1/4), beta = (8N)^(-1/4).
    assert block["around_self"]["skip"]["value"] == pytest.approx(8**0.25)
    assert block["init"]["value"] == pytest.approx(32**-0.25)
    for number in (f"{8**0.25:.4g}", f"{32**-0.25:.4g}"):
        assert number in shown


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_shown_as_a_decoder_alone(name: str, printed) -> None:
    resolved = json.loads(printed("blocks", name, *ALONE, "--json"))
    trained = ArchitectureConfig(kind="decoder", decoder_depth=4).stacks(BlockConfig(preset=name))
    expected = {side: asdict(spec) for side, spec in trained.items()}
    assert resolved == json.loads(json.dumps(expected))
    drawing = picture(name, drawn(resolve_preset(name, 0, 4)))
    assert "decoder only" in drawing
    assert "to the encoder" not in drawing


def test_layers_of_one_form_stand_together_in_the_specification() -> None:
    lines = [line for _, line in specification_lines(stacks("sas"))]
    assert [line for line in lines if line.startswith("layer")] == ["layer 1", "layers 2-6"] * 2
    lines = [line for _, line in specification_lines(stacks("layer_norm_scaling"))]
    assert lines[:3] == [
        "encoder: final_norm layer_norm",
        "layers 1-6",
        "around_self: norm_input layer_norm, input_scale 1/sqrt(n)",
    ]


def test_the_specification_for_scripts_and_files(printed, tmp_path: Path) -> None:
    resolved = json.loads(printed("blocks", "keel", "--json"))
    expected = {side: asdict(spec) for side, spec in stacks("keel").items()}
    assert resolved == json.loads(json.dumps(expected))
    assert resolved["decoder"]["blocks"][5]["around_ff"]["skip"]["value"] == 18.0
    one = tmp_path / "new" / "keel.svg"
    assert main(["blocks", "keel", "--svg", str(one)]) == 0
    assert one.read_text(encoding="utf-8") == picture("keel", drawn(stacks("keel")))
    assert main(["blocks", "--svg-dir", str(tmp_path / "all")]) == 0
    names = {path.name for path in (tmp_path / "all").iterdir()}
    assert names == {"README.md", *(f"{name}.svg" for name in PRESETS)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--json"], "NAME"),
        (["--svg", "x.svg"], "NAME"),
        (["sas", "--svg-dir", "x"], "--svg FILE"),
        (["sas", "--encoder-depth", "0", "--decoder-depth", "0"], "--encoder-depth 0"),
        (["sas", "--decoder-depth", "-1"], "--decoder-depth -1"),
        (["--config", "x.yaml", "--encoder-depth", "3"], "--config has the depths"),
        (["sas", "--svgg", "x"], "did you mean '--svg'"),
        (["sas", "--config", LM], "leave out NAME"),
        (["--svg-dir", "x", "--config", LM], "leave out --svg-dir"),
        (["sas", "--model.block.share", "all"], "--model.block.share: an override needs --config"),
        (["--config", LM, "--model.block.shape", "all"], "shape"),
    ],
)
def test_a_mistake_is_one_line(refused, tmp_path, monkeypatch, words, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(expected, "blocks", *words)
    assert not list(tmp_path.iterdir())


def test_the_page_shows_the_table_and_the_pictures() -> None:
    page = Path("docs/blocks/README.md").read_text(encoding="utf-8")
    assert "\n".join(table_rows(6, 6)) in page
    for name, preset in PRESETS.items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"`{preset.equation}`" in section
        assert preset.paper in section
        assert f"]({name}.svg)" in section
        assert "\n  layers 1" in section or "\n  layer 1" in section


def test_a_config_is_drawn(printed, tmp_path: Path) -> None:
    given = ["blocks", "--config", "ablations/base/lm_streams.yaml"]
    more = ["--model.block.memory.length", "32", "--model.block.share", "all"]
    more += ["--model.block.adaptive_span.longest", "32"]
    shown = " ".join(printed(*given, *more).split())
    for said in (
        "keys and values also of the last 32 inputs before a segment",
        "one block for all layers",
        "a span that each head learns",
        "decoder only",
        "layers 1-6",
    ):
        assert said in shown
    assert "before a segment" not in " ".join(printed(*given).split())
    assert main([*given, "--svg", str(tmp_path / "block.svg"), *more]) == 0
    assert "one block for" in (tmp_path / "block.svg").read_text()
    assert json.loads(printed(*given, "--json", *more))["decoder"]["memory"]["length"] == 32


def test_a_count_of_batches_stays_a_count() -> None:
    """For Lightning 1 batch and the share 1.0 differ; the parser alone may swap them."""
    path = Path("ablations/base/lm_streams.yaml")
    for words, expected in (
        ([], 100),
        (["--trainer.limit_val_batches", "1"], 1),
        (["--trainer.limit_val_batches=1.0"], 1.0),
    ):
        found = read_config(path, words)["trainer"]["limit_val_batches"]
        assert (type(found), found) == (type(expected), expected)
