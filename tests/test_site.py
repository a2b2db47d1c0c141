"""The documentation as a site: it builds without a warning, and opens without a network."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from lightning_app.blocks.presets import PRESETS
from tests.pages import DOCS, ROOT
from tests.warm import run

pytestmark = pytest.mark.xdist_group("site")  # it is built once

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LARGEST = 150_000  # bytes of a picture
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. `--strict` makes a warning an error, such as a link that leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser loads to show a page: addresses of pictures, styles, scripts, fonts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        names = ["src", "srcset", "data", "poster"]
        if tag == "link" and given.get("rel") != "canonical":
            names.append("href")
        self.addresses += [str(given[name]) for name in names if given.get(name)]


def test_every_page_is_there_and_loads_what_is_there_and_of_no_other_host(site: Path) -> None:
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix(".html").as_posix().replace("README", "index")
        assert (site / name).is_file(), name
    for outside in ("ablations", "ablations/results/joint", "benchmarks", "data"):
        assert (site / outside / "index.html").is_file(), outside
    assert [path.parent.name for path in site.rglob("*.py")] == ["recipes"]
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 25
    for page in pages:
        for address in Loaded(page.read_text("utf-8")).addresses:
            assert not re.match(r"(\w+:)?//", address), (page.name, address)
            # The links of 404.html are absolute, as it is shown at any address.
            if page.name != "404.html" and not address.startswith("data:"):
                assert (page.parent / re.split(r"[?#]", address)[0]).exists(), (page.name, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text("utf-8"))


@pytest.mark.slow
def test_a_browser_asks_no_other_host(site: Path) -> None:
    """Also not from a script, as some plug-ins of the theme do."""
    found = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if found is None:
        pytest.skip("there is no Chromium on the PATH")
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index.html", "blocks/index.html", "api.html"):
            page.goto((site / name).as_uri())
            page.wait_for_timeout(1000)
        browser.close()
    assert len(asked) > 3
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []


def test_the_pages_show_equations_drawings_and_docstrings(site: Path) -> None:
    blocks = (site / "blocks" / "index.html").read_text("utf-8")
    for name in PRESETS:
        assert f'src="{name}.svg"' in blocks
    api = (site / "api.html").read_text("utf-8")
    for said in ("ResidualSpec", "norm_branch", "UserError"):
        assert said in api
    assert "<blockquote>" not in api


def test_the_page_of_the_api_has_the_signatures_of_today() -> None:
    """`python docs/api_page.py` writes them, also over those of yesterday."""
    page = (DOCS / "api.md").read_text("utf-8")
    written = runpy.run_path(str(DOCS / "api_page.py"))["written"]
    assert page.count("\n\n> `") == page.count("\n::: ") >= 40
    assert written(page) == page
    assert written(page.replace("> `fit(config, ", "> `fit(file, ")) == page


def test_the_pictures_are_small() -> None:
    pictures = list((DOCS / "screenshots").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size <= LARGEST, picture.name


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one(notebook: Path) -> None:
    content = json.loads(notebook.read_text("utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    for cell in content["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
    compile(code_of(notebook), notebook.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, cache: str) -> None:
    """Its last cell asserts what it has shown."""
    script = tmp_path / "notebook.py"
    script.write_text(code_of(notebook), encoding="utf-8")
    environment = {**os.environ, "LIGHTNING_APP_CACHE": cache}
    done = run([str(script)], folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
