"""Draws noun phrases and clauses."""

import random
from collections.abc import Sequence
from typing import TypeVar

from lightning_app.data.synthetic import lexicon
from lightning_app.data.synthetic.morphology import (
    ACC,
    DAT,
    DER,
    DIES,
    EIN,
    ER,
    MIXED,
    NOM,
    PERSONAL,
    RELATIVE,
    STRONG,
    WEAK,
    WIR,
    Clause,
    Noun,
    Phrase,
    Tense,
    Words,
    three_cases,
    with_article,
    with_endings,
)
from lightning_app.data.synthetic.word_order import english_clause, german_final

T = TypeVar("T")
_COMPANY = [("mit", "with", DAT), ("ohne", "without", ACC), ("für", "for", ACC)]
_POSSESSIVES = [("mein", "my"), ("sein", "his"), ("ihr", "her"), ("unser", "our")]


class ClauseGrammar:
    """Draws noun phrases and clauses. The same seed gives the same on every platform and version.

    Only `Random.random` is used: its sequence is guaranteed, that of `choice` or `shuffle` is not.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._words = Words()
        self._relative_left = 0  # relative clauses that the sentence may still take

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    def _pick(self, choices: Sequence[T]) -> T:
        return choices[int(len(choices) * self._random())]

    def _word(self, choices: Sequence[T]) -> T:
        """Pick with a preference for the top of the table: density 1 / (2 sqrt(x))."""
        draw = self._random()
        return choices[int(len(choices) * draw * draw)]

    # Noun phrases

    def _phrase(
        self, kinds: str, *, negated: bool = False, definite: bool = False, plain: bool = False
    ) -> Phrase:
        """Draw a noun phrase of one of the kinds.

        Args:
            kinds: letters of the lexicon.
            negated: with kein.
            definite: nothing that a negation could not follow.
            plain: without a relative clause.
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
            subject: the subject, if it is given.
            tense: the tense, if it is given.
            adjuncts: factor on the probability of everything that could be left out.
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
        """Add a modal verb and what could be left out."""
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
