"""The page in a real browser: it works offline, on a phone, in the dark, and for everybody."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lightning_app.report.headline import answer
from lightning_app.report.limits import SHOWN, limits
from lightning_app.report.results import read_results
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import DEMO, PRESET, RATE, SEED, WARMUP, FakeGrid, typical, write_report

pytestmark = pytest.mark.xdist_group("browser")  # what they share is made once

AXES = {SEED: [1, 2], PRESET: ["post_ln", "pre_ln", "sas"], WARMUP: [0, 60], RATE: [0.001, 0.004]}
SECTIONS = ["need", "cost", "inside", "run", "appendix"]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
SLOW = 30_000  # milliseconds until a page of a busy machine is drawn
LOOKS = [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip("there is no Chromium on the PATH")
    with sync_playwright() as playwright:
        # In a container there is no user namespace to shut the browser in.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(FakeGrid(tmp_path_factory.mktemp("browser") / "demo", typical, AXES).folder)


def opened(browser: Browser, report: Path, width: int = 1440, scheme: Any = "light") -> Page:
    """The page, with a list of everything that a reader should not meet as `page.trouble`."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(SLOW)
    expect.set_options(timeout=SLOW)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url))
    page.goto(report.as_uri())
    assert trouble == [report.as_uri()]
    trouble.clear()
    page.__dict__["trouble"] = trouble
    return page


@pytest.fixture(scope="module")
def one_rate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(FakeGrid(tmp_path_factory.mktemp("one") / "demo", typical, DEMO).folder)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("grid", ["report", "one_rate"])
def test_the_first_screen_answers(browser: Browser, grid: str, scheme: str, request) -> None:
    written = request.getfixturevalue(grid)
    page, results = opened(browser, written, 1440, scheme), read_results(written.parent)
    claim, figure = page.locator("h1"), page.locator("#figure-1 svg:visible")
    assert claim.inner_text() == answer(results, sensitivity_scores(results))
    for shown in (claim, figure):
        box = shown.bounding_box()
        assert box is not None
        assert 0 <= box["y"] < box["y"] + box["height"] <= 900
        assert box["width"] > 600
    assert page.locator("aside li:visible").count() == SHOWN
    page.locator("aside summary").click()
    assert page.locator("aside li:visible").count() == len(limits(results)) > SHOWN
    assert page.__dict__["trouble"] == []


def test_a_reader_unfolds_the_sections(browser: Browser, report: Path) -> None:
    page = opened(browser, report)
    bodies = [page.locator(f"#{name} > :nth-child(2)") for name in SECTIONS]
    for body in bodies:
        expect(body).to_be_hidden()
    page.emulate_media(media="print")
    for body in bodies:
        expect(body).to_be_visible()
    page.emulate_media(media="screen")
    for name, body in zip(SECTIONS, bodies, strict=True):
        page.locator(f"#{name} > summary").click()
        expect(body).to_be_visible()
    expect(page.locator('#appendix a[href="recompute_study.py"]')).to_be_visible()
    assert page.__dict__["trouble"] == []


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_nothing_sticks_out_and_everybody_can_read_it(browser, report: Path, width, scheme) -> None:
    page = opened(browser, report, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page, options={"runOnly": RULES})
    violations = found.response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in violations] == []
    assert len(found.response["passes"]) > 10
    assert page.__dict__["trouble"] == []
