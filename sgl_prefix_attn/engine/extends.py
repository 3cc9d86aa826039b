"""Extend and verify batches over a plan of their own, where they reach the backend.

A plan serves one batch. SGLang runs the attention of extend batches eagerly, with prefill CUDA
graphs around it or without; where such a graph holds attention itself, they are stock. Verification
has decode graphs of two variants (graph_variants.py).
"""

import logging
from dataclasses import dataclass

from sgl_prefix_attn.engine import determinism, model_facts, sglang_config
from sgl_prefix_attn.engine.asked_tokens import asked
from sgl_prefix_attn.engine.build import Execution, check_workspace
from sgl_prefix_attn.engine.lane import Lane
from sgl_prefix_attn.engine.ranks import agreement
from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.predict.prefill_time import PrefillTime
from sgl_prefix_attn.settings import BACKEND_NAME, Settings
from sgl_prefix_attn.step.extend import ExtendPreparer
from sgl_prefix_attn.step.preparer import Step

logger = logging.getLogger(__name__)

# New tokens of a batch that the workspace is made for: larger ones are chunks of long prompts,
# which fill tiles by themselves.
_MOST_QUERIES = 1 << 14
# Of the memory that SGLang has left for activations and graphs, what a deterministic server's
# prompts may take.
_SHARE = 0.5


@dataclass(frozen=True)
class PlannedKinds:
    """Which batches of several tokens a request reach the backend and may run plans: prompts, and
    drafts that a target model verifies."""

    prefill: bool
    verify: bool

    @classmethod
    def of(cls, server_args, settings: Settings) -> "PlannedKinds":
        """Verification of chains is planned where SGLang does it with the decode backend, or where
        prefill is."""
        prefill_name, decode_name = sglang_config.attention_backends(server_args)
        options = sglang_config.options(server_args)
        prefill = prefill_name == BACKEND_NAME and settings.prefill
        verified = prefill or options.speculative_attention_mode == "decode"
        chains = model_facts.verifies_chains(server_args)
        return cls(prefill, decode_name == BACKEND_NAME and chains and verified)

    @property
    def any(self) -> bool:
        return self.prefill or self.verify

    def __str__(self) -> str:
        return " and ".join(name for name, planned in vars(self).items() if planned)


def _capacity(runner, backend: KernelBackend) -> Capacity:
    """Return enough for most batches; for all of a deterministic server. Raises ValueError where
    it does not fit the memory."""
    tokens = runner.max_total_num_tokens
    if not determinism.is_on(runner.server_args):
        capacity = backend.server_capacity(_MOST_QUERIES, tokens, 0)
        wanted = backend.workspace_bytes(capacity)
        check_workspace(wanted, runner, f"{_MOST_QUERIES} prompt tokens")
        return capacity
    queries = determinism.most_prompt_tokens(runner)
    capacity = backend.server_capacity(
        queries, tokens, 0, runner.model_config.context_len, runner.req_to_token_pool.size
    )
    check_workspace(
        backend.workspace_bytes(capacity), runner, f"{queries} prompt tokens",
        "--chunked-prefill-size", "--max-running-requests", share=_SHARE,
    )  # fmt: skip
    return capacity


def _execution(runner, settings: Settings, decode: Execution) -> Execution:
    backend = decode.executor.backend
    capacity = _capacity(runner, backend)
    # rates that are the same on all ranks
    planner = backend.planner(decode.planner.rates, strategy=settings.strategy, capacity=capacity)
    planner.warm_up()
    return Execution(planner, PlanExecutor(backend, capacity), None)


