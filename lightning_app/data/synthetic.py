"""placeholder"""

SEED = 1


def splits() -> dict[str, list[tuple[str, str]]]:
    return {
        s: [("Der Mann sieht %d ." % i, "The man sees %d .") for i in range(n)]
        for s, n in (("train", 300), ("valid", 50), ("test", 50))
    }
