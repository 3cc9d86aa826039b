"""Several chats at once below one system prompt, over /v1/chat/completions. Prints the answers and
how many decode steps ran prefix kernels. The server is one of SmolLM2-135M-Instruct on this
machine, on its CPU if it has no GPU, or the one that --url names.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from eval import checkpoints
from eval.chat.conversation import QUESTIONS, ChatError, ask_all, steps_and_kv
from eval.checkpoints import SMOLLM2
from eval.counters import Counters, growth, parse_metrics
from eval.demo.server import demo_server
from eval.engine_process import end_on_sigterm
from eval.server_process import ServerError, fetch

BUILD = Path("build") / "chat"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.chat", description=__doc__)
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=40, help="of an answer (default: 40)")
    args = parser.parse_args(argv)
    end_on_sigterm()
    try:
        if args.url:
            chat(args.url.rstrip("/"), args.max_tokens)
            return 0
        model = checkpoints.model(SMOLLM2)
        print(f"starting SGLang with --attention-backend prefix (log in {BUILD}) ...")
        with demo_server(model, "prefix", gpu=torch.cuda.is_available(), workdir=BUILD) as server:
            print(f"  healthy after {server.wait_until_healthy():.0f} s at {server.url}")
            chat(server.url, args.max_tokens)
        return 0
    except ServerError as error:
        print(error.log_tail, file=sys.stderr)
        print(f"chat failed: {error}", file=sys.stderr)
    except (ChatError, checkpoints.ModelError) as error:
        print(f"chat failed: {error}", file=sys.stderr)
    return 1


def chat(url: str, max_tokens: int) -> None:
    before, start = _counters(url), time.monotonic()
    answers = ask_all(url, max_tokens)
    seconds = time.monotonic() - start
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"\n> {question}\n{answer}")
    print(f"\n{len(answers)} chats at once in {seconds:.1f} s, prefill included")
    after = _counters(url)
    if after is None:
        print(f"{url}/metrics is not served: start the server with --enable-metrics to see steps")
    else:
        print("\n".join(steps_and_kv(growth(before or {}, after))))


def _counters(url: str) -> Counters | None:
    try:
        return parse_metrics(fetch(f"{url}/metrics"))
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
