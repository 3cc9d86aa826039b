"""Agent programs in SGLang's frontend language: one file each, to be copied.

    from eval.examples import tool_agents

    program, batch = tool_agents.programs(64)
    program.run_batch(batch, backend=sgl.RuntimeEndpoint("http://127.0.0.1:30000"))

`rollouts` is no such program but a command, which says for itself what it is for.

`programs` makes up the texts, from a seed, out of words such as w123; every size is an argument.
One that ends in `_tokens` counts words, which are tokens of bench_agents' tokenizer alone. What a
program shares while it decodes stands at its head.
"""
