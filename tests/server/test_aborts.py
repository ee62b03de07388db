"""Clients that leave or do not read: nothing of them stays. Two hundred of them are in ``tests/soak/gateway.py``."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from tests.server.aborting import abort, held, open_files
from tests.server.running import running
from tests.server.sockets import chat_body, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_TOLERANCE = 24 << 20


def test_forty_clients_that_leave_cost_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        asyncio.run(abort(gateway.base_url, 20, seed=1))  # threads start, and caches fill, once
        wait_until(lambda: gateway.app.state.admission.running == 0)
        gateway.check_idle()
        time.sleep(0.5)  # connections are closed soon after
        before = held()
        asyncio.run(abort(gateway.base_url, 40, seed=2))
        wait_until(lambda: gateway.app.state.admission.running == 0)
        gateway.check_idle()
        wait_until(lambda: open_files() <= before.files)
        after = held()
        assert after.threads == before.threads
        assert after.files <= before.files
        assert after.tasks <= before.tasks
        assert after.resident - before.resident < _TOLERANCE
        stats = gateway.engine.stats()
        assert stats["requests"]["active"] == 0
        assert stats["requests"]["outcomes"]["cancelled"] > 20  # they did leave in the middle
        assert stats["requests"]["outcomes"]["failed"] == 0
        with gateway.client() as client:
            assert client.post("/v1/chat/completions", json=chat_body(max_tokens=3)).is_success
