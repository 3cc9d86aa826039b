"""Request patterns on a running engine; each returns the output token ids of its requests.

Joins are triggered by tokens that have come back, not by time, so every backend sees one pattern.
"""

import asyncio
import random

SYSTEM = [random.Random(7).randrange(260, 1000) for _ in range(96)]


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(260, 1000) for _ in range(count)]


OPENING = tokens(180, 4)  # of the questions about an image


async def generate(engine, ids, new_tokens, *, at=None, **options):
    """One greedy request with options of SGLang's GenerateReqInput; at = {n: event} sets each event
    when n tokens have come back."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        stream=True,
        **options,
    )
    output = []
    async for chunk in engine.tokenizer_manager.generate_request(request, None):
        output = chunk["output_ids"]
        for count, event in (at or {}).items():
            if len(output) >= count:
                event.set()
    return output


async def together(requests):
    return await asyncio.gather(*requests)


async def after(event, request):
    await event.wait()
    return await request


async def staggered(engine):
    """Share, split, join and finish at different times."""
    events = [asyncio.Event() for _ in range(5)]
    a = SYSTEM + tokens(1, 20)
    return await asyncio.gather(
        generate(engine, a, 128, at={4: events[0], 10: events[1], 16: events[2]}),
        # Long enough to decode beside the fourth on a machine where tokens come back late.
        generate(engine, SYSTEM + tokens(2, 11), 120),
        # Splits the system prompt's node while the first request decodes.
        after(events[0], generate(engine, SYSTEM[:50] + tokens(3, 30), 112)),
        # Shares part of the first request's own prompt.
        after(events[1], generate(engine, a[:105] + tokens(4, 5), 9, at={3: events[3]})),
        after(events[2], generate(engine, tokens(5, 40), 12)),
        # Leaves after one token: the batch decodes it once more at most.
        after(events[3], generate(engine, SYSTEM + tokens(6, 3), 1)),
    )


async def duplicates(engine):
    """Identical prompts at once: each is prefilled, then mapped to the first one's slots."""
    ids = tokens(11, 65)
    return await together(generate(engine, ids, 20) for _ in range(4))


async def late_prompt(engine):
    """A long prompt arrives while others decode: chunked (and mixed) when the server does so."""
    event = asyncio.Event()
    others = [
        generate(engine, SYSTEM + tokens(20 + i, 5 + i), 40, at={6: event} if i == 0 else None)
        for i in range(3)
    ]
    return await asyncio.gather(
        *others, after(event, generate(engine, SYSTEM[:32] + tokens(30, 260), 10))
    )


async def late_single_token(engine):
    """A long prompt for one token arrives while others decode: it never joins their batch."""
    event = asyncio.Event()
    others = [
        generate(engine, SYSTEM + tokens(25 + i, 5 + i), 30, at={8: event} if i == 0 else None)
        for i in range(3)
    ]
    return await asyncio.gather(*others, after(event, generate(engine, tokens(31, 230), 1)))


async def evicting(engine):
    """One request decodes while others come and go, more than a small pool keeps."""
    event = asyncio.Event()

    async def one_after_the_other():
        await event.wait()
        return [await generate(engine, tokens(90 + i, 100), 2) for i in range(8)]

    first = generate(engine, SYSTEM + tokens(89, 7), 64, at={2: event})
    sibling = generate(engine, SYSTEM + tokens(88, 9), 60)
    *two, rest = await asyncio.gather(first, sibling, one_after_the_other())
    return [*two, *rest]


async def loaded_back(engine):
    """Siblings whose prompt a small pool has evicted since siblings before them ran: HiCache loads
    it back from the host, beside a request that decodes all along. Then another one splits it."""
    first = await siblings(engine)
    running, split = asyncio.Event(), asyncio.Event()

    async def others():
        await running.wait()
        for i in range(8):
            await generate(engine, tokens(110 + i, 100), 2)
        again = [
            generate(engine, SYSTEM + tokens(120 + i, 6 + i), 24, at={} if i else {4: split})
            for i in range(3)
        ]
        return await together(
            [*again, after(split, generate(engine, SYSTEM[:50] + tokens(9, 9), 12))]
        )

    one = generate(engine, tokens(109, 40), 160, at={2: running})
    one, rest = await together([one, others()])
    return [*first, one, *rest]


