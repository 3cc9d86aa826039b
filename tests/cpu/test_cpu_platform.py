"""The CPU platform steps aside for any other, and allocates the slots of SGLang's kernels."""

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator, alloc_extend_naive

from sgl_prefix_attn.cpu import allocator, platform

ENV = "SGL_PREFIX_ATTN_CPU_PLATFORM"


@pytest.fixture
def bare_machine(monkeypatch):
    """No GPU, nothing chosen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    for name in (ENV, "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_it_is_opt_in(bare_machine):
    assert platform.activate() is None
    bare_machine.setenv(ENV, "1")
    assert platform.activate() == "sgl_prefix_attn.cpu.platform.TorchCpuPlatform"


@pytest.mark.parametrize("other", ["cuda", "xpu", "engine"])
def test_it_steps_aside(bare_machine, other):
    bare_machine.setenv(ENV, "1")
    if other == "engine":
        bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    else:
        bare_machine.setattr(getattr(torch, other), "is_available", lambda: True)
    assert platform.activate() is None
    assert not platform.is_active()


def test_a_bad_value_names_the_variable(bare_machine):
    bare_machine.setenv(ENV, "yes")
    with pytest.raises(ValueError, match=f"{ENV}='yes'"):
        platform.is_active()


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_extend_gives_the_slots_of_sglangs_reference(page_size, seed):
    torch.manual_seed(seed)
    batch = int(torch.randint(1, 6, ()))
    prefix = torch.randint(0, 100, (batch,))
    seq = prefix + torch.randint(1, 100, (batch,))
    last = torch.randint(0, 50, (batch,)) * page_size + (prefix - 1) % page_size
    free = torch.randperm(500)
    expected = torch.empty(int((seq - prefix).sum()), dtype=torch.int64)
    alloc_extend_naive(prefix, seq, last, free, expected, page_size, "cpu")
    assert torch.equal(allocator.extend_slots(prefix, seq, last, free, page_size), expected)


def make(page_size, size=64):
    kvcache = type("Pool", (), {"store_dtype": torch.float32})()
    return allocator.make_allocator(size, page_size, torch.float32, "cpu", kvcache, False)


def test_decode_opens_a_page_only_where_the_last_is_full():
    pages = make(4)
    seq = torch.tensor([5, 7, 9])  # the new token is number 4, 6 and 8
    last = torch.tensor([43, 49, 55])
    slots = pages.alloc_decode(seq, seq, last)
    assert slots.tolist() == [4, 50, 8]
    assert pages.free_pages[0] == 3


def test_nothing_is_taken_when_the_pages_do_not_suffice():
    pages = make(16, size=32)
    none, long, last = torch.tensor([0]), torch.tensor([40]), torch.tensor([-1])
    assert pages.alloc_extend(none, none, long, long, last, 40) is None
    assert pages.available_size() == 32
    fits = pages.alloc_extend(none, none, none + 20, none + 20, last, 20)
    assert fits.tolist() == list(range(16, 36)) and pages.available_size() == 0


def test_page_size_one_takes_sglangs_token_allocator():
    assert type(make(1)) is TokenToKVPoolAllocator
