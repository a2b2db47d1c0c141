"""Does the resident memory of a run stay flat over a gigabyte of token ids?

    python benchmarks/resident.py FIGURE.png [--tokens 500000000] [--steps 1500]

Writes ids below 1,000, ten million random ones again and again, in the format of nanoGPT, trains a
small model on windows at random places, and draws the resident memory of its process over time.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import psutil
import yaml

CONFIG = {
    "seed_everything": 1,
    "trainer": {"val_check_interval": 50, "limit_val_batches": 2, "enable_progress_bar": False},
    "model": {
        "architecture": {"kind": "decoder", "decoder_depth": 1, "model_dim": 16, "ff_dim": 16},
        "objective": {"kind": "causal_lm", "evaluate_test": False},
        "schedule": {"warmup_steps": 5},
    },
}


def train(folder: Path, tokens: int, steps: int) -> list[tuple[float, float]]:
    """Return (seconds, MB) of the process that prepares the ids and trains."""
    ids = (np.random.default_rng(1).zipf(1.2, 10_000_000) % 1000).astype("<u2")
    for name, count in (("train", tokens), ("val", 1_000_000)):
        with (folder / f"{name}.bin").open("wb") as file:
            for begin in range(0, count, len(ids)):
                ids[: count - begin].tofile(file)
    CONFIG["trainer"]["max_steps"] = steps
    CONFIG["model"]["architecture"]["num_heads"] = 2
    CONFIG["data"] = {"name": "tokens", "root": str(folder), "cache": str(folder / "cache")}
    CONFIG["data"] |= {"tokenizer": "ids", "vocab_size": 1005, "order": "random"}
    CONFIG["data"] |= {"window": 64, "tokens_per_batch": 4096}
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    call = ["fit", "--config", "config.yaml", "--trainer.default_root_dir", "run"]
    run = subprocess.Popen([sys.executable, "-m", "lightning_app", *call], cwd=folder)
    seen, start, process = [], time.monotonic(), psutil.Process(run.pid)
    while run.poll() is None:
        seen.append((time.monotonic() - start, process.memory_info().rss / 1e6))
        time.sleep(0.25)
    if run.returncode:
        sys.exit(f"the run ended with {run.returncode}")
    return seen[:-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("figure", type=Path)
    parser.add_argument("--tokens", type=int, default=500_000_000)
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = train(Path(folder), given.tokens, given.steps)
    seconds, memory = zip(*seen, strict=True)
    late = memory[len(memory) * 2 // 3 :]
    print(f"most {max(memory):,.0f} MB; last third {min(late):,.0f} to {max(late):,.0f} MB")
    plt.figure(figsize=(6, 3))
    plt.plot(seconds, memory)
    plt.ylim(bottom=0)
    plt.xlabel("seconds")
    plt.ylabel("resident MB")
    plt.title(f"{given.tokens:,} ids, {2 * given.tokens / 1e9:.1f} GB")
    plt.tight_layout()
    plt.savefig(given.figure)


if __name__ == "__main__":
    main()
