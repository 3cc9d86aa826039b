"""`python -m eval.demo`: an agent workload on a real SGLang server, with the plugin and without."""
