"""Make the pictures of a report and of TensorBoard in the documentation.

`python docs/screenshots.py` writes the report of the published study `joint`, opens it in a
Chromium on the PATH, and saves `docs/screenshots/report.png`. `--report FILE` opens a page that is
there already. `--tensorboard FOLDER` also starts TensorBoard on the folder of a grid that has run,
on this machine alone, and saves `docs/screenshots/tensorboard.png`. A picture has at most 150 kB.
"""

import argparse
import io
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from lightning_app.cli import main as ablate

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
HOST = "127.0.0.1"
LARGEST = 150_000  # bytes
PATIENCE = 120  # seconds until TensorBoard answers


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


def shoot(browser: Browser, address: str, name: str, height: int, settle: float) -> None:
    """Save the first screen of a page, `settle` seconds after it has loaded."""
    page = browser.new_page(viewport={"width": 1200, "height": height}, color_scheme="light")
    page.goto(address, timeout=PATIENCE * 1000)
    page.wait_for_timeout(settle * 1000)
    save(page.screenshot(timeout=PATIENCE * 1000), name)
    page.close()


def wait_for(address: str) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            urlopen(address).close()
            return
        except (URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(1)


def shoot_tensorboard(browser: Browser, folder: Path) -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    board = subprocess.Popen([*command, "--host", HOST, "--port", str(port)])
    try:
        address = f"http://{HOST}:{port}/"
        wait_for(address)
        shoot(browser, f"{address}#timeseries", "tensorboard.png", 800, settle=20)
    finally:
        board.terminate()
        board.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="a report.html that is there already")
    parser.add_argument("--tensorboard", type=Path, help="the folder of a grid that has run")
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
        shoot(browser, page.resolve().as_uri(), "report.png", 1100, settle=1)
        if args.tensorboard is not None:
            shoot_tensorboard(browser, args.tensorboard)
        browser.close()


if __name__ == "__main__":
    main()
