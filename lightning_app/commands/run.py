"""The commands of single runs: `blocks`, `fit` and its evaluation, `show`, `diff`, `prepare`,
`translate`, `generate`, and the help of configs."""

import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_app.commands.options import (
    RUN,
    Parser,
    add_checkpoint,
    add_json,
    add_threads,
    as_checkpoint,
    as_options,
)
from lightning_app.commands.recorded import (
    BEST,
    Recorded,
    check_saved,
    described_run,
    evaluation_words,
    probed_configs,
    read_run,
)
from lightning_app.config.identity import is_irrelevant, leaves
from lightning_app.config.rulers import differences, ruler
from lightning_app.config.sources import CHECKPOINT, FIELDS_OF, Written
from lightning_app.config.trainer import TrainerConfig
from lightning_app.config.tree import ROOT, SECTIONS, cell_setting, label
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.files import write_whole
from lightning_app.core.project import shipped_folder
from lightning_app.core.schema import (
    adapter,
    as_plain,
    as_written,
    docs_of,
    expected,
    hint_at,
    hints_of,
    part_of,
    parts_of,
)
from lightning_app.grids.display import PlainConsole, clock, document, plain_console
from lightning_app.runs.folder import NAMED, is_file_name
from lightning_app.training.launcher import check_launcher, run_written

if TYPE_CHECKING:
    from lightning_app.data.config import DataConfig


def add_blocks(parser: Parser) -> None:
    parser.add("name NAME", "a preset", nargs="?")
    parser.add("--encoder-depth N", "0: decoder only (default: 6)")
    parser.add("--decoder-depth N", "0: encoder only (default: 6)")
    text = "show the stacks of a run's config instead of NAME; overrides may follow, as for fit"
    parser.add("--config FILE", text)
    parser.add("--svg FILE", "write the drawing of NAME")
    parser.add("--svg-dir DIR", "write the drawings of all presets and a page with them")
    parser.add("--json", "print the specification of NAME as JSON", dest="as_json")
    parser.set_defaults(call=blocks_command)


def blocks_command(
    name: str | None,
    encoder_depth: int | None = None,
    decoder_depth: int | None = None,
    *,
    svg: Path | None,
    svg_dir: Path | None,
    as_json: bool,
    config: Path | None,
    overrides: Sequence[str],
) -> int:
    """Print the table of presets, or the details of a preset or a config, or write pictures."""
    if overrides and config is None:
        raise UserError(f"blocks: {overrides[0]}: an override needs --config FILE")
    if config is not None and (name is not None or svg_dir is not None):
        other = "NAME" if svg_dir is None else "--svg-dir"
        raise UserError(f"blocks: --config draws the stacks of that file; leave out {other}")
    if config is not None and (encoder_depth, decoder_depth) != (None, None):
        raise UserError("blocks: --config has the depths of its stacks; leave out the others")
    if config is None and name is None and (svg is not None or as_json):
        option = "--json" if as_json else "--svg"
        raise UserError(f"blocks: {option} needs NAME, the name of a preset, or --config FILE")
    if name is not None and svg_dir is not None:
        raise UserError("blocks: --svg-dir writes all presets; use --svg FILE for one preset")
    from lightning_app.catalogue.presets import (
        drawings,
        preset_lines,
        preset_table,
        resolve_preset,
        stack_lines,
        write_gallery,
    )
    from lightning_app.catalogue.svg import WIDTH, picture

    console = PlainConsole()
    width = min(WIDTH, console.width)
    encoder, decoder = (6 if depth is None else depth for depth in (encoder_depth, decoder_depth))
    if svg_dir is not None:
        count = write_gallery(svg_dir, encoder, decoder)
        print(f"{svg_dir}: {count} pictures and README.md")
        return 0
    if config is not None:
        name, stacks = _stacks_of(config, overrides)
    elif name is not None:
        stacks = resolve_preset(name, encoder, decoder)
    else:
        console.print(preset_table(encoder, decoder, wide=console.width >= 150))
        return 0
    if svg is not None:
        write_whole(svg, picture(name, drawings(stacks)))
    if as_json:
        # Keyed by the names of the stacks in a model, as in a run's `block.json`.
        named = {side.partition(" ")[0]: asdict(spec) for side, spec in stacks.items()}
        print(json.dumps(named, indent=1))
    elif svg is None and config is not None:
        print("\n".join([f"{name}, as {config} has it", "", *stack_lines(stacks, width)]))
    elif svg is None:
        print("\n".join(preset_lines(name, encoder, decoder, width)))
    return 0