async def two_turns(engine):
    """A second turn continues the first one's output, next to a sibling."""
    ids = SYSTEM + tokens(40, 8)
    first = await generate(engine, ids, 14)
    second = ids + first + tokens(41, 6)
    rest = await asyncio.gather(
        generate(engine, second, 12), generate(engine, ids + first[:5] + tokens(42, 4), 12)
    )
    return [first, *rest]


async def unshared(engine):
    return await together(generate(engine, tokens(50 + i, 30 + 7 * i), 10 + i) for i in range(4))


async def extra_key(engine):
    """Equal prompts under two keys and under none, two of each decoding together: each key is a
    tree of its own."""
    ids, keys = tokens(60, 70), ("a", "b", None)
    for key in keys:
        await generate(engine, ids, 2, extra_key=key)
    return await together(
        generate(engine, ids + tokens(61 + i, 3), 24, extra_key=key)
        for i, key in enumerate(keys + keys)
    )


async def sessions(engine):
    """Two sessions of two turns below one prompt, decoding together and beside a request of none.
    Where the server streams sessions, a session's KV is no part of the tree."""
    from sglang.srt.managers import io_struct

    manager, names = engine.tokenizer_manager, ("one", "other")
    streaming = manager.server_args.enable_streaming_session
    for name in names:
        await manager.open_session(
            io_struct.OpenSessionReqInput(
                capacity_of_str_len=4096, session_id=name, streaming=streaming
            ),
            None,
        )
    await generate(engine, SYSTEM, 2)

    def turn(number, ids, new_tokens, name):
        params = {"id": name, "rid": f"{name} {number - 1}" if number > 1 else None}
        return generate(
            engine, ids, new_tokens, rid=f"{name} {number}", session_params=params
        )  # fmt: skip

    first = await together(turn(1, SYSTEM + tokens(130 + i, 5), 10, n) for i, n in enumerate(names))
    second = await together(
        [
            *(turn(2, tokens(132 + i, 6), 14, name) for i, name in enumerate(names)),
            generate(engine, SYSTEM + tokens(134, 4), 14),
        ]
    )
    for name in names:
        await manager.close_session(io_struct.CloseSessionReqInput(session_id=name), None)
    return [*first, *second]


