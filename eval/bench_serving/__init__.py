"""`python -m eval.bench_serving`: SGLang's own client against a server of each backend."""
