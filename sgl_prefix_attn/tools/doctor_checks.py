"""The checks of `doctor`: pure functions from Facts to Checks.

A check fails exactly when `--attention-backend prefix` could not work because of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.execute.backends.family import HOPPER
from sgl_prefix_attn.plugin.versions import (
    CPU_HOOKS,
    RELEASES,
    SUPPORTED,
    install_command,
    match,
    newest_for,
)
from sgl_prefix_attn.records import FLASHINFER
from sgl_prefix_attn.settings import CPU_PLATFORM, VARIABLE_PREFIX, Settings
from sgl_prefix_attn.tools.doctor_facts import PLUGIN, Facts, chosen_family

OK, WARN, FAIL = "ok", "warn", "fail"
PLATFORM = "prefix_attn_cpu"
DIST = "sgl-prefix-attn"
OLDEST_ARCH = (8, 0)


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` says what to do, empty when there is nothing to do."""

    name: str
    status: str
    detail: str
    fix: str = ""


# Status, detail and fix of a check whose name is in run_checks.
Verdict = tuple[str, str] | tuple[str, str, str]


def run_checks(facts: Facts) -> list[Check]:
    """Make all checks, in the order of the report."""
    return [
        Check("python", *check_python(facts)),
        *check_packages(facts),
        Check("sglang", *check_sglang(facts)),
        Check("plugin entry point", *check_entry_point(facts)),
        Check("plugin filters", *check_plugin_filters(facts)),
        Check("settings", *check_settings(facts)),
        *check_hooks(facts),
        Check("device", *check_device(facts)),
        Check("models", OK, f"{facts.models}; others run stock attention"),
        Check("C compiler", *check_compiler(facts)),
        Check("kernels", *check_kernels(facts)),
        Check("calibration", *check_calibration(facts)),
    ]


def check_python(facts: Facts) -> Verdict:
    version = ".".join(map(str, facts.python))
    if facts.python > (3, 12):
        return WARN, version, "tested with Python 3.10 to 3.12"
    return OK, version


def check_packages(facts: Facts) -> Iterator[Check]:
    """Check each package; FlashInfer runs most stock steps, so only a GPU machine needs it."""
    for name, version in facts.versions.items():
        if version is None and name == "flashinfer-python" and not facts.gpu:
            yield Check(name, OK, "not installed, not needed without a GPU")
        elif version is None:
            yield Check(name, FAIL, "not installed", "pip install 'sgl-prefix-attn[sglang]'")
        else:
            yield Check(name, OK, version)


def check_sglang(facts: Facts) -> Verdict:
    newest, supported = newest_for(facts.python), SUPPORTED
    install = install_command(facts.python)
    if newest != RELEASES[-1].version:
        supported += f"; on Python {'.'.join(map(str, facts.python))} up to {newest}"
    if facts.sglang is None:
        return FAIL, f"not installed; supported: {supported}", install
    found = match(facts.sglang)
    if found is None:
        return FAIL, f"{facts.sglang} is not supported; supported: {supported}", install
    if found.tried:
        return OK, f"{facts.sglang} (supported: {supported})"
    served = f"it is served as {found.release.version} where all fits"
    return WARN, f"{facts.sglang} was not tried; {served}", install


def check_entry_point(facts: Facts) -> Verdict:
    """Check that SGLang finds our plugin under our name exactly once, and no other."""
    found = facts.plugins
    named = ", ".join(f"{PLUGIN} -> {entry.value} ({entry.dist})" for entry in found)
    if not found:
        fix = f"pip install {DIST} into the environment SGLang runs in"
        return FAIL, "SGLang finds no plugin `prefix_attn`", fix
    if len(found) > 1:
        fix = f"pip uninstall {DIST} until none is left, delete stale *.egg-info, install once"
        return FAIL, f"found {len(found)} times: {named}", fix
    if not found[0].value.startswith("sgl_prefix_attn.plugin.entry_point:"):
        return FAIL, f"another plugin: {named}", f"pip uninstall {found[0].dist}"
    return OK, named


