"""Clients that speak HTTP by hand: they go away, stop reading, or send what no library would."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from epic_rag.server.run import GatewayServer
from tests.rag.stack import tokenizer
from tests.server.running import Running

__all__ = ["SmallBuffers", "chat_body", "connection", "post", "read_until", "sent", "wait_until"]

_SECONDS = 30.0


class SmallBuffers(GatewayServer):
    """A gateway whose connections take few bytes that nobody has read."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def wait_until(done: Callable[[], bool], seconds: float = _SECONDS) -> None:
    """Until something holds; fails if it does not come to."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


@contextmanager
def connection(gateway: Running, *, buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection to a gateway, closed at the end."""
    host, _, port = gateway.base_url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.settimeout(_SECONDS)
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect((host, int(port)))
        yield client


def post(path: str, *headers: str, length: int | None = None) -> bytes:
    """The head of a request; without a length its body is chunked."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", framing, *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def sent(client: socket.socket, path: str, body: dict[str, Any], *headers: str) -> None:
    """Send a whole request."""
    content = json.dumps(body).encode()
    client.sendall(post(path, *headers, length=len(content)) + content)


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    """What comes until some bytes have come, or the end."""
    found = b""
    while wanted not in found:
        piece = client.recv(65536)
        if not piece:
            break
        found += piece
    return found


def chat_body(**options: Any) -> dict[str, Any]:
    """A chat whose answer does not end by itself before its limit."""
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    return {
        "messages": [{"role": "user", "content": "Count the boats."}],
        "temperature": 0,
        "logit_bias": {str(end): -100},
        **options,
    }
