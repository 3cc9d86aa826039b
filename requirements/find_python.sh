#!/bin/sh
# Prints the interpreter that .venv is made with: the first of these that runs, is 3.10 to 3.12 and
# can make virtual environments.
for name in ${PYTHON:-python3.12 python3.11 python3.10 python3}; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
        >/dev/null 2>&1; then
        command -v "$name"
        exit 0
    fi
done
echo "error: no Python 3.10, 3.11 or 3.12 with the venv module found (tried ${PYTHON:-python3.12," \
    "python3.11, python3.10, python3}); install one, or name it: make PYTHON=/path/to/python" >&2
exit 1
