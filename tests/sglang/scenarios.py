"""Request patterns on a running engine; each returns the output token ids of its requests.

Joins are triggered by tokens that have come back, not by time, so every backend sees one pattern.
"""

import asyncio
import random

SYSTEM = [random.Random(7).randrange(260, 1000) for _ in range(96)]


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(260, 1000) for _ in range(count)]


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


async def siblings(engine):
    """Four requests under one prompt that is already cached, decoding together."""
    await generate(engine, SYSTEM, 2)
    return await together(generate(engine, SYSTEM + tokens(70 + i, 6 + i), 24) for i in range(4))


async def repeated(engine):
    """The siblings twice: what they say the second time, n-grams of the first time foretell."""
    return await siblings(engine) + await siblings(engine)


async def crowd(engine):
    """Six requests under one prompt that is already cached: more than a small graph holds."""
    await generate(engine, SYSTEM, 2)
    return await together(generate(engine, SYSTEM + tokens(80 + i, 6 + i), 16) for i in range(6))


async def adapters(engine):
    """Requests of two LoRA adapters and of none: KV is shared under the same adapter only."""
    ids = SYSTEM + tokens(100, 4)
    paths = ["adapter", "adapter", None, None]
    for path in ("adapter", None):
        await generate(engine, SYSTEM, 2, lora_path=path)
    return await asyncio.gather(
        *(generate(engine, ids + tokens(i, 3 + i), 16, lora_path=p) for i, p in enumerate(paths))
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
