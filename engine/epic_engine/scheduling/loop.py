"""The step loop: one thread that runs every forward pass of an engine."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor

from epic_engine.attention.base import AttentionBackend, SequenceRows
from epic_engine.contention import ContentionWatch
from epic_engine.errors import EngineClosedError
from epic_engine.linking.linker import Linker
from epic_engine.metrics import Metrics
from epic_engine.model.decoder import AttentionStep, Decoder
from epic_engine.workers import do_without_workers, give_workers_back

from .cost import PassCost
from .decode_graphs import DecodeGraphs
from .jobs import LinkJob
from .scheduler import Part, Pass, Scheduler

__all__ = ["StepLoop"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Threads that lay prompts out; each mostly waits for a first pass that the loop runs.
_PREPARERS = 8
# What a long pass has of the time that short links take meanwhile.
_LONG_SHARE = 0.25
# While everybody waits: for memory, for a prompt to be laid out, for a deadline.
_POLL_SECONDS = 0.01


# A thread inside torch while the interpreter goes down would bring the process down with it.
_loops: weakref.WeakSet[StepLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for loop in list(_loops):
        loop.close()


class _AbandonedError(Exception):
    """Ends a pass that nobody wants any more."""


class _Yielding:
    """Attention of a long pass; others have their turn between its layers."""

    def __init__(self, inner: AttentionStep, turn: Callable[[], None]) -> None:
        self._inner = inner
        self._turn = turn

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """As :class:`~epic_engine.model.decoder.AttentionStep`."""
        self._turn()
        return self._inner.attend(layer, q, k, v, scaling, options)


class _Call:
    """Work for the loop's thread that is not a request's: compiling, first passes, scoring."""

    def __init__(self, work: Callable[[], object], seconds: float) -> None:
        self.work = work
        self.seconds = seconds
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.work())
            except BaseException as error:
                self.future.set_exception(error)


class StepLoop:
    """Runs passes: of requests, batched by the scheduler, and of whoever calls.

    A long pass does not stall the others: between two of its layers the loop serves what is short.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    metrics
        Where passes are counted.
    stall_seconds
        Longest pause of running generations during a long pass.
    graphs
        Captured decoding steps; None: there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        metrics: Metrics,
        stall_seconds: float = 1.0,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._metrics = metrics
        self._stall_seconds = stall_seconds
        self._graphs = graphs
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: deque[_Call] = deque()
        self._closing = False
        self._idle = True
        self._thread: threading.Thread | None = None
        self._watch = ContentionWatch()
        self._preparers = ThreadPoolExecutor(_PREPARERS, "epic-link", do_without_workers)
        self._nested = False
        self._served_seconds = 0.0
        self._served_at = 0.0
        self._away = 0.0
        self._long: Pass | None = None
        self._scheduler: Scheduler
        self._linker: Linker
        self._first_passes: PassCost
        _loops.add(self)

    def serve(self, scheduler: Scheduler, linker: Linker) -> None:
        """Take the queues to work on; once, before anything else."""
        self._scheduler, self._linker = scheduler, linker
        # They read much and compute little, and look at what they read: what they cost says nothing of other passes.
        self._first_passes = scheduler.cost.fresh()

    # -- from any thread ---------------------------------------------------------------------------------------

    def submit(self, job: LinkJob) -> None:
        """Put a job in line.

        Raises
        ------
        EngineClosedError
            If the loop has ended.
        """
        self._post(lambda: self._scheduler.add(job))
        give_workers_back()

    def notice(self) -> None:
        """Look at the queues soon: somebody has left."""
        with contextlib.suppress(EngineClosedError):
            self._post(lambda: None)

    def call(self, work: Callable[[], Result], seconds: float = 0.0) -> Result:
        """Run something on the loop's thread and wait for it.

        Parameters
        ----------
        work
            What to run; its result or error comes back.
        seconds
            How long it will take; what is long waits for what is short.
        """
        if threading.current_thread() is self._thread:
            return work()
        call = _Call(work, seconds)
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._idle = False
            self._start()
            self._changed.notify_all()
        give_workers_back()
        result: Result = call.future.result()
        return result

    def run(self, ids: Sequence[int], positions: Sequence[int], step: AttentionStep) -> None:
        """Run rows through the model with a given step, for what the step keeps."""
        pairs = sum(positions) + len(positions)
        seconds = self._first_passes.seconds(len(ids), pairs)

        def work() -> None:
            begin, away = time.perf_counter(), self._away
            try:
                self._decoder.run(ids, positions, self._polite(step, seconds))
            finally:  # a step that has seen enough ends the pass by raising
                spent = time.perf_counter() - begin - (self._away - away)
                self._first_passes.observe(len(ids), pairs, spent)
                self._metrics.step(spent, 0, 0, 0, other_rows=len(ids))

        self.call(work, seconds)

    def forward(self, ids: Sequence[int], batch: Sequence[SequenceRows], last: int) -> Tensor:
        """Run rows of sequences; the logits of the last rows, ``(last, vocab)`` (nothing for ``last=0``)."""
        positions = [p for rows in batch for p in rows.positions]
        # Each row reads at least the keys of its own sequence.
        seconds = self._scheduler.cost.seconds(len(ids), sum(positions) + len(positions))

        def work() -> Tensor:
            begin = time.perf_counter()
            plan = self._backend.plan(batch)
            step = self._polite(plan, seconds)
            logits = torch.empty(0)
            if last:
                logits = self._decoder.logits(ids, positions, step, last)
            else:
                self._decoder.run(ids, positions, step)
            plan.commit()
            self._metrics.step(time.perf_counter() - begin, 0, 0, 0, other_rows=len(ids))
            return logits

        return self.call(work, seconds)

    def fill(self, ids: Sequence[int], batch: Sequence[SequenceRows]) -> None:
        """Run rows of sequences for their KV alone."""
        self.forward(ids, batch, 0)

    def learn(self, ids: Sequence[int], batch: Sequence[SequenceRows]) -> None:
        """Run rows to find out how long it takes."""
        pairs = len(ids) * (len(ids) + 1) // 2
        begin = time.perf_counter()
        self.fill(ids, batch)
        self._scheduler.cost.observe(len(ids), pairs, time.perf_counter() - begin)

    def drain(self) -> None:
        """Return once there is nothing left to do."""
        with self._changed:
            while not self._idle:
                self._changed.wait()

    def stop(self) -> None:
        """End soon: requests fail with :class:`~epic_engine.errors.EngineClosedError`. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._preparers.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """As :meth:`stop`, and wait for it. Closing twice is fine."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosedError("this engine was closed: make a new one.")

    def _post(self, message: Callable[[], None]) -> None:
        with self._changed:
            self._check_open()
            self._inbox.append(message)
            self._idle = False
            self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._main, name="epic-loop", daemon=True)
            self._thread.start()

    # -- in the loop's thread ----------------------------------------------------------------------------------

    def _main(self) -> None:
        self._watch.resume()
        while True:
            try:
                worked = self._turn()
            except Exception as error:
                logger.exception("the step loop failed; its requests end, it goes on")
                self._fail_all(error)
                worked = True
            with self._changed:
                if self._closing:
                    break
                if worked or self._inbox or self._calls:
                    continue
                if self._scheduler.idle:
                    self._idle = True
                    self._changed.notify_all()
                    self._watch.pause()
                    give_workers_back()
                    self._changed.wait()
                    self._watch.resume()
                else:
                    self._changed.wait(_POLL_SECONDS)
        self._end()

    def _end(self) -> None:
        self._watch.close()
        error = EngineClosedError("this engine was closed while the request ran: make a new one.")
        while self._inbox:
            self._inbox.popleft()()
        self._fail_all(error)
        with self._changed:
            while self._calls:
                self._calls.popleft().future.set_exception(error)
            self._idle = True
            self._changed.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        for job in [*self._scheduler.waiting, *self._scheduler.linking]:
            self._scheduler.failed(job, error)
        for generation in self._scheduler.running:
            generation.fail(error)
            generation.release()
        for queue in (self._scheduler.waiting, self._scheduler.linking, self._scheduler.running):
            queue.clear()

    def _turn(self) -> bool:
        """One pass or call; whether there was one."""
        self._keep_house()
        call = self._next_call()
        if call is not None:
            call.run()
        work = self._scheduler.background()
        if not work.parts:
            work = self._scheduler.foreground()
            self._served_at = time.perf_counter()
        if work.parts:
            self._run(work)
        return call is not None or bool(work.parts)

    def _keep_house(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._scheduler.sweep(time.perf_counter())
        for job in self._scheduler.admit():
            self._prepare(job)

    def _next_call(self, within: float = float("inf")) -> _Call | None:
        with self._changed:
            for call in self._calls:
                if call.seconds <= within:
                    self._calls.remove(call)
                    return call
        return None

    def _prepare(self, job: LinkJob) -> None:
        hold = job.hold
        assert hold is not None

        def report(future: Future[Any]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            with contextlib.suppress(EngineClosedError):
                if error is not None:
                    self._post(lambda: self._scheduler.failed(job, error))
                else:
                    self._post(lambda: self._scheduler.prepared(job, future.result()))

        with contextlib.suppress(RuntimeError):  # closing
            self._preparers.submit(self._linker.prepare, job.request, hold, job.choice).add_done_callback(report)

    def _polite(self, step: AttentionStep, seconds: float) -> AttentionStep:
        if self._nested or seconds <= self._scheduler.step_seconds:
            return step
        return _Yielding(step, self._between_layers)

    def _between_layers(self) -> None:
        """In a long pass: serve what is short at once, and running generations after a while.

        A generation's token costs nearly as much for one as for many, so a link that lets many begin together serves
        them better than tokens one by one; but nobody's text stands still for longer than ``stall_seconds``.
        """
        if self._nested:
            return
        now = time.perf_counter()
        self._nested = True
        worked = False
        try:
            self._keep_house()
            scheduler = self._scheduler
            call = self._next_call(within=scheduler.short_seconds)
            waited = now - self._served_at
            # Many short ones must not starve the long one either: it has a part of the time, whatever comes.
            urgent = call is not None or (scheduler.short_ready and waited >= self._served_seconds * _LONG_SHARE)
            if call is not None:
                call.run()
            if urgent or (scheduler.running and waited >= max(self._stall_seconds, self._served_seconds)):
                work = scheduler.foreground()
                if work.parts:
                    self._run(work)
                worked = call is not None or bool(work.parts)
        finally:
            self._nested = False
        if worked:
            self._served_at = time.perf_counter()
            self._served_seconds = self._served_at - now
        self._away += time.perf_counter() - now
        if self._closing or (self._long is not None and all(p.owner.unwanted for p in self._long.parts)):
            raise _AbandonedError

    def _run(self, work: Pass) -> None:
        """Run a pass and hand its logits out; an error is its requests' alone."""
        begin, away = time.perf_counter(), self._away
        for part in work.parts:
            part.owner.in_pass = True
        if not self._nested:
            self._long = work
        try:
            logits = self._forward(work)
        except _AbandonedError:
            return
        except Exception as error:
            for part in work.parts:
                self._lost(part, error)
            return
        finally:
            for part in work.parts:
                part.owner.in_pass = False
            if not self._nested:
                self._long = None
        seconds = time.perf_counter() - begin - (self._away - away)
        self._scheduler.cost.observe(work.rows, work.pairs, seconds)
        link = sum(len(part.ids) for part in work.parts if part.job is not None)
        self._metrics.step(seconds, link, work.rows - link, len(work.parts))
        for part in work.parts:
            try:
                self._deliver(part, *(next(logits) if part.last else (None, None)))
            except Exception as error:
                self._lost(part, error)
        self._scheduler.sweep(time.perf_counter())

    def _forward(self, work: Pass) -> Iterator[tuple[Tensor, int | None]]:
        """Logits ``(vocab,)`` of each part that wants them, and the most likely token where that was cheap to find."""
        batch = [part.linked.rows(part.positions) for part in work.parts]
        ids = [token for part in work.parts for token in part.ids]
        if self._graphs is not None and work.decodes:
            captured = self._graphs.run(ids, batch)
            if captured is not None:
                return self._arrived(captured)
        plan = self._backend.plan(batch)
        positions = [place for part in work.parts for place in part.positions]
        step = self._polite(plan, self._scheduler.cost.seconds(work.rows, work.pairs))
        ends = accumulate(len(part.ids) for part in work.parts)
        wanted = [end - 1 for part, end in zip(work.parts, ends, strict=True) if part.last]
        if wanted:
            logits = self._decoder.logits(ids, positions, step, wanted)
        else:
            self._decoder.run(ids, positions, step)
            logits = torch.empty(0)
        plan.commit()
        return self._arrived(logits)

    def _arrived(self, logits: Tensor) -> Iterator[tuple[Tensor, int | None]]:
        """Logits once they are there: a GPU's passes have only begun when they return."""
        device = self._decoder.device
        if device.type != "cuda":
            return zip(logits, repeat(None))
        if not len(logits):
            torch.cuda.current_stream(device).synchronize()
        # One answer for all: fetching the logits of each would wait as often, for half a megabyte a request.
        return zip(logits, logits.argmax(dim=-1).tolist() if len(logits) else [], strict=True)

    def _deliver(self, part: Part, logits: Tensor | None, best: int | None) -> None:
        job, generation = part.job, part.generation
        if job is not None:
            job.computed += len(part.ids)
            if logits is None:
                return
            assert job.started is not None
            part.linked.logits = logits[None]
            part.linked.link_seconds = time.perf_counter() - job.started - part.linked.load_seconds
            self._linker.linked(job.request, part.linked)
            self._scheduler.linked(job)
        else:
            part.linked.appended_ids += part.ids
        assert logits is not None
        for waiting in job.generations if job is not None else [generation]:
            if waiting in self._scheduler.running:
                try:
                    waiting.accept(logits, best)
                except Exception as error:
                    waiting.fail(error)

    def _lost(self, part: Part, error: Exception) -> None:
        if part.job is not None:
            self._scheduler.failed(part.job, error)
        if part.generation is not None:
            part.generation.fail(error)
