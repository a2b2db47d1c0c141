"""Two ranks that would train two things train nothing."""

import subprocess
import sys
from pathlib import Path

RANK = """
import sys
from pathlib import Path
from lightning_app.ablation.supervision.ranks import join
from lightning_app.callbacks.agreement import Agreement
from tests.runs import data, module, trainer

rank, folder, cache, identity = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
join(rank, 2, folder / "meeting", "cpu")
callbacks = [Agreement(identity)]
fitter = trainer(folder, max_steps=2, devices=2, strategy="ddp", callbacks=callbacks)
fitter.fit(module(), datamodule=data(cache))
print("trained", fitter.global_step)
"""


def train(folder: Path, cache: str, *identities: str) -> list[tuple[int | None, str]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder), cache, identity],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, identity in enumerate(identities)
    ]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def test_ranks_of_two_configs_do_not_train(tmp_path: Path, cache: str) -> None:
    for code, said in train(tmp_path, cache, "0123456789abcdef", "f123456789abcdef"):
        assert code == 1, said
        assert "trained 2" not in said
        assert "the ranks' configs differ; nothing was trained" in said
