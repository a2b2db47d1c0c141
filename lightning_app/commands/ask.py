"""`ablate ask`: whether a block needs warm-up, as one command that writes and runs a grid."""

import math
import sys
from pathlib import Path
from typing import Any

from lightning_app.commands.grid import add_run_options, run_command
from lightning_app.commands.options import EXPERIMENTS, Parser
from lightning_app.config.tree import PRESET, RATE, SEED, WARMUP
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.core.project import shipped_folder
from lightning_app.core.strict_yaml import dump_yaml, load_yaml

LEAST = (5, 3)
"""Seeds and trials of each, at least; fewer decide nothing."""
MOST = (8, 5)
MOST_SEEDS = 20  # where there is time for more than MOST, if the precision asks for them
START = 3.0  # seconds of a run besides its steps; 1.2 on a fast processor
VALIDATIONS = 1.2  # of the time of the steps


def add_ask(parser: Parser) -> None:
    parser.add("block BLOCK", "a preset, or one of a --plugin")
    parser.add("--config FILE", "the config of the runs (default: the built-in corpus, 200 steps)")
    text = "minutes that the runs may take, by a measurement of a few steps (default: 60)"
    parser.add("--minutes X", text, type=float, default=60.0)
    text = "the smallest saving that matters, in nats per token (default: 0.2)"
    parser.add("--matters X", text, type=float, default=0.2)
    add_run_options(parser)
    parser.set_defaults(call=ask_command)


def ask_command(
    block: str,
    config: Path | None = None,
    minutes: float = 60.0,
    matters: float = 0.2,
    experiments: Path = EXPERIMENTS,
    *,
    as_json: bool = False,
    **words: Any,
) -> int:
    """Write `ask_BLOCK.yaml` unless it is there, and run it as `ablate run` does.

    BLOCK beside `pre_ln`, the baseline, and `post_ln`, the control. Warm-up 0 and a fifth of the
    steps; each seed tunes the learning rate, from a quarter to four times that of the config.
    Seeds are added until intervals are half as wide as "no need" asks for. Raises `UserError`.
    """
    from lightning_app.grids.slots import Options

    Options.of(words)  # a mistake in them is named before anything is measured
    path = Path(f"ask_{block}.yaml")
    if path.exists():
        print(f"{path}: continues; remove it to ask with other options", file=sys.stderr)
    else:
        write_whole(path, dump_yaml(_grid(block, config, minutes, matters, words.get("workers"))))
        print(f"{path}: a grid file; `ablate run {path}` continues it too", file=sys.stderr)
    return run_command(path, experiments, as_json=as_json, **words)


def _grid(
    block: str, config: Path | None, minutes: float, matters: float, workers: int | None
) -> dict[str, Any]:
    from lightning_app.config.config import read_config, resolve
    from lightning_app.grids.program import seconds_per_step
    from lightning_app.grids.slots import default_workers

    source = config or shipped_folder() / "base" / "synthetic.yaml"
    tree = read_config(source, [f"--{PRESET}={block}"])
    steps = tree["trainer"]["max_steps"]
    if steps < 5:
        raise UserError(f"{source}: trainer.max_steps: expected at least 5, found {steps}")
    print("ask: measuring 20 steps", file=sys.stderr)
    seconds = START + VALIDATIONS * steps * seconds_per_step(resolve(tree, str(source)))
    arms = [*dict.fromkeys((block, "pre_ln", "post_ln"))]
    cells = 2 * len(arms)
    seeds, trials = design(minutes, workers or default_workers(), cells, seconds)
    plan = f"at most {seeds} seeds x {trials} trials x {cells} arms, about {seconds:.0f} s each"
    print(f"ask: {plan}", file=sys.stderr)
    further = {"half_width": matters / 2, "most_seeds": seeds} if seeds > MOST[0] else None
    rate = float(tree["model"]["optimizer"]["lr"])
    tuned = {RATE: {"low": rate / 4, "high": rate * 4, "log": True}}
    return {
        "name": f"ask_{block}",
        "question": f"Does {block} need learning-rate warm-up?",
        "base_config": load_yaml(source.read_text(encoding="utf-8")),
        "search": {"per": "seed", "fields": tuned, "trials": trials},
        "until": further,
        "axes": {PRESET: arms, WARMUP: [0, steps // 5], SEED: min(MOST[0], seeds)},
        "sensitivity": {
            "reference_warmup": steps // 5,
            "baseline": "pre_ln",
            "control": None if block in ("pre_ln", "post_ln") else "post_ln",
            "matters": matters,
        },
        "checkpoints": "none",
    }


def design(minutes: float, workers: int, cells: int, seconds: float) -> tuple[int, int]:
    """The seeds and the trials of each for which there is time: eight seeds before a fourth trial,
    and five trials before a ninth seed.

    Raises `UserError`, with the minutes that `LEAST` would need.
    """
    least = math.prod(LEAST)
    runs = math.floor(60 * minutes * workers / (cells * seconds))
    if runs < least:
        wanted = math.ceil(least * cells * seconds / workers / 60)
        raise UserError(
            f"--minutes {minutes:g}: {LEAST[0]} seeds of {LEAST[1]} trials take about {wanted}; "
            "give as many, or a shorter --config"
        )
    if runs > math.prod(MOST):
        return min(MOST_SEEDS, runs // MOST[1]), MOST[1]
    seeds = min(MOST[0], runs // LEAST[1])
    return seeds, runs // seeds
