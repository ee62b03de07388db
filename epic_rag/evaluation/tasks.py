"""Small tasks to be learned from examples: a word goes in, a word comes out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """A task by its examples.

    Attributes
    ----------
    name
        For breakdowns.
    question
        With ``{word}`` for the word that goes in.
    pairs
        All examples; first words are unique.
    """

    name: str
    question: str
    pairs: tuple[tuple[str, str], ...]

    def show(self, word: str, answer: str) -> str:
        """One example with its answer."""
        return f"Question: {self.ask(word)}\nAnswer: {answer}"

    def ask(self, word: str) -> str:
        """The question about one word."""
        return self.question.format(word=word)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    given, wanted = zip(*(pair.split("=") for pair in text.split()), strict=True)
    return tuple(zip(given, wanted, strict=True))


def _labelled(**words: str) -> tuple[tuple[str, str], ...]:
    return tuple((word, label) for label, names in words.items() for word in names.split())


TASKS = (
    Task(
        "kind",
        "Is {word} a fruit, an animal, a tool or furniture?",
        _labelled(
            fruit="apple pear plum cherry peach banana lemon grape melon mango",
            animal="horse tiger rabbit sheep monkey wolf camel donkey goat lion",
            tool="hammer saw drill chisel wrench pliers axe spade rake file",
            furniture="chair table sofa desk bed shelf wardrobe bench stool cupboard",
        ),
    ),
    Task(
        "capital",
        "What is the capital of {word}?",
        _pairs(
            "France=Paris Italy=Rome Spain=Madrid Portugal=Lisbon Norway=Oslo Ireland=Dublin Austria=Vienna "
            "Greece=Athens Germany=Berlin Poland=Warsaw Hungary=Budapest Sweden=Stockholm Finland=Helsinki "
            "Denmark=Copenhagen Belgium=Brussels Japan=Tokyo China=Beijing Egypt=Cairo Kenya=Nairobi Cuba=Havana "
            "Peru=Lima Chile=Santiago Canada=Ottawa Russia=Moscow Turkey=Ankara Iran=Tehran Iraq=Baghdad "
            "Thailand=Bangkok Vietnam=Hanoi Australia=Canberra"
        ),
    ),
    Task(
        "opposite",
        "What is the opposite of {word}?",
        _pairs(
            "hot=cold big=small tall=short fast=slow old=young light=dark hard=soft wet=dry full=empty rich=poor "
            "happy=sad early=late near=far high=low open=closed strong=weak thick=thin clean=dirty loud=quiet "
            "up=down left=right day=night first=last true=false win=lose buy=sell push=pull begin=end love=hate "
            "always=never"
        ),
    ),
    Task(
        "past",
        "What is the past tense of {word}?",
        _pairs(
            "go=went see=saw eat=ate take=took give=gave come=came run=ran write=wrote drive=drove speak=spoke "
            "break=broke choose=chose fall=fell fly=flew forget=forgot grow=grew know=knew ride=rode rise=rose "
            "sing=sang swim=swam throw=threw wear=wore begin=began drink=drank buy=bought bring=brought "
            "catch=caught teach=taught think=thought"
        ),
    ),
)
"""All tasks."""