async def samples(engine):
    """Two samples of each of three prompts, with log-probabilities; returns of each sample the
    tokens, those that the log-probabilities are of, and the two best at each place.

    The first place is left out: SGLang loses its log-probability when it retracts a request whose
    first token it has not looked at yet (the streamer has then sent place 0 of an empty list).
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def ask(ids):
        request = GenerateReqInput(
            input_ids=ids,
            sampling_params={
                "temperature": 0, "max_new_tokens": 14, "ignore_eos": True, "n": 2
            },
            return_logprob=True,
            top_logprobs_num=2,
        )  # fmt: skip
        answers = await anext(engine.tokenizer_manager.generate_request(request, None))
        found = []
        for answer in answers:
            meta = answer["meta_info"]
            places = len(answer["output_ids"]) - 1
            best = [pair for top in meta["output_top_logprobs"][-places:] for pair in top]
            pairs = [*meta["output_token_logprobs"][-places:], *best]
            found.append([*answer["output_ids"], *(token for _, token, *_ in pairs)])
        return found

    answers = await together(ask(SYSTEM + tokens(140 + i, 4 + i)) for i in range(3))
    return [sample for two in answers for sample in two]


async def aborted(engine):
    """A long prompt is aborted while others decode: between two of its chunks, in a server that
    makes some. Then two prompts begin with it and find in the tree what was prefilled."""
    join, leave = asyncio.Event(), asyncio.Event()
    long, rid = SYSTEM[:32] + tokens(153, 1400), "aborted"

    async def abort():
        await leave.wait()
        engine.tokenizer_manager.abort_request(rid)

    others = [
        generate(
            engine, SYSTEM + tokens(150 + i, 5 + i), 40, at={} if i else {6: join, 12: leave}
        )
        for i in range(3)
    ]  # fmt: skip
    cut = after(join, generate(engine, long, 30, rid=rid))
    *rest, _, _ = await together([*others, cut, abort()])
    return [*rest, *await together(generate(engine, long + tokens(154 + i, i), 8) for i in (1, 2))]


async def churn(engine):
    """Forty requests of a few prompts, six at a time: whenever one ends, the next comes. Each fifth
    is aborted while it decodes."""
    rng, seats = random.Random(160), asyncio.Semaphore(6)
    heads = [SYSTEM, SYSTEM[:50], SYSTEM[:50] + tokens(161, 40), tokens(162, 33), []]
    prompts = [rng.choice(heads) + tokens(170 + i, rng.randint(1, 40)) for i in range(40)]
    lengths = [rng.randint(4, 20) for _ in prompts]

    async def kept(ids, length):
        async with seats:
            return await generate(engine, ids, length)

    async def dropped(ids, rid):
        event = asyncio.Event()

        async def abort():
            await event.wait()
            engine.tokenizer_manager.abort_request(rid)

        async with seats:
            await together([generate(engine, ids, 30, rid=rid, at={3: event}), abort()])

    outputs = await together(
        dropped(ids, f"dropped {i}") if i % 5 == 4 else kept(ids, length)
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    return [output for output in outputs if output is not None]


async def siblings(engine):
    """Four requests under one prompt that is already cached, decoding together."""
    await generate(engine, SYSTEM, 2)
    return await together(generate(engine, SYSTEM + tokens(70 + i, 6 + i), 24) for i in range(4))


async def long_siblings(engine):
    """Siblings whose prompt has several of the chunks at whose ends a tree keeps a state."""
    prompt = SYSTEM + tokens(190, 240)
    await generate(engine, prompt, 2)
    return await together(generate(engine, prompt + tokens(191 + i, 6 + i), 24) for i in range(4))


async def beams(engine):
    """A beam search, which has rows without requests, alone and then beside requests that share its
    prompt; the texts of the beams come first."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def search(ids):
        params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        request = GenerateReqInput(
            input_ids=ids, sampling_params={**params, "beam_width": 4, "n": 2}
        )
        async for answer in engine.tokenizer_manager.generate_request(request, None):
            found = answer["meta_info"]["beam_results"]
        return [beam["output_ids"] for beam in found]

    alone = await search(SYSTEM + tokens(200, 9))
    begun = asyncio.Event()
    sibling, beside, *others = await asyncio.gather(
        generate(engine, SYSTEM + tokens(201, 7), 90, at={4: begun}),
        after(begun, search(SYSTEM + tokens(202, 9))),
        after(begun, generate(engine, SYSTEM + tokens(203, 5), 60)),
    )
    return [*alone, *beside, sibling, *others]


async def crowd(engine):
    """Six requests under one prompt that is already cached: more than a small graph holds."""
    await generate(engine, SYSTEM, 2)
    return await together(generate(engine, SYSTEM + tokens(80 + i, 6 + i), 16) for i in range(6))


async def adapters(engine):
    """Equal prompts under two LoRA adapters and under none, two of each decoding together: KV is
    shared under the same adapter only."""
    from tests.support.lora import ADAPTERS

    ids, names = SYSTEM + tokens(100, 4), (*ADAPTERS, None)
    for name in names:
        await generate(engine, ids, 2, lora_path=name)
    return await together(
        generate(engine, ids + tokens(101 + i, 3 + i), 24, lora_path=name)
        for i, name in enumerate(name for name in names for _ in range(2))
    )


async def images(engine):
    """Two questions about each of two images, and one about none, below one prompt and decoding
    together: KV is shared up to an image, and behind it under the same image only."""
    from tests.support.qwen_vl import IMAGE, VISION_END, VISION_START, image

    def ask(seed, question, new_tokens):
        ids = [*SYSTEM, VISION_START, IMAGE, VISION_END, *OPENING, *question]
        return generate(engine, ids, new_tokens, image_data=[image(seed)])

    for seed in (1, 2):
        await ask(seed, [], 2)
    questions = [tokens(181 + i, 5 + i) for i in range(2)]
    return await together(
        [
            *(ask(seed, question, 24) for seed in (1, 2) for question in questions),
            generate(engine, SYSTEM + tokens(183, 7), 24),
        ]
    )


async def slept(engine):
    """The siblings again after the server gave its KV memory back and took it anew."""
    from sglang.srt.managers import io_struct

    first = await siblings(engine)
    manager, tags = engine.tokenizer_manager, ["kv_cache"]
    await manager.release_memory_occupation(
        io_struct.ReleaseMemoryOccupationReqInput(tags=tags), None
    )
    await manager.resume_memory_occupation(
        io_struct.ResumeMemoryOccupationReqInput(tags=tags), None
    )
    return first + await siblings(engine)


