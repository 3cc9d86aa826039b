"""The checks of `doctor`: pure functions from Facts to Checks.

A check fails exactly when `--attention-backend prefix` could not work because of it.
"""

from dataclasses import dataclass

from sgl_prefix_attn.cli.doctor_facts import EntryPoint, Facts
from sgl_prefix_attn.settings import Settings

OK, WARN, FAIL = "ok", "warn", "fail"
PLUGIN, PLATFORM = "prefix_attn", "prefix_attn_cpu"
DIST = "sgl-prefix-attn"
CPU_ENV = "SGL_PREFIX_ATTN_CPU_PLATFORM"
CPU_ONLY_HOOKS = ("cpu_index_helpers",)
OLDEST_ARCH, HOPPER = (8, 0), (9, 0)
CALIBRATE = "sgl-prefix-attn calibrate --model FOLDER takes minutes"


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` says what to do, empty when there is nothing to do."""

    name: str
    status: str
    detail: str
    fix: str = ""


def on_cpu_platform(facts: Facts) -> bool:
    return not facts.gpu and facts.env.get(CPU_ENV) == "1"


def check_python(facts: Facts) -> Check:
    version = ".".join(map(str, facts.python))
    if facts.python < (3, 10):
        return Check("python", FAIL, version, "use Python 3.10, 3.11 or 3.12")
    if facts.python > (3, 12):
        return Check("python", WARN, version, "tested with Python 3.10 to 3.12")
    return Check("python", OK, version)


def check_packages(facts: Facts) -> list[Check]:
    """One check a package; FlashInfer runs the stock steps, so only a GPU machine needs it.

    SGLang's requirements are its CUDA set: without a GPU they are not asked for.
    """
    checks = []
    for name, version in facts.versions.items():
        if facts.gpu and name in facts.unmet:
            detail = f"{version}, but SGLang requires {name}{facts.unmet[name]}"
            fix = f"pip install '{name}{facts.unmet[name]}'"
            checks.append(Check(name, WARN, detail, fix))
        elif version is not None:
            checks.append(Check(name, OK, version))
        elif name == "flashinfer-python" and not facts.gpu:
            checks.append(Check(name, OK, "not installed, not needed without a GPU"))
        else:
            fix = "pip install 'sgl-prefix-attn[sglang]'"
            checks.append(Check(name, FAIL, "not installed", fix))
    return checks


def check_sglang_version(facts: Facts) -> Check:
    name, supported = "sglang version", ", ".join(facts.supported_sglang)
    installed = facts.versions.get("sglang")
    if facts.plugin_error:
        fix = "reinstall SGLang and sgl-prefix-attn into this environment"
        return Check(name, FAIL, f"the plugin does not import: {facts.plugin_error}", fix)
    wanted = f"pip install sglang=={facts.supported_sglang[-1]}"
    if installed is None:
        return Check(name, FAIL, f"no SGLang; supported: {supported}", wanted)
    if installed.split("+")[0] not in facts.supported_sglang:  # a local tag is the same code
        detail = f"{installed} is not supported; supported: {supported}"
        return Check(name, FAIL, detail, wanted)
    return Check(name, OK, f"{installed} (supported: {supported})")


def check_entry_point(facts: Facts) -> Check:
    """SGLang must find our plugin under our name exactly once, and no other under that name."""
    found = [e for e in facts.plugins if e.name == PLUGIN]
    if not found:
        fix = f"pip install {DIST} into the environment SGLang runs in"
        return Check("plugin entry point", FAIL, "SGLang finds no plugin `prefix_attn`", fix)
    if len(found) > 1:
        fix = f"pip uninstall {DIST} until none is left, delete stale *.egg-info, install once"
        return Check("plugin entry point", FAIL, f"found {len(found)} times: {_list(found)}", fix)
    if not found[0].value.startswith("sgl_prefix_attn.plugin.entry_point:"):
        fix = f"pip uninstall {found[0].dist}"
        return Check("plugin entry point", FAIL, f"another plugin: {_list(found)}", fix)
    return Check("plugin entry point", OK, _list(found))


def check_plugin_filters(facts: Facts) -> Check:
    """SGLANG_PLUGINS is a white list of entry points; SGLANG_PLATFORM drops other platforms."""
    name = "plugin filters"
    needed = [PLUGIN, PLATFORM] if on_cpu_platform(facts) else [PLUGIN]
    allowed = {part.strip() for part in facts.env.get("SGLANG_PLUGINS", "").split(",")} - {""}
    missing = [entry for entry in needed if entry not in allowed]
    if allowed and missing:
        fix = f"add {', '.join(missing)} to SGLANG_PLUGINS, or unset it"
        return Check(name, FAIL, f"SGLANG_PLUGINS leaves out {', '.join(missing)}", fix)
    selected = facts.env.get("SGLANG_PLATFORM", "")
    if selected and selected != PLATFORM:
        detail = f"SGLANG_PLATFORM={selected} makes SGLang skip every other package with a platform"
        return Check(name, FAIL, detail, "unset SGLANG_PLATFORM")
    return Check(name, OK, "SGLANG_PLUGINS and SGLANG_PLATFORM leave the plugin in")


def check_settings(facts: Facts) -> Check:
    """SGL_PREFIX_ATTN_*: an unknown variable or a bad value stops the server at start."""
    try:
        Settings.from_env(facts.env)
    except ValueError as error:
        return Check("settings", FAIL, str(error), "correct or unset it")
    given = sorted(name for name in facts.env if name.startswith("SGL_PREFIX_ATTN_"))
    return Check("settings", OK, ", ".join(f"{n}={facts.env[n]}" for n in given) or "defaults")


def check_hooks(facts: Facts) -> list[Check]:
    """Each place of SGLang that the plugin patches must exist in the SGLang installed."""
    if facts.versions.get("sglang") is None:
        return [Check("hooks", WARN, "not looked at without SGLang")]
    checks = []
    for hook in facts.hooks:
        cpu_only = hook.module in CPU_ONLY_HOOKS
        name = f"hook {hook.module}"
        if cpu_only and not on_cpu_platform(facts):
            checks.append(Check(name, OK, f"{hook.target}: only on the CPU platform"))
        elif hook.error:
            fix = f"install a supported SGLang ({', '.join(facts.supported_sglang) or 'see docs'})"
            checks.append(Check(name, FAIL, f"{hook.target}: {hook.error}", fix))
        else:
            checks.append(Check(name, OK, f"{hook.target}: {hook.why}"))
    return checks or [Check("hooks", FAIL, "no patches found", f"reinstall {DIST}")]


def check_device(facts: Facts) -> Check:
    """A GPU the kernels can run on, or the CPU platform asked for."""
    if facts.gpu and facts.arch:
        detail = f"{facts.gpu}, sm_{facts.arch[0]}{facts.arch[1]}"
        if facts.arch < OLDEST_ARCH:
            return Check("device", FAIL, detail, "use a GPU of compute capability 8.0 or later")
        return Check("device", OK, detail)
    if on_cpu_platform(facts):
        if facts.env.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
            fix = "unset SGLANG_USE_CPU_ENGINE"
            return Check("device", FAIL, "SGLANG_USE_CPU_ENGINE=1 keeps our platform out", fix)
        return Check("device", OK, f"no GPU; the CPU platform is opted in ({CPU_ENV}=1)")
    fix = f"on a machine with a GPU fix its driver; without one set {CPU_ENV}=1 to serve on the CPU"
    return Check("device", FAIL, "torch sees no GPU and the CPU platform is not opted in", fix)


def check_prefill(facts: Facts) -> Check:
    """Prefill is the composed stock backend's; SGLang's default for Hopper is a faster one."""
    if facts.arch != HOPPER:
        return Check("prefill", OK, "FlashInfer" if facts.gpu else "torch")
    detail = "FlashInfer; faster on this GPU is SGLang's default: --prefill-attention-backend fa3"
    return Check("prefill", OK, f"{detail} --decode-attention-backend prefix")


def check_compiler(facts: Facts) -> Check:
    """Triton compiles a small launcher with the C compiler at the first kernel launch."""
    if facts.compiler:
        return Check("C compiler", OK, facts.compiler)
    status = FAIL if facts.gpu else WARN
    if "CC" in facts.env:
        detail = f"CC={facts.env['CC']} is no program; Triton looks for no other"
        return Check("C compiler", status, detail, "correct or unset CC")
    return Check("C compiler", status, "neither gcc nor clang found", "install gcc, or set CC")


def check_calibration(facts: Facts) -> Check:
    """Without a calibration the backend works, but its choice of kernels rests on estimates."""
    if not facts.gpu:
        return Check("calibration", OK, "none, and none is needed without a GPU")
    detail = facts.calibration.removeprefix("calibration ")
    if not facts.calibration_source:
        return Check("calibration", FAIL, detail, f"reinstall {DIST}")
    if facts.calibration_source in ("measured", "shipped") and not facts.calibration_warning:
        return Check("calibration", OK, f"32/8 heads: {detail}")
    return Check("calibration", WARN, f"32/8 heads: {detail}", CALIBRATE)


def run_checks(facts: Facts) -> list[Check]:
    """All checks, in the order of the report."""
    return [
        check_python(facts),
        *check_packages(facts),
        check_sglang_version(facts),
        check_entry_point(facts),
        check_plugin_filters(facts),
        check_settings(facts),
        *check_hooks(facts),
        check_device(facts),
        check_prefill(facts),
        check_compiler(facts),
        check_calibration(facts),
    ]


def _list(entries: list[EntryPoint]) -> str:
    return ", ".join(f"{e.name} -> {e.value} ({e.dist})" for e in entries)
