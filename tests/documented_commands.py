"""What shows that the commands of README and pages work, for `test_documented_commands.py`."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Seen:
    """What shows that a command did its work.

    It prints `prints`, a regular expression whose dot matches line ends, too, and writes a file
    that matches the glob `writes`. `more` are options that make it small. `fresh` is a folder that
    is removed first: the command would find its work done, or refuse it. `of` is a part of the
    command that made the run RUN; by default RUN is the last run.
    """

    prints: str
    writes: str = ""
    more: str = ""
    fresh: str = ""
    of: str = ""


FIT = Seen(r"^experiments/fit/runs/\S+: [^\n]*val/nll", "experiments/fit/runs/*/result.json")
PRETRAINED = replace(FIT, of="pretrain_small.yaml")
TEXT = Seen(r"\AROMEO:.{50}")
QUICK = "--rounds 1 --tokens 32 --length 16 --depth 1 --width 64"
EQUATIONS = r"x' = N\(x \+ f\(x\)\).*2311\.01906"
MEMORY = r"as ablations/base/lm_streams\.yaml has it.*memory \(length 32"
DAMPED = r"x' = N\(x \+ f\(x\) / sqrt\(2L\)\).*branch 0\.2887"
PLAN = r"{}: {} cells, 0 excluded.*^pre_ln .*^disk: "
COUNTS = "demo: 4 cells: [^0]"
SERVED = r"serving http://127\.0\.0\.1:\d+/"
OPEN = "--port 0"  # any free one


def done(name: str, cells: int) -> Seen:
    """All cells of a grid are finished, and there is a report."""
    return Seen(rf"{cells} of {cells} planned cells finished.*report: experiments/{name}/report")


def drawn(name: str, cells: int) -> Seen:
    """The report of a grid is written, also if there is one."""
    return replace(done(name, cells), writes=f"experiments/{name}/report.html")


DEMO = done("demo", 4)

SEEN = {
    # README
    "make demo": DEMO,
    "make test": Seen(
        "ran ruff format --check$.*ran ruff check$.*ran pytest -n [0-9]+$.*ran pyright"
    ),
    "ablate --plugin my_blocks.py blocks damped": Seen(DAMPED),
    "ablate init my_project --data my.de my.en": Seen(
        "my_project: ablate.yaml, ", "my_project/data/valid.en", fresh="my_project"
    ),
    "ablate init my_project --data my.txt": Seen(
        "my_project: ablate.yaml, ", "my_project/data/valid.txt", fresh="my_project"
    ),
    # Python API
    "ablate results demo --query \"status == 'failed'\"": Seen("^0 runs of demo$"),
    "ablate results demo --compare model.schedule.warmup_steps=0": Seen(
        r"^ +2 +0 +model\.block\.preset=pre_ln val/nll .*^2 comparisons of demo"
    ),
    # Commands
    "ablate blocks": Seen(EQUATIONS),
    "ablate blocks sas": Seen(r"2311\.01906.*self_attention: shaping"),
    "ablate blocks --config ablations/base/lm_streams.yaml --model.block.memory.length 32": Seen(
        MEMORY
    ),
    "ablate prepare --data iwslt14": Seen("corpus .*IWSLT14.*^folder "),
    "ablate plan demo": Seen(PLAN.format("demo", 4)),
    "ablate run demo --workers 2": DEMO,
    "ablate status demo": Seen(COUNTS),
    "ablate report demo --serve": Seen(SERVED, "experiments/demo/report.html", OPEN),
    "ablate status demo --json": Seen(r'^\{\n "schema": 1,\n "command": "status",'),
    "ablate init my_project": Seen(
        "my_project: ablate.yaml, ", "my_project/test_blocks.py", fresh="my_project"
    ),
    "ablate probe --config ablations/base/synthetic.yaml": Seen(
        "pre_ln at initialisation.*numbers: ", "experiments/probe/pre_ln-*/probes.csv"
    ),
    "tensorboard --logdir experiments/demo": Seen(
        r"TensorBoard [^\n]* at http://localhost:\d+/", more=OPEN
    ),
    "ablate fit --config ablations/base/iwslt14.yaml --model.block.preset post_ln "
    "--trainer.devices 2": FIT,
    "ablate fit --config ablations/base/iwslt14.yaml --model.block.preset post_ln --again": FIT,
    "ablate test --run fit/RUN": Seen("test/bleu"),
    'echo "vielen dank ." | ablate translate --run fit/RUN': Seen(r"\A[^\n]+\n"),
    "ablate fit --config ablations/base/nanogpt_shakespeare.yaml": FIT,
    'ablate generate --run fit/RUN --prompt "ROMEO:" --tokens 50 --top-p 0.9': TEXT,
    "ablate show fit/RUN": Seen(r"^run +experiments/fit/runs/.*command +lightning_app fit"),
    "ablate diff fit/RUN fit/OTHER": Seen(r"data\.name +tinyshakespeare +iwslt14.*val/nll"),
    # Corpora and batches
    "ablate prepare --data wikitext2": Seen("corpus .*WikiText-2.*^folder "),
    "ablate prepare --config ablations/base/lm.yaml": Seen("corpus .*WikiText-2.*^documents "),
    # Designing a study
    "ablate plan joint": Seen(PLAN.format("joint", 16)),
    "ablate run joint --workers 2": done("joint", 16),
    "ablate report joint --publish published/joint": Seen(
        r"report: experiments/joint/", "published/joint/runs.tar.xz"
    ),
    "python docs/recompute_study.py ablations/results/joint": Seen(
        r"joint/effects\.csv: .*everything agrees"
    ),
    # Fine-tuning
    "ablate fit --config ablations/base/pretrain_small.yaml": FIT,
    "ablate fit --config ablations/base/finetune_rte.yaml --model.init_from RUN": PRETRAINED,
    "ablate fit --config ablations/base/finetune_squad1.yaml --model.init_from RUN": replace(
        PRETRAINED, prints=r"^experiments/fit/runs/\S+: [^\n]*val/f1"
    ),
    "ablate run pretrain_small": done("pretrain_small", 2),
    "ablate run finetune_glue": done("finetune_glue", 8),
    "ablate run squad_small": done("squad_small", 4),
    "ablate report finetune_glue": drawn("finetune_glue", 8),
    # A first result, and grids
    "ablate run demo": DEMO,
    "ablate report demo": drawn("demo", 4),
    "ablate fit --config ablations/base/synthetic.yaml --model.block.preset post_ln "
    "--trainer.max_steps 100": replace(FIT, prints="100/100.*/runs/post_ln-"),
    "ablate plan demo --probe": Seen(r"demo: 4 cells, .*^time: [^\n]*[0-9]", fresh="experiments"),
    "ablate plan demo --explain": Seen(
        r"post_ln, first cell.*gains +adam +[0-9.]+ +0 +[0-9]+.*^time: ", fresh="experiments/demo"
    ),
    # Language models
    "ablate fit --config ablations/base/lm_small.yaml": FIT,
    "ablate fit --config ablations/base/lm_streams.yaml --model.block.memory.length 32": FIT,
    "ablate run warmup_lm": done("warmup_lm", 4),
    "ablate validate --run fit/RUN --model.block.memory.evaluation_length 64": Seen(
        "val/nll", of="lm_streams.yaml"
    ),
    # Looking inside
    "ablate probe --config ablations/base/synthetic.yaml --model.block.preset post_ln "
    "--sharpness": Seen(r"sharpness \d.*numbers: ", "experiments/probe/post_ln-*/probes.csv"),
    # Many workers and hosts
    "ablate run demo --workers 4": replace(DEMO, fresh="experiments/demo"),
    "ablate run demo --storage sqlite:///study.db": replace(DEMO, fresh="experiments/demo"),
    # Your own block
    "ablate --plugin my_blocks.py fit --config ablations/base/synthetic.yaml "
    "--model.block.preset damped --model.schedule.warmup_steps 20 --trainer.max_steps 100": replace(
        FIT,
        prints=r"^experiments/fit/runs/damped-\S+: [^\n]*val/nll",
        more="--model.schedule.warmup_steps 1",  # the small config has fewer steps
    ),
    "ablate --plugin my_blocks.py run ablations/damped.yaml": done("damped", 4),
    "ablate --plugin my_module.py fit --config ablations/base/synthetic.yaml "
    "--model.class_path my_module.Scaled --model.init_args.factor 0.5": replace(
        FIT, writes="experiments/fit/runs/*/plugins/my_module.py"
    ),
    "ablate blocks --svg-dir docs/blocks": Seen(
        r"[0-9]+ pictures and README", "docs/blocks/sas.svg"
    ),
    # Your own corpus
    "ablate prepare --config mytext.yaml": Seen("corpus .*^documents .*^folder "),
    "ablate prepare --config mytext.yaml --tokens ids": Seen("^tokens +ids", "ids/train.bin"),
    "ablate init mine --data ids": Seen("config.yaml", "mine/grid.yaml"),
    # Reading a report
    "ablate report ablations/results/joint": replace(
        drawn("joint", 600), fresh="experiments/joint"
    ),
    # Speed
    "python benchmarks/gpu_campaign.py --json gpu.json": Seen(
        "numbers: gpu.json", "gpu.json", "--dry-run --sections attention"
    ),
    "python benchmarks/bench.py --presets sas realformer": Seen(
        r"Presets, training step.*realformer +\d", more=QUICK
    ),
    "python benchmarks/bench.py --attention --length 1024": Seen(
        r"shaped, literal +\d", more="--rounds 1 --depth 1 --width 64"
    ),
    "python benchmarks/bench.py --peers --json peers.json": Seen(
        r"Hugging Face BERT +\d", "peers.json", QUICK
    ),
    # Troubleshooting
    "ablate run demo --retry-damaged": DEMO,
    "ablate run demo --retry-failed": DEMO,
    "ablate run demo --rerun-stale": DEMO,
    # Needed by others
}

ELSEWHERE = {
    "ablate ask deepnorm": ("tests/commands/test_ask.py", "def test_it_writes_an_ordinary_grid"),
    "ablate --plugin my_blocks.py ask damped": (
        "tests/commands/test_ask.py",
        "def test_it_writes_an_ordinary_grid",
    ),
    "ablate run demo --workers 4 --devices-per-cell 2": (
        "tests/plugins/test_grid.py",
        '"--workers", "2", "--devices-per-cell", "2"',
    ),
    "pip install .": (".github/workflows/checks.yml", "--constraint constraints.txt dist/*.whl"),
    "python benchmarks/theory/run.py": (
        "tests/benchmarks/test_theory.py",
        "def test_the_promised_statements_hold(",
    ),
}
"""Commands that something else runs: its file, and its text in there."""

NEEDED = {
    "docs/api.md": ["ablate run demo"],
    "docs/reading-a-report.md": ["ablate run demo"],
    "docs/troubleshooting.md": ["ablate run demo"],
}
"""What a reader of a page has run before."""
