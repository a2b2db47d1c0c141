"""Make the picture of a report in the documentation.

`python docs/screenshots.py` writes the report of the published study `joint`, opens it in a
Chromium on the PATH, and saves `docs/screenshots/report.png`. `--report FILE` opens a page that is
there already. A picture has at most 150 kB.
"""

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from lightning_app.cli import main as ablate

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LARGEST = 150_000  # bytes
PATIENCE = 120_000  # milliseconds


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


def shoot(browser: Browser, page: Path, name: str) -> None:
    """Save the first screen of a page."""
    shown = browser.new_page(viewport={"width": 1200, "height": 1100}, color_scheme="light")
    shown.set_default_timeout(PATIENCE)
    shown.goto(page.resolve().as_uri())
    save(shown.screenshot(), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="a report.html that is there already")
    args = parser.parse_args()
    found = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if found is None:
        raise SystemExit(f"none of {', '.join(CHROMIUM)} is on the PATH")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        page = args.report
        if page is None:
            study = ROOT / "ablations" / "results" / "joint"
            if ablate(["report", str(study), "--experiments", folder]) != 0:
                raise SystemExit(f"{study}: no report")
            page = Path(folder) / "joint" / "report.html"
        # In a container there is no user namespace to shut the browser in.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        shoot(browser, page, "report.png")
        browser.close()


if __name__ == "__main__":
    main()