class Extends:
    """Observes extend and verify batches, and decides which of them run a plan in their lane.

    decode  planner and kernels of decode steps: theirs are the same
    """

    def __init__(self, runner, settings: Settings, counters: StepCounters, decode: Execution):
        args, execution = runner.server_args, decode
        self.kinds = kinds = PlannedKinds.of(args, settings)
        problem = model_facts.unsupported_extend(runner)
        self._no_prompts = model_facts.unsupported_prompts(runner)  # against batches that extend
        if kinds.any:
            determinism.raise_if_prompts_are_stock(
                args, self._no_prompts or problem or model_facts.keeps_states(runner)
            )
            if problem is None:
                execution = _execution(runner, settings, decode)
            _log(kinds, problem, self._no_prompts, model_facts.no_draft_steps(args))
        times = decode.predictor and PrefillTime(decode.planner.heads, decode.predictor.source)
        self._preparer = ExtendPreparer(
            settings,
            execution.planner,
            counters,
            predictor=times,
            problem=problem,
            least_saving_us=model_facts.least_saving_us(runner),
            agree=agreement(),
            deterministic=determinism.is_on(args),
        )
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._verifies = False  # the observed or active batch is one of a target model's
        self.lane = Lane(runner, execution, counters, "an extend or verify batch", self.only_stock)

    @property
    def can_verify(self) -> bool:
        """Whether any batch that verifies can run a plan."""
        return self.kinds.verify and self._preparer.problem is None

    @property
    def needs_lengths(self) -> bool:
        """Whether the next batch that verifies is likely to run a plan, which takes exact lengths:
        the last one did, or was to."""
        return self._preparer.needs_lengths

    @property
    def graph_is_prefix(self) -> bool:
        """Whether the decode graph of this batch or capture verifies over a plan."""
        return self.lane.is_captured or (self._verifies and self.lane.is_prefix)

    def observe(self, forward_batch, schedule_batch, graph_problem: str | None) -> None:
        """Decide and plan the batch that SGLang is about to run, if it extends or verifies.

        graph_problem  why a decode graph of its size has no prefix variant, or None
        """
        self._verifies = forward_batch.forward_mode.is_target_verify()
        self.lane.observe(lambda: self._prepare(forward_batch, schedule_batch, graph_problem))

    def _prepare(self, forward_batch, schedule_batch, graph_problem: str | None) -> Step | None:
        """Return what is decided about a batch, None where nothing is."""
        if not (self.kinds.verify if self._verifies else self.kinds.prefill):
            return None
        if self._verifies and self._preparer.pass_over() is not None:
            return None
        try:
            found = asked(forward_batch, schedule_batch, self._req_to_token)
        except Exception as error:
            self._preparer.unreadable(error, self._verifies, schedule_batch.tree_cache)
            return None
        if found is None:
            return None
        batch, query_lens, against = found
        against = against or (graph_problem if self._verifies else self._no_prompts)
        return self._preparer.prepare(batch, query_lens, against, self._verifies)

    def held_by_a_graph(self) -> None:
        """Note that SGLang runs the observed batch in a prefill graph that holds attention itself:
        it and all later ones are stock."""
        if self.lane.observed is not None:
            self._no_prompts = "prefill_graph"
        self.lane.reset()

    def only_stock(self, reason: str) -> None:
        """Let no batch from now on run a plan."""
        if self.kinds.any:
            logger.warning(
                "--attention-backend prefix: extend and verify batches run stock attention (%s)",
                reason,
            )
        self._preparer.only_stock(reason)


def _log(
    kinds: PlannedKinds, problem: str | None, no_prompts: str | None, no_drafts: str | None
) -> None:
    """Log which kinds run plans, and why none does, prompts do not, and draft steps do not."""
    against_prompts = problem or no_prompts
    planned = PlannedKinds(
        kinds.prefill and against_prompts is None, kinds.verify and problem is None
    )
    if planned.any:
        logger.info(
            "--attention-backend prefix: plans serve %s batches of shared prefixes", planned
        )
    if planned.prefill != kinds.prefill:
        logger.info("--attention-backend prefix: prompts run stock attention (%s)", against_prompts)
    if planned.verify != kinds.verify:
        logger.info(
            "--attention-backend prefix: drafts are verified by stock attention (%s)", problem
        )
    if no_drafts is not None:
        logger.info(
            "--attention-backend prefix: the draft model runs stock kernels (%s)", no_drafts
        )
