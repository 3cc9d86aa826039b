"""The import arrows between the parts: read from the source, lazy imports included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sgl_prefix_attn"
FOLDERS = {PACKAGE: ROOT / PACKAGE, f"{PACKAGE}.kernels": ROOT / "kernels"}
FOLDERS[f"{PACKAGE}.patches"] = ROOT / "patches"

# modelinfo is the backend's reading of the model; cpu_* exist only for SGLang's platform layer.
SGLANG_IMPORTERS = {"backend", "modelinfo", "plugin", "metrics", "cpu_platform", "cpu_allocator"}
ENGINE_SIDE = SGLANG_IMPORTERS | {"patches", "tree"}
LAYOUT_IMPORTERS = {"plan", "reference", "executor", "launch"}


def module_names(path: Path, module: str) -> set[str]:
    """Absolute names of all that `module` imports; `from a import b` gives a and a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def all_imports() -> dict[str, set[str]]:
    """Module -> what it imports, over the package, kernels/ and patches/."""
    imports = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            imports[module] = module_names(path, module)
    return imports


IMPORTS = all_imports()


def part(module: str) -> str:
    """The part of the package a module belongs to: plan, kernels, patches, backend, ..."""
    return module.removeprefix(PACKAGE).lstrip(".").split(".")[0]


def importers(target: str) -> set[str]:
    """Parts with a module that imports `target` or something in it."""
    return {
        part(module)
        for module, names in IMPORTS.items()
        if any(name == target or name.startswith(target + ".") for name in names)
    }


def parts_imported_by(name: str) -> set[str]:
    found = set()
    for module, names in IMPORTS.items():
        if part(module) == name:
            found |= {part(n) for n in names if n.startswith(PACKAGE + ".")}
    return found - {name}


def test_the_source_was_found():
    assert {"records", "plan", "policy", "backend", "kernels", "patches"} <= set(map(part, IMPORTS))


def test_relative_imports_are_resolved(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("from . import b\nfrom ..c import d\nimport e.f\n")
    assert module_names(path, "p.q.a") == {"p.q", "p.q.b", "p.c", "p.c.d", "e.f"}


def test_only_the_engine_side_imports_sglang():
    assert importers("sglang") - {"patches"} <= SGLANG_IMPORTERS


def test_the_tree_is_read_by_attribute():
    assert "tree" not in importers("sglang")


def test_launch_is_the_only_importer_of_the_kernels():
    assert importers(f"{PACKAGE}.kernels") - {"kernels"} <= LAYOUT_IMPORTERS
    for module, names in IMPORTS.items():
        if part(module) in LAYOUT_IMPORTERS - {"launch"}:
            used = {n for n in names if n.startswith(f"{PACKAGE}.kernels.")}
            layout = f"{PACKAGE}.kernels.layout"
            assert all(n == layout or n.startswith(layout + ".") for n in used), module


def test_kernels_stand_alone():
    for module, names in IMPORTS.items():
        if part(module) == "kernels":
            outside = {n for n in names if n.split(".")[0] in ("sglang", PACKAGE)}
            assert all(n.startswith(f"{PACKAGE}.kernels") for n in outside), (module, outside)


@pytest.mark.parametrize("lower", ["records", "plan", "policy", "reference", "executor", "launch"])
def test_nothing_below_the_backend_imports_the_engine_side(lower):
    assert not parts_imported_by(lower) & ENGINE_SIDE


def test_records_plan_policy_point_one_way():
    assert not parts_imported_by("records") & {"plan", "policy"}
    assert "policy" not in parts_imported_by("plan")
