"""python -m eval.compare_outputs: are greedy outputs with `prefix` as good as the stock ones?

Engines with seeded weights of realistic scale answer the same requests. The tested backend's
difference from the reference is judged by the difference of two correct backends on the same
requests; worse than that noise ends with exit status 1, as it must under every --fault. Exit status
2: the comparison itself could not be made.

python -m eval.compare_outputs layers judges the attention outputs of three layers instead; see
layers.py and its --help.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.compare_outputs import engines, entropy, faults, judge, layers, scenarios
from eval.engine_process import EngineError, EngineProcess, backend_arguments, end_on_sigterm

_ENTROPY_LENGTH = 512


def main(argv: list[str]) -> int:
    if argv[:1] == ["layers"]:
        return layers.main(argv[1:])
    args = _parse(argv)
    end_on_sigterm()
    meta = engines.meta(argv, args)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="compare-outputs-") as folder:
        try:
            model = engines.write_model(Path(folder) / "model", args)
            length = _ENTROPY_LENGTH // args.scale
            entropies = entropy.attention_entropy(model, length, args.device)
            print(entropy.describe(entropies, length), flush=True)
            for page_size in args.page_size:
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
    requests = engines.build_requests(args)
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
            planting = {faults.FAULT_ENV: fault, faults.LOG_ENV: str(fault_log)} if fault else {}
            engine = EngineProcess(
                engines.engine_arguments(args, model, page_size) | backend_arguments(backend),
                home / backend.replace("/", "-"),
                plugin=faults.__name__ if fault else None,
                env=engines.environment(backend) | planting,
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


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.compare_outputs", description=__doc__)
    parser.add_argument("--tested", default="prefix", help="backend, or PREFILL/DECODE")
    parser.add_argument("--reference", default="flashinfer")
    parser.add_argument("--noise", default="fa3,triton", help="the first that starts is taken")
    engines.add_arguments(parser, list(scenarios.SCENARIOS))
    args = engines.parse(parser, argv)
    args.noise = args.noise.split(",")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
