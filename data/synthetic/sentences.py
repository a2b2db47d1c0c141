"""A synchronous grammar: German and English sentences with the same meaning, without a download.

It has the difficulties of German-English word order: the finite verb in second place after several
kinds of first constituent, verbs at the end of subordinate and relative clauses, separable verbs,
the brackets of perfect, modal and future, agreement of articles, adjectives and pronouns in case,
gender and number, weak nouns, nicht and kein against do-support, dative verbs, two objects,
numbers. Every choice of words and structure is written to both sides at once.

`python -m data.synthetic.sentences` writes `lightning_app/data/synthetic.tsv.xz`, the corpus that
the package reads.
"""

import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from data.synthetic import lexicon
from data.synthetic.forms import (
    ACC,
    DAT,
    DER,
    DIES,
    EIN,
    ER,
    IT,
    MIXED,
    NOM,
    PERSONAL,
    RELATIVE,
    STRONG,
    WEAK,
    WHO,
    WIR,
    Clause,
    Noun,
    Phrase,
    Tense,
    Words,
    english_clause,
    finish_pair,
    german_final,
    german_middle,
    german_second,
    german_verb,
    may_stand_first,
    pronoun_of,
    three_cases,
    with_article,
    with_endings,
)

T = TypeVar("T")
_COMPANY = [("mit", "with", DAT), ("ohne", "without", ACC), ("für", "for", ACC)]
_POSSESSIVES = [("mein", "my"), ("sein", "his"), ("ihr", "her"), ("unser", "our")]