def _stacks_of(config: Path, overrides: Sequence[str]) -> tuple[str, Mapping[Any, Any]]:
    from lightning_app.config.config import model_config, read_config

    model = model_config(read_config(config, overrides)["model"])
    decoder = "decoder only" if model.architecture.kind == "decoder" else "decoder"
    stacks = model.architecture.stacks(model.block)
    sides = {"encoder": "encoder", "decoder": decoder}
    return model.block.preset, {sides[name]: spec for name, spec in stacks.items()}


def add_diff(parser: Parser) -> None:
    parser.add("run RUN", RUN)
    parser.add("other RUN", "the run to compare it with")
    add_json(parser)
    parser.set_defaults(call=diff_command)


def diff_command(run: str, other: str, *, as_json: bool) -> int:
    """Print how two runs differ. Raises `UserError`: see `read_run`."""
    with document("diff", as_json) as tree:
        left, right = read_run(run), read_run(other)
        tree |= compare_runs(left, right)
    if not as_json:
        show_difference(plain_console(), tree)
    return 0


def compare_runs(left: Recorded, right: Recorded) -> dict[str, Any]:
    """Return the differences of two runs.

    `config` and `provenance` hold the fields that differ; `counts` tells whether a field of the
    config can be part of an id. `metrics` holds all metrics, each with right minus left; a metric
    that counts different things in the two runs has no difference, and `unlike` gives the reason.
    `reason` states why the ids differ.
    """
    config = [
        {**field, "counts": not is_irrelevant(field["field"])}
        for field in differing(dict(leaves(left.config)), dict(leaves(right.config)))
    ]
    both = (left.outcome.get("metrics") or {}, right.outcome.get("metrics") or {})
    corpora = [run.record.corpus for run in (left, right)]
    # The content of the folder counts, not its place.
    roots = [{ROOT: corpus} if all(corpora) else {} for corpus in corpora]
    settings = [
        cell_setting(root, run.config) for root, run in zip(roots, (left, right), strict=True)
    ]
    return {
        "runs": [str(left.folder), str(right.folder)],
        "ids": [left.id, right.id],
        "same_experiment": left.id == right.id,
        "reason": None if left.id == right.id else left.record.difference(right.record),
        "states": [left.state.word, right.state.word],
        "config": config,
        "provenance": differing(left.made, right.made),
        "metrics": {
            name: _metric(
                both[0].get(name),
                both[1].get(name),
                differences([ruler(setting, name) for setting in settings]),
            )
            for name in sorted({*both[0], *both[1]})
        },
    }


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields whose values differ, or differ in type; an absent field is null."""
    a, b = map(_written, (left, right))
    return [
        {"field": name, "left": left.get(name), "right": right.get(name)}
        for name in sorted({*left, *right})
        if a.get(name) != b.get(name)
    ]


def _written(side: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(of, sort_keys=True, default=str) for name, of in side.items()}


def _metric(left: float | None, right: float | None, unlike: str) -> dict[str, Any]:
    difference = None if left is None or right is None or unlike else right - left
    return {"left": left, "right": right, "difference": difference, "unlike": unlike or None}


def show_difference(console: Console, tree: Mapping[str, Any]) -> None:
    """Print the differences as tables, after a sentence about the ids."""
    line = partial(console.print, soft_wrap=True)
    for side, folder, identity, state in zip(
        ("left", "right"), tree["runs"], tree["ids"], tree["states"], strict=True
    ):
        line(f"{side}: {folder}, id {identity}, {state}")
    if tree["same_experiment"]:
        line(
            "The same experiment: the ids are equal, so nothing in config, blocks or corpus that "
            "can change a result differs. Metrics differ only by what made the runs."
        )
    else:
        why = f": {tree['reason']} (there: left, here: right)" if tree["reason"] else ""
        line(f"Two experiments: the ids differ{why}.")
    fields = [
        (row["field"], label(row["left"]), label(row["right"]), "" if row["counts"] else "no")
        for row in tree["config"]
    ]
    _table(console, "config", ("left", "right", "counts"), fields)
    rows = [(row["field"], _shown(row["left"]), _shown(row["right"])) for row in tree["provenance"]]
    _table(console, "made by", ("left", "right"), rows)
    metrics = [
        (name, *(_number(row[side], "") for side in ("left", "right")), _number(row["difference"]))
        for name, row in tree["metrics"].items()
    ]
    _table(console, "metric", ("left", "right", "right - left"), metrics)
    for why in dict.fromkeys(row["unlike"] for row in tree["metrics"].values() if row["unlike"]):
        names = [name for name, row in tree["metrics"].items() if row["unlike"] == why]
        line(f"not comparable: {', '.join(names)}, because {why}")


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    if not rows:
        console.print(f"{title}: no difference" if title != "metric" else "metric: none recorded")
        return
    table = Table(box=None, pad_edge=False)
    for column in (title, *columns):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _shown(value: Any) -> str:
    return "not recorded" if value is None else label(value)


def _number(value: float | None, sign: str = "+") -> str:
    return "-" if value is None else f"{value:{sign}.6g}"


COMMIT = 12  # characters of a commit to show


def add_show(parser: Parser) -> None:
    parser.add("run RUN", RUN)
    add_json(parser)
    parser.set_defaults(call=show_command)


def show_command(run: str, *, as_json: bool) -> int:
    """Print the records in the folder of a run. Raises `UserError`: see `read_run`."""
    with document("show", as_json) as tree:
        tree |= described_run(read_run(run))
    if not as_json:
        lines = list(lines_of(tree))
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"{name:<{width}}  {value}")
    return 0


def lines_of(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the terminal: a name and a text."""
    axes = [f"{key}={label(value)}" for key, value in run["block"].items()]
    yield "run", run["folder"]
    yield "id", run["id"]
    yield "grids", ", ".join(f"{grid}/{name}" for grid, name in run["grids"].items()) or "none"
    yield "task", f"{run['task_title']} ({run['task']})"
    yield "block", ", ".join([run["preset"], *axes])
    data = run["data"]
    sizes = ", ".join(f"{size} {split}" for split, size in (data.get("sizes") or {}).items())
    vocabulary = data.get("vocab_size")
    facts = [data["name"], sizes, f"vocabulary {vocabulary}" if vocabulary else ""]
    yield "data", "; ".join(filter(None, facts))
    if data.get("protocol"):
        yield "protocol", data["protocol"]
    yield "seed", str(run["seed"])
    rule = run["outcome_rule"]
    yield "outcome", f"{run['state']} ({rule})" if rule else run["state"]
    if run["error"]:
        yield "error", run["error"]
    most = f" of at most {run['max_steps']}" if run["max_steps"] > 0 else ""
    if run["steps"] is not None:
        yield "steps", f"{run['steps']}{most}"
    elif run["step"] is not None:
        yield "steps", f"{run['step']}{most} so far"
    for name, value in run["metrics"].items():
        yield name, "not finite" if value is None else f"{value:.6g}"
    if run["tokens"] is not None:
        yield "tokens", f"{run['tokens']:,}"
    if run["parameters"] is not None:
        yield "parameters", f"{run['parameters']:,}"
    if run["seconds"] is not None:
        noun = "attempt" if run["attempts"] == 1 else "attempts"
        yield "time", f"{clock(run['seconds'])} in {run['attempts']} {noun}"
    if run["device"]:
        yield "device", f"{run['device']}, precision {run['precision']}"
    yield "checkpoints", ", ".join(run["checkpoints"]) or "none"
    yield from _made(run["provenance"])


