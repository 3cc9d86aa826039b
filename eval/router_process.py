"""Servers of one backend, a GPU each, behind SGLang's router (the package sglang-router)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from eval.counters import Counters, total
from eval.server_process import ServerProcess, fetch

_REQUESTS = "sglang:num_requests_total"
POLICIES = ("cache_aware", "round_robin", "random", "power_of_two")


class RouterProcess(ServerProcess):
    """The router's process; what it says of counters, caches and logs is all servers' together.

    servers  healthy ones; they outlive the router
    policy   of POLICIES
    """

    module = "sglang_router.launch_router"

    def __init__(self, servers: Sequence[ServerProcess], policy: str, *, log: Path):
        urls = (server.url for server in servers)
        super().__init__(["--worker-urls", *urls, "--policy", policy], log=log)
        self._servers = servers

    def is_healthy(self) -> bool:
        """Tell whether it knows all servers."""
        found = json.loads(fetch(f"{self.url}/readiness"))
        return found["healthy_workers"] == len(self._servers)

    def check_alive(self, when: str = "while it was in use") -> None:
        super().check_alive(when)
        for server in self._servers:
            server.check_alive(when)

    def new_log(self) -> str:
        return "".join(server.new_log() for server in self._servers)

    def counters(self) -> Counters:
        sums: Counter = Counter()
        for server in self._servers:
            sums.update(server.counters())
        return dict(sums)

    def requests(self) -> list[int]:
        """Return how many requests each server has answered so far. Raises ServerError."""
        counted = (total(server.counters(), _REQUESTS) for server in self._servers)
        return [int(number) for number in counted]

    def flush_cache(self) -> None:
        for server in self._servers:
            server.flush_cache()
