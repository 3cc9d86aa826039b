"""HiCache under SGLang's own trees, without an engine: KV goes to the host and comes back."""

import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import base_prefix_cache as interface
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_context

from sgl_prefix_attn.engine.start_checks import TREE_CORE
from sgl_prefix_attn.paths.readers import reader_of, unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch, TreeInvariantError, check_paths
from tests.sglang.test_hicache import HICACHE
from tests.support.host_copies import copy_with_torch

SLOTS = 64
PROMPT, OTHER = list(range(100, 124)), list(range(200, 220))


def hi_radix_cache(params, server_args):
    """What HiCache is until 0.5.18."""
    hiradix = pytest.importorskip("sglang.srt.mem_cache.hiradix_cache")
    params.tp_cache_group = torch.distributed.group.WORLD
    return hiradix.HiRadixCache(params, server_args)


def unified_cache(params, server_args):
    """What it is later: part of the unified tree."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_components = (ComponentType.FULL,)
    cache = UnifiedRadixCache(params)
    cache.init_hicache(server_args, params)
    return cache


class Tree:
    """One of SGLang's trees with HiCache over 64 slots. A token's KV is its id, so that a slot says
    whose it is; requests are matched, loaded back and locked as SGLang's scheduler does."""

    def __init__(self, make_cache, server_args):
        self.pool = MHATokenToKVPool(
            SLOTS, page_size=1, dtype=torch.float32, head_num=1, head_dim=4, layer_num=2,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.slots = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", self.pool, False)
        self.req_to_token = torch.zeros(8, SLOTS, dtype=torch.int32)
        rows = SimpleNamespace(req_to_token=self.req_to_token)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
        )
        self.cache = make_cache(params, server_args)
        self.reqs = []

    def insert(self, ids):
        """Cache a prompt, as a request that has finished leaves it; return its slots."""
        slots = self.slots.alloc(len(ids))
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[slots] = torch.tensor(ids, dtype=torch.float32)[:, None, None]
        self.cache.insert(interface.InsertParams(key=self._key(ids), value=slots))
        self.settle()
        return slots.tolist()

    def evict(self):
        """Evict all that may be; what was cached is then on the host."""
        self.cache.evict(interface.EvictParams(num_tokens=SLOTS))

    def settle(self):
        """Let SGLang see that its copies have ended."""
        self.cache.ready_to_load_host_cache()
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()

    def match(self, ids):
        return self.cache.match_prefix(interface.MatchPrefixParams(key=self._key(ids)))

    def request(self, ids):
        """A running request whose cached prompt is `ids`."""
        match = self.match(ids)
        req = SimpleNamespace(
            rid=f"r{len(self.reqs)}", last_node=match.last_device_node, retraction_count=0,
            swa_host_hit_length=0, mamba_host_hit_length=0, mamba_pool_idx=None,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )  # fmt: skip
        if match.host_hit_length:
            loaded, req.last_node = self.cache.init_load_back(
                interface.InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
            )
        if hasattr(match, "device_indices"):  # until 0.5.21
            slots = match.device_indices
            if match.host_hit_length:
                slots = torch.cat([slots, loaded])
        else:
            slots = self.cache.path_device_indices(req.last_node)
        self.cache.inc_lock_ref(req.last_node)
        self.settle()
        row = len(self.reqs)
        self.req_to_token[row, : len(slots)] = slots.int()
        req.kv.cache_protected_len, req.kv.req_pool_idx = len(slots), row
        if hasattr(match, "device_indices"):
            vars(req).update(vars(req.kv))
        self.reqs.append(req)
        return req

    def row(self, req):
        return self.req_to_token[self.reqs.index(req), : req.kv.cache_protected_len]

    def read(self):
        """The paths of the requests, verified against SGLang's tree, slots and KV."""
        lens = torch.tensor([req.kv.cache_protected_len + 1 for req in self.reqs]).numpy()
        batch = RunningBatch(self.reqs, self.cache, lens, self.req_to_token)
        reader = reader_of(self.cache)
        paths = reader.read_paths(batch)
        check_paths(paths, batch, reader)
        return paths

    def holds(self, req, ids):
        """Whether the request's slots hold the KV of these tokens on the device, in all layers."""
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        return all(buffer[self.row(req).long(), 0, 0].tolist() == ids for buffer in buffers)

    def _key(self, ids):
        return RadixKey(array.array("q", ids))


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """HiRadixCache asks torch for the ranks of its group."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=["python", "rust", "HiRadixCache"])
def tree(request, monkeypatch):
    copy_with_torch(monkeypatch.setattr)
    monkeypatch.setenv(TREE_CORE, request.param)
    published = get_context().override_server_args(**HICACHE)
    make_cache = hi_radix_cache if request.param == "HiRadixCache" else unified_cache
    try:
        tree = Tree(make_cache, published.install())
    except ValueError:
        pytest.skip(f"this SGLang has no core in {request.param}")
    if unsupported_tree(tree.cache) == "tree:RustUnifiedTreeCore":
        pytest.skip("this SGLang's core in Rust shows no paths")
    yield tree
    published.restore()


def test_a_prompt_that_is_loaded_back_has_other_slots(tree):
    before = tree.insert(PROMPT)
    tree.evict()
    tree.insert(OTHER)
    assert tree.match(PROMPT).host_hit_length == len(PROMPT), "the prompt is on the host alone"
    req = tree.request(PROMPT)
    assert tree.row(req).tolist() != before
    assert tree.holds(req, PROMPT) and tree.read().length.tolist() == [len(PROMPT)]


def test_eviction_leaves_what_a_running_request_holds(tree):
    tree.insert(PROMPT)
    tree.insert(PROMPT[:15] + OTHER)
    req = tree.request(PROMPT)
    slots = tree.row(req).tolist()
    tree.evict()
    assert tree.match(PROMPT[:15] + OTHER).host_hit_length == len(OTHER), (
        "its neighbour was evicted"
    )
    assert tree.read().length.tolist() == [15, len(PROMPT) - 15]
    assert tree.row(req).tolist() == slots and tree.holds(req, PROMPT)


def test_a_split_of_what_was_loaded_back(tree):
    """While a request runs, and before: then only the front is loaded."""
    tree.insert(PROMPT)
    tree.evict()
    front = tree.request(PROMPT[:15])
    assert tree.holds(front, PROMPT[:15]) and tree.read().length.tolist() == [15]
    whole = tree.request(PROMPT + OTHER)  # as far as it is cached, the rest from the host or not
    assert tree.row(whole)[:15].tolist() == tree.row(front).tolist(), "what is shared is there once"
    leaf = tree.read().leaf.tolist()
    tree.match(PROMPT[:4])
    paths = tree.read()
    assert len(paths.length) == len(set(leaf)) + 1 and paths.length.tolist()[:2] == [4, 11]
    assert tree.holds(front, PROMPT[:15]) and tree.holds(whole, PROMPT[: len(tree.row(whole))])


def test_a_path_on_the_host_alone_is_refused(tree):
    """No running request has one: SGLang ends its path where the device's KV ends."""
    tree.insert(PROMPT)
    tree.evict()
    match = tree.match(PROMPT + OTHER)
    assert match.last_device_node != match.best_match_node
    req = tree.request([])
    assert tree.read().leaf.tolist() == [-1]
    req.last_node = match.best_match_node
    with pytest.raises(TreeInvariantError, match="slots on the device"):
        tree.read()


def test_a_row_that_is_not_the_tree_s_is_found(tree):
    """The comparison of these tests, with SGLang's row of another request planted."""
    tree.insert(PROMPT)
    tree.evict()
    req = tree.request(PROMPT)
    tree.row(req)[3] += 1
    assert not tree.holds(req, PROMPT)
    with pytest.raises(TreeInvariantError, match="at position 3"):
        tree.read()
