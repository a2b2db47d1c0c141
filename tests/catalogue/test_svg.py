"""The drawing as a picture: well formed, legible, nothing over anything else."""

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from lightning_app.blocks.presets import PRESETS
from lightning_app.catalogue.presets import gallery_page
from lightning_app.catalogue.svg import picture, text_width
from tests.catalogue.variants import CASES, drawn, stacks
from tests.noted import noted

SVG = "{http://www.w3.org/2000/svg}"
GALLERY = Path("docs/blocks")
BOXES = {"norm", "gain", "SA", "CA", "FF"}
EDGE = 0.51
"""Half a line: what touches does not overlap."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        across = self.left < other.right - EDGE and other.left < self.right - EDGE
        return across and self.top < other.bottom - EDGE and other.top < self.bottom - EDGE

    def holds(self, other: "Box") -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom


class Picture:
    """The shapes, lines and words of an SVG document."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        x, y, width, height = map(float, self.root.attrib["viewBox"].split())
        self.page = Box(x, y, x + width, y + height)
        self.boxes: list[tuple[str, Box]] = []
        for rect in self.root.findall(f"{SVG}rect"):
            x, y, width, height = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
            self.boxes.append((rect.attrib["class"], Box(x, y, x + width, y + height)))
        self.texts: list[tuple[str, Box]] = []
        for text_ in self.root.findall(f"{SVG}text"):
            kind = text_.get("class", "").removesuffix("left").strip()
            x, y, words = float(text_.attrib["x"]), float(text_.attrib["y"]), text_.text or ""
            width = text_width(words, kind)
            left = x if text_.get("class", "").endswith("left") else x - width / 2
            self.texts.append((words, Box(left, y - 8, left + width, y + 2)))
        self.lines: list[list[tuple[float, float]]] = []
        for path in self.root.findall(f"{SVG}path"):
            points = re.findall(r"[ML](\S+?) (-?[\d.]+)", path.attrib["d"])
            if "h8" not in path.attrib["d"]:
                self.lines.append([(float(a), float(b)) for a, b in points])

    def segments(self) -> list[Box]:
        return [
            Box(min(x, to_x), min(y, to_y), max(x, to_x), max(y, to_y))
            for line in self.lines
            for (x, y), (to_x, to_y) in pairwise(line)
        ]

    def named(self, *kinds: str) -> list[Box]:
        return [box for kind, box in self.boxes if kind in kinds]


def test_pictures_are_legible() -> None:
    for name, specs in CASES.items():
        with noted(name):
            shown = Picture(picture(name, drawn(specs)))
            it_says_what_it_shows(shown)
            it_fetches_nothing_and_follows_the_reader(shown)
            boxes_do_not_overlap(shown)
            words_fit(shown)
            lines_enter_boxes_along_the_stream_alone(shown)
            lines_do_not_cross_words(shown)


def it_says_what_it_shows(shown: Picture) -> None:
    root: Any = shown.root
    assert root.get("role") == "img"
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert "encoder and decoder" in (title.text or "")
    assert "feed-forward" in (desc.text or "")


def it_fetches_nothing_and_follows_the_reader(shown: Picture) -> None:
    text = ElementTree.tostring(shown.root, encoding="unicode")
    assert "@media(prefers-color-scheme:dark)" in text
    assert "href" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.*?)\)", text)) <= {"#stream", "#carry"}


def boxes_do_not_overlap(shown: Picture) -> None:
    boxes = shown.named(*BOXES)
    assert len(boxes) >= 5
    assert not [pair for pair in combinations(boxes, 2) if pair[0].meets(pair[1])]
    frames = shown.named("frame")
    assert not [pair for pair in combinations(frames, 2) if pair[0].meets(pair[1])]
    for box in boxes:
        assert shown.page.holds(box)
        assert not [f for f in frames if f.meets(box) and not f.holds(box)]


def words_fit(shown: Picture) -> None:
    """Every label is on the page, inside its own box and on no other box."""
    for words, place in shown.texts:
        assert shown.page.holds(place), words
        met = [box for box in shown.named(*BOXES) if box.meets(place)]
        assert len(met) <= 1, words
        assert all(box.holds(place) for box in met), words
    for (one, first), (two, second) in combinations(shown.texts, 2):
        assert not first.meets(second), f"{one} over {two}"


def lines_enter_boxes_along_the_stream_alone(shown: Picture) -> None:
    for path in shown.segments():
        assert shown.page.holds(path)
        for box in shown.named(*BOXES):
            middle = pytest.approx((box.left + box.right) / 2, abs=0.01)
            assert path.left == path.right == middle or not box.meets(path), path


def lines_do_not_cross_words(shown: Picture) -> None:
    for path in shown.segments():
        hidden = [box for box in shown.named(*BOXES, "sum") if box.meets(path)]
        for words, place in shown.texts:
            assert any(box.holds(place) for box in hidden) or not path.meets(place), words


def test_the_committed_gallery_is_what_is_drawn() -> None:
    for name in PRESETS:
        committed = (GALLERY / f"{name}.svg").read_text(encoding="utf-8")
        # Made again by `ablate blocks --svg-dir docs/blocks`.
        assert committed == picture(name, drawn(stacks(name)))
    assert {path.stem for path in GALLERY.glob("*.svg")} == set(PRESETS)
    assert (GALLERY / "README.md").read_text(encoding="utf-8") == gallery_page(6, 6)
