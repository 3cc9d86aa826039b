"""SGLang's own `test_deterministic` against servers of deterministic inference, whose prompts are
stock or run plans, too, and against one that is not deterministic."""

import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from eval.engine_process import environment, make_site, plugin_names
from eval.server_process import ServerProcess
from eval.tiny_model import write_tiny_llama
from tests.gpu import test_engines as plain_engines

pytestmark = [*plain_engines.pytestmark, pytest.mark.long]

TRIALS = "50"
SERVER = (
    "--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--max-running-requests", "64",
    "--context-length", "8192", "--grammar-backend", "none", "--decode-attention-backend", "prefix",
)  # fmt: skip
DETERMINISTIC = "--enable-deterministic-inference"
STOCK_PROMPTS = ("--prefill-attention-backend", "fa3")
SERVERS = {
    "stock_prompts": ((DETERMINISTIC, *STOCK_PROMPTS), {}),
    "planned_prompts": (
        (DETERMINISTIC, "--prefill-attention-backend", "prefix", "--chunked-prefill-size", "2048"),
        {"PREFIX_ATTN_PREFILL": "1"},
    ),
    "usual": (STOCK_PROMPTS, {"PREFIX_ATTN_POLICY": "prefix"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # SGLang's test makes up token ids of up to 50000.
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"), hidden_size=512, intermediate_size=1024, head_dim=128,
        num_hidden_layers=4, vocab_size=51200, max_position_embeddings=8192,
    )  # fmt: skip


@pytest.fixture(scope="module", params=SERVERS)
def served(request, model, tmp_path_factory):
    """A server's kind, and what SGLang's test prints in a mode, by mode."""
    flags, variables = SERVERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    plugins = plugin_names(product=True, evaluation=False)
    site = make_site(folder / "site", None)
    env = environment(os.environ | variables, site, plugins, on_cpu=False)
    arguments = ["--model-path", str(model), *SERVER, *flags]
    with ServerProcess(arguments, log=folder / "log", env=env) as server:
        server.wait_until_healthy()

        def ask(mode):
            port = str(urlsplit(server.url).port)
            words = ["-m", "sglang.test.test_deterministic", "--port", port, "--test-mode", mode]
            told = subprocess.run(
                [sys.executable, *words, "--n-trials", TRIALS], env=env, cwd=folder, text=True,
                capture_output=True, timeout=600,
            )  # fmt: skip
            assert told.returncode == 0, told.stderr[-2000:]
            server.check_alive()
            return told.stdout

        yield request.param, ask


def distinct(told) -> list[int]:
    """How many outputs each prompt had."""
    return [int(count) for count in re.findall(r"Unique samples: (\d+)", told)]


@pytest.mark.parametrize(("mode", "prompts"), [("single", 1), ("prefix", 4)])
def test_each_prompt_has_one_output(served, mode, prompts):
    kind, ask = served
    found = distinct(ask(mode))
    assert len(found) == prompts
    if kind != "usual":  # which may be lucky
        assert found == prompts * [1]


def test_a_prompt_has_the_same_bits_behind_a_cached_prefix(served):
    kind, ask = served
    told = ask("radix_cache")
    assert "Comparison 2" in told
    if kind == "planned_prompts":
        assert "TEST PASSED" in told
        assert told.count("Logprob match:  ✓ YES") == 2, "generated, and behind a prefix"


def test_a_token_has_the_same_bits_in_a_prompt_and_generated(served):
    kind, ask = served
    told = ask("p_vs_d")
    same, others = told.count("Logprobs match:"), told.count("Logprobs mismatch")
    assert same + others == sum(range(1, int(TRIALS) + 1))
    if kind == "planned_prompts":
        assert others == 0
    if kind == "usual":
        assert others > 0
