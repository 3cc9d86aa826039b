"""What every test on the CPU shares."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    """Problems here are small: more threads only wait for each other where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
