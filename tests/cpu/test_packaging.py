"""The wheel holds the tree, the entry points resolve, importing the package stays cheap."""

import ast
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from sgl_prefix_attn import __version__

ROOT = Path(__file__).resolve().parents[2]
# Folder in the tree -> folder in the wheel.
SOURCES = {
    "sgl_prefix_attn": "sgl_prefix_attn",
    "kernels": "sgl_prefix_attn/kernels",
    "patches": "sgl_prefix_attn/patches",
}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: setuptools leaves build/ and *.egg-info where it works.
    names = (*SOURCES, "pyproject.toml", "README.md", "LICENSE")
    copy = ["cp", "-a", *(str(ROOT / name) for name in names if (ROOT / name).exists())]
    subprocess.run([*copy, str(folder)], check=True)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist")]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def shipped_files() -> set[str]:
    """What the wheel must hold: everything in the three folders but caches."""
    return {
        f"{target}/{path.relative_to(ROOT / source)}"
        for source, target in SOURCES.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_wheel_holds_exactly_the_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == shipped_files()


def test_every_import_is_of_a_declared_package():
    """Of what may run without SGLang, whose own requirements hide what is missing."""
    with_sglang = {"engine", "patches", "cpu"}
    files = [
        path for path in (ROOT / "sgl_prefix_attn").rglob("*.py")
        if path.relative_to(ROOT / "sgl_prefix_attn").parts[0] not in with_sglang
    ]  # fmt: skip
    files += (ROOT / "kernels").rglob("*.py")
    imported = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(node.module.partition(".")[0])
    assert {"torch", "numba", "packaging"} <= imported
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'"([\w-]+)', text.partition("\ndependencies = [")[2].partition("\n]")[0])
    optional = {"sglang", "sgl_kernel", "flashinfer", "matplotlib", "zstandard", "transformers"}
    optional.add("compression")  # of Python, from 3.14 on
    assert imported <= {*sys.stdlib_module_names, *declared, *optional, "sgl_prefix_attn"}


@pytest.mark.slow
def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
    assert "prefix_attn = sgl_prefix_attn.plugin.entry_point:register" in text
    assert "prefix_attn_cpu = sgl_prefix_attn.engine.cpu.platform:activate" in text
    assert "sgl-prefix-attn = sgl_prefix_attn.tools.main:main" in text
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_wheel_imports_without_the_checkout(wheel, tmp_path):
    """kernels and patches are found inside the wheel, and cli runs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sgl_prefix_attn, sgl_prefix_attn.kernels.words\n"
        "import sgl_prefix_attn.plugin.versions as v\n"
        "import sgl_prefix_attn.tools.main\n"
        f"assert sgl_prefix_attn.__file__.startswith({str(tmp_path)!r})\n"
        "import importlib.util as u\n"
        "for name in v.RELEASES[0].hooks:\n"
        "    origin = u.find_spec('sgl_prefix_attn.patches.' + name).origin\n"
        f"    assert origin.startswith({str(tmp_path)!r}), origin\n"
    )
    run_python(code, cwd=tmp_path)


def test_the_command_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "sgl_prefix_attn", "--version"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == f"{__version__}\n", result.stderr


def test_a_bare_checkout_needs_only_pythonpath(tmp_path):
    """-S leaves out site-packages, and with it the editable install."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import importlib.util as u\n"
        "for name in ('kernels', 'patches', 'plan'):\n"
        "    assert u.find_spec('sgl_prefix_attn.' + name) is not None, name\n"
    )
    run_python(code, "-S", cwd=tmp_path)


def test_a_server_started_from_the_checkout_finds_the_package_named_kernels(tmp_path):
    """SGLang imports Hugging Face's `kernels`; the folder of that name here must not be it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("installed = True\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "assert sys.path[0] == ''\n"
        "import kernels, sgl_prefix_attn.kernels.words\n"
        "assert kernels.installed\n"
    )
    run_python(code, cwd=ROOT)


@pytest.mark.parametrize("module", ["sgl_prefix_attn", "sgl_prefix_attn.plugin.entry_point"])
def test_import_pulls_in_neither_sglang_nor_cuda(module, tmp_path):
    code = (
        f"import sys, {module}\n"
        "assert 'sglang' not in sys.modules\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    run_python(code, cwd=tmp_path)


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_the_installed_entry_points_resolve_and_are_unique(group):
    ours = [e for e in metadata.entry_points(group=group) if e.value.startswith("sgl_prefix_attn")]
    assert len(ours) == 1
    assert callable(ours[0].load())


def run_python(code: str, *options: str, cwd: Path) -> None:
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
