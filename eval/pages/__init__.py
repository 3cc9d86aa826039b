"""The tables of the pages, each from result files."""
