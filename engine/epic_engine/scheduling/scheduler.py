"""What runs next, and who may hold memory. Knows no threads: the loop asks it, one call at a time."""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field

from epic_engine.errors import OutOfPagesError
from epic_engine.linking.linked import LinkedPrompt
from epic_engine.linking.linker import Linker
from epic_engine.linking.policies import Choice
from epic_engine.metrics import Metrics

from .cost import PassCost
from .generation import Generation
from .jobs import LinkJob

__all__ = ["Part", "Pass", "Scheduler"]

# A link is short beside one that takes eight times as long.
_SHORT_SHARE = 1 / 8
# Of the time that all waiting short links would take, this share may go into one pass: the more of them wait, the more
# share its fixed cost, and the less a little longer pass matters to each.
_BACKLOG_SHARE = 1 / 4
# How many times as long a pass in the background may be if it completes the links that joined the first: rows of two
# links together cost less than apart.
_JOINED = 2


@dataclass(frozen=True)
class Part:
    """Rows of one prompt in a pass: of a link, or the next token of a generation."""

    linked: LinkedPrompt
    ids: list[int]
    positions: list[int]
    job: LinkJob | None = None
    generation: Generation | None = None

    @property
    def owner(self) -> LinkJob | Generation:
        """Whose rows they are."""
        owner = self.job or self.generation
        assert owner is not None
        return owner

    @property
    def last(self) -> bool:
        """Whether the logits of its last row are wanted."""
        return self.job is None or self.job.computed + len(self.ids) == len(self.job.ids)

    @property
    def pairs(self) -> int:
        """(row, key) pairs of its attention."""
        return sum(self.positions) + len(self.positions)


@dataclass
class Pass:
    """One forward pass over the rows of many prompts."""

    parts: list[Part] = field(default_factory=list)
    rows: int = 0
    pairs: int = 0

    @property
    def decodes(self) -> bool:
        """Whether all of it is the next token of running generations."""
        return all(part.generation is not None for part in self.parts)

    def add(self, part: Part) -> None:
        """Take a part along."""
        self.parts.append(part)
        self.rows += len(part.ids)
        self.pairs += part.pairs


