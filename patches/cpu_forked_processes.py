"""CPU platform only: SGLang's processes begin as copies of its first one."""

import multiprocessing

TARGET = "sglang.srt.entrypoints.engine._set_envs_and_config"
TYPE = "after"
PARAMETERS = ("server_args",)
WHY = "one that is spawned imports SGLang anew, seconds of work; without CUDA it may be forked"


def hook(result, server_args):
    """Choose how processes start, which SGLang has just done itself: by spawning."""
    multiprocessing.set_start_method("fork", force=True)
