"""What each metric counts, and which fields of a config change that."""

from typing import Any

import pytest

from lightning_app.config.rulers import differences, in_raw_text, names_of, ruler
from lightning_app.config.tree import cell_setting

SETTINGS: dict[str, Any] = {
    "model": {
        "class_path": None,
        "block": {"memory": {"length": 16, "evaluation_length": None}},
        "objective": {"kind": "causal_lm", "beam": 5, "length_penalty": 1.0, "validation_bleu": 0},
    },
    "trainer": {"limit_val_batches": None, "limit_test_batches": 1.0, "overfit_batches": 0.0},
    "data": {
        "name": "text",
        "root": "one",
        "tokenizer": "word",
        "vocab_size": None,
        "window": 16,
        "splits": {"train": "train", "valid": "valid", "test": "test"},
        "tokens_per_batch": 256,
        "mask_probability": 0.15,
    },
}
KIND = "model.objective.kind"
EVALUATED = "model.block.memory.evaluation_length"
LM, MLM, TRANSLATION = "causal_lm", "masked_lm", "translation"


def apart(task: str, metric: str, changed: dict[str, Any], **shared: Any) -> str:
    """How the rulers of two runs differ, of which one has other values in some fields."""
    axes = [{KIND: task, **shared}, {KIND: task, **shared, **changed}]
    return differences([ruler(cell_setting(of, SETTINGS), metric) for of in axes])


VALID = {"data.name": "wikitext2", "data.splits.valid": "other", "data.evaluation_stride": 4}
WHOLE = {
    **{"data.tokenizer": "char", "data.vocab_size": 8, "data.window": 32, "data.order": "streams"},
    **{"data.splits.train": "other", "data.root": "two", "data.document_separator": "="},
    "trainer.limit_val_batches": 1,  # one batch, which is not the share 1.0
    **VALID,
}
LENGTHS = {"model.architecture.clamp_length": 64, EVALUATED: 64}
OTHER: dict[tuple[str, str], dict[str, Any]] = {
    **{(LM, f"val/{name}"): WHOLE | LENGTHS for name in ("nll", "perplexity", "accuracy")},
    (LM, "test/nll"): {"data.splits.test": "other", "trainer.limit_test_batches": 0.5},
    (LM, "val/bits_per_byte"): VALID | LENGTHS | {"trainer.limit_val_batches": 3},
    (LM, "val/word_perplexity"): {"data.evaluation_streams": 4},
    (MLM, "val/nll"): {"data.mask_probability": 0.4, "model.objective.next_sentence": True},
    (MLM, "val/accuracy"): {"data.whole_word": True},
    (MLM, "val/nsp_accuracy"): {"data.window": 64},
    (TRANSLATION, "val/nll"): {"data.vocab_size": 8},
    (TRANSLATION, "test/sacrebleu"): {
        **{"data.target_language": "fr", "model.objective.length_penalty": 0.6}
    },
    (TRANSLATION, "test/bleu"): {"model.objective.beam": 1},
    (TRANSLATION, "val/bleu"): {"model.objective.validation_bleu": 50},
    ("squad", "val/f1"): {"data.train_from_dev": 0.5, "data.name": "squad2"},
    ("squad", "val/nll"): {"data.context_stride": 32},
    ("glue", "val/accuracy"): {"data.name": "rte"},
    ("glue", "val/f1"): LENGTHS,
    (LM, "train/tokens_per_second"): {"data.tokenizer": "char"},
    # Of a plug-in, which says nothing of it.
    (LM, "val/mine"): {
        **{"data.tokenizer": "char", "data.window": 32, "model.class_path": "mine.Mine"}
    },
    ("of_a_plugin", "val/nll"): {"data.tokenizer": "char"},
}
SAME: dict[tuple[str, str], dict[str, Any]] = {
    (LM, "val/bits_per_byte"): {
        **{"data.tokenizer": "char", "data.vocab_size": 8, "data.window": 32},
        "data.splits.train": "other",
    },
    (LM, "val/nll"): {
        **{"data.tokens_per_batch": 1024, "data.splits.test": "other", "trainer.max_steps": 9},
        **{"trainer.limit_test_batches": 3, "model.block.memory.length": 32},
        "trainer.limit_val_batches": 1.0,  # all of the split, as null
        EVALUATED: 16,  # what null is
        "model.block.memory": {"length": 32, "evaluation_length": 64},
    },
    (LM, "train/tokens_per_second"): {"data.window": 32, "model.architecture.clamp_length": 8},
    (TRANSLATION, "test/sacrebleu"): {"data.tokenizer": "char"},
    (TRANSLATION, "val/nll"): {"model.objective.beam": 1, "data.max_length": 20},
    (TRANSLATION, "val/bleu"): {"model.objective.beam": 1},
    ("glue", "val/accuracy"): {"data.tokenizer": "char"},
    ("glue", "val/nll"): {"data.window": 32},
    ("squad", "val/f1"): {"data.context_stride": 32},
}