async def updated(engine):
    """The siblings again after the server loaded its weights anew and captured its graphs again."""
    from sglang.srt.managers import io_struct

    first, manager = await siblings(engine), engine.tokenizer_manager
    success, message, *_ = await manager.update_weights_from_disk(
        io_struct.UpdateWeightFromDiskReqInput(
            model_path=manager.server_args.model_path, recapture_cuda_graph=True
        ),
        None,
    )
    assert success, message
    return first + await siblings(engine)


async def handed_over(engine):
    """Requests whose prompts another server has prefilled: SGLang's fake transfer of their KV."""
    return await asyncio.gather(
        *(
            generate(
                engine, SYSTEM + tokens(i, 5), 16,
                bootstrap_host="2.2.2.2", bootstrap_port=1, bootstrap_room=i,
            )
            for i in range(4)
        )
    )  # fmt: skip


async def _log_probabilities(engine, begun=None):
    """Those of one request's tokens, as bits; `begun` is set when some have come back."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=4 * SYSTEM + tokens(160, 20),
        sampling_params={"temperature": 0, "max_new_tokens": 70, "ignore_eos": True},
        return_logprob=True,
        stream=True,
    )
    found = []
    async for chunk in engine.tokenizer_manager.generate_request(request, None):
        found = chunk["meta_info"]["output_token_logprobs"]
        if begun and len(chunk["output_ids"]) >= 4:
            begun.set()
    return _bits(found)


async def by_itself(engine):
    """One request's log-probabilities, alone."""
    return await _log_probabilities(engine)


async def beside_siblings(engine):
    """The same beside some that share its prompt and one that shares none, which come and go."""
    begun = asyncio.Event()
    siblings = (
        after(begun, generate(engine, 4 * SYSTEM + tokens(161 + i, 5 + 9 * i), 20 + i))
        for i in range(10)
    )
    one, *_ = await asyncio.gather(
        _log_probabilities(engine, begun), *siblings,
        after(begun, generate(engine, tokens(180, 33), 30)),
    )  # fmt: skip
    return one


async def scored(engine):
    """Bits of log-probabilities: of a prompt and of what follows it, of both as one prompt, and of
    the end of that behind a cached prefix; how much of it was cached."""
    prompt = 4 * SYSTEM + tokens(160, 20)
    first = await _scored(engine, prompt, 24, start=0)
    generated = [token for _, token, *_ in first["output_token_logprobs"]]
    whole = await _scored(engine, prompt + generated, 4, start=0)
    behind = await _scored(engine, prompt + generated, 4, start=len(prompt) - 7)
    asked, scored_again, end = (x["input_token_logprobs"] for x in (first, whole, behind))
    return {
        "prompt": _bits(asked[1:]),
        "prompt_again": _bits(scored_again[1 : len(prompt)]),
        "generated": _bits(first["output_token_logprobs"]),
        "generated_again": _bits(scored_again[len(prompt) :]),
        "end": _bits(scored_again[len(prompt) - 6 :]),
        "end_behind": _bits(end[1:]),
        "follows": [_bits(x["output_token_logprobs"]) for x in (whole, behind)],
        "cached": [x["cached_tokens"] for x in (first, whole, behind)],
    }


async def scored_beside_siblings(engine):
    """The same while others that share its prompt, in part, come and go."""
    siblings = (
        generate(engine, (4 - i % 3) * SYSTEM + tokens(161 + i, 3 + 11 * i), 4 + 5 * i)
        for i in range(9)
    )
    found, *_ = await asyncio.gather(scored(engine), *siblings)
    return found


async def _scored(engine, ids, new_tokens, start):
    """What SGLang says of one greedy request: log-probabilities from position `start` on."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=start,
    )
    async for answer in engine.tokenizer_manager.generate_request(request, None):
        found = answer["meta_info"]
    return found


def _bits(logprobs) -> list[str]:
    return [float(value).hex() for value, *_ in logprobs]


def rollouts(engine):
    """Those of eval/examples in two companies: texts of the first, and what differs."""
    from eval.examples import rollouts as example

    prompts = example.prompts_of(6, 150, range(260, 1000))
    one, other = (
        example.sample(engine, prompts, sent, samples=3, new_tokens=12)
        for sent in example.companies(5, 1)
    )
    texts = [[token for _, token in rollout.steps] for rollout in one.values()]
    return {"texts": texts, "differences": example.differences(one, other)}
