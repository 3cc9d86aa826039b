"""Environment variables: one table, bad values stop the start with a message that helps."""

from pathlib import Path

import pytest

from sgl_prefix_attn.records import STRATEGIES
from sgl_prefix_attn.settings import VARIABLES, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs/install.md"


@pytest.mark.parametrize("environ", [{}, {variable.name: "" for variable in VARIABLES}])
def test_defaults(environ):
    assert Settings.from_env(environ) == Settings()


def test_values_are_parsed():
    settings = Settings.from_env(
        {
            "PREFIX_ATTN_STRATEGY": "pat",
            "PREFIX_ATTN_POLICY": "stock",
            "PREFIX_ATTN_KERNELS": "hopper",
            "PREFIX_ATTN_FALLBACK": "default",
            "PREFIX_ATTN_PREFILL": "1",
            "PREFIX_ATTN_HEADROOM": "128",
            "PREFIX_ATTN_MAX_VARIANT_BS": "0",
            "PREFIX_ATTN_CHECK": "1",
            "PREFIX_ATTN_CHECK_EVERY": " 4 ",
            "PREFIX_ATTN_DUMP": "dumps/1",
            "PREFIX_ATTN_DUMP_EVERY": "7",
            "PREFIX_ATTN_CPU_PLATFORM": "1",
            "PATH": "/bin",
        }
    )
    assert settings == Settings(
        "pat", "stock", "hopper", "default", True, 128, 0, True, 4, "dumps/1", 7, True
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("STRATEGY", "fast", "query | naive | compute | pat | calibrated"),
        ("POLICY", "Prefix", "auto | prefix | stock"),
        ("KERNELS", "gluon", "auto | hopper | portable"),
        ("FALLBACK", "fa2", "auto | flashinfer | default"),
        ("HEADROOM", "0", "integer >= 1"),
        ("HEADROOM", "many", "integer >= 1"),
        ("MAX_VARIANT_BS", "-1", "integer >= 0"),
        ("CHECK", "yes", "0 | 1"),
        ("CHECK_EVERY", "-1", "integer >= 1"),
        ("DUMP", "0", "a folder"),
        ("DUMP", "1", "a folder"),
        ("DUMP_EVERY", "0", "integer >= 1"),
        ("CPU_PLATFORM", "true", "0 | 1"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(ValueError) as error:
        Settings.from_env({f"PREFIX_ATTN_{name}": value})
    assert str(error.value) == f"PREFIX_ATTN_{name}={value!r}: allowed is {allowed}"


@pytest.mark.parametrize("old", ["SGL_PREFIX_ATTN_POLICY", "SGLANG_PREFIX_ATTN_POLICY"])
def test_an_old_name_is_refused_with_the_new_one(old):
    with pytest.raises(ValueError, match=f"^{old} is not read, set PREFIX_ATTN_POLICY$"):
        Settings.from_env({old: "stock"})
    with pytest.raises(ValueError, match=f"^{old} is not read"):
        Settings.from_env({old: "stock", "PREFIX_ATTN_POLICY": "stock"})


def test_sglangs_copy_of_an_old_name_is_not_named_beside_it():
    both = {"SGL_PREFIX_ATTN_POLICY": "stock", "SGLANG_PREFIX_ATTN_POLICY": "stock"}
    with pytest.raises(ValueError, match="^SGL_PREFIX_ATTN_POLICY is not read, set PREFIX_ATTN_"):
        Settings.from_env(both)


def test_every_bad_variable_is_named():
    with pytest.raises(ValueError) as error:
        Settings.from_env(
            {
                "PREFIX_ATTN_STRATEGI": "pat",
                "PREFIX_ATTN_A": "",
                "SGL_PREFIX_ATTN_POLICY": "stock",
                "PREFIX_ATTN_CHECK": "yes",
                "PREFIX_ATTN_HEADROOM": "0",
            }
        )
    parts = str(error.value).split("; ")
    assert len(parts) == 4
    assert parts[0].startswith(
        "unknown environment variable PREFIX_ATTN_A, PREFIX_ATTN_STRATEGI: known are"
    )
    assert [part.split("=")[0] for part in parts[2:]] == [
        "PREFIX_ATTN_HEADROOM", "PREFIX_ATTN_CHECK"
    ]  # fmt: skip


def test_the_log_says_what_differs_from_the_defaults():
    assert Settings().describe() == "default settings"
    changed = Settings(headroom=32, check=True).describe()
    assert changed == "PREFIX_ATTN_HEADROOM=32, PREFIX_ATTN_CHECK=1"


def test_the_table_has_every_field_and_strategy():
    assert [variable.field for variable in VARIABLES] == list(vars(Settings()))
    assert tuple(VARIABLES[0].allowed.split(" | ")) == STRATEGIES


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.field)
def test_the_install_page_has_its_row(variable):
    allowed, default = variable.allowed.replace("|", "\\|"), variable.text(variable.default)
    shown = f"`{default}`" if default else "none"
    row = f"| `{variable.name}` | {allowed} | {shown} | {variable.doc} |"
    assert row in PAGE.read_text().splitlines()
