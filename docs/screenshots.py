"""Make the pictures of a report and of TensorBoard in the documentation.

`python docs/screenshots.py` opens in a Chromium on the PATH the report of the published study
`joint_fine` and, as `ablate report --serve` shows it, the TensorBoard of `iwslt14_bleu`. It saves
`report.png` and `tensorboard.png` in `docs/screenshots`; `--only NAME` makes one of them, and
`--report FILE` opens a page that is there already. With `--journal FILE`, the Optuna journal of the
grid `demo_rates`, and `optuna-dashboard` on the PATH it saves `dashboard.png` too, the history of
an arm. A picture has at most 150 kB.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from lightning_app.cli import main as ablate

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "screenshots"
STUDIES = ROOT / "ablations" / "results"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LARGEST = 150_000  # bytes
WIDTH = 1200
PATIENCE = 240_000  # milliseconds
SETTLED = 10_000  # milliseconds in which charts are drawn


def save(png: bytes, name: str) -> None:
    """Save a picture with as many colours as its size allows."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in (256, 128, 64, 32, 16):
        file = io.BytesIO()
        picture.quantize(colours, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        if file.tell() <= LARGEST:
            break
    else:
        raise SystemExit(f"{name}: {file.tell():,} bytes with 16 colours, more than {LARGEST:,}")
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / name).write_bytes(file.getvalue())
    print(f"{PICTURES / name}: {file.tell():,} bytes, {colours} colours")


def open_page(browser: Browser, address: str) -> Page:
    page = browser.new_page(viewport={"width": WIDTH, "height": 1100}, color_scheme="light")
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    return page


def shoot_report(browser: Browser, page: Path | None, folder: Path) -> None:
    """Save the first screen of a report; without a page, of that of the study `joint_fine`."""
    if page is None:
        study = STUDIES / "joint_fine"
        if ablate(["report", str(study), "--experiments", str(folder)]) != 0:
            raise SystemExit(f"{study}: no report")
        page = folder / "joint_fine" / "report.html"
    save(open_page(browser, page.resolve().as_uri()).screenshot(), "report.png")


@contextmanager
def served(study: Path, folder: Path) -> Iterator[str]:
    """Serve the report and the TensorBoard of a study to this machine; yield TensorBoard's address.

    The server is ended with the context.
    """
    words = ["report", str(study), "--experiments", str(folder), "--serve", "--port", "0"]
    command = [sys.executable, "-m", "lightning_app", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if line.startswith("curves: "):
                yield line.split()[1]
                return
        raise SystemExit(f"{study}: no server")
    finally:
        server.terminate()
        server.wait()


def shoot_tensorboard(browser: Browser, folder: Path) -> None:
    """Save the first custom scalars: the loss of each variant, a curve for each warm-up.

    The charts below them stay empty: a published study has no losses of training.
    """
    with served(STUDIES / "iwslt14_bleu", folder) as address:
        page = open_page(browser, f"{address}#custom_scalars&_smoothingWeight=0")
        for chart in range(2):
            page.locator(".toggle-matches-button").nth(chart).click()  # opens the legend
        page.wait_for_timeout(SETTLED)
        filled = {"x": 0, "y": 0, "width": WIDTH, "height": 562}
        save(page.screenshot(clip=filled), "tensorboard.png")


def shoot_dashboard(browser: Browser, journal: Path) -> None:
    """Save the history of the third study of a journal: the second arm of its search."""
    command = ["optuna-dashboard", str(journal), "--host", "127.0.0.1", "--port", "8971"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        if not any(line.startswith("Listening") for line in server.stderr):
            raise SystemExit(f"{journal}: no server")
        page = open_page(browser, "http://127.0.0.1:8971/dashboard/studies/2")
        page.wait_for_timeout(SETTLED)
        history = {"x": 0, "y": 0, "width": WIDTH, "height": 645}
        save(page.screenshot(clip=history), "dashboard.png")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="a report.html that is there already")
    parser.add_argument("--journal", type=Path, help="the journal of the grid demo_rates")
    names = ["report", "tensorboard", "dashboard"]
    parser.add_argument("--only", choices=names, help="make this picture")
    args = parser.parse_args()
    found = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if found is None:
        raise SystemExit(f"none of {', '.join(CHROMIUM)} is on the PATH")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        # In a container there is no user namespace to shut the browser in.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        if args.only in (None, "report"):
            shoot_report(browser, args.report, Path(folder))
        if args.only in (None, "tensorboard"):
            shoot_tensorboard(browser, Path(folder))
        if args.only in (None, "dashboard") and args.journal is not None:
            shoot_dashboard(browser, args.journal)
        browser.close()


if __name__ == "__main__":
    main()
