"""Time per output token of a whole SGLang engine, backend against backend."""