def check_plugin_filters(facts: Facts) -> Verdict:
    """Check SGLANG_PLUGINS, a white list of entry points, and SGLANG_PLATFORM, which drops other
    platforms."""
    needed = [PLUGIN, PLATFORM] if on_cpu_platform(facts) else [PLUGIN]
    allowed = {part.strip() for part in facts.env.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if missing := ", ".join(entry for entry in needed if allowed and entry not in allowed):
        fix = f"add {missing} to SGLANG_PLUGINS, or unset it"
        return FAIL, f"SGLANG_PLUGINS leaves out {missing}", fix
    selected = facts.env.get("SGLANG_PLATFORM", "")
    if selected not in ("", PLATFORM):
        detail = f"SGLANG_PLATFORM={selected} makes SGLang skip every other package with a platform"
        return FAIL, detail, "unset SGLANG_PLATFORM"
    return OK, "SGLANG_PLUGINS and SGLANG_PLATFORM leave the plugin in"


def check_settings(facts: Facts) -> Verdict:
    """Check PREFIX_ATTN_*: an unknown variable or a bad value stops the server at start."""
    try:
        settings = Settings.from_env(facts.env)
    except ValueError as error:
        return FAIL, str(error), f"correct or unset what is named here: {error}"
    if settings.fallback == FLASHINFER and not facts.gpu:
        name = f"{VARIABLE_PREFIX}FALLBACK"
        return FAIL, f"{name}={FLASHINFER}, which runs on GPUs alone", f"unset {name}"
    given = sorted(name for name in facts.env if name.startswith(VARIABLE_PREFIX))
    return OK, ", ".join(f"{name}={facts.env[name]}" for name in given) or "defaults"


def check_hooks(facts: Facts) -> Iterator[Check]:
    """Check that each place that the plugin patches exists in the SGLang installed."""
    if facts.sglang is None:
        yield Check("hooks", WARN, "not looked at without SGLang")
        return
    if facts.sglang_error:
        fix = "correct what the error names; it is SGLang's own, or of a package that it imports"
        yield Check("hooks", FAIL, f"SGLang cannot be imported: {facts.sglang_error}", fix)
        return
    for hook in facts.hooks:
        name = f"hook {hook.module}"
        if hook.module in CPU_HOOKS and not on_cpu_platform(facts):
            yield Check(name, OK, f"{hook.target}: only on the CPU platform")
        elif hook.error:
            yield Check(name, FAIL, hook.error, f"install a supported SGLang ({SUPPORTED})")
        else:
            yield Check(name, OK, f"{hook.target}: {hook.why}")


def check_device(facts: Facts) -> Verdict:
    """Look for a GPU the kernels can run on, or the CPU platform asked for."""
    if facts.gpu and facts.arch:
        detail = f"{facts.gpu}, sm_{facts.arch[0]}{facts.arch[1]}"
        if facts.arch < OLDEST_ARCH:
            return FAIL, detail, "use a GPU of compute capability 8.0 or later"
        return OK, detail
    opt_in = f"{CPU_PLATFORM.name}=1"
    if not on_cpu_platform(facts):
        fix = f"with a GPU fix its driver; without one set {opt_in} to serve on the CPU"
        return FAIL, "torch sees no GPU and the CPU platform is not opted in", fix
    if facts.env.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        detail = "SGLANG_USE_CPU_ENGINE=1 keeps our platform out"
        return FAIL, detail, "unset SGLANG_USE_CPU_ENGINE"
    return OK, f"no GPU; the CPU platform is opted in ({opt_in})"


def on_cpu_platform(facts: Facts) -> bool:
    try:
        return not facts.gpu and CPU_PLATFORM.read(facts.env)
    except ValueError:
        return False  # the settings check names what is wrong


def check_compiler(facts: Facts) -> Verdict:
    """Look for the C compiler with which Triton compiles a launcher at the first launch."""
    if facts.compiler:
        return OK, facts.compiler
    status = FAIL if facts.gpu else WARN
    if "CC" in facts.env:
        detail = f"CC={facts.env['CC']} is no program; Triton looks for no other"
        return status, detail, "correct or unset CC"
    return status, "neither gcc nor clang found", "install gcc, or set CC"


def check_kernels(facts: Facts) -> Verdict:
    """Name the kernels that prefix steps run; wanted ones that cannot run stop the start."""
    try:
        family = chosen_family(facts.env, facts.no_hopper)
    except ValueError as error:
        return FAIL, str(error), "change PREFIX_ATTN_KERNELS or PREFIX_ATTN_STRATEGY"
    if facts.failed_self_tests and family.name == HOPPER:
        failed = "; ".join(what for what, _ in facts.failed_self_tests)
        files = " ".join(path for _, path in facts.failed_self_tests)
        detail = f"{family}, but portable ones where these failed their self-test: {failed}"
        return WARN, detail, f"to try them again at the next start, remove {files}"
    return OK, f"32/8 heads: {family}" if facts.gpu else str(family)


def check_calibration(facts: Facts) -> Verdict:
    """Name the calibration and the fallback that it is beside, which a server's need not be;
    without one the choice of kernels rests on estimates."""
    found = facts.calibration
    if found is None:
        return OK, "none, and none is needed without a GPU"
    if isinstance(found, str):
        return FAIL, found, f"reinstall {DIST}"
    beside = found.calibration.key.fallback
    detail = f"32/8 heads, beside {beside}: {found.message.removeprefix('calibration ')}"
    if of_such_layers(found):
        return OK, detail
    return WARN, detail, "sgl-prefix-attn calibrate --model FOLDER takes minutes"


def of_such_layers(found: Any) -> bool:
    """Whether a calibration (store.Found) was measured for layers like these on such a GPU, and
    nothing is wrong with it."""
    return found.calibration.source in ("measured", "judged", "shipped") and not found.warning
