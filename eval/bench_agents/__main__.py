"""python -m eval.bench_agents: agent programs on a server of each backend in turn, random weights.

The programs are those of eval/examples, 64 at once through SGLang's own frontend. Weights are
random, so nothing that a server generates chooses anything: which tool result or idea comes next is
drawn beforehand, every request makes exactly as many tokens as it may, and choices are equally
long. Requests, prompt tokens and output tokens are counted by the server and must be equal for all
backends: exit status 1 otherwise. All of a program's time is in its wall time: prefill, the
server's tokenizer and the client, too.

With --device cpu the defaults are small: a smoke test of minutes, whose wall times say nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.bench_agents import agent_tables, runs
from eval.cli_values import benchmark, names_of
from eval.dummy_engine import in_turn
from eval.engine_process import end_on_sigterm
from eval.model_shapes import SHAPES
from eval.server_process import ServerError, random_server
from eval.word_tokenizer import write_word_model
from sgl_prefix_attn.tools.argument_types import count

_WARM_UP_SCALE = 8  # of sizes in tokens: as many requests at once, in an eighth of the time
_MAX_RUNNING = 256  # requests of a decode step
# By --device: what is not said.
_DEFAULTS = {
    "cuda": {"backends": ["default", "flashinfer", "prefix"], "model_shape": "llama3.1-8b",
             "count": 64, "scale": 1},
    "cpu": {"backends": ["torch_native", "prefix"], "model_shape": "tiny", "count": 4, "scale": 32},
}  # fmt: skip


def main(argv: list[str]) -> int:
    args = _parse(argv)
    end_on_sigterm()
    sizes = {program: runs.sizes(program, args.scale) for program in args.programs}
    meta = provenance.collect("eval.bench_agents", argv, model_shape=args.model_shape, sizes=sizes)
    rows: list[dict] = []
    failed = False
    for alternation, backend in in_turn(args.backends, args.alternations):
        with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
            try:
                for row in _serve(backend, Path(folder), args):
                    rows.append({"alternation": alternation, **row})
                    print(_text(rows[-1]), flush=True)
                    provenance.save(args.json, meta, rows)
            except (ServerError, runs.ProgramError) as error:
                failed = True
                print(f"{backend}: {error}", file=sys.stderr)
    problems = runs.unequal(rows)
    for problem in problems:
        print(f"not the same work: {problem}", file=sys.stderr)
    if rows:
        print(agent_tables.markdown(rows))
    return 1 if failed or problems else 0


def _serve(backend: str, folder: Path, args):
    """Yield the row of each program, all on one server. Raises ServerError and ProgramError."""
    on_cpu = args.device.type == "cpu"
    graphs = () if on_cpu else ("--cuda-graph-max-bs-decode", str(_MAX_RUNNING))
    model = write_word_model(folder / "model", args.model_shape)
    with random_server(
        backend, model, folder, _MAX_RUNNING, "--grammar-backend", "none", *graphs, on_cpu=on_cpu
    ) as server:
        server.wait_until_healthy()
        print(f"{backend} is up; warming up", flush=True)
        for program in args.programs:
            runs.run(server, program, args.count, seed=1, scale=args.scale * _WARM_UP_SCALE)
        for program in args.programs:
            figures = runs.run(server, program, args.count, seed=0, scale=args.scale, progress=True)
            yield {"program": program, "backend": backend, "count": args.count, **figures}


def _text(row: dict) -> str:
    tpot = "-" if row["tpot_ms"] is None else f"{row['tpot_ms']:.2f} ms"
    return (
        f"  {row['program']:<15} {row['backend']:<14} {row['wall_s']:7.2f} s, "
        f"{row['tokens_per_s']:6.0f} tokens/s, TPOT {tpot}, cached {row['cached_share']:.3f}, "
        f"{row['prefix_steps']} prefix steps"
    )


def _parse(argv: list[str]):
    parser = benchmark("eval.bench_agents", __doc__, SHAPES, "", 1)
    parser.set_defaults(model_shape=None)
    parser.add_argument("--programs", type=names_of(runs.PROGRAMS), default=",".join(runs.PROGRAMS))
    parser.add_argument("--count", type=count, help="of each program, at once (64, on a CPU 4)")
    parser.add_argument("--scale", type=count, help="divides sizes in tokens (1, on a CPU 32)")
    args = parser.parse_args(argv)
    for name, value in _DEFAULTS[args.device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
