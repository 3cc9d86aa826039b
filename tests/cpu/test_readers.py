"""Tree reader: paths of real tree shapes, and the invariants that check mode verifies."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.patches import checkpoint_remaps, remaps, unified_remaps
from sgl_prefix_attn.paths.readers import reader_of, unsupported_tree
from sgl_prefix_attn.paths.tree_reader import (
    RunningBatch,
    TreeInvariantError,
    check_paths,
    remaps_of,
)
from tests.support.examples import examples
from tests.support.fake_sglang import (
    CORES,
    TREES,
    ChunkCache,
    HiRadixCache,
    LMCRadixCache,
    RadixCache,
    RecordReq,
    Req,
    World,
)
from tests.support.forests import chain

PROMPTS = st.lists(
    st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12
)  # three letters: prompts share, split and repeat each other


every_tree = pytest.mark.parametrize("tree", TREES)


def world_of(prompts, tree="radix") -> World:
    world = World(tree=tree)
    for prompt in prompts:
        world.add(prompt)
    return world


def read_batch(batch: RunningBatch):
    return reader_of(batch.tree_cache).read_paths(batch)


def read(world):
    return read_batch(world.batch())


def check(paths, world, grown=1):
    check_paths(paths, world.batch(grown), reader_of(world.cache))


@every_tree
@given(PROMPTS)
@examples(100)
def test_paths_are_the_tree(tree, prompts):
    world = world_of(prompts, tree)
    paths = read(world)
    assert (paths.parent < np.arange(len(paths.parent))).all(), "parents come before children"
    assert len(set(paths.node_id.tolist())) == len(paths.node_id), "each node once"
    for i, req in enumerate(world.reqs):
        nodes = chain(paths, i)
        assert [int(paths.node_id[n]) for n in nodes] == [node.id for node in world.path(req)]
        assert sum(int(paths.length[n]) for n in nodes) == len(prompts[i])
    reached = {n for i in range(len(world.reqs)) for n in chain(paths, i)}
    assert reached == set(range(len(paths.parent))), "no node without a request"
    check(paths, world)


@every_tree
@given(PROMPTS, st.data())
@examples(50)
def test_check_finds_any_wrong_length(tree, prompts, data):
    world = world_of(prompts, tree)
    paths = read(world)
    if not len(paths.length):
        return
    length = paths.length.copy()
    length[data.draw(st.integers(0, len(length) - 1))] += data.draw(st.sampled_from([-1, 1]))
    with pytest.raises(TreeInvariantError, match=r"request r\d+.*node \d+.*position \d+"):
        check(dataclasses.replace(paths, length=length), world)


@every_tree
def test_check_says_what_is_wrong_and_where(tree):
    world = world_of([[0, 0, 1, 1], [0, 0, 2, 2]], tree)
    paths = read(world)
    # A shift that keeps the sum.
    length = np.where(paths.parent < 0, paths.length + 1, paths.length - 1)
    with pytest.raises(TreeInvariantError, match="holds 2 tokens, the path says 3"):
        check(dataclasses.replace(paths, length=length), world)
    with pytest.raises(TreeInvariantError, match="seq_len is 4"):
        check(read_batch(world.batch(grown=0)), world)  # the newest token is no one's own
    world.req_to_token[1, 2] += 1
    node = world.path(world.reqs[1])[-1]
    with pytest.raises(TreeInvariantError, match=rf"request r1: node {node.id} .* at position 2"):
        check(paths, world)


@every_tree
def test_split_in_mid_decode_keeps_the_old_id_at_the_rest(tree):
    world = world_of([[0, 1, 2, 0]], tree)
    before = read(world)
    world.add([0, 1, 0])
    after = read(world)
    assert len(before.parent) == 1 and len(after.parent) == 3
    assert int(after.node_id[after.leaf[0]]) == int(before.node_id[0])
    assert int(after.length[after.leaf[0]]) == 2
    assert int(after.parent[after.leaf[0]]) == int(after.parent[after.leaf[1]]) >= 0
    check(after, world)


@every_tree
def test_join_and_leave_change_only_their_own_paths(tree):
    world = world_of([[0, 1], [0, 1, 2], [2]], tree)
    all_paths = read(world)
    del world.reqs[1]
    rest = read(world)
    assert [len(chain(rest, i)) for i in (0, 1)] == [len(chain(all_paths, i)) for i in (0, 2)]


@every_tree
def test_requests_without_a_path(tree):
    world = world_of([[], [0, 1]], tree)
    # SGLang clears node and row when it retracts a request.
    retracted = (RecordReq if tree in CORES else Req)("gone", None)
    reqs = [*world.reqs, retracted]
    batch = RunningBatch(reqs, world.cache, np.array([5, 3, 4]), world.req_to_token)
    paths = read_batch(batch)
    assert paths.leaf.tolist() == [-1, 0, -1]
    assert paths.seq_lens.dtype == np.int32
    check_paths(paths, batch, reader_of(world.cache))


def test_the_root_of_a_tree_that_was_reset_since_ends_the_path():
    world = world_of([[0, 1, 2]])
    world.reqs[0].req_pool_idx = None  # finished, in its last overlapped step: its row is free
    check(read(world), world)
    world.root = None
    assert read(world).length.tolist() == [3]


@pytest.mark.parametrize("off", [ChunkCache(), World(tree="unified_by_path").cache])
def test_radix_cache_off_is_single_tails(off):
    reqs = [Req("a", 0), Req("b", 1)]
    paths = read_batch(RunningBatch(reqs, off, np.array([4, 9]), None))
    assert paths.leaf.tolist() == [-1, -1] and not len(paths.parent)


def test_other_caches_are_refused_with_their_name():
    assert all(unsupported_tree(World(tree=tree).cache) is None for tree in TREES)
    assert unsupported_tree(ChunkCache()) is None
    assert unsupported_tree(HiRadixCache()) is None
    # A subclass keeps its values elsewhere.
    assert unsupported_tree(LMCRadixCache()) == "tree:LMCRadixCache"
    namesake = type("RadixCache", (), {"__module__": "another.radix_cache"})
    assert unsupported_tree(namesake()) == "tree:RadixCache"
    assert unsupported_tree(object()) == "tree:object"
    assert reader_of(LMCRadixCache()) is None


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tree_components", (0, 2, 3), "tree:components"),
        ("tree_components", (2,), "tree:components"),
        ("buffer_pipeline", object(), "tree:hicache_buffer_only"),
        ("linker", object(), "tree:linker"),
        ("tree_core", type("RustTreeCore", (), {})(), "tree:RustTreeCore"),  # shows no path
    ],
)
def test_unified_trees_that_cannot_be_read_say_why(field, value, reason):
    cache = World(tree="unified_by_path").cache
    setattr(cache, field, value)
    assert unsupported_tree(cache) == reason and reader_of(cache) is None


def test_hicache_of_the_unified_tree_is_read():
    cache = World(tree="unified_by_path").cache
    cache.cache_controller, cache.buffer_pipeline = object(), None
    assert unsupported_tree(cache) is None


@pytest.mark.parametrize("other", [1, 2])
@pytest.mark.parametrize("tree", CORES)
def test_slots_and_states_beside_the_slots_of_full_attention_change_no_path(tree, other):
    world = world_of([[0, 1, 2], [0, 1, 3]], tree)
    alone = read(world)
    world.cache.tree_components = (0, other)
    assert read(world).length.tolist() == alone.length.tolist()
    check(read(world), world)
    world.cache.cache_controller = object()
    assert unsupported_tree(world.cache) == "tree:hicache_components"


@pytest.mark.parametrize("tree", TREES)
def test_kv_that_a_streaming_session_owns_is_no_path(tree):
    world = world_of([[0, 1, 2], [0, 1, 3]], tree)
    own = world.reqs[1]
    own.last_node = type("_VirtualNode", (), {})()  # what SGLang gives such a request
    paths = read(world)
    assert chain(paths, 1) == [] and len(chain(paths, 0)) == 2
    check(paths, world)


@pytest.mark.parametrize("inner", [RadixCache(), ChunkCache(), LMCRadixCache()])
def test_the_cache_inside_of_a_session_cache_is_read(inner):
    module = "sglang.srt.session.streaming_session"
    sessions = type("StreamingSession", (), {"__module__": module, "inner": inner})()
    assert reader_of(sessions) is reader_of(inner)
    assert unsupported_tree(sessions) == unsupported_tree(inner)


@every_tree
def test_tokens_that_are_not_on_the_device_are_no_path(tree):
    """HiCache may keep a node's tokens on the host alone, though none of a running request's."""
    world = world_of([[0, 1, 2]], tree)
    node = world.path(world.reqs[0])[0]
    node.value = None
    with pytest.raises(TreeInvariantError, match=rf"node {node.id} has (None|no) slots on the dev"):
        read(world)


@pytest.mark.parametrize("tree", ["radix", "unified_by_node"])
def test_each_node_is_walked_once(tree):
    world = World(tree=tree)
    deep = [i % 3 for i in range(60)]
    for end in range(1, 61):
        world.insert(deep[:end])  # a chain of 60 nodes
    visited = []

    class Counted(type(world.root)):
        @property
        def parent(self):
            visited.append(self)
            return self.__dict__["parent"]

        parent = parent.setter(lambda self, value: self.__dict__.update(parent=value))

    for _ in range(16):
        world.add(deep)
    for node in [world.insert(deep[:end]) for end in range(1, 61)]:
        node.__class__ = Counted
    read(world)
    assert len(visited) <= 2 * 60 + 2 * 16


@every_tree
def test_remaps_are_counted_for_each_cache(tree):
    first, second = World(tree=tree).cache, World(tree=tree).cache
    assert remaps_of(first) is None, "nothing was counted yet"
    counts = []
    for _ in range(3):
        remaps.hook(first, object(), chunked=True)
        counts.append(remaps_of(first))
    assert len(set(counts)) == 3 and None not in counts
    assert remaps_of(second) is None


def test_one_count_serves_the_hooks_on_all_trees():
    assert remaps.hook is unified_remaps.hook is checkpoint_remaps.hook
    assert len({patch.TARGET for patch in (remaps, unified_remaps, checkpoint_remaps)}) == 3
