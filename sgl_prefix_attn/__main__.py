"""`python -m sgl_prefix_attn`: the `sgl-prefix-attn` command where no script of it is on PATH."""

import sys

from sgl_prefix_attn.tools.main import main

sys.exit(main())
