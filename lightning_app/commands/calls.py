"""What each command does with its arguments. Slow imports wait until a command needs them."""

import argparse
from pathlib import Path

from lightning_app.core.errors import UserError
from lightning_app.core.project import read_project

PORT = 6006  # of `ablate report --serve`, as TensorBoard has it


def check_port(port: int) -> None:
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port: expected 0 to 65535, found {port}")


def blocks(args: argparse.Namespace) -> int:
    from lightning_app.commands.blocks import blocks_command

    if args.rest and args.config is None:
        raise UserError(f"blocks: {args.rest[0]}: an override needs --config FILE")
    return blocks_command(
        args.name,
        args.encoder_depth,
        args.decoder_depth,
        svg=args.svg,
        svg_dir=args.svg_dir,
        as_json=args.json,
        config=args.config,
        overrides=args.rest,
    )


def lightning(args: argparse.Namespace) -> int:
    from lightning_app.commands.run import lightning_command

    return lightning_command(
        args.command,
        args.rest,
        run=getattr(args, "run", None),
        checkpoint=getattr(args, "checkpoint", None),
        usage=args.parser.format_help(),
        again=getattr(args, "again", False),
    )


def translate(args: argparse.Namespace) -> int:
    from lightning_app.commands.recorded import check_saved

    # Before the imports, which take seconds.
    run, checkpoint = check_saved(args.command, args.run, args.checkpoint)
    from lightning_app.commands.translate import translate_lines

    return translate_lines(run.path, args.input, args.beam, checkpoint)


def generate(args: argparse.Namespace) -> int:
    from lightning_app.commands.recorded import check_saved

    run, checkpoint = check_saved(args.command, args.run, args.checkpoint)
    from lightning_app.commands.translate import generate_text

    drawn = {name: vars(args)[name] for name in ("texts", "tokens", "temperature")}
    drawn |= {name: vars(args)[name] for name in ("top_k", "top_p", "seed")}
    return generate_text(run.path, args.prompt, **drawn, checkpoint=checkpoint)


def init(args: argparse.Namespace) -> int:
    from lightning_app.commands.init import init_command

    return init_command(args.folder, args.data)


def show(args: argparse.Namespace) -> int:
    from lightning_app.commands.run import show_command

    return show_command(args.run, as_json=args.json)


def diff(args: argparse.Namespace) -> int:
    from lightning_app.commands.run import diff_command

    return diff_command((args.run, args.other), as_json=args.json)


def prepare(args: argparse.Namespace) -> int:
    from lightning_app.commands.prepare import prepare_corpus

    return prepare_corpus(args.data, args.root, args.config)


def plan(args: argparse.Namespace) -> int:
    from lightning_app.commands.grid import plan_command

    results = read_project().folders_of_results()
    return plan_command(
        args.grid, args.experiments, probe=args.probe, results=results, as_json=args.json
    )


def run(args: argparse.Namespace) -> int:
    from lightning_app.commands.run_grid import run_command
    from lightning_app.grids.options import Options

    options = Options.of(vars(args), read_project().folders_of_results())
    return run_command(args.grid, args.experiments, options, as_json=args.json)


def status(args: argparse.Namespace) -> int:
    from lightning_app.commands.grid import status_command

    return status_command(args.grid, args.experiments, as_json=args.json)


def report(args: argparse.Namespace) -> int:
    from lightning_app.commands.grid import report_command

    if args.port is not None and not args.serve:
        raise UserError("--port: needs --serve")
    if args.serve and args.json:
        raise UserError("--serve: runs until it is stopped; --json needs a command that ends")
    port = PORT if args.port is None else args.port
    check_port(port)
    return report_command(
        args.grids,
        args.experiments,
        out=args.out,
        publish_in=args.publish,
        port=port if args.serve else None,
        as_json=args.json,
    )


def results(args: argparse.Namespace) -> int:
    from lightning_app.commands.results import results_command

    return results_command(
        args.grid,
        args.experiments,
        query=args.query,
        compare=args.compare,
        metric=args.metric,
        mode=args.mode,
        csv=args.csv,
    )


def submit(args: argparse.Namespace) -> int:
    from lightning_app.grids.options import Options
    from lightning_app.grids.submit import run_options, submit_command

    Options.of(vars(args))  # refuse wrong values here, not in each job
    return submit_command(
        args.grid,
        args.experiments,
        array=args.array,
        concurrent=args.concurrent,
        sbatch=args.rest,
        storage=args.storage,
        run_options=run_options(args),
        requeue=args.requeue,
        dry_run=args.dry_run,
    )


def doctor(args: argparse.Namespace) -> int:
    from lightning_app.grids.doctor import doctor_command

    return doctor_command(
        args.grid, args.experiments, storage=args.storage, fix=args.fix, seal=args.seal
    )


def probe(args: argparse.Namespace) -> int:
    if args.theory:
        from lightning_app.lab.theory.run import run_theory

        others = (args.config, args.run, args.rest, args.checkpoint, args.batches, args.sharpness)
        if any(others):
            raise UserError("probe: --theory has its own setting and takes only --out")
        return run_theory(args.out or Path("experiments") / "probe" / "theory")
    configs, checkpoint = args.config, args.checkpoint
    if args.run:
        from lightning_app.commands.recorded import BEST, probed_configs

        if configs:
            raise UserError(f"--config {configs[0]}: --run names the config already; use one")
        checkpoint = checkpoint or BEST
        configs = probed_configs(args.run, checkpoint, args.rest)
    if not configs:
        raise UserError("probe: --config FILE is needed, or --run RUN, or --theory")
    from lightning_app.config.sources import Written

    for config in configs:
        Written(["--config", str(config), *args.rest])  # finds mistakes before torch is imported
    from lightning_app.config.config import read_config

    for config in configs:
        read_config(config, args.rest)  # finds mistakes before Lightning is imported
    from lightning_app.commands.probe import probe_command

    return probe_command(
        configs,
        args.rest,
        checkpoint=checkpoint,
        batches=4 if args.batches is None else args.batches,
        sharpness=args.sharpness,
        out=args.out,
    )


def bench(args: argparse.Namespace) -> int:
    from lightning_app.commands.bench import BenchOptions, bench_command

    given = vars(args)
    return bench_command(
        BenchOptions(**{name: given[name] for name in BenchOptions.__dataclass_fields__})
    )


def schema(args: argparse.Namespace) -> int:
    from lightning_app.commands.schema import schema_command

    return schema_command(args.kind)
