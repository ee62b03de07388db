"""Exact KV of earlier prompts in radix trees: the classic prefix cache, kept as the baseline to compare with.

Only KV that was computed behind its true prefix enters; linked KV never does. Tenants have trees of their own, so that
nobody can tell from the time of an answer what another one has asked; they share the budget.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from epic_engine.linking.layout import Body

__all__ = ["PrefixCache"]


@dataclass(eq=False)
class _Node:
    """A stretch of tokens behind its parent's; ``kv`` holds exactly these tokens."""

    token_ids: tuple[int, ...]
    kv: Tensor | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class PrefixCache:
    """A radix tree over token ids for each namespace, with one byte budget; the least recently used leaves go first.

    Parameters
    ----------
    budget
        Bytes of KV to keep; 0 keeps nothing.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._roots: dict[str, _Node] = {}
        self._clock = itertools.count(1)
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of KV held."""
        return self._bytes

    def _root(self, namespace: str) -> _Node:
        return self._roots.setdefault(namespace, _Node((), None, None))

    def longest(self, token_ids: Sequence[int], namespace: str = "default") -> list[tuple[tuple[int, ...], Body]]:
        """Consecutive pieces of the longest prefix of ``token_ids`` that a namespace has cached, with their KV."""
        with self._lock:
            ids = tuple(token_ids)
            pieces: list[tuple[tuple[int, ...], Body]] = []
            done, node = 0, self._root(namespace)
            while done < len(ids):
                child = node.children.get(ids[done])
                if child is None:
                    break
                same = _common(child.token_ids, ids[done:])
                child.used = next(self._clock)
                assert child.kv is not None
                body = Body(child.kv[:, :, :, :same], context_ids=ids[:done], rotation_base=done)
                pieces.append((ids[done : done + same], body))
                done += same
                if same < len(child.token_ids):
                    break
                node = child
            return pieces

    def insert(self, token_ids: Sequence[int], kv: Tensor, start: int, namespace: str = "default") -> None:
        """Keep the KV of a prompt's tail.

        Parameters
        ----------
        token_ids
            The whole prompt.
        kv
            ``(layers, 2, kv_heads, len(token_ids) - start, head_dim)``, keys rotated at their absolute places.
        start
            Tokens before ``kv``; they must be in the tree already (they came from :meth:`longest`), else the tail
            cannot be attached and is not kept.
        namespace
            Whose tree.
        """
        with self._lock:
            ids = tuple(token_ids)
            done, node = 0, self._root(namespace)
            while done < len(ids) and (child := node.children.get(ids[done])) is not None:
                same = _common(child.token_ids, ids[done:])
                if same < len(child.token_ids):
                    child = self._split(child, same)
                done += same
                child.used = next(self._clock)
                node = child
            if done < start or done == len(ids):
                return
            tail = kv[:, :, :, done - start :].clone()
            if tail.nbytes > self._budget:
                return
            node.children[ids[done]] = _Node(ids[done:], tail, node, used=next(self._clock))
            self._bytes += tail.nbytes
            self._evict()

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; returns the upper part."""
        assert node.parent is not None
        assert node.kv is not None
        upper = _Node(node.token_ids[:at], node.kv[:, :, :, :at].clone(), node.parent, used=node.used)
        node.parent.children[node.token_ids[0]] = upper
        upper.children[node.token_ids[at]] = node
        node.token_ids, node.kv, node.parent = node.token_ids[at:], node.kv[:, :, :, at:].clone(), upper
        return upper

    def _evict(self) -> None:
        while self._bytes > self._budget:
            leaves = [n for n in self._nodes() if not n.children]
            oldest = min(leaves, key=lambda n: n.used)
            assert oldest.parent is not None
            assert oldest.kv is not None
            del oldest.parent.children[oldest.token_ids[0]]
            self._bytes -= oldest.kv.nbytes

    def _nodes(self) -> list[_Node]:
        found, todo = [], [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._roots.clear()
            self._bytes = 0
