"""All that serves one model's requests: memory, queues, and the loop that works on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from epic_engine.attention.base import AttentionBackend, PrivateKV, SequenceRows
from epic_engine.compiler import Compiler
from epic_engine.config import EngineConfig
from epic_engine.contexts import CompileContext
from epic_engine.errors import OutOfPagesError
from epic_engine.linking.linker import Linker, LinkRequest
from epic_engine.memory.budget import available_memory, format_bytes, parse_memory
from epic_engine.memory.pages import PagePool
from epic_engine.memory.prefix_cache import PrefixCache
from epic_engine.memory.residency import Residency
from epic_engine.metrics import Metrics
from epic_engine.model.decoder import Decoder
from epic_engine.storage.payload import rounded
from epic_engine.storage.store import ChunkInfo, ChunkStore

from .cost import PassCost
from .decode_graphs import decode_graphs
from .jobs import LinkJob
from .loop import StepLoop
from .scheduler import Scheduler

__all__ = ["Serving"]

# Share of the free memory that is taken without being told: a GPU is seldom shared, a machine's memory always.
_SHARE = {"cuda": 0.8}
_OTHER_SHARE = 0.5
# Rows of the two passes that tell a new engine how fast it is.
_FIRST_ROWS = (8, 64)


class Serving:
    """Memory, queues and loop of one engine.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    config
        Settings.
    store
        Compiled chunks.
    compiler
        For chunks that are compiled again sooner than they are loaded.

    Attributes
    ----------
    pool, residency, prefixes
        Page memory; compiled chunks in it; exact KV of earlier prompts.
    loop, scheduler
        The thread that runs passes, and what it asks.
    metrics
        What was counted and timed.
    """

    def __init__(
        self, decoder: Decoder, backend: AttentionBackend, config: EngineConfig, store: ChunkStore, compiler: Compiler
    ) -> None:
        device, spec = decoder.device, decoder.spec
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        budget = parse_memory(config.memory, free, share=_SHARE.get(device.type, _OTHER_SHARE))
        self.metrics = Metrics()
        self.pool = PagePool(spec, budget, device, page_size=config.page_size)
        self.prefixes = PrefixCache(config.prefix_cache_bytes)
        graphs = decode_graphs(decoder, backend, config.max_running) if config.cuda_graphs else None
        self.loop = StepLoop(decoder, backend, self.metrics, config.stall_seconds, graphs)
        cost = PassCost(spec, sum(p.numel() for p in decoder.reference.parameters()))
        self.residency = Residency(
            self.pool,
            store,
            placement=config.chunk_placement,
            recompile=_recompiling(compiler, self.loop),
            token_seconds=lambda: cost.seconds(config.rows_per_step, 0) / config.rows_per_step,
        )
        linker = Linker(decoder, backend, self.pool, self.residency, self.prefixes, self.loop.run, config.rows_per_step)
        self.scheduler = Scheduler(
            linker,
            cost,
            self.metrics,
            step_seconds=config.step_seconds,
            background_seconds=spec.num_layers * config.step_seconds / 4,
            rows_per_step=config.rows_per_step,
            max_running=config.max_running,
        )
        self.loop.serve(self.scheduler, linker)
        self._orders = itertools.count()
        self._register_gauges()
        for rows in (min(n, decoder.max_model_len) for n in _FIRST_ROWS):
            batch = [SequenceRows(range(rows), PrivateKV(spec, rows, device), [])]
            self.loop.learn([i % spec.vocab_size for i in range(rows)], batch)

    def _register_gauges(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        gauge = self.metrics.register_gauge
        gauge("queue", "waiting", lambda: len(scheduler.waiting))
        gauge("queue", "linking", lambda: len(scheduler.linking))
        gauge("queue", "running", lambda: len(scheduler.running))
        gauge("memory", "pages", lambda: pool.stats()["pages"])
        gauge("memory", "private_bytes", lambda: pool.stats()["bytes"]["private"])
        gauge("memory", "chunk_bytes", lambda: pool.stats()["bytes"]["chunks"] + pool.stats()["bytes"]["mapped"])
        gauge("memory", "peak_bytes", lambda: pool.ledger.peak * pool.page_bytes)
        gauge("memory", "budget_bytes", lambda: pool.stats()["bytes"]["total"])
        gauge("memory", "prefix_bytes", lambda: self.prefixes.nbytes)
        gauge("memory", "residency", self.residency.stats)

    def job(self, request: LinkRequest, new: int) -> LinkJob:
        """Lay a job out for a prompt that ``new`` tokens will follow.

        Raises
        ------
        OutOfPagesError
            If it would wait for ever.
        """
        pages = self.pool.pages_for
        chunks = {s.key: len(s.token_ids) for s in request.segments if isinstance(s, ChunkInfo)}
        plain = sum(len(s) for s in request.segments if not isinstance(s, ChunkInfo))
        shared, own = sum(map(pages, chunks.values())), pages(plain + new)
        if shared + own > self.pool.total_pages:
            size = self.pool.page_bytes
            self.metrics.request_submitted()
            self.metrics.request_failed("rejected")
            raise OutOfPagesError(
                f"the request needs {format_bytes(shared * size)} for its chunks and at least "
                f"{format_bytes(own * size)} of its own, the budget is {format_bytes(self.pool.total_pages * size)}: "
                "give the engine more memory=, retrieve fewer chunks, or lower max_tokens."
            )
        return LinkJob(request, next(self._orders))

    def close(self) -> None:
        """End all requests and free the KV."""
        self.loop.close()
        self.prefixes.clear()
        self.residency.close()


def _recompiling(compiler: Compiler, loop: StepLoop) -> Callable[[ChunkInfo], Tensor]:
    def recompile(info: ChunkInfo) -> Tensor:
        where = CompileContext(info.context, info.context_ids) if info.context_ids else CompileContext("isolated")
        # As the store would give it: an answer must not depend on which was quicker.
        return rounded(compiler.compile([info.token_ids], where, loop.fill)[0], info.encoding)

    return recompile
