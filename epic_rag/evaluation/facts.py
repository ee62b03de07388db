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
_PETS = (
    *("Biscuit", "Pepper", "Shadow", "Ginger", "Mittens", "Tiger", "Oliver", "Smokey", "Pumpkin", "Cookie"),
    *("Snowball", "Marble", "Whiskers", "Cinnamon", "Muffin", "Domino", "Waffles", "Peanut", "Toffee", "Nutmeg"),
)
_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "brown", "pink", "grey", "silver", "golden")


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
        "A night at the hotel in {place} costs {value} euros.",
        "How many euros does a night at the hotel in {place} cost?",
        lambda rng: str(rng.randrange(41, 400)),
    ),
    FactForm(
        "contact",
        "The person to call at the {place} branch is {value}.",
        "Who is the person to call at the {place} branch?",
        lambda rng: rng.choice(_PEOPLE),
    ),
    FactForm(
        "hours",
        "The museum in {place} opens at {value} in the morning.",
        "At what time does the museum in {place} open?",
        lambda rng: f"{rng.randrange(6, 12)}:{rng.randrange(5, 60, 5):02d}",
    ),
    FactForm(
        "name",
        "The cat of the train station in {place} is called {value}.",
        "What is the cat of the train station in {place} called?",
        lambda rng: rng.choice(_PETS),
    ),
    FactForm(
        "colour",
        "The door of the library in {place} is painted {value}.",
        "What colour is the door of the library in {place}?",
        lambda rng: rng.choice(_COLOURS),
    ),
)
"""All forms; short values in plain sentences, so that a model of a hundred million parameters can read them."""
