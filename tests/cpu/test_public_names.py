"""What somebody meets who explores the library at a prompt."""

import subprocess
import sys

import pytest

import sgl_prefix_attn


def test_dir_lists_the_names_that_are_imported_at_first_use():
    """In a process of its own: a name that was used is there in any case."""
    code = "import sgl_prefix_attn as s; print(*(n for n in s.__all__ if n not in dir(s)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_name_that_is_gone_says_what_to_use():
    with pytest.raises(AttributeError, match=r"gone: use sgl_prefix_attn\.PrefixAttentionWrapper"):
        _ = sgl_prefix_attn.PrefixDecodeWrapper
    assert sgl_prefix_attn.PrefixAttentionWrapper.__name__ in dir(sgl_prefix_attn)
    assert "PrefixDecodeWrapper" not in dir(sgl_prefix_attn)
