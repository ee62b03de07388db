"""Segments in this process's memory: one map each, made anew when the file has grown."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from torch import Tensor

from .catalogue import Place
from .layout import Layout
from .schema import SEGMENT
from .segments import map_file

__all__ = ["SegmentMaps"]

_MOST_MAPS = 256


class SegmentMaps:
    """Bytes of payloads, mapped. A map lives for as long as tensors are on it, whatever becomes of the file.

    Parameters
    ----------
    layout
        The store's files.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._maps: OrderedDict[int, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def whole(self, place: Place) -> Tensor:
        """The bytes of a segment, uint8, at least up to the end of a chunk's payload.

        Raises
        ------
        ValueError
            If the file ends before that.
        FileNotFoundError
            If there is no such file.
        OSError
            If it cannot be read.
        """
        path = self._layout.file(place.name, place.kind)
        end = place.offset + place.stored
        # Memory beyond the end of a file kills whoever reads it, so a file that was cut since must be noticed.
        if os.stat(path).st_size < end:
            raise ValueError("its file is too short")
        with self._lock:
            found = self._maps.get(place.segment)
        if found is None or len(found) < end:
            found = map_file(path)
            if len(found) < end:
                raise ValueError("its file is too short")
        if place.kind == SEGMENT:
            with self._lock:
                self._maps[place.segment] = found
                self._maps.move_to_end(place.segment)
                while len(self._maps) > _MOST_MAPS:
                    self._maps.popitem(last=False)
        return found

    def payload(self, place: Place) -> Tensor:
        """A chunk's stored bytes; raises as :meth:`whole`."""
        return self.whole(place)[place.offset : place.offset + place.stored]

    def forget(self, idents: set[int]) -> None:
        """Hold no map of these segments any more, so that the disk gets their bytes back."""
        with self._lock:
            for ident in idents:
                self._maps.pop(ident, None)

    def held(self) -> set[int]:
        """Numbers of the segments that are mapped."""
        with self._lock:
            return set(self._maps)
