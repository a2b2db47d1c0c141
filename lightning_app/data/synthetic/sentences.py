"""A synchronous grammar: German and English sentences with the same meaning, without a download.

It has what makes German-English word order hard: the finite verb in second place after several
kinds of first constituent, verbs at the end of subordinate and relative clauses, separable verbs,
the brackets of perfect, modal and future, agreement of articles, adjectives and pronouns in case,
gender and number, weak nouns, nicht and kein against do-support, dative verbs, two objects,
numbers. Every choice of words and structure is written to both sides at once.
"""

from functools import cache

from lightning_app.data.synthetic import lexicon
from lightning_app.data.synthetic.clauses import ClauseGrammar
from lightning_app.data.synthetic.morphology import IT, WHO, Clause, Tense, pronoun_of
from lightning_app.data.synthetic.word_order import (
    english_clause,
    finish_pair,
    german_final,
    german_middle,
    german_second,
    german_verb,
    may_stand_first,
)

SEED = 1
SIZES = {"train": 30_000, "valid": 500, "test": 500}
LENGTHS = range(4, 26)  # tokens of a side, punctuation included
_QUESTION_WORDS = {
    "reason": ("warum", "why"),
    "time": ("wann", "when"),
    "place": ("wo", "where"),
    "frequency": ("wie oft", "how often"),
}