@pytest.mark.parametrize(("task", "metric"), {**OTHER, **SAME})
def test_what_a_metric_counts_is_another_or_the_same(task: str, metric: str) -> None:
    for field, value in OTHER.get((task, metric), {}).items():
        assert field in apart(task, metric, {field: value}), field
    for field, value in SAME.get((task, metric), {}).items():
        assert not apart(task, metric, {field: value}), field


def test_a_limit_counts_batches_which_the_budget_of_a_batch_makes() -> None:
    larger = {"data.tokens_per_batch": 1024}
    limit = {"trainer.limit_val_batches": 3}
    assert "data.tokens_per_batch" in apart(LM, "val/nll", larger, **limit)
    assert "data.tokens_per_batch" in apart(LM, "val/bits_per_byte", larger, **limit)
    assert not apart(LM, "test/nll", larger, **limit)
    assert apart(LM, "val/nll", {"trainer.limit_val_batches": 0.5}).count(" is ") == 1


def test_sections_and_what_lies_in_them_can_be_axes() -> None:
    splits = {"data.splits": {"train": "train", "valid": "other", "test": "test"}}
    assert "data.splits.valid" in apart(LM, "val/nll", splits)
    mine = {"data.init_args.rows": 3}
    assert "data.init_args" in apart(LM, "val/nll", {"data.init_args.rows": 4}, **mine)
    # Where files lie counts only as an axis.
    elsewhere = {**SETTINGS, "data": {**SETTINGS["data"], "root": "two"}}
    rulers = [ruler(cell_setting({KIND: LM}, of), "val/nll") for of in (SETTINGS, elsewhere)]
    assert not differences(rulers)


def test_memories_and_what_results_show_tell_rulers_apart_that_configs_do_not() -> None:
    pairs = [(length, of) for length in (16, 32) for of in (16, 64)]
    axes = [{KIND: LM, "model.block.memory.length": m, EVALUATED: n} for m, n in pairs]
    names = names_of([ruler(cell_setting(of, SETTINGS), "val/nll") for of in axes])
    assert names[0] == names[2] != names[1] == names[3]
    shown = [{"kind": "a", "the entropy": value} for value in (2.0, 2.000001, 2.1, float("nan"))]
    assert not differences([shown[0], shown[1], shown[3]])
    assert differences(shown) == "the entropy is 2 and 2.1"
    assert differences([{**shown[0], "kind": "b"}, shown[2]]) == "kind is b and a"
    assert names_of(shown[:3]) == ["the entropy=2", "the entropy=2", "the entropy=2.1"]
    assert names_of(shown[:2]) == ["", ""]


def test_raw_text_takes_the_place_of_tokens_only() -> None:
    def found(task: str, metric: str) -> list[str]:
        return [each.metric for each in in_raw_text(cell_setting({KIND: task}, SETTINGS), metric)]

    assert found(LM, "val/nll")[0] == "val/bits_per_byte"
    assert found(LM, "test/perplexity")[0] == "test/bits_per_byte"
    assert found(TRANSLATION, "val/nll")[0] == "test/sacrebleu"
    assert found(LM, "val/bits_per_byte") == found(TRANSLATION, "test/bleu") == []
    assert found(MLM, "val/nll") == found(LM, "val/mine") == []


@pytest.mark.parametrize("metric", ["test/bleu", "test/sacrebleu", "val/bleu"])
@pytest.mark.parametrize("field", ["data.vocab_size", "data.tokenizer", "data.context_stride"])
def test_rows_in_a_part_of_a_split_depend_on_tokens(metric: str, field: str) -> None:
    """Lines and answers count the same in whole splits alone: batches are cut by tokens."""
    limit = f"trainer.limit_{metric.partition('/')[0]}_batches"
    assert not apart(TRANSLATION, metric, {field: 64}, **{limit: None})
    assert apart(TRANSLATION, metric, {field: 64}, **{limit: 20}).startswith(field)
