"""The library API, without SGLang."""
