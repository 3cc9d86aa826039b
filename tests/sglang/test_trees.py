"""SGLang's own radix trees, filled and read without an engine."""

import numpy as np
import pytest
from sglang.srt.mem_cache.unified_cache import unified_tree_core_interface as interface

from sgl_prefix_attn.engine.start_checks import TREE_CORE
from sgl_prefix_attn.paths.readers import reader_of, unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from tests.support import unified_tree

SHOWS_PATHS = hasattr(interface.UnifiedTreeCoreInterface, "collect_path_info")  # from 0.5.22 on


@pytest.fixture(params=[(core, eagle) for core in unified_tree.CORES for eagle in (False, True)])
def filled(request, monkeypatch):
    """A tree and requests that end at its leaves; with an EAGLE draft its keys are bigrams."""
    core, is_eagle = request.param
    monkeypatch.setenv(TREE_CORE, core)
    try:
        cache = unified_tree.make_cache(core, is_eagle=is_eagle)
    except ValueError:
        pytest.skip(f"this SGLang has no core in {core}")
    if core == "rust" and not SHOWS_PATHS:
        assert unsupported_tree(cache) == "tree:RustUnifiedTreeCore"
        pytest.skip("this SGLang's core in Rust shows no paths")
    return cache, unified_tree.fill(cache, 32)


def test_paths_are_those_of_the_prompts(filled):
    cache, reqs = filled
    reader, bigrams = reader_of(cache), int(cache.tree_core.is_eagle)
    paths = reader.read_paths(RunningBatch(reqs, cache, [700] * 32, None))
    # One prompt for all, one of eight groups each, one of two requests, one of its own. A bigram
    # that nobody else has begins at the last token of what is shared.
    assert np.unique(paths.length, return_counts=True)[1].tolist() == [16, 32, 8, 1]
    assert paths.length.max() == 512 - bigrams
    for i, ids in enumerate(unified_tree.prompts(32)):
        length, node = 0, int(paths.leaf[i])
        while node >= 0:
            length, node = length + int(paths.length[node]), int(paths.parent[node])
        assert length == len(ids) - bigrams


@pytest.mark.skipif(not SHOWS_PATHS, reason="this SGLang's cores tell no paths")
def test_the_tuples_that_are_read_are_the_structs_that_sglang_makes_of_them(filled):
    from msgspec.structs import astuple

    cache, reqs = filled
    binding = getattr(cache.tree_core, "_binding", None)
    if binding is None:
        pytest.skip("the core in Python has no binding")
    ends = [req.last_node for req in reqs]
    told = [[astuple(node) for node in p] for p in cache.tree_core.collect_path_info(ends)]
    assert [[tuple(node) for node in p] for p in binding.collect_path_info(ends)] == told
    names = interface.TreePathNodeInfo.__struct_fields__
    assert names[:5] == ("node_id", "parent_id", "path_start", "path_end", "full_value_len")
