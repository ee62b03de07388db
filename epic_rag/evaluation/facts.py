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


FORMS = (
    FactForm(
        "passcode",
        "The passcode of the {place} office is {value}.",
        "What is the passcode of the {place} office?",
        lambda rng: str(rng.randrange(1000, 10000)),
    ),
    FactForm(
        "code",
        "The code for {place} is {value}.",
        "What is the code for {place}?",
        lambda rng: str(rng.randrange(1000, 10000)),
    ),
    FactForm(
        "price",
        "The price for {place} is {value}.",
        "What is the price for {place}?",
        lambda rng: str(rng.randrange(1000, 10000)),
    ),
    FactForm(
        "room",
        "The meeting in {place} is in room {value}.",
        "In which room is the meeting in {place}?",
        lambda rng: str(rng.randrange(100, 1000)),
    ),
    FactForm(
        "contact",
        "The contact number for {place} is {value}.",
        "What is the contact number for {place}?",
        lambda rng: str(rng.randrange(1000, 10000)),
    ),
)
"""All forms. Values are short and stand close to what they belong to: wordier sentences, such as "the cat of the
train station in Porto is called Domino" or "the {place} hotel costs {value} euros a night", are beyond a model of a
hundred million parameters even without any linking, and so are names of people.
"""
