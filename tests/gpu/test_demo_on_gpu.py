"""What `make demo` runs on a machine with a GPU: SGLang's own defaults over HTTP, three servers."""

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.test_engines import pytestmark as needs_sglang

pytestmark = needs_sglang


def test_the_demo_on_this_gpu(tmp_path):
    output = tmp_path / "demo.json"
    command = [sys.executable, "-m", "eval.demo", "--output", str(output)]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(output.read_text())
    assert summary["device"] != "cpu" and summary["problems"] == []
    assert summary["prefix_steps"] > 0
    assert 0 < summary["kv_tokens_read"] <= summary["kv_tokens_query_centric"] / 2