class Scheduler:
    """Queues of one engine.

    Jobs wait for memory in order of priority and arrival, then link; what they were for runs on, one token a pass.
    The head of the line is never overtaken, so a large request gets its turn. A generation that finds no page for its
    next token makes the one that came last give its pages back; that one is linked again, its own tokens included,
    when there is room.

    Parameters
    ----------
    linker
        Brings chunks to the device and lays prompts out.
    cost
        Predicts how long a pass takes.
    metrics
        Where preemptions are counted.
    step_seconds
        A pass that takes longer is run in the background of shorter ones.
    background_seconds
        Longest pass of one link; several may take twice as long together.
    rows_per_step
        Most rows a pass.
    max_running
        Most requests that hold memory at once.

    Attributes
    ----------
    short_seconds
        What counts as short now: ``step_seconds``, or more beside a link that takes much longer.
    waiting, linking, running
        Jobs without memory; jobs that are laid out or computed; generations, with the job that each came from.
    """

    def __init__(
        self,
        linker: Linker,
        cost: PassCost,
        metrics: Metrics,
        *,
        step_seconds: float,
        background_seconds: float,
        rows_per_step: int,
        max_running: int,
    ) -> None:
        self.waiting: list[LinkJob] = []
        self.linking: list[LinkJob] = []
        self.running: dict[Generation, LinkJob] = {}
        self._metrics = metrics
        self.cost = cost
        self.step_seconds = step_seconds
        self.short_seconds = step_seconds
        self._linker = linker
        self._background_seconds = background_seconds
        self._rows_per_step = rows_per_step
        self._max_running = max_running

    # -- coming and going --------------------------------------------------------------------------------------

    def add(self, job: LinkJob) -> None:
        """Put a job in line."""
        insort(self.waiting, job, key=lambda j: j.rank)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, now or later."""
        return not (self.waiting or self.linking or self.running)

    def sweep(self, now: float) -> None:
        """Let go of what has ended, is no longer wanted, or has run out of time."""
        for job in [*self.waiting, *self.linking]:
            if now >= job.deadline:
                for generation in job.generations:
                    generation.end("timeout")
        for generation, job in list(self.running.items()):
            if now >= job.deadline:
                generation.end("timeout")
            if generation.ended and not generation.in_pass:
                del self.running[generation]
                generation.release()
        for queue in (self.waiting, self.linking):
            gone = [job for job in queue if job.unwanted and not job.in_pass and not job.preparing]
            for job in gone:
                queue.remove(job)
                job.reset()
            for job in (*gone, *queue):
                for generation in job.generations:
                    if generation.ended:
                        generation.release()

    def admit(self) -> list[LinkJob]:
        """Give jobs their chunks, in order; returns those that are to be laid out."""
        admitted: list[LinkJob] = []
        if any(job.linked is not None and not job.reserved for job in self.linking):
            return admitted  # those who come first wait for memory: nobody takes it before them
        while self.waiting and len(self.linking) + len(self.running) < self._max_running:
            job = self.waiting[0]
            try:
                job.hold = self._linker.acquire(job.request)
            except OutOfPagesError as error:
                if self.linking or self.running or self._linker.loading:
                    break  # somebody will give memory back
                self.waiting.pop(0)
                job.fail(error)
                continue
            except Exception as error:
                self.waiting.pop(0)
                job.fail(error)
                continue
            self.waiting.pop(0)
            job.started = job.started or time.perf_counter()
            job.preparing = True
            self.linking.append(job)
            admitted.append(job)
        return admitted

    def prepared(self, job: LinkJob, linked: LinkedPrompt) -> None:
        """A job was laid out."""
        job.prepared(linked)

    def failed(self, job: LinkJob, error: BaseException) -> None:
        """A job cannot go on."""
        if job in self.linking:
            self.linking.remove(job)
        job.preparing = False
        job.fail(error)

    def linked(self, job: LinkJob) -> None:
        """A job's rows are computed: what it was for goes on."""
        self.linking.remove(job)
        assert job.linked is not None
        assert job.started is not None
        job.linked.appended_ids = list(job.tail)
        if job.done is not None:
            linked, job.linked = job.linked, None
            job.done(linked)
            return
        alive = [g for g in job.generations if not g.ended]
        for generation in job.generations:
            if generation.ended:
                generation.release()
        for index, generation in enumerate(alive):
            try:
                linked = job.linked if index == len(alive) - 1 else job.linked.fork()
            except OutOfPagesError:
                self._again(job, generation, job.choice)
                continue
            generation.start(linked, job.started - job.arrived)
            self.running[generation] = job
        if not alive:
            job.linked.close()
        job.linked = None

    # -- what runs next ----------------------------------------------------------------------------------------

    def foreground(self) -> Pass:
        """The next pass that others need not wait for: one token of every generation, and links that are short."""
        found = Pass()
        grown = [g for g in list(self.running) if g in self.running and not g.in_pass and self._grow(g)]
        for generation in grown:
            if generation in self.running:  # growing a later one may have taken its memory
                assert generation.linked is not None
                place = len(generation.linked)
                found.add(Part(generation.linked, generation.tokens[-1:], [place], generation=generation))
        links = [part for part in map(self._rest, self._ready()) if self._short(part)]
        backlog = sum(self.cost.seconds(len(part.ids), part.pairs) for part in links)
        within = min(max(self.short_seconds, backlog * _BACKLOG_SHARE), self._background_seconds)
        for number, part in enumerate(links):
            rows, pairs = found.rows + len(part.ids), found.pairs + part.pairs
            if number == 0 or self._fits(rows, pairs, within):
                found.add(part)
        return found

    @property
    def short_ready(self) -> bool:
        """Whether a short link waits for nothing but its pass."""
        return any(self._short(self._rest(job)) for job in self._ready())

    def background(self) -> Pass:
        """The next pass of long links: some that it completes, or a piece of one."""
        found = Pass()
        ready = [self._rest(job) for job in self._ready()]
        longest = max((self.cost.seconds(len(p.ids), p.pairs) for p in ready), default=0.0)
        self.short_seconds = max(self.step_seconds, longest * _SHORT_SHARE)
        for part in ready:
            assert part.job is not None
            if part.job.computed == 0 and self._short(part):
                continue  # it is served between the layers of the others
            most = self._background_seconds * (_JOINED if found.parts else 1)
            left = most - self.cost.seconds(found.rows, found.pairs)
            rows = min(self.cost.rows_within(left, part.positions[-1] + 1), self._rows_per_step - found.rows)
            if found.parts and (left <= 0 or rows < len(part.ids)):
                break
            rows = -(-len(part.ids) // -(-len(part.ids) // rows))  # pieces of one size: a small last one is dear
            found.add(Part(part.linked, part.ids[:rows], part.positions[:rows], job=part.job))
        if not found.parts:
            self.short_seconds = self.step_seconds
        return found

    def _short(self, part: Part) -> bool:
        return self._fits(len(part.ids), part.pairs, self.short_seconds)

    def _fits(self, rows: int, pairs: int, within: float) -> bool:
        return rows <= self._rows_per_step and self.cost.seconds(rows, pairs) <= within

    def _rest(self, job: LinkJob) -> Part:
        assert job.linked is not None
        return Part(job.linked, job.ids[job.computed :], job.positions[job.computed :], job=job)

    def _ready(self) -> list[LinkJob]:
        """Jobs with memory whose rows can be computed, the most urgent first.

        The shortest goes first, but time waited counts as if it were done: nobody waits for ever.
        """
        for job in sorted(self.linking, key=lambda j: j.rank):
            if job.linked is not None and not job.reserved:
                self._reserve(job)
        now = time.perf_counter()

        def urgency(job: LinkJob) -> tuple[int, float]:
            part = self._rest(job)
            return -job.priority, self.cost.seconds(len(part.ids), part.pairs) - (now - job.arrived)

        ready = [j for j in self.linking if j.reserved and not j.in_pass and not j.unwanted]
        return sorted(ready, key=urgency)

    # -- memory ------------------------------------------------------------------------------------------------

    def _reserve(self, job: LinkJob) -> None:
        """Get the pages for a job's rows; it waits if there are none and somebody will give some back."""
        while job.linked is not None:
            try:
                job.linked.private.reserve(len(job.ids) + job.room, job.expected)
                job.reserved = True
                return
            except OutOfPagesError as error:
                if self._trim():
                    continue
                others = any(j.reserved or j.preparing for j in self.linking if j is not job)
                if self.running or others or self._linker.loading:
                    return
                if not self._throw_back(job):
                    self.failed(job, error)

    def _trim(self) -> bool:
        """Give back pages that generations hold for tokens to come; whether there were any."""
        before = sum(g.linked.private.pages for g in self.running if g.linked is not None)
        for generation in self.running:
            if generation.linked is not None and not generation.in_pass:
                generation.linked.private.trim(1)  # an earlier one has its page for the pass that is being made
        return sum(g.linked.private.pages for g in self.running if g.linked is not None) < before

    def _throw_back(self, keep: LinkJob | None) -> bool:
        """Make the last of the linking jobs wait in line again; whether there was one."""
        others = [j for j in self.linking if j is not keep and not j.in_pass and not j.preparing]
        if not others:
            return False
        job = max(others, key=lambda j: j.rank)
        self.linking.remove(job)
        job.reset()
        self.add(job)
        return True

    def _grow(self, generation: Generation) -> bool:
        """Get the page for a generation's next token; whether it still runs."""
        while True:
            assert generation.linked is not None
            try:
                generation.linked.private.reserve(1)
                return True
            except OutOfPagesError as error:
                if self._trim():
                    continue
                others = [g for g in self.running if not g.in_pass]
                last = max(others, key=lambda g: self.running[g].rank)
                if len(self.running) > 1:
                    self._preempt(last)
                    if last is generation:
                        return False
                elif not self._throw_back(None):
                    if self._linker.loading or any(j.in_pass or j.preparing for j in self.linking):
                        return False  # its turn comes when they have ended
                    del self.running[generation]
                    generation.fail(error)
                    generation.release()
                    return False

    def _preempt(self, generation: Generation) -> None:
        """Take a generation's memory; it waits in line to be linked again."""
        origin = self.running.pop(generation)
        assert generation.linked is not None
        choice = generation.linked.choice
        generation.linked.close()
        generation.linked = None
        self._metrics.preempted()
        self._again(origin, generation, choice)

    def _again(self, origin: LinkJob, generation: Generation, choice: Choice | None) -> None:
        """Put a generation in line to be linked again, with the tokens that it has."""
        job = LinkJob(origin.request, origin.order, origin.priority, origin.deadline, [generation])
        job.tail, job.choice = tuple(generation.tokens), choice
        job.expected = origin.expected - len(generation.tokens)
        job.arrived, job.started = origin.arrived, origin.started
        self.add(job)
