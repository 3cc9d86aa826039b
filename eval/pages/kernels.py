"""Tables of kernels: one layer's attention."""

from __future__ import annotations

from statistics import geometric_mean

from eval.bench_kernel import over_floor
from eval.markdown import table
from eval.pages.results import gpu_of, load, page_table, rows, source, span

H100, H200, PORTABLE = "kernel_h100_row_tiles", "kernel_h200_pat20", "portable_h100"
NAMES = {
    "prefix": "Hopper kernel", "prefix:portable": "portable kernel", "pat": "PAT",
    "fasttree": "FastTree", "flashinfer": "FlashInfer", "fa3": "FlashAttention 3",
    "batchattn": "FlashInfer BatchAttention", "cascade": "FlashInfer cascade",
    "best stock": "the best of SGLang's for each tree",
    "prefix:invariant": "aligned plans", "fa3:one_split": "FlashAttention 3, one split",
    "flashmla": "FlashMLA", "flashinfer:mla": "FlashInfer",
}  # fmt: skip
HEADS = (
    "kernel_h100_slices", "kernel_h100_16-8", "kernel_h100_32-32", "kernel_h100_32-4",
    "kernel_h200_heads", "kernel_h200_64", "kernel_h200_pages", "kernel_h100_256",
    "kernel_h200_e4m3_256",
)  # fmt: skip
E4M3 = ("kernel_h100_e4m3", "kernel_h100_e4m3_heads", "kernel_h200_e4m3",
        "kernel_h200_e4m3_256")  # fmt: skip
INVARIANT = ("invariant_h100", "invariant_h200")
LATENT = ("latent_h100", "latent_h200")
LONG = ("kernel_h100_long", "kernel_h200_long")
MULTI_TOKEN = ("multi_token_h100", "multi_token_h200")
# Files of ablations -> batches, and each of them with what it changes; the rest are on unshared
# batches.
ABLATIONS = {
    ("ablate_h200",): ("20 trees", {name: "calibrated" for name in (
        "pat", "compute", "naive", "query", "tile_128", "tile_64", "no_split", "mean_split",
        "separate_merge", "dependent_launch", "prefetch",
    )}),
    ("ablate_queue_h200",): ("20 trees", {"dynamic_queue": "separate_merge"}),
    ("ablate_unshared_h200",): (None, {"prefetch": "calibrated"}),
    tuple(f"ablate_unshared_h100_{heads}" for heads in ("32-32", "40-8", "28-4")):
        (None, {"prefetch": "calibrated"}),
}  # fmt: skip


@page_table("kernels | H100 | with sharing | H200 | with sharing", H100, H200, PORTABLE)
def over_the_floor():
    """Geometric means of time / floor over the 20 trees, on either GPU."""
    h100, h200, portable = (
        {entry["provider"]: entry for entry in over_floor.means(_trees(name))}
        for name in (H100, H200, PORTABLE)
    )
    for name, title in NAMES.items():
        if name in portable | h100 | h200:
            yield (title, *(_mean(by.get(name), field) for by in (portable | h100, h200)
                            for field in ("all", "sharing")))  # fmt: skip


@page_table(
    "tree | floor | Hopper kernel | FlashInfer | FlashAttention 3 | FastTree | PAT | peer, H100 | "
    "peer, H200",
    H100, H200,
)  # fmt: skip
def by_tree():
    """Microseconds per layer of each tree on an H100, and how much longer the fastest peer takes
    on either GPU."""
    names = ("prefix", "flashinfer", "fa3", "fasttree", "pat")
    both = [_trees(name) for name in (H100, H200)]
    for tree, by in both[0].items():
        floor = next(iter(by.values()))["floor_us"]
        times = ("-" if by[name]["us"] is None else f"{by[name]['us']:.1f}" for name in names)
        ratios = (over_floor.ratio_to_peer(trees[tree], "prefix") for trees in both)
        yield (f"`{tree}`", f"{floor:.0f}", *times, *(f"{ratio:.2f}" for ratio in ratios))


@page_table(
    "tree | H100: Hopper kernel, us | H100: fastest peer | H100: over ours | "
    "H200: Hopper kernel, us | H200: fastest peer | H200: over ours",
    *LONG,
)
def long_contexts():
    """Trees with little or no sharing: the fastest peer's time over ours."""
    found = [_trees(name) for name in LONG]
    for tree in found[0]:
        yield (f"`{tree}`", *(cell for trees in found for cell in _against_peer(trees[tree])))


@page_table(
    "heads | head dim | page size | GPU | trees | Hopper kernel | PAT | best of SGLang's | "
    "fastest peer / ours",
    *HEADS,
)
def other_heads():
    """Time / floor of other heads, and the fastest peer's time over ours from tree to tree."""
    for name in HEADS:
        for (heads, head_dim, page_size, dtype), trees in over_floor.group(rows(name)).items():
            if dtype != "bf16":
                continue  # narrow_kv() has it
            own = over_floor.ours(next(iter(trees.values())))
            ran = {tree: by for tree, by in trees.items() if by[own]["status"] == "ok"}
            means = {entry["provider"]: entry for entry in over_floor.means(ran)}
            peers = [over_floor.ratio_to_peer(by, own) for by in ran.values()]
            cells = (
                f"{means[p]['all']:.2f}" if p in means else "-" for p in (own, "pat", "best stock")
            )
            ratios = span(peers, ".2f") if None not in peers else "-"
            count = len(ran) if len(ran) == len(trees) else f"{len(ran)} of {len(trees)}"
            yield heads, head_dim, page_size, gpu_of(name), count, *cells, ratios


