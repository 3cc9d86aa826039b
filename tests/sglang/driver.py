"""Runs a job's scenarios on one engine (engine.py writes the job and starts this).

$DRIVER_SPAWNS set: the engine's processes start as on a GPU, where each registers by itself.
"""

import inspect
import json
import os
import sys
import time
from pathlib import Path


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    steps, fault_file = Path(job["steps"]), Path(job["fault"])

    import sglang

    from . import scenarios

    if os.environ.get("DRIVER_SPAWNS"):
        from sgl_prefix_attn.patches import cpu_forked_processes

        cpu_forked_processes.hook = lambda result, server_args: None

    engine = sglang.Engine(**job["engine"])
    results = []
    for name, fault in job["scenarios"]:
        fault_file.write_text(fault)
        seen = _lines(steps)
        outputs = getattr(scenarios, name)(engine)
        if inspect.isawaitable(outputs):
            outputs = engine.loop.run_until_complete(outputs)
        _flush(engine)  # no scenario sees another's KV, nor what a fault left in it
        recorded = [json.loads(line) for line in steps.read_text().splitlines()[seen:]]
        results.append({"scenario": name, "fault": fault, "outputs": outputs, "steps": recorded})
    fault_file.write_text("")
    Path(job["results"]).write_text(json.dumps(results))
    engine.shutdown()


def _lines(path: Path) -> int:
    path.touch()
    return len(path.read_text().splitlines())


def _flush(engine) -> None:
    """Empty the radix cache; that works only on an idle scheduler, so no step is left over."""
    for _ in range(50):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("the scheduler did not become idle")


if __name__ == "__main__":
    main()
