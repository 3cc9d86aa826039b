"""The CPU platform steps aside for any other, and allocates the slots of SGLang's kernels."""

import pytest
import torch

from sgl_prefix_attn.engine.cpu import allocator, platform
from sgl_prefix_attn.settings import Settings

ENV = "PREFIX_ATTN_CPU_PLATFORM"


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
    assert platform.activate() == "sgl_prefix_attn.engine.cpu.platform.TorchCpuPlatform"


@pytest.mark.parametrize("other", ["cuda", "xpu", "engine"])
def test_it_steps_aside(bare_machine, other):
    bare_machine.setenv(ENV, "1")
    if other == "engine":
        bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    else:
        bare_machine.setattr(getattr(torch, other), "is_available", lambda: True)
    assert platform.activate() is None
    assert not platform.is_active()


def test_a_bad_value_is_left_to_the_check_of_all_settings(bare_machine):
    """SGLang would go on without the plugin's hooks, among them the one that checks."""
    bare_machine.setenv(ENV, "yes")
    assert not platform.is_active()
    with pytest.raises(ValueError, match=f"{ENV}='yes'"):
        Settings.from_env()


def make(page_size, size=64):
    kvcache = type("Pool", (), {"store_dtype": torch.float32})()
    return allocator.make_allocator(size, page_size, torch.float32, "cpu", kvcache, False)


def test_extend_fills_the_last_page_and_then_takes_free_ones_in_request_order():
    pages = make(4)
    prefix, seq = torch.tensor([6, 4, 0]), torch.tensor([13, 5, 3])
    slots = pages.alloc_extend(prefix, prefix, seq, seq, torch.tensor([81, 91, -1]), 11)
    # Tokens 6 and 7 follow slot 81; 8 to 12 are on pages 1 and 2; page 3 and 4 the others'.
    assert slots.tolist() == [82, 83, 4, 5, 6, 7, 8, 12, 16, 17, 18]
    assert pages.free_pages[0] == 5


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
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    assert type(make(1)) is TokenToKVPoolAllocator


def test_the_profiler_can_ask_the_platform():
    """SGLang asks each platform that is not its own when a profile starts; an error there would
    end the server. A name that it knows would start two profilers in its second version."""
    asked = platform.TorchCpuPlatform()
    assert asked.get_torch_profiler_activity_str() not in ("CPU", "GPU")
    assert asked.get_torch_profiler_activity() is torch.profiler.ProfilerActivity.CPU
