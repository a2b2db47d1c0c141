"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 1606.05250; 2018, 1806.03822), from files or the hub.

A file is JSON: articles with a title, paragraphs with a context, questions with answers.
The dev set is our validation split. Answers of the test set are not published, so a test split is
read only from your own file, such as `test-v1.1.json`.

With `data.train_from_dev` a share of the dev set's articles is for training and the others are
evaluated. Articles are ordered by the SHA-256 of their titles, so that the choice does not depend
on their order in the file, and no paragraph is in both parts.

The hub needs a network; it was not tried: tests only use a replacement of `load_dataset`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from lightning_app.core.errors import UserError
from lightning_app.core.files import sha256_of
from lightning_app.data.columns import Columns
from lightning_app.data.config import CORPORA, CorpusReader, DataConfig, Source, split_sizes
from lightning_app.data.sources import load_from_hub

_COLUMNS = ("id", "question", "context", "answers", "starts", "article")
_HUB_SPLITS = {"train": "train", "valid": "validation"}
_SPACE_MARK = "▁"  # a tokenizer reads it as a space


class SquadReader(CorpusReader):
    """Reads one version.

    Attributes:
        version: The version in file names and in running text.
        unanswerable: Whether `is_impossible` marks questions without an answer.
        published: The questions of the published training set and dev set.
        hub_config: The configuration of the dataset on the hub.
        revision: The commit to read.
    """

    pairs = False
    needs_root = False
    labels_of = "squad"
    divides_dev = True
    folder = "squad"
    version: ClassVar[str]
    unanswerable: ClassVar[bool]
    published: ClassVar[tuple[int, int]]
    hub_config: ClassVar[str]
    revision: ClassVar[str]

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return the name of the file; the default stem `valid` means `dev`."""
        return {"json": (f"{'dev' if stem == 'valid' else stem}-v{self.version}.json",)}

    def parse(self, columns: dict[str, list[str]], path: Path) -> dict[str, list[Any]]:
        """Return the columns of `columns.Questions`.

        Raises:
            UserError: naming the file and the place of a missing field, an answer that is not at
                its stated position in the context, or a question of the other version.
        """
        try:
            tree = json.loads("\n".join(columns["json"]))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}: line {error.lineno}, column {error.colno}: damaged JSON ({error.msg})"
            ) from error
        except RecursionError as error:
            raise UserError(f"{path}: damaged JSON, nested too deeply") from error
        rows = list(self._rows(tree, str(path)))
        if not rows:
            raise UserError(f"{path}: empty, no question in it")
        columns_of_rows = map(list, zip(*rows, strict=True))
        found: dict[str, list[Any]] = dict(zip(_COLUMNS, columns_of_rows, strict=True))
        if len(set(found["id"])) < len(rows):
            twice = next(x for x in found["id"] if found["id"].count(x) > 1)
            raise UserError(
                f"{path}: question '{twice}' is there twice; each id is of one question"
            )
        return found

    def _rows(self, tree: Any, path: str) -> Iterator[tuple[Any, ...]]:
        for a, article in enumerate(_field(tree, "data", list, path)):
            place = f"{path}: data[{a}]"
            title = _text(article, "title", place)
            for p, paragraph in enumerate(_field(article, "paragraphs", list, place)):
                inside = f"{place}.paragraphs[{p}]"
                context = _text(paragraph, "context", inside)
                for q, question in enumerate(_field(paragraph, "qas", list, inside)):
                    at = f"{inside}.qas[{q}]"
                    text, name = _text(question, "question", at), _text(question, "id", at)
                    answers, starts = self._answers(question, context, f"{path}: question '{name}'")
                    yield name, text, "" if q else context, answers, starts, title

    def _answers(
        self, question: Mapping[str, Any], context: str, place: str
    ) -> tuple[list[str], list[int]]:
        """Return the answers of a question and the characters at which they begin."""
        impossible = False
        if self.unanswerable:
            impossible = _field(question, "is_impossible", bool, place)
        elif "is_impossible" in question:
            raise UserError(
                f"{place}: has the field is_impossible of version 2.0, whose data.name is 'squad2'"
            )
        answers, starts = [], []
        for n, answer in enumerate(_field(question, "answers", list, place)):
            at = f"{place}: answers[{n}]"
            text, start = _text(answer, "text", at), _field(answer, "answer_start", int, at)
            if start < 0 or context[start : start + len(text)] != text:
                there = context[max(0, start) : max(0, start) + len(text)]
                raise UserError(
                    f"{at}: answer_start is {start}, where the context has '{there:.40}' and not "
                    f"'{text:.40}'"
                )
            answers.append(text)
            starts.append(start)
        if impossible == bool(answers):
            has = f"is_impossible is {str(impossible).lower()}" if self.unanswerable else "1.1"
            right = "no answer" if impossible else "at least one answer"
            raise UserError(f"{place}: {len(answers)} answers, but {right} needed ({has})")
        return answers, starts

    def divided(self, config: DataConfig, splits: dict[str, Columns]) -> dict[str, Columns]:
        """Return the dev set, split into training articles and evaluated articles.

        A test split that names the dev set's file has only the evaluated articles.
        """
        assert config.train_from_dev is not None
        dev = splits["valid"]
        titles = sorted(set(dev["article"]), key=lambda title: sha256_of(title.encode()))
        if len(titles) < 2:
            raise UserError(
                f"data.train_from_dev is {config.train_from_dev}: the dev set of data.name "
                f"'{config.name}' has one article, and at least 2 are needed"
            )
        count = min(max(1, round(config.train_from_dev * len(titles))), len(titles) - 1)
        training = set(titles[:count])
        train, valid = (
            _taken(dev, [(title in training) is kept for title in dev["article"]])
            for kept in (True, False)
        )
        found = {"train": train, "valid": valid}
        if "test" in splits:
            test, there = (
                self.file_names(config, x) for x in (config.splits.test, config.splits.valid)
            )
            found["test"] = valid if test == there else splits["test"]
        return found

    def download(self, config: DataConfig, folder: Path) -> None:
        """Write files of the published form, from the hub's pinned revision."""
        revision = None if config.root else self.revision
        found = load_from_hub(config, self.hub, self.hub_config, revision, _HUB_SPLITS)
        for split, rows in found.items():
            (name,) = self.file_names(config, getattr(config.splits, split))["json"]
            text = json.dumps({"data": list(self._articles(rows))}, ensure_ascii=False)
            (folder / name).write_text(text, encoding="utf-8")

    def _articles(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for title, of in groupby(rows, key=lambda row: row["title"]):
            paragraphs = [
                {"context": context, "qas": [self._question(row) for row in same]}
                for context, same in groupby(of, key=lambda row: row["context"])
            ]
            yield {"title": title, "paragraphs": paragraphs}

    def _question(self, row: Mapping[str, Any]) -> dict[str, Any]:
        pairs = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        question = {"id": row["id"], "question": row["question"], "answers": answers}
        return question | ({"is_impossible": not answers} if self.unanswerable else {})

    def protocol(self, source: Source, lines: dict[str, Columns], counts: dict[str, int]) -> str:
        """Return the number of questions, and whether they match the published files."""
        contexts = {split: set(of["context"]) - {""} for split, of in lines.items()}
        # Without suffixes: a compressed file has the same questions.
        stems = {s: of["json"].name.partition(".json")[0] for s, of in source.columns.items()}
        said = f"SQuAD {self.version}: "
        if "train" in stems:
            both = (counts["train"], counts["valid"])
            same = "the published counts" if both == self.published else "not the published counts"
            said += f"{split_sizes(counts)} questions of {' / '.join(stems.values())}, {same}"
        else:
            train, valid = (
                f"{len(set(lines[split]['article'])):,} articles ({len(contexts[split]):,} "
                f"paragraphs, {counts[split]:,} questions)"
                for split in ("train", "valid")
            )
            said += (
                f"NOT the published splits: of {stems['valid']} {train} train, and only the other "
                f"{valid} are evaluated, so no score is comparable with a published one"
            )
        for split in [split for split in contexts if split != "train"]:
            if shared := len(contexts[split] & contexts["train"]):
                said += f"; {shared:,} paragraphs of {split} are in train, too"
        return said


def _field(tree: Any, name: str, kind: type, place: str) -> Any:
    value = tree.get(name) if isinstance(tree, dict) else None
    if type(value) is not kind:  # a bool is not an index
        words = {list: "a list", str: "a text", int: "a whole number", bool: "true or false"}
        found = "nothing" if value is None else f"{value!r:.40}"
        raise UserError(f"{place}: expected {words[kind]} as the field '{name}', found {found}")
    return value


def _text(tree: Any, name: str, place: str) -> str:
    text = _field(tree, name, str, place)
    if not text.replace(_SPACE_MARK, " ").strip():
        raise UserError(f"{place}: the field '{name}' is empty; a text is needed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: the field '{name}' is no Unicode text ({error.reason})"
        ) from error
    return text


def _taken(columns: dict[str, list[Any]], kept: list[bool]) -> dict[str, list[Any]]:
    return {
        name: [value for value, keep in zip(column, kept, strict=True) if keep]
        for name, column in columns.items()
    }


@CORPORA.register("squad1")
class Squad1(SquadReader):
    """Version 1.1, in which every question has an answer."""

    base = "finetune_squad1.yaml"
    version = "1.1"
    unanswerable = False
    published = (87_599, 10_570)
    hub = "rajpurkar/squad"
    hub_config = "plain_text"
    revision = "7b6d24c440a36b6815f21b70d25016731768db1f"


@CORPORA.register("squad2")
class Squad2(SquadReader):
    """Version 2.0, in which half of the questions of the dev set have none."""

    base = "finetune_squad2.yaml"
    version = "2.0"
    unanswerable = True
    published = (130_319, 11_873)
    hub = "rajpurkar/squad_v2"
    hub_config = "squad_v2"
    revision = "3ffb306f725f7d2ce8394bc1873b24868140c412"