class ClauseGrammar:
    """Draws noun phrases and clauses, the same for a seed on every platform and version.

    Only `Random.random` is used: its sequence is guaranteed, those of `choice` and `shuffle` are
    not.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._words = Words()
        self._relative_left = 0  # relative clauses still allowed in the sentence

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    def _pick(self, choices: Sequence[T]) -> T:
        return choices[int(len(choices) * self._random())]

    def _word(self, choices: Sequence[T]) -> T:
        """Pick an entry, preferring the top of the table: density 1 / (2 sqrt(x))."""
        draw = self._random()
        return choices[int(len(choices) * draw * draw)]

    # Noun phrases

    def _phrase(
        self, kinds: str, *, negated: bool = False, definite: bool = False, plain: bool = False
    ) -> Phrase:
        """Draw a noun phrase of one of the kinds.

        Args:
            kinds: letters of the lexicon.
            negated: whether it has kein.
            definite: whether a negation must be able to follow it.
            plain: whether it has no relative clause.
        """
        kind = kinds[0] if self._chance(0.4) else self._pick(kinds)
        if kind == "P" and not negated:
            draw = self._random()
            if draw < 0.12:
                return self._word(self._words.names)
            if draw < 0.27:
                return self._word(PERSONAL)
        phrase = self._noun_phrase(
            self._word(self._words.nouns[kind]), negated=negated, definite=definite
        )
        if plain or negated or self._relative_left == 0 or not self._chance(0.2):
            return phrase
        self._relative_left -= 1
        german, english = self._relative(phrase)
        return phrase._replace(
            german=three_cases(f"{case} , {german} ," for case in phrase.german),
            english=(f"{phrase.english[0]} {english}", f"{phrase.english[1]} {english}"),
        )

    def _noun_phrase(
        self, noun: Noun, *, negated: bool = False, definite: bool = False, singular: bool = False
    ) -> Phrase:
        plural = not singular and self._chance(0.22)
        gender = "p" if plural else noun.gender
        adjectives = self._adjectives(noun.kind)
        plain = " ".join([*(word for _, word in adjectives), noun.english[plural]])
        subject, fixed = None, True
        draw = self._random()
        if negated:
            determiners, endings = with_endings("kein", EIN[gender]), MIXED[gender]
            subject, english = f"no {plain}", f"any {plain}" if plural else with_article(plain)
            fixed = False
        elif draw < 0.42:
            determiners, endings, english = DER[gender], WEAK[gender], f"the {plain}"
        elif draw < 0.62 and not definite:
            fixed = False
            if plural:
                determiners, endings, english = ("", "", ""), STRONG, plain
            else:
                determiners, endings = with_endings("ein", EIN[gender]), MIXED[gender]
                english = with_article(plain)
        elif draw < 0.78:
            german, word = self._word(_POSSESSIVES)
            determiners, endings = with_endings(german, EIN[gender]), MIXED[gender]
            english = f"{word} {plain}"
        elif draw < 0.9 or definite:
            determiners, endings = with_endings("dies", DIES[gender]), WEAK[gender]
            english = f"{'these' if plural else 'this'} {plain}"
        elif plural:
            german, word = self._word(self._words.numbers)
            determiners, endings, english = (german,) * 3, STRONG, f"{word} {plain}"
        else:
            determiners, endings = with_endings("jed", DIES[gender]), WEAK[gender]
            english = f"every {plain}"
        return Phrase(
            german=three_cases(
                " ".join([determiner, *(stem + ending for stem, _ in adjectives), form]).lstrip()
                for determiner, ending, form in zip(
                    determiners, endings, noun.german[plural], strict=True
                )
            ),
            english=(subject or english, english),
            form=WIR if plural else ER,
            gender=gender,
            natural=noun.natural,
            kind=noun.kind,
            negative=negated,
            fixed=fixed,
        )

    def _adjectives(self, kind: str) -> list[tuple[str, str]]:
        """Draw no, one or two adjectives: (German stem, English)."""
        drawn: list[tuple[str, str]] = []
        for probability in (0.38, 0.15):
            if not self._chance(probability):
                break
            stem, _, english = self._word(self._words.adjectives[kind])
            if (stem, english) not in drawn:
                drawn.append((stem, english))
        return drawn

    def _relative(self, head: Phrase) -> tuple[str, str]:
        """Draw a relative clause in which the head is the subject or an object."""
        german = RELATIVE[head.gender]
        who, whom = ("who", "whom") if head.kind == "P" else ("that", "that")
        draw = self._random()
        accusatives = self._words.transitive_for[head.kind]
        datives = self._words.dative_for.get(head.kind)
        if draw < 0.4 and accusatives:
            verb, case = self._word(accusatives), ACC
        elif draw < 0.6 and datives:
            verb, case = self._word(datives), DAT
        else:
            pronoun = head._replace(german=german, english=(who, whom), is_pronoun=True)
            clause = self._clause(subject=pronoun, adjuncts=0.3)
            return german_final(clause), english_clause(clause)
        subject = self._phrase(verb.subject, definite=True)
        clause = self._adjoin(Clause(subject, verb, self._tense()), 0.3)
        return f"{german[case]} {german_final(clause)}", f"{whom} {english_clause(clause)}"

    # Clauses

    def _tense(self) -> Tense:
        draw = self._random()
        if draw < 0.42:
            return "present"
        if draw < 0.72:
            return "past"
        return "modal" if draw < 0.87 else "future"

    def _clause(
        self, subject: Phrase | None = None, tense: Tense | None = None, adjuncts: float = 1.0
    ) -> Clause:
        """Draw a clause.

        Args:
            subject: the subject; None to draw one.
            tense: the tense; None to draw one.
            adjuncts: factor on the probability of everything optional.
        """
        tense = tense or self._tense()
        negated = self._chance(0.2 * adjuncts)
        draw = self._random()
        if draw < 0.14 or (subject is not None and subject.kind not in "PA"):
            return self._copula(subject, tense, negated, adjuncts)
        words = self._words
        if draw < 0.36:
            table = words.intransitive
        elif draw < 0.72:
            table = words.transitive
        else:
            table = words.dative if draw < 0.84 else words.ditransitive
        verb = self._word(table)
        while subject is not None and subject.kind not in verb.subject:
            verb = self._word(table)
        no_subject = negated and subject is None and self._chance(0.15)
        if subject is None:
            subject = self._phrase(verb.subject, negated=no_subject, definite=negated)
        kein = negated and not no_subject and self._chance(0.5)
        clause = Clause(subject, verb, tense, negated)
        if table is words.transitive:
            phrase = self._phrase(verb.object, negated=kein, definite=negated)
            clause = clause._replace(accusative=phrase)
        elif table is words.dative:
            phrase = self._phrase(verb.object, negated=kein, definite=negated)
            clause = clause._replace(dative=phrase)
        elif table is words.ditransitive:
            receiver = self._phrase("P", definite=negated, plain=True)
            kind = self._pick(verb.object)
            thing = self._phrase(kind, negated=kein, definite=negated)
            clause = clause._replace(dative=receiver, accusative=thing)
        return self._adjoin(clause, adjuncts)

    def _copula(
        self, subject: Phrase | None, tense: Tense, negated: bool, adjuncts: float
    ) -> Clause:
        if subject is None:
            subject = self._phrase("PATXF", definite=negated)
        if subject.kind == "P" and subject.form != WIR and self._chance(0.25):
            noun = self._word(self._words.nouns["P"])
            adjectives = self._adjectives("P")
            ein = "kein" if negated else "ein"
            german = [ein + EIN[noun.gender][NOM]]
            german += [stem + MIXED[noun.gender][NOM] for stem, _ in adjectives]
            english = with_article(" ".join([*(word for _, word in adjectives), noun.english[0]]))
            predicate = " ".join([*german, noun.german[0][NOM]]), english
        else:
            _, german, english = self._word(self._words.adjectives[subject.kind])
            predicate = german, english
            if self._chance(0.3 * adjuncts):
                degree = self._word(lexicon.DEGREES)
                predicate = f"{degree[0]} {german}", f"{degree[1]} {english}"
        clause = Clause(subject, None, tense, negated, predicate=predicate)
        if tense == "modal":
            clause = clause._replace(modal=int(len(lexicon.MODALS) * self._random()))
        if self._chance(0.25 * adjuncts):
            clause = clause._replace(time=self._word(self._words.times[tense]))
        return clause

    def _adjoin(self, clause: Clause, adjuncts: float) -> Clause:
        """Add a modal verb and optional parts."""
        modal = int(len(lexicon.MODALS) * self._random()) if clause.tense == "modal" else 0
        time = frequency = manner = company = place = None
        if self._chance(0.32 * adjuncts):
            time = self._word(self._words.times[clause.tense])
        elif not clause.negated and self._chance(0.14 * adjuncts):
            frequency = self._word(lexicon.FREQUENCIES)
        if self._chance(0.12 * adjuncts):
            manner = self._word(self._words.manners)
        if self._chance(0.1 * adjuncts):
            company = self._company()
        if self._chance(0.28 * adjuncts):
            place = self._place()
        return clause._replace(
            modal=modal,
            time=time,
            frequency=frequency,
            manner=manner,
            company=company,
            place=place,
        )

    def _company(self) -> tuple[str, str]:
        german, english, case = self._pick(_COMPANY)
        phrase = self._phrase("PA", plain=True, definite=True)
        return f"{german} {phrase.german[case]}", f"{english} {phrase.english[1]}"

    def _place(self) -> tuple[str, str]:
        noun = self._word(self._words.places)
        german, english = noun.prepositions
        if self._chance(0.25):
            german, english = self._pick(lexicon.NEARBY)
        phrase = self._noun_phrase(noun, definite=True)
        dative = phrase.german[DAT]
        if german in ("in", "an") and dative.startswith("dem "):
            german, dative = {"in": "im", "an": "am"}[german], dative.removeprefix("dem ")
        return f"{german} {dative}", f"{english} {phrase.english[1]}"


SEED = 1
COUNT = 31_000
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
        """Choose what comes first in German; in English only the time moves, too."""
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
        """Draw a subordinate clause that fits `main`, with its conjunction."""
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
        """A main clause and its purpose: um ... zu, in order to."""
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


def pairs() -> list[tuple[str, str]]:
    """Return all (German, English) pairs; no sentence of either language occurs twice."""
    grammar = Grammar(SEED)
    seen: tuple[set[str], set[str]] = set(), set()
    result: list[tuple[str, str]] = []
    while len(result) < COUNT:
        german, english = grammar.pair()
        if german in seen[0] or english in seen[1]:
            continue
        if german.count(" ") + 1 in LENGTHS and english.count(" ") + 1 in LENGTHS:
            seen[0].add(german)
            seen[1].add(english)
            result.append((german, english))
    return result


def text() -> bytes:
    """Return the content of the packaged file: one pair a line, with a tab in between."""
    return "".join(f"{german}\t{english}\n" for german, english in pairs()).encode()


if __name__ == "__main__":
    Path("lightning_app/data/synthetic.tsv.xz").write_bytes(lzma.compress(text(), preset=9))
