"""Runs scenarios on one engine: python -m tests.sglang.driver JOB.json (see engine.py)."""

import json
import sys
import time
from pathlib import Path


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    steps, fault_file = Path(job["steps"]), Path(job["fault"])

    import sglang

    from tests.sglang import scenarios

    engine = sglang.Engine(**job["engine"])
    results = []
    for name, fault in job["scenarios"]:
        fault_file.write_text(fault)
        seen = _lines(steps)
        outputs = engine.loop.run_until_complete(scenarios.ALL[name](engine))
        engine.flush_cache()  # returns when the scheduler is idle: the last step is recorded
        recorded = [json.loads(line) for line in steps.read_text().splitlines()[seen:]]
        results.append({"scenario": name, "fault": fault, "outputs": outputs, "steps": recorded})
    fault_file.write_text("")
    Path(job["results"]).write_text(json.dumps(results))
    engine.shutdown()


def _lines(path: Path) -> int:
    time.sleep(0.2)  # with overlap scheduling one more step may follow the last output
    path.touch()
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    main()
