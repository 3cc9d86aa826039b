"""Which kernels a server or wrapper runs: a pure function, also for `doctor`.

All run the same plans (kernels/words.py). Hopper's are Gluon's (hopper_backend.py); what these
cannot run, on any GPU from sm_80 on, the portable ones can (portable_backend.py, Triton; on a CPU
torch_backend.py).
"""

from typing import NamedTuple

from sgl_prefix_attn.records import CALIBRATED

# As PREFIX_ATTN_KERNELS names the families.
AUTO, HOPPER, PORTABLE = KERNELS = ("auto", "hopper", "portable")


class Family(NamedTuple):
    """name: HOPPER or PORTABLE; why_not: what stands against HOPPER, as a label, or None."""

    name: str
    why_not: str | None = None

    def __str__(self) -> str:
        if self.name == HOPPER:
            return "Hopper kernels (Gluon, sm_90)"
        return f"portable kernels (Triton, torch on a CPU), not Hopper's ({self.why_not})"


def choose_family(
    wanted: str, strategy: str, why_no_hopper: str | None, why_no_portable: str | None = None
) -> Family:
    """Choose what the prefix steps of a server or wrapper run.

    wanted         AUTO, HOPPER or PORTABLE
    strategy       of splitting and merging nodes: Hopper's kernels have but CALIBRATED
    why_no_hopper  why_no_hopper() of its device and model; why_no_portable: the same of portable
                   kernels, which latent KV alone leaves without

    Raises ValueError for kernels that do not exist, for those that are wanted and cannot run, and
    for another strategy where Hopper's run unless portable ones are asked for, too: these are
    slower there, so no strategy turns to them by itself.
    """
    if wanted not in KERNELS:
        raise ValueError(f"kernels must be {AUTO}, {HOPPER} or {PORTABLE}; got {wanted!r}")
    why_not = {HOPPER: why_no_hopper, PORTABLE: why_no_portable}.get(wanted)
    if why_not is not None:
        raise ValueError(
            f"kernels, or PREFIX_ATTN_KERNELS={wanted}: these kernels cannot run here ({why_not}); "
            "let them be chosen, or remove what stands against them"
        )
    if wanted == PORTABLE:
        return Family(PORTABLE, "kernels:portable")
    if why_no_hopper is not None:
        return Family(PORTABLE, why_no_hopper)
    if strategy != CALIBRATED:
        others = f"run with kernels {PORTABLE}, or PREFIX_ATTN_KERNELS={PORTABLE}"
        if why_no_portable is not None:
            others = f"have no kernels here ({why_no_portable})"
        raise ValueError(
            f"strategy {strategy}, or PREFIX_ATTN_STRATEGY={strategy}: Hopper's kernels, which run "
            f"here, know {CALIBRATED} alone; others {others}"
        )
    return Family(HOPPER)
