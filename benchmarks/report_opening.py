"""Measure how long a browser takes to open a report.

    python benchmarks/many_cells.py --seeds 4 --folder DIR     # 2,016 cells
    python benchmarks/report_opening.py DIR/experiments/NAME/report.html

Opens the page in headless Chromium, a new browser each time. Measures the time until its load
event, until the next frame is painted, and from there until "Explore the runs" is scrolled to and
drawn, in wall-clock seconds. Needs `pip install -e '.[test]'` and a Chromium on the PATH.
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

PAINTED = (
    "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
)


def main() -> None:
    """Print the size of the page, and the median and range of the seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    seconds: dict[str, list[float]] = {"loaded": [], "painted": [], "explorer": []}
    with sync_playwright() as playwright:
        for _ in range(args.rounds):
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(120_000)
            page.goto(args.report.absolute().as_uri())
            seconds["painted"].append(page.evaluate(PAINTED) / 1000)
            loaded = "performance.getEntriesByType('navigation')[0].loadEventEnd"
            seconds["loaded"].append(page.evaluate(loaded) / 1000)
            started = time.perf_counter()
            page.locator("#explore").scroll_into_view_if_needed()
            page.locator("#explore-curves .trace").first.wait_for()
            seconds["explorer"].append(time.perf_counter() - started)
            browser.close()
    print(f"{args.report}: {args.report.stat().st_size / 1e6:.1f} MB")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name}: {median:.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
