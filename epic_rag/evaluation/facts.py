"""Facts of one form with different values, as templated records hold them: prices, passcodes, contacts, hours."""

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
_PEOPLE = (
    *("Ines", "Olaf", "Priya", "Tomas", "Edda", "Marcus", "Yuki", "Fatima", "Henrik", "Clara"),
    *("Diego", "Nadia", "Ivan", "Rosa", "Samuel", "Lena", "Oscar", "Greta", "Victor", "Anita"),
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
        "price",
        "The {place} hotel costs {value} euros a night.",
        "How much does the {place} hotel cost a night?",
        lambda rng: str(rng.randrange(41, 400)),
    ),
    FactForm(
        "contact",
        "The contact for the {place} branch is {value}.",
        "Who is the contact for the {place} branch?",
        lambda rng: rng.choice(_PEOPLE),
    ),
    FactForm(
        "hours",
        "The opening time of the {place} museum is {value}.",
        "What is the opening time of the {place} museum?",
        lambda rng: f"{rng.randrange(6, 12)}:{rng.randrange(5, 60, 5):02d}",
    ),
    FactForm(
        "name",
        "The owner of the {place} shop is {value}.",
        "Who is the owner of the {place} shop?",
        lambda rng: rng.choice(_PEOPLE),
    ),
)
"""All forms. Values are short and stand close to what they belong to: wordier sentences, such as "the cat of the
train station in Porto is called Domino", are beyond a model of a hundred million parameters even without any linking.
"""
