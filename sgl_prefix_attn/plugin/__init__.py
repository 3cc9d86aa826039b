"""What SGLang loads: entry point, hooks and the releases that they were written for."""