@page_table(
    "heads | head dim | GPU | commit | e4m3 over bf16 | of a tree | fastest peer / ours | "
    "errors: ours, FlashInfer's, FlashAttention 3's",
    *E4M3,
)
def narrow_kv():
    """Time over caches of float8_e4m3fn in units of our own over bfloat16 ones, from tree to tree,
    and the fastest peer's over e4m3 caches in units of ours."""
    for name in E4M3:
        by: dict[tuple[str, int], dict[str, dict]] = {}
        for (heads, head_dim, _, dtype), trees in over_floor.group(rows(name)).items():
            by.setdefault((heads, head_dim), {})[dtype] = trees
        for shape, found in by.items():
            wide, narrow = found["bf16"], found["fp8_e4m3"]
            ours = over_floor.ours(next(iter(wide.values())))
            times = [narrow[tree][ours]["us"] / wide[tree][ours]["us"] for tree in wide]
            peers = [over_floor.ratio_to_peer(trees, ours) for trees in narrow.values()]
            errors = (
                max(trees[p]["error"] for trees in narrow.values())
                for p in (ours, "flashinfer", "fa3")
                if p in next(iter(narrow.values()))
            )
            yield (*shape, gpu_of(name), load(name)["meta"]["commit"],
                   f"{geometric_mean(times):.3f}", span(times, ".2f"),
                   "-" if None in peers else span(peers, ".2f"),
                   ", ".join(f"{error:.1e}" for error in errors))  # fmt: skip


def latent() -> str:
    """Microseconds over latent KV by tree and query heads of a rank, and the time of SGLang's
    fastest kernel over ours."""
    by: dict[tuple[str, str], dict[str, dict[str, dict]]] = {}
    for name in LATENT:
        for (heads, *_), trees in over_floor.group(rows(name)).items():
            for tree, found in trees.items():
                by.setdefault((tree, gpu_of(name)), {})[heads.partition("/")[0]] = found
    columns = sorted(next(iter(by.values())), key=int)
    lines = []
    for (tree, gpu), found in by.items():
        ours, peers, over = zip(*(_against_peer(found[heads]) for heads in columns), strict=True)
        times = (cell for pair in zip(ours, over, strict=True) for cell in pair)
        lines.append((f"`{tree}`", gpu, ", ".join(dict.fromkeys(peers)), *times))
    titles = [f"{heads} heads: {what}" for heads in columns for what in ("ours, us", "over ours")]
    return f"{table(('tree', 'GPU', 'fastest peer', *titles), lines)}\n\n{source(*LATENT)}"


@page_table("kernels | over | GPU | mean of 20 trees | of a tree", *INVARIANT)
def invariant():
    """What plans and kernels of deterministic inference cost, and what FlashAttention 3 takes that
    splits no KV: mean, least and largest of a tree."""
    for above, below in (("prefix:invariant", "prefix"), ("fa3:one_split", "prefix:invariant")):
        for name in INVARIANT:
            ratios = [by[above]["us"] / by[below]["us"] for by in _trees(name).values()]
            yield (NAMES[above], NAMES[below], gpu_of(name), f"{geometric_mean(ratios):.2f}",
                   span(ratios, ".2f"))  # fmt: skip


@page_table(
    "ablation | over | GPU | batches | mean | of a batch",
    *(file for files in ABLATIONS for file in files),
)
def ablations():
    """Each ablation's time over that of what it changes: mean, least and largest of a tree."""
    for files, (trees, bases) in ABLATIONS.items():
        for name, base in bases.items():
            ratios = [ratio for file in files for ratio in _over(rows(file), name, base)]
            batches = trees or f"{len(ratios)} without sharing"
            mean = f"{geometric_mean(ratios):.3f}"
            yield f"`{name}`", f"`{base}`", gpu_of(files[0]), batches, mean, span(ratios, ".2f")


@page_table(
    "workload | H100: Hopper kernel, us | H100: FlashInfer | H100: FlashAttention 3 | "
    "H200: Hopper kernel, us | H200: FlashInfer | H200: FlashAttention 3",
    *MULTI_TOKEN,
)
def several_tokens():
    """Plans of several tokens a request, and how much longer stock kernels take."""
    us = {(name, row["workload"], row["provider"]): row["us"]
          for name in MULTI_TOKEN for row in rows(name)}  # fmt: skip
    for workload in dict.fromkeys(row["workload"] for row in rows(MULTI_TOKEN[0])):
        cells = []
        for name in MULTI_TOKEN:
            own = us[name, workload, "prefix"]
            stock = (us[name, workload, provider] for provider in ("flashinfer:fa2", "fa3"))
            cells += [f"{own:.1f}", *(f"{of / own:.2f}" for of in stock)]
        yield (f"`{workload}`", *cells)


def _trees(name: str) -> dict[str, dict[str, dict]]:
    (trees,) = over_floor.group(rows(name)).values()
    return trees


def _mean(entry: dict | None, field: str) -> str:
    if entry is None:
        return "-"
    full = entry["num_" + field] == {"all": 20, "sharing": 18}[field]
    return f"{entry[field]:.2f}" + ("" if full else f" ({entry['num_' + field]} trees)")


def _against_peer(by: dict[str, dict]) -> tuple[str, str, str]:
    peers = {name: row["us"] for name, row in by.items() if not over_floor.is_ours(name)}
    fastest = min(peers, key=lambda name: peers[name])
    own = by["prefix"]["us"]
    return f"{own:.1f}", NAMES[fastest], f"{peers[fastest] / own:.2f}"


def _over(results: list[dict], name: str, base: str) -> list[float]:
    times = {(row["tree"], row["heads"], row["ablation"]): row["us"] for row in results}
    return [
        us / times[tree, heads, base]
        for (tree, heads, ablation), us in times.items()
        if ablation == name
    ]
