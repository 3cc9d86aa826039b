"""The seams with SGLang: entry point, attention backend, graph variants, ranks."""
