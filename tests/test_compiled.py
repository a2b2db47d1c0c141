"""Blocks compiled in place: few compilations, the same training, checkpoints that load both ways.

In processes of their own: the shape checks of the tests cannot be compiled.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_app.training.module import GRAPHS, compile_blocks
from tests import tiny

LENGTHS = """
import json, sys, torch
from lightning_app.training.module import compile_blocks
from tests import tiny

def count(graph, inputs):
    counts[-1] += 1
    return graph.forward

counts, worst = [0], 0.0
torch.manual_seed(1)
block = tiny.BlockConfig(**json.loads(sys.argv[1]))
model = tiny.translator(block, encoder_depth=5, decoder_depth=4)
names = list(model.state_dict())
compile_blocks(model, backend=count)
for batch, source, target in [(3, 7, 5), (5, 4, 6), (2, 9, 9), (7, 3, 2), (11, 13, 8), (2, 2, 17)]:
    for padded in (False, True):
        pair = tiny.words(batch, source), tiny.words(batch, target)
        if padded:
            pair[0][0, -1] = tiny.PAD
        counts.append(counts[-1])
        out = model(*pair)
        out.sum().backward()
        with torch.compiler.set_stance("force_eager"):
            worst = max(worst, float((out - model(*pair)).detach().abs().max()))
same = names == list(model.state_dict())
print(json.dumps({"counts": counts[1:], "worst": worst, "same": same}))
"""

TRAINING = """
import json, sys
from functools import partial
from pathlib import Path
import lightning.pytorch as pl
import torch
import lightning_app.training.module
from lightning_app.training.callbacks.probes import SignalProbe, UpdateProbe
from tests.runs import data, module, trainer

torch.set_num_threads(1)
folder, cache = Path(sys.argv[1]), sys.argv[2]
compile_blocks = lightning_app.training.module.compile_blocks
lightning_app.training.module.compile_blocks = partial(compile_blocks, backend="eager")
found = {}
for start in (None, "none", "blocks"):
    for how in ("none", "blocks"):
        pl.seed_everything(3, verbose=False)
        trained = module(preset="realformer", dropout=0.2)
        trained.compilation = how
        place = folder / how / str(start)
        place.mkdir(parents=True)
        probes = [SignalProbe([2, 5]), UpdateProbe([2, 5], [2, 5])]
        steps = 3 if start is None else 6
        fitter = trainer(place, max_steps=steps, callbacks=probes, limit_val_batches=1,
            val_check_interval=3, check_val_every_n_epoch=None, num_sanity_val_steps=0)
        path = folder / f"{start}.ckpt"
        fitter.fit(trained, datamodule=data(cache), ckpt_path=None if start is None else path,
            weights_only=True)
        if start is None:
            fitter.save_checkpoint(folder / f"{how}.ckpt")
        weights = torch.cat([p.detach().flatten() for p in trained.parameters()])
        found[f"{start} {how}"] = {
            "norm": float(weights.norm()),
            "nll": float(fitter.callback_metrics["val/nll"]),
            "probes": (place / "probes.csv").read_text(),
        }
found["frames"] = torch._dynamo.utils.counters["frames"]["ok"]
print(json.dumps(found))
"""


def run(program: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "fewest", "most"),
    [
        # A block of either side, and some for lengths or padding that a first batch does not show.
        *(
            (block, 2, 4)
            for block in (
                {"preset": "pre_ln"},
                {"preset": "deepnorm"},
                {"sink": "zero"},
                {"sink": "learned", "score_cap": 3.0, "scores": "cosine"},
            )
        ),
        # Each of the nine layers reads another number of states, more than torch's limit of eight.
        ({"preset": "denseformer"}, 9, 18),
    ],
)
def test_other_lengths_compile_nothing_again(block: dict[str, Any], fewest: int, most: int) -> None:
    found = run(LENGTHS, json.dumps(block))
    counts = found["counts"]
    assert fewest <= counts[-1] <= most
    assert counts[2:] == [counts[-1]] * (len(counts) - 2)
    assert found["same"]
    assert found["worst"] < 1e-5


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of torch
def test_each_block_may_have_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts those of all blocks together, and by default allows eight."""
    limits: Any = torch.compiler.config
    names = ("recompile_limit", "accumulated_recompile_limit")
    for name in (*names, "fail_on_recompile_limit_hit"):
        monkeypatch.setattr(limits, name, getattr(limits, name))
    before = {name: getattr(limits, name) for name in names}
    compile_blocks(tiny.translator("denseformer", encoder_depth=5, decoder_depth=4))
    for name in names:
        assert getattr(limits, name) >= before[name] + 9 * GRAPHS
    assert limits.fail_on_recompile_limit_hit


@pytest.mark.slow
def test_training_probes_and_checkpoints(tmp_path: Path, cache: str) -> None:
    found = run(TRAINING, str(tmp_path), cache)
    assert found.pop("frames") > 0  # blocks were compiled at all
    for start in ("None", "none", "blocks"):
        plain, compiled = found[f"{start} none"], found[f"{start} blocks"]
        for value in ("norm", "nll"):
            assert compiled[value] == pytest.approx(plain[value], rel=1e-6), (start, value)
        lines = [each["probes"].splitlines() for each in (plain, compiled)]
        assert len(lines[0]) == len(lines[1]) > 10
