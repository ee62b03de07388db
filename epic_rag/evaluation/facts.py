"""Facts of one form with different values, as templated records hold them: prices, passcodes, rooms, contacts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

__all__ = ["CITIES", "FORMS", "Fact", "FactForm"]

CITIES = (
    *("Lisbon", "Oslo", "Dublin", "Prague", "Vienna", "Madrid", "Athens", "Zurich", "Hamburg", "Naples"),
    *("Porto", "Lyon", "Bergen", "Cork", "Seville", "Turin", "Krakow", "Utrecht", "Geneva", "Malaga"),
    *("Boston", "Denver", "Dallas", "Seattle", "Austin", "Toronto", "Sydney", "Osaka", "Cairo", "Nairobi"),
)


@dataclass(frozen=True)
class Fact:
    """A sentence, the question that it answers, and the answer."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class FactForm:
    """A sentence form: only the place and the value differ between its facts.

    Attributes
    ----------
    name
        For breakdowns.
    sentence, question
        With ``{place}`` and, in the sentence, ``{value}``.
    draw
        Draws a value.
    """

    name: str
    sentence: str
    question: str
    draw: Callable[[random.Random], str]

    def facts(self, rng: random.Random, count: int, taken: Collection[str]) -> list[Fact]:
        """Facts about different places with different values, none of which is among the words ``taken``."""
        values: list[str] = []
        while len(values) < count:
            value = self.draw(rng)
            if value not in values and value.lower() not in taken:
                values.append(value)
        places = rng.sample(CITIES, count)
        return [
            Fact(self.sentence.format(place=place, value=value), self.question.format(place=place), value)
            for place, value in zip(places, values, strict=True)
        ]


def _three_digits(rng: random.Random) -> str:
    return str(rng.randrange(100, 1000))


FORMS = (
    FactForm("room", "The {place} team is in room {value}.", "In which room is the {place} team?", _three_digits),
    FactForm(
        "passcode",
        "The passcode of the {place} team is {value}.",
        "What is the passcode of the {place} team?",
        _three_digits,
    ),
    FactForm(
        "price", "The {place} ticket costs {value} dollars.", "How much does the {place} ticket cost?", _three_digits
    ),
    FactForm(
        "contact",
        "The {place} team has phone extension {value}.",
        "Which phone extension does the {place} team have?",
        _three_digits,
    ),
    FactForm("bus", "The {place} bus is number {value}.", "Which number is the {place} bus?", _three_digits),
)
"""All forms. Values are short and stand close to what they belong to, for a model of a hundred million parameters must
be able to read them off without any linking. SmolLM2-135M reads at least half of these; of labels ("Oslo code: 4821")
an eighth, and neither names of people nor wordier sentences.
"""
