"""Two ranks that would train two things train nothing."""

from pathlib import Path

import pytest

from tests import warm

RANK = """
import sys
from dataclasses import replace
from pathlib import Path
from lightning_app.training.hardware import join_process_group
from lightning_app.training.callbacks.safety import Agreement
from tests.runs import data, module, trainer

rank, folder, cache, identity = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
corpus = data(cache)
corpus.config = replace(corpus.config, max_length=int(sys.argv[5]))
join_process_group(rank, 2, folder / "meeting", "cpu")
callbacks = [Agreement(identity)]
fitter = trainer(folder, max_steps=2, devices=2, strategy="ddp", callbacks=callbacks)
fitter.fit(module(), datamodule=corpus)
print("trained", fitter.global_step)
"""


def train(folder: Path, cache: str, *ranks_have: tuple[str, int]) -> list[tuple[int | None, str]]:
    ranks = [
        warm.start(["-c", RANK, str(rank), str(folder), cache, identity, str(longest)])
        for rank, (identity, longest) in enumerate(ranks_have)
    ]
    said = ["".join(rank.communicate(timeout=200)) for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("second", "what"), [(("f123456789abcdef", 175), "configs"), (("0123456789abcdef", 12), "data")]
)
def test_two_runs_do_not_train(tmp_path, cache: str, second: tuple[str, int], what: str) -> None:
    for code, said in train(tmp_path, cache, ("0123456789abcdef", 175), second):
        assert code == 1, said
        assert "trained 2" not in said
        assert f"the ranks' {what}" in said
