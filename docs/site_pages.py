"""A hook of MkDocs: the site also shows pages that lie beside the folder `docs`.

The results log, the published studies, and the pages about corpora, costs and changes stay where a
reader of the repository looks for them. Here they become pages of the site under the same path.
Links are written for the repository, so that they also work there; this hook changes those that
cross the border of `docs` into links between pages of the site, which MkDocs then checks.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
OUTSIDE = (
    "ablations/*.md",
    "ablations/*.yaml",
    "ablations/base/*.yaml",
    "ablations/results/*/*.md",
    "ablations/results/*/*.csv",
    "ablations/results/*/*.svg",
    "benchmarks/README.md",
    "benchmarks/*.svg",
    "data/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
LINK = re.compile(r"(?<=\]\()[^)\s#:]+")
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
SIGNATURE = re.compile(r"(^::: .+\n(?: {4}.+\n)?)\n(?:> .+\n)+", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of `docs`."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site; drop the lines of `api_page.py`.

    A picture follows the colours that the reader has chosen on the site, not those of the browser.
    """
    source = page.file.src_uri
    assert page.file.abs_src_path is not None
    folder = Path(page.file.abs_src_path).parent.relative_to(ROOT).as_posix()

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        there = target.removeprefix(f"{DOCS}/")
        return posixpath.relpath(there, posixpath.dirname(source) or ".")

    markdown = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return LINK.sub(on_site, SIGNATURE.sub(r"\1", markdown))