def _made(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not meta:
        yield "made by", "not recorded"
        return
    commit = f"commit {meta['commit'][:COMMIT]}" if meta.get("commit") else "no commit recorded"
    changed = " with changes" if meta.get("dirty") else ""
    yield "made by", f"version {meta.get('package')}, {commit}{changed}, code {meta.get('code')}"
    libraries = meta.get("libraries") or {}
    yield "libraries", ", ".join(f"{name} {version}" for name, version in libraries.items())
    if meta.get("data"):
        yield "data digest", str(meta["data"])
    if meta.get("resumed_from"):
        yield "resumed", f"{len(meta['resumed_from'])} earlier attempts were made by something else"
    if meta.get("command"):
        yield "command", " ".join(meta["command"])


def add_fit(parser: Parser) -> None:
    parser.add("--name NAME", "the run's name in experiments/fit/runs (default: from its config)")
    parser.add("--again", "start over; a finished run is kept in the store, others are replaced")
    add_threads(parser)
    parser.set_defaults(call=partial(lightning_command, parser))


def add_evaluation(parser: Parser) -> None:
    """Accept a run in place of a config and a checkpoint; config fields remain possible."""
    parser.add("--run RUN", f"{RUN}; only evaluation options may follow")
    add_checkpoint(parser, None, "best with --run")
    add_threads(parser)
    parser.set_defaults(call=partial(lightning_command, parser))


def lightning_command(
    parser: Parser,
    words: Sequence[str],
    *,
    run: str | None = None,
    checkpoint: str | None = None,
    again: bool = False,
    name: str | None = None,
) -> int:
    """Run a command with Lightning's Trainer; `words` are the fields of its config.

    `run` replaces a config and a checkpoint; with `again` a finished run is trained
    again; `name` is its name. Raises `UserError` for a mistake in the call, a config or a
    checkpoint.
    """
    command = parser.command
    if run is not None:
        words = evaluation_words(run, checkpoint or BEST, words)
    elif checkpoint is not None:
        raise UserError(
            f"--checkpoint {checkpoint}: needs --run RUN; with --config use --ckpt_path"
        )
    if name is not None and (not is_file_name(name) or name.startswith(".")):
        raise UserError(f"--name: expected the name of a folder, found {name!r}")
    check_launcher(os.environ)
    written = Written(words, FIELDS_OF[command])
    if "help" in written.asked:
        print(config_help(command, parser.format_help(), written.asked["help"]))
        return 0
    # The config of a run from elsewhere may not name code; that of --config is the user's own.
    imports = run is None
    if "print_config" in written.asked:
        from lightning_app.config.config import load_config, without_derived

        tree = load_config(written, imports=imports, trains=command == "fit")
        print(strict_yaml.dump_yaml(without_derived(tree), allow_unicode=True), end="")
        return 0
    saved = written.fields.get(CHECKPOINT)
    if command != "fit" and saved is None:
        raise UserError(f"{command}: --ckpt_path is needed: a file, 'last' or 'best'")
    if saved not in (None, *NAMED) and not Path(saved).is_file():
        raise UserError(f"--ckpt_path {saved}: there is no file {saved}")
    with ExitStack() as around:
        if command == "predict":
            # Standard output is only for predictions: Lightning's bars and tables go elsewhere.
            around.enter_context(redirect_stdout(sys.stderr))
        if run is not None:
            around.enter_context(as_checkpoint())
        done = run_written(command, written, imports=imports, again=again, name=name)
    for line in done.predictions:
        print(line)
    part = done.tree["trainer"]["limit_predict_batches"] if command == "predict" else None
    if part is not None and str(part) != "1.0":
        print(
            f"trainer.limit_predict_batches: {part}: not all rows, and not the first ones, since "
            "batches are sorted by length",
            file=sys.stderr,
        )
    return 0


def add_probe(parser: Parser) -> None:
    text = "a run's config; several give one curve each; overrides may follow, as for fit"
    parser.add("--config FILE", text, action="append")
    parser.add("--run RUN", f"instead of --config: {RUN}", action="append")
    add_checkpoint(parser, None, "best with --run, initial values with --config")
    add_threads(parser)
    parser.add("--batches N", "validation batches (default: 4)")
    text = "also measure the top eigenvalue of the Adam-preconditioned Hessian"
    parser.add("--sharpness", text)
    text = "instead: sizes of activations and of their change in ten steps, at these widths"
    parser.add("--coordinates WIDTH", text, type=int, nargs="+")
    parser.add("--out DIR", "output folder (default: one in experiments/probe)")
    parser.set_defaults(call=probe_command)


def probe_command(
    config: Sequence[Path] | None,
    run: Sequence[str] | None,
    overrides: Sequence[str],
    *,
    checkpoint: str | None,
    batches: int | None,
    sharpness: bool,
    coordinates: Sequence[int] | None,
    out: Path | None,
) -> int:
    """Probe the models of configs or runs.

    Raises `UserError` for a mistake in the call, a config or a checkpoint, before slow imports.
    """
    if run and config:
        raise UserError(f"--config {config[0]}: --run names the config already; use one")
    if run:
        checkpoint = checkpoint or BEST
        config = probed_configs(run, checkpoint, overrides)
    if not config:
        raise UserError("probe: --config FILE is needed, or --run RUN")
    batches = 4 if batches is None else batches
    if batches < 1:
        raise UserError(f"probe: --batches {batches}: expected at least 1")
    for file in config:
        Written(["--config", str(file), *overrides])  # find mistakes before importing torch
    from lightning_app.config.config import read_config

    trees = [read_config(file, overrides) for file in config]  # before Lightning
    if coordinates is not None:
        if len({*coordinates}) < 2 or min(coordinates) < 1 or checkpoint is not None or sharpness:
            raise UserError(
                "probe: --coordinates: expected two widths or more, and no --checkpoint, --run or "
                "--sharpness"
            )
        from lightning_app.commands.probe import check_coordinates

        return check_coordinates(config, trees, sorted({*coordinates}), out)
    from lightning_app.commands.probe import probe_models

    return probe_models(config, trees, checkpoint, batches, sharpness=sharpness, out=out)


_WIDTH = 88
_OVERVIEW = """
config:
  -c, --config FILE     a config in YAML; several are merged, later ones over earlier ones
  --a.b VALUE           a field, as YAML: files first, overrides last
  --a '{b: 1, c: 2}'    several fields at once
  --print_config        print the whole config, with every default, and end
  --help SECTION        the fields of a section, such as trainer, model.block or data

sections:
  seed_everything       the seed of initial values, batches and dropout
  trainer               every argument of Lightning's Trainer, by its name
  model                 what is trained: model.block (the wiring), model.architecture (sizes),
                        model.objective (the task), model.optimizer, model.schedule
  data                  the corpus and its batches
"""


def config_help(command: str, usage: str, section: str | None) -> str:
    """Return the help of a command besides its options in `usage`, or of a dotted section."""
    if section is None:
        others = ", ".join(f"--{name}" for name in FIELDS_OF[command])
        return f"{usage}{_OVERVIEW}\nbeside the sections: {others}"
    kind: Any = TrainerConfig
    if section != "trainer":  # the others need torch
        from lightning_app.config.config import Config

        kind = part_of(hint_at(Config, section.split(".")))
    if kind is None:
        raise UserError(f"--help {section}: no section of a config{nearest(section, SECTIONS)}")
    return "\n".join(_lines(kind, section))


def _lines(kind: type, section: str) -> Iterator[str]:
    docs, hints = docs_of(kind), hints_of(kind)
    yield f"{section}:"
    yield from (inspect.getdoc(kind) or "").splitlines()
    for field in fields(kind):
        name, part = f"{section}.{field.name}", part_of(hints[field.name])
        default = ""
        if field.default is not MISSING and not is_dataclass(field.default):
            default = f" (default: {as_written(as_plain(field.default))})"
        yield ""
        yield f"  --{name}  {expected(hints[field.name])}{default}"
        yield from wrap(
            docs.get(field.name, ""), _WIDTH, initial_indent="      ", subsequent_indent="      "
        )
        if is_dataclass(part) and part.__name__ != "ClassSpec":  # pyright: ignore[reportAttributeAccessIssue]
            yield f"      fields: --help {name}"


def add_schema(parser: Parser) -> None:
    parser.add("kind", "the kind of file", choices=("config", "grid"))
    parser.set_defaults(call=schema_command)


def schema_command(kind: str) -> int:
    """Print the JSON Schema of a ``config`` or of a ``grid`` file, with the text of every field."""
    from lightning_app.config.config import Config
    from lightning_app.config.grid import GridFile

    tree = config = _described(Config)
    if kind == "grid":
        tree = _described(GridFile)
        tree["properties"]["base_config"] = {"$ref": "#/$defs/Config"}
        parts = config.pop("$defs")
        tree["$defs"] = {**tree.get("$defs", {}), **parts, "Config": config}
    print(json.dumps(tree, indent=1))
    return 0


def _described(kind: Any) -> dict[str, Any]:
    tree = adapter(kind).json_schema()
    for part in parts_of(kind):
        schema = tree if part is kind else tree["$defs"][part.__name__]
        for name, text in docs_of(part).items():
            schema["properties"].get(name, {})["description"] = text
    return tree


CHUNK = 512  # lines read before the first output


def add_translate(parser: Parser) -> None:
    parser.add("--run RUN", RUN, required=True)
    parser.add("--input FILE", "the lines to translate (default: standard input)")
    parser.add("--beam N", "beams (default: from the run's config)")
    add_checkpoint(parser)
    add_threads(parser)
    parser.set_defaults(call=translate_lines)


def translate_lines(run: str, input: Path | None, beam: int | None, checkpoint: str) -> int:
    """Print one translation per line of `input`, or of standard input if None.

    The input must have the form of the run's corpus: tokenised and lower-cased for IWSLT14.
    """
    folder, file = check_saved("translate", run, checkpoint)  # before imports that take seconds
    from lightning_app.api.trained import check_beam, load_run

    with as_options("translate", "beam"):
        check_beam(beam)
        trained = load_run(folder.path, file)
        trained.translate([], beam=beam)  # refuse another task before waiting for input
        lines = input_lines(input)
        while chunk := list(islice(lines, CHUNK)):
            for translation in trained.translate(chunk, beam=beam):
                print(translation)
            sys.stdout.flush()
    return 0


def input_lines(source: Path | None) -> Iterator[str]:
    """Yield the lines of a file or of standard input, without their ends."""
    name = "standard input" if source is None else str(source)
    try:
        stream = sys.stdin.buffer if source is None else source.open("rb")
    except OSError as error:
        raise UserError(f"--input {source}: {error.strerror}") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield line.decode("utf-8").lstrip("\ufeff").strip()
            except UnicodeDecodeError as error:
                raise UserError(f"{name}, line {number}: not valid UTF-8") from error


def add_generate(parser: Parser) -> None:
    parser.add("--run RUN", RUN, required=True)
    parser.add("--prompt TEXT", "the text to continue (default: none)", default="")
    parser.add("--tokens N", "tokens to draw (default: 200)", default=200)
    parser.add("--texts N", "texts to draw (default: 1)", default=1)
    parser.add("--temperature X", "0: greedy (default: 1)", default=1.0)
    parser.add("--top-k N", "draw only the N likeliest tokens", default=0)
    parser.add("--top-p P", "draw only the likeliest tokens with total probability P", default=1.0)
    parser.add("--seed N", "seed of the draws (default: 1)", default=1)
    add_checkpoint(parser)
    add_threads(parser)
    parser.set_defaults(call=generate_text)


def generate_text(run: str, prompt: str, texts: int, seed: int, checkpoint: str, **how: Any) -> int:
    """Print `prompt` with its continuation by the model of `run`, `texts` times.

    `how` are the other arguments of `TrainedRun.generate`.
    """
    folder, file = check_saved("generate", run, checkpoint)
    from lightning_app.api.trained import load_run, sampling

    with as_options("generate", "texts", "prompt", *how):
        sampling(texts=texts, **how)  # refuse mistakes before loading the model
        drawn = load_run(folder.path, file).generate(prompt, texts=texts, seed=seed, **how)
    for number, text in enumerate(drawn):
        if number:
            print("-" * 20)
        print(text)
    return 0


def add_prepare(parser: Parser) -> None:
    names = "iwslt14, wikitext2, tinyshakespeare, books, text, tokens or synthetic"
    parser.add("--data NAME", names)
    parser.add("--root DIR", "the folder that holds the corpus", type=str)
    parser.add("--config FILE", "use `data` from this config")
    parser.add("--tokens DIR", "also write the ids as files of nanoGPT: train.bin, valid.bin")
    parser.set_defaults(call=prepare_corpus)


def prepare_corpus(
    data: str | None, root: str | None, config: Path | None, tokens: Path | None
) -> int:
    """Prepare a corpus; print a summary and its folder, and write its ids into `tokens`."""
    from lightning_app.data.config import CORPORA, DataConfig

    if (data is None) == (config is None):
        raise UserError("prepare: expected one of --data NAME and --config FILE")
    if config is not None:
        settings = read_data(config)
    elif data is None or data not in CORPORA:
        hint = nearest(str(data), CORPORA)
        raise UserError(f"prepare: --data '{data}' is not one of {', '.join(CORPORA)}{hint}")
    elif CORPORA[data].base:
        settings = shipped_data(data)
    elif root is None and CORPORA[data].needs_root:
        raise UserError(f"prepare: --data {data} needs --root, the folder of its files")
    elif CORPORA[data].holds_ids:
        kind = {"task": "causal_lm", "tokenizer": "ids", "vocab_size": None}
        settings = DataConfig(name=data, root=root, **kind)
    else:
        settings = DataConfig(name=data, root=root)
    if root is not None:
        if settings.name == "synthetic":
            raise UserError(f"prepare: --root {root}: the corpus synthetic is made by a program")
        settings = replace(settings, root=root)
    from lightning_app.data.prepare import corpus_summary, prepare

    corpus = prepare(settings)
    print(corpus_summary(corpus, settings.tokens_per_batch))
    if tokens is not None:
        corpus.write_ids(tokens)
        print(f"tokens    {tokens}")
    return 0


def shipped_data(name: str) -> "DataConfig":
    """Return the `data` section with which the shipped ablations use a corpus.

    A shipped file needs no parser of whole runs, so a cached corpus takes only a second.
    """
    from lightning_app.data.config import CORPORA, DataConfig

    tree, _ = strict_yaml.read_yaml_file(shipped_folder() / "base" / CORPORA[name].base)
    # Several corpora share a file that names only one of them.
    return DataConfig(**{**tree["data"], "name": name}, task=tree["model"]["objective"]["kind"])


def read_data(config: Path) -> "DataConfig":
    """Return the completed `data` section of a user's config file."""
    tree, _ = strict_yaml.read_yaml_file(config)
    from lightning_app.config.config import resolve
    from lightning_app.data.sources import resolved_data

    return resolved_data(resolve(tree, str(config))["data"])