class Grammar(ClauseGrammar):
    """Draws sentence pairs. The same seed gives the same pairs on every platform and version."""

    def pair(self) -> tuple[str, str]:
        """Draw a sentence in German and English, tokens separated by spaces."""
        self._relative_left = 1
        draw = self._random()
        if draw < 0.42:
            german, english = self._statement(self._clause())
        elif draw < 0.56:
            german, english = self._subordinate_last()
        elif draw < 0.67:
            german, english = self._subordinate_first()
        elif draw < 0.76:
            german, english = self._report()
        elif draw < 0.84:
            german, english = self._coordinated()
        elif draw < 0.88:
            german, english = self._purpose()
        else:
            return finish_pair(*self._question(), mark="?")
        return finish_pair(german, english, mark=".")

    def _statement(self, clause: Clause) -> tuple[str, str]:
        """Choose what comes first in German; only the time moves in English as well."""
        first = "subject"
        draw = self._random()
        shown = clause.accusative or clause.dative
        if draw < 0.26 and clause.time is not None:
            return german_second(clause, "time"), english_clause(clause, time_first=True)
        if draw < 0.26 and clause.frequency in lexicon.FREQUENCIES[:2]:
            first = "frequency"
        elif draw < 0.42 and clause.place is not None:
            first = "place"
        elif 0.42 <= draw < 0.52 and shown is not None and may_stand_first(clause):
            first = "object"
        return german_second(clause, first), english_clause(clause)

    def _subordinate(self, main: Clause) -> tuple[str, str]:
        """Draw a subordinate clause that goes with `main`, with its conjunction."""
        tense: Tense = "past" if main.tense == "past" else "present"
        german, english = self._word(lexicon.SUBORDINATORS)
        if german == "wenn" and tense == "past":
            german = "als"
        if self._chance(0.05):
            clause = Clause(IT, self._word(self._words.weather), tense)
        else:
            subject = pronoun_of(main.subject) if self._chance(0.4) else None
            clause = self._clause(subject, tense, adjuncts=0.5)
        return f"{german} {german_final(clause)}", f"{english} {english_clause(clause)}"

    def _subordinate_last(self) -> tuple[str, str]:
        main = self._clause(adjuncts=0.6)
        german, english = self._statement(main)
        subordinate = self._subordinate(main)
        return f"{german} , {subordinate[0]}", f"{english} {subordinate[1]}"

    def _subordinate_first(self) -> tuple[str, str]:
        main = self._clause(adjuncts=0.6)
        german, english = self._subordinate(main)
        return f"{german} , {german_second(main, '')}", f"{english} , {english_clause(main)}"

    def _report(self) -> tuple[str, str]:
        verb = self._word(self._words.reporting)
        tense: Tense = "present" if self._chance(0.6) else "past"
        main = Clause(self._phrase("P", plain=True), verb, tense)
        clause = self._clause(pronoun_of(main.subject) if self._chance(0.25) else None)
        german, english = german_second(main, "subject"), english_clause(main)
        return f"{german} , dass {german_final(clause)}", f"{english} that {english_clause(clause)}"

    def _coordinated(self) -> tuple[str, str]:
        one = self._clause(adjuncts=0.6)
        two = self._clause(pronoun_of(one.subject) if self._chance(0.4) else None, adjuncts=0.6)
        conjunction = self._word(lexicon.COORDINATORS)
        left, right = self._statement(one), self._statement(two)
        return f"{left[0]} {conjunction[0]} {right[0]}", f"{left[1]} {conjunction[1]} {right[1]}"

    def _purpose(self) -> tuple[str, str]:
        """A main clause and what it is done for: um ... zu, in order to."""
        main = self._clause(self._phrase("P"), adjuncts=0.5)
        words = self._words
        verb = self._word(words.transitive if self._chance(0.7) else words.dative)
        purpose = Clause(main.subject, verb, "present")
        phrase = self._phrase(verb.object)
        if verb in words.dative:
            purpose = purpose._replace(dative=phrase)
        else:
            purpose = purpose._replace(accusative=phrase)
        german, english = self._statement(main)
        middle = " ".join(german_middle(purpose, "subject"))
        return (
            f"{german} , um {middle} {verb.zu()}",
            f"{english} in order to {verb.english[0]} {phrase.english[1]}",
        )

    def _question(self) -> tuple[str, str]:
        draw = self._random()
        if draw < 0.45:
            clause = self._clause(adjuncts=0.8)
            finite, rest, _ = german_verb(clause)
            german = " ".join([finite, *german_middle(clause), *rest])
            return german, english_clause(clause, question=True)
        if draw < 0.72:
            asked = self._pick(list(_QUESTION_WORDS))
            clause = self._clause(adjuncts=0.7)._replace(frequency=None)
            if asked != "reason":
                clause = clause._replace(**{asked: None})
            german, english = _QUESTION_WORDS[asked]
            return (
                f"{german} {german_second(clause, '')}",
                f"{english} {english_clause(clause, question=True)}",
            )
        if draw < 0.86:
            clause = self._clause(WHO)
            return german_second(clause, "subject"), english_clause(clause)
        return self._object_question()

    def _object_question(self) -> tuple[str, str]:
        clause = self._clause()
        while clause.accusative is None and clause.dative is None:
            clause = self._clause()
        if clause.accusative is None:
            clause, words = clause._replace(dative=None), ("wem", "whom")
        elif clause.accusative.kind in "PA":
            clause, words = clause._replace(accusative=None), ("wen", "whom")
        else:
            clause, words = clause._replace(accusative=None), ("was", "what")
        german, english = german_second(clause, ""), english_clause(clause, question=True)
        return f"{words[0]} {german}", f"{words[1]} {english}"


@cache
def splits(seed: int = SEED) -> dict[str, list[tuple[str, str]]]:
    """Return (German, English) pairs by split; no sentence of either language occurs twice."""
    grammar = Grammar(seed)
    seen: tuple[set[str], set[str]] = set(), set()
    pairs: list[tuple[str, str]] = []
    while len(pairs) < sum(SIZES.values()):
        german, english = grammar.pair()
        if german in seen[0] or english in seen[1]:
            continue
        if german.count(" ") + 1 in LENGTHS and english.count(" ") + 1 in LENGTHS:
            seen[0].add(german)
            seen[1].add(english)
            pairs.append((german, english))
    result = {}
    for split, size in SIZES.items():
        result[split], pairs = pairs[:size], pairs[size:]
    return result
