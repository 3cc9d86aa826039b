"""What `make demo` runs on a machine with a GPU: SGLang's own defaults over HTTP, three servers."""

import json

from tests.gpu.test_engines import pytestmark as needs_sglang
from tests.support.evaluation_process import run_evaluation

pytestmark = needs_sglang


def test_the_demo_on_this_gpu(tmp_path):
    output = tmp_path / "demo.json"
    result = run_evaluation("demo", "--output", str(output))
    print(result.stdout)
    assert result.returncode == 0
    summary = json.loads(output.read_text())
    assert summary["device"] != "cpu" and summary["problems"] == []
    assert summary["prefix_steps"] > 0
    assert 0 < summary["kv_tokens_read"] <= summary["kv_tokens_query_centric"] / 2
