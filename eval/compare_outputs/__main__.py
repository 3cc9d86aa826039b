"""python -m eval.compare_outputs: are greedy outputs with `prefix` as good as the stock ones?

Engines with seeded weights of realistic scale answer the same requests. The tested backend's
difference from the reference is judged by the difference of two correct backends on the same
requests; worse than that noise ends with exit status 1, as it must under every --fault. Exit status
2: the comparison itself could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.compare_outputs import entropy, faults, judge, scenarios
from eval.engine_process import EngineError, EngineProcess, backend_arguments, end_on_sigterm
from eval.model_shapes import SHAPES
from eval.tiny_model import write_tiny_llama

_SEED = 1234
_VOCAB = 32768  # the layers have the shape's size, the embedding need not
_ENTROPY_LENGTH = 512


def main(argv: list[str]) -> int:
    args = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect(
        "eval.compare_outputs", argv, seed=_SEED, model_shape=args.model_shape, layers=args.layers
    )
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="compare-outputs-") as folder:
        try:
            model = _write_model(Path(folder) / "model", args)
            length = _ENTROPY_LENGTH // args.scale
            entropies = entropy.attention_entropy(model, length, args.device)
            print(entropy.describe(entropies, length), flush=True)
            for page_size in args.page_sizes:
                home = Path(folder) / f"page-{page_size}"
                rows += _compare_at(page_size, model, home, args)
        except EngineError as error:
            print(f"no comparison: {error}", file=sys.stderr)
            return 2
    if args.json:
        provenance.save(args.json, meta, rows, attention_entropy=entropies, fault=args.fault)
    problems = [row for row in rows if row["problems"]]
    print("worse than noise" if problems else "within the noise of two correct backends")
    return 1 if problems else 0


def _compare_at(page_size: int, model: Path, home: Path, args) -> list[dict]:
    """Rows of one page size, a scenario each."""
    requests = {
        name: scenarios.build(name, _vocab(args), args.new_tokens, args.scale)
        for name in args.scenarios
    }
    outputs, tested = {}, args.tested
    fault_log = home / "fault.log"
    for label, names in (("reference", [args.reference]), ("noise", args.noise), (tested, None)):
        if label == "noise" and args.noise == [args.reference]:
            outputs["noise"] = outputs["reference"]
            continue
        fault = args.fault if label == tested else None
        outputs[label] = _first_that_starts(
            names or [tested], page_size, model, home / label, args, requests, fault, fault_log
        )
    if args.fault and not faults.times_planted(fault_log):
        raise EngineError(f"the fault {args.fault} was never planted")
    noise_here = {
        name: judge.differ(outputs["reference"][name], outputs["noise"][name]) for name in requests
    }
    noise = judge.noise_of(list(noise_here.values()))
    rows = []
    for name in requests:
        difference = judge.differ(outputs["reference"][name], outputs[tested][name])
        problems = judge.verdict(difference, noise, noise_here[name])
        rows.append(
            {
                "scenario": name,
                "page_size": page_size,
                "tested": difference.as_dict(),
                "noise": noise_here[name].as_dict(),
                "problems": problems,
            }
        )
        print(_text(rows[-1]), flush=True)
    return rows


def _first_that_starts(
    backends, page_size, model, home, args, requests, fault, fault_log
) -> dict[str, list[dict]]:
    """Outputs of the first backend of the list that an engine starts with."""
    for i, backend in enumerate(backends):
        plan = contextlib.nullcontext() if i + 1 == len(backends) else _skipping(backend)
        with plan:
            engine = EngineProcess(
                _engine_arguments(args, model, page_size) | backend_arguments(backend),
                home / backend.replace("/", "-"),
                plugin=faults.__name__ if fault else None,
                env={faults.FAULT_ENV: fault, faults.LOG_ENV: str(fault_log)} if fault else None,
            )
            with engine:
                planted = f" with {fault} planted" if fault else ""
                print(f"{backend}{planted}, page size {page_size}: up after {engine.start_s} s")
                return {
                    name: engine.ask("outputs", requests=wanted)["outputs"]
                    for name, wanted in requests.items()
                }
    raise AssertionError("the last backend returns or raises")


@contextlib.contextmanager
def _skipping(backend: str):
    try:
        yield
    except EngineError as error:
        print(f"{backend} cannot be used: {str(error).splitlines()[-1]}", flush=True)


def _text(row: dict) -> str:
    tested, noise = row["tested"], row["noise"]
    lines = [f"{row['scenario']} ({tested['requests']} requests), page size {row['page_size']}"]
    for label, part in (("tested", tested), ("noise", noise)):
        lines.append(
            f"  {label}: equal tokens {part['equal_share']:.4f}, {part['diverged']} diverged, "
            f"largest top-2 gap there {part['max_gap']:.4f}, log-probability error "
            f"{part['max_logprob_error']:.5f}"
        )
    lines += [f"  WORSE THAN NOISE: {problem}" for problem in row["problems"]]
    return "\n".join(lines)


def _vocab(args) -> int:
    return min(_VOCAB, SHAPES[args.model_shape]["vocab_size"])


def _write_model(folder: Path, args) -> Path:
    shape = SHAPES[args.model_shape]
    return write_tiny_llama(
        folder,
        seed=_SEED,
        layers=args.layers,
        hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"],
        num_qo_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab=_vocab(args),
        max_position=shape["max_position_embeddings"],
    )


def _engine_arguments(args, model: Path, page_size: int) -> dict:
    arguments = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "page_size": page_size,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 1,
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if args.device == "cpu":
        return arguments | {
            "device": "cpu",
            "dtype": "float32",
            "max_total_tokens": 16384,
            "max_running_requests": 96,
        }
    return arguments | {
        "dtype": "bfloat16",
        "max_total_tokens": 262144,
        "max_running_requests": 96,
        "mem_fraction_static": 0.8,
        "cuda_graph_bs_decode": [1, 4, 8, 16, 32, 64, 96],  # every other size is padded
        "disable_prefill_cuda_graph": True,
    }


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.compare_outputs", description=__doc__)
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tested", default="prefix", help="backend, or PREFILL/DECODE")
    parser.add_argument("--reference", default="flashinfer")
    parser.add_argument("--noise", default="fa3,triton", help="the first that starts is taken")
    parser.add_argument("--scenarios", default=",".join(scenarios.SCENARIOS))
    parser.add_argument("--page-size", default="1,16")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--scale", type=int, default=1, help="divides all prompt lengths")
    parser.add_argument("--fault", choices=list(faults.FAULTS), help="planted in the tested engine")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args(argv)
    args.scenarios, args.noise = args.scenarios.split(","), args.noise.split(",")
    unknown = [name for name in args.scenarios if name not in scenarios.SCENARIOS]
    if unknown:
        parser.error(f"scenario {unknown[0]!r}: known are {', '.join(scenarios.SCENARIOS)}")
    try:
        args.page_sizes = [int(part) for part in args.page_size.split(",")]
    except ValueError:
        parser.error(f"page size {args.page_size!r}: expected integers, such as 1,16")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
