"""Several cells of one shape in one process, against one process a cell: CPU time of a cell's step.

    python benchmarks/packed_cells.py --cells 2 4 --rounds 5

The demo's model and batches, Adam, one thread of torch. Each form trains the same number of models
that differ in their initial values: alone (as one process a cell, the baseline), in a loop that
takes one step of each model in turn, in threads of Python, and as one model with stacked
parameters (`torch.func.vmap`). The stacked form multiplies by PyTorch's own products and has the
logits of the whole batch, since `vmap` cannot follow our own functions; "alone, plain" is one model
in that form. Prints CPU milliseconds of a step of one cell, medians of interleaved rounds, and how
many times as fast as alone. Threads overlap where the GIL lets them, so their wall-clock time is
given too.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_app.blocks.linear import mkl_products
from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.data.tokenizer import PAD
from lightning_app.models.loss import token_sums
from lightning_app.models.optim import build_optimizer
from lightning_app.training.module import TransformerModule

BASE = Path(__file__).parent.parent / "ablations/base/synthetic.yaml"
STEPS = 10  # of each cell in a round

Form = Callable[[], None]
"""`STEPS` steps of every cell."""


class Cells:
    """Modules of the demo's config, and the batches that they share."""

    def __init__(self, preset: str) -> None:
        tree = yaml.safe_load(BASE.read_text(encoding="utf-8"))
        tree["model"]["block"]["preset"] = preset
        self.config = resolve(tree, str(BASE))
        data = data_module(self.config["data"])
        data.setup()
        self.vocabulary = data.vocab_size
        self.batches = list(islice(cycle(data.train_dataloader()), STEPS))

    def module(self, seed: int) -> TransformerModule:
        torch.manual_seed(seed)
        module = transformer_module(self.config["model"])
        module.build(self.vocabulary)
        return module.train()

    def stepper(self, seed: int, plain: bool = False) -> Callable[[Any], None]:
        """Return a training step of a new model."""
        module = self.module(seed)
        model: Any = module.model
        optimizer = build_optimizer(module.optimizer, model, fused=True)
        smoothing = module.objective.config.smoothing

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            with mkl_products() if plain else nullcontext():
                if plain:
                    loss = plain_loss(model, batch, smoothing)
                else:
                    loss = module.objective.sums(model, batch).loss / batch.predicted_tokens
                loss.backward()
            optimizer.step()

        return step

    def alone(self, count: int, plain: bool = False) -> Form:
        """All steps of one model, then those of the next, as separate processes take them."""
        steppers = [self.stepper(seed, plain) for seed in range(count)]

        def run() -> None:
            for step in steppers:
                for batch in self.batches:
                    step(batch)

        return run

    def loop(self, count: int) -> Form:
        """One step of each model in turn."""
        steppers = [self.stepper(seed) for seed in range(count)]

        def run() -> None:
            for batch in self.batches:
                for step in steppers:
                    step(batch)

        return run

    def threads(self, count: int) -> Form:
        """A thread for each model."""
        steppers = [self.stepper(seed) for seed in range(count)]

        def train(step: Callable[[Any], None]) -> None:
            torch.set_num_threads(1)  # each thread of Python has a setting of its own
            for batch in self.batches:
                step(batch)

        def run() -> None:
            workers = [threading.Thread(target=train, args=(step,)) for step in steppers]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        return run

    def stacked(self, count: int) -> Form:
        """All models as one, whose parameters have a dimension more."""
        modules = [self.module(seed) for seed in range(count)]
        models: list[Any] = [module.model for module in modules]
        smoothing = modules[0].objective.config.smoothing
        parameters, buffers = stack_module_state(models)
        kept = list(parameters.values())
        config = modules[0].optimizer
        optimizer = torch.optim.Adam(kept, lr=config.lr, betas=config.betas, fused=True)
        shell = Loss(models[0], smoothing)

        def loss(own: dict[str, Tensor], also: dict[str, Tensor], batch: Any) -> Tensor:
            named = {f"model.{name}": value for name, value in {**own, **also}.items()}
            return functional_call(shell, named, (batch,))

        gradients = vmap(grad(loss), in_dims=(0, 0, None))

        first = self.batches[0]
        with mkl_products(), sdpa_kernel(SDPBackend.MATH):
            found = gradients(parameters, buffers, first)
        plain_loss(models[-1], first, smoothing).backward()
        for name, parameter in models[-1].named_parameters():
            torch.testing.assert_close(found[name][-1], parameter.grad, rtol=1e-3, atol=1e-6)

        def run() -> None:
            for batch in self.batches:
                # vmap would call the fused kernel once for each cell.
                with mkl_products(), sdpa_kernel(SDPBackend.MATH):
                    found = gradients(parameters, buffers, batch)
                for parameter, gradient in zip(kept, found.values(), strict=True):
                    parameter.grad = gradient
                optimizer.step()

        return run


class Loss(nn.Module):
    """A model with its loss as the output."""

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.model = model
        self._smoothing = smoothing

    def forward(self, batch: Any) -> Tensor:
        return plain_loss(self.model, batch, self._smoothing)


def plain_loss(model: nn.Module, batch: Any, smoothing: float) -> Tensor:
    """The loss of a batch from all of its logits."""
    logits = model(batch.source, batch.target[:, :-1]).flatten(0, 1)
    labels = batch.target[:, 1:].flatten()
    return token_sums(logits, labels, labels != PAD, smoothing).loss / batch.predicted_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="pre_ln")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells(options.preset)
    for count in options.cells:
        forms = {
            "alone": cells.alone(count),
            "alone, plain": cells.alone(count, plain=True),
            "loop": cells.loop(count),
            "threads": cells.threads(count),
            "stacked, vmap": cells.stacked(count),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
        for number in range(options.rounds + 1):
            for name, run in forms.items():
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                if number:  # the first round warms up
                    taken = (time.process_time() - cpu, time.perf_counter() - wall)
                    seen[name].append(taken)
        print(f"{options.preset}, {count} cells")
        print("| form | CPU ms | times as fast as alone | wall-clock ms |\n|---|---|---|---|")
        for name, rounds in seen.items():
            cpu, wall = (
                1e3 * statistics.median(each[clock] for each in rounds) / (count * STEPS)
                for clock in (0, 1)
            )
            pairs = zip(seen["alone"], rounds, strict=True)
            faster = statistics.median(one[0] / two[0] for one, two in pairs)
            print(f"| {name} | {cpu:.1f} | {faster:.2f} | {wall:.1f} |", flush=True)


if __name__ == "__main__":
    main()
