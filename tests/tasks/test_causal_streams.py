"""A text in contiguous streams, and the memory that a task keeps for each of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.memory import MemorySpec
from lightning_app.cli import main
from lightning_app.core.errors import UserError
from lightning_app.data.batching import in_random_order
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import EOS, PAD
from lightning_app.models.heads import CausalLanguageModel, build_model
from lightning_app.tasks.causal_lm import CausalBatch, CausalStreams
from tests import tiny
from tests.tasks.test_causal_lm import task
from tests.told import told


def model(corpus: PreparedCorpus, **memory: Any) -> CausalLanguageModel:
    block = BlockConfig(preset="pre_ln", memory=MemorySpec(**memory))
    architecture = tiny.architecture(kind="decoder", positions="relative")
    made = build_model(architecture, block, corpus.meta["vocab_size"], PAD)
    assert isinstance(made, CausalLanguageModel)
    return made


def batches(rows: CausalStreams) -> list[CausalBatch]:
    return [rows[item] for item in rows.sampler(0)]


@pytest.mark.parametrize("streams", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [True, False])
def test_each_stream_is_contiguous(corpus: PreparedCorpus, streams: int, whole: bool) -> None:
    """The streams after one another are the text, to its end in an evaluation."""
    rows = CausalStreams(corpus, "train", 5, streams, whole=whole)
    ids = np.asarray(rows.ids)
    read, predicted = [[] for _ in range(streams)], [[] for _ in range(streams)]
    for number, batch in enumerate(batches(rows)):
        assert batch.index.tolist() == [number * streams + stream for stream in range(streams)]
        assert int(batch.streams) == streams
        assert int(batch.predicted_tokens) == int((batch.labels != PAD).sum())
        for stream in range(streams):
            real = batch.labels[stream] != PAD
            predicted[stream] += batch.labels[stream][real].tolist()
            read[stream] += batch.tokens[stream][real].tolist()
    length = len(ids) // streams
    for stream in range(streams):
        start = stream * (-(-len(ids) // streams) if whole else length)
        end = start + len(predicted[stream])
        assert predicted[stream] == ids[start:end].tolist()
        assert read[stream] == [EOS if start == 0 else ids[start - 1], *ids[start : end - 1]]
    counted = sum(map(len, predicted))
    assert rows.remainder == len(ids) - counted
    if whole:
        assert counted == len(ids)
    else:
        assert len({len(part) for part in predicted}) == 1
    assert len(ids) - counted < streams * 6
    np.testing.assert_array_equal(np.sort(rows.targets()), np.sort(np.concatenate(predicted)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_has_the_same_streams_at_each_step(corpus: PreparedCorpus, ranks: int) -> None:
    whole = batches(CausalStreams(corpus, "train", 5, 4, whole=False))
    shares = [
        batches(CausalStreams(corpus, "train", 5, 4, whole=False, rank=r, world_size=ranks))
        for r in range(ranks)
    ]
    for step, batch in enumerate(whole):
        for rank, share in enumerate(shares):
            assert (share[step].index % 4).tolist() == list(range(rank, 4, ranks))
            assert torch.equal(share[step].tokens, batch.tokens[rank::ranks])
            assert share[step].predicted_tokens == batch.predicted_tokens


def test_a_part_is_the_beginning_and_what_cannot_be_shared_out_is_refused(corpus) -> None:
    with pytest.raises(UserError, match=r"has 2.*5.*3 processes"):
        CausalStreams(corpus, "train", 5, 2, whole=False, world_size=3)
    blank = CausalStreams(corpus, "valid", 5, 1, whole=True, rank=1, world_size=2)[0, np.array([0])]
    assert blank.index.tolist() == [-1]
    assert int(blank.predicted_tokens) == 5
    with pytest.raises(UserError, match="the test split"):
        CausalStreams(corpus, "test", 5, 9, whole=False)
    rows = CausalStreams(corpus, "valid", 5, 2, whole=True)
    assert [rows.tolist() for _, rows in in_random_order(rows.sampler(0))][:2] == [[0, 1], [2, 3]]
    assert rows.targets(np.array([0, 1])).tolist() == [*rows.ids[:5], *rows.ids[17:22]]


@torch.no_grad()
@pytest.mark.parametrize("streams", [1, 3])
def test_the_loss_is_that_of_segments_in_a_row(corpus: PreparedCorpus, streams: int) -> None:
    made, ours = model(corpus, length=7).eval(), task()
    rows = CausalStreams(corpus, "valid", 5, streams, whole=True)
    found = sum(float(ours.sums(made, batch).nll) for batch in batches(rows))
    expected = 0.0
    for number in range(streams):
        memory = None
        for batch in batches(rows):
            states, memory = made.states_after(memory, batch.tokens[number : number + 1])
            real = batch.labels[number] != PAD
            logits, labels = made.embedding.logits(states[0])[real], batch.labels[number][real]
            if len(logits):
                log_probs = logits.log_softmax(dim=-1)
                expected -= float(log_probs[torch.arange(len(labels)), labels].sum())
    assert found == pytest.approx(expected, rel=1e-5)
    apart = [batch._replace(streams=torch.tensor(0)) for batch in batches(rows)]
    alone = sum(float(ours.sums(made, batch).nll) for batch in apart)
    assert abs(alone - found) > 1e-3  # the memory counts


def test_an_evaluation_leaves_the_memory_of_training_as_it_is(corpus: PreparedCorpus) -> None:
    made, ours, other = model(corpus, length=7), task(), task()
    train = batches(CausalStreams(corpus, "train", 5, 3, whole=False))[:4]
    valid = batches(CausalStreams(corpus, "valid", 5, 2, whole=True))
    plain = [ours.sums(made, batch).loss.item() for batch in train]
    found = []
    for batch in train:
        found.append(other.sums(made, batch).loss.item())
        made.eval()
        with torch.no_grad():
            for part in valid:
                other.sums(made, part)
            other.logits(made, batch)
        made.train()
    assert found == plain
    for number, (read, layers) in ours.streams().items():
        assert read == other.streams()[number][0] == 4 * 5
        assert torch.equal(layers, other.streams()[number][1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_number_of_ranks_keeps_the_memory(corpus: PreparedCorpus, ranks: int) -> None:
    """Stored by the number of the stream, of three ranks; to the last bit."""
    made = model(corpus, length=7)
    before: dict[int, Any] = {}
    for rank in range(3):
        rows = CausalStreams(corpus, "train", 5, 4, whole=False, rank=rank, world_size=3)
        ours = task()
        for batch in batches(rows)[:3]:
            ours.sums(made, batch)
        before |= ours.streams()
    assert sorted(before) == [0, 1, 2, 3]
    after: dict[int, Any] = {}
    for rank in range(ranks):
        rows = CausalStreams(corpus, "train", 5, 4, whole=False, rank=rank, world_size=ranks)
        ours = task()
        ours.load_streams(before)
        for number, (read, layers) in ours.streams().items():
            assert read == 3 * 5
            assert torch.equal(layers, before[number][1])
        states = ours._states(made, batches(rows)[3])
        for row, number in enumerate(range(rank, 4, ranks)):
            after[number] = states[row]
    whole = task()
    *before_last, last = batches(CausalStreams(corpus, "train", 5, 4, whole=False))[:4]
    for batch in before_last:
        whole._states(made, batch)
    states = whole._states(made, last)
    for number, row in after.items():
        torch.testing.assert_close(row, states[number])


def test_a_memory_of_other_text_is_never_used(corpus: PreparedCorpus) -> None:
    made, ours = model(corpus, length=7), task()
    parts = batches(CausalStreams(corpus, "train", 5, 3, whole=False))
    ours.sums(made, parts[0])
    with pytest.raises(RuntimeError, match=r"after 10 tokens.*but 5 tokens"):
        ours.sums(made, parts[2])
    fresh = task()
    with pytest.raises(RuntimeError, match="after 5 tokens"):
        fresh.sums(made, parts[1])
    fresh.load_streams({0: ours.streams()[0], 1: ours.streams()[1]})
    with pytest.raises(UserError, match=r"after 5.*2 streams"):
        fresh.sums(made, parts[1])
    ours.sums(made, parts[0])  # a new epoch begins with an empty memory
    ours.sums(made, parts[1])


@pytest.mark.parametrize(
    ("window", "streams", "said"),
    [
        (4, 3, "8.*3.*after 10.*3 streams"),
        (5, 2, "10.*2.*after 10.*3 streams"),
        (5, 4, "10.*4.*after 10.*3 streams"),
    ],
)
def test_a_checkpoint_of_another_reading_is_refused(corpus, window, streams, said: str) -> None:
    """Its streams are at other places of the text, also those with the same numbers."""
    made, ours, other = model(corpus, length=7), task(), task()
    for batch in batches(CausalStreams(corpus, "train", 5, 3, whole=False))[:2]:
        ours.sums(made, batch)
    other.load_streams(ours.streams())
    with pytest.raises(UserError, match=said):
        other.sums(made, batches(CausalStreams(corpus, "train", window, streams, whole=False))[2])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "masked_lm"}, "data.order is 'streams': data.task 'masked_lm'"),
        ({"task": "causal_lm", "evaluation_stride": 4}, "data.evaluation_stride is 4"),
        ({"task": "causal_lm", "evaluation_streams": 0}, "data.evaluation_streams is 0; .* 1"),
    ],
)
def test_a_config_without_meaning_is_refused(fields: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        DataConfig(order="streams", **fields)


@pytest.mark.dear("a training and seven evaluations, where it is the first to prepare the corpus")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_one_checkpoint_is_evaluated_with_several_memories(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(Path("ablations/base/synthetic_lm.yaml").read_text())
    tree["model"]["block"]["memory"] = {"length": 8}
    tree["model"]["architecture"]["positions"] = "relative"
    tree["model"]["optimizer"]["lr"] = 0.05
    tree["model"]["schedule"] |= {"warmup_steps": 1, "reference_steps": 1}
    tree["data"] |= {"order": "streams", "window": 8, "tokens_per_batch": 64, "cache": cache}
    tree["trainer"] |= {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 20}
    tree["trainer"] |= {"enable_progress_bar": False, "default_root_dir": str(tmp_path / "run")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "config.yaml"]) == 0
    words = ["validate", "--config", "config.yaml", "--ckpt_path", "last"]

    def loss(*overrides: str) -> str:
        capsys.readouterr()
        assert main([*words, *overrides]) == 0
        (line,) = [row for row in capsys.readouterr().out.splitlines() if "val/nll" in row]
        return line

    same, longer, memory = loss(), "--model.block.memory.evaluation_length", "--model.block.memory"
    assert loss(longer, "8") == same
    assert len({same, loss(longer, "0"), loss(longer, "64")}) == 3
    assert loss("--model.architecture.clamp_length", "3") != same
    assert main([*words, f"{memory}.length", "16"]) == 2
    assert told("model.block.memory.length is 8 … 16").search(capsys.readouterr().err)
    assert main(["fit", *words[1:], longer, "64"]) == 2
    said = "model.block.memory.evaluation_length is None there and 64 in the config"
    assert said in capsys.readouterr().err
