"""Every picture of the documentation is made by a command that stands in it, and is shown."""

import re
from typing import NamedTuple

import pytest

from lightning_app.blocks.presets import PRESETS
from tests.pages import PAGES, ROOT, inline, typed

ENDINGS = {".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp"}
FOLDERS = ("docs", "ablations", "benchmarks")
STUDIES = sorted((ROOT / "ablations" / "results").glob("*/README.md"))
COSTS = ROOT / "benchmarks/README.md"
OUTSIDE = [
    ROOT / "ablations/README.md",
    *STUDIES,
    *ROOT.glob("*.md"),
    ROOT / "data/README.md",
    COSTS,
]
SHOWN = re.compile(r"!\[[^\]]*\]\(([^)\s#]+)|(?:src|srcset)=\"([^\"#]+)\"")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
CODE = re.compile(r"`[^`\n]+`")


class Maker(NamedTuple):
    """A command, as its page has it, and the pictures that it writes, as a regular expression."""

    command: str
    pictures: str


MAKERS = (
    Maker("ablate blocks --svg-dir docs/blocks", rf"docs/blocks/({'|'.join(PRESETS)})\.svg"),
    Maker("python docs/screenshots.py", r"docs/screenshots/(report|tensorboard|dashboard)\.png"),
    Maker(
        "ablate report joint --publish published/joint",
        r"ablations/results/\w+/headline-(light|dark)\.svg",
    ),
    Maker("python -m benchmarks.tuned_beside", r"ablations/results/tuned/beside-(light|dark)\.svg"),
    Maker("python benchmarks/resident.py benchmarks/resident.svg", r"benchmarks/resident\.svg"),
)


def pictures() -> list[str]:
    """Return the picture files of the repository, without what commands leave in it."""
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*")]
    return sorted([path.relative_to(ROOT).as_posix() for path in found if path.suffix in ENDINGS])


def shown() -> dict[str, list[str]]:
    """Return the pages that show a picture, by the path of the picture from the root."""
    texts = {ROOT / page: text for page, text in PAGES.items()}
    texts |= {path: path.read_text("utf-8") for path in OUTSIDE}
    found: dict[str, list[str]] = {}
    for page, text in texts.items():
        for match in SHOWN.finditer(CODE.sub("", FENCE.sub("", text))):
            path = (page.parent / (match[1] or match[2])).resolve()
            found.setdefault(path.relative_to(ROOT).as_posix(), []).append(page.name)
    return found


def figure_of(picture: str) -> str:
    """The two looks and the two formats of a headline are one figure."""
    return re.sub(r"-(light|dark)\.(svg|png)$", "", picture)


def test_every_picture_is_shown_there_and_made_by_one_command() -> None:
    assert len(shown()) >= 30
    assert [picture for picture in shown() if not (ROOT / picture).is_file()] == []
    figures = {figure_of(picture) for picture in shown()}
    assert [picture for picture in pictures() if figure_of(picture) not in figures] == []
    for picture in sorted({*pictures(), *shown()}):
        makers = [each for each in MAKERS if re.fullmatch(each.pictures, picture)]
        assert len(makers) == 1, (picture, makers)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.command)
def test_the_command_stands_in_the_documentation(maker: Maker) -> None:
    program = maker.command.split()[0]
    of_costs = map(str.strip, COSTS.read_text("utf-8").splitlines())
    assert maker.command in [*typed(), *(command for _, command in inline(program)), *of_costs]


def test_the_script_of_the_screenshots_writes_what_lies_there() -> None:
    source = (ROOT / "docs" / "screenshots.py").read_text("utf-8")
    there = sorted(path.name for path in (ROOT / "docs" / "screenshots").iterdir())
    assert sorted(set(re.findall(r'"(\w+\.png)"', source))) == there
