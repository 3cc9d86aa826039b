"""Exit statuses of the commands, besides 0."""

FAILED = 1
USAGE = 2  # arguments, or a file, that cannot be used
INTERRUPTED = 130
