"""The `sgl-prefix-attn` command."""
