"""Demo, benchmarks and accuracy runs. Not part of the wheel."""
