"""`ablate probe --theory`: measure statements of papers about fresh models on our blocks.

These are lemmas 1-3 and theorem 1 of Xiong et al. 2020 (2002.04745) in their setting, the collapse
of tokens without a skip around attention, and their figure 3 with our models, next to the numbers
of another implementation with the same initial values, and with lone decoders. It takes about two
minutes on one core.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from lightning_app.core.files import write_whole, writing_in
from lightning_app.lab.theory.figures import write_theory_figures
from lightning_app.lab.theory.lemmas import (
    POST,
    PRE,
    Skipless,
    TheorySetting,
    collapse,
    draw_all,
    extension,
    lemma_1,
    lemma_2,
    lemma_3,
    rank_collapse,
    statements_table,
    statements_to_csv,
    theorem_1,
    theorem_1_by_width,
)
from lightning_app.lab.theory.models import (
    FINGERPRINTS,
    NOTE,
    ZipfCorpus,
    decoder_alone,
    figure_3,
    gather_prints,
    prints_table,
    prints_to_csv,
    without_mask,
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums do not depend on the number of cores; restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def run_theory(out: Path) -> int:
    """Measure every statement, write tables and figures into `out`, and print the results.

    Writes `theory.csv`, `fingerprints.csv` and `theory_*.svg`. Returns 1 if a required statement
    does not hold, else 0. Raises `UserError` if `out` cannot be written.
    """
    with writing_in(out):  # checked before the measurements
        out.mkdir(parents=True, exist_ok=True)
    console = Console(file=getattr(sys.stdout, "stream", None), highlight=False)
    setting, corpus = TheorySetting(), ZipfCorpus()
    console.print("lemmas and theorem 1 ...")
    draws = draw_all(setting)
    statements = [*lemma_1(setting), *lemma_2(draws), *lemma_3(draws), *theorem_1(draws)]
    statements += [*theorem_1_by_width(setting), *extension(draws)]
    console.print("attention without a skip ...")
    cosines = collapse(Skipless())
    statements += rank_collapse(cosines)
    console.print("gradients of fresh models, 6-6 to 14-14 ...")
    prints = gather_prints(corpus, 3, FINGERPRINTS)
    statements += figure_3(prints)
    console.print("gradients of fresh decoder-only models, 6 to 14 layers ...")
    alone = gather_prints(corpus, 3, (POST, PRE), "decoder")
    statements += decoder_alone(prints, alone, without_mask(corpus, 3))

    write_whole(out / "theory.csv", statements_to_csv(statements))
    write_whole(out / "fingerprints.csv", prints_to_csv(prints, alone))
    figures = write_theory_figures(out, draws, cosines, prints, alone)
    console.print(statements_table(statements))
    console.print("expected gradient of W2 by layer at initialisation, 6-6, d = 512")
    console.print(prints_table(prints))
    console.print(NOTE)
    for path in (out / "theory.csv", out / "fingerprints.csv", *figures):
        console.print(str(path), soft_wrap=True)
    broken = [one.claim for one in statements if one.promised and not one.holds]
    for claim in broken:
        console.print(f"does not hold: {claim}", style="red", soft_wrap=True)
    return 1 if broken else 0
