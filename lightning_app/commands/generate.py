"""Continue a text with the checkpoint of a run."""

from pathlib import Path

from lightning_app.commands.as_options import as_options
from lightning_app.trained.generating import sampling
from lightning_app.trained.run import load_run

ARGUMENTS = ("texts", "tokens", "temperature", "top_k", "top_p", "prompt")


def generate_text(
    run: Path,
    prompt: str,
    *,
    texts: int,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    checkpoint: Path,
) -> int:
    """Print `prompt` with what the model of `run` writes after it, `texts` times."""
    drawn = {"texts": texts, "tokens": tokens, "temperature": temperature}
    with as_options("generate", *ARGUMENTS):
        sampling(**drawn, top_k=top_k, top_p=top_p)  # refuses a mistake before it loads the model
        trained = load_run(run, checkpoint)
        found = trained.generate(prompt, **drawn, top_k=top_k, top_p=top_p, seed=seed)
    for number, text in enumerate(found):
        if number:
            print("-" * 20)
        print(text)
    return 0
